"""A whole run, and the constraints between keys of its sections."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml
from pydantic import PrivateAttr, model_validator

from vescale_ray.config.credentials import holds_credentials
from vescale_ray.config.data_section import DataSection
from vescale_ray.config.given import Given
from vescale_ray.config.mistakes import shown
from vescale_ray.config.model_section import ModelSection
from vescale_ray.config.rank_grid import RankGrid, grid_of
from vescale_ray.config.sections import (
    CheckpointSection,
    ConfigError,
    ElasticSection,
    MetricsSection,
    RaySection,
    RunSection,
    Section,
    TrainSection,
)
from vescale_ray.lasting import misread


class RunConfig(Section):
    """A whole run. It is frozen; :func:`load_config` or ``model_copy(update=..)`` makes a changed copy."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    elastic: ElasticSection = ElasticSection()
    checkpoint: CheckpointSection = CheckpointSection()
    ray: RaySection = RaySection()
    metrics: MetricsSection = MetricsSection()
    _given: Given = PrivateAttr(default=Given())

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        for problem in _misfits(self):
            raise ConfigError(problem)
        return self

    @property
    def given(self) -> Given:
        """Objects in place of a model factory and of data files. They are no part of the YAML."""
        return self._given

    def with_given(self, given: Given) -> RunConfig:
        """Return a copy that holds these objects."""
        copied = self.model_copy()
        copied._given = given
        return copied

    @property
    def run_folder(self) -> Path:
        """``run.dir/run.name``, absolute, with ``~`` expanded."""
        return Path(self.run.dir).expanduser().absolute() / self.run.name

    @property
    def checkpoint_root(self) -> str:
        """``checkpoint.dir``, an absolute path or a URL (``s3://bucket/prefix``), or ``checkpoints`` in the run's folder."""
        given = self.checkpoint.dir
        if given and "://" in given:
            return given
        return str(Path(given).expanduser().absolute() if given else self.run_folder / "checkpoints")

    @property
    def max_workers(self) -> int:
        """``elastic.max_workers``, or as many as the slots, ``train.sharding`` and ``train.expert_parallel`` allow."""
        sharding, most = self.train.sharding, self.elastic.max_workers or self.train.slots
        if sharding is not None and sharding.replicas is not None:
            most = min(most, sharding.shard_group * sharding.replicas)
        return self.whole(most)

    def grid(self, workers: int) -> RankGrid:
        """Return the arrangement of at most ``workers`` workers in replicas and shards."""
        return grid_of(self.train.sharding, self.train.expert_parallel, workers)

    def whole(self, workers: int) -> int:
        """Return how many of ``workers`` workers can train together: they form whole replicas, or whole groups that share the experts."""
        return self.grid(workers).size

    @property
    def step_of_workers(self) -> tuple[str, int]:
        """The key that sets in which steps the number of workers changes, and the step."""
        if self.train.sharding is not None:
            return "train.sharding.shard_group", self.train.sharding.shard_group
        return "train.expert_parallel", self.train.expert_parallel

    @property
    def resources_per_worker(self) -> dict[str, float]:
        """Resources that each worker takes from a node, by Ray's names, without zero amounts."""
        wanted = {"CPU": self.ray.cpus_per_worker, "GPU": self.ray.gpus_per_worker}
        return {name: amount for name, amount in wanted.items() if amount > 0}

    @property
    def watches_room(self) -> bool:
        """True if the run uses capacity that it has not requested: it grows by itself, or keeps spares."""
        return self.elastic.grow or self.elastic.spares > 0

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step, at any world size."""
        return self.train.slots * self.train.slot_batch

    @property
    def tokens_per_step(self) -> int:
        """Tokens predicted per optimizer step."""
        return self.global_batch * self.data.seq_len

    def to_yaml(self) -> str:
        """Return the resolved configuration as YAML; :func:`load_config` reads it back to an equal value."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=120)


_BY_THE_CUT = {
    "fused": "its kernel rounds the last elements of a shard differently, so their bits depend on the end of the shard",
    "normuon": "its norm is a sum over the workers' parts of a matrix, so its bits depend on the cut",
}
"""Optimizer options whose results depend, in the last bit, on how the parameters are sharded."""


def _wrong_paths(c: RunConfig) -> Iterator[str]:
    """Yield an error for each path that can't be used. Credentials come first, because other errors would show the value."""
    paths = [("checkpoint.dir", c.checkpoint.dir), ("run.dir", c.run.dir), ("ray.address", c.ray.address), ("model.hf", c.model.hf)]
    for key, given in [*paths, *c.data.corpora, ("data.tokenizer", c.data.tokenizer)]:
        if holds_credentials(given or ""):
            remedy = (
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use a profile or role" if key == "checkpoint.dir" else "leave them out"
            )
            yield f"{key}: credentials do not belong in a URL, which is written to the run's folder, manifests and logs; {remedy}"
        elif "\0" in (given or ""):
            yield f"{key} = {given!r}: it has a character that no path can have; leave it out"
        elif (wrong := misread(given or "")) is not None:
            yield f"{key} = {given}: {wrong}"
    if (c.checkpoint.dir or "").startswith("memory://"):
        yield (
            f"checkpoint.dir = {c.checkpoint.dir}: each process has its own memory, so no process could read what another writes; "
            "give a folder, or a store that all processes reach"
        )


def _misfits(c: RunConfig) -> Iterator[str]:
    """Yield an error for each combination of values that don't match; it names the keys, their values and the remedy."""
    yield from _wrong_paths(c)
    yield from _misfits_of_sharding(c)
    if c.ray.gpus_per_worker > 1 and c.ray.gpus_per_worker % 1:
        yield f"ray.gpus_per_worker = {c.ray.gpus_per_worker:g}: above 1 Ray takes whole GPUs only; give a whole number, or less than 1"
    workers, fewest, most, slots = c.elastic.workers, c.elastic.min_workers, c.max_workers, c.train.slots
    if workers > slots:
        yield (
            f"elastic.workers = {workers} is more than train.slots = {slots}: a worker without a slot has nothing to train on; "
            f"raise train.slots or lower elastic.workers"
        )
    if most > slots:
        yield f"elastic.max_workers = {most} is more than train.slots = {slots}: raise train.slots or lower elastic.max_workers"
    if workers > most:
        yield f"elastic.workers = {workers} is more than elastic.max_workers = {most}: raise the one or lower the other"
    if fewest > workers:
        yield f"elastic.min_workers = {fewest} is more than elastic.workers = {workers}: raise elastic.workers or lower elastic.min_workers"
    if c.elastic.standby > most:
        key = "elastic.max_workers" if c.elastic.max_workers else "train.slots"
        yield f"elastic.standby = {c.elastic.standby} is more than {key} = {most}: no node loses so many workers; lower elastic.standby"
    if c.elastic.deterministic:
        for option, why in _BY_THE_CUT.items():
            value = c.train.optimizer_options.get(option)
            if value is not None and value is not False:
                both = f"elastic.deterministic = true with train.optimizer_options.{option} = {shown(value)}"
                yield f"{both}: {why}, which changes with the number of workers; leave one of the two out"
    if c.elastic.demand and not c.elastic.grow:
        yield f"elastic.demand = {c.elastic.demand} with elastic.grow = false: requested capacity would not be used; set elastic.grow=true"
    if c.watches_room and not c.resources_per_worker:
        key = "elastic.grow = true" if c.elastic.grow else f"elastic.spares = {c.elastic.spares}"
        yield f"{key} with ray.cpus_per_worker = 0 and ray.gpus_per_worker = 0: the run can't find free capacity; set one of them"
    yield from _model_misfits(c)
    yield from _misfits_of_training(c)
    if c.checkpoint.auto_min_s > c.checkpoint.auto_max_s:
        low, high = c.checkpoint.auto_min_s, c.checkpoint.auto_max_s
        yield f"checkpoint.auto_min_s = {low:g} is more than checkpoint.auto_max_s = {high:g}: lower the one or raise the other"
    known = ["loss", "heldout_loss", *(f"{name}_loss" for name in c.data.eval)]
    if c.checkpoint.keep_metric not in known:
        yield f"checkpoint.keep_metric = {shown(c.checkpoint.keep_metric)}: give one of {', '.join(known)}"
    yield from _losses_that_never_come(c)
    if c.train.device == "cuda" and c.ray.gpus_per_worker == 0:
        yield "train.device = cuda with ray.gpus_per_worker = 0: workers would see no GPU; set ray.gpus_per_worker=1"


def _misfits_of_sharding(c: RunConfig) -> Iterator[str]:
    """Yield an error for each number of workers that the keys of ``train`` can't arrange, and for options that exclude them."""
    if c.train.offload == "cpu" and c.train.device == "cpu":
        yield "train.offload = cpu with train.device = cpu: the shards are in host memory anyway; leave one of the two out"
    yield from _misfits_of_experts(c)
    (name, group), most = c.step_of_workers, None if c.train.sharding is None else c.train.sharding.replicas
    key = f"{name} = {group}"
    numbers = {"workers": c.elastic.workers, "min_workers": c.elastic.min_workers, "max_workers": c.elastic.max_workers}
    for which, count in numbers.items():
        if count is not None and c.whole(count) != count:
            yield f"elastic.{which} = {count} is not a multiple of {key}: give {c.whole(count)} or {c.whole(count) + group}"
    if c.elastic.workers < group:
        yield f"elastic.workers = {c.elastic.workers} is fewer than {key}: raise elastic.workers or lower {name}"
    if most is not None and c.elastic.workers > group * most:
        yield (
            f"elastic.workers = {c.elastic.workers} is more than {key} times train.sharding.replicas = {most}: lower elastic.workers or "
            "raise train.sharding.replicas"
        )
    if c.elastic.deterministic and c.train.sharding is not None:
        yield (
            f"elastic.deterministic = true with {key}: gradients of replicas are not added up in the order of the slots; leave one of the "
            "two out"
        )


def _misfits_of_experts(c: RunConfig) -> Iterator[str]:
    """Yield an error for each option that excludes ``train.expert_parallel``. Whether the number divides the experts is checked with the
    model."""
    key = f"train.expert_parallel = {c.train.expert_parallel}"
    if c.train.expert_parallel == 1:
        return
    if c.train.sharding is not None and (group := c.train.sharding.shard_group) % c.train.expert_parallel:
        yield f"{key} does not divide train.sharding.shard_group = {group}: choose a divisor of it, or another shard_group"
    if c.elastic.deterministic:
        yield (
            f"elastic.deterministic = true with {key}: an expert's gradient is a sum over the rows of several workers, in no order of the "
            "slots; leave one of the two out"
        )
    if c.train.compile and c.train.activation_checkpointing == "selective":
        yield (
            f"train.compile = true with {key} and train.activation_checkpointing = selective: the exchange of rows breaks the graph, and "
            "pieces of it can't keep single results; set train.activation_checkpointing to full or none, or leave train.compile out"
        )
    if c.model.factory is None and c.model.hf is None:
        yield f"{key} with model.kind = {c.model.kind}: it has no experts; set model.factory or model.hf, or leave {key.split()[0]} out"


def _model_misfits(c: RunConfig) -> Iterator[str]:
    if c.model.hf and c.model.factory:
        yield f"model.hf = {c.model.hf} with model.factory = {c.model.factory}: leave one of the two out"
    if c.model.lora and not c.model.hf:
        yield "model.lora without model.hf: adapters need the weights of a folder; set model.hf"
    if c.model.args and not c.model.factory:
        yield f"model.args = {shown(c.model.args)} without model.factory: only a factory has arguments; leave it out"
    if c.model.factory is None and c.model.hf is None:
        dim, heads, kv_heads = c.model.dim, c.model.heads, c.model.kv_heads
        if dim % heads:
            yield f"model.heads = {heads} does not divide model.dim = {dim}: choose a multiple of model.heads as model.dim"
        elif (dim // heads) % 2:
            yield f"model.dim = {dim} over model.heads = {heads} gives heads of {dim // heads} elements: rotation needs an even number"
        if heads % kv_heads:
            yield f"model.kv_heads = {kv_heads} does not divide model.heads = {heads}: choose a divisor of model.heads"


def _losses_that_never_come(c: RunConfig) -> Iterator[str]:
    """Yield an error for each rule that depends on the loss of evaluations, if the run makes no evaluations."""
    rules = {} if c.train.early_stop is None else {"train.early_stop": c.train.early_stop.metric}
    if c.checkpoint.keep_best and c.checkpoint.keep_metric != "loss":
        rules["checkpoint.keep_best"] = c.checkpoint.keep_metric
    for rule, metric in rules.items():
        needed: dict[str, float] = {"train.eval_every": c.train.eval_every} if rule == "train.early_stop" else {}
        needed |= {"data.eval_samples": c.data.eval_samples, **({"data.heldout": c.data.heldout} if metric == "heldout_loss" else {})}
        for key, value in needed.items():
            if not value:
                yield f"{rule} with {key} = 0: there is no {shown(metric)} to go by; raise {key}"


def _misfits_of_training(c: RunConfig) -> Iterator[str]:
    """Yield the errors of ``train``: schedule, early stop and profile."""
    train, decay = c.train, c.train.decay_steps
    if decay is not None and train.schedule != "wsd":
        yield f"train.decay_steps = {decay} with train.schedule = {train.schedule}: only wsd has a final decay; leave one of the two out"
    elif decay is not None and train.warmup_steps + decay > train.steps:
        yield (
            f"train.warmup_steps = {train.warmup_steps} and train.decay_steps = {decay} are more than train.steps = {train.steps}: "
            "lower one of the two, or raise train.steps"
        )
    if train.quantize_keep is not None and train.quantize is None:
        yield "train.quantize_keep is set, but train.quantize is null: set train.quantize to fp8, or leave both out"
    if train.reduce_dtype == "fp8" and c.elastic.deterministic:
        yield "train.reduce_dtype = fp8 with elastic.deterministic = true: FP8 sums depend on the number of workers; choose float32"
    if train.quantize_products and train.quantize is None:
        yield "train.quantize_products is true, but train.quantize is null: set train.quantize to fp8, or leave both out"
    if train.early_stop is not None:
        metric, known = train.early_stop.metric, ["heldout_loss", *(f"{name}_loss" for name in c.data.eval)]
        if metric not in known:
            yield f"train.early_stop.metric = {shown(metric)}: give one of {', '.join(known)}"
    if (window := train.profile) is not None:
        if window.last > train.steps:
            last = f"train.profile = {{step: {window.step}, steps: {window.steps}}} ends after train.steps = {train.steps}"
            yield f"{last}: lower train.profile.step or train.profile.steps"
        if not window.ranks:
            yield "train.profile.ranks = []: give at least one rank, for example [0]"
        elif max(window.ranks) >= c.max_workers:
            yield f"train.profile.ranks = {window.ranks}: there are at most {c.max_workers} workers, so give ranks below {c.max_workers}"
