"""AdamW with block-wise 8-bit states: 2.01 bytes of state for each parameter instead of 8, and no communication.

Each 8-bit parameter has four states, plain tensors that are sharded like it:

    exp_avg_code      uint8, of the parameter's shape         m = map[code] * scale          (signed map)
    exp_avg_scale     FP32, one per block
    exp_avg_sq_code   uint8, of the parameter's shape         v = (map[code] * scale) ** 2   (map without a zero: see ``codec.py``)
    exp_avg_sq_scale  FP32, one per block

The step is [Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv 1711.05101] in FP32. It decodes a block's m and v,
advances them, uses them for the update, and then encodes them. A block's new states depend on its own numbers alone. No block is
cut, so codes and scales are the same on any number of ranks [veScale-FSDP, section 4].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from vescale_ray.block_grid import BlockSpec, Grid, Region, block_text, parse_block
from vescale_ray.geometry import Block
from vescale_ray.optim.base import BlockOptimizer, check_common, is_embedding_or_head, sqrt_, step_adamw
from vescale_ray.optim.blocks import block_state, cut_of, like_state, section_grid
from vescale_ray.optim.eight_bit.adamw8bit_values import Held, Hyper
from vescale_ray.optim.eight_bit.codec import FORMAT_VERSION, root_codebook, signed_codebook
from vescale_ray.optim.parameters import check_number, local_of
from vescale_ray.quantization.block_scales import largest_of, spread
from vescale_ray.quantization.kernels import has_triton

DEFAULT_BLOCK = 1024
"""Default block, in elements in memory order; each has two FP32 scales, so a parameter takes 2 + 8 / 1024 bytes of state."""
MIN_NUMEL = 4096
"""Tensors with fewer elements keep FP32 states; all such tensors of a model together are a fraction of a percent of it."""
CHUNK_NUMEL = 1 << 17
"""Number of elements that the torch path processes at a time, at least one band of blocks. Temporary memory was measured at 5 to 7 MiB for
any parameter size."""

_CODES = ("exp_avg_code", "exp_avg_scale", "exp_avg_sq_code", "exp_avg_sq_scale")


def keeps_fp32(name: str, numel: int, ndim: int, min_numel: int = MIN_NUMEL) -> bool:
    """Return whether a parameter's states stay in FP32: vectors, small tensors, and by name embeddings and output heads.

    An embedding's rows are updated when their token occurs, so most of a block's v decays while a few rows' values grow.
    """
    return ndim < 2 or numel < min_numel or is_embedding_or_head(name)


class AdamW8bit(BlockOptimizer):
    """AdamW that keeps m and v in 8 bits each, with one scale per block.

    Args:
        params: parameters, param groups, or ``model.named_parameters()``. With names, embeddings and output heads keep FP32 states.
            No shard may cut a block: pass the result of :meth:`block_policy` to ``fully_shard``.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``. Each step reads a tensor ``lr``.
        block: elements that share a scale: a number of elements in memory order, ``Block.tile(r, c)``, ``Block.rows(r)``, or their
            text (``"tile 32x32"``). None: FP32 states for the whole group, with ``torch.optim.AdamW``'s own arithmetic.
        min_8bit_numel: parameters with fewer elements (of the whole tensor) keep FP32 states.
        nonfinite: ``propagate``, ``skip`` or ``raise``: see :class:`~vescale_ray.optim.base.BlockOptimizer`.

    Each param group may set these differently. The format of a parameter's states depends on its global shape, its name and ``block``,
    never on its sharding. BF16 parameters are updated in FP32 and rounded once.

    Raises:
        ValueError: a parameter is cut inside a block, is on the meta device, or was replaced by ``fully_shard``; or a hyperparameter
            is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        block: BlockSpec | str | None = DEFAULT_BLOCK,
        min_8bit_numel: int = MIN_NUMEL,
        nonfinite: str = "propagate",
    ) -> None:
        defaults = {
            "codec_version": FORMAT_VERSION,
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "block": block,
            "min_8bit_numel": min_8bit_numel,
        }
        super().__init__(params, defaults, nonfinite)

    @staticmethod
    def block_policy(
        block: BlockSpec | str | None = DEFAULT_BLOCK, min_8bit_numel: int = MIN_NUMEL
    ) -> Callable[[str, nn.Parameter], Block | None]:
        """Return the ``block_policy`` for ``fully_shard`` that keeps this optimizer's blocks whole.

        It goes by shape alone, also for embeddings and heads. ``fully_shard`` passes a parameter's name inside its unit, which does not
        distinguish the model's ``output`` from an attention's.
        """
        return lambda name, param: block_of("", tuple(param.shape), block, min_8bit_numel)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_common(group)
        check_number(group, "min_8bit_numel", whole=True)
        if group["block"] is not None:
            group["block"] = block_text(parse_block(group["block"]))

    def _new_state(self, param: Tensor, name: str, group: dict[str, Any]) -> dict[str, Tensor]:
        if group["block"] is None or keeps_fp32(name, param.numel(), param.ndim, group["min_8bit_numel"]):
            return {"exp_avg": like_state(param, torch.float32), "exp_avg_sq": like_state(param, torch.float32)}
        block = parse_block(group["block"])
        cut = cut_of(param)
        try:
            grid = section_grid(param, cut, block)
        except ValueError as error:
            least = group["min_8bit_numel"]
            same = repr(group["block"]) + ("" if least == MIN_NUMEL else f", min_8bit_numel={least}")
            raise ValueError(
                f"{error}; shard with fully_shard(.., block_policy=AdamW8bit.block_policy({same})), "
                "or give its param group block=None for FP32 states"
            ) from None
        state: dict[str, Tensor] = {}
        for code, scale in (_CODES[:2], _CODES[2:]):
            state[code] = like_state(param, torch.uint8)
            state[scale] = block_state(param, cut, grid, (), torch.float32)
        return state

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        lr, (beta1, beta2), eps = float(group["lr"]), map(float, group["betas"]), float(group["eps"])
        weight_decay = float(group["weight_decay"])
        exact = [p for p in params if "exp_avg" in self.state[p]]
        if exact:
            step_adamw([(p, self.state[p]) for p in exact], lr, beta1, beta2, eps, weight_decay)
        work: list[tuple[Held, Sequence[Region], Hyper]] = []
        copies: list[tuple[Tensor, Tensor]] = []
        for param in params:
            state = self.state[param]
            if "exp_avg" in state:
                continue
            state["step"] += 1
            step = state["step"].item()
            cut = cut_of(param)
            hyper = Hyper(beta1, beta2, eps, 1 - lr * weight_decay, lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step))
            assert param.grad is not None
            target, grad = local_of(param), local_of(param.grad)
            flat = target.reshape(-1)
            if flat.data_ptr() != target.data_ptr():  # a plain parameter that is not contiguous
                copies.append((target, flat))
            states = [local_of(state[key]).view(-1) for key in _CODES]
            work.append((Held(flat, grad.reshape(-1), *states), _regions(cut.section, group["block"], cut.span), hyper))
        step_blocks(work)
        for target, flat in copies:
            target.copy_(flat.view(target.shape))


def block_of(
    name: str, shape: tuple[int, ...], block: BlockSpec | str | None = DEFAULT_BLOCK, min_8bit_numel: int = MIN_NUMEL
) -> Block | None:
    """Return the block of a parameter that no shard may cut if :class:`AdamW8bit` steps it; None: any cut is allowed.

    Args:
        name: the parameter's full name, or "" if unknown; only the name identifies embeddings and heads.
        shape: shape of the whole parameter.
        block, min_8bit_numel: as in the optimizer.
    """
    if block is None or keeps_fp32(name, math.prod(shape), len(shape), min_8bit_numel):
        return None
    return Grid.of(shape, parse_block(block)).policy_block()


@lru_cache(maxsize=65536)
def _regions(section: tuple[int, ...], block: str, span: tuple[int, int]) -> tuple[Region, ...]:
    return tuple(Grid.of(section, parse_block(block)).regions(*span))


def step_blocks(work: Sequence[tuple[Held, Sequence[Region], Hyper]]) -> None:
    """Step each tensor's elements; its regions describe their blocks. On a GPU one kernel steps all small regions of one kind."""
    parts: dict[torch.device, list[tuple[Held, Region, Hyper]]] = {}
    for held, regions, hyper in work:
        for region in regions:
            numel, blocks = region.bands * region.band_numel, region.bands * region.columns
            part = held if numel == held.param.numel() else held.part(region.element, numel, region.block, blocks)
            parts.setdefault(held.param.device, []).append((part, region, hyper))
    for device, here in parts.items():
        if device.type == "cuda" and has_triton():
            from vescale_ray.optim.eight_bit.adamw8bit_triton import step_triton

            with torch.cuda.device(device):  # Triton launches on the current device
                step_triton(here)
            # Unlike torch's operations, a kernel counts no write. FP8 codes and casts of the shard are renewed after counted writes.
            torch.autograd.graph.increment_version([part.param for part, *_ in here])
        else:
            for part, region, hyper in here:
                step_region_torch(part, region, hyper)


def step_region_torch(held: Held, region: Region, hyper: Hyper) -> None:
    """Step a region with torch's operations; the kernels must give the same bits.

    Every operation is one IEEE operation per element. A fused multiply-add would depend on the element's place in a vector register,
    so results would depend on where a shard or a chunk begins.
    """
    per_chunk = max(1, CHUNK_NUMEL // region.band_numel)
    for first in range(0, region.bands, per_chunk):
        bands = min(per_chunk, region.bands - first)
        size, blocks = region.band_numel, region.columns
        _step_chunk(held.part(first * size, bands * size, first * blocks, bands * blocks), region, hyper)


def _step_chunk(held: Held, region: Region, hyper: Hyper) -> None:
    signed, root = signed_codebook(held.param.device), root_codebook(held.param.device)
    g = held.grad.float().view(-1, region.rows, region.cols)
    m = _unscaled(signed.decode(held.m_code), held.m_scale, region)
    m.mul_(hyper.beta1).add_(g * (1 - hyper.beta1))
    v = _unscaled(root.decode(held.v_code), held.v_scale, region)
    v.mul_(v).mul_(hyper.beta2).add_((g * g).mul_(1 - hyper.beta2))
    sqrt_(v)
    update = m / (v * hyper.root_correction).add_(hyper.eps)
    moved = held.param.float() * hyper.decay
    held.param.copy_(moved.sub_(update.mul_(hyper.step_size).view(-1)))
    for x, codebook, code, scale in ((m, signed, held.m_code, held.m_scale), (v, root, held.v_code, held.v_scale)):
        largest = largest_of(x, region)
        scale.copy_(largest)
        # A block of zeros has scale 0, so any nonzero divisor is right.
        x.mul_(spread(largest.clamp_(min=torch.finfo(torch.float32).tiny).reciprocal_(), region))
        code.copy_(codebook.encode(x.view(-1)))


def _unscaled(x: Tensor, scales: Tensor, region: Region) -> Tensor:
    """Multiply ``x`` (flat, whole bands) by its blocks' scales and return it as ``(bands, rows, cols)``."""
    return x.view(-1, region.rows, region.cols).mul_(spread(scales, region))
