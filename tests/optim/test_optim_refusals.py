"""Refusals of the optimizers, of clipping and of state dicts: the user's mistake, the message, and the remedy, which then trains."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.ranks import on_processes, on_threads
from vescale_ray import fully_shard
from vescale_ray.geometry import Block
from vescale_ray.optim import (
    SOAP,
    AdamW,
    AdamW8bit,
    CombinedOptimizer,
    Flat,
    Muon,
    OptimizerConfig,
    Shampoo,
    build_optimizer,
    clip_grad_norm_,
    route_parameters,
)
from vescale_ray.state_dict import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict

WORLD = 2
FULL = StateDictOptions(full_state_dict=True)


def net(shift: float = 0.0) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.copy_(torch.arange(param.numel()).add(index + shift).sin().view(param.shape) / 2)
    return model


def batch(rank: int) -> torch.Tensor:
    return torch.arange(24.0).add(7 * rank).cos().view(3, 8)


def backward(rank: int, model: Any, plain: Any) -> None:
    model(batch(rank)).square().mean().backward()
    (sum(plain(batch(one)).square().mean() for one in range(WORLD)) / WORLD).backward()


def same(model: nn.Module, plain: nn.Module) -> None:
    expected = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        torch.testing.assert_close(param.full_tensor(), expected[name], rtol=1e-5, atol=1e-6, msg=name)


def refused(call: Callable[[], Any], kind: type[BaseException], words: tuple[str, ...]) -> None:
    with pytest.raises(kind) as error:
        call()
    said = str(error.value)
    assert "\n" not in said and all(word in said for word in words), (words, said)


@dataclass
class Case:
    """A mistake (``wrong``), and the optimizer that the message suggests (``right``).

    On the sharded module and on a plain one ``right`` takes the same step.
    """

    wrong: Callable[[Any], Any]
    kind: type[BaseException]
    words: tuple[str, ...]
    right: Callable[[Any], torch.optim.Optimizer] = lambda m: build_optimizer(m, "adamw", log=None)


def adamw(**config: Any) -> dict[str, Any]:
    return {"name": "adamw", **config}


OPTIMIZERS: dict[str, Case] = {
    "a name that is none": Case(lambda m: build_optimizer(m, "adam", log=None), ValueError, ("'adam'", "known are adamw")),
    "no configuration": Case(lambda m: build_optimizer(m, None, log=None), TypeError, ("config is None", "'adamw'")),  # type: ignore[arg-type]
    "an optimizer's class": Case(lambda m: build_optimizer(m, torch.optim.AdamW, log=None), TypeError, ("AdamW", "'adamw'")),  # type: ignore[arg-type]
    "a key that is none": Case(
        lambda m: build_optimizer(m, adamw(learning_rate=1e-2), log=None),
        ValueError,
        ("no 'learning_rate'", "it takes name, lr"),
        lambda m: build_optimizer(m, adamw(lr=1e-2), log=None),
    ),
    "a rate as a string": Case(
        lambda m: build_optimizer(m, adamw(lr="1e-2"), log=None),
        ValueError,
        ("lr = '1e-2'", "give a number"),
        lambda m: build_optimizer(m, adamw(lr=1e-2), log=None),
    ),
    "a decay below 0": Case(lambda m: OptimizerConfig(weight_decay=-0.1), ValueError, ("weight_decay = -0.1", "at least 0")),
    "one beta": Case(
        lambda m: build_optimizer(m, adamw(betas=(0.9,)), log=None),
        ValueError,
        ("betas = (0.9,)", "two numbers in [0, 1)"),
        lambda m: build_optimizer(m, adamw(betas=(0.9, 0.99)), log=None),
    ),
    "parameters for the model": Case(
        lambda m: build_optimizer(m.parameters(), "adamw", log=None),  # type: ignore[arg-type]
        TypeError,
        ("the model is a generator", "the module itself"),
    ),
    "a log that is no function": Case(
        lambda m: build_optimizer(m, "adamw", log="run.log"),  # type: ignore[arg-type]
        TypeError,
        ("log = 'run.log'", "or None"),
    ),
    "routes of another model": Case(
        lambda m: build_optimizer(m, "muon", routing=route_parameters(nn.Linear(3, 3), "muon"), log=None),
        ValueError,
        ("'0.weight' was not in the model", "route the model that is optimized"),
        lambda m: build_optimizer(m, "muon", routing=route_parameters(m, "muon"), log=None),
    ),
    "AdamW8bit, a rate as a string": Case(
        lambda m: AdamW8bit(m.parameters(), lr="1e-2"),  # type: ignore[arg-type]
        ValueError,
        ("lr = '1e-2'", "give a number"),
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    ),
    "AdamW8bit of a model": Case(
        lambda m: AdamW8bit(m),
        TypeError,
        ("AdamW8bit got a Sequential", "model.parameters()"),
        lambda m: AdamW8bit(m.parameters()),
    ),
    "Flat of nothing": Case(
        lambda m: Flat(None),  # type: ignore[arg-type]
        TypeError,
        ("Flat got a NoneType", "model.parameters()"),
        lambda m: Flat(m.parameters()),
    ),
    "Muon of a set": Case(lambda m: Muon({m[0].weight, m[2].weight}), TypeError, ("Muon got a set", "differs by rank")),
    "a group that is a set": Case(
        lambda m: AdamW([{"params": set(m.parameters())}]),
        TypeError,
        ("a param group got a set", "differs by rank"),
        lambda m: AdamW([{"params": list(m.parameters())}]),
    ),
    "a group without parameters": Case(
        lambda m: AdamW([{"param": list(m.parameters()), "lr": 0.1}]),
        TypeError,
        ("no 'params', only 'param', 'lr'", "under that key"),
        lambda m: AdamW([{"params": list(m.parameters()), "lr": 0.1}]),
    ),
    "Flat of an optimizer": Case(
        lambda m: Flat(m.parameters(), torch.optim.AdamW(m.parameters())),  # type: ignore[arg-type]
        TypeError,
        ("optimizer_class is a AdamW:", "as torch.optim.AdamW"),
        lambda m: Flat(m.parameters(), torch.optim.AdamW),
    ),
    "Flat of a name": Case(
        lambda m: Flat(m.parameters(), "adamw"),  # type: ignore[arg-type]
        TypeError,
        ("'adamw'", "as torch.optim.AdamW"),
        lambda m: Flat(m.parameters(), torch.optim.AdamW),
    ),
    "Flat of what is not element-wise": Case(
        lambda m: Flat(m.parameters(), torch.optim.Adafactor),
        ValueError,
        ("Adafactor is not element-wise", "by itself"),
        lambda m: Flat(m.parameters(), torch.optim.SGD, lr=0.1),
    ),
    "one optimizer to combine": Case(
        lambda m: CombinedOptimizer(AdamW(m.parameters())),  # type: ignore[arg-type]
        TypeError,
        ("got a AdamW", "a list"),
        lambda m: CombinedOptimizer([AdamW(m.parameters())]),
    ),
    "no optimizer to combine": Case(
        lambda m: CombinedOptimizer([]), TypeError, ("at least one",), lambda m: CombinedOptimizer([AdamW(m.parameters())])
    ),
    "no state dict": Case(lambda m: AdamW(m.parameters()).load_state_dict(None), TypeError, ("a NoneType", "state_dict()")),  # type: ignore[arg-type]
    "a part of a state dict": Case(
        lambda m: AdamW(m.parameters()).load_state_dict({"optimizer": 1, "state": {}}),
        ValueError,
        ("AdamW has no 'param_groups', but ['optimizer', 'state']", "not a part"),
    ),
}


@pytest.mark.parametrize("what", OPTIMIZERS)
@on_threads(WORLD)
def test_an_optimizer_refuses_and_the_remedy_steps(rank: int, world: int, what: str) -> None:
    case = OPTIMIZERS[what]
    model, plain = fully_shard(net()), net()
    refused(lambda: case.wrong(model), case.kind, case.words)
    steps = [case.right(model), case.right(plain)]
    backward(rank, model, plain)
    for optimizer in steps:
        optimizer.step()
    same(model, plain)


@pytest.mark.parametrize("make", [AdamW, AdamW8bit, Flat, Muon, Shampoo, SOAP])
@on_threads(WORLD)
def test_a_parameter_given_twice_is_refused(rank: int, world: int, make: Any) -> None:
    model: Any = fully_shard(net())
    weight, other = model[0].weight, model[2].weight
    model.unshard()
    gathered = model[0].weight
    assert gathered is not weight
    words = "of shape (8, 8), is in the same group, too, so each step would change it twice: give it once"
    refused(lambda: make([other, weight, weight]), ValueError, (f"parameter 2 of param group 0, {words}",))
    refused(lambda: make([gathered, weight]), ValueError, (f"parameter 1 of param group 0, {words}",))
    refused(lambda: make([("0.weight", weight)] * 2), ValueError, (f"0.weight of param group 0, {words}",))
    there = "parameter 0 of param group 2, of shape (8, 8), is in param group 1, too"
    refused(lambda: make([{"params": [one]} for one in (other, weight, gathered)]), ValueError, (there,))
    made = make([other])
    refused(lambda: made.add_param_group({"params": [other]}), ValueError, ("parameter 0 of param group 1",))
    assert len(made.param_groups) == 1


@on_threads(WORLD)
def test_flat_refuses_integers_by_name(rank: int, world: int) -> None:
    model: Any = net()
    model[0].table = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    fully_shard(model)
    refused(lambda: Flat(model.named_parameters()), ValueError, ("0.table of shape (3,) is torch.int8", "leave it out"))
    refused(lambda: Flat(model.parameters()), ValueError, ("parameter 2 of shape (3,) is torch.int8",))


CLIPS: dict[str, tuple[Callable[[Any], Any], type[BaseException], tuple[str, ...]]] = {
    "a model": (lambda m: clip_grad_norm_(m, 1.0), TypeError, ("got a Sequential", "model.parameters()")),
    "None": (lambda m: clip_grad_norm_(None, 1.0), TypeError, ("got a NoneType",)),  # type: ignore[arg-type]
    "pairs": (lambda m: clip_grad_norm_(m.named_parameters(), 1.0), TypeError, ("a list with a tuple",)),
    "names": (lambda m: clip_grad_norm_(dict(m.named_parameters()), 1.0), TypeError, ("a list with a str",)),  # type: ignore[arg-type]
    "max_norm: a string": (lambda m: clip_grad_norm_(m.parameters(), "1"), ValueError, ("max_norm = '1'",)),  # type: ignore[arg-type]
    "max_norm: None": (lambda m: clip_grad_norm_(m.parameters(), None), ValueError, ("max_norm = None",)),  # type: ignore[arg-type]
    "max_norm: NaN": (lambda m: clip_grad_norm_(m.parameters(), math.nan), ValueError, ("max_norm = nan",)),
    "max_norm: negative": (lambda m: clip_grad_norm_(m.parameters(), -1.0), ValueError, ("max_norm = -1.0", "at least 0")),
    "norm_type: a string": (lambda m: clip_grad_norm_(m.parameters(), 1.0, "fro"), ValueError, ("norm_type = 'fro'", "above 0")),  # type: ignore[arg-type]
    "norm_type: negative": (lambda m: clip_grad_norm_(m.parameters(), 1.0, -math.inf), ValueError, ("norm_type = -inf",)),
    "norm_type: NaN": (lambda m: clip_grad_norm_(m.parameters(), 1.0, math.nan), ValueError, ("norm_type = nan",)),
    "norm_type: 0": (lambda m: clip_grad_norm_(m.parameters(), 1.0, 0), ValueError, ("norm_type = 0", "above 0")),
    "norm_type: 1, exact": (lambda m: clip_grad_norm_(m.parameters(), 1.0, 1.0, exact=True), ValueError, ("norm_type = 1.0", "2 or inf")),
}


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@on_threads(WORLD)
def test_complex_gradients_are_clipped_by_their_magnitudes(rank: int, world: int, norm_type: float) -> None:
    model, plain = (nn.Linear(4, 3).to(torch.complex128) for _ in range(2))
    with torch.no_grad():
        for module in (model, plain):
            for param in module.parameters():
                param.copy_(torch.arange(param.numel()).mul(1 + 2j).sin().view(param.shape))
    fully_shard(model)
    for module in (model, plain):
        module(torch.ones(2, 4, dtype=torch.complex128) * (1 - 1j)).abs().square().sum().backward()
    mine = clip_grad_norm_(model.parameters(), 1e-3, norm_type)
    torch.testing.assert_close(mine.double(), nn.utils.clip_grad_norm_(plain.parameters(), 1e-3, norm_type), rtol=1e-6, atol=0)
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert expected.grad is not None and isinstance(param.grad, DTensor)
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("what", CLIPS)
@on_threads(WORLD)
def test_clipping_refuses_before_it_scales(rank: int, world: int, what: str) -> None:
    wrong, kind, words = CLIPS[what]
    model, plain = fully_shard(net()), net()
    assert clip_grad_norm_(model.parameters(), 1.0) == 0  # no gradients
    backward(rank, model, plain)
    refused(lambda: wrong(model), kind, words)
    for norm_type in (2.0, "inf"):
        mine = clip_grad_norm_(model.parameters(), 1e-3, norm_type)
        torch.testing.assert_close(mine, nn.utils.clip_grad_norm_(plain.parameters(), 1e-3, float(norm_type)))
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert expected.grad is not None
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad)


def other() -> dict[str, Any]:
    return net(0.5).state_dict()


LOADS: dict[str, tuple[Callable[[Any, Any], Any], type[BaseException], tuple[str, ...]]] = {
    "no model": (lambda m, o: get_model_state_dict(None), TypeError, ("the model is a NoneType",)),  # type: ignore[arg-type]
    "options: a dict": (lambda m, o: get_model_state_dict(m, options={}), TypeError, ("StateDictOptions(", "not {}")),  # type: ignore[arg-type]
    "no optimizer": (lambda m, o: get_optimizer_state_dict(m, None), TypeError, ("the optimizers hold a NoneType",)),  # type: ignore[arg-type]
    "another model's optimizer": (
        lambda m, o: get_optimizer_state_dict(m, torch.optim.SGD(net().parameters(), lr=1.0)),
        ValueError,
        ("SGD holds a parameter of shape (8, 8) that is not in the model", "model.parameters()"),
    ),
    "None": (lambda m, o: set_model_state_dict(m, None, options=FULL), ValueError, ("it is a NoneType, not a dict",)),  # type: ignore[arg-type]
    "names of a wrapper": (
        lambda m, o: set_model_state_dict(m, {f"module.{name}": value for name, value in other().items()}, options=FULL),
        ValueError,
        ("has ['module.0.weight'", "rename its entries, as the model calls them"),
    ),
    "nothing": (lambda m, o: set_model_state_dict(m, {}, options=FULL), ValueError, ("lacks", "set broadcast_from_rank0=True")),
    "one entry too many": (
        lambda m, o: set_model_state_dict(m, {**other(), "x": torch.ones(1)}, options=FULL),
        ValueError,
        ("has ['x']", "StateDictOptions(strict=False)"),
    ),
    "one array among tensors": (
        lambda m, o: set_model_state_dict(m, {**other(), "2.bias": other()["2.bias"].numpy()}, options=FULL),
        ValueError,
        ("2.bias is a ndarray", "torch.as_tensor"),
    ),
    "no groups": (lambda m, o: set_optimizer_state_dict(m, o, {"state": {}}, options=FULL), ValueError, ("no 'param_groups'", "['state']")),
    "None for the optimizer": (
        lambda m, o: set_optimizer_state_dict(m, o, None, options=FULL),  # type: ignore[arg-type]
        ValueError,
        ("it is a NoneType, not a dict",),
    ),
}


@pytest.mark.parametrize("what", LOADS)
@on_threads(WORLD)
def test_a_refused_state_dict_writes_nothing(rank: int, world: int, what: str) -> None:
    wrong, kind, words = LOADS[what]
    model = fully_shard(net())
    optimizer = torch.optim.AdamW(model.parameters())
    refused(lambda: wrong(model, optimizer), kind, words)
    same(model, net())  # nothing was written
    set_model_state_dict(model, other(), options=FULL)
    same(model, net(0.5))


@pytest.mark.parametrize("kind", [AdamW, AdamW8bit, Muon, Shampoo, SOAP])
@on_threads(WORLD)
def test_parameters_that_fully_shard_has_replaced_are_refused(rank: int, world: int, kind: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    early = list(model.parameters())
    fully_shard(model, block_policy=lambda name, param: Block.tensor())
    with pytest.raises(ValueError, match="2 of 2 parameters .* build the optimizer after fully_shard"):
        kind(early)
    kind(model.parameters())


@on_threads(3)
def test_refused_cut_of_a_small_parameter_names_its_policy(rank: int, world: int) -> None:
    model = fully_shard(nn.Linear(8, 17))
    with pytest.raises(ValueError, match="block_policy=") as refusal:
        AdamW8bit(model.parameters(), min_8bit_numel=16)
    policy = str(refusal.value).split("block_policy=")[1].split("), or")[0]
    again = fully_shard(nn.Linear(8, 17), block_policy=eval(policy))
    assert "exp_avg_code" in AdamW8bit(again.parameters(), min_8bit_numel=16).state[again.weight]


@pytest.mark.parametrize("kind", [SOAP, Shampoo, AdamW8bit])
@on_threads(2)
def test_columns_cut_by_a_placement_are_refused(rank: int, world: int, kind: Any) -> None:
    options: dict[str, Any] = {"min_8bit_numel": 16} if kind is AdamW8bit else {}
    model = fully_shard(nn.Linear(8, 8, bias=False), shard_placement_fn=lambda _: Shard(1))
    with pytest.raises(ValueError, match="block_policy, without a shard_placement_fn, or give the parameter to AdamW"):
        kind(model.parameters(), **options)
    AdamW(model.parameters())
    kind(fully_shard(nn.Linear(8, 8, bias=False), block_policy=kind.block_policy(**options)).parameters(), **options)


@on_threads(2)
def test_rows_cut_by_tensor_parallelism_too_are_refused(rank: int, world: int) -> None:
    """The placement is torch's _StridedShard."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Sequential(nn.Linear(8, 8, bias=False)), mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"], shard_placement_fn=lambda _: Shard(0))
    with pytest.raises(ValueError, match="parameter 0 of shape .* train it with AdamW .* or shard it over the data-parallel mesh only"):
        Muon(model.parameters())
    AdamW(model.parameters())
    Muon(fully_shard(nn.Linear(8, 8, bias=False), mesh=mesh["dp"]).parameters())


@pytest.mark.parametrize("kind", [AdamW, Flat, AdamW8bit])
@on_processes(2)
def test_states_of_plain_shards_stay_on_their_rank(rank: int, world: int, kind: Any) -> None:
    model = fully_shard(net(), shard_placement_fn=lambda _: Shard(0))
    optimizer = kind(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    states: list[Any] = [None, None]
    dist.all_gather_object(states, optimizer.state_dict())
    new = kind(model.parameters())
    new.load_state_dict(states[rank])
    with pytest.raises(ValueError, match=rf"the part that rank {1 - rank} on .* on rank {rank} of 2"):
        new.load_state_dict(states[1 - rank])
