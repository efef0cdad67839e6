"""Model shapes against their publishers' parameter counts, and against modules."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from vescale_ray.errors import BadInput
from vescale_ray.models.llama import Llama, LlamaConfig
from vescale_ray.planner.models.architectures import PUBLISHED
from vescale_ray.planner.models.model_shapes import model_shapes

# Total and active parameters, as published. Exact counts come from the released safetensors files (Hugging Face model pages). Rounded
# counts come from the reports: gpt-oss arXiv 2508.10925 table 1 (its active counts leave the embedding out), DeepSeek-V3 arXiv 2412.19437,
# Kimi K2 arXiv 2507.20534, Qwen3 arXiv 2505.09388.
TOTALS = {
    "llama-3-8b": (8_030_261_248, None),
    "llama-3-70b": (70_553_706_496, None),
    "llama-3-405b": (405_853_388_800, None),
    "gpt-oss-20b": (20.91e9, 3.61e9),
    "gpt-oss-120b": (116.83e9, 5.13e9),
    "deepseek-v3": (671e9, 37e9),
    "qwen3-8b": (8_190_735_360, None),
    "qwen3-30b-a3b": (30.5e9, 3.3e9),
    "kimi-k2": (1.04e12, 32.6e9),
}


@pytest.mark.parametrize("name", TOTALS)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    shapes = model_shapes(name)
    total, active = TOTALS[name]
    if isinstance(total, int):
        assert shapes.numel == total
    else:
        assert shapes.numel == pytest.approx(total, rel=0.015 if name == "kimi-k2" else 0.002)
    if active is not None:
        embedding = next(p.numel for u in shapes.units for p in u.params if p.name == "embed_tokens")
        counted = shapes.active - (embedding if name.startswith("gpt-oss") else 0)
        assert counted == pytest.approx(active, rel=0.02)
    assert model_shapes(name, experts="separate").numel == shapes.numel


def test_every_published_model_has_a_count_and_a_source() -> None:
    assert set(TOTALS) == set(PUBLISHED)
    assert all(any(word in source for word in ("arXiv", "http")) for source, _ in PUBLISHED.values())


def test_separate_experts_are_single_matrices() -> None:
    (unit,) = [u for u in model_shapes("deepseek-v3", experts="separate").units if u.name == "layer (experts)"]
    experts = [p for p in unit.params if p.kind == "expert"]
    assert len(experts) == 256 * 3 and {p.shape for p in experts} == {(2048, 7168), (7168, 2048)}
    (unit,) = [u for u in model_shapes("gpt-oss-120b").units if u.count == 36]
    assert {p.shape for p in unit.params if p.kind == "expert"} == {(128, 2880, 5760), (128, 2880, 2880)}
    assert len(unit.params) == len({p.name for p in unit.params})


def test_config_file_gives_the_shapes_of_the_named_model(tmp_path: Path) -> None:
    for name in PUBLISHED:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**PUBLISHED[name][1], "torch_dtype": "bfloat16"}))
        assert model_shapes(path).units == model_shapes(name).units
        assert model_shapes(str(tmp_path / "config.json")).numel == model_shapes(name).numel
    tied = {**PUBLISHED["qwen3-8b"][1], "tie_word_embeddings": True}
    assert model_shapes("qwen3-8b").numel - model_shapes(tied).numel == 151936 * 4096


class Odd(nn.Module):
    """A model with tied and frozen parameters, nested lists, a scalar, a stack of experts, and an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.blocks = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(8, 8), "rest": nn.ModuleList([nn.Linear(8, 4)])}) for _ in range(3))
        self.last = nn.ModuleList([nn.Linear(8, 3)])
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.experts = nn.Parameter(torch.zeros(4, 3, 2), requires_grad=False)
        self.none = nn.Parameter(torch.zeros(0, 5))


def test_module_splits_into_units_with_tied_and_frozen_tensors() -> None:
    with torch.device("meta"):
        odd = Odd()
    shapes = model_shapes(odd)
    assert [(u.name, u.count, u.resident) for u in shapes.units] == [
        ("root", 1, True),
        ("layers blocks.0", 3, False),
        ("layers last.0", 1, False),
    ]
    assert shapes.numel == sum(p.numel() for p in odd.parameters())
    root = {p.name: p for p in shapes.units[0].params}
    assert "head.weight" not in root and root["embed.weight"].kind == "embedding", "the tied tensor once"
    assert root["scale"].shape == () and root["none"].numel == 0
    assert not root["experts"].trainable and root["experts"].kind == "expert"
    assert (shapes.hidden, shapes.vocab) == (8, 30)


def test_a_factory_is_called_on_the_meta_device() -> None:
    shapes = model_shapes("tests.planner.test_shapes:Odd")
    assert shapes.numel == model_shapes(Odd()).numel
    llama = Llama(LlamaConfig(dim=64, layers=3, heads=4, kv_heads=2, ffn=128))
    layers = [u for u in model_shapes(llama).units if u.count == 3]
    assert math.prod(layers[0].params[0].shape) > 0 and len(layers) == 1


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("lama-3-70b", "'lama-3-70b' is unknown: did you mean llama-3-70b?"),
        ("zzz", "'zzz' is unknown: known are llama-3-8b"),
        ("no/such/config.json", "no/such/config.json: can't be read"),
        ("tests.planner.test_shapes:Missing", "can't be built on the meta device: AttributeError"),
        ("tests.planner.test_shapes:math", "returned a module, not an nn.Module"),
        ({"model_type": "rwkv"}, "model_type 'rwkv' is not known: known are llama"),
        ({"model_type": "llama", "hidden_size": 8}, "num_hidden_layers is missing"),
        ({**PUBLISHED["llama-3-8b"][1], "hidden_size": "big"}, "hidden_size is 'big': give an integer of at least 0"),
    ],
)
def test_unusable_model_is_refused_in_one_line(model: object, says: str) -> None:
    with pytest.raises(BadInput) as raised:
        model_shapes(model)  # type: ignore[arg-type]
    assert says in str(raised.value) and "\n" not in str(raised.value)


def test_file_without_a_config_is_refused(tmp_path: Path) -> None:
    for text, says in (("{", "not JSON"), ("[1]", "not a JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(BadInput, match=says):
            model_shapes(tmp_path / "config.json")
