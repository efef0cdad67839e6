"""One rank's part of the training state: flat ranges of named tensors, and a few scalars.

A piece is ``(name, kind, [start, end))``: a range of elements of a global tensor. There are three sorts:

    name                     kind                 contents
    the parameter's          param                elements of the parameter
    the parameter's          exp_avg, ..          elements of an optimizer state of the parameter's shape
    parameter's/state's      state                an optimizer state of another shape, its own RaggedDTensor: scales of 8-bit
                                                  states, Shampoo's factors (``layers.0.wq.weight/exp_avg_scale``)

Copies, resharding and checkpoints need nothing else; none of them knows the model, the optimizer or the engine.
:mod:`vescale_ray.checkpoint` names tensors in the same way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vescale_ray.checkpoint import ShardPiece
    from vescale_ray.config import RunConfig
    from vescale_ray.config.rank_grid import RankGrid

PARAM, STATE = "param", "state"


class Training(Protocol):
    """The attributes of a trainer that make up its state (:class:`vescale_ray.workers.trainer.Trainer`)."""

    config: RunConfig
    generation: int
    grid: RankGrid
    rank: int
    completed: int
    parameters: Any
    optimizer: Any
    views: Any
    formats: Any
    base: str | None

    @property
    def consumed(self) -> int: ...


_ALIGN = 16
"""Alignment, in bytes, of pieces in a message, so that each can be viewed in its own dtype."""


class Span(NamedTuple):
    """Elements ``[start, end)`` of the tensor ``(name, kind)``, without the data."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.start

    @property
    def nbytes(self) -> int:
        return self.numel * dtype_of(self.dtype).itemsize


class Strip(NamedTuple):
    """Consecutive spans that differ in kind and dtype alone: elements of a parameter, and the same elements of its states.

    JSON can hold it. With AdamW there are a third as many strips as spans, and a plan for a strip holds for all of its spans.

    Attributes:
        kinds: kind and dtype of each span.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    end: int
    kinds: tuple[tuple[str, str], ...]

    @property
    def spans(self) -> list[Span]:
        return [Span(self.name, kind, self.shape, dtype, self.start, self.end) for kind, dtype in self.kinds]

    @property
    def itemsize(self) -> int:
        """Bytes of one element of each kind, together."""
        return sum(dtype_of(dtype).itemsize for _, dtype in self.kinds)

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> Strip:
        name, shape, start, end, kinds = row
        return cls(name, tuple(shape), start, end, tuple((kind, dtype) for kind, dtype in kinds))


def strips_of(spans: Iterable[Span | Piece]) -> list[Strip]:
    """Join neighbouring spans of the same elements into strips, in order."""
    return [Strip(*at, tuple((span.kind, span.dtype) for span in alike)) for at, alike in groupby(spans, _place)]


def _place(span: Span | Piece) -> tuple[str, tuple[int, ...], int, int]:
    return span.name, span.shape, span.start, span.end


@dataclass(frozen=True)
class Piece:
    """A span with its elements. ``data`` is flat, ``end - start`` long, on any device."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    end: int
    data: Tensor

    def __post_init__(self) -> None:
        if self.data.dim() != 1 or self.data.numel() != self.end - self.start or not 0 <= self.start <= self.end <= math.prod(self.shape):
            raise ValueError(
                f"{self.name} ({self.kind}): {tuple(self.data.shape)} elements cannot be [{self.start}, {self.end}) of shape {self.shape}"
            )

    @property
    def dtype(self) -> str:
        return _name_of(self.data.dtype)

    @property
    def span(self) -> Span:
        return Span(self.name, self.kind, self.shape, self.dtype, self.start, self.end)


@dataclass(frozen=True)
class Shards:
    """One rank's shards in ``generation`` after ``step`` steps.

    Attributes:
        world: number of shards that the state is cut in: ranks of a shard group.
        rank: number of this shard. All replicas hold the same shards.
        pieces: disjoint pieces; together with the other shards' they tile every tensor.
        scalars: values that JSON can hold, the same on every rank: ``step``, ``consumed``, ``base`` (a hash of the frozen weights that are
            no part of the state), and the optimizer's scalars by parameter.
    """

    generation: int
    world: int
    rank: int
    step: int
    pieces: tuple[Piece, ...]
    scalars: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(piece.span.nbytes for piece in self.pieces)


class Views:
    """Cache of pieces of sharded tensors. Each copy asks for all of them, and a rescale does so three times in its pause."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[Tensor, Any, Piece]] = {}

    def piece(self, name: str, kind: str, tensor: Any) -> Piece:
        """Return the piece of ``tensor``, a RaggedDTensor. Call it without autograd."""
        local, spec = tensor.to_local(), tensor._spec
        known = self._known.get((name, kind))
        # The tensor may get other memory (to_empty(), .to(), a state that a step replaces) or another layout.
        if known is None or known[0] is not local or known[1] is not spec:
            start, end = tensor.local_interval()
            # Not tensor.detach(): below autograd it makes a view with its own version counter. The engine would then miss writes to the
            # parameters and use an outdated low-precision copy.
            flat = (local.detach() if local.requires_grad else local).view(-1)
            known = local, spec, Piece(name, kind, tuple(tensor.shape), start, end, flat)
            self._known[name, kind] = known
        return known[2]


def export_shards(trainer: Training) -> Shards:
    """Return the trainer's state as views. Nothing is copied; a write to a view writes to the trainer."""
    pieces, optimizer_scalars = collect(trainer.parameters, trainer.optimizer, trainer.views)
    scalars: dict[str, Any] = {"step": trainer.completed, "consumed": trainer.consumed, "optimizer": optimizer_scalars}
    if trainer.formats:
        scalars["formats"] = trainer.formats
    if trainer.base is not None:
        scalars["base"] = trainer.base
    grid = trainer.grid
    return Shards(trainer.generation, grid.shards, grid.shard_of(trainer.rank), trainer.completed, pieces, scalars)


def formats_of(parameters: Iterable[tuple[str, Tensor]], optimizer: torch.optim.Optimizer) -> dict[str, list[Any]]:
    """Format of the optimizer states, by parameter: the block as text, and the codec's version. Parameters without either are left out."""
    formats = {
        id(parameter): [group.get("block"), group.get("codec_version")]
        for group in optimizer.param_groups
        for parameter in group["params"]
        if not (group.get("block") is None and group.get("codec_version") is None)
    }
    return {name: formats[id(parameter)] for name, parameter in parameters if id(parameter) in formats}


def check_scalars(trainer: Training, scalars: Mapping[str, Any]) -> None:
    """Check whether a state with these scalars fits the trainer, as far as they tell.

    Raises:
        ValueError: the scalars are of another batch size, another optimizer, or states in another format.
    """
    step, consumed = int(scalars["step"]), int(scalars["consumed"])
    batch = trainer.config.global_batch
    if consumed != step * batch:
        raise ValueError(
            f"the state consumed {consumed} samples in {step} steps, but train.slots * train.slot_batch = {batch}: "
            "keep the global batch of the run that saved it"
        )
    named: Mapping[str, Mapping[str, float]] = scalars["optimizer"]
    for name, parameter in trainer.parameters:
        state, given = trainer.optimizer.state.get(parameter, {}), named.get(name, {})
        missing = [key for key, value in state.items() if not _is_sharded(value, parameter) and key not in given]
        if missing:
            raise ValueError(f"the state lacks {missing[0]!r} of {name}: an optimizer other than {trainer.config.train.optimizer} saved it")
    formats: Mapping[str, Sequence[Any]] = scalars.get("formats", trainer.formats)  # missing in an older checkpoint
    for name, mine in trainer.formats.items():
        if (theirs := list(formats.get(name, ()))) != mine:
            raise ValueError(
                f"the optimizer state of {name} has (block, codec) {theirs}, but train.optimizer_options give {mine}: "
                "keep the block with which it was saved"
            )


def import_scalars(trainer: Training, scalars: Mapping[str, Any]) -> None:
    """Set the trainer's step, the hash of its base, and its optimizer's scalars. The tensors are written through :func:`export_shards`.

    Raises:
        ValueError: as :func:`check_scalars`, before anything is changed.
    """
    check_scalars(trainer, scalars)
    named: Mapping[str, Mapping[str, float]] = scalars["optimizer"]
    for name, parameter in trainer.parameters:
        state = trainer.optimizer.state.get(parameter, {})
        for key, value in list(state.items()):
            if isinstance(value, Tensor) and not _is_sharded(value, parameter):
                value.fill_(named[name][key])
            elif not isinstance(value, Tensor):
                state[key] = named[name][key]
    trainer.completed, trainer.base = int(scalars["step"]), scalars.get("base")


@torch.no_grad()
def collect(
    parameters: Iterable[tuple[str, Tensor]], optimizer: torch.optim.Optimizer, views: Views
) -> tuple[tuple[Piece, ...], dict[str, dict[str, float]]]:
    """Pieces of sharded parameters and their sharded optimizer states, and the values of the other states by parameter.

    Raises:
        ValueError: an optimizer state is neither sharded nor one number.
    """
    pieces: list[Piece] = []
    scalars: dict[str, dict[str, float]] = {}
    numbers: dict[tuple[torch.device, torch.dtype], list[tuple[str, str, Tensor]]] = {}
    for name, parameter in parameters:
        pieces.append(views.piece(name, PARAM, parameter))
        for kind, value in optimizer.state.get(parameter, {}).items():
            if _is_sharded(value, parameter):
                # A state of the parameter's shape is a kind of its tensor. Others need a name of their own, since a checkpoint's tensor has
                # one shape.
                where: tuple[str, str] = (name, kind) if value.shape == parameter.shape else (f"{name}/{kind}", STATE)
                pieces.append(views.piece(*where, value))
            elif value is None or (isinstance(value, Tensor) and value.numel() != 1):
                what = "None" if value is None else f"a plain tensor of shape {tuple(value.shape)}"
                raise ValueError(
                    f"optimizer state {kind!r} of {name} is {what}, which cannot move to other workers: "
                    "make it a number, or a RaggedDTensor (of any shape) on the parameter's mesh"
                )
            elif isinstance(value, Tensor):
                numbers.setdefault((value.device, value.dtype), []).append((name, kind, value))
            else:
                scalars.setdefault(name, {})[kind] = value
    # A fused optimizer has one step counter per parameter on the device. One copy waits for the device once.
    for found in numbers.values():
        for (name, kind, _), number in zip(found, torch.stack([value.reshape(()) for *_, value in found]).tolist(), strict=True):
            scalars.setdefault(name, {})[kind] = number
    return tuple(pieces), scalars


def collect_sizes(parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> dict[Tensor, int]:
    """Return the bytes of each sharded parameter with its sharded optimizer states, over all ranks."""
    return {
        parameter: sum(
            t.numel() * t.element_size()
            for t in (parameter, *(value for value in optimizer.state.get(parameter, {}).values() if _is_sharded(value, parameter)))
        )
        for parameter in parameters
    }


def _is_sharded(value: Any, parameter: Tensor) -> bool:
    # The type decides, not the shape: a one-element parameter has a one-element sharded state, but `step` is a plain tensor. A sharded
    # parameter is of its data's class; `parameter.data` would make a tensor on each call.
    return isinstance(value, Tensor if type(parameter) is torch.nn.Parameter else type(parameter))


@functools.lru_cache(maxsize=64)
def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@functools.lru_cache(maxsize=64)
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def stored_pieces(shards: Shards) -> list[ShardPiece]:
    """Return the same pieces under the names of the checkpoint format."""
    from vescale_ray.checkpoint import ShardPiece

    return [ShardPiece(p.name, p.kind, p.start, p.end, p.shape, p.data.dtype, p.data) for p in shards.pieces]


def aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
