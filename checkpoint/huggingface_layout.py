"""The layout of a transformers model's tensors in safetensors files. It comes from transformers' own conversion, run on meta tensors."""

from __future__ import annotations

import math
import os
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .bridges.foreign import TensorSource
from .bridges.fp8_files import DequantizedSource
from .bridges.pieces import FileLayout, FilePiece, PiecedSource
from .errors import CheckpointMismatch
from .huggingface import HfSource, weights_source

_COMPARED = 1 << 22
"""Number of elements of a tensor that are compared at a time."""


class _Views(TorchFunctionMode):
    """Keep results as views of their arguments, so that no result is a copy in other memory."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in (Tensor.contiguous, Tensor.clone, torch.clone):
            return args[0]
        return func(*args, **(kwargs or {}))


def file_layout(model: nn.Module) -> FileLayout:
    """Return the layout of the model's parameters and persistent buffers in safetensors files.

    transformers converts a few architectures when it saves them: for example, it splits the experts of Qwen3-MoE, which are one parameter
    per layer. The conversion runs here on views of meta tensors, whose offsets tell where each tensor of a file lies.

    Args:
        model: a model on the meta device.

    Raises:
        CheckpointMismatch: the conversion rearranges elements (a transposition, for example).
    """
    from transformers.core_model_loading import revert_weight_conversion

    convert: Any = revert_weight_conversion

    ours: dict[str, Tensor] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    ours |= persistent_buffers(model)
    owner = {tensor.untyped_storage()._cdata: name for name, tensor in ours.items()}
    with _Views(), torch.no_grad():
        stored: Mapping[str, Tensor] = convert(model, dict(ours))
    pieces: dict[str, FilePiece] = {}
    for name, tensor in stored.items():
        source = owner.get(tensor.untyped_storage()._cdata)
        if source is None or not tensor.is_contiguous():
            raise CheckpointMismatch(
                f"{type(model).__name__}: files hold {name!r} in another order of elements than the model, which can't be read in parts; "
                "train it with model.factory, which may load it with from_pretrained"
            )
        pieces[name] = FilePiece(source, int(tensor.storage_offset()), tuple(tensor.shape))
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    tied = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if name not in ours}
    prefix = getattr(model, "base_model_prefix", "")  # files of the model below the head have names without it
    # Some files hold the tables of an old transformers, or layers that only inference uses.
    patterns = *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), r"rotary_emb\.inv_freq$"
    return FileLayout(
        pieces,
        {name: tuple(tensor.shape) for name, tensor in ours.items()},
        patterns,
        tied,
        f"{prefix}." if prefix and hasattr(model, prefix) else "",
    )


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a state dict holds. transformers' models do not change them in training."""
    kept = set(model.state_dict(keep_vars=True))
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def check_weights(path: str | os.PathLike[str], layout: FileLayout, names: Container[str]) -> None:
    """Check that the safetensors in the folder ``path`` are those of ``layout``. Reads headers, and the scales of FP8 weights.

    Args:
        names: the parameters, which are numbers of floating point.

    Raises:
        ForeignFileError, CheckpointMismatch: a file or tensor is missing, is one too many, or has another shape or sort of dtype, or a
            scale is Inf or NaN.
    """
    opened = weights_source(path)
    source = PiecedSource(opened, layout)
    kinds = {name: tensor.kinds["param"] for name, tensor in source.tensors.items() if name in names}
    odd = next((name for name, dtype in kinds.items() if not dtype.is_floating_point), None)
    if odd is not None:
        raise CheckpointMismatch(
            f"{path}: {odd!r} holds integers ({kinds[odd]}): quantized weights can't be trained; give those in bfloat16"
        )
    if isinstance(opened, DequantizedSource):
        opened.check_scales()
    names_there = layout.names_in(opened.tensors)
    for alias, name in layout.tied.items():
        if alias in opened.tensors and name in names_there and not _equal(opened, alias, names_there[name]):
            raise CheckpointMismatch(
                f"{path}: {alias!r} and {name!r} differ, but config.json ties them; set tie_word_embeddings to false there to train both"
            )


def _equal(source: TensorSource, one: str, other: str) -> bool:
    """Return whether two tensors have the same values."""
    tensors = [source.tensors[name] for name in (one, other)]
    if one == other or tensors[0].shape != tensors[1].shape:
        return one == other
    numel = math.prod(tensors[0].shape)
    for start in range(0, numel, _COMPARED):
        parts = [torch.empty(min(_COMPARED, numel - start), dtype=tensor.kinds["param"]) for tensor in tensors]
        for name, part in zip((one, other), parts, strict=True):
            source.read_into(name, "param", start, part)
        if not torch.equal(parts[0].float(), parts[1].float()):
            return False
    return True


def read_buffers(path: str | os.PathLike[str], layout: FileLayout, names: Container[str]) -> dict[str, Tensor]:
    """Read the tensors ``names`` of ``layout`` from the safetensors in the folder ``path``.

    Raises:
        ForeignFileError, CheckpointMismatch: a tensor is missing, or a file can't be read.
    """
    pieces = {file: piece for file, piece in layout.pieces.items() if piece.name in names}
    if not pieces:
        return {}
    source = PiecedSource(HfSource(path), replace(layout, pieces=pieces, ignored=("",)))
    values: dict[str, Tensor] = {}
    for name, stored in source.tensors.items():
        values[name] = torch.empty(stored.shape, dtype=stored.kinds["param"])
        source.read_into(name, "param", 0, values[name].view(-1))
    return values
