"""One rank's part of the whole training state: flat ranges of named tensors, and a few scalars.

A piece is ``(name, kind, [start, end))``: elements of a global tensor. There are three sorts:

    name                     kind                 elements of
    the parameter's          param                the parameter itself
    the parameter's          exp_avg, ..          an optimizer state of the parameter's shape: whatever the optimizer keeps
    parameter's/state's      state                an optimizer state of another shape, a RaggedDTensor of its own: the scales of 8-bit
                                                  states, Shampoo's factors (``layers.0.wq.weight/exp_avg_scale``)

That is all that a copy, a move to another layout, or a checkpoint needs to know: none of them knows the model, the optimizer or the
engine. Checkpoints name the tensors of :mod:`vescale_ray.checkpoint` in the same way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vescale_ray.checkpoint import ShardPiece
    from vescale_ray.workers.trainer import Trainer

PARAM, STATE = "param", "state"
_ALIGN = 16
"""Bytes: pieces in a message start at multiples, so that each can be viewed in its own dtype."""


class Span(NamedTuple):
    """Elements ``[start, end)`` of the tensor ``(name, kind)``: what a holder has, or wants, without the data."""

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
    """Spans that differ in kind and dtype alone, one after another: elements of a parameter, and the same of its states. JSON-able.

    With AdamW a third as many, and what is told of one, or planned for it, holds for all of its spans.

    Attributes:
        kinds: kind and dtype of each.
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
    """The spans, in their order, as few strips as can be."""
    return [Strip(*at, tuple((span.kind, span.dtype) for span in alike)) for at, alike in groupby(spans, _place)]


def _place(span: Span | Piece) -> tuple[str, tuple[int, ...], int, int]:
    return span.name, span.shape, span.start, span.end


@dataclass(frozen=True)
class Piece:
    """A span with its elements: ``data`` is flat, ``end - start`` long, on any device."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    end: int
    data: Tensor

    def __post_init__(self) -> None:
        if self.data.dim() != 1 or self.data.numel() != self.end - self.start or not 0 <= self.start <= self.end <= math.prod(self.shape):
            raise ValueError(
                f"{self.name} ({self.kind}): {tuple(self.data.shape)} elements can't be [{self.start}, {self.end}) of shape {self.shape}"
            )

    @property
    def dtype(self) -> str:
        return _name_of(self.data.dtype)

    @property
    def span(self) -> Span:
        return Span(self.name, self.kind, self.shape, self.dtype, self.start, self.end)


@dataclass(frozen=True)
class Shards:
    """What rank ``rank`` of ``world`` held in ``generation`` after ``step`` steps.

    Attributes:
        pieces: disjoint; together with the other ranks' they tile every tensor.
        scalars: JSON-able, the same on every rank: ``step``, ``consumed``, and the optimizer's scalars by parameter.
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
    """Pieces of sharded tensors, each made once: a copy of each step asks for all of them, and a rescale three times in its pause."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[Tensor, Any, Piece]] = {}

    def piece(self, name: str, kind: str, tensor: Any) -> Piece:
        """The piece of ``tensor``, a RaggedDTensor. Call it without autograd."""
        local, spec = tensor.to_local(), tensor._spec
        known = self._known.get((name, kind))
        # The same tensor may be given other memory (to_empty(), .to(), a state that is replaced in a step), or another layout.
        if known is None or known[0] is not local or known[1] is not spec:
            start, end = tensor.local_interval()
            # Not tensor.detach(): below autograd that makes a view with a version counter of its own, and the engine would not see
            # that the parameters were written, and go on with an older low-precision copy.
            flat = (local.detach() if local.requires_grad else local).view(-1)
            known = local, spec, Piece(name, kind, tuple(tensor.shape), start, end, flat)
            self._known[name, kind] = known
        return known[2]


def export_shards(trainer: Trainer) -> Shards:
    """The trainer's state as views: writing to them writes to the trainer. Nothing is copied."""
    pieces, optimizer_scalars = collect(trainer.parameters, trainer.optimizer, trainer.views)
    scalars: dict[str, Any] = {"step": trainer.completed, "consumed": trainer.consumed, "optimizer": optimizer_scalars}
    if trainer.formats:
        scalars["formats"] = trainer.formats
    return Shards(trainer.generation, trainer.world, trainer.rank, trainer.completed, pieces, scalars)


def formats_of(parameters: Iterable[tuple[str, Tensor]], optimizer: torch.optim.Optimizer) -> dict[str, list[Any]]:
    """By parameter, what its states mean beside their shapes: the block that they belong to, as text, and the codec's version. Parameters
    whose optimizer has neither are left out."""
    formats = {
        id(parameter): [group.get("block"), group.get("codec_version")]
        for group in optimizer.param_groups
        for parameter in group["params"]
        if not (group.get("block") is None and group.get("codec_version") is None)
    }
    return {name: formats[id(parameter)] for name, parameter in parameters if id(parameter) in formats}


def check_scalars(trainer: Trainer, scalars: Mapping[str, Any]) -> None:
    """Whether a state with these scalars can become the trainer's, as far as they tell.

    Raises:
        ValueError: they are those of another batch size, another optimizer, or of states in another format.
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
            raise ValueError(f"the state has no {missing[0]!r} of {name}: another optimizer than {trainer.config.train.optimizer} saved it")
    formats: Mapping[str, Sequence[Any]] = scalars.get("formats", trainer.formats)  # none: an older checkpoint, which does not tell
    for name, mine in trainer.formats.items():
        if (theirs := list(formats.get(name, ()))) != mine:
            raise ValueError(
                f"the optimizer's state of {name} is of (block, codec) {theirs}, and train.optimizer_options make it {mine}: keep the "
                "block that it was saved with"
            )


def import_scalars(trainer: Trainer, scalars: Mapping[str, Any]) -> None:
    """Set the trainer's step and its optimizer's scalars; the tensors are written through :func:`export_shards`.

    Raises:
        ValueError: as :func:`check_scalars`. Nothing is changed then.
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
    trainer.completed = int(scalars["step"])


@torch.no_grad()
def collect(
    parameters: Iterable[tuple[str, Tensor]], optimizer: torch.optim.Optimizer, views: Views
) -> tuple[tuple[Piece, ...], dict[str, dict[str, float]]]:
    """Pieces of sharded parameters and of their sharded optimizer states; and the other states' values by parameter.

    Raises:
        ValueError: an optimizer state is neither sharded nor one number.
    """
    pieces: list[Piece] = []
    scalars: dict[str, dict[str, float]] = {}
    for name, parameter in parameters:
        pieces.append(views.piece(name, PARAM, parameter))
        for kind, value in optimizer.state.get(parameter, {}).items():
            if _is_sharded(value, parameter):
                # Of the parameter's shape it is one of the tensor's kinds; a checkpoint's tensor has one shape, so others have a name.
                where: tuple[str, str] = (name, kind) if value.shape == parameter.shape else (f"{name}/{kind}", STATE)
                pieces.append(views.piece(*where, value))
            elif value is None or (isinstance(value, Tensor) and value.numel() != 1):
                what = "None" if value is None else f"a plain tensor of shape {tuple(value.shape)}"
                raise ValueError(
                    f"optimizer state {kind!r} of {name} is {what}: only numbers and sharded states (RaggedDTensor, of any shape) can be "
                    "moved to other workers; make it a RaggedDTensor on the parameter's mesh"
                )
            else:
                scalars.setdefault(name, {})[kind] = value.item() if isinstance(value, Tensor) else value
    return tuple(pieces), scalars


def collect_sizes(parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> dict[Tensor, int]:
    """Bytes of each sharded parameter with its sharded optimizer states, of all ranks together."""
    return {
        parameter: sum(
            t.numel() * t.element_size()
            for t in (parameter, *(value for value in optimizer.state.get(parameter, {}).values() if _is_sharded(value, parameter)))
        )
        for parameter in parameters
    }


def _is_sharded(value: Any, parameter: Tensor) -> bool:
    # By its type, not its shape: a parameter of one element has a sharded state of one element; `step` is a plain tensor.
    # A sharded parameter is of its data's class; `parameter.data` would make a tensor of it each time.
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
    """The same pieces as a checkpoint names them."""
    from vescale_ray.checkpoint import ShardPiece

    return [ShardPiece(p.name, p.kind, p.start, p.end, p.shape, p.data.dtype, p.data) for p in shards.pieces]


def aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
