"""The sections of a run's configuration: every key with its type, bounds, default and meaning."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from vescale_ray.errors import BadInput

VOCAB = 256
"""Number of token ids where tokens are bytes."""


class ConfigError(BadInput):
    """A key or value of the configuration can't be used; the message is one line that names both and the remedy."""


Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
PositiveOrZero = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_as_number(cls, value: Any, info: Any) -> Any:
        # YAML reads yes/on/true as a boolean, and Python would accept it as the number 1.
        annotation = cls.model_fields[info.field_name].annotation
        if any(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in get_args(annotation)):
            return value
        if isinstance(value, bool) and annotation is not bool and get_origin(annotation) is not Literal:
            raise ValueError("give a value of its own type, not a boolean")
        return value


class RunSection(Section):
    """Identity of the run. A run is identified by its name: the same name in the same folder resumes the same run."""

    name: str = Field(default="demo", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$", description="name of the run and of its folder")
    dir: str = Field(default="runs", min_length=1, description="folder of the run folders; on a cluster an absolute path that nodes share")
    seed: CountOrZero = Field(default=0, description="seeds the initial parameters and the order of the samples")


class ProfileWindow(Section):
    """Steps to profile."""

    step: Count = Field(description="first profiled step, counted from 1 as in metrics.jsonl")
    steps: Count = Field(default=3, description="number of profiled steps; a trace of a large model takes tens of MB a step")
    ranks: list[CountOrZero] = Field(default=[0], description="profiled ranks")

    @property
    def last(self) -> int:
        """The last profiled step."""
        return self.step + self.steps - 1


class CompletionSettings(Section):
    """Prompts to complete at intervals."""

    every: Count = Field(description="steps between completions; the last step has one, too")
    prompts: list[Annotated[str, Field(min_length=1)]] = Field(
        min_length=1, max_length=64, description="texts to complete, at most 64; quote each in an override: ['Once upon a time']"
    )
    tokens: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=64, description="tokens of each completion; each takes a forward of the whole model. The model sees the last data.seq_len"
    )
    temperature: PositiveOrZero = Field(default=0.0, description="0: the most likely token; else tokens are drawn, the same for each seed")


class EarlyStop(Section):
    """Rule for a stop before the last step."""

    patience: Count = Field(description="number of evaluations in a row without a better loss after which the run stops")
    metric: str = Field(default="heldout_loss", description="the loss: heldout_loss, or that of a set of data.eval, for example wiki_loss")
    min_delta: PositiveOrZero = Field(default=0.0, description="nats per token by which a loss must be lower to count as better")


class ShardingSettings(Section):
    """Shard groups and replicas (HSDP)."""

    shard_group: Count = Field(
        description="number of workers that share one copy of the state. The number of workers that train is a multiple of it; if fewer "
        "workers are left, they all form one shard group"
    )
    replicas: int | None = Field(default=None, ge=1, description="largest number of replicas; null: as many as there are workers for")


def _fp8_format(value: Any) -> Any:
    if value is None or (isinstance(value, str) and re.fullmatch(r"fp8( [1-9]\d{0,4}x[1-9]\d{0,4})?( power_of_two)?", value)):
        return value
    raise ValueError("give fp8, a tile as fp8 32x32, scales as fp8 32x32 power_of_two, or null")


class TrainSection(Section):
    """Optimization. The global batch is slots * slot_batch sequences, for any number of workers."""

    steps: Count = Field(default=200, description="optimizer steps of the whole run")
    slots: Count = Field(default=6, description="logical data-parallel positions, spread over the present workers")
    slot_batch: Count = Field(default=2, description="sequences per slot and step")
    optimizer: Literal["adamw", "adamw8bit", "muon", "shampoo", "soap", "sgd"] = Field(
        default="adamw",
        description="optimizer; muon, shampoo and soap step matrices, adamw the rest beside them. On accelerators adamw steps in torch's "
        "fused kernel, unless optimizer_options choose foreach or elastic.deterministic is set",
    )
    optimizer_options: dict[str, Any] = Field(
        default={}, description="further arguments of the optimizer, as its docstring names them: {nesterov: false}"
    )
    lr: Positive = Field(default=1e-3, description="highest learning rate")
    matrix_lr: float | None = Field(
        default=None, gt=0, description="highest learning rate of the parameters that adamw8bit, muon, shampoo or soap steps; null: lr"
    )
    warmup_steps: CountOrZero = Field(default=20, description="steps of linear warm-up")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        default="cosine",
        description="learning rate after the warm-up. cosine, linear: decay until the last step; constant: lr; wsd: lr, and a decay in the "
        "last decay_steps",
    )
    decay_steps: int | None = Field(default=None, ge=1, description="steps of the final decay of wsd; null: a tenth of steps")
    decay_type: Literal["linear", "cosine", "sqrt"] = Field(
        default="linear", description="form of the final decay of wsd; sqrt: 1 minus the root of its progress"
    )
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1, description="last learning rate, as a fraction of lr; not with constant")
    weight_decay: PositiveOrZero = Field(default=0.1, description="decoupled weight decay of all parameters but no_decay")
    no_decay: list[str] = Field(
        default=[], description="patterns of names of parameters without weight decay, for example [`*.bias`, `*norm*`]"
    )
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.95), description="betas of AdamW"
    )
    eps: Positive = Field(default=1e-8, description="eps of AdamW")
    grad_clip: PositiveOrZero = Field(default=1.0, description="largest norm of the gradient; 0 turns clipping off")
    param_dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="dtype of compute and of the all-gather")
    quantize: Annotated[str | None, BeforeValidator(_fp8_format)] = Field(
        default=None,
        description="format in which matrices and experts are gathered, with a scale for each tile: `fp8` (tiles of 128x128), `fp8 32x32`, "
        "`fp8 32x32 power_of_two`; null: param_dtype. Embeddings, heads and norms are gathered in param_dtype",
    )
    quantize_keep: list[str] | None = Field(
        default=None,
        description="patterns of names of parameters that quantize leaves alone; null: routers and adapters, by `*router*`, `*.gate.*`, "
        "`*_expert_gate.*`, `*.lora_A.*`, `*.lora_B.*`",
    )
    quantize_products: bool = Field(
        default=False,
        description="compute linear layers of quantized weights in FP8, forward and backward. Hopper GPUs take tiles of 128x128, "
        "Blackwell GPUs also 32x32, with power_of_two; the CPU emulates it",
    )
    reduce_dtype: Literal["float32", "bfloat16", "fp8"] = Field(
        default="float32",
        description="dtype of the gradients' reduce-scatter; fp8: ranks send e4m3 codes with a scale per 128 elements, rounded "
        "stochastically, and add up in FP32",
    )
    reduce_staging_mb: int | None = Field(
        default=None,
        ge=1,
        description="MB of each of the two buffers in which an accelerator casts gradients from param_dtype to reduce_dtype, chunk by "
        "chunk; null: a sixth of a unit's gradients, 64 to 512. Smaller buffers save memory and take more time",
    )
    zero_stage: Literal[1, 2, 3] = Field(
        default=3,
        description="what the workers shard: 3 parameters, gradients and optimizer states; 2 gradients and optimizer states; 1 optimizer "
        "states. With 2 and 1, each worker keeps all parameters in param_dtype, gathered once per step",
    )
    reshard_after_forward: bool = Field(default=True, description="free the full parameters between forward and backward")
    sharding: ShardingSettings | None = Field(
        default=None, description="shard groups with replicas (HSDP): {shard_group: 64}; null: all workers are one shard group"
    )
    expert_parallel: Count = Field(
        default=1,
        description="workers that share the experts of each layer: each holds a part of the experts and computes all rows routed to these. "
        "The number must divide the number of experts, the number of workers and shard_group. 1: each worker gathers all experts",
    )
    offload: Literal["none", "cpu"] = Field(
        default="none",
        description="cpu: shards, gradients and the optimizer stay in host memory, and the accelerator holds the gathered units only",
    )
    keep_cast: bool = Field(
        default=False,
        description="keep each worker's shard in param_dtype, and on the accelerator with offload: cast once per step and not for each "
        "all-gather. `vescale-ray plan` says whether that pays",
    )
    activation_checkpointing: Literal["none", "full", "selective"] = Field(
        default="none",
        description="what backward recomputes of each unit. full: all activations; selective: all but the results of matrix products and "
        "attention",
    )
    compile: bool = Field(
        default=False,
        description="compile each unit with torch.compile, in each worker before it joins. A unit that breaks the graph gives a warning "
        "and is compiled in pieces. Units around experts that workers share are compiled in pieces, too. Evaluations run uncompiled",
    )
    eval_every: CountOrZero = Field(default=0, description="steps between evaluations; 0: before the first step and after the last")
    completions: CompletionSettings | None = Field(
        default=None,
        description="show how the model continues some texts, in events.jsonl and the loggers: "
        "`{every: 100, prompts: [Once upon a time], tokens: 64, temperature: 0}`. It does not change the training",
    )
    early_stop: EarlyStop | None = Field(default=None, description="stop, with a checkpoint, if the loss of an evaluation no longer falls")
    profile: ProfileWindow | None = Field(
        default=None, description="write a Chrome trace of a few steps, and a memory snapshot on CUDA, to `profiles` in the run's folder"
    )
    threads: Count = Field(default=1, description="CPU threads per worker")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda if the worker has a GPU")


def _seconds_or_auto(value: Any) -> Any:
    # One check for both types, so that a mistake gives one line.
    if value == "auto":
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ValueError("give seconds, at least 0, or auto")
    return float(value)


class ElasticSection(Section):
    """Number of workers, and the reactions to its changes."""

    workers: Count = Field(default=3, description="workers to start with")
    min_workers: Count = Field(default=1, description="fewest workers that train; below it the run fails")
    max_workers: int | None = Field(default=None, ge=1, description="largest number of workers; null: as many as slots")
    snapshot_every: CountOrZero = Field(default=1, description="steps between copies of each shard in another worker's memory; 0: none")
    start_timeout_s: Positive = Field(
        default=180.0,
        description="seconds for workers to be placed and warmed up, including compilation with train.compile. It holds at the start (the "
        "run then continues with the workers that are ready), for joiners and spares, and for a replacement without which the run cannot "
        "train. If nodes must be started for the workers, they get more time",
    )
    collective_timeout_s: Positive = Field(default=30.0, description="seconds after which an unfinished collective counts as failed")
    hang_timeout_s: Annotated[float | Literal["auto"], BeforeValidator(_seconds_or_auto)] = Field(
        default="auto",
        description="seconds without progress after which a worker counts as hung and is killed, if all others wait for it. auto: the "
        "largest of 1.8 times the longest of the last steps, 1.1 times the third longest of the last 128 steps, and 1.2 s. 0: never; only "
        "collective_timeout_s ends a wait (or an hour, while parameters and states are filled in)",
    )
    max_recoveries_without_progress: Count = Field(
        default=3, description="recoveries from errors, killed processes and hangs in a row without one more step before the run fails"
    )
    max_node_losses_without_progress: Count = Field(
        default=20,
        description="losses of nodes (pre-emptions included) in a row without one more step before the run fails; they do not count as "
        "recoveries",
    )
    max_controller_restarts_without_progress: Count = Field(
        default=20, description="restarts of the controller in a row without one more step before the run fails"
    )
    max_errors: int | None = Field(default=None, ge=0, description="errors of workers before the run fails, with or without progress")
    max_kills: int | None = Field(
        default=None, ge=0, description="workers whose process ended or was killed, before the run fails, with or without progress"
    )
    max_hangs: int | None = Field(default=None, ge=0, description="hangs of workers before the run fails, with or without progress")
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
    grow_gap_s: PositiveOrZero = Field(default=60.0, description="shortest time between two growths, in seconds")
    demand: CountOrZero = Field(
        default=0,
        description="with grow: number of workers for which places are requested from Ray's autoscaler at a time, up to the limit of grow; "
        "0: use only free capacity",
    )
    spares: CountOrZero = Field(
        default=0, description="warm workers that do not train, if there is capacity; each replaces a lost worker at once"
    )
    standby: CountOrZero = Field(
        default=0,
        description="processes per node of the run that have imported everything and hold no CPU of Ray's, no GPU and no GPU memory; with "
        "replace_lost, one takes a lost worker's place at once",
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


class CheckpointSection(Section):
    """Checkpoints. The newest are kept, and also one for every keep_every steps, the best keep_best, and all pinned ones."""

    dir: str | None = Field(
        default=None,
        min_length=1,
        description="folder or URL (`s3://bucket/prefix`) of the checkpoints; null: `checkpoints` in the run's folder",
    )
    every: Annotated[int | Literal["auto"], BeforeValidator(_steps_or_auto)] = Field(
        default=100, description="steps between checkpoints; 0: only after the last step; auto: from their cost and the rate of failures"
    )
    auto_min_s: Positive = Field(default=30.0, description="every = auto: shortest time between checkpoints, in seconds")
    auto_max_s: Positive = Field(default=3600.0, description="every = auto: longest time between checkpoints, in seconds")
    mtbf_hours: Positive = Field(
        default=24.0, description="every = auto: expected hours between failures; observed failures outweigh it with time"
    )
    last_timeout_s: Positive = Field(
        default=600.0,
        description="seconds for the checkpoint after the last step or at a stop; the run fails if it takes longer. Give at least twice "
        "the time of a checkpoint, because the checkpoint before it may still be in progress",
    )
    keep_last: Count = Field(default=2, description="number of newest checkpoints to keep")
    keep_every: CountOrZero = Field(
        default=0, description="also keep one checkpoint per so many steps: the first at or after each multiple; 0: off"
    )
    keep_best: CountOrZero = Field(default=0, description="number of checkpoints with the best keep_metric that are kept, too; 0: off")
    keep_metric: str = Field(
        default="loss",
        description="metric of keep_best: `loss`, the training loss of the step; `heldout_loss`, the newest held-out loss; or `NAME_loss`, "
        "the newest loss of the set NAME of `data.eval`",
    )
    keep_mode: Literal["min", "max"] = Field(default="min", description="whether a small or a large metric is better")
    keep_verified: bool = Field(default=True, description="a checkpoint counts only after all of it was read back and verified")
    resume: Literal["auto", "never", "must"] = Field(
        default="auto",
        description="auto: start from the newest checkpoint if there is one; never: start anew; must: fail if there is no checkpoint",
    )


class RaySection(Section):
    """The Ray cluster."""

    address: str | None = Field(
        default=None, min_length=1, description="a Ray cluster's address; null: RAY_ADDRESS if set, else start a local cluster"
    )
    num_cpus: int | None = Field(default=None, ge=1, description="CPUs of the local cluster; null: as many as the workers request")
    object_store_mb: Annotated[int, Field(ge=75)] = Field(default=100, description="MB of the local object store (Ray's minimum: 75)")
    cpus_per_worker: PositiveOrZero = Field(default=1.0, description="CPUs that each worker requests from Ray")
    gpus_per_worker: PositiveOrZero = Field(default=0.0, description="GPUs that each worker requests from Ray")


class WandbConfig(Section):
    """A run of Weights & Biases."""

    project: str = Field(min_length=1, description="project of Weights & Biases")
    mode: Literal["offline", "online"] = Field(
        default="offline", description="offline: files in the run's folder, for `wandb sync`; online: sent at once"
    )
    entity: str | None = Field(default=None, min_length=1, description="user or team; null: your default entity")
    name: str | None = Field(default=None, min_length=1, description="shown name; null: run.name")


class MetricsSection(Section):
    """Metrics server, progress lines and loggers. Every run writes metrics.jsonl."""

    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="address of the controller's /metrics, /status, /stop and /rescale; 0.0.0.0: reachable from other machines, too",
    )
    port: int = Field(default=0, ge=0, le=65535, description="port of the metrics server; 0: any free port (see run.json)")
    interval_s: Positive = Field(default=1.0, description="seconds between progress lines")
    peak_flops: float | None = Field(
        default=None,
        gt=0,
        description="peak floating-point operations per second of a worker's device in train.param_dtype, for the model FLOPs "
        "utilisation; null: the data sheet's for an A100, H100, H200 or B200, else no utilisation is reported",
    )
    tensorboard: bool = Field(
        default=False, description="write TensorBoard's event files (needs the extra `tensorboard`) to `tensorboard` in the run's folder"
    )
    wandb: WandbConfig | None = Field(default=None, description="log to Weights & Biases, too (needs the extra `wandb`)")
