"""Parameters whose tensor class defines the all-gather itself, with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

This is FSDP2's extension point, with the same meaning: float8 and quantized weights use it to send less. Each such parameter is sharded
along dimension 0. The first hook returns tensors, each of which is gathered separately; the second hook makes the unsharded parameter from
the results. Gradients take the usual path.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from vescale_ray.dtensor.operations.schema import GATHERED_OF
from vescale_ray.dtensor.spec import contiguous_stride
from vescale_ray.dtensor.transfer import movable
from vescale_ray.errors import noted
from vescale_ray.fsdp.buffers.freed import EVERYWHERE
from vescale_ray.fsdp.buffers.invalid_storage import Guard
from vescale_ray.fsdp.buffers.memory import Pool
from vescale_ray.fsdp.communication import comm
from vescale_ray.fsdp.communication.debug import agree
from vescale_ray.fsdp.communication.labels import span
from vescale_ray.fsdp.groups.group import ParameterGroup
from vescale_ray.fsdp.layouts.group_parameter import GroupParam, PrivateMark, local_of
from vescale_ray.fsdp.layouts.phases import Residency


def has_gather_hooks(tensor: torch.Tensor) -> bool:
    """True if the tensor's class has both hooks.

    Raises:
        ValueError: it has only one of them.
    """
    before, after = hasattr(tensor, "fsdp_pre_all_gather"), hasattr(tensor, "fsdp_post_all_gather")
    if before != after:
        missing = "fsdp_post_all_gather" if before else "fsdp_pre_all_gather"
        raise ValueError(f"a {type(tensor).__name__} has no {missing}: define both all-gather hooks, or none")
    return before


class _GatheredTensors:
    """The gathered tensors of one parameter. Their memory is freed on reshard, the tensors stay."""

    __slots__ = ("_because", "_guards", "inner", "metadata", "outputs", "sizes")

    def __init__(self, because: weakref.WeakMethod[Callable[[], str]]) -> None:
        self._because = because
        self.outputs: list[torch.Tensor] = []
        self.inner: tuple[torch.Tensor, ...] = ()
        self.sizes: list[torch.Size] = []
        self.metadata: Any = None
        self._guards: dict[int, Guard] = {}
        """Guards by storage: several tensors of a tensor class may share one."""

    def receive(self, inputs: tuple[torch.Tensor, ...], world: int) -> None:
        """Allocate outputs for ``inputs`` of ``world`` ranks."""
        self.sizes = [t.size() for t in inputs]
        numels = [t.numel() * world for t in inputs]
        if [(o.numel(), o.dtype) for o in self.outputs] != [(n, t.dtype) for n, t in zip(numels, inputs, strict=True)]:
            with torch.inference_mode(False):  # training reuses the memory, and the leaves may be views of it
                self.outputs = [torch.empty(n, dtype=t.dtype, device=t.device) for n, t in zip(numels, inputs, strict=True)]
        for output in self.outputs:
            self.allocate(output)

    def views(self) -> tuple[torch.Tensor, ...]:
        return tuple(o.view(-1, *size[1:]) for o, size in zip(self.outputs, self.sizes, strict=True))

    def allocate(self, tensor: torch.Tensor) -> None:
        """Allocate the memory of ``tensor`` again if :meth:`free` has freed it."""
        storage, nbytes = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
        if storage._cdata in self._guards:
            self._guards[storage._cdata].validate()
        if storage.nbytes() < nbytes:
            storage.resize_(nbytes)

    def hide(self) -> None:
        """Make torch refuse reads of the outputs until :meth:`allocate`."""
        for tensor in self.outputs:
            self._guard(tensor).invalidate()

    def free(self) -> None:
        for tensor in (*self.outputs, *self.inner):
            guard = self._guard(tensor)
            guard.validate()
            if not guard.exported:
                tensor.untyped_storage().resize_(0)
            guard.invalidate()

    def _guard(self, tensor: torch.Tensor) -> Guard:
        storage = tensor.untyped_storage()
        guard = self._guards.get(storage._cdata)
        if guard is None:
            guard = self._guards[storage._cdata] = Guard(storage, storage.nbytes(), self._because)
        return guard


class HookedGroup(ParameterGroup):
    """A group of parameters with all-gather hooks. Its ``division`` cuts them into chunks along dimension 0."""

    hooked = True

    def _shard_parameters(self, sources: Any, to_empty: bool) -> None:  # the tensor class's own to_empty() allocates what its hooks need
        self._tensors: list[_GatheredTensors] = []
        mesh = self.place.mesh
        # Hooks find the process group, and the largest value of all shards, through this mesh: replicas must not be in it.
        self._shard_mesh = mesh if mesh.ndim == 1 or mesh.mesh_dim_names is None else mesh[mesh.mesh_dim_names[-1]]
        for source in sources:
            own = self._own(source.value)
            if self.offload and own.device.type != "meta":
                own = own.cpu()
            self._add(source, self._pad(own, source.shape))
            self._tensors.append(_GatheredTensors(weakref.WeakMethod(self.invalid_because)))
        self.alone = False

    def _own(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows. ``torch.chunk`` cuts them, because such tensor classes support it; NF4 can't be sliced from the
        middle."""
        chunks = torch.chunk(value, self.place.world)
        return chunks[self.place.rank] if self.place.rank < len(chunks) else value.narrow(0, value.shape[0], 0)

    def _rows(self, shape: tuple[int, ...]) -> int:
        """Return the number of rows that every rank sends."""
        return -(-shape[0] // self.place.world)

    def _pad(self, own: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a copy of ``own``, padded to the number of rows that every rank sends."""
        with torch.no_grad():
            padded = own.new_zeros((self._rows(shape), *shape[1:]))
            if own.shape[0] and own.device.type != "meta":
                padded.narrow(0, 0, own.shape[0]).copy_(own)
            return padded.narrow(0, 0, own.shape[0])

    def _expect(self, pool: Pool) -> None:
        if self.grads.trainable_count:
            pool.expect(self.grads.buffer_bytes, self)

    def _start_gather(self, lane: comm.Lane, together: comm.Together) -> None:
        assert self.gathered.pool is not None
        agree(f"all-gather of {self.name!r}", self.place.shard_group, self.place.device)
        sent: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.no_grad(), lane.context(), self.gathered.pool.freed.borrowed(lane.stream), span("all_gather", self.fqn):
            for param, gathered in zip(self.params, self._tensors, strict=True):
                inputs = self._before(param, gathered)
                gathered.receive(inputs, self.place.world)
                # Through .data: a version counter that changes would make autograd refuse parameters that are views of the outputs.
                sent += [(movable(o.data), movable(one.contiguous().view(-1))) for o, one in zip(gathered.outputs, inputs, strict=True)]
            lane.issued += len(sent)
            group = self.place.shard_group
            if self.place.pairwise:
                pending: comm.Pending = comm.all_gather_pairwise(sent, group, lane, self.name)
            else:
                works = [dist.all_gather_single(to, what, group=group, async_op=lane.stream is None) for to, what in sent]
                pending = comm.Works(lane, *works) if lane.stream is None else lane.mark()
        self.gathered.follow(pending, sent)
        self._gathered_of = self.spmd_version()

    def hide(self) -> None:
        if self.gathered.may_hide(self._tensors):
            for gathered in self._tensors:
                gathered.hide()

    def _before(self, param: GroupParam, gathered: _GatheredTensors) -> tuple[torch.Tensor, ...]:
        """Call ``fsdp_pre_all_gather``.

        Raises:
            ValueError: the hook takes other arguments, or returns tensors whose sizes differ from rank to rank.
        """
        local: Any = local_of(param.sharded)
        if self.offload:
            local = local.to(self.place.device)
        hook = local.fsdp_pre_all_gather
        count = len(inspect.signature(hook).parameters)
        mesh, shape = self._shard_mesh, torch.Size(param.shape)
        arguments = (mesh, shape, contiguous_stride(shape), param.owners[0][0](), self.policy)
        if count not in (1, 5):
            raise ValueError(
                f"fsdp_pre_all_gather of {type(local).__name__} takes {count} arguments: it must take (mesh), or (mesh, outer_size, "
                f"outer_stride, module, mp_policy)"
            )
        with noted(f"fsdp_pre_all_gather raised this for parameter {param.fqn!r}"):
            inputs, gathered.metadata = hook(*arguments[:count])
        if not param.shape[0] % self.place.world:
            return tuple(inputs)
        # An uneven cut: ranks with fewer rows, or none, must send as much as the others.
        rows, own = self._rows(param.shape), local.shape[0]
        if any(not t.dim() or t.shape[0] not in (rows, own) for t in inputs):
            raise ValueError(
                f"{param.fqn!r} of shape {tuple(param.shape)} is cut unevenly: fsdp_pre_all_gather must return tensors of this rank's "
                f"{own} rows, or of the {rows} rows that the first rank has, not {[tuple(t.shape) for t in inputs]}"
            )
        inputs = tuple(t if t.shape[0] == rows else torch.cat([t, t.new_zeros((rows - own, *t.shape[1:]))]) for t in inputs)
        return tuple(inputs)

    def _fill_leaves(self) -> None:
        with torch.no_grad():
            for index, (param, gathered) in enumerate(zip(self.params, self._tensors, strict=True)):
                with noted(f"fsdp_post_all_gather raised this for parameter {param.fqn!r}"):
                    self._after(param, gathered, index)

    def _after(self, param: GroupParam, gathered: _GatheredTensors, index: int) -> None:
        """Call ``fsdp_post_all_gather``, which makes the unsharded parameter or refills it."""
        local: Any = local_of(param.sharded)
        metadata, gathered.metadata = gathered.metadata, None
        for tensor in gathered.outputs:
            gathered.allocate(tensor)
        if param.unsharded is not None:
            for tensor in gathered.inner:
                gathered.allocate(tensor)
            local.fsdp_post_all_gather(gathered.views(), metadata, self.compute_dtype, out=param.unsharded)
            return
        with torch.inference_mode(False):
            whole, inner = local.fsdp_post_all_gather(gathered.views(), metadata, self.compute_dtype)
            gathered.inner = tuple(inner)
            leaf = nn.Parameter(torch.as_strided(whole, param.shape, contiguous_stride(param.shape), 0), requires_grad=False)
        param.unsharded = leaf
        leaf.__dict__[GATHERED_OF] = PrivateMark((weakref.ref(param),))
        if leaf.is_floating_point() or leaf.is_complex():
            leaf.requires_grad = True  # only leaves that require a gradient take the hook; a frozen one may be trained later
            self.grads.hook(leaf, index)

    def rest(self, *, after_forward: bool, keep: bool = False) -> None:
        if not keep:  # the hook's result may share memory with its inputs, so none of it can be freed alone
            self.reshard()

    def _release(self) -> None:
        for gathered in self._tensors:
            gathered.free()
        if self.gathered.pool is not None:
            self.gathered.pool.freed.add(EVERYWHERE, comm.current_event(self.place.device))

    def adopt(self, *, values: bool = True) -> None:
        installed = [param.installed() for param in self.params]
        if self.residency is not Residency.SHARDED or any(one is None for one in installed):
            return
        for index, (param, current) in enumerate(zip(self.params, installed, strict=True)):
            if not isinstance(current, DTensor) or local_of(current) is param.kept:
                continue
            if current.shape != param.spec.shape or current.placements != param.spec.placements:
                raise ValueError(
                    f"parameter {param.fqn!r} of shape {tuple(param.shape)} and {param.placement} was replaced by one of shape "
                    f"{tuple(current.shape)} and {current.placements} after fully_shard: replace it before"
                )
            current._local_tensor = self._pad(local_of(current), param.shape)
            param.replace(current)  # type: ignore[arg-type]
            param.unsharded, param.spec = None, current._spec
            self._tensors[index] = _GatheredTensors(weakref.WeakMethod(self.invalid_because))
            self._take_dtype(current.dtype)
            self.refresh()
