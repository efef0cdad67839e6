"""The contents of a group's all-gather: its parameters in the compute dtype, or FP8 codes with their scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from vescale_ray.dbuffer import KeptShard
from vescale_ray.fsdp.communication.comm import current_event
from vescale_ray.fsdp.layouts.code_parts import CodeParts, CodePiece
from vescale_ray.fsdp.layouts.division import Division
from vescale_ray.quantization import fp8
from vescale_ray.quantization.kernels import on_triton

PIECEWISE = {"cpu"}
"""Types of devices that dequantize each rank's piece of each tensor separately. Others use a few of torch's operations for all ranks."""


class GroupWire(Protocol):
    """The parts that ranks send in an all-gather."""

    apart: bool
    """True if the parts are received in a buffer of their own, from which :meth:`join` fills the parameters' buffer."""
    keeps_cast: bool
    """True if a rank keeps the cast of its shard between all-gathers, where it sends one."""

    def dtype(self, compute: torch.dtype) -> torch.dtype:
        """Return the parts' dtype, given the compute dtype."""
        ...

    def part_bytes(self, compute: torch.dtype) -> int: ...

    def join(self, parts: torch.Tensor, flat: torch.Tensor) -> None:
        """Fill the parameters' buffer ``flat`` from the parts of all ranks, in rank order."""
        ...

    def describe(self) -> tuple[str, ...]:
        """Return lines of text that determine what the ranks send; two ranks compare them."""
        ...


class PlainWire:
    """Parameters in the compute dtype, divided as ``division`` says."""

    def __init__(self, division: Division, *, keeps_cast: bool = False) -> None:
        self.apart, self._division, self.keeps_cast = division.copies, division, keeps_cast

    def dtype(self, compute: torch.dtype) -> torch.dtype:
        return compute

    def part_bytes(self, compute: torch.dtype) -> int:
        return self._division.part_numel * compute.itemsize

    def join(self, parts: torch.Tensor, flat: torch.Tensor) -> None:
        self._division.join(parts, flat)

    def describe(self) -> tuple[str, ...]:
        return ()


class CodeWire:
    """FP8 codes and scales, laid out as ``parts`` says. A rank sends those of its shard.

    The codes do not depend on the number of ranks: a rank holds whole tiles, or the ranks that share a tile agree on the largest magnitude
    in it.
    """

    apart = True
    keeps_cast = False

    def __init__(self, parts: CodeParts, rank: int) -> None:
        self.parts, self._rank = parts, rank
        self.fqns = {name: name for name in parts.forms}
        """Each tensor's name in error messages."""
        self._part: torch.Tensor | None = None
        self._checked = True
        """True if the scales of the present codes were looked at."""
        self._bad: tuple[torch.Tensor, Any] | None = None
        """Number of each tensor's tiles with Inf or NaN, and the event after which the host may read it."""
        self._tables: dict[str, Any] = {}
        """The kernels' tables of this rank's shard and of all parts."""

    def dtype(self, compute: torch.dtype) -> torch.dtype:
        return torch.uint8

    def part_bytes(self, compute: torch.dtype) -> int:
        return self.parts.part_bytes

    @property
    def cuts_tiles(self) -> bool:
        """True if ranks share tiles, and :meth:`renew` is a collective."""
        return self.parts.cut_tiles > 0

    def renew(self, shard: KeptShard, largest_of_ranks: Callable[[torch.Tensor], torch.Tensor], *, check: bool) -> None:
        """Quantize the master shard.

        Args:
            largest_of_ranks: returns the element-wise largest of all ranks' magnitudes; collective.
            check: whether :meth:`join` looks for Inf and NaN in these codes. On an accelerator, the host waits for the device then.

        Raises:
            NonFiniteWeights: on an accelerator, if the codes that were checked last held Inf or NaN. All ranks raise it.
        """
        if check:
            self._raise_if_bad()
            self._checked = False
        if self._part is None or self._part.device != shard.flat.device:
            with torch.inference_mode(False):
                self._part = torch.zeros(self.parts.part_bytes, dtype=torch.uint8, device=shard.flat.device)
        held = {name: piece for name in self.parts.forms if (piece := self.parts.piece(name, self._rank)) is not None}
        largest = largest_of_ranks(self._largest_in_cut_tiles(shard, held)) if self.cuts_tiles else None
        if on_triton(shard.flat):
            self._table("shard", shard).quantize(shard.flat, self._part, self._part, largest)
            return
        for name, piece in held.items():
            form = self.parts.forms[name]
            known = {element: largest[places] for element, places in piece.cut.items()} if largest is not None else None
            scales = self._part[piece.scales].view(form.scale_dtype)
            fp8.quantize_range(shard.tensor(name), piece.regions, form, self._part[piece.codes], scales, known)

    def _largest_in_cut_tiles(self, shard: KeptShard, held: Mapping[str, CodePiece]) -> torch.Tensor:
        """Return the FP32 largest magnitudes in this rank's parts of all tiles that shard boundaries cut; 0 in tiles of other ranks."""
        largest = torch.zeros(self.parts.cut_tiles, dtype=torch.float32, device=shard.flat.device)
        for name, piece in held.items():
            for region in piece.regions:
                if region.element in piece.cut:
                    largest[piece.cut[region.element]] = fp8.largest_in_part(shard.tensor(name), region)
        return largest

    def write(self, part: torch.Tensor, *, non_blocking: bool) -> None:
        """Copy this rank's codes and scales to ``part``, its place in the parts of all ranks."""
        assert self._part is not None
        part.copy_(self._part, non_blocking=non_blocking)

    def join(self, parts: torch.Tensor, flat: torch.Tensor) -> None:
        """Dequantize the parts of all ranks.

        Raises:
            NonFiniteWeights: on the CPU, if a tile holds Inf or NaN. All ranks raise it, since all have the same scales.
        """
        layout = self.parts.layout
        rows = parts.view(layout.num_shards, self.parts.part_bytes)
        if not self._checked:
            bad = torch.stack([fp8.bad_scales(self.parts.scales_of(name, rows)).sum() for name in self.parts.forms])
            self._bad = bad.to("cpu", non_blocking=True), current_event(flat.device)
            if flat.device.type == "cpu":  # elsewhere the host would wait for the all-gather
                self._raise_if_bad()
            self._checked = True
        if on_triton(flat):
            self._table("parts").dequantize(parts, parts, flat)
            return
        whole = flat.view(layout.num_shards, layout.shard_numel)
        if flat.device.type in PIECEWISE:
            for rank, name, piece in self.parts.pieces():
                form = self.parts.forms[name]
                scale = rows[rank, piece.scales].view(form.scale_dtype)
                fp8.dequantize_range(rows[rank, piece.codes], scale, piece.regions, whole[rank, piece.codes])
            return
        whole.copy_(rows[:, : layout.shard_numel].view(torch.float8_e4m3fn))  # few kernels, for any number of ranks
        for name, grid in self.parts.grids.items():
            start = layout.offsets[name]
            fp8.scale_whole(flat[start : start + grid.numel], self.parts.scales_of(name, rows), grid)

    def _table(self, what: str, shard: KeptShard | None = None) -> Any:
        """Return the kernels' table of this rank's ``shard``, or of the parts of all ranks."""
        if what not in self._tables:
            from vescale_ray.quantization.fp8_triton import Table, TileRun

            parts, pieces = self.parts, []
            for rank, name, piece in parts.pieces():
                form, start = parts.forms[name], rank * parts.part_bytes
                if shard is None:
                    values, codes = rank * parts.layout.shard_numel + piece.codes.start, start + piece.codes.start
                    scales = (start + piece.scales.start) // form.scale_dtype.itemsize
                    pieces.append(TileRun(form.power, piece.regions, values, codes, scales))
                elif rank == self._rank:
                    known = {element: places.start for element, places in piece.cut.items()}
                    scales = piece.scales.start // form.scale_dtype.itemsize
                    pieces.append(TileRun(form.power, piece.regions, shard.kept.offsets[name], piece.codes.start, scales, known))
            self._tables[what] = Table(pieces)
        return self._tables[what]

    def describe(self) -> tuple[str, ...]:
        return tuple(f"{name}: {form}" for name, form in self.parts.forms.items())

    def _raise_if_bad(self) -> None:
        if self._bad is None:
            return
        (bad, event), self._bad = self._bad, None
        if event is not None:
            event.synchronize()
        counts = bad.tolist()
        if any(counts):
            raise fp8.NonFiniteWeights(fp8.bad_text([(self.fqns[name], n) for name, n in zip(self.parts.forms, counts, strict=True) if n]))
