"""Differentiable conversions to and from ragged tensors and between their placements, to any order of derivative.

Every backward uses the same functions, so that the graph of ``create_graph=True`` goes through them.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement

from vescale_ray.compat.core import (
    DispatchKey,
    FakeTensor,
    ForceDispatchKeyGuard,
    FunctionalTensor,
    dispatch_tls_local_exclude_set,
    dispatch_tls_local_include_set,
    run_as_is,
)
from vescale_ray.compat.tensor import DTensorSpec, distribute_tensors
from vescale_ray.dtensor.arguments import placement_list
from vescale_ray.dtensor.operations.schema import parameter_name
from vescale_ray.dtensor.redistribution import move, plain_spec, start
from vescale_ray.dtensor.spec import make_spec, ragged_mesh_dim, replicated, settled_placements, wrap
from vescale_ray.dtensor.transfer import ArrivingTensor, arrived


class Classes:
    """The DTensor subclasses that this module makes. Each registers itself where it is defined, since both import this module."""

    ragged: ClassVar[type[DTensor]]
    other: ClassVar[type[DTensor]]


def made(local: Tensor, spec: DTensorSpec, requires_grad: bool = False) -> DTensor:
    """Return the tensor that ``spec`` describes around ``local``: a RaggedDTensor for ragged placements, else a DerivedDTensor."""
    cls = Classes.other if ragged_mesh_dim(spec.placements) is None else Classes.ragged
    return wrap(cls, local, spec, requires_grad)


class FromLocal(torch.autograd.Function):
    """Make the tensor that ``spec`` describes from this rank's part."""

    @staticmethod
    @run_as_is
    def forward(ctx: Any, local: Tensor, spec: DTensorSpec) -> Tensor:
        ctx.spec = spec
        return made(local.detach(), spec, local.requires_grad)

    @staticmethod
    @run_as_is
    def backward(ctx: Any, grad: Tensor) -> Any:
        # Every rank's gradient of a contribution to a pending sum is the whole gradient.
        return ToLocal.apply(_redistributed(grad, settled_placements(ctx.spec.placements)), None), None


class ToLocal(torch.autograd.Function):
    """Take this rank's part of a tensor."""

    @staticmethod
    @run_as_is
    def forward(ctx: Any, tensor: DTensor, grad_placements: tuple[Placement, ...] | None) -> Tensor:
        ctx.spec, ctx.grad_placements = tensor._spec, grad_placements
        return arrived(tensor._local_tensor).detach()

    @staticmethod
    @run_as_is
    def backward(ctx: Any, grad: Tensor) -> Any:
        spec, placements = ctx.spec, ctx.grad_placements
        placements = settled_placements(spec.placements) if placements is None else placements
        shape = spec.tensor_meta.shape
        make = plain_spec if ragged_mesh_dim(placements) is None else make_spec
        return FromLocal.apply(grad.contiguous(), make(spec.mesh, placements, shape, grad.dtype)), None


class Redistribute(torch.autograd.Function):
    """Change the placements of a DTensor of this package or of torch."""

    @staticmethod
    @run_as_is
    def forward(
        ctx: Any,
        tensor: DTensor,
        placements: tuple[Placement, ...],
        async_op: bool,
        forward_dtype: torch.dtype | None,
        backward_dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.placements, ctx.dtype, ctx.backward_dtype = settled_placements(tensor.placements), tensor.dtype, backward_dtype
        source = tensor if forward_dtype is None else cast(DTensor, tensor.to(forward_dtype))
        transfer, spec = start(source._local_tensor, source._spec, placements)
        if async_op:
            transfer.watch(tensor)
        local = ArrivingTensor.of(transfer) if async_op else transfer.wait()
        return made(local if isinstance(local, ArrivingTensor) else local.detach(), spec)

    @staticmethod
    @run_as_is
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad if ctx.backward_dtype is None else grad.to(ctx.backward_dtype)
        return _redistributed(grad, ctx.placements).to(ctx.dtype), None, None, None, None


class Whole(torch.autograd.Function):
    """Gather the whole tensor as a plain one on every rank. Each rank must compute the same with it, so that the gradients agree."""

    @staticmethod
    @run_as_is
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        ctx.spec = tensor._spec
        return _whole(tensor).detach()

    @staticmethod
    @run_as_is
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Part.apply(grad, ctx.spec)


class Part(torch.autograd.Function):
    """Inverse of :class:`Whole`: distribute a plain tensor, equal on every rank, with the placements of ``spec`` and nothing pending."""

    @staticmethod
    @run_as_is
    def forward(ctx: Any, full: Tensor, spec: DTensorSpec) -> Tensor:
        have = plain_spec(spec.mesh, replicated(spec.mesh), tuple(full.shape), full.dtype)
        return made(*move(full.detach(), have, settled_placements(spec.placements)))

    @staticmethod
    @run_as_is
    def backward(ctx: Any, grad: Tensor) -> Any:
        return whole_of(cast(DTensor, grad)), None


def whole_of(tensor: DTensor) -> Tensor:
    """Return the whole tensor as a plain one, by one collective; differentiable."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        return cast(Tensor, Whole.apply(tensor))
    return _whole(tensor)


def _whole(tensor: DTensor) -> Tensor:
    return arrived(move(tensor._local_tensor, tensor._spec, replicated(tensor.device_mesh))[0])


def redistributed(tensor: DTensor, placements: Sequence[Placement], async_op: bool = False, *dtypes: torch.dtype | None) -> DTensor:
    """Return ``tensor`` with other placements on its mesh. ``dtypes`` are those of the collectives in forward and backward."""
    return cast(DTensor, Redistribute.apply(tensor, placement_list(placements), async_op, *(dtypes or (None, None))))


def _redistributed(grad: Tensor, placements: tuple[Placement, ...]) -> DTensor:
    assert isinstance(grad, DTensor)
    return grad if grad.placements == placements else redistributed(grad, placements)


class RaggedAwareDTensor(DTensor):
    """A DTensor whose conversions accept ragged placements: the common base of RaggedDTensor and the tensors derived from it."""

    @run_as_is
    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return this rank's part, or its contribution to a pending reduction. It shares memory and is differentiable.

        Args:
            grad_placements: placements of the result's gradient. None: the tensor's own (as in DTensor.to_local), but for a whole parameter
                of ``fully_shard``, and for every whole tensor in a compiled function, the mean of the ranks' gradients, since each rank
                may compute on its own data.
        """
        self._local_tensor = arrived(self._local_tensor)
        if not torch.is_grad_enabled():
            here = inspect.currentframe()
            caller = None if here is None or here.f_back is None else here.f_back.f_code
            if caller is distribute_tensors.__code__ and isinstance(self, Classes.ragged):
                return self  # set_model_state_dict writes the whole tensor to the result, of which copy_() takes this rank's part
            return self._local_tensor
        if grad_placements is None and all(one.is_replicate() for one in self.placements) and _comes_from_parameter(self):
            grad_placements = [Partial("avg")] * len(self.placements)
        return cast(Tensor, ToLocal.apply(self, None if grad_placements is None else tuple(grad_placements)))

    @run_as_is
    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return the whole tensor as a plain one, by one collective; differentiable.

        Args:
            grad_placements: as in :meth:`to_local`.
        """
        if grad_placements is None and not _comes_from_parameter(self):
            return whole_of(self)
        return self.redistribute(placements=replicated(self.device_mesh)).to_local(grad_placements=grad_placements)

    def tolist(self) -> Any:
        """Return the numbers of the whole tensor, by one collective, as ``item()`` gives one."""
        return whole_of(cast(DTensor, self.detach())).tolist()

    def __dlpack__(self, *_: Any, **__: Any) -> NoReturn:
        """Raise an error, since the local tensor owns the memory. Exports to arrays call this method, and safetensors calls ``storage``."""
        what = f"a {type(self).__name__} of shape {tuple(self.shape)}" if (name := parameter_name(self)) is None else f"parameter {name!r}"
        raise RuntimeError(
            f"{what} has no memory of its own to export or save, since it is sharded: use its to_local(), or "
            f"full_tensor(), taken on every rank (of a model: get_model_state_dict() of vescale_ray.state_dict with full_state_dict=True; "
            f"for a save_pretrained() without state_dict, load these into a model that is not sharded); load_state_dict() on every rank "
            f"loads whole tensors into a sharded module"
        )

    __dlpack_device__ = __array__ = numpy = storage = __dlpack__  # type: ignore[assignment]

    def __float__(self) -> float:
        return float(self._number()) if _skips_dispatch() else super().__float__()

    def __index__(self) -> int:
        return int(self._number()) if _skips_dispatch() else super().__index__()

    def __bool__(self) -> bool:
        return bool(self._number()) if _skips_dispatch() else super().__bool__()

    def _number(self) -> Tensor:
        excluded = dispatch_tls_local_exclude_set()
        for key in (DispatchKey.Python, DispatchKey.PythonTLSSnapshot):
            excluded = excluded.remove(key)
        with ForceDispatchKeyGuard(dispatch_tls_local_include_set(), excluded), torch.no_grad():
            return self.full_tensor()

    def _stable_hash_for_caching(self) -> str:
        """Return the key of ``torch.compile``'s code cache, which all processes of the machine share on disk.

        Torch's key is the same on all ranks. Code for one rank's part would read beyond the end of another's, so this key adds the local
        shape and the rank's coordinate."""
        local, here, base = self._local_tensor, self.device_mesh.get_coordinate(), super()._stable_hash_for_caching()
        text = f"{type(self).__name__} {base} {tuple(local.shape)} {local.stride()} {local.dtype} {here}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __coerce_same_metadata_as_tangent__(self, flatten_spec: Any, expected_type: type | None = None) -> DTensor | None:
        """Return this gradient with the placements that a compiled function expects, as those of its ragged result; None if it can't be."""
        result = redistributed(self, flatten_spec[0])
        return result if expected_type in (None, type(result)) else None

    @run_as_is
    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """Return the same tensor with other placements on the same mesh, ragged or not; differentiable.

        The result, and every tensor computed from it, can be redistributed to ragged placements again by the same call.

        Args:
            async_op: return while the last collective still runs; the first use of the result waits for it (as in DTensor).
            forward_dtype, backward_dtype: dtypes of the collectives, as in DTensor.redistribute.

        Raises:
            ValueError: ``device_mesh`` is another mesh, or the placements don't fit.
        """
        if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
            raise TypeError(f"redistribute got {device_mesh!r} as its mesh: name the argument: redistribute(placements=[Shard(0)])")
        if device_mesh is not None and device_mesh != self.device_mesh:
            raise ValueError(f"can't redistribute from {self.device_mesh} to {device_mesh}: only placements on the same mesh can change")
        if placements is None:
            raise ValueError("redistribute needs placements, such as redistribute(placements=[Replicate()])")
        return redistributed(self, placements, async_op, forward_dtype, backward_dtype)


def _comes_from_parameter(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a sharded parameter of ``fully_shard``, or was computed from one alone, and gets a gradient."""
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return False
    if isinstance(tensor._local_tensor, FakeTensor | FunctionalTensor):  # type: ignore[attr-defined]
        return True  # tensors of a trace have no marks; if every rank computes the same, the mean of the gradients is that of each
    node = tensor.grad_fn
    while node is not None and not hasattr(node, "variable"):
        inputs = [function for function, _ in node.next_functions if function is not None]
        node = inputs[0] if len(inputs) == 1 else None
    return parameter_name(tensor if node is None else node.variable) is not None


def _skips_dispatch() -> bool:
    """Return whether torch reads a number without ``__torch_dispatch__``, as ``torch.tensor([norm, ..])`` does. It would find no memory."""
    return bool(dispatch_tls_local_exclude_set().has(DispatchKey.Python))
