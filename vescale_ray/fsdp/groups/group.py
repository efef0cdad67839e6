"""Group: one parameter group of a unit. Its methods are the group's life in a step, in this order.

    unshard -> wait -> [forward] -> reshard -> unshard -> wait -> [backward] -> reshard        (gradients: ``gradients.py``)

[Note: the tensors of a group] in ``vescale_ray/fsdp/__init__.py`` lists every tensor with its bytes and its lifetime.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from vescale_ray.compat.fsdp import AllGather
from vescale_ray.dbuffer import KeptShard
from vescale_ray.fsdp.buffers.invalid_storage import resharded_text
from vescale_ray.fsdp.buffers.memory import NOWHERE, Pool, may_stay
from vescale_ray.fsdp.communication import comm
from vescale_ray.fsdp.communication.debug import agree
from vescale_ray.fsdp.groups.gathered import GatheredBuffer, Leaves
from vescale_ray.fsdp.groups.gradients import Gradients
from vescale_ray.fsdp.groups.master_shard import MasterShard
from vescale_ray.fsdp.layouts.group_parameter import GroupParam, GroupPlan, OriginalParameter, Place, Subgroup, sharded_parameter
from vescale_ray.fsdp.layouts.mixed_precision import dtypes
from vescale_ray.fsdp.layouts.phases import Residency, Retain
from vescale_ray.fsdp.layouts.wire import CodeWire


class ParameterGroup:
    """Parameters that share one DBuffer layout. A unit's groups share its all-gather and its reduce-scatter.

    Args:
        name: the name in error messages.
        device: where unsharded parameters live.
        to_empty: allocate storage without values for parameters on the meta device.
    """

    hooked = False
    """True if the parameters' tensor classes define the all-gather themselves (:mod:`vescale_ray.fsdp.groups.hooked`)."""

    def __init__(self, name: str, plan: GroupPlan, offload: OffloadPolicy, device: torch.device, *, to_empty: bool) -> None:
        self.name, self.policy, self.place = name, plan.policy, Place(plan.mesh, device)
        self.fqn = ""
        """Name of the unit below the root, for profilers."""
        self.offload = isinstance(offload, CPUOffloadPolicy) and device.type != "cpu"
        self.pin_memory = self.offload and bool(getattr(offload, "pin_memory", False))
        self.orig_dtype = plan.sources[0].param.dtype
        self.compute_dtype, self.reduce_dtype = dtypes(self.orig_dtype, plan.policy)
        self.division, self.layout = plan.division, plan.division.layout
        alone = self.place.world == 1 and not plan.division.copies
        self.alone = not self.offload and (alone or not plan.division.part_numel)
        """True if there is one rank, or no element: nothing is sent."""

        self.residency = Residency.SHARDED
        self.requested = False
        """True if the user called ``unshard``: the parameters then stay gathered until a forward uses them or they are resharded."""
        self.unshard_in_backward = True
        self.retain = plan.retain
        neighbours = None if plan.division.copies else plan.neighbours
        self.subgroup = Subgroup(plan.mesh, neighbours, device) if neighbours is not None else None
        """The neighbours from which backward gathers, since each keeps a larger part of the parameters after forward; None: all ranks."""
        self._part: torch.Tensor | None = None
        """The part that this rank keeps for its ``subgroup`` between forward and backward."""
        self._whole = False
        """True if the buffer still holds all parameters, though the modules have the sharded ones."""
        self._gathered_of: tuple[int, ...] | None = None
        """Version of the sharded parameters at the last gather."""
        self._local_of = 0
        """Version of the master shard's memory at the last gather. It also counts writes that only one rank made."""
        self._writes = 0  # counts writes that all ranks make alike
        self._renormed = any(getattr(ref(), "max_norm", None) is not None for source in plan.sources for ref, _ in source.owners)
        """True if an embedding with ``max_norm`` writes to the gathered parameters in forward. These writes are dropped on purpose."""
        self.gathered = GatheredBuffer(self.place, self.division, plan.wire, self.compute_dtype, weakref.WeakMethod(self.invalid_because))
        self.params: list[GroupParam] = []
        self._shard_parameters(plan.sources, to_empty)
        self.grads = Gradients(self.place, self.division, self.params, offload=self.offload)
        self.leaves = Leaves(self.params, self.grads, checked=not self._renormed)
        self.tell_gradients()

    # -- construction ------------------------------------------------------------------------------------------------

    def _take_dtype(self, dtype: torch.dtype) -> None:
        """Change the parameters' dtype, and the compute and reduce dtypes that follow from it."""
        if dtype != self.orig_dtype:
            self.orig_dtype = dtype
            self.compute_dtype, self.reduce_dtype = dtypes(dtype, self.policy)
            self.gathered.dtype = self.compute_dtype
            self.tell_gradients()

    def tell_gradients(self) -> None:
        self.grads.orig_dtype, self.grads.compute_dtype, self.grads.reduce_dtype = self.orig_dtype, self.compute_dtype, self.reduce_dtype
        self.grads.in_place = self.alone and self.reduce_dtype == self.orig_dtype
        self.grads.leaves_out = self.gathered.stays != NOWHERE

    def _shard_parameters(self, sources: Sequence[OriginalParameter], to_empty: bool) -> None:
        """Copy this rank's ranges into a new master shard, and make the sharded parameters as views of it."""
        meta = any(s.param.device.type == "meta" for s in sources)
        home = torch.device("cpu") if self.offload else self.place.device
        self.master = self._new_master(torch.device("meta") if meta and not to_empty else home)
        for source in sources:
            local = self.master.view(source.name)
            if not meta:
                local.copy_(self.division.own(source.name, source.value))
            self._add(source, local)

    def _add(self, source: OriginalParameter, local: torch.Tensor) -> None:
        """Add the parameter of which this rank holds ``local``."""
        placement = self.division.placement(source.name)
        spec = self.place.spec(placement, source.shape, self.orig_dtype, source.parallel)
        self.params.append(GroupParam(source, sharded_parameter(local, spec, source.param), placement, spec))

    def install(self) -> None:
        """Replace the original parameters in the modules by the sharded ones."""
        for param in self.params:
            param.install(param.sharded)

    def _new_master(self, device: torch.device) -> MasterShard:
        """Return a new master shard with zero padding: a part of the gathered buffer if possible, else memory of its own."""
        self.gathered.buffer = None
        if device == self.place.device and self._can_live_in_buffer():
            memory = KeptShard(self.division.kept, self.gathered.resident())
        else:
            memory = KeptShard.empty(self.division.kept, self.division.empty_part, dtype=self.orig_dtype, device=device)
        pinned = self.pin_memory and device.type == "cpu"
        if pinned:
            memory.flat = memory.flat.pin_memory()
        return MasterShard(self.place, self.division, self.gathered.wire, self.params, memory, pinned=pinned)

    def _can_live_in_buffer(self) -> bool:
        """True if the master shard can be this rank's part of the gathered buffer, which saves its memory and its copy.

        It can't if forward writes to gathered parameters (``max_norm``), since these writes must not reach the shard. It can't if the
        group keeps another part of the buffer either.
        """
        return (
            self.place.pairwise
            and not self.casts
            and not self.in_place
            and not self.gathered.wire.apart
            and self.gathered.custom is None
            and self.subgroup is None
            and self.retain is Retain.NOTHING
            and may_stay(self.gathered.nbytes, self.place.device)
            and not self._renormed
        )

    @property
    def casts(self) -> bool:
        """Return whether the all-gather sends a copy of the shard: in FP8 or the compute dtype, on the device, or with gaps."""
        alike = self.compute_dtype == self.orig_dtype and not self.offload and self.division.kept.in_place
        return not alike or isinstance(self.gathered.wire, CodeWire)

    @property
    def in_place(self) -> bool:
        """True if the unsharded parameters are views of the master shard."""
        return self.alone and not self.casts

    @property
    def at_hand(self) -> bool:
        """True if the buffer holds the parameters, or an all-gather is filling it."""
        return self.residency is not Residency.SHARDED or self._whole

    def attach(self, pool: Pool) -> None:
        """Use the buffers of ``pool``, which belongs to the schedule of the root."""
        if self.gathered.pool is pool:
            return
        self.reshard()
        self.gathered.pool = self.grads.pool = pool
        self._expect(pool)

    def _expect(self, pool: Pool) -> None:
        """Tell the pool the sizes of the buffers that this group needs."""
        keys = {(self.gathered.nbytes, self.gathered.stays)} if not self.in_place else set()
        if self.gathered.wire.apart:
            keys.add((self.gathered.parts_bytes, NOWHERE))
        if self.grads.trainable_count and not self.grads.in_place:
            keys.add((self.grads.buffer_bytes, NOWHERE))
        for nbytes, stays in keys:
            pool.expect(nbytes, self, stays)

    # -- unshard, wait, reshard --------------------------------------------------------------------------------------

    def unshard(self, lane: comm.Lane, together: comm.Together, *, fresh: bool = False) -> None:
        """Start the all-gather, or add it to those that ``together`` starts. Does nothing if the all-gather is under way or done.

        ``fresh``: gather again if the sharded parameters have changed since (an optimizer step while the unit stayed unsharded).
        """
        if fresh and any(param.moved for param in self.params):  # the model's own forward assigned param.data, as MoCo does
            self.reshard()
            self.adopt()
        if self.residency is not Residency.SHARDED:
            if not fresh:
                return
            if self._gathered_of == self.spmd_version():
                self._check_local_writes()
                if self.residency is Residency.UNSHARDED:
                    self.leaves.check(self.name)
                return
            self.reshard()
        self._start_gather(lane, together)
        self.residency = Residency.GATHERING

    def _start_gather(self, lane: comm.Lane, together: comm.Together) -> None:
        self._check_local_writes()
        version = self.spmd_version()
        unchanged = self._gathered_of == version
        whole, self._whole = self._whole, False
        if whole and unchanged:
            self.leaves.check(self.name)
            self._whole = True
            return
        group, pairwise, part = self.place.shard_group, self.place.pairwise, self._part
        if self.retain is not Retain.PART or not unchanged:
            self._part = None
        if part is not None and self.subgroup is not None and unchanged:
            group, pairwise = self.subgroup.group, self.subgroup.pairwise
            lane.after_current()
        else:
            part = None
            self.master.copy_tied(version, lane)
        if not self.alone:
            agree(f"all-gather of {self.name!r}", group, self.place.device)
        if not self.in_place:
            out = self.gathered.open(lane, kept=whole, directly=part is not None)
            if part is None and self.casts:
                numel = out.numel() // self.place.world
                own = out[self.place.rank * numel : (self.place.rank + 1) * numel]
                part = self.master.cast_to(own, version, lane, self.gathered.pool, self.name)
        if self.alone:
            self.gathered.follow(lane.mark())
        else:
            source = self.master.flat if part is None else part
            self.gathered.start(out, source, group, lane, together, pairwise=pairwise, fqn=self.fqn, name=self.name)
        self._gathered_of, self._local_of = version, self.master.flat._version

    def hide(self) -> None:
        """Make torch refuse reads of the parameters that are being gathered, until :meth:`wait`."""
        self.gathered.hide()

    def drop_torn(self) -> None:
        """Reshard before backward if an optimizer has stepped since forward: only this rank's part of the buffer has the new values then.

        This concerns only shards that live in the buffer."""
        if self.gathered.stays == NOWHERE or self.residency is not Residency.UNSHARDED or not self.unshard_in_backward:
            return
        if self._gathered_of != self.spmd_version():
            self.reshard()
        self._check_local_writes()

    def _check_local_writes(self) -> None:
        """Check that no rank wrote to its shard alone while gathered parameters are to be used again.

        If the shard lives in the buffer, only this rank would compute with the new values. If the group keeps gathered parameters until the
        next optimizer step, no rank would see them. Otherwise all ranks see them after the next reshard, so such a write is allowed.

        Raises:
            RuntimeError: the master shard was written, and the gathered parameters are older.
        """
        kept = self._whole or (self.retain is Retain.PART and self._part is not None)
        if not kept and (self.residency is Residency.SHARDED or self.gathered.stays == NOWHERE):
            return
        if self._local_of != self.master.flat._version and self._gathered_of == self.spmd_version():
            raise RuntimeError(
                f"the sharded parameters of {self.name!r} were written through their local tensors while the gathered ones are kept: "
                f"write to the parameters themselves, or call reshard() on this module on all ranks before or after such a write"
            )

    def invalid_because(self) -> str:
        """Return the error of an operation that reads or writes the gathered parameters while they are resharded."""
        return resharded_text(self.fqn, [param.fqn for param in self.params])

    def set_custom_gather(self, custom: AllGather | None) -> None:
        """Use the user's all-gather, and the memory it allocates, from the next unshard on."""
        self.reshard()
        self.gathered.custom, self.gathered.buffer = custom, None
        self.leaves.unbind(self.compute_dtype)
        self.tell_gradients()

    def wait(self) -> None:
        """Wait for the all-gather and install the unsharded parameters in the modules."""
        if self.residency is not Residency.GATHERING:
            return
        self.gathered.finish(self.fqn, join=True)
        self._fill_leaves()
        self.grads.trainable_count = self.leaves.install()
        self.residency = Residency.UNSHARDED

    def _fill_leaves(self) -> None:
        """Make the unsharded parameters hold the gathered values."""
        self.leaves.bind(self.master.flat if self.in_place else self.gathered.flat, self.layout)

    def rest(self, *, after_forward: bool, keep: bool = False) -> None:
        """Reshard at the end of a pass, but keep the part that ``retain`` or the subgroup asks for.

        ``keep``: keep all gathered values, for a graph or the next forward. The modules hold the sharded parameters.
        """
        if self.residency is Residency.SHARDED:
            if self._whole and not keep:
                self.drop_kept()
            return
        part, unused = self._part, self.residency is Residency.GATHERING and not self._whole
        if unused or self.in_place or self._gathered_of != self.spmd_version():
            self.reshard()
            self._part = part if self.retain is Retain.PART else None
            return
        if keep or self.retain is Retain.ALL:
            unsharded = self.residency is Residency.UNSHARDED
            self._give_back_sharded()
            self._whole = True
            if unsharded:
                self.leaves.check(self.name)
            return
        keeps = self.subgroup is not None and (after_forward or self.retain is Retain.PART)
        if keeps and part is None:
            assert self.subgroup is not None
            with torch.no_grad():
                part = self.gathered.flat.chunk(self.subgroup.size)[self.subgroup.rank].clone()
        self.reshard()
        self._part = part

    def drop_kept(self) -> None:
        """Free the values that were kept for a graph or the next forward, which no longer needs them."""
        if self.residency is Residency.SHARDED and self.retain is not Retain.ALL:
            self.reshard()

    def reshard(self) -> None:
        """Install the sharded parameters in the modules and release the buffer to the pool.

        Raises:
            RuntimeError: gathered parameters were written in place (:meth:`Leaves.check`). The group is resharded before it raises.
        """
        self._part, before = None, self.residency
        if before is Residency.SHARDED and not self._whole:
            return
        if before is not Residency.SHARDED:
            self.gathered.finish(self.fqn, join=False)
            self._give_back_sharded()
        self._release()
        if before is not Residency.GATHERING:
            self.leaves.check(self.name)

    def _give_back_sharded(self) -> None:
        if self.residency is Residency.UNSHARDED:
            self.leaves.hand_over_flags()
        self.install()
        self.residency, self.requested = Residency.SHARDED, False

    def _release(self) -> None:
        self._whole = False
        self.gathered.release()

    def drop_prefetch(self) -> None:
        """Release the buffer if a prefetch filled it and no unit used it."""
        if self.residency is Residency.GATHERING and not self.requested:
            self.rest(after_forward=False)

    def spmd_version(self) -> tuple[int, ...]:
        """Return a version that changes with every write that all ranks make alike, so that they agree on when to gather again.

        The parameters' counters see single operations. Foreach and fused kernels on tensor subclasses change no counter, so
        ``_writes`` counts optimizer steps and loads.
        """
        return self._writes, sum(p.sharded._version for p in self.params)

    def refresh(self) -> None:
        """Gather again at the next unshard: the master shard may have changed without a change of its version."""
        self._writes += 1

    def discard(self) -> None:
        """Drop the gradients, reductions and gathered parameters of an unfinished step."""
        self.grads.discard()
        self.leaves.accept_writes()  # the step is given up, so writes to gathered parameters no longer matter
        self.reshard()

    @torch.inference_mode(False)  # an evaluation may be the first to see values that were assigned; training goes on with the shard
    def adopt(self, *, values: bool = True) -> None:
        """Make the parameters that the modules hold now views of one master shard again; copy their values if ``values``.

        This is cheap if nothing has changed. It does nothing while only some of the parameters have been moved or cast.

        Raises:
            ValueError: a parameter was replaced by one of another shape.
        """
        current = self.master.replaced() if self.residency is Residency.SHARDED else None
        if current is None:
            return
        self.reshard()
        now = next(one for one, param in zip(current, self.params, strict=True) if not param.is_left)
        self._take_dtype(now.dtype)
        kind = now.device.type
        self.master = self._new_master(self.place.device if kind == self.place.device.type else torch.device(kind))
        self.master.adopt(current, values=values)
        self.leaves.unbind(self.compute_dtype)
        self.tell_gradients()
        if self.gathered.pool is not None:
            self._expect(self.gathered.pool)
        self.refresh()
