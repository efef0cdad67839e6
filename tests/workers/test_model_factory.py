"""A run's initial values are those of its factory, and attention that is not causal is told."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ranks import run_threads
from tests.workers.test_orders import join, resources
from tests.workers.tiny import tiny
from vescale_ray.compat.core import len_torch_function_stack
from vescale_ray.controller.driver import model_checks, preflight
from vescale_ray.errors import BadInput
from vescale_ray.workers import membership
from vescale_ray.workers.building.initial_values import fill
from vescale_ray.workers.building.model_building import Blank, build_model, build_sharded
from vescale_ray.workers.building.model_factory import initial_tensors
from vescale_ray.workers.network.process_groups import GroupFailed
from vescale_ray.workers.network.rank_mesh import rank_meshes
from vescale_ray.workers.worker_state import WorkerState

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


def changed(change: Callable[[Any], Any]) -> Callable[[], Net]:
    def factory() -> Net:
        net = Net()
        with torch.no_grad():
            change(net)
        return net

    return factory


class Rotated(nn.Module):
    """A norm with a random constant."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((16,), 0.25))
        self.register_buffer("angles", torch.randn(16), persistent=False)
        self.register_buffer("table", torch.from_numpy(TABLE[1].copy()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.angles  # type: ignore[operator]


class Filled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Rotated()  # type: ignore[assignment]

    def init_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        full.fill_(0.5)


def read() -> Net:
    """A factory that can't run on the meta device, since it reads a value."""
    net = Net()
    nn.init.constant_(net.norm.weight, torch.linspace(0, 1, 3)[1].item())
    return net


def tied_arrays() -> Net:
    net = Net()
    net.embed.weight = net.head.weight = nn.Parameter(torch.from_numpy(TABLE.copy()))
    return net


def loaded(assign: bool) -> Callable[[], Net]:
    def factory() -> Net:
        net = Net()
        with torch.device("cpu"):
            state = {name: torch.full(value.shape, 0.125) for name, value in net.state_dict().items()}
        net.load_state_dict(state, assign=assign)
        return net

    return factory


def share(net: Net) -> None:
    table = torch.linspace(0, 1, 16)
    for module in (net, net.norm, net.blocks[0]):
        module.register_buffer("table", table, persistent=False)


def alias(net: Net) -> None:
    """Tie two parameters by their memory alone."""
    net.head.weight = nn.Parameter(torch.empty(256, 16))
    net.head.weight.data = net.embed.weight.data


def tie_blocks(net: Net) -> None:
    other = nn.Linear(16, 16, bias=False)
    other.weight = net.blocks[0].weight  # type: ignore[assignment]
    net.blocks.append(other)


def popping(sizes: dict[str, int]) -> Net:
    """A factory that changes its argument and torch's defaults."""
    net = Net()
    net.blocks[0] = nn.Linear(16, sizes.pop("width"))
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cpu")
    return net


ONE = Net()


@functools.cache
def kept() -> Net:
    return Net()


untouched, filled = Net, Filled
applied = changed(lambda net: net.apply(net._init_weights))
computed = changed(lambda net: net.blocks[0].weight.copy_(net.head.weight[:16] * 0.5))
listed = changed(lambda net: setattr(net.blocks[0], "bias", nn.Parameter(torch.tensor([0.5] * 16))))
random_arrays = changed(lambda net: setattr(net.norm, "bias", nn.Parameter(torch.from_numpy(np.random.rand(16).astype(np.float32)))))
random_numbers = changed(lambda net: net.norm.bias.fill_(random.random()))
normed = changed(lambda net: torch.nn.utils.parametrizations.weight_norm(net.blocks[0]))
cast = changed(lambda net: net.to(torch.bfloat16))
rotated = changed(lambda net: setattr(net, "norm", Rotated()))
copied, assigned = loaded(False), loaded(True)
unfilled = changed(lambda net: setattr(net.norm, "bias", nn.Parameter(torch.empty(16))))
other_on_cpu = changed(lambda net: net.embed.weight.is_meta or setattr(net, "norm", nn.LayerNorm(1)))
persistent = changed(lambda net: net.norm.register_buffer("angles", torch.ones(3)))
more_on_cpu = changed(lambda net: net.embed.weight.is_meta or net.blocks.append(nn.Linear(16, 16)))
shared, aliased = changed(share), changed(alias)
one_module, copied_module = (lambda: ONE), (lambda: copy.deepcopy(ONE))
tied_blocks = changed(tie_blocks)
lazy = changed(lambda net: setattr(net, "norm", nn.LazyLinear(16)))
listed_tensors = changed(lambda net: setattr(net.norm, "angles", [torch.ones(3)]))
old_norm = changed(lambda net: torch.nn.utils.weight_norm(net.blocks[0]))  # type: ignore[no-untyped-call]
plain_tensor = changed(lambda net: setattr(net.norm, "angles", torch.ones(3)))


CALLS: list[str] = []


def reads_a_value() -> Net:
    CALLS.append("reads_a_value")
    net = Net()
    assert net.norm.weight.sum().item() == 16
    return net


def loads_a_table() -> Net:
    CALLS.append("loads_a_table")
    net = Net()
    net.norm.weight.data = torch.from_numpy(np.ones(16, np.float32))
    return net


def shows_a_value() -> Net:
    CALLS.append("shows_a_value")
    net = Net()
    assert f"{net.norm.weight.mean():.1f}" == "1.0"
    return net


def no_such_file() -> Net:
    CALLS.append("no_such_file")
    raise FileNotFoundError("weights.pt")


def loses_the_meta_error() -> Net:
    try:
        return reads_a_value()
    except RuntimeError:
        raise ValueError("bad weights") from None


def no_module() -> Any:
    CALLS.append("no_module")
    return 3


def initial(name: str, units: Any = "auto", **args: Any) -> dict[str, Tensor]:
    """Return the initial parameters and buffers of a factory's model, as a run has them."""
    config = preflight.foresee(tiny("stdlib", model_factory=f"{__name__}:{name}", model_args=args, model_units=units)).config

    def run(rank: int, world: int) -> dict[str, Tensor]:
        blank = Blank(config)
        assert all(tensor.is_meta for tensor in [*blank.model.parameters(), *blank.model.buffers()])
        model, _ = build_sharded(config, torch.device("cpu"), rank_meshes(config.grid(1), "cpu"), blank, filled=False)
        fill(config, model, lambda: build_model(config), lambda: None)
        return {name: parameter.full_tensor() for name, parameter in model.named_parameters()} | everything(model.named_buffers)

    return run_threads(1, run)[0]


def everything(named: Callable[..., Any]) -> dict[str, Tensor]:
    """Return tensors by all their names."""
    return {name: tensor.detach() for name, tensor in named(remove_duplicate=False)}


@pytest.mark.parametrize(
    "name",
    "untouched applied computed listed random_arrays random_numbers tied_arrays normed cast rotated shared read copied assigned "
    "copied_module".split(),
)
def test_initial_values_are_those_of_the_factory(name: str) -> None:
    torch.manual_seed(1)
    random.seed(1)
    states = torch.get_rng_state(), random.getstate()
    found = initial(name)
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert not torch.are_deterministic_algorithms_enabled()
    torch.manual_seed(7)  # run.seed
    np.random.seed(7)
    random.seed(7)
    model = globals()[name]()
    expected = dict(model.named_parameters()) | everything(model.named_buffers)
    assert found.keys() == expected.keys() and all(torch.equal(found[key], value) for key, value in expected.items())


def test_a_factory_makes_heartbeats() -> None:
    """Otherwise a worker that gives values to a large model counts as hung."""
    config, beats = tiny("stdlib", model_factory=f"{__name__}:applied"), list[int]()
    model = build_model(config)
    initial_tensors(config, model, model.named_parameters(), "", lambda: beats.append(hash(torch.get_rng_state().numpy().tobytes())))
    assert len(beats) > 10 and len(set(beats)) > 3, "between the random numbers of several parameters"


def test_a_model_built_in_a_generation_makes_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "Trainer", lambda *about, **rest: SimpleNamespace(blank=about[6]))
    none: Any = SimpleNamespace(take=lambda: None)
    has = resources(config=tiny("stdlib", model_factory=f"{__name__}:rotated"), next_model=none)
    trainer: Any = membership.Membership(join(4), has, WorkerState("w7"))._build(None)  # type: ignore[arg-type]
    assert set(trainer.blank.buffers) == {"norm.angles", "norm.table"} and has.heartbeat.beats > 20


def test_a_heartbeat_that_leaves_a_generation_is_no_bad_input() -> None:
    """A fenced generation ends by an error of the heartbeat. A refused input would end the run."""
    config = tiny("stdlib", model_factory=f"{__name__}:applied")
    model = build_model(config)

    def beat() -> None:
        raise GroupFailed("generation 1 ended")

    with pytest.raises(GroupFailed, match="^generation 1 ended$"):
        initial_tensors(config, model, model.named_parameters(), "", beat)


def test_a_factory_may_change_its_arguments_and_defaults() -> None:
    found = initial("popping", sizes={"width": 16})
    assert torch.get_default_dtype() is torch.float32 and torch.empty(1).is_cpu and len_torch_function_stack() == 0
    torch.manual_seed(7)
    try:
        expected = popping({"width": 16})
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert all(torch.equal(found[name], value) for name, value in expected.named_parameters())


def test_init_parameter_takes_precedence() -> None:
    assert all((value == 0.5).all() for name, value in initial("filled").items() if name not in ("norm.angles", "norm.table"))


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("unfilled", "norm.bias gets no values, or NaN; fill it in the constructor of its module"),
        ("other_on_cpu", "norm.weight has shape (16,) on the meta device, but on the CPU shape (1,); build the same model"),
        ("more_on_cpu", "blocks.1.weight is a parameter on the CPU, but not on the meta device; build the same model"),
        ("aliased", "embed.weight and head.weight are two parameters in the same memory; give both modules the same parameter"),
        ("one_module", "it returns the same module at each call; return copy.deepcopy(..) of it, or build a new one"),
        ("lazy", "norm.weight has no shape yet; call the model once in the factory, or give the layer its input size"),
        ("kept", "is on the meta device at each call; build a new module in each, on the current device"),
        ("listed_tensors", "norm.angles holds tensors that are neither parameters nor buffers; register each as a buffer, persistent"),
        ("old_norm", "blocks.0.weight is computed by torch.nn.utils.weight_norm; use torch.nn.utils.parametrizations.weight_norm"),
        ("plain_tensor", "norm.angles is a tensor, but neither a parameter nor a buffer; register it with register_buffer('angles', ten"),
        ("persistent", "persistent buffers ['norm.angles'] are no part of a run's state; register them with persistent=False if they"),
    ],
)
def test_a_factory_that_does_not_fit_is_refused(name: str, words: str) -> None:
    with pytest.raises((AssertionError, BadInput)) as caught:
        initial(name)
    assert f"model.factory = {__name__}:{name}: " in str(caught.value) and words in str(caught.value)
    assert not any(parameter.is_meta for parameter in ONE.parameters())


@pytest.mark.parametrize(
    ("name", "calls"),
    [("reads_a_value", 2), ("loads_a_table", 2), ("shows_a_value", 2), ("no_such_file", 1), ("loses_the_meta_error", 2), ("no_module", 1)],
)
def test_only_the_meta_device_makes_a_second_call(name: str, calls: int) -> None:
    CALLS.clear()
    with contextlib.suppress(ValueError):
        build_model(tiny("stdlib", model_factory=f"{__name__}:{name}"))
    assert len(CALLS) == calls


def test_a_model_larger_than_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    config = tiny("stdlib", model_factory=f"{__name__}:untouched")
    with pytest.raises(BadInput, match=r"take 0.0 GiB of memory in each worker, .* give the model a method init_parameter\(name"):
        fill(config, build_model(config), lambda: build_model(config), lambda: None)
    config = tiny("stdlib", model_factory=f"{__name__}:filled")
    fill(config, build_model(config).to_empty(device="cpu"), lambda: build_model(config), lambda: None)
    with pytest.raises(BadInput, match=r"take 0.0 GiB of memory in each worker, .* give the model a method init_buffer\(name"):
        Blank(config)  # the call for two small buffers builds the whole model


def test_a_parameter_of_two_units_is_refused() -> None:
    config = tiny("stdlib", model_factory=f"{__name__}:tied_blocks")
    words = "blocks.0.weight and blocks.1.weight are one parameter in two units; choose model.units so that one unit, or none, has both"
    with pytest.raises(BadInput, match=words):
        preflight.foresee(config)
    assert initial("tied_blocks", units=["norm"]).keys() == initial("untouched").keys()


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
