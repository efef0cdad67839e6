"""The plan of a job file: what its workers hold, for ``vescale-ray plan RUN.yaml`` and ``vescale-ray init``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from vescale_ray.errors import BadInput
from vescale_ray.planner.choose import Choice, choose_sharding
from vescale_ray.planner.cost import OPTIMIZERS, Optimizer, Policy
from vescale_ray.planner.hardware import Hardware
from vescale_ray.planner.models.shapes import from_module
from vescale_ray.planner.unit_plan import Lever
from vescale_ray.quantization import Fp8Block
from vescale_ray.workers.building.model_building import apply_quantization, build_model

if TYPE_CHECKING:
    from vescale_ray.config import RunConfig


def choose_for_job(config: RunConfig, devices: int, hardware: Hardware, *, any_group: bool = False) -> Choice:
    """Return the sharding that a run has on ``devices`` workers, with its memory and an estimate of its time.

    Args:
        any_group: choose the shard group, too, whatever ``train.sharding`` says.

    Raises:
        BadInput: the model can't be built, a run of so many workers does not exist, or the plan can't count a setting; one line.
    """
    grid = config.grid(devices)
    if grid.size != devices:
        key, step = config.step_of_workers
        raise BadInput(f"{devices} devices with {key} = {step}: the run would use {grid.size}; give a multiple of {step}")
    _check_counted(config)
    try:
        model = build_model(config)
        coded = apply_quantization(config, model)
    except ValueError as error:
        raise BadInput(str(error)) from None
    shapes = from_module(model, type(model).__name__, coded and (lambda name, parameter: coded(name, parameter) is not None))
    frozen = next((p.dtype for p in model.parameters() if not p.requires_grad), torch.float32)
    policy = _policy(config, frozen, grid.experts)
    groups = None if any_group else (grid.shards,)
    choice = choose_sharding(shapes, devices, hardware, policy, groups=groups, levers=(Lever(),))
    return replace(choice, notes=(*choice.notes, *_notes(config, policy)))


def _policy(config: RunConfig, frozen: torch.dtype, experts: int) -> Policy:
    """Return the planner's view of the training. ``frozen``: dtype of frozen parameters; ``experts``: ranks that share experts."""
    train = config.train
    form = None if train.quantize is None else Fp8Block.parse(train.quantize)
    policy = Policy(
        optimizer=cast(Optimizer, train.optimizer),
        tokens=train.slot_batch * config.data.seq_len,
        compute_dtype=getattr(torch, train.param_dtype),
        frozen_dtype=frozen,
        reduce_dtype=torch.float32 if train.reduce_dtype == "fp8" else getattr(torch, train.reduce_dtype),
        fp8_gradients=train.reduce_dtype == "fp8",
        recompute=train.activation_checkpointing == "full",
        staging=None if train.reduce_staging_mb is None else train.reduce_staging_mb << 20,
        most_layers=1,
        quantize=None if form is None else form.block,
        scale_bytes=4 if form is None else form.scale_dtype.itemsize,
        keep_cast=train.keep_cast,
        expert_parallel=experts,
    )
    return replace(policy, blocks=policy.block_options[0])


def _check_counted(config: RunConfig) -> None:
    """Raise BadInput for a setting that the plan can't count."""
    train = config.train
    counted = {
        "optimizer": (train.optimizer in OPTIMIZERS, "adamw"),
        "zero_stage": (train.zero_stage == 3, "3"),
        "offload": (train.offload == "none", "none"),
        "reshard_after_forward": (train.reshard_after_forward, "true"),
    }
    for key, (known, other) in counted.items():
        if not known:
            value = str(getattr(train, key)).lower()
            raise BadInput(f"train.{key} = {value}: the plan can't count its memory; give train.{key}={other} to plan a run that has it")


def _notes(config: RunConfig, policy: Policy) -> Iterator[str]:
    train = config.train
    if train.activation_checkpointing == "selective":
        yield "train.activation_checkpointing = selective is counted as none, so activations take less than this"
    if "block" in train.optimizer_options:
        yield f"the block in train.optimizer_options is not counted: blocks are {policy.blocks}"
