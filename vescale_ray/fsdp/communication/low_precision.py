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
from vescale_ray.quantization.fp8 import LARGEST, SMALLEST_SCALE, round_stochastically

BLOCK = 128
"""Number of elements that share a scale."""
Wire = Literal["fp8", "bfloat16"]


class LowPrecisionReduceScatter(ReduceScatter):
    """Send gradients in FP8 or BF16, and sum them in FP32.

    Give one object to all units: ``unit.set_custom_reduce_scatter(comm)``. Gradients arrive in the policy's ``reduce_dtype``; sums of
    FP32 need FP32 there. It also works with torch's ``fully_shard``.

    Args:
        wire: ``"fp8"`` or ``"bfloat16"``.
        stochastic: round at random to one of the two nearest numbers, in proportion to their distance; otherwise to the nearest.
        seed: seed of the random numbers. Each rank has its own, and none of torch's generators changes.

    Raises:
        ValueError: there is no such wire.
    """

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
        """Add up encoded rows, one of each rank, in FP32; write the sum times ``factor`` to ``out``."""
        total = self._decoded(rows[0], out.numel())
        for row in rows[1:]:
            total += self._decoded(row, out.numel())
        out.copy_(total.mul_(factor))

    def _encoded(self, parts: torch.Tensor, rank: int) -> torch.Tensor:
        """Return each row as bytes: values, and behind them the scales."""
        values = parts.float()
        noise = self._noise(values, rank)
        if self.wire == "bfloat16":
            if noise is not None:
                bits = values.view(torch.int32) + (noise * 65536.0).to(torch.int32)
                rounded = (bits & ~0xFFFF).view(torch.float32)
                values = torch.where(values.isfinite(), rounded, values)
            return values.to(torch.bfloat16).view(torch.uint8)
        blocks = F.pad(values, (0, -values.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
        scales = (blocks.abs().amax(dim=2, keepdim=True) / LARGEST).clamp_(min=SMALLEST_SCALE)
        quotients = (blocks / scales).flatten(1)
        if noise is not None:
            quotients = round_stochastically(quotients, F.pad(noise, (0, quotients.shape[1] - noise.shape[1])))
        codes = quotients.to(torch.float8_e4m3fn).view(torch.uint8)
        return torch.cat((codes, scales.flatten(1).view(torch.uint8)), dim=1)

    def _decoded(self, row: torch.Tensor, numel: int) -> torch.Tensor:
        if self.wire == "bfloat16":
            return row.view(torch.bfloat16).float()
        padded = -(-numel // BLOCK) * BLOCK
        scales = row[padded:].view(torch.float32)
        return (row[:padded].view(torch.float8_e4m3fn).float().view(-1, BLOCK) * scales[:, None]).view(-1)[:numel]

    def _noise(self, like: torch.Tensor, rank: int) -> torch.Tensor | None:
        """Random numbers in [0, 1)."""
        if not self.stochastic:
            return None
        generator = self._generators.get((like.device, rank))
        if generator is None:
            generator = torch.Generator(like.device).manual_seed((self.seed << 20) + rank)
            self._generators[like.device, rank] = generator
        return torch.rand(like.shape, generator=generator, device=like.device)


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
