"""Collection of the parameters that a ``fully_shard`` call takes from the model. It changes nothing."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence

from torch import nn

from vescale_ray.errors import noted
from vescale_ray.fsdp.construction.arguments import Arguments, check_block, check_parameter, has_hooks
from vescale_ray.fsdp.construction.data_parallel import DataParallelRanks, parallel_of, placed
from vescale_ray.fsdp.construction.quantized import form_of
from vescale_ray.fsdp.layouts.group_parameter import REPLACED, OriginalParameter, Owner
from vescale_ray.geometry import Block


def collect(
    roots: Sequence[nn.Module], managed: Collection[nn.Module], given: Arguments, ranks: DataParallelRanks
) -> list[OriginalParameter]:
    """Return the parameters of the ``managed`` modules below ``roots``, each with the ranks that shard it and the options that the user
    gave for it.

    Args:
        ranks: the data-parallel ranks of parameters for which the user names no mesh.

    Raises:
        ValueError: a parameter can't be sharded, or not with the options that the user gave.
    """
    owners: dict[nn.Parameter, tuple[str, list[Owner]]] = {}
    for fqn, module, attribute, param in _held(roots, managed):
        if param in given.ignored_params:
            continue
        check_parameter(fqn, module, attribute, param)
        where = owners.setdefault(param, (fqn, []))[1]
        if all(ref() is not module or attr != attribute for ref, attr in where):
            where.append((weakref.ref(module), attribute))
    on_meta = [fqn for param, (fqn, _) in owners.items() if param.is_meta]
    if on_meta and len(on_meta) < len(owners):
        real = next(fqn for param, (fqn, _) in owners.items() if not param.is_meta)
        raise ValueError(
            f"parameter {on_meta[0]!r} is on the meta device but {real!r} is not: materialize the first, or "
            f"build all of the module on the meta device"
        )
    return [_original(fqn, param, tuple(where), given, ranks) for param, (fqn, where) in owners.items()]


def _held(roots: Sequence[nn.Module], managed: Collection[nn.Module]) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield name, module, attribute and parameter, for every place in which a managed module holds a parameter."""
    for position, root in enumerate(roots):
        prefix = f"{position}." if len(roots) > 1 else ""
        for name, module in root.named_modules(remove_duplicate=False):
            if module in managed:
                for attribute, param in module._parameters.items():
                    if param is not None:
                        yield f"{prefix}{name}.{attribute}" if name else f"{prefix}{attribute}", module, attribute, param


def _original(fqn: str, param: nn.Parameter, owners: tuple[Owner, ...], given: Arguments, ranks: DataParallelRanks) -> OriginalParameter:
    shard_dim, data = placed(fqn, param, given, ranks)
    parallel = parallel_of(fqn, param, data)
    block, may = None, given.allow_gaps
    if given.block_policy is not None:
        with noted(f"block_policy raised this for parameter {fqn!r}; fully_shard changed nothing"):
            block = given.block_policy(fqn, param)
    check_block(fqn, block)
    with noted(f"allow_gaps raised this for parameter {fqn!r}; fully_shard changed nothing"):
        gaps = param.dim() >= 3 and bool(may(fqn, param) if callable(may) else may)
    uneven = parallel is not None and not parallel.even
    if uneven and shard_dim is None:
        shard_dim = 0
    if block is not None and shard_dim is not None:
        why = "its uneven tensor parallelism" if uneven else "shard_placement_fn"
        raise ValueError(f"{fqn!r} has Shard({shard_dim}) from {why} and {block} from block_policy: give it one of them")
    hooked, tied = has_hooks(fqn, param, block, shard_dim), bool(param.__dict__.get(REPLACED))
    form = form_of(fqn, param, given.quantize_policy, parallel, shard_dim, hooked=hooked)
    cut = Block.rows(1) if block is None else block.joined(Block.rows(1))
    if form is not None:
        block, gaps = form.block if block is None else block.joined(form.block), False
    return OriginalParameter(fqn, param, owners, data.mesh, block, parallel, gaps, form, cut, 0 if hooked else shard_dim, hooked, tied)
