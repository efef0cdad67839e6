"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) by the package ``peft``: the base is frozen, the adapters are trained.

``peft`` puts a targeted layer ``X`` below ``X.base_layer``, beside ``X.lora_A.default`` and ``X.lora_B.default``. The layer's weight is
then ``base_layer.weight + alpha / rank * lora_B.weight @ lora_A.weight``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vescale_ray.config.model_section import LoraSettings
from vescale_ray.errors import BadInput

ADAPTER = "default"
ALL_LINEAR = "all-linear"
PARAMETERS = ("*.lora_A.*", "*.lora_B.*")
"""Globs of the adapters' parameters."""


def is_adapter(name: str) -> bool:
    """Return whether the parameter ``name`` is an adapter's, not the base's."""
    return ".lora_A." in name or ".lora_B." in name


def add_adapters(model: nn.Module, keys: LoraSettings) -> None:
    """Add adapters to ``model``, which is on the meta device, and freeze its other parameters.

    Raises:
        BadInput: peft is missing, or the targets name no linear layer.
    """
    peft, refused = _peft(), f"model.lora.targets = {keys.targets}: "
    linear = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)})
    remedy = f"; the model's linear layers are {', '.join(linear)}"
    targets = _targets(keys, model)
    taken = _taken_for_experts(_config(peft, keys, targets), model)
    if keys.targets == ALL_LINEAR:
        targets = [target for target in targets if target not in taken]
    elif taken:
        names = ", ".join(sorted(taken))
        raise BadInput(f"{refused}peft takes {names} for the fused experts of {type(model).__name__}, which get no adapters; leave it out")
    if not targets:
        raise BadInput(f"{refused}the model has no linear layer but its head")
    for target in targets:
        found = [module for name, module in model.named_modules() if f".{name}".endswith(f".{target}")]
        other = next((type(module).__name__ for module in found if not isinstance(module, nn.Linear)), None)
        if other is not None or not found:
            raise BadInput(f"{refused}{target} is {'not a layer' if other is None else f'of type {other}'}{remedy}")
    try:
        with torch.device("meta"):
            peft.inject_adapter_in_model(_config(peft, keys, targets), model)
    except ValueError as error:
        raise BadInput(f"{refused}{' '.join(str(error).split())[:200]}{remedy}") from None


def _targets(keys: LoraSettings, model: nn.Module) -> list[str]:
    """Return the names of the layers that get adapters. ``all-linear`` is all linear layers but the head; peft takes experts and others,
    too."""
    if keys.targets != ALL_LINEAR:
        return list(keys.targets)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head)
    return sorted({name.rpartition(".")[2] for name in linear})


def _taken_for_experts(config: Any, model: nn.Module) -> set[str]:
    """Return the targets that peft interprets as matrices of fused experts, by their names before transformers 5."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # an older peft
        return set()
    given = set(config.target_modules)
    try:
        convert_peft_config_for_transformers(config, model=model, conversions=None)
    except ValueError:  # the injection raises it again
        return set()
    return given - set(config.target_modules)


def base_names(model: nn.Module) -> dict[str, str]:
    """Return the names of the base's parameters in a model with adapters, by their names in the model without adapters."""
    return {name.replace(".base_layer.", "."): name for name, _ in model.named_parameters() if ".base_layer." in name}


def initial_adapters(model: nn.Module, seed: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield name and initial values of the adapters' parameters, as peft chooses them: ``lora_A`` random, ``lora_B`` zero.

    Args:
        model: a model with adapters, on the meta device. Its adapters get memory in turn.
        seed: function from a module's name to its seed.
    """
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            layer: Any = module
            with torch.random.fork_rng([]):
                torch.manual_seed(seed(name))
                for part in (layer.lora_A, layer.lora_B):
                    part.to_empty(device="cpu")
                layer.reset_lora_parameters(ADAPTER, True)
            for kind, part in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
                yield f"{name}.{kind}.{ADAPTER}.weight", part[ADAPTER].weight.detach()
                part.to(device="meta")


def write_adapter(folder: Path, keys: LoraSettings, base: str, tensors: Mapping[str, Tensor]) -> None:
    """Write ``tensors``, by their names in the model, as an adapter that ``PeftModel.from_pretrained`` loads.

    Args:
        base: the folder of the base model, which the adapter names.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    layers = {name.partition(".lora_")[0].rpartition(".")[2] for name in tensors}
    config = _config(_peft(), keys, sorted(layers) if isinstance(keys.targets, str) else keys.targets)
    config.base_model_name_or_path, config.inference_mode = base, True
    named = {f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": value.contiguous() for name, value in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", {"format": "pt"})
    config.save_pretrained(folder)


def delta(keys: LoraSettings, down: Tensor, up: Tensor) -> Tensor:
    """Return the adapter's part of a weight: ``alpha / rank * lora_B @ lora_A``, in float32."""
    return (up.float() @ down.float()) * (keys.alpha / keys.rank)


def _config(peft: Any, keys: LoraSettings, targets: list[str]) -> Any:
    return peft.LoraConfig(r=keys.rank, lora_alpha=keys.alpha, lora_dropout=keys.dropout, target_modules=targets, task_type="CAUSAL_LM")


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise BadInput("model.lora: the package peft is not installed; pip install 'vescale-ray[hf]'") from None
    return peft
