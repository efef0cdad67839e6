"""Division of a unit's parameters into groups, each with one buffer. The groups' collectives run together, in one call per direction."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale_ray.fsdp.construction.arguments import Arguments
from vescale_ray.fsdp.construction.data_parallel import group_ids
from vescale_ray.fsdp.layouts.code_parts import CodeParts
from vescale_ray.fsdp.layouts.division import Chunks, Cuts, Division
from vescale_ray.fsdp.layouts.group_parameter import GroupPlan, OriginalParameter
from vescale_ray.fsdp.layouts.mixed_precision import dtypes, policy_of
from vescale_ray.fsdp.layouts.phases import Retain
from vescale_ray.fsdp.layouts.sharding import ShardingPlan
from vescale_ray.fsdp.layouts.wire import CodeWire, GroupWire, PlainWire
from vescale_ray.planner import Bundle, TensorSpec, plan_layout
from vescale_ray.planner.unit_plan import CODED_GOAL, GOAL


def plan_groups(parameters: Sequence[OriginalParameter], given: Arguments, axes: ShardingPlan) -> list[GroupPlan]:
    """Divide a unit's parameters into groups.

    Raises:
        ValueError: a block, a mesh or a precision does not fit a parameter, or a dimension does not exist.
        NotImplementedError: the ranks can't divide a dimension evenly.
    """
    kinds: dict[tuple[MixedPrecisionPolicy, Hashable], list[OriginalParameter]] = {}
    for one in parameters:
        summed = 1 if one.parallel is None else one.parallel.summed_over
        alike = (one.param.dtype, one.param.requires_grad, one.hooked, one.form is not None, group_ids(one.mesh), summed)
        kinds.setdefault((policy_of(one.name, one.param, given.mp_policy), alike), []).append(one)
    plans = []
    for (policy, _), sources in kinds.items():
        mesh = sources[0].mesh
        neighbours = axes.neighbours or given.resharding(mesh)[1]
        for members, division in _divided(sources, mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1), policy):
            keeps = given.keep_cast and axes.retain is Retain.NOTHING and mesh.size(mesh.ndim - 1) > 1
            wire = _wire(members, division, mesh.get_local_rank(mesh.ndim - 1), keeps_cast=keeps)
            plans.append(GroupPlan(members, division, wire, mesh, policy, axes.retain, neighbours))
    return plans


def _wire(sources: Sequence[OriginalParameter], division: Division, rank: int, *, keeps_cast: bool) -> GroupWire:
    """Return the form in which a group's parameters are gathered: FP8 codes if they have a format."""
    forms = {source.name: source.form for source in sources if source.form is not None}
    return CodeWire(CodeParts(division.layout, forms), rank) if forms else PlainWire(division, keeps_cast=keeps_cast)


def _divided(
    sources: Sequence[OriginalParameter], rank: int, world: int, policy: MixedPrecisionPolicy
) -> list[tuple[list[OriginalParameter], Division]]:
    """Divide parameters of one kind into groups: one, or several if that saves much padding.

    A stack of matrices gets gaps behind them if it may and if they save padding. Parameters with a ``Shard`` dimension form a
    separate group.

    Raises:
        ValueError: a block does not fit its parameter, or a dimension does not exist.
        NotImplementedError: the ranks can't divide a dimension evenly.
    """
    orig = sources[0].param.dtype
    coded = sources[0].form is not None
    narrowest = torch.float8_e4m3fn if coded else min((orig, *dtypes(orig, policy)), key=lambda d: d.itemsize)
    by_name = {source.name: source for source in sources}
    free = [s for s in sources if s.shard_dim is None]
    specs = tuple(TensorSpec(s.name, s.shape, s.block, narrowest) for s in free)
    cut = tuple(s.cut_block for s in free) if coded else ()
    bundle = Bundle(specs, frozenset(s.name for s in free if s.gaps), CODED_GOAL if coded else GOAL, cut)
    divisions: list[Division] = [Cuts(layout, rank, bundle) for layout in bundle.layouts(world)]
    dims = {s.name: s.shard_dim for s in sources if s.shard_dim is not None}
    if dims:
        whole = plan_layout([TensorSpec(name, by_name[name].shape, None, narrowest) for name in dims], 1, order="given")
        divisions.append(Chunks(whole, dims, rank, world))
    return [([by_name[spec.name] for spec in division.layout.specs], division) for division in divisions]
