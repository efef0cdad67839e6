"""Master shard: this rank's elements of a group's parameters between steps, in the parameters' own dtype.

The sharded parameters are views of it. The all-gather sends it, or its cast to the compute dtype, which is made in the gathered buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale_ray.dbuffer import KeptShard
from vescale_ray.dtensor.ragged_dtensor import distribute_tensor
from vescale_ray.fsdp.buffers.memory import Pool
from vescale_ray.fsdp.communication.comm import Lane, largest_of_ranks
from vescale_ray.fsdp.layouts.division import Division
from vescale_ray.fsdp.layouts.group_parameter import GroupParam, Place, is_view_of, local_of, sharded_parameter
from vescale_ray.fsdp.layouts.wire import CodeWire, GroupWire


class MasterShard:
    """The memory of one group's sharded parameters. If the user replaces the parameters, the group gets a new one.

    Args:
        params: the group's parameters.
        memory: the shard, of the parameters' own dtype.
        pinned: whether ``memory`` is pinned host memory, from which copies to the device are asynchronous.
    """

    def __init__(
        self, place: Place, division: Division, wire: GroupWire, params: Sequence[GroupParam], memory: KeptShard, *, pinned: bool
    ) -> None:
        self.place, self.division, self.wire, self.params = place, division, wire, params
        self._memory, self.flat, self._pinned = memory, memory.flat, pinned
        self._cast: torch.Tensor | None = None
        """The cast that is kept between all-gathers, on the computing device; None if none is."""
        self._cast_of: tuple[int, ...] | None = None
        self._tied_of: tuple[int, ...] | None = None

    def view(self, name: str) -> torch.Tensor:
        """Return this rank's elements of a parameter."""
        return self._memory.tensor(name).view(self.division.local_shape(name))

    def cast_to(self, part: torch.Tensor, version: tuple[int, ...], lane: Lane, pool: Pool | None, name: str) -> torch.Tensor:
        """Copy the shard, on ``lane``, to ``part``, this rank's part of the all-gather's result, and return ``part``; return the kept cast
        if there is one. ``version``: version of the sharded parameters. If it has changed, the lane waits for the current stream's writes
        to them, and FP8 codes and kept casts are computed again. Ranks that share tiles compute them in each all-gather, together.
        ``pool``: the pool of the lane. ``name``: name of the group.
        """
        stepped = self._cast_of is None or self._cast_of[:-1] != version
        # The flat buffer's own counter also counts writes to local tensors.
        version = (*version, self.flat._version)
        changed = self._cast_of != version
        if changed:
            lane.after_current()
        renews = isinstance(self.wire, CodeWire) and (changed or self.wire.cuts_tiles)
        copies = changed or not self.wire.keeps_cast
        # Largest magnitudes, a new kept cast, and a shard that torch casts on its way from the host need memory.
        borrows = renews or (copies and part.device != self.flat.device) or (self.wire.keeps_cast and self._cast is None)
        with torch.no_grad(), lane.context(), pool.freed.borrowed(lane.stream) if pool is not None and borrows else nullcontext():
            if isinstance(self.wire, CodeWire):
                if renews:  # a write to one rank's shard must not make that rank alone wait for the others
                    check = stepped or self.place.device.type == "cpu"
                    self.wire.renew(self._memory, lambda mine: self._largest_of_ranks(mine, lane, name), check=check)
                self.wire.write(part, non_blocking=self._pinned)
            elif not self.wire.keeps_cast:
                self._memory.spread(part, non_blocking=self._pinned)
            elif changed:
                if self._cast is None:
                    with torch.inference_mode(False):  # training uses it, too
                        self._cast = torch.empty_like(part)
                self._memory.spread(self._cast, non_blocking=self._pinned)
        self._cast_of = version
        return part if self._cast is None else self._cast

    def _largest_of_ranks(self, mine: torch.Tensor, lane: Lane, name: str) -> torch.Tensor:
        """Return the element-wise largest of all ranks' magnitudes; those of an offloaded shard travel on the device."""
        place = self.place
        return largest_of_ranks(mine.to(place.device), place.shard_group, lane, pairwise=place.pairwise, name=name).to(mine.device)

    def copy_tied(self, version: tuple[int, ...], lane: Lane) -> None:
        """Copy tied parameters from the groups that own them, if they have changed."""
        tied = [param for param in self.params if param.home is not None]
        if not tied:
            return
        version = (*version, *(param.local._version for param in tied))
        if self._tied_of != version:
            with torch.no_grad(), lane.context():
                lane.after_current()
                for param in tied:
                    self.view(param.name).copy_(param.local, non_blocking=self._pinned)
            self._tied_of = version

    # -- parameters replaced from outside: .to(), to_empty(), load_state_dict(assign=True) --------------------------------

    def replaced(self) -> list[nn.Parameter] | None:
        """Return the parameters that the modules hold now, if some of them are not views of this shard and all have one dtype and device.

        None while only some of the parameters have been moved or cast.
        """
        installed = [param.installed() for param in self.params]
        current = [c for c in installed if c is not None]
        if len(current) < len(installed):
            return None
        for param, new in zip(self.params, current, strict=True):
            if param.home is not None and new is not param.home.installed():
                param.home = None  # the tied parameters were replaced by two separate ones
        if all(c is p.sharded and self._has(c, p) for c, p in zip(current, self.params, strict=True)):
            return None
        alike = {(c.dtype, c.device.type) for c, p in zip(current, self.params, strict=True) if not p.is_left}
        return current if len(alike) == 1 else None

    def adopt(self, current: Sequence[nn.Parameter], *, values: bool) -> None:
        """Make ``current`` the group's sharded parameters, as views of this shard; copy their values if ``values``.

        Raises:
            ValueError: a parameter was replaced by one of another shape.
        """
        for param, new in zip(self.params, current, strict=True):
            view = self.view(param.name)
            if values and not new.is_meta:
                with torch.no_grad():
                    view.copy_(self._part_of(param, new))
            param.spec = self.place.spec(param.placement, param.shape, self.flat.dtype, param.parallel)
            if param.home is not None:
                param.replace(new)  # the home group keeps it a view of its own shard
            elif isinstance(new, DTensor) and type(new) is type(param.sharded) and new.dtype == view.dtype:
                new._local_tensor, new._spec = view, param.spec
                param.replace(new)
            else:
                param.replace(sharded_parameter(view, param.spec, new))
            param.install(param.sharded)

    def _has(self, current: nn.Parameter, param: GroupParam) -> bool:
        """True if a parameter is unchanged: still a view of the shard. A tied parameter needs the shard's dtype and device only."""
        if param.home is None:
            return is_view_of(current, self.flat)
        return (current.dtype, current.device) == (self.flat.dtype, self.flat.device)

    def _part_of(self, param: GroupParam, new: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the value that replaced a parameter, for any placement of that value."""
        if new.shape != param.spec.shape:
            raise ValueError(
                f"parameter {param.fqn!r} of shape {tuple(param.spec.shape)} was replaced by one of shape {tuple(new.shape)} after "
                f"fully_shard: replace it before"
            )
        if isinstance(new, DTensor) and new.placements == param.spec.placements:
            return local_of(new).view(self.division.local_shape(param.name))
        whole = new.full_tensor() if isinstance(new, DTensor) else new
        return local_of(distribute_tensor(whole.detach(), param.spec.mesh, param.spec.placements, src_data_rank=None))
