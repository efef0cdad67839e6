"""A reduce-scatter that sends gradients in FP8 or BF16 and sums them in FP32, for ``set_custom_reduce_scatter``.

Each rank rounds its gradients once and sends every other rank its part, in one all-to-all. The owner of a part adds up the ranks' values in
FP32, in rank order. A ring that reduces in BF16 would round after each addition instead.

| wire | bytes per element | error of a rank's gradient |
|---|---|---|
| ``fp8`` | 1.03: an e4m3 code, and an FP32 scale per 128 elements | up to 1/8 of an element (stochastic), or 1/16 (nearest) |
| ``bfloat16`` | 2 | up to 1/128 of an element (stochastic), or 1/256 (nearest) |

Elements below 2^-15 of the largest of their 128 have an error relative to that one. Stochastic rounding is right on average: errors of
ranks and steps cancel out instead of adding up. Inf and NaN arrive as NaN.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn import functional as F

from vescale_ray.communication.point_to_point import Messages, all_to_all, is_pairwise, tag_of
from vescale_ray.compat.fsdp import ReduceScatter
from vescale_ray.planner.step_buffers import GRADIENT_BLOCK, GRADIENT_CHUNK, wire_bytes
from vescale_ray.quantization.fp8 import LARGEST, SMALLEST_SCALE, round_stochastically

Wire = Literal["fp8", "bfloat16"]


class LowPrecisionReduceScatter(ReduceScatter):
    """Send gradients in FP8 or BF16, and sum them in FP32.

    Give one object to all units: ``unit.set_custom_reduce_scatter(comm)``. Sums arrive in the policy's ``reduce_dtype``; sums of FP32
    need FP32 there. It also works with torch's ``fully_shard``, which casts all gradients of a unit to that dtype before.

    Args:
        wire: ``"fp8"`` or ``"bfloat16"``.
        stochastic: round at random to one of the two nearest numbers, in proportion to their distance; otherwise to the nearest.
        seed: seed of the random numbers. Each rank has its own, and none of torch's generators changes.

    Raises:
        ValueError: there is no such wire.
    """

    narrow = True
    """It takes gradients in a narrower dtype than that of the sums. Otherwise the engine casts them before."""

    def __init__(self, wire: Wire = "fp8", *, stochastic: bool = True, seed: int = 0) -> None:
        if wire not in ("fp8", "bfloat16"):
            raise ValueError(f"LowPrecisionReduceScatter({wire!r}): give 'fp8' or 'bfloat16'")
        self.wire, self.stochastic, self.seed = wire, stochastic, seed
        self._generators: dict[tuple[torch.device, int], torch.Generator] = {}

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for gradients or their sums."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Write this rank's part of the sum or mean of the ranks' ``input_tensor`` to ``output_tensor``.

        Raises:
            ValueError: ``op`` is neither SUM nor AVG.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"LowPrecisionReduceScatter with {op}: only SUM and AVG have a low precision")
        world, rank = group.size(), group.rank()
        sent = self._encoded(input_tensor.view(world, -1), rank)
        received = torch.empty_like(sent)
        sizes = [sent.shape[1]] * world
        if is_pairwise(group, sent.device):
            work: Any = all_to_all(received.view(-1), sent.view(-1), sizes, sizes, group, tag_of(f"{self.wire} reduce-scatter"))
        else:
            work = dist.all_to_all_single(received, sent, group=group, async_op=async_op)
        rest = _LowPrecisionSum(self, output_tensor, received, sent, 1.0 / world if op == dist.ReduceOp.AVG else 1.0, work)
        if async_op:
            return rest
        rest.wait()
        return None

    def sum_rows(self, rows: torch.Tensor, out: torch.Tensor, factor: float) -> None:
        """Add up encoded rows, one of each rank, in FP32; write the sum times ``factor`` to ``out``. Chunks bound the memory."""
        if not out.numel():
            return
        values, scales = self._fields(rows, out.numel())
        for start in range(0, out.numel(), GRADIENT_CHUNK):
            some, own = out[start : start + GRADIENT_CHUNK], slice(start, start + GRADIENT_CHUNK)
            blocks = slice(start // GRADIENT_BLOCK, (start + GRADIENT_CHUNK) // GRADIENT_BLOCK)
            total: torch.Tensor | None = None
            for row in range(len(rows)):
                part = values[row, own].float()
                if self.wire == "fp8":
                    part = (part.view(-1, GRADIENT_BLOCK) * scales[row, blocks, None]).view(-1)[: some.numel()]
                total = part if total is None else total.add_(part)
            assert total is not None
            some.copy_(total.mul_(factor))

    def _encoded(self, parts: torch.Tensor, rank: int) -> torch.Tensor:
        """Return each row as bytes. Chunks of columns bound the memory."""
        rows, numel = parts.shape
        sent = parts.new_empty((rows, wire_bytes(numel, self.wire)), dtype=torch.uint8)
        if not numel:
            return sent
        values, scales = self._fields(sent, numel)
        step = max(1, GRADIENT_CHUNK // (rows * GRADIENT_BLOCK)) * GRADIENT_BLOCK
        for start in range(0, numel, step):
            chunk = parts[:, start : start + step].float()
            noise = self._noise(chunk, rank)
            if self.wire == "fp8":
                codes, scale = _codes(chunk, noise)
                values.view(torch.uint8)[:, start : start + step] = codes
                scales[:, start // GRADIENT_BLOCK : (start + step) // GRADIENT_BLOCK] = scale
            else:
                values[:, start : start + step] = chunk if noise is None else _rounded(chunk, noise)
        return sent

    def _fields(self, rows: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values that the bytes of rows hold, padded to whole blocks in FP8, and the blocks' scales (BF16 has none)."""
        if self.wire == "bfloat16":
            return rows.view(torch.bfloat16), rows
        padded = -(-numel // GRADIENT_BLOCK) * GRADIENT_BLOCK
        return rows[:, :padded].view(torch.float8_e4m3fn), rows[:, padded:].view(torch.float32)

    def _noise(self, like: torch.Tensor, rank: int) -> torch.Tensor | None:
        """Random numbers in [0, 1)."""
        if not self.stochastic:
            return None
        generator = self._generators.get((like.device, rank))
        if generator is None:
            generator = torch.Generator(like.device).manual_seed((self.seed << 20) + rank)
            self._generators[like.device, rank] = generator
        return torch.rand(like.shape, generator=generator, device=like.device)


def _rounded(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return ``values``, each finite one rounded to one of its two neighbours in BF16."""
    bits = values.view(torch.int32) + (noise * 65536.0).to(torch.int32)
    return torch.where(values.isfinite(), (bits & ~0xFFFF).view(torch.float32), values)


def _codes(values: torch.Tensor, noise: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of the e4m3 codes of each row, padded to whole blocks, and the blocks' scales."""
    blocks = F.pad(values, (0, -values.shape[1] % GRADIENT_BLOCK)).unflatten(1, (-1, GRADIENT_BLOCK))
    scales = (blocks.abs().amax(dim=2, keepdim=True) / LARGEST).clamp_(min=SMALLEST_SCALE)
    quotients = (blocks / scales).flatten(1)
    if noise is not None:
        quotients = round_stochastically(quotients, F.pad(noise, (0, quotients.shape[1] - noise.shape[1])))
    return quotients.to(torch.float8_e4m3fn).view(torch.uint8), scales.flatten(1)


class _LowPrecisionSum:
    """The wait for the other ranks' parts, and the sum."""

    def __init__(
        self, comm: LowPrecisionReduceScatter, out: torch.Tensor, received: torch.Tensor, sent: torch.Tensor, factor: float, work: Any
    ) -> None:
        self._comm, self._out, self._received, self._factor = comm, out, received, factor
        self._sent: torch.Tensor | None = sent
        self._work: Messages | Any = work

    def wait(self) -> None:
        if self._sent is None:
            return
        if self._work is not None:
            self._work.wait()
        self._sent = self._work = None
        self._comm.sum_rows(self._received, self._out, self._factor)
