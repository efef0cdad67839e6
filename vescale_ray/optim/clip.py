"""Clipping by the global gradient norm, with the same result on any number of ranks.

torch's ``clip_grad_norm_`` also works on sharded parameters, but its FP32 partial norms depend on the cuts between ranks. Here
partial sums are FP64. For any cuts they agree to about 1e-15 relative, so the resulting FP32 norm is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale_ray.communication import wait_notes
from vescale_ray.compat.core import foreach_mul_, foreach_norm
from vescale_ray.optim.agree import largest_of_ranks
from vescale_ray.optim.exact_sum import sum_of_squares
from vescale_ray.optim.parameters import local_of, parameter_list, sharded_of


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    leave_out: Iterable[torch.Tensor] = (),
    exact: bool = False,
) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm``.

    Collective: one all-reduce per mesh of ``parameters``, even if this rank has no gradients there.

    Args:
        parameters: sharded or plain tensors, or both; those without a gradient are left out.
        foreach: accepted for compatibility; fused kernels are used if they exist.
        leave_out: members of ``parameters`` that are neither counted nor scaled, for example Muon's. Muon's update does not depend on
            the size of its gradients, unless clipping makes them so small that Newton-Schulz takes them for zero.
        exact: sum without any rounding that depends on the cuts (:func:`total_norm`); costs one more all-reduce.

    Returns:
        The norm before clipping: a plain FP32 tensor of shape (), the same on all ranks.

    Raises:
        RuntimeError: the norm is NaN or infinite and ``error_if_nonfinite`` is set.
        TypeError: ``parameters`` holds something other than tensors.
        ValueError: a gradient still has a pending sum (Partial); ``max_norm`` is negative or NaN; ``norm_type`` is not above 0, or is
            neither 2 nor infinite with ``exact``.
    """
    if not _is_number(max_norm) or not max_norm >= 0:
        raise ValueError(f"max_norm = {max_norm!r}: give a number of at least 0")
    parameters = parameter_list("clip_grad_norm_", parameters)
    without = {id(p) for p in parameter_list("leave_out of clip_grad_norm_", leave_out)}
    parameters = [sharded_of(p) for p in parameters if id(p) not in without]
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = _norm([(p, False) if p.grad is None else (p.grad, True) for p in parameters], norm_type, exact)
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise RuntimeError(f"the gradient norm is {norm.item()}: gradients were not clipped (error_if_nonfinite=False scales them anyway)")
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for local in map(local_of, grads):
        if local.numel():
            by_kind.setdefault((local.device, local.dtype), []).append(local)
    with torch.no_grad():
        for (device, _), locals_ in by_kind.items():
            foreach_mul_(locals_, scale.to(device=device, dtype=torch.float32))
    return norm.to(torch.float32)


def total_norm(tensors: Iterable[torch.Tensor], norm_type: float = 2.0, *, exact: bool = False) -> torch.Tensor:
    """Return the norm of all elements of ``tensors`` together: FP64, shape (), the same on all ranks.

    Collective, as :func:`clip_grad_norm_`.

    ``exact``: the same bits for every division of the elements over ranks and buffers (:mod:`vescale_ray.optim.exact_sum`).
    """
    return _norm([(tensor, True) for tensor in tensors], norm_type, exact)


def _norm(tensors: list[tuple[torch.Tensor, bool]], norm_type: float | str, exact: bool = False) -> torch.Tensor:
    """Return the norm of the tensors marked True.

    The others only name meshes whose ranks take part, because ranks may lack different gradients.
    """
    number = math.inf if norm_type == "inf" else norm_type  # torch accepts the name, too
    if isinstance(number, str) or not _is_number(number) or not number > 0:
        raise ValueError(f"norm_type = {norm_type!r}: give a number above 0 (inf: the largest magnitude)")
    norm_type = float(number)
    infinite = math.isinf(norm_type)
    if exact and not infinite and norm_type != 2.0:
        raise ValueError(f"norm_type = {norm_type} can't be summed exactly: give 2 or inf")
    kinds: dict[tuple[int, tuple[int, ...]], tuple[DeviceMesh | None, tuple[int, ...], list[torch.Tensor]]] = {}
    for tensor, counts in tensors:
        mesh, dims = _sharded_over(tensor)
        kind = kinds.setdefault((id(mesh) if mesh is None else hash(mesh), dims), (mesh, dims, []))
        if counts:
            kind[2].append(local_of(tensor))
    device = local_of(tensors[0][0]).device if tensors else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    with torch.no_grad():
        for mesh, dims, locals_ in kinds.values():
            held = [t.abs() if t.is_complex() else t for t in locals_ if t.numel()]
            groups = [mesh.get_group(dim) for dim in dims if mesh.size(dim) > 1] if mesh is not None else []
            if exact and not infinite:
                total = total + sum_of_squares(held, groups, device)
                continue
            part = torch.zeros((), dtype=torch.float64, device=device)
            if held:
                norms = torch.stack([n.to(device) for n in foreach_norm(held, norm_type, dtype=torch.float64)])
                part = norms.amax() if infinite else norms.pow(norm_type).sum()
            for group in groups:
                part = largest_of_ranks(part, group) if infinite else _sum(part, group)
            total = torch.maximum(total, part) if infinite else total + part
    return total if infinite else total.pow(1.0 / norm_type)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _sum(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    with wait_notes.counted("all_reduce"):
        dist.all_reduce(part, group=group)
    return part


def _sharded_over(tensor: torch.Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """Return the mesh, and its dimensions over which the ranks hold different elements."""
    if not isinstance(tensor, DTensor):
        return None, ()
    if any(p.is_partial() for p in tensor.placements):
        raise ValueError(f"a gradient has placements {tensor.placements}, with a sum that is still pending: redistribute it first")
    return tensor.device_mesh, tuple(i for i, p in enumerate(tensor.placements) if not p.is_replicate())
