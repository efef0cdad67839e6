"""``ckpt export-hf`` of a run with ``model.lora``: the adapter alone, or the weights of the base with the adapter added.

Checkpoints hold the adapters. The base comes from the folder that ``model.hf`` or ``--model`` names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vescale_ray.errors import BadInput

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vescale_ray.checkpoint import Checkpoint
    from vescale_ray.checkpoint.bridges.pieces import FileLayout, FilePiece, PiecedSource
    from vescale_ray.checkpoint.huggingface_export import Computed
    from vescale_ray.config.model_section import LoraSettings
    from vescale_ray.models.hf import HfFolder

_BASE = ".base_layer.weight"


def check_base(opened: Checkpoint, trained: str | None, given: str | None) -> HfFolder:
    """Return the folder of the base: ``given`` (``--model``), or else ``trained``, the run's ``model.hf``.

    Raises:
        BadInput: the folder is missing, or holds other weights than those with which the adapters of ``opened`` were trained.
    """
    from vescale_ray import checkpoint
    from vescale_ray.models.hf import open_folder
    from vescale_ray.workers.building.initial_values import base_of

    key, path = ("model.hf", str(trained)) if given is None else ("--model", given)
    remedy = "name the folder of the base with --model, or export the adapter alone"
    try:
        folder = open_folder(path, key)
    except BadInput as error:
        raise BadInput(f"--merge: {str(error).partition(';')[0]}; {remedy}") from None
    if not folder.has_weights:
        raise BadInput(f"--merge: {key} = {path}: the folder holds no safetensors weights; {remedy}")
    if checkpoint.fingerprint(path) != base_of(opened):
        raise BadInput(f"--merge: {key} = {path}: {opened.commit.path} was trained on other weights; {remedy}")
    return folder


@dataclass(frozen=True)
class _Base:
    """The base's weights, to which the adapters of a checkpoint are added.

    Attributes:
        dtype: dtype that the base had in training.
        names: the base's parameters that have adapters.
    """

    source: PiecedSource
    dtype: torch.dtype
    adapters: LoraSettings
    names: frozenset[str]

    def value(self, piece: FilePiece, opened: Checkpoint) -> torch.Tensor:
        """Return the value of one tensor of the files; in float32 if an adapter was added to it."""
        import torch

        from vescale_ray.models import lora

        base = torch.empty(piece.numel, dtype=self.source.tensors[piece.name].kinds["param"])
        self.source.read_into(piece.name, "param", piece.start, base)
        base = base.view(piece.shape).to(self.dtype)
        if piece.name not in self.names:
            return base
        layer = piece.name.removesuffix(_BASE)
        down, up = (_whole(opened, f"{layer}.{kind}.{lora.ADAPTER}.weight") for kind in ("lora_A", "lora_B"))
        return base.float() + lora.delta(self.adapters, down, up)


def merged_weights(
    adapters: LoraSettings, base: HfFolder, model: nn.Module, layout: FileLayout, opened: Checkpoint, dtype: torch.dtype | None
) -> dict[str, Computed]:
    """Return the base's tensors with the adapters of ``opened`` added, by their names in the files.

    Args:
        model: the model with adapters.
        layout: layout of the model's tensors in the files.
        dtype: dtype of the tensors; None keeps that of the base.

    Raises:
        BadInput: an adapter is of a layer whose weight is tied to another layer's.
    """
    import torch

    from vescale_ray.checkpoint.bridges.pieces import PiecedSource
    from vescale_ray.checkpoint.huggingface import weights_source
    from vescale_ray.checkpoint.huggingface_export import Computed

    names = frozenset(name for name, _ in model.named_parameters() if name.endswith(_BASE))
    layers = (name.partition(".lora_A.")[0] for name in opened.tensors if ".lora_A." in name)
    tied = next((layer for layer in layers if layer + _BASE not in names), None)
    if tied is not None:
        raise BadInput(f"--merge: {tied} shares its weight with another layer, which has no adapter; export the adapter alone")
    kept = base.dtype or torch.float32
    weights = _Base(PiecedSource(weights_source(base.path), layout), kept, adapters, names)
    return {name: Computed(piece.shape, dtype or kept, partial(weights.value, piece)) for name, piece in layout.pieces.items()}


def write_adapter(folder: str, opened: Checkpoint, adapters: LoraSettings, base: str, dtype: torch.dtype | None) -> dict[str, Any]:
    """Write the adapter of ``opened`` to ``folder``. Return the commit's name, and the numbers of tensors and bytes.

    Args:
        base: the folder of the base, which the adapter names.
        dtype: dtype of the tensors; None keeps that of the checkpoint.

    Raises:
        BadInput: the folder is not empty.
    """
    from vescale_ray.models import lora

    target = Path(folder)
    if target.exists() and any(target.iterdir()):
        raise BadInput(f"{folder} is not empty; give a new folder")
    tensors = {name: _whole(opened, name).to(dtype) for name in opened.tensors if lora.is_adapter(name) and "/" not in name}
    lora.write_adapter(target, adapters, base, tensors)
    return {"commit": opened.commit.name, "tensors": len(tensors), "bytes": sum(tensor.nbytes for tensor in tensors.values())}


def _whole(opened: Checkpoint, name: str) -> torch.Tensor:
    shape = opened.tensors[name].shape
    return opened.read_range(name, 0, math.prod(shape)).view(shape)
