"""Routing of parameters by role from global shapes, and several optimizers behind one interface."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.dtensor.layouts import one_dim_mesh
from tests.optim.llamas import MUON, SIZES, llama, loss_of
from tests.ranks import on_threads, run_threads
from vescale_ray.config import load_config, parse_config
from vescale_ray.fsdp import fully_shard
from vescale_ray.geometry import Block
from vescale_ray.models.llama import Llama
from vescale_ray.optim import AdamW, Muon, OptimizerConfig, build_optimizer, route_parameters
from vescale_ray.optim.build import create_states


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 6, 8))
        self.bias = nn.Parameter(torch.zeros(4, 6))


class Zoo(nn.Module):
    """A model with a parameter of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Parameter(torch.randn(50, 8))
        self.conv = nn.Conv2d(3, 4, 3)
        self.router = nn.Linear(8, 4)
        self.experts = Experts()
        self.norm = nn.LayerNorm(8)
        self.square = nn.Linear(50, 50, bias=False)
        self.last = nn.Linear(8, 50, bias=False)


def test_roles_follow_from_modules_names_and_global_shapes() -> None:
    routing = route_parameters(llama(), MUON)
    roles = {r.name: (r.role, r.optimizer) for r in routing.routes}
    assert roles["embed.weight"] == ("embedding", "adamw") and roles["head.weight"] == ("head", "adamw")
    assert roles["norm.weight"] == roles["layers.0.ffn_norm.weight"] == ("norm", "adamw")
    assert roles["layers.1.ffn.down_proj.weight"] == roles["layers.0.attention.k_proj.weight"] == ("matrix", "muon")
    assert sum(o == "muon" for _, o in roles.values()) == 14
    assert {r.name: r.role for r in route_parameters(llama(tie=True), MUON).routes}["embed.weight"] == "embedding"
    assert {r.name: r.role for r in route_parameters(Zoo(), MUON).routes} == {
        "wte": "embedding",
        "conv.weight": "other",
        "conv.bias": "vector",
        "router.weight": "matrix",
        "router.bias": "vector",
        "experts.up": "expert",
        "experts.bias": "vector",
        "norm.weight": "norm",
        "norm.bias": "norm",
        "square.weight": "matrix",
        "last.weight": "head",
    }


def sharded_roles(rank: int, world: int) -> dict[str, Any]:
    with torch.device("meta"):
        model = llama_on_meta()
    before = route_parameters(model, MUON)
    for layer in model.layers:
        fully_shard(layer, mesh=one_dim_mesh(world))
    fully_shard(model, mesh=one_dim_mesh(world))
    assert route_parameters(model, MUON).routes == before.routes
    return {r.name: r.optimizer for r in before.routes}


def llama_on_meta() -> Llama:
    return Llama(SIZES)


def test_routes_on_sharded_ranks_are_equal_despite_local_shapes() -> None:
    results = run_threads(5, sharded_roles)
    assert all(r == results[0] for r in results) and "muon" in results[0].values()


@pytest.mark.parametrize(
    ("settings", "block"),
    [
        ({}, None),
        ({"whole_matrices": True}, Block.tensor()),
        ({"options": {"normuon": 0.9}}, Block.rows(1)),
    ],
)
def test_each_parameter_gets_the_block_that_its_optimizer_needs(settings: dict[str, Any], block: Block | None) -> None:
    zoo: Any = Zoo()
    routing = route_parameters(zoo, OptimizerConfig("muon", **settings))
    assert routing.block_policy("anything", zoo.square.weight) == block
    assert routing.block_policy("anything", zoo.last.weight) is None
    if settings.get("whole_matrices"):
        assert routing.block_policy("up", zoo.experts.up) == Block.rows(6)
    with pytest.raises(ValueError, match="route the model that is sharded"):
        routing.block_policy("w", nn.Parameter(torch.zeros(2, 2)))


@on_threads(3)
def test_muon_sends_nothing_for_whole_matrices(rank: int, world: int) -> None:
    model = llama()
    config = OptimizerConfig("muon", whole_matrices=True)
    routing = route_parameters(model, config)
    for layer in model.layers:
        fully_shard(layer, mesh=one_dim_mesh(world), block_policy=routing.block_policy)
    fully_shard(model, mesh=one_dim_mesh(world), block_policy=routing.block_policy)
    combined: Any = build_optimizer(model, config, log=None)
    (itinerary,) = combined.optimizers[0].itineraries
    assert itinerary.collectives == 0 and all(len(job.cuts) == 1 for job in itinerary.jobs)


def test_the_table_is_printed_and_patterns_overrule_roles(capsys: pytest.CaptureFixture[str]) -> None:
    zoo = Zoo()
    config = OptimizerConfig("muon", routes={"router.*": "adamw"}, row_blocks={"square.*": (20, 30)})
    combined: Any = build_optimizer(zoo, config)
    out = capsys.readouterr().out
    assert "expert" in out and "experts.up [4, 6, 8]" in out and out.splitlines()[0].startswith("role")
    muon, adamw = combined.optimizers
    assert isinstance(muon, Muon) and isinstance(adamw, AdamW)
    assert {name: group["row_blocks"] for group in muon.param_groups for name in group["param_names"]} == {
        "experts.up": None,
        "square.weight": (20, 30),
    }
    for bad, message in (
        ({"routes": {"nothing.*": "adamw"}}, "matches no parameter"),
        ({"routes": {"norm.*": "muon"}}, "is not a matrix"),
        ({"routes": {"square.*": "sgd"}}, "the optimizers of this run are muon and adamw"),
        ({"routes": {"square.*": "adam"}}, "no optimizer 'adam': known are adamw"),
        ({"options": {"nesterof": True}}, "muon has no option 'nesterof': it takes momentum, nesterov"),
    ):
        with pytest.raises(ValueError, match=message):
            build_optimizer(zoo, {"name": "muon", **bad}, log=None)
    with pytest.raises(ValueError, match="row_blocks are Muon's"):
        OptimizerConfig("adamw", row_blocks={"x": 3})
    with pytest.raises(ValueError, match="to_empty"):
        build_optimizer(nn.Linear(3, 3, device="meta"), "adamw", log=None)
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_optimizer(nn.Identity(), "adamw", log=None)


class Vision(nn.Module):
    """A model whose 3-dimensional parameters are no stacks of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.zeros(1, 9, 8))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.conv1d = nn.Conv1d(8, 8, 3)
        self.transposed = nn.ConvTranspose2d(8, 8, 3)
        self.experts = nn.Parameter(torch.zeros(1, 6, 8))
        self.mixer = nn.Linear(8, 8)


def test_3d_filters_tokens_and_positions_are_not_experts() -> None:
    roles = {route.name: route.role for route in route_parameters(Vision(), MUON).routes}
    assert roles == {
        "pos_embed": "embedding", "cls_token": "vector", "conv1d.weight": "other", "conv1d.bias": "vector", "transposed.weight": "other",
        "transposed.bias": "vector", "experts": "expert", "mixer.weight": "matrix", "mixer.bias": "vector",
    }  # fmt: skip


def test_each_line_of_the_table_shows_a_parameter_of_that_line() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(128, 64, bias=False))
    lines = str(route_parameters(model, OptimizerConfig("adamw8bit", options={"block": "rows 32"}))).splitlines()
    shown = {tuple(line.split()[:3]): line.split()[-3:] for line in lines[1:]}
    assert shown[("matrix", "adamw8bit", "-")] == ["0.weight", "[8,", "8]"]
    assert [example for (_, _, block), example in shown.items() if block != "-"] == [["1.weight", "[64,", "128]"]]


def test_single_optimizer_is_built_plain_with_zeroed_states() -> None:
    model = llama()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for name, cls in (("adamw", AdamW), ("sgd", torch.optim.SGD)):
        optimizer = build_optimizer(model, name, log=None)
        assert type(optimizer) is cls
        assert all(optimizer.state[p] for p in model.parameters())
        assert not any(bool(v.any()) for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor))
        assert all(torch.equal(before[n], p) and p.grad is None for n, p in model.named_parameters())
        assert all(group["lr"] == 1e-3 for group in optimizer.param_groups)


@pytest.mark.parametrize(
    ("choice", "fused", "foreach"),
    [
        ({}, True, None),
        ({"fused": False}, None, None),
        ({"options": {"foreach": True}}, None, True),
        ({"options": {"fused": False}}, False, None),
    ],
    ids=str,
)
def test_adamw_is_fused_on_an_accelerator_unless_told_otherwise(choice: dict[str, Any], fused: Any, foreach: Any) -> None:
    with FakeTensorMode():  # tensors without memory, which need no GPU
        for device, expected in (("cuda", fused), ("cpu", None if fused else fused)):
            model = nn.Module()
            model.weight = nn.Parameter(torch.empty(8, 4, device=device))
            built = build_optimizer(model, {"name": "adamw", **choice}, log=None)
            (group,), (state,) = built.param_groups, built.state.values()
            assert (group["fused"], group["foreach"]) == (expected, foreach)
            assert state["step"].device.type == (device if expected else "cpu"), "a fused kernel reads its step on the device"


def test_adamw_of_a_deterministic_run_is_not_fused() -> None:
    chosen = [OptimizerConfig.of(parse_config({"elastic": {"deterministic": value}})).fused for value in (False, True)]
    assert chosen == [True, False]


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"foreach": True}, {"fused": True}], ids=str)
def test_adamw_with_precreated_states_steps_as_torchs(options: dict[str, Any]) -> None:
    ours, theirs = llama(), llama()
    built = build_optimizer(ours, {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "options": options}, log=None)
    peer = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=built.defaults["eps"], **options)
    for p in ours.parameters():
        p.grad = torch.ones_like(p)
    create_states(built)  # all states exist, so nothing changes, not even the gradients
    assert all(bool((p.grad == 1).all()) for p in ours.parameters() if p.grad is not None)
    for step in range(3):
        for model, optimizer in ((ours, built), (theirs, peer)):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q)
        mine, its = built.state[p], peer.state[q]
        assert mine.keys() == its.keys() and all(torch.equal(mine[k], its[k]) for k in mine)


@pytest.mark.parametrize("zeroed", [True, False])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"foreach": True}], ids=str)
@on_threads(3)
def test_states_made_like_the_first_parameters_match_torchs(rank: int, world: int, options: dict[str, Any], zeroed: bool) -> None:
    model: Any = llama()
    mesh = one_dim_mesh(world)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    config = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "options": options}
    built = build_optimizer(model, config, log=None, zeroed=zeroed)
    peer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    for p in model.parameters():
        p.grad = p.detach()
        peer._init_group({**peer.param_groups[0], "params": [p]}, [], [], [], [], [], [])
        p.grad = None
        mine, its = built.state[p], peer.state[p]
        assert list(mine) == list(its)
        for key, value in its.items():
            assert type(mine[key]) is type(value) and mine[key].shape == value.shape and mine[key].dtype == value.dtype
            if zeroed or value.dim() == 0:
                assert not bool(getattr(mine[key], "_local_tensor", mine[key]).any())
            if value.shape == p.shape and value.dim():
                assert mine[key]._spec == value._spec and mine[key]._local_tensor.shape == value._local_tensor.shape
    steps = [id(built.state[p]["step"]) for p in model.parameters()]
    assert len(set(steps)) == len(steps), "each counts its own steps"


def test_a_run_s_configuration_says_which_optimizer() -> None:
    keys = ["train.optimizer=muon", "train.lr=0.02", "train.matrix_lr=0.05", "train.optimizer_options={nesterov: false}"]
    config = load_config(None, keys)
    for given in (config, config.train):
        combined: Any = build_optimizer(llama(), given, log=None)
        muon, adamw = combined.optimizers
        assert muon.param_groups[0]["lr"] == 0.05 and muon.param_groups[0]["nesterov"] is False and adamw.param_groups[0]["lr"] == 0.02
    assert isinstance(build_optimizer(llama(), "adamw", log=None), AdamW)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "muon", "shampoo", "soap", "sgd"])
def test_no_decay_leaves_out_the_matching_parameters_alone(name: str) -> None:
    patterns = ["*.ffn.*", "*norm*"]

    def stepped(**changes: Any) -> dict[str, Tensor]:
        model = llama()
        optimizer = build_optimizer(model, {"name": name, "lr": 0.05, **changes}, log=None)
        loss_of(model, 0).backward()
        optimizer.step()
        return {key: p.detach() for key, p in model.named_parameters()}

    split, full, none = stepped(weight_decay=0.5, no_decay=patterns), stepped(weight_decay=0.5), stepped(weight_decay=0.0)
    exempt = {key for key in split if "norm" in key or ".ffn." in key}
    assert {key for key in split if torch.equal(split[key], none[key])} == exempt
    assert {key for key in split if torch.equal(split[key], full[key])} == split.keys() - exempt


def test_patterns_of_no_decay_must_match_and_be_a_list() -> None:
    with pytest.raises(ValueError, match="no_decay: 'norms' matches no parameter; there are embed.weight, "):
        route_parameters(llama(), {"no_decay": ["*norm*", "norms"]})
    with pytest.raises(ValueError, match=r"no_decay = '\*norm\*': give a list of patterns"):
        OptimizerConfig(no_decay="*norm*")
    table = str(route_parameters(llama(), {"no_decay": ["*norm*"]}))
    assert [line.split()[3] for line in table.splitlines() if line.startswith("norm")] == ["no"]
    optimizer = build_optimizer(llama(), {"name": "adamw", "weight_decay": 0.3}, log=None)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3], "by default every parameter decays"
