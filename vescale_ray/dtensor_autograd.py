"""Into and out of ragged tensors, and between their placements, with gradients: differentiable any number of times.

Every backward is made of the same functions, so that the graph of ``create_graph=True`` goes through them.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from vescale_ray.compat.tensor import DTensorSpec
from vescale_ray.dtensor_spec import contiguous_stride, make_spec, ragged_mesh_dim, replicated, settled_placements, wrap
from vescale_ray.redistribute import move, plain_spec, start
from vescale_ray.transfer import ArrivingTensor, arrived

Cls = type[DTensor]
"""What the tensors become: RaggedDTensor, or DerivedDTensor. Handed in, because both are made of what is here."""


class FromLocal(torch.autograd.Function):
    """A part as the tensor that ``spec`` describes."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: DTensorSpec, cls: Cls) -> Tensor:
        ctx.spec, ctx.cls = spec, cls
        return wrap(cls, local.detach(), spec, local.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        # The gradient of a contribution to a pending sum is the whole gradient, on every rank.
        moved = _redistributed(grad, settled_placements(ctx.spec.placements), ctx.cls)
        return ToLocal.apply(moved, None, ctx.cls), None, None


class ToLocal(torch.autograd.Function):
    """This rank's part of a tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, grad_placements: tuple[Placement, ...] | None, cls: Cls) -> Tensor:
        ctx.spec, ctx.grad_placements, ctx.cls = tensor._spec, grad_placements, cls
        return arrived(tensor._local_tensor).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        spec, placements = ctx.spec, ctx.grad_placements
        placements = settled_placements(spec.placements) if placements is None else placements
        shape = spec.tensor_meta.shape
        if ragged_mesh_dim(placements) is None:
            stride = contiguous_stride(shape)
            return DTensor.from_local(grad, spec.mesh, placements, run_check=False, shape=shape, stride=stride), None, None
        spec = spec if placements == spec.placements else make_spec(spec.mesh, placements, shape, grad.dtype)
        return FromLocal.apply(grad.contiguous(), spec, ctx.cls), None, None


class Redistribute(torch.autograd.Function):
    """A tensor, ours or torch's, under other placements."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: DTensor,
        placements: tuple[Placement, ...],
        async_op: bool,
        forward_dtype: torch.dtype | None,
        backward_dtype: torch.dtype | None,
        cls: Cls,
    ) -> Tensor:
        ctx.placements, ctx.dtype, ctx.backward_dtype, ctx.cls = settled_placements(tensor.placements), tensor.dtype, backward_dtype, cls
        source = tensor if forward_dtype is None else cast(DTensor, tensor.to(forward_dtype))
        transfer, spec = start(source._local_tensor, source._spec, placements)
        if async_op:
            transfer.watch(tensor)
        local = ArrivingTensor.of(transfer) if async_op else transfer.wait()
        local = local if isinstance(local, ArrivingTensor) else local.detach()
        return wrap(cls, local, spec) if ragged_mesh_dim(spec.placements) is not None else DTensor(local, spec, requires_grad=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad if ctx.backward_dtype is None else grad.to(ctx.backward_dtype)
        return _redistributed(grad, ctx.placements, ctx.cls).to(ctx.dtype), None, None, None, None, None


class Whole(torch.autograd.Function):
    """The whole tensor, plain, on every rank; each rank is to make the same of it, so that the gradients are the same."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        ctx.spec, ctx.cls = tensor._spec, type(tensor)
        return _whole(tensor).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Part.apply(grad, ctx.spec, ctx.cls)


class Part(torch.autograd.Function):
    """The other way: a whole plain tensor, the same on every rank, as one with the placements of ``spec``, nothing pending."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, spec: DTensorSpec, cls: Cls) -> Tensor:
        have = plain_spec(spec.mesh, replicated(spec.mesh), tuple(full.shape), full.dtype)
        local, found = move(full.detach(), have, settled_placements(spec.placements))
        return wrap(cls, local, found)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return whole_of(cast(DTensor, grad)), None, None


def whole_of(tensor: DTensor) -> Tensor:
    """The whole tensor as a plain one; one collective; differentiable."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        return cast(Tensor, Whole.apply(tensor))
    return _whole(tensor)


def _whole(tensor: DTensor) -> Tensor:
    return arrived(move(tensor._local_tensor, tensor._spec, replicated(tensor.device_mesh))[0])


def _redistributed(grad: Tensor, placements: tuple[Placement, ...], cls: Cls) -> Any:
    assert isinstance(grad, DTensor)
    return grad if grad.placements == placements else Redistribute.apply(grad, placements, False, None, None, cls)
