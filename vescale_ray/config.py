"""Configuration of a run: one YAML file, with dotted overrides for single keys. Every mistake is one line with the remedy.

``load_config(path, overrides)`` returns a frozen :class:`RunConfig`. The error for a mistyped key suggests the nearest known key. The
error for a bad value shows the key, the value and the bound. Sizes that don't match each other (workers, slots, heads) are errors
here, before anything starts. ``RunConfig.to_yaml()`` is the resolved form that the run's folder and each checkpoint keep.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, Union, get_args
from urllib.parse import parse_qsl, urlsplit

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from vescale_ray.errors import BadInput
from vescale_ray.lasting import misread

VOCAB = 256
"""Number of tokens; tokens are bytes."""


class ConfigError(BadInput):
    """A key or value of the configuration can't be used; the message is one line that names both and the remedy."""


Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
PositiveOrZero = Annotated[float, Field(ge=0)]

_OF_BUCKETS = ("s3", "s3a", "gs", "gcs")
"""Schemes of URLs whose first part is a bucket, not a host."""
_SECRET = re.compile(r"(?i)key|token|secret|passw|pwd|credential|bearer|^auth|^sig$|signature")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_as_number(cls, value: Any, info: Any) -> Any:
        # YAML reads yes/on/true as a boolean, and Python would accept it as the number 1.
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError("give a value of its own type, not a boolean")
        return value


class RunSection(_Section):
    """Identity of the run. A run is identified by its name: the same name in the same folder resumes the same run."""

    name: str = Field(default="demo", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$", description="name of the run and of its folder")
    dir: str = Field(default="runs", min_length=1, description="folder of the run folders; on a cluster an absolute path that nodes share")
    seed: CountOrZero = Field(default=0, description="seeds the initial parameters and the order of the samples")


class ModelSection(_Section):
    """The model to train."""

    kind: Literal["llama"] = Field(default="llama", description="architecture that comes with the package")
    dim: Count = Field(default=128, description="width of the residual stream")
    layers: Count = Field(default=4, description="number of transformer blocks")
    heads: Count = Field(default=4, description="query heads; must divide dim")
    kv_heads: Count = Field(default=2, description="key/value heads; must divide heads")
    ffn: Count = Field(default=384, description="width of the SwiGLU hidden layer")
    rope_theta: Positive = Field(default=10000.0, description="base of the rotary frequencies")
    tie: bool = Field(default=False, description="share the embedding with the output head")
    factory: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
        description="`pkg.mod:fn` that returns a module with forward(tokens) and init_parameter (see your-model.md); replaces `kind`",
    )
    units: list[str] = Field(default=["layers.*"], description="patterns of module names; each match becomes one fully_shard unit")


class DataSection(_Section):
    """The training text."""

    corpus: str = Field(
        default="stdlib", min_length=1, description="`stdlib` (this Python's library sources), or a path of a file or folder"
    )
    seq_len: Count = Field(default=128, description="bytes that one sample predicts")
    heldout: float = Field(default=0.05, ge=0, le=0.9, description="fraction of the files that is kept for evaluation, chosen by file hash")
    eval_samples: CountOrZero = Field(default=64, description="held-out samples per evaluation; 0 turns evaluation off")


class TrainSection(_Section):
    """Optimization. The global batch is slots * slot_batch sequences, for any number of workers."""

    steps: Count = Field(default=200, description="optimizer steps of the whole run")
    slots: Count = Field(default=6, description="logical data-parallel positions, spread over the present workers")
    slot_batch: Count = Field(default=2, description="sequences per slot and step")
    optimizer: Literal["adamw", "adamw8bit", "muon", "shampoo", "soap", "sgd"] = Field(
        default="adamw", description="optimizer; muon, shampoo and soap step matrices, adamw the rest beside them"
    )
    optimizer_options: dict[str, Any] = Field(
        default={}, description="further arguments of the optimizer, as its docstring names them: {nesterov: false}"
    )
    lr: Positive = Field(default=1e-3, description="highest learning rate")
    matrix_lr: float | None = Field(
        default=None, gt=0, description="highest learning rate of parameters that another optimizer than adamw and sgd steps; null: lr"
    )
    warmup_steps: CountOrZero = Field(default=20, description="steps of linear warm-up")
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1, description="last learning rate, as a fraction of lr (cosine decay)")
    weight_decay: PositiveOrZero = Field(default=0.1, description="decoupled weight decay")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.95), description="betas of AdamW"
    )
    eps: Positive = Field(default=1e-8, description="eps of AdamW")
    grad_clip: PositiveOrZero = Field(default=1.0, description="largest norm of the gradient; 0 turns clipping off")
    param_dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="dtype of compute and of the all-gather")
    reduce_dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="dtype of the gradients' reduce-scatter")
    reshard_after_forward: bool = Field(default=True, description="free the full parameters between forward and backward")
    activation_checkpointing: bool = Field(default=False, description="recompute the units' activations in backward")
    eval_every: CountOrZero = Field(default=0, description="steps between evaluations; 0: before the first step and after the last")
    threads: Count = Field(default=1, description="CPU threads per worker")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda if the worker has a GPU")


def _seconds_or_auto(value: Any) -> Any:
    # One check for both types, so that a mistake gives one line.
    if value == "auto":
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ValueError("give seconds, at least 0, or auto")
    return float(value)


class ElasticSection(_Section):
    """Number of workers, and the reactions to its changes."""

    workers: Count = Field(default=3, description="workers to start with")
    min_workers: Count = Field(default=1, description="fewest workers that train; below it the run fails")
    max_workers: int | None = Field(default=None, ge=1, description="most workers; null: as many as slots")
    snapshot_every: CountOrZero = Field(default=1, description="steps between copies of each shard in another worker's memory; 0: none")
    start_timeout_s: Positive = Field(
        default=180.0,
        description="seconds for workers to be placed and warmed up: at the start (the run then continues with those that are ready), for "
        "joiners and spares, and for a replacement without which the run can't train; more if nodes must be started for them",
    )
    collective_timeout_s: Positive = Field(default=30.0, description="seconds after which an unfinished collective counts as failed")
    hang_timeout_s: Annotated[float | Literal["auto"], BeforeValidator(_seconds_or_auto)] = Field(
        default="auto",
        description="seconds without progress after which the worker that all others wait for counts as hung and is killed; "
        "auto: 1.8 times the longest of the last steps, 1.1 times the third longest of the last 128, at least 1.2; 0: never, only "
        "collective_timeout_s counts (and an hour while values are filled in)",
    )
    max_recoveries_without_progress: Count = Field(
        default=3, description="recoveries from errors, killed processes and hangs in a row without one more step before the run fails"
    )
    max_node_losses_without_progress: Count = Field(
        default=20, description="the same limit for losses of nodes, pre-emptions included; they do not count as recoveries above"
    )
    max_controller_restarts_without_progress: Count = Field(default=20, description="the same limit for restarts of the controller")
    max_errors: int | None = Field(default=None, ge=0, description="errors of workers before the run fails, with or without progress")
    max_kills: int | None = Field(default=None, ge=0, description="the same limit for workers whose process ended or was killed")
    max_hangs: int | None = Field(default=None, ge=0, description="the same limit for hangs")
    replace_lost: bool = Field(default=False, description="start a new worker as soon as one is lost")
    straggler: Literal["report", "relieve", "replace"] = Field(
        default="report",
        description="reaction to a worker that stays slower than the others. report: only report it; relieve: give it fewer slots, if that "
        "should shorten the step by a tenth; replace: dismiss it once another worker is warm. On accelerators slowness is not measured",
    )
    grow: bool = Field(
        default=False,
        description="add workers if the cluster has free capacity, up to max_workers or the number of the last rescale command; "
        "also after a loss",
    )
    grow_after_s: PositiveOrZero = Field(default=10.0, description="seconds for which capacity must have been free without a break")
    grow_gap_s: PositiveOrZero = Field(default=60.0, description="least seconds between two growths")
    demand: CountOrZero = Field(
        default=0,
        description="with grow: workers' places to request from Ray's autoscaler at a time, until the run has its most workers; "
        "0: use only free capacity",
    )
    spares: CountOrZero = Field(
        default=0, description="warm workers beside the training ones, if there is capacity; one replaces a lost worker at once"
    )
    deterministic: bool = Field(
        default=False, description="the same bits at any number of workers and through every rescale; gradients are reduced slot by slot"
    )


def _steps_or_auto(value: Any) -> Any:
    # One check for both types, so that a mistake gives one line and not one for each type.
    if value == "auto":
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("give a whole number, or auto")
    if value < 0:
        raise ValueError("give at least 0, or auto")
    return value


class CheckpointSection(_Section):
    """Checkpoints. The newest are kept, and also one for every keep_every steps, the best keep_best, and all pinned ones."""

    dir: str | None = Field(
        default=None,
        min_length=1,
        description="folder or URL (`s3://bucket/prefix`) of the checkpoints; null: `checkpoints` in the run's folder",
    )
    every: Annotated[int | Literal["auto"], BeforeValidator(_steps_or_auto)] = Field(
        default=100, description="steps between checkpoints; 0: only after the last step; auto: from their cost and the rate of failures"
    )
    auto_min_s: Positive = Field(default=30.0, description="every = auto: least seconds between checkpoints")
    auto_max_s: Positive = Field(default=3600.0, description="every = auto: most seconds between checkpoints")
    mtbf_hours: Positive = Field(
        default=24.0, description="every = auto: expected hours between failures; observed failures outweigh it with time"
    )
    last_timeout_s: Positive = Field(
        default=600.0,
        description="seconds for the checkpoint after the last step, or of a stop; give at least twice the time of one, since "
        "the one before may still be in progress. After that the run has FAILED",
    )
    keep_last: Count = Field(default=2, description="number of newest checkpoints to keep")
    keep_every: CountOrZero = Field(default=0, description="number of steps for each of which one checkpoint is kept, too; 0: off")
    keep_best: CountOrZero = Field(default=0, description="number of checkpoints with the best keep_metric that are kept, too; 0: off")
    keep_metric: Literal["loss", "heldout_loss"] = Field(
        default="loss", description="metric of keep_best: the training loss of the step, or the newest held-out loss"
    )
    keep_mode: Literal["min", "max"] = Field(default="min", description="whether a small or a large metric is better")
    keep_verified: bool = Field(default=True, description="a checkpoint counts only after all of it was read back and verified")
    resume: Literal["auto", "never", "must"] = Field(
        default="auto", description="start from the newest checkpoint: if there is one, never, or fail if there is none"
    )


class RaySection(_Section):
    """The Ray cluster."""

    address: str | None = Field(
        default=None, min_length=1, description="a Ray cluster's address; null: RAY_ADDRESS if set, else start a local cluster"
    )
    num_cpus: int | None = Field(default=None, ge=1, description="CPUs of the local cluster; null: as many as the workers request")
    object_store_mb: Annotated[int, Field(ge=75)] = Field(default=100, description="MB of the local object store (Ray's minimum: 75)")
    cpus_per_worker: PositiveOrZero = Field(default=1.0, description="CPUs that each worker requests from Ray")
    gpus_per_worker: PositiveOrZero = Field(default=0.0, description="GPUs that each worker requests from Ray")


class MetricsSection(_Section):
    """Metrics server and progress lines."""

    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="address of the controller's /metrics, /status, /stop and /rescale; 0.0.0.0: reachable from other machines, too",
    )
    port: int = Field(default=0, ge=0, le=65535, description="its port; 0: any free one (see run.json)")
    interval_s: Positive = Field(default=1.0, description="seconds between progress lines")
    peak_flops: float | None = Field(
        default=None,
        gt=0,
        description="peak floating-point operations per second of a worker's device in train.param_dtype, for the model FLOPs "
        "utilisation; null: the data sheet's for an A100, H100, H200 or B200, else no utilisation is reported",
    )


class RunConfig(_Section):
    """A whole run. It is frozen; :func:`load_config` or ``model_copy(update=..)`` makes a changed copy."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    elastic: ElasticSection = ElasticSection()
    checkpoint: CheckpointSection = CheckpointSection()
    ray: RaySection = RaySection()
    metrics: MetricsSection = MetricsSection()

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        for problem in _misfits(self):
            raise ConfigError(problem)
        return self

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
        """``elastic.max_workers``, or the number of slots."""
        return self.elastic.max_workers or self.train.slots

    @property
    def resources_per_worker(self) -> dict[str, float]:
        """Resources that each worker takes from a node, by Ray's names, without zero amounts."""
        wanted = {"CPU": self.ray.cpus_per_worker, "GPU": self.ray.gpus_per_worker}
        return {name: amount for name, amount in wanted.items() if amount > 0}

    @property
    def watches_room(self) -> bool:
        """Whether the run uses capacity that it has not requested: it grows by itself, or keeps spares."""
        return self.elastic.grow or self.elastic.spares > 0

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step, at any world size."""
        return self.train.slots * self.train.slot_batch

    @property
    def tokens_per_step(self) -> int:
        """Bytes predicted per optimizer step."""
        return self.global_batch * self.data.seq_len

    def to_yaml(self) -> str:
        """Return the resolved configuration as YAML; :func:`load_config` reads it back to an equal value."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=120)


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read ``path`` (None: all defaults), then apply ``overrides`` of the form ``section.key=value`` (the value is YAML) in order.

    Raises:
        ConfigError: a file, key or value can't be used; one line for the first one.
    """
    return _override({} if path is None else _read(Path(path)), overrides)


def read_config(text: str, where: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration from ``text``; ``where`` names its source in errors."""
    return _override(_tree(text, where), overrides)


def _override(tree: dict[str, Any], overrides: Sequence[str]) -> RunConfig:
    known = dict(_keys())
    _check_keys(tree, known)
    for text in overrides:
        _apply(tree, text, known)
    return parse_config(tree)


def parse_config(tree: Mapping[str, Any]) -> RunConfig:
    """Check a plain nested mapping (as from YAML or JSON) and build the :class:`RunConfig`."""
    _check_keys(tree, dict(_keys()))
    try:
        return RunConfig.model_validate({name: keys for name, keys in tree.items() if keys is not None})
    except ValidationError as error:
        raise ConfigError("; ".join(_describe(one) for one in error.errors(include_url=False))) from None


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield each section's name and model, in the order of the file."""
    for name, field in RunConfig.model_fields.items():
        assert isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        yield name, field.annotation


def _keys() -> Iterator[tuple[str, FieldInfo]]:
    for name, section in sections():
        for key, field in section.model_fields.items():
            yield f"{name}.{key}", field


# ---------------------------------------------------------------------------------------------------------------- reading


class _UniqueKeys(yaml.SafeLoader):
    """YAML loader that refuses a key given twice, because PyYAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
            if isinstance(key, (str, int, float, bool)) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            if isinstance(key, (str, int, float, bool)):
                seen.add(key)
        return super().construct_mapping(node, deep)


def _load_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_UniqueKeys)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where}{line}: not valid YAML: {' '.join(str(error.problem or error.context).split())}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the path of a run's YAML file (`vescale-ray demo` needs none)") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; give the path of a run's YAML file, for example {path / 'config.yaml'}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not text; give the path of a run's YAML file") from None
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from None
    return _tree(text, str(path))


def _tree(text: str, path: str) -> dict[str, Any]:
    tree = _load_yaml(text, path)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds a {type(tree).__name__}; a run's file holds sections, for example `train: {{steps: 100}}`")
    return tree


def _apply(tree: dict[str, Any], text: str, known: Mapping[str, FieldInfo]) -> None:
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"override {text!r}: write section.key=value, for example train.steps=100")
    value = _text(raw) if key in known and _is_text(known[key]) else _load_yaml(raw, f"override {text!r}")
    path = key.split(".")
    if len(path) == 1 and isinstance(value, dict):
        addition: dict[str, Any] = {key: value}
    elif key in known:
        addition = {path[0]: {path[1]: value}}
    elif len(path) == 1 and any(other.startswith(f"{key}.") for other in known):
        addition = {key: value if value is not None else "null"}  # a section needs keys; the check below gives the error
    else:
        raise ConfigError(_unknown(key, known))
    _check_keys(addition, known)
    for name, keys in addition.items():
        tree[name] = {**(tree.get(name) or {}), **keys}


def _is_text(field: FieldInfo) -> bool:
    """Return whether a key takes only text (or null)."""
    return field.annotation is str or set(get_args(field.annotation)) == {str, NoneType}


def _text(raw: str) -> str | None:
    """Return the value of a key that takes text: run.name=2026, metrics.host=:: and ray.address=[::1]:6379 stay text, unlike in YAML."""
    try:
        value = _load_yaml(raw, "")
    except ConfigError:
        return raw.strip()
    return value if value is None or isinstance(value, str) else raw.strip()


def _check_keys(tree: Mapping[str, Any], known: Mapping[str, FieldInfo]) -> None:
    names = {name for name, _ in sections()}
    for name, keys in tree.items():
        if name not in names:
            first = next(iter(keys), None) if isinstance(keys, dict) else None
            raise ConfigError(_unknown(str(name) if first is None else f"{name}.{first}", known))
        if keys is None:
            continue
        if not isinstance(keys, dict):
            example = next(key for key in known if key.startswith(f"{name}."))
            raise ConfigError(f"{name} = {_show(keys)}: {name} is a section; set its keys, for example {example}")
        for key in keys:
            if f"{name}.{key}" not in known:
                raise ConfigError(_unknown(f"{name}.{key}", known))


def _unknown(key: str, known: Mapping[str, FieldInfo]) -> str:
    """Return one line for an unknown key, with the nearest known one: by its last word here or elsewhere, or as a whole."""
    section, _, leaf = key.rpartition(".")
    siblings = [other for other in known if other.startswith(f"{section}.")]
    elsewhere = [other for other in known if other.rpartition(".")[2] == leaf]
    near_leaf = difflib.get_close_matches(leaf, [other.rpartition(".")[2] for other in siblings], n=1, cutoff=0.6)
    if near_leaf:
        return f"unknown key {key}: did you mean {section}.{near_leaf[0]}?"
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.75)
    if elsewhere:
        # `trian.steps` means train.steps and not another section's key of the same name.
        near = [max(elsewhere, key=lambda other: difflib.SequenceMatcher(None, other, key).ratio())]
    if not near:
        leaves = {other.rpartition(".")[2]: other for other in known}
        near = [leaves[word] for word in difflib.get_close_matches(leaf, list(leaves), n=1, cutoff=0.7)]
    if near:
        return f"unknown key {key}: did you mean {near[0]}?"
    if siblings:
        return f"unknown key {key}: {section} has {', '.join(other.rpartition('.')[2] for other in siblings)}"
    return f"unknown key {key}: the sections are {', '.join(name for name, _ in sections())}"


# --------------------------------------------------------------------------------------------------------------- checking


_BY_THE_CUT = {
    "fused": "its kernel rounds the last elements of a shard differently, so their bits depend on the end of the shard",
    "normuon": "its norm is a sum over the workers' parts of a matrix, so its bits depend on the cut",
}
"""Optimizer options whose results depend, in the last bit, on how the parameters are sharded."""


def _misfits(c: RunConfig) -> Iterator[str]:
    """Yield an error for each combination of values that don't match; it names the keys, their values and the remedy."""
    paths = {"checkpoint.dir": c.checkpoint.dir, "run.dir": c.run.dir, "data.corpus": c.data.corpus, "ray.address": c.ray.address}
    for key, given in paths.items():
        if holds_credentials(given or ""):  # checked first, because the value must not be shown
            remedy = (
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use a profile or role" if key == "checkpoint.dir" else "leave them out"
            )
            yield f"{key}: credentials do not belong in a URL, which is written to the run's folder, manifests and logs; {remedy}"
        elif (wrong := misread(given or "")) is not None:
            yield f"{key} = {given}: {wrong}"
    if (c.checkpoint.dir or "").startswith("memory://"):
        yield (
            f"checkpoint.dir = {c.checkpoint.dir}: each process has its own memory, so no process could read what another writes; "
            "give a folder, or a store that all processes reach"
        )
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
    if c.elastic.deterministic:
        for option, why in _BY_THE_CUT.items():
            value = c.train.optimizer_options.get(option)
            if value is not None and value is not False:
                both = f"elastic.deterministic = true with train.optimizer_options.{option} = {_show(value)}"
                yield f"{both}: {why}, which changes with the number of workers; leave one of the two out"
    if c.elastic.demand and not c.elastic.grow:
        yield f"elastic.demand = {c.elastic.demand} with elastic.grow = false: requested capacity would not be used; set elastic.grow=true"
    if c.watches_room and not c.resources_per_worker:
        key = "elastic.grow = true" if c.elastic.grow else f"elastic.spares = {c.elastic.spares}"
        yield f"{key} with ray.cpus_per_worker = 0 and ray.gpus_per_worker = 0: the run can't find free capacity; set one of them"
    if c.model.factory is None:
        dim, heads, kv_heads = c.model.dim, c.model.heads, c.model.kv_heads
        if dim % heads:
            yield f"model.heads = {heads} does not divide model.dim = {dim}: choose a multiple of model.heads as model.dim"
        elif (dim // heads) % 2:
            yield f"model.dim = {dim} over model.heads = {heads} gives heads of {dim // heads} elements: rotation needs an even number"
        if heads % kv_heads:
            yield f"model.kv_heads = {kv_heads} does not divide model.heads = {heads}: choose a divisor of model.heads"
    if c.checkpoint.auto_min_s > c.checkpoint.auto_max_s:
        low, high = c.checkpoint.auto_min_s, c.checkpoint.auto_max_s
        yield f"checkpoint.auto_min_s = {low:g} is more than checkpoint.auto_max_s = {high:g}: lower the one or raise the other"
    if not c.model.units:
        yield "model.units = []: give at least one pattern of module names, for example [layers.*]"
    if c.train.device == "cuda" and c.ray.gpus_per_worker == 0:
        yield "train.device = cuda with ray.gpus_per_worker = 0: workers would see no GPU; set ray.gpus_per_worker=1"


def holds_credentials(url: str) -> bool:
    """Return whether a URL holds a password or a key.

    It may stand before the host, in the query, in a URL there, or in one of a chain of fsspec's URLs (``simplecache::s3://..``).
    ``abfs://container@account`` holds none.
    """
    if "::" in url and any(holds_credentials(part) for part in url.split("::") if "://" in part):
        return True
    try:
        parts = urlsplit(url)
        query = parse_qsl(parts.query, keep_blank_values=True)
    except ValueError:
        return False  # opening the URL reports the error
    if not parts.scheme or not parts.netloc:
        return False
    before, at, _ = parts.netloc.rpartition("@")
    if at and (":" in before or parts.scheme in ("s3", "http", "https")):
        return True
    # Many secret keys contain a slash. The part before it is then parsed as the host, and text after a colon as the port. A bucket
    # has no port; an IPv6 host may end with a bracket.
    _, colon, port = parts.netloc.rpartition(":")
    may_be_port = port.endswith("]") or (re.fullmatch("[0-9]{0,5}", port) and parts.scheme not in _OF_BUCKETS)
    if colon and not may_be_port and "@" in parts.path:
        return True
    return any(_SECRET.search(name) or holds_credentials(value) for name, value in query)


def _describe(error: ErrorDetails) -> str:
    """Return one line for one of pydantic's errors."""
    inner = (error.get("ctx") or {}).get("error")
    if isinstance(inner, ConfigError):
        return str(inner)
    key = ".".join(str(part) for part in error["loc"])
    return f"{key} = {_show(error['input'])}: {_remedy(error, inner)}"


def _remedy(error: ErrorDetails, inner: Any) -> str:
    context: Mapping[str, Any] = error.get("ctx") or {}
    match error["type"]:
        case "greater_than_equal":
            return f"give at least {_number(context['ge'])}"
        case "greater_than":
            return f"give more than {_number(context['gt'])}"
        case "less_than_equal":
            return f"give at most {_number(context['le'])}"
        case "less_than":
            return f"give less than {_number(context['lt'])}"
        case "int_parsing" | "int_type" | "int_from_float":
            return "give a whole number"
        case "float_parsing" | "float_type" | "finite_number":
            return "give a finite number"
        case "bool_parsing" | "bool_type":
            return "give true or false"
        case "string_type":
            return "give a text"
        case "string_too_short":
            return "must not be empty"
        case "literal_error":
            return f"give one of {context['expected'].replace(chr(39), '')}"
        case "string_pattern_mismatch" if error["loc"][-1] == "name":
            return "give letters, digits, '.', '_' and '-' (63 at most, a letter or digit first)"
        case "string_pattern_mismatch":
            return "give module and function as pkg.mod:fn"
        case "list_type" | "tuple_type":
            return "give a list in brackets"
        case "dict_type":
            return "give keys and values in braces, for example {nesterov: false}"
        case "missing" | "too_long":
            return "give as many entries as the default has"
        case "value_error":
            return str(inner)
        case _:
            return " ".join(str(error["msg"]).split())


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def _show(value: Any) -> str:
    text = " ".join(str(value).split()) if isinstance(value, str) else repr(value)
    text = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    return text if len(text) <= 60 else text[:57] + "..."


def describe_type(field: FieldInfo) -> str:
    """Return the type of a key in the documentation's words: ``whole number >= 1``, ``adamw | sgd``, .."""
    annotation: Any = field.annotation
    optional = type(None) in get_args(annotation)
    if optional:
        annotation = next(arg for arg in get_args(annotation) if arg is not type(None))
    bounds = [*field.metadata]
    if get_args(annotation) and getattr(annotation, "__metadata__", None):
        bounds += [m for extra in annotation.__metadata__ for m in (extra.metadata if isinstance(extra, FieldInfo) else [extra])]
        annotation = get_args(annotation)[0]
    words: dict[Any, str] = {int: "whole number", float: "number", bool: "true or false", str: "text"}
    origin = getattr(annotation, "__origin__", None)
    if origin is Union:
        return f"{words[get_args(annotation)[0]]} >= 0, or auto"
    text = words.get(annotation) or (
        " | ".join(map(str, get_args(annotation))) if origin is Literal else "keys and values" if origin is dict else "list"
    )
    for symbol, name in ((">=", "ge"), (">", "gt"), ("<=", "le"), ("<", "lt")):
        text += "".join(f" {symbol} {_number(getattr(bound, name))}" for bound in bounds if getattr(bound, name, None) is not None)
    return f"{text}, or null" if optional else text


def reference() -> str:
    """Return docs/reference/configuration.md: every key with its type, default and meaning, from the models above."""
    lines = [
        "# Configuration",
        "",
        "One YAML file describes a run. Missing keys have the defaults below. The command line changes single keys:",
        "",
        "    vescale-ray train run.yaml train.steps=500 elastic.workers=2",
        "",
        "The value after `=` is YAML. An unknown key is an error that names the nearest known one. A value out of bounds is an error, too.",
        "Both end with exit code 2 before anything starts. The run's folder keeps the resolved form as `config.yaml`.",
        "",
        "`python -m vescale_ray.config > docs/reference/configuration.md` generates this page; a test checks that it matches the code.",
    ]
    for name, section in sections():
        lines += [
            "",
            f"## {name}",
            "",
            " ".join((section.__doc__ or "").split()),
            "",
            "| key | type | default | meaning |",
            "|---|---|---|---|",
        ]
        for key, field in section.model_fields.items():
            kind = describe_type(field).replace("|", "\\|")
            default = yaml.safe_dump(_as_yaml(field.default), default_flow_style=True).removesuffix("...\n").strip()
            lines.append(f"| `{name}.{key}` | {kind} | `{default}` | {field.description} |")
    lines += [
        "",
        "## Constraints between keys",
        "",
        "- `elastic.min_workers <= elastic.workers <= elastic.max_workers <= train.slots`",
        "- `elastic.demand` needs `elastic.grow`",
        "- `elastic.grow` and `elastic.spares` need `ray.cpus_per_worker` or `ray.gpus_per_worker` above 0",
        "- `elastic.deterministic` excludes `fused` and `normuon` in `train.optimizer_options`",
        "- `model.heads` divides `model.dim` into heads of an even size; `model.kv_heads` divides `model.heads`",
        "- `train.device = cuda` needs `ray.gpus_per_worker` above 0; above 1 it is a whole number, as Ray requires",
    ]
    return "\n".join(lines) + "\n"


def _as_yaml(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


if __name__ == "__main__":
    print(reference(), end="")
