"""Values that a factory gives to parameters are kept or refused, and attention that is not causal is told."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ranks import run_threads
from tests.workers.tiny import tiny
from vescale_ray import fully_shard
from vescale_ray.controller.driver import model_checks, preflight
from vescale_ray.errors import BadInput
from vescale_ray.workers.initial_values import fill
from vescale_ray.workers.model_building import build_model

TABLE = np.arange(256 * 16, dtype=np.float32).reshape(256, 16) / 1000


class Sizes:
    """The configuration of a model that is not transformers'."""

    block = 64


class Net(nn.Module):
    """A model in the manner of nanoGPT, tied, with a configuration and ``_init_weights``."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.embed = Sizes(), nn.Embedding(256, 16)
        self.blocks, self.norm = nn.ModuleList([nn.Linear(16, 16)]), nn.LayerNorm(16)
        self.head = nn.Linear(16, 256, bias=False)
        self.head.weight = self.embed.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Any:
        assert tokens.shape[1] <= self.config.block, f"{tokens.shape[1]} tokens are more than {self.config.block}"
        return self.head(self.norm(self.blocks[0](self.embed(tokens))))


class Filled(Net):
    def init_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        if name == "embed.weight":
            full.copy_(torch.from_numpy(TABLE))
        else:
            full.fill_(0.5)


def with_table(kind: type[Net]) -> Net:
    net = kind()
    net.embed.weight = net.head.weight = nn.Parameter(torch.from_numpy(TABLE.copy()))
    return net


def valued() -> Net:
    return with_table(Net)


def filled() -> Net:
    return with_table(Filled)


def changed(change: Callable[[Any], Any]) -> Callable[[], Net]:
    def factory() -> Net:
        net = Net()
        with torch.no_grad():
            change(net)
        return net

    return factory


applied = changed(lambda net: net.apply(net._init_weights))
truncated = changed(lambda net: nn.init.trunc_normal_(net.blocks[0].weight, std=0.02))
orthogonal = changed(lambda net: nn.init.orthogonal_(net.blocks[0].weight))
zeroed = changed(lambda net: net.blocks[0].bias.data.zero_())
item = changed(lambda net: net.embed.weight.__setitem__(0, 0.0))
listed = changed(lambda net: setattr(net.blocks[0], "bias", nn.Parameter(torch.tensor([0.5] * 16))))
untouched = changed(lambda net: net.norm.reset_parameters())


class Scale(nn.Module):
    """A module without ``reset_parameters``, as nanoGPT's LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.full((16,), 0.25)), nn.Parameter(torch.zeros(16, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


def copied() -> Net:
    net = Net()
    nn.init.trunc_normal_(net.blocks[0].weight, std=0.02)  # type: ignore[arg-type]
    net.norm, net.blocks = Scale(), nn.ModuleList(copy.deepcopy(net.blocks[0]) for _ in range(3))  # type: ignore[assignment]
    return net


class Late(Scale):
    """Its ``reset_parameters`` replaces the values that its constructor gave before."""

    def __init__(self) -> None:
        super().__init__()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.75)


late = changed(lambda net: setattr(net, "norm", Late()))
lost = changed(lambda net: net.blocks[0].weight.copy_(net.head.weight[:16]))


class Whole(Net):
    """Its ``reset_parameters`` fills parameters of its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.blocks[0].bias, 0.75)  # type: ignore[arg-type]


class Partial(Scale):
    """Its ``reset_parameters`` leaves out a parameter that its constructor computes from one without known values."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.bias = nn.Parameter(torch.empty(16))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.75)


def cast() -> nn.Module:
    net = Net()
    net.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
    for at, block in enumerate(net.blocks):
        nn.init.constant_(block.weight, at)  # type: ignore[arg-type]
    return net.to(torch.bfloat16)


def attention() -> Net:
    net = Net()
    net.blocks = nn.ModuleList([nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 2)])
    return net


whole = Whole
partial = changed(lambda net: setattr(net, "norm", Partial()))
identity = changed(lambda net: nn.init.eye_(net.blocks[0].weight))
negative = changed(lambda net: net.norm.weight.neg_())
computed = changed(lambda net: setattr(net.norm, "weight", nn.Parameter(0.5 * torch.ones(16))))
like = changed(lambda net: setattr(net.blocks[0], "bias", nn.Parameter(torch.ones_like(net.blocks[0].bias))))
placed = changed(lambda net: setattr(net.norm, "weight", nn.Parameter(torch.from_numpy(TABLE[0].copy()).to(net.norm.weight.device))))


def row() -> Net:
    net = Net()
    nn.init.constant_(net.blocks[0].weight, 0.5)  # type: ignore[arg-type]
    with torch.no_grad():
        net.blocks[0].weight[2:4] *= 3  # type: ignore[index,operator]
        net.blocks[0].weight[0] = torch.ones(16).cumsum(0)  # type: ignore[operator]
    return net


def iterated() -> Net:
    net, x = Net(), torch.randn(16, 16)
    for _ in range(40):
        x = x @ x + x
    net.blocks[0].weight = nn.Parameter(x)
    return net


data = changed(lambda net: setattr(net.blocks[0].weight, "data", torch.randn(16, 16) * 0.02))
copied_values = changed(lambda net: net.blocks[0].weight.copy_(torch.randn(16, 16) * 0.02))


def values_of(name: str) -> dict[str, Tensor]:
    """Return the initial values of a factory's model. Two ranks as threads would share the random state."""
    config = preflight.foresee(tiny("stdlib", model_factory=f"{__name__}:{name}")).config

    def run(rank: int, world: int) -> dict[str, Tensor]:
        model: Any = build_model(config)
        fully_shard(model, to_empty=True)
        model.to_empty(device="cpu")
        fill(config, model, lambda: build_model(config), lambda: None)
        return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}

    return run_threads(1, run)[0]


def test_values_that_a_factory_gives_are_given_again() -> None:
    plain = values_of("untouched")
    assert 0.8 < plain["embed.weight"].std() < 1.2, "as nn.Embedding's own"
    for name in ("zeroed", "item", "listed", "late"):
        found, alone = values_of(name), globals()[name]()
        changes = {key for key in found if not torch.equal(found[key], plain[key])}
        whole = {"zeroed": "blocks.0.bias", "listed": "blocks.0.bias", "late": "norm.weight"}.get(name)
        assert changes == {whole or "embed.weight"}
        if whole:
            assert torch.equal(found[whole], alone.get_parameter(whole))
        else:
            assert not found["embed.weight"][0].any() and torch.equal(found["embed.weight"][1:], plain["embed.weight"][1:])
    for name in ("applied", "truncated", "copied"):
        found = values_of(name)
        for key, value in found.items():
            if key.startswith("blocks") and key.endswith("weight"):
                assert 0.015 < value.std() < 0.025 and value.abs().max() < 0.1, (name, key)
    assert torch.equal(found["norm.weight"], torch.full((16,), 0.25)) and not found["norm.bias"].any()
    assert torch.equal(values_of("copied")["embed.weight"], found["embed.weight"]), "the same in each process"
    square = values_of("orthogonal")["blocks.0.weight"]
    torch.testing.assert_close(square @ square.T, torch.eye(16), atol=1e-5, rtol=0)
    assert 0.015 < values_of("applied")["embed.weight"].std() < 0.025, "tied"


@pytest.mark.parametrize("name", ["whole", "identity", "negative", "computed", "like", "cast", "placed", "row"])
def test_values_equal_those_of_the_factory_on_the_cpu(name: str) -> None:
    torch.manual_seed(0)
    first = dict(globals()[name]().named_parameters())
    torch.manual_seed(1)
    found, second = values_of(name), dict(globals()[name]().named_parameters())
    fixed = [key for key in first if torch.equal(first[key], second[key])]
    assert len(fixed) > 1 and all(torch.equal(found[key], first[key]) for key in fixed)


def test_random_values_have_the_spread_of_the_factory() -> None:
    for name in ("data", "copied_values"):
        assert 0.015 < values_of(name)["blocks.0.weight"].std() < 0.025, name
    found = values_of("attention")
    for layer in "01":
        weight = found[f"blocks.0.layers.{layer}.self_attn.in_proj_weight"]  # Xavier's, not that of a linear layer
        assert 0.8 < weight.std() / (2 / (16 + 48)) ** 0.5 < 1.2 and not found[f"blocks.0.layers.{layer}.self_attn.in_proj_bias"].any()


def test_a_parameter_that_nothing_fills_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"norm.bias gets no values, or NaN; fill it in reset_parameters\(\) of its module"):
        values_of("partial")


def test_a_long_computation_of_values_is_refused() -> None:
    with pytest.raises(BadInput, match=r"blocks.0.weight gets values by torch.add from a tensor without values"):
        preflight.foresee(tiny("stdlib", model_factory=f"{__name__}:iterated"))


def test_values_from_a_tensor_without_values_are_refused() -> None:
    with pytest.raises(BadInput) as caught:
        preflight.foresee(tiny("stdlib", model_factory=f"{__name__}:lost"))
    assert ": blocks.0.weight gets values by copy_ from a tensor without values, since the factory runs on the meta" in str(caught.value)
    assert str(caught.value).endswith("fill all parameters in a method init_parameter(name, full, generator) of Net")


def test_parameters_of_numpy_arrays_are_filled_by_init_parameter() -> None:
    config = tiny("stdlib", model_factory=f"{__name__}:valued")
    with pytest.raises(BadInput, match=r"embed.weight has values, .*load weights in a method init_parameter\(name, full, generator\)"):
        preflight.foresee(config)
    config = preflight.foresee(tiny("stdlib", model_factory=f"{__name__}:filled")).config

    def run(rank: int, world: int) -> None:
        model: Any = build_model(config)
        assert model.head.weight is model.embed.weight and model.embed.weight.is_meta
        fully_shard(model, to_empty=True)
        model.to_empty(device="cpu")
        fill(config, model, lambda: build_model(config), lambda: None)
        assert torch.equal(model.embed.weight.full_tensor(), torch.from_numpy(TABLE)) and model.head.weight is model.embed.weight

    run_threads(2, run)


def test_an_assertion_of_the_model_is_told() -> None:
    with pytest.raises(BadInput, match=r"forward fails with tokens \(2, 80\): AssertionError: 80 tokens are more than 64"):
        preflight.foresee(tiny("stdlib", model_factory=f"{__name__}:untouched", data_seq_len=80))


class Attending(nn.Module):
    def __init__(self, causal: bool, packed: bool) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(256, 16), nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)])
        self.causal, self.packed = causal, packed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.packed:
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1]) if self.causal else None
            x = self.layers[0](x, src_mask=mask, is_causal=self.causal)
        else:
            x = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=self.causal)[:, 0]
        return x @ self.embed.weight.T


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_that_reads_ahead_is_told(causal: bool, packed: bool) -> None:
    config = tiny("stdlib", model_factory="any:model")
    with torch.device("meta"):
        told = model_checks.check_model(Attending(causal, packed), config)
    remedy = "(it has neither a mask nor is_causal); if that is not meant, make it causal"
    line = f"model.factory = any:model: its attention reads the tokens that training predicts {remedy}"
    assert told == ([] if causal else [line])
