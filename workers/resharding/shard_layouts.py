"""Ownership of elements by rank at any world size, computed from shapes alone. Rank assignment for a new generation uses it.

A worker reports once what its engine plans buffers from (:func:`outline_of`): shapes, blocks, and bytes of each tensor's states. None of
that depends on the world size. Therefore the controller can plan any world size with the engine's own arithmetic, without the model's code.
Each world size takes a few milliseconds, in a separate thread while the workers train (:class:`Layouts`).
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import accumulate, product, repeat
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from vescale_ray.geometry import ExpertShares, Shape
from vescale_ray.workers.resharding.rank_assignment import Overlap, even

if TYPE_CHECKING:
    from vescale_ray.planner import Bundle
    from vescale_ray.workers.trainer import Trainer

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

Positions = np.ndarray[tuple[int], np.dtype[np.int64]]

WAIT_S = 0.1
"""Longest wait, in seconds, for a layout that is still being planned, since a rescale is under way then."""


@dataclass(frozen=True)
class Outline:
    """Everything that a model's layouts depend on except the number of ranks. Picklable.

    Attributes:
        bundles: groups of tensors that are planned together, in order.
        weights: for each tensor of each bundle, bytes of the parameter and its sharded optimizer states, over all ranks.
        shared: for each bundle, the most ranks that share its stacks of experts (``train.expert_parallel``). Each of them has equal parts
            of the stacks, which further ranks divide. Empty: no rank shares any.
    """

    bundles: tuple[Bundle, ...]
    weights: tuple[tuple[int, ...], ...]
    shared: tuple[int, ...] = ()


@dataclass(frozen=True)
class Parts:
    """The owner of every element. All tensors are laid end to end, and cut where the owner changes or a tensor begins.

    Attributes:
        starts: first element of each piece, ascending.
        owners: rank that owns each piece.
    """

    starts: Positions
    owners: Positions


def outline_of(trainer: Trainer) -> Outline | None:
    """Return the inputs that ``trainer``'s engine plans from; None if the planner does not cut every tensor (a plain ``Shard``
    placement)."""
    from vescale_ray.expert_parallel import experts_of
    from vescale_ray.fsdp.layouts.division import Cuts
    from vescale_ray.fsdp.units.schedule import unit_of
    from vescale_ray.workers.resharding.shards import collect_sizes

    sizes = collect_sizes((parameter for _, parameter in trainer.parameters), trainer.optimizer)
    units = {id(unit): unit for module in trainer.model.modules() if (unit := unit_of(module)) is not None}
    most = trainer.config.train.expert_parallel
    experts = {id(unit_of(module)) for module in experts_of(trainer.model).values()} if most > 1 else ()
    bundles: dict[int, tuple[Bundle, dict[str, int], int]] = {}
    for key, unit in units.items():
        for group in unit.groups:
            if not isinstance(group.division, Cuts):
                return None
            bundle, ranks = group.division.bundle, most if key in experts else 1
            weights = bundles.setdefault(id(bundle), (bundle, {}, ranks))[1]
            # A tensor that an earlier unit also holds moves with that unit.
            weights.update((param.name, sizes.pop(param.sharded, 0)) for param in group.params)
    # The engine plans one rank's part of a stack of experts.
    stack = ExpertShares.of(trainer.grid.shards, most).shape_of_stack
    return Outline(
        tuple(_with_shapes(bundle, stack) if ranks > 1 else bundle for bundle, _, ranks in bundles.values()),
        tuple(tuple(weights[spec.name] for spec in bundle.specs) for bundle, weights, _ in bundles.values()),
        tuple(ranks for *_, ranks in bundles.values()),
    )


def _with_shapes(bundle: Bundle, shape: Callable[[Shape], Shape]) -> Bundle:
    """Return the bundle with other shapes of its tensors."""
    return replace(bundle, specs=tuple(replace(one, shape=shape(one.shape)) for one in bundle.specs))


def packed(outline: Outline | None) -> bytes | None:
    """Return the outline as bytes, for :meth:`Layouts.take`."""
    return None if outline is None else pickle.dumps(outline)


def parts_of(outline: Outline, world: int) -> Parts:
    """Return the elements that each of ``world`` ranks owns. Pure.

    Raises:
        ValueError: as :func:`vescale_ray.planner.plan_buffers`.
    """
    starts: list[int] = []
    owners: list[int] = []
    base = 0
    for bundle, most in zip(outline.bundles, outline.shared or repeat(1), strict=False):
        shares = ExpertShares.of(world, most)
        own = _with_shapes(bundle, shares.shape_of_part) if shares.parts > 1 else bundle
        layouts = {spec.name: layout for layout in own.layouts(shares.holders) for spec in layout.specs}
        for spec, part in product(own.specs, range(shares.parts)):
            layout = layouts[spec.name]
            for rank in layout.ranks_of(spec.name):
                start, end = layout.tensor_range(spec.name, rank)
                if end > start:
                    starts.append(base + start)
                    owners.append(shares.rank_at(rank, part))
            base += prod(spec.shape)
    return Parts(np.array(starts, dtype=np.int64), np.array(owners, dtype=np.int64))


def overlap(outline: Outline, old: Parts, new: Parts, before: int, after: int) -> Overlap:
    """Return the bytes that each of ``before`` ranks of ``old`` and each of ``after`` ranks of ``new`` both own. Pure.

    States whose shape differs from their parameter's (scales, factors) count as if they were spread over its elements.
    """
    numels = [prod(spec.shape) for bundle in outline.bundles for spec in bundle.specs]
    weights = [weight for of in outline.weights for weight in of]
    ends = np.array(list(accumulate(numels)), dtype=np.int64)
    each = np.array([w / n if n else 0.0 for w, n in zip(weights, numels, strict=True)])
    cuts = np.union1d(old.starts, new.starts)
    if not len(cuts):
        nothing = np.zeros(0, dtype=np.int64)
        return Overlap(nothing, nothing, nothing, before, after)
    lengths = np.diff(cuts, append=ends[-1])

    def owner(parts: Parts) -> Positions:
        found: Positions = parts.owners[np.searchsorted(parts.starts, cuts, side="right") - 1]
        return found

    pairs, inverse = np.unique(owner(old) * after + owner(new), return_inverse=True)
    sizes = np.zeros(len(pairs))
    np.add.at(sizes, inverse, lengths * each[np.searchsorted(ends, cuts, side="right")])
    return Overlap(pairs // after, pairs % after, np.rint(sizes).astype(np.int64), before, after)


class Layouts:
    """The layouts of a run by world size, planned ahead in a thread. Use it from one thread only.

    Args:
        most: largest possible world size.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._packed: bytes | None = None
        self._outline: Future[Outline] | None = None
        self._planned: dict[int, Future[Parts]] = {}
        self._thread: ThreadPoolExecutor | None = None
        self.told = False
        """True if a worker has reported its outline, or that there is none."""
        self.exact = False
        """True if the last answer of :meth:`overlap` came from the planned layouts."""

    def take(self, packed: bytes | None) -> None:
        """Set the pickled :class:`Outline`, or None if there is none. The thread unpickles it, since that may import torch, which takes
        seconds."""
        self.told = True
        if packed != self._packed:
            self._packed, self._outline, self._planned = packed, None, {}
            if packed is not None:
                self._outline = self._in_thread(pickle.loads, packed)

    def ahead(self, worlds: Iterable[int]) -> None:
        """Start to plan the layouts of these world sizes, in this order, unless they are planned already."""
        outline = self._outline
        if outline is None:
            return
        for world in worlds:
            if 1 <= world <= self._most and world not in self._planned:
                self._planned[world] = self._in_thread(lambda world=world: parts_of(outline.result(), world))

    def planned(self, *worlds: int) -> bool:
        """Return whether the layouts of these world sizes are known, or never will be."""
        if self._outline is None:
            return self.told
        self.ahead(worlds)
        return all(future.done() for world in worlds if (future := self._planned.get(world)) is not None)

    def overlap(self, before: int, after: int) -> Overlap:
        """Return the bytes that each rank of ``before`` and each of ``after`` both own. If the layouts are not known, it is the overlap of
        equal intervals.

        It takes at most :data:`WAIT_S` longer than the arithmetic.
        """
        self.ahead((before, after))
        self.exact = False
        outline, old, new = self._outline, self._planned.get(before), self._planned.get(after)
        if outline is None or old is None or new is None:
            return even(before, after)
        if wait((old, new), WAIT_S).not_done:
            _log.warning("the layouts of %d and %d ranks are not planned yet; rank assignment assumes equal parts", before, after)
            return even(before, after)
        try:
            found = overlap(outline.result(), old.result(), new.result(), before, after)
            self.exact = True
            return found
        except Exception:  # members raise the same error when they plan, so the controller need not stop here
            _log.exception("the layouts of %d and %d ranks could not be planned", before, after)
        return even(before, after)

    def _in_thread(self, work: Callable[..., _T], *given: Any) -> Future[_T]:
        self._thread = self._thread or ThreadPoolExecutor(1, "layouts")
        return self._thread.submit(work, *given)

    def close(self) -> None:
        """Cancel all planning; otherwise the process would wait for it at exit."""
        self._packed, self._outline, self._planned = None, None, {}
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
