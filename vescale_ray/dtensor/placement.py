"""RaggedShard: placement of a tensor whose flat elements are cut unevenly, at unit boundaries, over one mesh dimension.

The semantics are veScale's. The leading ``dims`` of the tensor are merged. Each index of the merged dimension is one unit of
``prod(shape[len(dims):])`` consecutive elements. Rank ``r`` holds ``local_units[r] / sum(local_units)`` of the units:

    RaggedShard((0,), (1, 0, 3)) of a tensor [8, 5]      rank 0: rows 0..1   rank 1: nothing   rank 2: rows 2..7
                                       local shapes              [2, 5]              [0, 5]             [6, 5]
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NoReturn

from torch.distributed.tensor.placement_types import Placement

from vescale_ray.geometry import Shape

_ON_BASE_DTENSOR = (
    "torch's own DTensor can't carry a RaggedShard; use vescale_ray.RaggedDTensor "
    "(RaggedDTensor.from_local, vescale_ray.distribute_tensor, or redistribute on a RaggedDTensor)"
)


def _whole_numbers(what: str, values: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(v) for v in values)
    except TypeError:
        raise ValueError(f"RaggedShard {what} are {values!r}: give a sequence of whole numbers, such as (0,)") from None


class RaggedShard(Placement):
    """Uneven sharding of a prefix of the dimensions; immutable, equal and hashed by ``(dims, local_units)``.

    Args:
        dims: the merged prefix ``(0, .., k-1)``; ``()`` makes the whole tensor one unit.
        local_units: one weight per rank of the mesh dimension, relative (stored divided by their gcd); zero is allowed, but not for
            all.

    Use this placement with :class:`vescale_ray.RaggedDTensor` only; torch's own DTensor raises. ``is_shard()`` is true, so no code
    path of torch takes the placement for Replicate or Partial. The attributes that such a path then needs (``dim``, and the methods
    that cut or join tensors) raise.

    Raises:
        ValueError: dims are not a prefix, a unit is negative, or all units are zero.
    """

    __slots__ = ("_hash", "dims", "local_units")

    dims: tuple[int, ...]
    local_units: tuple[int, ...]
    _hash: int

    def __init__(self, dims: Sequence[int], local_units: Sequence[int]) -> None:
        super().__init__()  # without this call the C++ half is missing, and its first use is a segmentation fault
        dims, units = _whole_numbers("dims", dims), _whole_numbers("local_units", local_units)
        if dims != tuple(range(len(dims))):
            raise ValueError(f"RaggedShard dims are {dims}: they must be a prefix of the dimensions, such as (0,) or (0, 1)")
        if any(u < 0 for u in units):
            raise ValueError(f"RaggedShard local_units are {units}: units can't be negative")
        divisor = math.gcd(*units)
        if divisor == 0:
            raise ValueError(f"RaggedShard local_units are {units}: give one number for each rank, at least one of them above 0")
        units = tuple(u // divisor for u in units)
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "local_units", units)
        object.__setattr__(self, "_hash", hash((RaggedShard, dims, units)))

    @classmethod
    def of_intervals(cls, shape: Sequence[int], counts: Sequence[int]) -> RaggedShard:
        """Return the placement with the fewest dims that gives rank ``r`` the next ``counts[r]`` flat elements of ``shape``."""
        shape, total = tuple(shape), math.prod(shape)
        if sum(counts) != total:
            raise ValueError(f"counts {tuple(counts)} are {sum(counts)} elements, but shape {shape} has {total}")
        if not shape:
            return cls((), counts)
        if not total:
            return cls((0,), (1, *(0 for _ in counts[1:])))
        divisor = math.gcd(*counts)
        for k in range(1, len(shape) + 1):
            if divisor % math.prod(shape[k:]) == 0:
                return cls(tuple(range(k)), counts)
        raise AssertionError("unreachable: with all dims merged a unit is one element")

    @classmethod
    def of_blocks(cls, shape: Sequence[int], block: int, ranks: int, shard_dims: Sequence[int] = ()) -> RaggedShard:
        """Return the most even placement over ``ranks`` that cuts no block of ``block`` consecutive elements.

        Args:
            shape: shape of the tensor, or of its section if other mesh dimensions shard it (equal sections only).
            shard_dims: tensor dimensions that the other mesh dimensions shard. If one is above 0, a cut must also lie at a multiple of that
                dimension's stride, or it would cut through a slice. Cuts then lie at multiples of the least common multiple (the paper's
                rule for Shard(d > 0)).

        Raises:
            ValueError: the block or the number of ranks is below 1.
        """
        shape, total = tuple(shape), math.prod(shape)
        if block < 1 or ranks < 1:
            raise ValueError(f"blocks of {block} elements over {ranks} ranks: both must be at least 1")
        step = math.lcm(block, *(max(1, math.prod(shape[d + 1 :])) for d in shard_dims if d > 0))
        blocks = -(-total // step)
        ends = [min(blocks * (r + 1) // ranks * step, total) for r in range(ranks)]
        return cls.of_intervals(shape, [end - start for start, end in zip([0, *ends], ends, strict=False)])

    # -- geometry: pure functions of the placement and a shape (the part of the tensor that this mesh dimension divides) --

    def units_of(self, shape: Sequence[int]) -> int:
        """Return the number of units in a tensor of ``shape``."""
        return math.prod(shape[: len(self.dims)])

    def intervals(self, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Return the flat elements ``[start, end)`` of each rank, in rank order; together they tile the tensor."""
        return _intervals(self, tuple(shape))

    def interval(self, shape: Sequence[int], rank: int) -> tuple[int, int]:
        """Return the flat elements ``[start, end)`` of the rank at mesh coordinate ``rank``."""
        return _intervals(self, tuple(shape))[rank]

    def local_shape(self, shape: Sequence[int], rank: int) -> Shape:
        """Return the shape of a rank's local tensor: ``(units_here, *shape[len(dims):])``."""
        here = self.units_of(shape) * self.local_units[rank] // sum(self.local_units)
        return (here, *(int(n) for n in shape[len(self.dims) :]))

    def validate(self, shape: Sequence[int], mesh_size: int) -> None:
        """Raise ValueError if the placement does not fit a tensor of ``shape`` on a mesh dimension of ``mesh_size`` ranks."""
        if len(self.local_units) != mesh_size:
            raise ValueError(f"{self!s} has units for {len(self.local_units)} ranks, but the mesh dimension has {mesh_size}")
        if len(self.dims) > len(shape):
            raise ValueError(f"{self!s} merges {len(self.dims)} dims, but shape {tuple(shape)} has only {len(shape)}")
        units, parts = self.units_of(shape), sum(self.local_units)
        if units % parts:
            raise ValueError(
                f"{self!s} shares {parts} equal parts, but shape {tuple(shape)} has {units} units over dims {self.dims}, "
                f"which is not a multiple of {parts}; give units that add up to a divisor of {units}, or more dims"
            )

    # -- value semantics: eq, hash, pickle, repr --

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"RaggedShard is immutable: can't set {name}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"RaggedShard is immutable: can't delete {name}")

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, RaggedShard) and self.local_units == other.local_units and self.dims == other.dims

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[RaggedShard], tuple[tuple[int, ...], tuple[int, ...]]]:
        return RaggedShard, (self.dims, self.local_units)

    def __copy__(self) -> RaggedShard:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedShard:
        return self

    def __repr__(self) -> str:
        return f"RaggedShard(dims={self.dims}, local_units={self.local_units})"

    def __str__(self) -> str:
        return f"RS({self.dims}, {self.local_units})" if len(self.local_units) <= 8 else f"RS({self.dims}, {len(self.local_units)} ranks)"

    def __format__(self, spec: str) -> str:
        """Return the text for errors of torch's functions, which can't use the placement, with the remedy."""
        return f"{self!s} (a RaggedShard: use distribute_tensor or state_dict of vescale_ray, or call stand_in_for_torch() first)"

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        return repr(self), {"RaggedShard": RaggedShard}

    # -- torch's queries on a placement --

    def is_ragged_shard(self) -> bool:
        """Return True. veScale's name for this query."""
        return True

    def is_shard(self, dim: int | None = None) -> bool:
        """Return True without ``dim`` and for each of its dims, since the placement is neither Replicate nor Partial."""
        return dim is None or dim in self.dims

    def is_replicate(self) -> bool:
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return False

    @property
    def dim(self) -> NoReturn:
        """Raise RuntimeError: there is no single sharded dimension. An AttributeError would be hidden by ``getattr(p, "dim", None)``."""
        raise RuntimeError(
            f"{self!s} has no single dim. Code that reads placement.dim needs Shard placements: call "
            f"stand_in_for_torch(plain_shards=True), or give fully_shard the argument shard_placement_fn=lambda param: Shard(0). "
            f"{_ON_BASE_DTENSOR}"
        )

    def _refused(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"can't use {self!s} here. {_ON_BASE_DTENSOR}")

    # torch.distributed.tensor cuts, joins and reduces a Shard by these names.
    _split_tensor = _shard_tensor = _select_split_tensor = _refused
    _to_replicate_tensor = _replicate_to_shard = _reduce_shard_tensor = _to_new_shard_dim = _refused
    _local_shard_size_and_offset = local_shard_size_and_offset = _make_shard_tensor = _refused


@lru_cache(maxsize=65536)
def _intervals(placement: RaggedShard, shape: Shape) -> tuple[tuple[int, int], ...]:
    parts = sum(placement.local_units)
    part = math.prod(shape) // parts  # exact: validate() holds for every placement of a tensor
    result, position = [], 0
    for units in placement.local_units:
        result.append((position, position + units * part))
        position += units * part
    return tuple(result)
