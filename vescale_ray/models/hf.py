"""Causal language models of the package ``transformers``, from a local folder with ``config.json`` and, if it has any, safetensors weights.

A model is built on the meta device. ``checkpoint.huggingface_layout`` tells how its tensors lie in files. No network is used.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vescale_ray.errors import BadInput
from vescale_ray.models import fp8_folder
from vescale_ray.models.config_faults import below_one, explain

TOKENIZER = "tokenizer.json"
CONFIG = "config.json"
_GENERATION = "generation_config.json"
_TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
SMALL_FILES = (
    CONFIG,
    _GENERATION,
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    *_TOKENIZER_FILES,
)
"""Files beside the weights, which an export copies."""
_FOREIGN = r"pytorch_model.*\.bin|(consolidated|model|tf_model|flax_model).*\.(pt|pth|ckpt|h5|msgpack)|.*\.gguf"
"""Names of weights in other formats than safetensors."""
_TEMPLATES = "additional_chat_templates"
"""Folder of additional chat templates, such as the one for tools."""


@dataclass(frozen=True)
class HfFolder:
    """A folder with a model of ``transformers``.

    Attributes:
        path: the folder.
        config: transformers' configuration.
        has_weights: whether the folder holds safetensors.
        end_tokens: the tokens at which ``generate`` of transformers ends a text.
    """

    path: Path
    config: Any
    has_weights: bool
    end_tokens: frozenset[int]

    @property
    def vocab(self) -> int:
        """Number of rows of the embeddings."""
        return int(self._text.vocab_size)

    @property
    def positions(self) -> int | None:
        """Maximum number of tokens of a sequence, if the model has a limit."""
        limit = getattr(self._text, "max_position_embeddings", None)
        return limit if isinstance(limit, int) and limit > 0 else None  # XLNet: -1

    @property
    def tokenizer(self) -> Path | None:
        """The folder's tokenizer, if it has one that the package ``tokenizers`` reads."""
        path = self.path / TOKENIZER
        return path if path.is_file() else None

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the weights in the files, if ``config.json`` names it."""
        named = getattr(self.config, "dtype", None)
        return named if isinstance(named, torch.dtype) else None

    @property
    def _text(self) -> Any:
        return self.config.get_text_config()


def open_folder(path: str | os.PathLike[str], key: str = "model.hf") -> HfFolder:
    """Read the configuration in the folder ``path``.

    Args:
        key: name of the setting, for messages.

    Raises:
        BadInput: transformers is missing, or ``path`` is no folder of a causal language model that can be trained.
    """
    where = f"{key} = {path}"
    folder = Path(path).expanduser()
    file = folder / CONFIG
    if not file.is_file() and (folder / "adapter_config.json").is_file():
        raise BadInput(f"{where}: holds an adapter of peft alone; merge it into its base (ckpt export-hf --merge), and give that folder")
    if not file.is_file():
        what = f"has no {CONFIG}" if folder.is_dir() else "is a file" if folder.exists() else "no such folder"
        if "://" in str(path):
            raise BadInput(f"{where}: is a URL; download it (hf download NAME --local-dir FOLDER), and give the folder")
        raise BadInput(f"{where}: {what}; give a folder that save_pretrained wrote, or a downloaded snapshot of a model")
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        told = " ".join(str(error).split())
        raise BadInput(f"{where}: {CONFIG} can't be read ({told}); download the folder again, or correct it") from None
    if not isinstance(given, dict) or not isinstance(given.get("model_type"), str):
        raise BadInput(f"{where}: {CONFIG} names no model_type; give a folder that save_pretrained wrote")
    try:
        fp8_folder.block_size_of(given)
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None
    transformers = _transformers(where)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)  # None would ask
    except Exception as error:
        if "auto_map" in given:
            raise BadInput(f"{where}: {given['model_type']} needs the code in its folder (auto_map); build it in a model.factory") from None
        kind, version = given["model_type"], f"transformers {transformers.__version__}"
        if kind not in transformers.CONFIG_MAPPING:
            raise BadInput(f"{where}: {version} knows no model_type = {kind}; correct its {CONFIG}, or update transformers") from None
        raise BadInput(f"{where}: {version} refuses its {CONFIG}: {explain(error, file)}") from None
    if (wrong := below_one(config.get_text_config())) is not None:
        raise BadInput(f"{where}: its {CONFIG} has {wrong}")
    if hasattr(config, fp8_folder.KEY):  # it says how files hold the weights; the model's parameters are not quantized
        delattr(config, fp8_folder.KEY)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise BadInput(
            f"{where}: {given['model_type']} is not a causal language model of transformers {transformers.__version__}; "
            "train another architecture with model.factory"
        )
    names = [entry.name for entry in folder.iterdir()]
    has_weights = any(name.endswith((".safetensors", ".safetensors.index.json")) and not name.startswith(".") for name in names)
    foreign = next((name for name in names if re.fullmatch(_FOREIGN, name)), None)
    if foreign is not None and not has_weights:
        raise BadInput(f"{where}: {foreign} is not a safetensors file; load the model with from_pretrained, and save_pretrained it")
    return HfFolder(folder, config, has_weights, _end_tokens(folder / _GENERATION, config, where))


def _end_tokens(file: Path, config: Any, where: str) -> frozenset[int]:
    given: Any = getattr(config.get_text_config(), "eos_token_id", None)
    if file.is_file():
        try:
            given = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            raise BadInput(f"{where}: {_GENERATION} does not hold keys and values in braces; correct it, or delete it") from None
        if not all(type(one) is int for one in (given if isinstance(given, list) else [given or 0])):
            raise BadInput(f"{where}: {_GENERATION} has eos_token_id = {json.dumps(given)}; give a token id, or a list of them")
    return frozenset([given] if isinstance(given, int) else given or ())


def build(folder: HfFolder, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build the model, with parameters of ``dtype`` without values, on the meta device. Its forward takes token ids and returns logits.

    Raises:
        BadInput: transformers cannot build it.
    """
    transformers = _transformers(str(folder.path))
    config = copy.deepcopy(folder.config)  # transformers writes the dtype into the configuration
    try:
        with torch.device("meta"):
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:
        told = explain(error, folder.path / CONFIG)
        raise BadInput(f"model.hf = {folder.path}: transformers can't build the model of its {CONFIG}: {told}") from None
    use_no_cache(model)
    if config.get_text_config() is not config:
        _freeze_unread(model)
    return model


def use_no_cache(model: nn.Module) -> None:
    """Let the layers of transformers' ``model`` keep no keys.

    With a cache, attention would reach beyond documents, and a recomputation would add its keys a second time."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False


def _freeze_unread(model: Any) -> None:
    """Freeze parameters that do not affect a text, such as those for images. An optimizer would only let them decay."""
    parts = (model.get_decoder(), model.get_output_embeddings())
    read = {id(parameter) for part in parts if part is not None for parameter in part.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in read)


def initialize(model: nn.Module, module: nn.Module, *, recurse: bool = True) -> None:
    """Fill the parameters and buffers of ``module``, a part of ``model``, as transformers does; with ``recurse``, those below it, too.

    A model within the model fills its own modules.
    """
    fills: dict[int, Any] = {}

    def choose(one: nn.Module, fill: Any) -> None:
        fills[id(one)] = fill = getattr(one, "_init_weights", fill)
        for child in one.children():
            choose(child, fill)

    def visit(one: nn.Module) -> None:
        for child in one.children():
            visit(child)
        fills[id(one)](one)

    choose(model, None)
    visit(module) if recurse else fills[id(module)](module)


def buffer_values(model: nn.Module) -> dict[str, Tensor]:
    """Return the initial values of the buffers of ``model``, such as rotary tables, on the CPU. ``model`` is on the meta device.

    For some buffers that the files hold, transformers has no value. They are NaN, or the least integer of their type."""
    values = {name: torch.empty_like(buffer, device="cpu") for name, buffer in model.named_buffers()}
    with torch.no_grad(), _in_place(model, values):
        for name in {name.rpartition(".")[0] for name in values}:
            initialize(model, model.get_submodule(name), recurse=False)
        if unfilled(values):  # some modules fill the buffers below them
            initialize(model, model)
    return values


@contextmanager
def _in_place(model: nn.Module, values: dict[str, Tensor]) -> Iterator[None]:
    """Within the block, give ``model`` the buffers ``values``, filled with NaN or the least integer.

    The model's parameters stay on the meta device, where filling them does nothing."""
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in values}
    kept = {name: owner._buffers[name.rpartition(".")[2]] for name, owner in owners.items()}
    for name, value in values.items():
        value.fill_(_blank(value))
        owners[name]._buffers[name.rpartition(".")[2]] = value
    try:
        yield
    finally:
        for name, buffer in kept.items():
            owners[name]._buffers[name.rpartition(".")[2]] = buffer


def _blank(value: Tensor) -> float | int | bool:
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return float("nan")
    return False if value.dtype is torch.bool else torch.iinfo(value.dtype).min


def unfilled(values: dict[str, Tensor]) -> list[str]:
    """Return the names of buffers that still hold the filling of :func:`_in_place`, which means that they have no value."""
    kept = {name: value.isnan() if _blank(value) != _blank(value) else value == _blank(value) for name, value in values.items()}
    return [name for name, blank in kept.items() if values[name].dtype is not torch.bool and blank.any()]


def is_hf(model: nn.Module) -> bool:
    """Return whether ``model`` is transformers'."""
    return callable(getattr(model, "_init_weights", None)) and hasattr(getattr(model, "config", None), "get_text_config")


def write_description(folder: HfFolder, buffers: Mapping[str, Tensor], target: Path, tokenizer: str | None = None) -> None:
    """Copy the files that an export needs besides a checkpoint to the folder ``target``: configuration, tokenizer, and persistent
    ``buffers`` by their names in files.

    Args:
        tokenizer: the run's ``tokenizer.json``, which is copied with the files beside it if the folder has none.
    """
    from safetensors.torch import save_file

    target.mkdir(exist_ok=True)
    if folder.tokenizer is None and tokenizer is not None and Path(tokenizer).is_file():
        _copy_small_files(Path(tokenizer).parent, target, _TOKENIZER_FILES)
        shutil.copyfile(tokenizer, target / TOKENIZER)
    _copy_small_files(folder.path, target)
    if buffers:
        save_file({name: value.contiguous() for name, value in buffers.items()}, target / "buffers.safetensors")


def copy_description(folder: HfFolder, target: Path, dtype: torch.dtype | None, quantization: Mapping[str, Any] | None = None) -> None:
    """Copy configuration and tokenizer to an export's folder.

    Args:
        dtype: the dtype of the exported weights that are not quantized, which ``config.json`` names.
        quantization: the ``quantization_config`` of ``config.json``; None: the weights are not quantized.
    """
    _copy_small_files(folder.path, target)
    given = json.loads((target / CONFIG).read_text(encoding="utf-8"))
    given.pop("torch_dtype", None)
    given["dtype"] = str(dtype or torch.float32).removeprefix("torch.")
    given.pop(fp8_folder.KEY, None)
    if quantization is not None:
        given[fp8_folder.KEY] = dict(quantization)
    (target / CONFIG).write_text(json.dumps(given, indent=2) + "\n", encoding="utf-8")


def _copy_small_files(folder: Path, target: Path, names: Sequence[str] = SMALL_FILES) -> None:
    for name in names:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)
    if (folder / _TEMPLATES).is_dir():
        shutil.copytree(folder / _TEMPLATES, target / _TEMPLATES, dirs_exist_ok=True)


def _transformers(where: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise BadInput(f"{where}: the package transformers is not installed; pip install 'vescale-ray[hf]'") from None
    return transformers
