"""Checks of the FP8 formats that ``quantize_policy`` gives to parameters."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import Shard

from vescale_ray.errors import BadArgument, noted
from vescale_ray.fsdp.construction.arguments import QuantizePolicy
from vescale_ray.fsdp.layouts.group_parameter import Parallel, local_of
from vescale_ray.quantization import Fp8Block
from vescale_ray.quantization.fp8 import check_weight, form_given


def form_of(
    fqn: str, param: nn.Parameter, policy: QuantizePolicy | None, parallel: Parallel | None, shard_dim: int | None, *, hooked: bool
) -> Fp8Block | None:
    """Return the FP8 format of a parameter; None: it is gathered in the compute dtype.

    Raises:
        TypeError: the policy returns something else.
        ValueError: the parameter has no tiles, is gathered by its own tensor class, or has a ``Shard`` placement; or tensor or expert
            parallelism cuts it inside a tile.
    """
    if policy is None:
        return None
    with noted(f"quantize_policy raised this for parameter {fqn!r}; fully_shard changed nothing"):
        given: Any = policy(fqn, param)
    form = form_given("quantize_policy", fqn, given)
    if form is None:
        return None
    try:
        check_weight(fqn, param.shape, param.dtype)
    except ValueError as error:
        raise BadArgument(f"quantize_policy gave {form} for a parameter without tiles: {error}; return None for it") from None
    if hooked:
        raise BadArgument(f"{fqn!r} has all-gather hooks of its own, and quantize_policy gave {form}: return None for it")
    if parallel is not None:
        _check_parallel(fqn, parallel, tuple(local_of(param).shape), form)
    if shard_dim is not None:
        raise BadArgument(f"{fqn!r} has Shard({shard_dim}) from shard_placement_fn and {form} from quantize_policy: give it one of them")
    return form


def _check_parallel(fqn: str, parallel: Parallel, local: tuple[int, ...], form: Fp8Block) -> None:
    """Raise BadArgument unless tensor or expert parallelism cuts between tiles, so that the tiles of a part are tiles of the whole."""
    shape, placements = tuple(parallel.spec.shape), parallel.model_placements
    steps = (1, form.rows, form.columns)[-len(shape) :]
    cut = [p.dim % len(shape) for p in placements if type(p) is Shard]
    known = len(cut) == sum(not p.is_replicate() for p in placements)
    if not (known and parallel.even and all(local[dim] % steps[dim] == 0 for dim in cut)):
        raise BadArgument(
            f"{fqn!r} of shape {shape} is cut by {placements} into parts of {local}, which is not between tiles of {form.rows} x "
            f"{form.columns}: return a tile that divides the parts, or None"
        )
