"""Command-line input of ``vescale-ray plan``: words and sizes, turned into a choice of sharding."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from vescale_ray.errors import BadInput
from vescale_ray.geometry import Block
from vescale_ray.planner.choose import Choice, choose_sharding
from vescale_ray.planner.cost import OPTIMIZERS, Policy
from vescale_ray.planner.hardware import HARDWARE, Hardware
from vescale_ray.planner.models.model_shapes import model_shapes
from vescale_ray.planner.unit_plan import Blocks

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
_SUMS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float32}
FP8_TILE = Block.tile(128, 128)
"""The tile of ``--dtype fp8``, as of ``train.quantize: fp8``. Values are BF16 then."""
_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def choose(
    model: str,
    devices: int,
    *,
    hardware: str = "h100",
    memory: str | None = None,
    optimizer: str = "adamw",
    dtype: str = "bf16",
    reduce: str = "fp32",
    groups: Sequence[int] = (),
    staging: str | None = None,
    rows: int | None = None,
    blocks_on: str = "matrices",
    experts: str = "fused",
    strided: bool = False,
    tokens: int = 8192,
    recompute: bool = True,
    keep_cast: bool = False,
    expert_parallel: int = 1,
) -> Choice:
    """Call :func:`vescale_ray.planner.choose.choose_sharding` with command-line values.

    Raises:
        BadInput: a value is unknown or out of range; one line, with the nearest known word.
    """
    machine = machine_of(hardware, memory)
    if rows is not None and rows < 0:
        raise BadInput(f"blocks of {rows} rows: give at least 1, or 0 for whole matrices")
    place: Any = _one_of("blocks-on", blocks_on, ("matrices", "experts"))
    how: Any = _one_of("experts", experts, ("fused", "separate"))
    policy = Policy(
        optimizer=_one_of("optimizer", optimizer, OPTIMIZERS),
        tokens=tokens,
        compute_dtype=_DTYPES[_one_of("dtype", dtype, _DTYPES)],
        reduce_dtype=_SUMS[_one_of("reduce", reduce, _SUMS)],
        fp8_gradients=reduce == "fp8",
        recompute=recompute,
        staging=None if staging is None else size_of(staging, "staging", "256MiB"),
        strided=strided,
        quantize=FP8_TILE if dtype == "fp8" else None,
        keep_cast=keep_cast,
        expert_parallel=expert_parallel,
    )
    if rows is not None:
        policy = replace(policy, blocks=Blocks(rows, place))
    elif place != "matrices":
        policy = replace(policy, blocks=replace(policy.block_options[0], on=place))
    return choose_sharding(model_shapes(model, experts=how), devices, machine, policy, groups=groups or None)


def machine_of(hardware: str, memory: str | None) -> Hardware:
    """Return the device of that name, with another ``memory`` if that is a size.

    Raises:
        BadInput: the name is unknown, or the memory is not a size.
    """
    machine = HARDWARE[_one_of("hardware", hardware, HARDWARE)]
    if memory is None:
        return machine
    size = size_of(memory)
    if size < _SIZES["mi"]:
        raise BadInput(f"memory {memory!r} is {size} bytes: give it as 80GiB")
    return replace(machine, memory=size)


def size_of(text: str, what: str = "memory", example: str = "80GiB") -> int:
    """Return the bytes of a size such as ``80GiB``, ``80G``, ``1.5TB`` or ``1048576``. ``what``: its name in the error.

    Raises:
        BadInput: the text is not a size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text, re.IGNORECASE)
    if not found or found[2].lower() not in _SIZES or float(found[1]) <= 0:
        raise BadInput(f"{what} {text!r} is not a size: give it as {example}")
    return round(float(found[1]) * _SIZES[found[2].lower()])


def _one_of(what: str, value: str, known: Any) -> Any:
    if value in known:
        return value
    near = difflib.get_close_matches(value, list(known), n=1)
    raise BadInput(f"{what} {value!r} is unknown: " + (f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"))
