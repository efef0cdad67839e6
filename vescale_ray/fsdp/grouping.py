"""Division of a unit's parameters into groups, each with one buffer, one all-gather and one reduce-scatter."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale_ray.fsdp.division import Chunks, Cuts, Division
from vescale_ray.fsdp.mixed_precision import dtypes
from vescale_ray.fsdp.parameters import OriginalParameter
from vescale_ray.planner import Bundle, TensorSpec, plan_layout


def plan_groups(
    sources: Sequence[OriginalParameter], rank: int, world: int, policy: MixedPrecisionPolicy
) -> list[tuple[list[OriginalParameter], Division]]:
    """Divide parameters of one dtype and one ``requires_grad`` into groups: one, or several if that saves much padding.

    A stack of matrices gets gaps behind them if it may and if they save padding. Parameters with a ``Shard`` dimension form a
    separate group.

    Raises:
        ValueError: a block does not fit its parameter, or a dimension does not exist.
        NotImplementedError: the ranks can't divide a dimension evenly.
    """
    orig = sources[0].param.dtype
    narrowest = min((orig, *dtypes(orig, policy)), key=lambda d: d.itemsize)
    by_name = {source.name: source for source in sources}
    free = [s for s in sources if s.shard_dim is None]
    specs = tuple(TensorSpec(s.name, s.shape, s.block, narrowest) for s in free)
    bundle = Bundle(specs, frozenset(s.name for s in free if s.gaps))
    divisions: list[Division] = [Cuts(layout, rank, bundle) for layout in bundle.layouts(world)]
    dims = {s.name: s.shard_dim for s in sources if s.shard_dim is not None}
    if dims:
        whole = plan_layout([TensorSpec(name, by_name[name].shape, None, narrowest) for name in dims], 1, order="given")
        divisions.append(Chunks(whole, dims, rank, world))
    return [([by_name[spec.name] for spec in division.layout.specs], division) for division in divisions]
