"""The policy by roles: matrices and experts are quantized, embeddings, heads, routers, norms and vectors are not."""

from __future__ import annotations

import pytest
from torch import nn

from vescale_ray.models.llama import Llama, LlamaConfig
from vescale_ray.models.moe import MoE, MoEConfig
from vescale_ray.optim import fp8_policy
from vescale_ray.quantization import Fp8Block


def quantized(model: nn.Module, **options: object) -> set[str]:
    policy = fp8_policy(model, Fp8Block(32, 32), **options)  # type: ignore[arg-type]
    # fully_shard passes names inside units, so the name must not matter.
    found = {name: policy("weight", parameter) for name, parameter in model.named_parameters()}
    assert set(found.values()) <= {None, Fp8Block(32, 32)}
    return {name for name, form in found.items() if form is not None}


def llama(**sizes: object) -> Llama:
    return Llama(LlamaConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn=48, vocab=64, **sizes))  # type: ignore[arg-type]


def test_matrices_of_layers_are_quantized() -> None:
    names = {name for name, p in llama().named_parameters() if name.startswith("layers.") and p.dim() == 2}
    assert names and quantized(llama()) == names == quantized(llama(tie=True))


def test_experts_are_quantized_and_routers_are_not() -> None:
    model = MoE(MoEConfig(dim=32, layers=2, heads=4, kv_heads=2, experts=4, top_k=2, ffn=48, vocab=64))
    names = quantized(model)
    assert any(model.get_parameter(name).dim() == 3 for name in names) and not any("router" in name or "bias" in name for name in names)
    assert any("router" in name for name in quantized(model, keep=[]))


@pytest.mark.parametrize("name", ["router", "gate", "gate.wg", "shared_expert_gate", "q_proj.lora_A.default", "q_proj.lora_B.default"])
def test_routers_and_adapters_are_not_quantized(name: str) -> None:
    """Routers of Qwen3-Next and Hunyuan are among them; ``gate_proj`` belongs to an expert."""
    mlp = nn.Module()
    inner = mlp
    for part in name.split("."):
        inner.add_module(part, nn.Module() if part != name.split(".")[-1] else nn.Linear(8, 4, bias=False))
        inner = inner.get_submodule(part)
    mlp.gate_proj = nn.Linear(8, 4, bias=False)
    assert quantized(nn.ModuleDict({"layers": nn.ModuleList([mlp])})) == {"layers.0.gate_proj.weight"}


def test_keep_replaces_the_usual_patterns() -> None:
    assert quantized(llama(), keep=["*.down_proj.weight"]) == {n for n in quantized(llama()) if not n.endswith("down_proj.weight")}


def test_patterns_and_models_without_effect_are_refused() -> None:
    with pytest.raises(ValueError, match=r"keep: '\*.up' matches no parameter; there are "):
        fp8_policy(llama(), keep=["*.up"])
    with pytest.raises(ValueError, match="the model has no matrix to quantize: weight is vector"):
        fp8_policy(nn.PReLU(3))
    with pytest.raises(TypeError, match="the model is a list: give the module itself"):
        fp8_policy([])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("fp8", Fp8Block()),
        ("fp8 1x128", Fp8Block(1, 128)),
        ("fp8 power_of_two", Fp8Block(scales="power_of_two")),
        ("fp8 32x32 power_of_two", Fp8Block(32, 32, "power_of_two")),
    ],
)
def test_a_formats_text_is_parsed(text: str, form: Fp8Block) -> None:
    assert Fp8Block.parse(text) == form
    with pytest.raises(ValueError, match="is not an FP8 format: give fp8, fp8 32x32"):
        Fp8Block.parse(text + "x")
