"""Group: one parameter group of a unit. Its methods are the group's life in a step, in this order.

    unshard -> wait -> [forward] -> reshard -> unshard -> wait -> [backward] -> reshard        (gradients: ``gradients.py``)

[Note: the tensors of a group] in ``vescale_ray/fsdp/__init__.py`` lists every tensor with its bytes and its lifetime.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from vescale_ray.communication import wait_notes
from vescale_ray.compat.fsdp import AllGather
from vescale_ray.dbuffer import KeptShard
from vescale_ray.dtensor.ragged_dtensor import distribute_tensor
from vescale_ray.fsdp import comm
from vescale_ray.fsdp.debug import agree
from vescale_ray.fsdp.division import Division
from vescale_ray.fsdp.gradients import Gradients
from vescale_ray.fsdp.labels import span
from vescale_ray.fsdp.memory import NOWHERE, Buffer, Pool, may_stay
from vescale_ray.fsdp.mixed_precision import dtypes
from vescale_ray.fsdp.parameters import REPLACED, GroupParam, OriginalParameter, Place, Subgroup, as_dtensor, is_view_of, local_of
from vescale_ray.fsdp.phases import Residency, Retain


class ParameterGroup:
    """Parameters that share one DBuffer layout, one all-gather and one reduce-scatter.

    Args:
        name: the name in error messages.
        sources: parameters of one dtype and one ``requires_grad``, in the order of ``division.layout.specs``.
        division: from :func:`~vescale_ray.fsdp.grouping.plan_groups`.
        mesh: 1-D (shard) or 2-D (replicate, shard).
        device: where unsharded parameters live.
        retain: the gathered parameters that stay until the next optimizer step.
        neighbours: size of the subgroup that keeps all parameters between forward and backward; None: no subgroup.
        to_empty: allocate storage without values for parameters on the meta device.
    """

    hooked = False
    """Whether the parameters' tensor classes define the all-gather themselves (:mod:`vescale_ray.fsdp.hooked`)."""

    def __init__(
        self,
        name: str,
        sources: Sequence[OriginalParameter],
        division: Division,
        mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
        offload: OffloadPolicy,
        device: torch.device,
        retain: Retain = Retain.NOTHING,
        neighbours: int | None = None,
        to_empty: bool = False,
    ) -> None:
        self.name, self.policy, self.place = name, policy, Place(mesh, device)
        self.fqn = ""
        """Name of the unit below the root, for profilers."""
        self.offload = isinstance(offload, CPUOffloadPolicy) and device.type != "cpu"
        self.pin_memory = self.offload and bool(getattr(offload, "pin_memory", False))
        self.orig_dtype = sources[0].param.dtype
        self.compute_dtype, self.reduce_dtype = dtypes(self.orig_dtype, policy)
        self.division, self.layout = division, division.layout
        alone = self.place.world == 1 and not division.copies
        self.in_place = not self.offload and (alone or not division.part_numel)
        """With one rank (or no elements) the unsharded parameters are views of the shard, and nothing is gathered."""

        self.residency = Residency.SHARDED
        self.requested = False
        """Whether the user called ``unshard``: the parameters then stay gathered until a forward uses them or they are resharded."""
        self.unshard_in_backward = True
        self.retain = retain
        self.subgroup = Subgroup(mesh, neighbours, device) if neighbours is not None and not division.copies else None
        """The neighbours from which backward gathers, since each keeps a larger part of the parameters after forward; None: all ranks."""
        self.custom_gather: AllGather | None = None
        self._buffer: Buffer | None = None
        """Memory of the unsharded parameters. Its storage never changes, since autograd keeps views of it."""
        self._bound_to: torch.Tensor | None = None
        self._leaf_versions: list[int] = []
        """Version counters of the unsharded parameters at the time the modules received them."""
        self.params: list[GroupParam] = []
        self._renormed = any(getattr(ref(), "max_norm", None) is not None for source in sources for ref, _ in source.owners)
        """Whether an embedding with ``max_norm`` writes to the gathered parameters in forward. These writes are dropped on purpose."""
        self._shard_parameters(sources, to_empty)
        self.grads = Gradients(self.place, division, self.params, in_place=False, offload=self.offload)
        self._tell_gradients()

        self._part: torch.Tensor | None = None
        """The part that this rank keeps for its ``subgroup`` between forward and backward."""
        self._gathers_from: torch.Tensor | None = None
        """Reference to that part during the all-gather: without it, an accelerator's allocator would reuse the memory."""
        self._whole_of: tuple[int, ...] | None = None
        """Version of the sharded parameters that the buffer still holds in full, though the modules have the sharded ones."""
        self._pool: Pool | None = None
        self._parts: Buffer | None = None
        """Receive buffer of the all-gather, if the parameters are copied from it into ``_buffer``."""
        self._gather: comm.Pending | None = None
        self._cast: torch.Tensor | None = None
        self._cast_of: tuple[int, ...] | None = None
        self._gathered_of: tuple[int, ...] | None = None
        self._tied_of: tuple[int, ...] | None = None
        self._local_of = 0
        """Version of the master shard's memory at the last gather. It also counts writes that only one rank made."""
        self._writes = 0

    # -- construction ------------------------------------------------------------------------------------------------

    def _take_dtype(self, dtype: torch.dtype) -> None:
        """Change the parameters' dtype, and the compute and reduce dtypes that follow from it."""
        if dtype != self.orig_dtype:
            self.orig_dtype = dtype
            self.compute_dtype, self.reduce_dtype = dtypes(dtype, self.policy)
            self._cast = None
            self._tell_gradients()

    def _tell_gradients(self) -> None:
        self.grads.orig_dtype, self.grads.compute_dtype, self.grads.reduce_dtype = self.orig_dtype, self.compute_dtype, self.reduce_dtype
        self.grads.in_place = self.in_place and self.reduce_dtype == self.orig_dtype
        self.grads.leaves_out = self.stays != NOWHERE

    def _shard_parameters(self, sources: Sequence[OriginalParameter], to_empty: bool) -> None:
        """Copy this rank's ranges into a new master shard, and make the sharded parameters as views of it."""
        meta = any(s.param.device.type == "meta" for s in sources)
        home = torch.device("cpu") if self.offload else self.place.device
        self.master = self._new_master(torch.device("meta") if meta and not to_empty else home)
        for source in sources:
            local = self._local_view(source.name)
            if not meta:
                local.copy_(self.division.own(source.name, source.value))
            placement = self.division.placement(source.name)
            spec = self.place.spec(placement, source.shape, self.orig_dtype, source.parallel)
            sharded = nn.Parameter(as_dtensor(local, spec), requires_grad=source.param.requires_grad)
            sharded._local_tensor = local  # type: ignore[attr-defined]  # nn.Parameter detached it, and with it the version counter
            for key, value in source.param.__dict__.items():  # marks that users and optimizers put on parameters
                if key not in ("_local_tensor", "_spec", REPLACED):  # the first two of a DTensor
                    sharded.__dict__.setdefault(key, value)
            param = GroupParam(source, sharded, placement, spec)
            self.params.append(param)

    def install(self) -> None:
        """Replace the original parameters in the modules by the sharded ones."""
        for param in self.params:
            param.install(param.sharded)

    def _new_master(self, device: torch.device) -> KeptShard:
        """A new master shard with zero padding: a part of the gathered buffer if possible, else memory of its own."""
        self._buffer = self._bound_to = None
        if device == self.place.device and self._can_live_in_buffer():
            nbytes = self.division.part_numel * self.orig_dtype.itemsize
            stays = (self.place.rank * nbytes, (self.place.rank + 1) * nbytes)
            self._buffer = Buffer(self.unsharded_bytes, device, stays=stays, invalid_because=weakref.WeakMethod(self.invalid_because))
            return KeptShard(self.division.kept, self._buffer.resident(self.orig_dtype))
        master = KeptShard.empty(self.division.kept, self.division.empty_part, dtype=self.orig_dtype, device=device)
        if self.pin_memory and device.type == "cpu":
            master.flat = master.flat.pin_memory()
        return master

    def _can_live_in_buffer(self) -> bool:
        """Whether the master shard can be this rank's part of the gathered buffer, which saves its memory and its copy.

        It can't if forward writes to gathered parameters (``max_norm``), since these writes must not reach the shard. It can't if the
        group keeps another part of the buffer either.
        """
        return (
            self.place.pairwise
            and not self.offload
            and not self.in_place
            and not self.division.copies
            and self.division.kept.in_place
            and self.compute_dtype == self.orig_dtype
            and self.custom_gather is None
            and self.subgroup is None
            and self.retain is Retain.NOTHING
            and may_stay(self.unsharded_bytes, self.place.device)
            and not self._renormed
        )

    @property
    def at_hand(self) -> bool:
        """Whether the buffer holds the parameters, or an all-gather is filling it."""
        return self.residency is not Residency.SHARDED or self._whole_of is not None

    @property
    def stays(self) -> tuple[int, int]:
        """Byte range of the gathered buffer in which the master shard lives."""
        return self._buffer.stays if self._buffer is not None else NOWHERE

    def _local_view(self, name: str) -> torch.Tensor:
        return self.master.tensor(name).view(self.division.local_shape(name))

    def attach(self, pool: Pool) -> None:
        """Use the buffers of ``pool``, which belongs to the schedule of the root."""
        if self._pool is pool:
            return
        self.reshard()
        self._pool = self.grads.pool = pool
        self._expect()

    def _expect(self) -> None:
        """Tell the pool the sizes of the buffers that this group needs."""
        if self._pool is None:
            return
        keys = {(self.unsharded_bytes, self.stays)} if not self.in_place else set()
        if self.division.copies:
            keys.add((self.parts_bytes, NOWHERE))
        if self.grads.trainable_count and not self.grads.in_place:
            keys.add((self.grads.buffer_bytes, NOWHERE))
        for nbytes, stays in keys:
            self._pool.expect(nbytes, self, stays)

    @property
    def unsharded_bytes(self) -> int:
        return self.layout.numel * self.compute_dtype.itemsize

    @property
    def parts_bytes(self) -> int:
        return self.division.part_numel * self.place.world * self.compute_dtype.itemsize

    # -- unshard, wait, reshard --------------------------------------------------------------------------------------

    def unshard(self, lane: comm.Lane, together: comm.Together, *, fresh: bool = False) -> None:
        """Start the all-gather, or add it to those that ``together`` starts. Does nothing if it is under way or done.

        ``fresh``: gather again if the sharded parameters have changed since (an optimizer step while the unit stayed unsharded).
        """
        if fresh and self.residency is not Residency.SHARDED and self._gathered_of != self._spmd_version():
            self.reshard()
        if self.residency is not Residency.SHARDED:
            if fresh:
                self._check_local_writes()
                if self.residency is Residency.UNSHARDED:
                    self.check_leaves()
            return
        assert self._pool is not None
        self._check_local_writes()
        whole, self._whole_of = self._whole_of, None
        if whole is not None and whole == self._spmd_version():
            self.check_leaves()
            self._whole_of, self._gather, self.residency = whole, comm.Done(), Residency.GATHERING
            return
        group, pairwise = self.place.shard_group, self.place.pairwise
        part = self._part
        if self.retain is not Retain.PART or self._gathered_of != self._spmd_version():
            self._part = None
        if part is not None and self.subgroup is not None and self._gathered_of == self._spmd_version():
            shard, group, pairwise = part, self.subgroup.group, self.subgroup.pairwise
            self._gathers_from = part
            lane.after_current()
        else:
            shard = self._shard_to_gather(lane)
        if self.in_place:
            self._gather = lane.mark()
        else:
            if self._buffer is None or self._buffer.nbytes != self.unsharded_bytes:  # the parameters were cast
                self._buffer = self._new_buffer()
            agree(f"all-gather of {self.name!r}", group, self.place.device)
            if whole is None:
                lane.after(self._pool.released_event)
                with torch.no_grad(), lane.context():
                    self._pool.provide(self._buffer)
            else:
                lane.after_current()
            out = self._buffer.flat(self.compute_dtype)
            if self.division.copies:
                self._parts = self._new_parts()
                out = self._parts.flat(self.compute_dtype)
                lane.after_current()  # the last copy out of this buffer
            with torch.no_grad(), span("all_gather", self.fqn):
                self._gather = comm.all_gather(out, shard, group, lane, together=together, pairwise=pairwise, custom=self.custom_gather)
        self._gathered_of, self._local_of = self._spmd_version(), self.master.flat._version
        self.residency = Residency.GATHERING

    def drop_torn(self) -> None:
        """Reshard before backward if an optimizer has stepped since forward: only this rank's part of the buffer has the new values then.

        This concerns only shards that live in the buffer."""
        if self.stays == NOWHERE or self.residency is not Residency.UNSHARDED or not self.unshard_in_backward:
            return
        if self._gathered_of != self._spmd_version():
            self.reshard()
        self._check_local_writes()

    def _check_local_writes(self) -> None:
        """Check that no rank wrote to its shard alone while gathered parameters are to be used again.

        If the shard lives in the buffer, only this rank would compute with the new values. If the group keeps gathered parameters until the
        next optimizer step, no rank would see them. Otherwise all ranks see them after the next reshard, so such a write is allowed.

        Raises:
            RuntimeError: the master shard was written, and the gathered parameters are older.
        """
        if self._local_of == self.master.flat._version or self._gathered_of != self._spmd_version():
            return
        kept = self._whole_of is not None or (self.retain is Retain.PART and self._part is not None)
        if kept or (self.residency is not Residency.SHARDED and self.stays != NOWHERE):
            raise RuntimeError(
                f"the sharded parameters of {self.name!r} were written through their local tensors while the gathered ones are kept: "
                f"write to the parameters themselves, or call reshard() on this module on all ranks before or after such a write"
            )

    def _new_buffer(self) -> Buffer:
        memory = None
        if self.custom_gather is not None and not self.division.copies:
            memory = comm.allocate(self.custom_gather, self.layout.numel, self.compute_dtype, self.place.device)
        return Buffer(self.unsharded_bytes, self.place.device, memory, invalid_because=weakref.WeakMethod(self.invalid_because))

    def invalid_because(self) -> str:
        """The error of an operation that reads or writes the gathered parameters while they are resharded."""
        fqns = [param.fqn for param in self.params]
        names = ", ".join(fqns[:8]) + (f" and {len(fqns) - 8} more" if len(fqns) > 8 else "")
        return (
            f"the parameters of unit {self.fqn or 'the root'!r} ({names}) are resharded, but one of them was read. Another module's "
            f"forward uses it, or a tensor computed with it was kept outside of the unit: call the module itself, return the tensor "
            f"from its forward or keep it as an attribute there, or set reshard_after_forward=False"
        )

    def _new_parts(self) -> Buffer:
        assert self._pool is not None
        if self.custom_gather is None:
            return self._pool.take(self.parts_bytes, self.place.device)
        numel = self.parts_bytes // self.compute_dtype.itemsize
        memory = comm.allocate(self.custom_gather, numel, self.compute_dtype, self.place.device)
        return Buffer(self.parts_bytes, self.place.device, memory)

    def set_custom_gather(self, custom: AllGather | None) -> None:
        """Use the user's all-gather, and the memory it allocates, from the next unshard on."""
        self.reshard()
        self.custom_gather, self._buffer, self._bound_to = custom, None, None
        self._tell_gradients()

    def wait(self) -> None:
        """Wait for the all-gather and install the unsharded parameters in the modules."""
        if self.residency is not Residency.GATHERING:
            return
        self._finish_gather(join=True)
        self._bind(self._shard_to_gather(None) if self.in_place or self._buffer is None else self._buffer.flat(self.compute_dtype))
        trainable = 0
        for param in self.params:
            leaf = param.unsharded
            assert leaf is not None
            requires_grad = param.sharded.requires_grad
            if leaf.requires_grad != requires_grad:
                leaf.requires_grad = requires_grad
            trainable += requires_grad
            param.install(leaf)
        self.grads.trainable_count = trainable
        self._leaf_versions = self._versions_of_leaves()
        self.residency = Residency.UNSHARDED

    def rest(self, *, after_forward: bool, keep: bool = False) -> None:
        """Reshard at the end of a pass, but keep the part that ``retain`` or the subgroup asks for.

        ``keep``: keep all parameters, because a graph may still read them.
        """
        if self.residency is Residency.SHARDED:
            return
        version, part = self._spmd_version(), self._part
        unused = self.residency is Residency.GATHERING and self._whole_of is None
        if unused or self._gathered_of != version or self._buffer is None:
            self.reshard()
            self._part = part if self.retain is Retain.PART else None
            return
        if (keep or self.retain is Retain.ALL) and not self.in_place:
            unsharded = self.residency is Residency.UNSHARDED
            self._give_back_sharded()
            self._gather, self._whole_of = None, version
            if unsharded:
                self.check_leaves()
            return
        keeps = self.subgroup is not None and (after_forward or self.retain is Retain.PART)
        if keeps and part is None:
            assert self.subgroup is not None
            with torch.no_grad():
                part = self._buffer.flat(self.compute_dtype).chunk(self.subgroup.size)[self.subgroup.rank].clone()
        self.reshard()
        self._part = part

    def drop_kept(self) -> None:
        """Reshard the parameters that were kept for a graph, since that graph is no longer needed."""
        if self.residency is Residency.SHARDED and self.retain is not Retain.ALL:
            self.reshard()

    def reshard(self) -> None:
        """Install the sharded parameters in the modules and release the buffer to the pool.

        Raises:
            RuntimeError: gathered parameters were written in place (:meth:`check_leaves`). The group is resharded before it raises.
        """
        self._part = None
        if self.residency is Residency.SHARDED:
            if self._whole_of is not None:
                self._release()
                self.check_leaves()
            return
        self._finish_gather()
        unsharded = self.residency is Residency.UNSHARDED
        self._give_back_sharded()
        self._release()
        if unsharded:
            self.check_leaves()

    def check_leaves(self) -> None:
        """Check that no operation wrote in place to the gathered parameters that the modules hold.

        Raises:
            RuntimeError: an operation wrote. Resharding loses the write, except for the part of a shard that lives in the gathered buffer.
        """
        versions = self._versions_of_leaves()
        if versions != self._leaf_versions:
            written = [p.fqn for p, old, new in zip(self.params, self._leaf_versions, versions, strict=True) if old != new]
            self._leaf_versions = versions
            raise RuntimeError(
                f"gathered parameters of {self.name!r} were written in place, which is lost when they are resharded: {', '.join(written)}. "
                f"Call reshard() on the module and write to the sharded parameters between steps, or compute with a changed copy"
            )

    def _versions_of_leaves(self) -> list[int]:
        if self._renormed:
            return []
        return [0 if param.unsharded is None else param.unsharded._version for param in self.params]

    def _give_back_sharded(self) -> None:
        self.install()
        self.residency, self.requested = Residency.SHARDED, False

    def _release(self) -> None:
        self._whole_of = None
        if not self.in_place and self._buffer is not None and self._pool is not None:
            self._pool.release(self._buffer, comm.current_event(self.place.device))

    def _finish_gather(self, *, join: bool = False) -> None:
        gather, self._gather = self._gather, None
        parts, self._parts = self._parts, None
        if gather is not None:
            wait_notes.begin("all-gather", self.fqn or "the root", self.parts_bytes, self.place.world)
            gather.wait()
            wait_notes.end()
        self._gathers_from = None
        if parts is not None:
            assert self._buffer is not None and self._pool is not None
            if join:
                with torch.no_grad():
                    self.division.join(parts.flat(self.compute_dtype), self._buffer.flat(self.compute_dtype))
            if not parts.fixed:
                self._pool.give_back(parts)

    def drop_prefetch(self) -> None:
        """Release the buffer if a prefetch filled it and no unit used it."""
        if self.residency is Residency.GATHERING and not self.requested:
            self.rest(after_forward=False)

    def _shard_to_gather(self, lane: comm.Lane | None) -> torch.Tensor:
        """The input of the all-gather in the compute dtype: the master shard, or its cast, made once per optimizer step."""
        master = self.master.flat
        if lane is not None and any(p.home is not None for p in self.params):
            self._copy_tied(lane)
        if self.compute_dtype == self.orig_dtype and not self.offload and self.division.kept.in_place:
            return master
        if self._cast is None:
            with torch.inference_mode(False):
                self._cast = self.division.empty_part(self.compute_dtype, self.place.device)
            self._cast_of = None
        # The flat buffer's own counter also counts writes to local tensors.
        version = (*self._spmd_version(), master._version)
        if self._cast_of != version and lane is not None:
            with torch.no_grad(), lane.context():
                lane.after_current()
                self.master.spread(self._cast, non_blocking=self.pin_memory)
            self._cast_of = version
        return self._cast

    def _copy_tied(self, lane: comm.Lane) -> None:
        """Copy tied parameters from the groups that own them, if they have changed."""
        tied = [param for param in self.params if param.home is not None]
        version = (*self._spmd_version(), *(param.local._version for param in tied))
        if self._tied_of != version:
            with torch.no_grad(), lane.context():
                lane.after_current()
                for param in tied:
                    self._local_view(param.name).copy_(param.local, non_blocking=self.pin_memory)
            self._tied_of = version

    def lodge(self, param: GroupParam, home: GroupParam) -> bool:
        """Tie ``param`` of this group to ``home`` of another group. Returns False if the ranks hold different parts of the two."""
        same = isinstance(param.placement, Shard) and param.placement == home.placement and param.spec.mesh == home.spec.mesh
        if not same or self.hooked or param.spec.shape != home.spec.shape or param.sharded.dtype != home.sharded.dtype:
            return False
        param.home = home
        return True

    def _spmd_version(self) -> tuple[int, ...]:
        """A version that changes with every write that all ranks make alike, so that they agree on when to gather again.

        The parameters' counters see single operations. Foreach and fused kernels on tensor subclasses change no counter, so
        ``_writes`` counts optimizer steps and loads.
        """
        return self._writes, sum(p.sharded._version for p in self.params)

    def refresh(self) -> None:
        """Cast and gather again at the next unshard: the master shard may have changed without a change of its version."""
        self._writes += 1

    def _bind(self, flat: torch.Tensor) -> None:
        """Make the unsharded parameters views of ``flat``, unless they are already."""
        if self._bound_to is flat:
            return
        differentiable = self.compute_dtype.is_floating_point or self.compute_dtype.is_complex
        with torch.no_grad(), torch.inference_mode(False):
            for index, param in enumerate(self.params):
                view = self.layout.view(flat, param.name)
                if param.unsharded is not None:
                    param.point_to(view)
                    continue
                leaf = param.new_unsharded(view)
                if differentiable:
                    self.grads.hook(leaf, index)
                    leaf.requires_grad = param.sharded.requires_grad
        self._bound_to = flat

    def discard(self) -> None:
        """Drop the gradients, reductions and gathered parameters of an unfinished step."""
        self.grads.discard()
        self._leaf_versions = self._versions_of_leaves()  # the step is given up, so writes to gathered parameters no longer matter
        self.reshard()

    # -- parameters replaced from outside: .to(), to_empty(), load_state_dict(assign=True) --------------------------------

    def adopt(self, *, values: bool = True) -> None:
        """Make the parameters that the modules hold now views of one master shard again; copy their values if ``values``.

        This is cheap if nothing has changed. It does nothing while only some of the parameters have been moved or cast.

        Raises:
            ValueError: a parameter was replaced by one of another shape.
        """
        installed = [param.installed() for param in self.params]
        current = [c for c in installed if c is not None]
        if len(current) < len(installed) or self.residency is not Residency.SHARDED:
            return
        for param, new in zip(self.params, current, strict=True):
            if param.home is not None and new is not param.home.installed():
                param.home = None  # both were replaced, each by its own parameter
        if all(c is p.sharded and self._has(c, p) for c, p in zip(current, self.params, strict=True)):
            return
        kinds = {(c.dtype, c.device.type) for c in current}
        if len(kinds) > 1:
            return
        self.reshard()
        dtype, device_type = kinds.pop()
        self._take_dtype(dtype)
        self.master = self._new_master(self.place.device if device_type == self.place.device.type else torch.device(device_type))
        for param, new in zip(self.params, current, strict=True):
            view = self._local_view(param.name)
            if values and device_type != "meta":
                with torch.no_grad():
                    view.copy_(self._part_of(param, new))
            param.spec = self.place.spec(param.placement, param.shape, dtype, param.parallel)
            if param.home is not None:
                param.replace(new)  # the home group keeps it a view of its own shard
            elif isinstance(new, DTensor) and type(new) is type(param.sharded):
                new._local_tensor, new._spec = view, param.spec
                param.replace(new)
            else:
                fresh = nn.Parameter(as_dtensor(view, param.spec), requires_grad=new.requires_grad)
                fresh._local_tensor = view  # type: ignore[attr-defined]
                param.replace(fresh)
            param.install(param.sharded)
            if param.unsharded is not None and param.unsharded.dtype != self.compute_dtype:
                param.unsharded = None
        self._bound_to = None
        self._tell_gradients()
        self._expect()
        self.refresh()

    def _has(self, current: nn.Parameter, param: GroupParam) -> bool:
        """Whether a parameter is unchanged: still a view of the master shard, or, if tied, of the same dtype and device."""
        if param.home is None:
            return is_view_of(current, self.master.flat)
        return (current.dtype, current.device) == (self.orig_dtype, self.master.flat.device)

    def _part_of(self, param: GroupParam, new: torch.Tensor) -> torch.Tensor:
        """This rank's part of the value that replaced a parameter, for any placement of that value."""
        if new.shape != param.spec.shape:
            raise ValueError(f"parameter {param.fqn!r} of shape {tuple(param.spec.shape)} was replaced by one of shape {tuple(new.shape)}")
        if isinstance(new, DTensor) and new.placements == param.spec.placements:
            return local_of(new).view(self.division.local_shape(param.name))
        whole = new.full_tensor() if isinstance(new, DTensor) else new.detach()
        return local_of(distribute_tensor(whole.detach(), param.spec.mesh, param.spec.placements, src_data_rank=None))
