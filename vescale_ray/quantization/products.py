"""Linear layers whose matrix products have FP8 operands, as in DeepSeek-V3's training [arXiv 2412.19437, section 3.3].

Each product contracts over blocks of 128 elements. Weights have a scale per 128 x 128 tile, activations and gradients one per 1 x 128 block
along the contracted dimension::

    forward           y  = x  @ w.T     x  in blocks along the inputs,   w in tiles
    input gradient    dx = dy @ w       dy in blocks along the outputs,  w in the same tiles, transposed
    weight gradient   dw = dy.T @ x     dy and x in blocks along the tokens

Operands are quantized where they are used, with the format of :mod:`vescale_ray.quantization.fp8`. A weight that was gathered in FP8 loses
nothing: with power-of-two scales its values stay to the last bit; with FP32 scales its codes stay, and scales of a BF16 weight differ by at
most 2^-8 of their size. Saved tensors are those of ``nn.Linear``.

Hopper GPUs multiply the codes; with Triton, a kernel quantizes the operands (``products_triton``). Blackwell GPUs do so if the scales are
powers of two (``products_mx``). The CPU emulates that: it sums the products of each block in FP32, multiplies by both scales, and adds the
blocks in FP32. Inf or NaN in an operand makes the results that depend on its block NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vescale_ray.quantization.fp8 import Fp8Block, form_given
from vescale_ray.quantization.operands import SIDE, GpuOperand, Operand, for_gpu, operands
from vescale_ray.quantization.products_mx import GROUP, multiply_mx
from vescale_ray.quantization.scaled_mm import scaled_product

_HOPPER, _BLACKWELL = (9, 0), (10, 0)
"""Compute capabilities."""

FormPolicy = Callable[[str, nn.Parameter], Fp8Block | None]


def multiply(a: Operand | GpuOperand, b: Operand | GpuOperand, dtype: torch.dtype) -> Tensor:
    """Return ``a @ b.T`` in ``dtype``: ``[m, k]`` and ``[n, k]`` give ``[m, n]``."""
    if isinstance(a, Operand) and isinstance(b, Operand) and a.codes.device.type != "cuda":
        return _emulated(a, b, dtype)
    if torch.cuda.get_device_properties(a.codes.device).major >= _BLACKWELL[0]:  # a constant in compiled graphs
        return multiply_mx(a, b, dtype)
    left, right = (for_gpu(one) if isinstance(one, Operand) else one for one in (a, b))
    return _on_hopper(left, right, dtype)


def check_device(device: torch.device, form: Fp8Block = Fp8Block()) -> None:  # noqa: B008 (frozen)
    """Raise ValueError unless the device multiplies operands of ``form``, or is the CPU, which emulates that."""
    if device.type == "cpu":
        return
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.version.hip is None else (0, 0)
    named = f"{torch.cuda.get_device_name(device)} (compute capability {capability[0]}.{capability[1]})" if any(capability) else device.type
    if capability[0] not in (_HOPPER[0], _BLACKWELL[0]):
        raise ValueError(
            f"{named} has no products of FP8 blocks: they need a Hopper or Blackwell GPU (compute capability 9 or 10); gathers in FP8 "
            "work without them"
        )
    if capability >= _BLACKWELL and not (form.power and form.columns % GROUP == 0):
        raise ValueError(
            f"products in {form}: {named} multiplies tiles of a multiple of {GROUP} columns with power-of-two scales; give "
            f"Fp8Block({SIDE}, {SIDE}, 'power_of_two')"
        )
    if capability < _BLACKWELL and form.columns != SIDE:
        raise ValueError(f"products in {form}: {named} multiplies tiles of {SIDE}x{SIDE}; give Fp8Block({SIDE}, {SIDE})")


class Fp8Linear(nn.Linear):
    """An ``nn.Linear`` with FP8 products; made by :func:`compute_in_fp8`."""

    form: Fp8Block

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias``, in the dtype of ``nn.Linear``'s result."""
        x, weight, bias = _autocast(input, self.weight, self.bias)
        if isinstance(weight, DTensor):
            raise TypeError("an Fp8Linear's weight is a DTensor: tensor parallelism has no FP8 products; leave compute_in_fp8 out")
        if x.shape[-1] != weight.shape[1] or x.dtype != weight.dtype:
            raise RuntimeError(
                f"an input of shape {tuple(x.shape)} and {x.dtype} for a weight of shape {tuple(weight.shape)} and {weight.dtype}: give "
                f"{weight.shape[1]} features of that dtype"
            )
        y: Tensor = _Fp8Product.apply(x.reshape(-1, x.shape[-1]), weight, self.form).view(*x.shape[:-1], weight.shape[0])
        return y if bias is None else y + bias

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, products in {self.form}"


def compute_in_fp8(model: nn.Module, policy: FormPolicy) -> list[str]:
    """Give FP8 products to the linear layers whose weight has a format, in place and before ``fully_shard``.

    Other users of quantized weights, as fused experts, compute in the compute dtype.

    Args:
        policy: ``(name, parameter) -> Fp8Block | None``, as for ``fully_shard(.., quantize_policy=..)``.

    Returns:
        Names of the layers.

    Raises:
        TypeError: the model is not a module, or the policy gives something else.
        ValueError: tiles are not square, a weight is a DTensor or on a device without FP8 products, or no layer has a format. Nothing
            was changed.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is a {type(model).__name__}: give the module itself, before fully_shard")
    chosen: dict[str, tuple[nn.Linear, Fp8Block]] = {}
    for name, module in model.named_modules():
        if type(module) not in (nn.Linear, Fp8Linear):
            continue
        fqn = f"{name}.weight" if name else "weight"
        form = form_given("the policy", fqn, policy(fqn, module.weight))  # type: ignore[arg-type]
        if form is None:
            continue
        if not module.weight.is_meta:
            check_device(module.weight.device, form)
        if form.rows != form.columns:
            raise ValueError(f"products of {fqn!r} in {form}: the input gradient needs square tiles, such as Fp8Block({SIDE}, {SIDE})")
        if (kind := type(module.weight.data)) is not Tensor:
            raise ValueError(f"{fqn!r} is a {kind.__name__}: call compute_in_fp8 before the model is sharded or parallelized")
        chosen[name] = module, form  # type: ignore[assignment]
    if not chosen:
        raise ValueError("the policy gives no linear layer of the model a format: give an nn.Linear's weight an Fp8Block")
    for module, form in chosen.values():
        module.__class__ = Fp8Linear
        module.form = form  # type: ignore[assignment]
    return list(chosen)


class _Fp8Product(torch.autograd.Function):
    """``x @ weight.T`` for ``x`` ``[tokens, inputs]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, form: Fp8Block) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.form = form
        if not len(x):
            return x.new_zeros(0, weight.shape[0])
        (rows,), (tiles,) = operands(x, form, rows=True), operands(weight, form, tiles=True, rows=True)
        return multiply(rows, tiles, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        form, dx, dw = ctx.form, None, None
        of_x, of_weight, _ = ctx.needs_input_grad
        if not len(x):
            return torch.zeros_like(x), torch.zeros_like(weight), None
        found = operands(dy, form, rows=of_x, columns=of_weight)
        if of_x:
            (tiles,) = operands(weight, form, tiles=True, columns=True)
            dx = multiply(found[0], tiles, x.dtype)
        if of_weight:
            (columns,) = operands(x, form, columns=True)
            dw = multiply(found[-1], columns, weight.dtype)
        return dx, dw, None


def _autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Return the tensors in autocast's dtype if autocast is on. Autograd functions of one's own don't get that dtype automatically."""
    device = next(t.device.type for t in tensors if t is not None)
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(None if t is None else t.to(dtype) for t in tensors)


def _emulated(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    m, k = a.codes.shape
    n = b.codes.shape[0]
    scales_a = a.scales.repeat_interleave(a.rows, dim=0)[:m]
    scales_b = b.scales.repeat_interleave(b.rows, dim=0)[:n]
    total = torch.zeros(m, n, device=a.codes.device)
    for block, first in enumerate(range(0, k, a.side)):
        here = slice(first, first + a.side)
        part = a.codes[:, here].float() @ b.codes[:, here].float().t()
        total += part * scales_a[:, block, None] * scales_b[None, :, block]
    return total.to(dtype)


def _on_hopper(a: GpuOperand, b: GpuOperand, dtype: torch.dtype) -> Tensor:
    """Multiply blocks of 128 elements."""
    out = scaled_product(a.codes, b.codes, a.scales, b.scales, [a.tiles, b.tiles], False, dtype)
    return out[: a.rows, : b.rows]
