"""Gathered parameters: the memory that a group gathers into, and the leaves that its modules hold meanwhile."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from vescale_ray.communication import wait_notes
from vescale_ray.communication.point_to_point import Messages
from vescale_ray.compat.fsdp import AllGather
from vescale_ray.fsdp.buffers.memory import NOWHERE, Buffer, Pool
from vescale_ray.fsdp.communication import comm
from vescale_ray.fsdp.communication.labels import span
from vescale_ray.fsdp.groups.gradients import Gradients
from vescale_ray.fsdp.layouts.division import Division
from vescale_ray.fsdp.layouts.group_parameter import GroupParam, Place, local_of
from vescale_ray.fsdp.layouts.wire import GroupWire
from vescale_ray.planner import Layout


class GatheredBuffer:
    """The memory of one group's unsharded parameters, and the all-gather that fills it.

    Args:
        wire: what the all-gather sends.
        dtype: the compute dtype.
        invalid_because: returns the error text of an operation on the parameters while they are resharded.
    """

    def __init__(
        self, place: Place, division: Division, wire: GroupWire, dtype: torch.dtype, invalid_because: weakref.WeakMethod[Callable[[], str]]
    ) -> None:
        self.place, self.division, self.wire, self.dtype, self._invalid_because = place, division, wire, dtype, invalid_because
        self.pool: Pool | None = None
        self.custom: AllGather | None = None
        """The user's all-gather; None: the usual one."""
        self.buffer: Buffer | None = None
        """Its storage never changes, since autograd keeps views of it. None: before the first all-gather, and for one rank."""
        self._pending: comm.Pending | None = None
        self._parts: Buffer | None = None
        """Receive buffer of the all-gather, if the wire's parts are received apart from the buffer."""
        self._source: object = None
        """Reference to the all-gather's input while it runs: without it, an accelerator's allocator would reuse the memory."""

    @property
    def nbytes(self) -> int:
        return self.division.layout.numel * self.dtype.itemsize

    @property
    def parts_bytes(self) -> int:
        """Bytes that an all-gather receives, this rank's part included."""
        return self.wire.part_bytes(self.dtype) * self.place.world

    @property
    def stays(self) -> tuple[int, int]:
        """Byte range of the buffer in which the master shard lives."""
        return self.buffer.stays if self.buffer is not None else NOWHERE

    @property
    def flat(self) -> torch.Tensor:
        assert self.buffer is not None
        return self.buffer.flat(self.dtype)

    def resident(self) -> torch.Tensor:
        """Make a new buffer in which this rank's part has permanent memory, and return that part."""
        nbytes = self.division.part_numel * self.dtype.itemsize
        stays = (self.place.rank * nbytes, (self.place.rank + 1) * nbytes)
        self.buffer = Buffer(self.nbytes, self.place.device, stays=stays, invalid_because=self._invalid_because)
        return self.buffer.resident(self.dtype)

    def open(self, lane: comm.Lane, *, kept: bool, directly: bool) -> torch.Tensor:
        """Allocate the memory that receives the parts of all ranks, and return it.

        Args:
            kept: whether the buffer holds older parameters.
            directly: whether the parts are parameters that the group has kept in the compute dtype, whatever the wire.
        """
        assert self.pool is not None
        if self.buffer is None or self.buffer.nbytes != self.nbytes:  # the parameters were cast
            fixed = self.custom is not None and not self.wire.apart
            memory = self._allocate(self.division.layout.numel, self.dtype) if fixed else None
            self.buffer = Buffer(self.nbytes, self.place.device, memory, invalid_because=self._invalid_because)
        if kept:
            lane.after_current()
        else:
            with torch.no_grad():
                self.pool.provide(self.buffer)
        if directly or not self.wire.apart:
            return self.flat if self.buffer.given is None else self.buffer.given.view(self.dtype)
        self._parts = self._new_parts()
        lane.after_current()  # the last copy out of this buffer
        return self._parts.flat(self.wire.dtype(self.dtype))

    def start(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        group: dist.ProcessGroup,
        lane: comm.Lane,
        together: comm.Together,
        *,
        pairwise: bool,
        fqn: str,
        name: str,
    ) -> None:
        """Start the all-gather of ``source``, which may be a part of ``out``, or add it to those that ``together`` starts."""
        with torch.no_grad(), span("all_gather", fqn):
            pending = comm.all_gather(out, source, group, lane, together=together, pairwise=pairwise, custom=self.custom, name=name)
        self.follow(pending, source)

    def follow(self, pending: comm.Pending, source: object = None) -> None:
        """Let :meth:`finish` wait for ``pending`` instead of an all-gather into the buffer. ``source``: kept until then."""
        self._pending, self._source = pending, source

    def hide(self) -> None:
        """Make torch refuse reads of the parameters until :meth:`finish`, while the all-gather fills them."""
        if self._pending is None or self.buffer is None:
            return
        if self.may_hide(self.buffer) or self._parts is not None or self.buffer.fixed:
            self.buffer.invalidate()

    def may_hide(self, memory: object) -> bool:
        """Return True if the running all-gather already has its addresses, so that torch may refuse reads of ``memory``, which it keeps
        alive. It lacks them if a thread runs it later, as the collectives of CPU process groups that are not pairwise.
        """
        if isinstance(self._pending, Messages):
            self._pending.keep(memory)
            return True
        return self._pending is not None and self.place.device.type != "cpu"

    def finish(self, fqn: str, *, join: bool) -> None:
        """Wait for the all-gather. ``join``: the parameters are used, so copy them to their places if they were received elsewhere."""
        pending, self._pending = self._pending, None
        parts, self._parts = self._parts, None
        if pending is not None:
            wait_notes.begin("all-gather", fqn or "the root", self.parts_bytes, self.place.world)
            pending.wait()
            wait_notes.end()
        self._source = None
        if self.buffer is not None and self.buffer.allocated:
            self.buffer.validate()
        if parts is not None:
            assert self.pool is not None
            try:
                if join:
                    with torch.no_grad():
                        self.wire.join(parts.flat(self.wire.dtype(self.dtype)), self.flat)
            finally:
                if not parts.fixed:
                    self.pool.give_back(parts)

    def release(self) -> None:
        """Give the memory to the pool."""
        if self.buffer is not None and self.pool is not None:
            self.pool.release(self.buffer, comm.current_event(self.place.device))

    def _new_parts(self) -> Buffer:
        assert self.pool is not None
        if self.custom is None:
            return self.pool.take(self.parts_bytes, self.place.device)
        dtype = self.wire.dtype(self.dtype)
        return Buffer(self.parts_bytes, self.place.device, self._allocate(self.parts_bytes // dtype.itemsize, dtype))

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        assert self.custom is not None
        return comm.allocate(self.custom, numel, dtype, self.place.device)


class Leaves:
    """The leaf parameters of one group, which its modules hold while it is gathered.

    Args:
        checked: whether to raise if an operation writes to them in place.
    """

    def __init__(self, params: Sequence[GroupParam], grads: Gradients, *, checked: bool) -> None:
        self.params, self.grads, self._checked = params, grads, checked
        self._bound_to: torch.Tensor | None = None
        self._trained: list[bool] = []
        """``requires_grad`` of the leaves at the time the modules received them."""
        self._versions: list[int] = []
        """Version counters at the time the modules received the leaves."""

    def bind(self, flat: torch.Tensor, layout: Layout) -> None:
        """Make the leaves views of ``flat``, unless they are already."""
        if self._bound_to is flat:
            return
        differentiable = flat.dtype.is_floating_point or flat.dtype.is_complex
        with torch.no_grad(), torch.inference_mode(False):
            for index, param in enumerate(self.params):
                view = layout.view(flat, param.name)
                if param.unsharded is not None:
                    param.point_to(view)
                    continue
                leaf = param.new_unsharded(view)
                if differentiable:
                    self.grads.hook(leaf, index)
                    leaf.requires_grad = param.sharded.requires_grad
        self._bound_to = flat

    def unbind(self, dtype: torch.dtype) -> None:
        """Let the next :meth:`bind` point the leaves elsewhere, and replace leaves of a dtype other than ``dtype``."""
        self._bound_to = None
        for param in self.params:
            if param.unsharded is not None and param.unsharded.dtype != dtype:
                param.unsharded = None

    def install(self) -> int:
        """Put the leaves into the modules, and return how many of them are trained."""
        trainable = 0
        for param in self.params:
            leaf = param.unsharded
            assert leaf is not None
            requires_grad = param.sharded.requires_grad
            if leaf.requires_grad != requires_grad:
                leaf.requires_grad = requires_grad
            trainable += requires_grad
            param.install(leaf)
        self._trained = [leaf.requires_grad for param in self.params if (leaf := param.unsharded) is not None]
        self.accept_writes()
        return trainable

    def hand_over_flags(self) -> None:
        """Give ``requires_grad`` of leaves to the sharded parameters where the user has changed it since :meth:`install`."""
        for param, trained in zip(self.params, self._trained, strict=True):
            leaf = param.unsharded
            if leaf is not None and leaf.requires_grad != trained and param.sharded.requires_grad == trained:
                param.sharded.requires_grad_(leaf.requires_grad)

    def accept_writes(self) -> None:
        """Let :meth:`check` count writes from now on only. The next :meth:`bind` undoes assignments to ``.data``."""
        self._versions = self._current()
        if _ASSIGNED in self._versions:
            assert self._bound_to is not None
            self.unbind(self._bound_to.dtype)
            self._versions = self._current()

    def check(self, name: str) -> None:
        """Check that no operation wrote to the leaves in place, and that nothing was assigned to ``.data``. ``name``: the group's.

        Raises:
            RuntimeError: something was written. Resharding loses it, except for the part of a shard that lives in the gathered buffer.
        """
        versions = self._current()
        if versions != self._versions:
            written = [p.fqn for p, old, new in zip(self.params, self._versions, versions, strict=True) if old != new]
            how = "assigned through .data" if _ASSIGNED in versions else "written in place"
            self.accept_writes()
            raise RuntimeError(
                f"gathered parameters of {name!r} were {how}, which is lost when they are resharded: {', '.join(written)}. "
                f"Call reshard() on the module and write to the sharded parameters between steps, or compute with a changed copy. If a "
                f"library writes to them in each forward, leave them to every rank with ignored_params"
            )

    def _current(self) -> list[int]:
        storage = None if self._bound_to is None else self._bound_to.untyped_storage()._cdata
        return [self._version(param, storage) for param in self.params]

    def _version(self, param: GroupParam, storage: int | None) -> int:
        """Version counter of a leaf; ``_ASSIGNED`` if it no longer views ``storage``."""
        if param.unsharded is None:
            return 0
        local = param.unsharded if param.parallel is None else local_of(param.unsharded)
        if storage is not None and local.untyped_storage()._cdata != storage:
            return _ASSIGNED
        return param.unsharded._version if self._checked else 0


_ASSIGNED = -1
"""In place of a version counter: the user has assigned the parameter's ``.data``."""
