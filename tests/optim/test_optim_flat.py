"""Flat has the updates and states of the optimizer that it wraps, over the same sharded parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import Shard

from tests.fsdp.towers import filled
from tests.fsdp.transformer import full
from tests.ranks import on_processes, on_threads, run_threads
from vescale_ray import RaggedDTensor, fully_shard
from vescale_ray.optim import Flat

WIDTH = 22
CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    "fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "one by one": (torch.optim.Adam, {"lr": 1e-2, "foreach": False}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2, "centered": True, "momentum": 0.5}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2}),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(3))
        self.gain, self.frozen = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x * self.gain * self.frozen[0]


def model() -> Any:
    net = filled(Net(), 1, 0.4)
    for layer in net.layers:
        fully_shard(layer)
    return fully_shard(net)


def groups(net: nn.Module, kind: str) -> list[Any]:
    params = [p for p in net.parameters() if p.requires_grad]
    if kind == "one":
        return params
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.2},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0, "lr": 0.03},
    ]


def backward(net: Any, step: int) -> None:
    net(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))).square().mean().backward()


def same(ours: Any, theirs: Any, of_ours: torch.optim.Optimizer, of_theirs: torch.optim.Optimizer, exact: bool) -> None:
    def check(a: torch.Tensor, b: torch.Tensor) -> None:
        assert a.shape == b.shape and a.dtype == b.dtype
        if isinstance(b, RaggedDTensor):
            assert isinstance(a, RaggedDTensor) and a.placements == b.placements
            a, b = a.to_local(), b.to_local()
        assert torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-6, atol=1e-7)

    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        check(p.detach(), q.detach())
        assert of_ours.state.get(p, {}).keys() == of_theirs.state.get(q, {}).keys()
        for key, value in of_theirs.state.get(q, {}).items():
            mine = of_ours.state[p][key]
            check(mine, value) if isinstance(value, torch.Tensor) else pytest.approx(value) == mine


def trains_alike(rank: int, world: int, kind: str, grouping: str) -> int:
    cls, options = CLASSES[kind]
    ours, theirs = model(), model()
    flat, plain = Flat(groups(ours, grouping), cls, **options), cls(groups(theirs, grouping), **options)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in (flat, plain)]
    for step in range(4):
        for net, optimizer, schedule in zip((ours, theirs), (flat, plain), schedules, strict=True):
            backward(net, step)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        same(ours, theirs, flat, plain, exact=not options.get("fused"))
        if step == 1:  # load the state of each into the other
            state = flat.state_dict()
            assert state["state"].keys() == plain.state_dict()["state"].keys()
            plain.load_state_dict(state)
            again = Flat(groups(ours, grouping), cls, **options)
            again.load_state_dict(plain.state_dict())
            schedules[0].optimizer = flat = again
    return sum(piece.numel > 0 for pieces in flat._pieces for piece in pieces)


@pytest.mark.parametrize(("kind", "grouping"), [*((kind, "two") for kind in CLASSES), ("adamw", "one")])
def test_flat_updates_states_and_schedules_match_the_optimizer(kind: str, grouping: str) -> None:
    for pieces in run_threads(3, trains_alike, kind, grouping):
        assert grouping == "two" or pieces <= 4, "at most one for each buffer"


def test_one_rank_has_a_piece_for_each_buffer() -> None:
    assert run_threads(1, trains_alike, "adamw", "one") == [4]


@on_processes(2)
def test_states_go_through_dcp(rank: int, world: int, tmp_path: Any) -> None:
    """Save the states through DCP, and load them into another optimizer of the same kind."""
    net = model()
    flat = Flat(groups(net, "one"), torch.optim.AdamW, lr=1e-2)
    for step in range(2):
        backward(net, step)
        flat.step()
        flat.zero_grad()
    expected = [{k: full(v) for k, v in flat.state[p].items()} for p in net.parameters() if p.requires_grad]
    dcp.save({"model": net.state_dict(), "optimizer": get_optimizer_state_dict(net, flat)}, checkpoint_id=str(tmp_path))
    other = model()
    into = Flat(groups(other, "one"), torch.optim.AdamW, lr=1e-2)
    backward(other, 9)
    into.step()
    state = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, into)}
    dcp.load(state, checkpoint_id=str(tmp_path))
    set_optimizer_state_dict(other, into, state["optimizer"])
    got = [{k: full(v) for k, v in into.state[p].items()} for p in other.parameters() if p.requires_grad]
    for a, b in zip(got, expected, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@on_threads(2)
def test_flat_takes_moved_gradients_and_refuses_cast_parameters(rank: int, world: int) -> None:
    ours, theirs = model(), model()
    flat, plain = Flat(ours.parameters(), torch.optim.SGD, lr=0.1), torch.optim.SGD(theirs.parameters(), lr=0.1)
    for net in (ours, theirs):
        backward(net, 1)
        backward(net, 2)  # gradients add up in the sharded parameters
        for p in net.parameters():
            if p.grad is not None:
                p.grad = p.grad * 2  # moves the gradient to other memory
    flat.step()
    plain.step()
    same(ours, theirs, flat, plain, exact=True)
    flat.zero_grad()
    plain.zero_grad()
    flat.step()  # without gradients a step does nothing
    same(ours, theirs, flat, plain, exact=True)
    for net in (ours, theirs):
        backward(net, 3)
        net.layers[0][0].bias.grad = None
    flat.step()
    plain.step()
    same(ours, theirs, flat, plain, exact=True)
    backward(ours, 3)
    ours.double()
    with pytest.raises(RuntimeError, match="moved or cast since the Flat optimizer was built"):
        flat.step()


@on_threads(2)
def test_parameters_of_a_buffer_may_lack_gradients(rank: int, world: int) -> None:
    """The parameters of one buffer then have different states, here and after loading."""
    ours, theirs = model(), model()
    flat, plain = Flat(ours.parameters(), torch.optim.AdamW, lr=0.1), torch.optim.AdamW(theirs.parameters(), lr=0.1)
    for step in range(6):
        for net in (ours, theirs):
            net.zero_grad()
            backward(net, step)
            for p in (net.layers[step % 3][0].bias, net.layers[0][0].weight if step < 3 else net.gain):
                p.grad = None
        flat.step()
        plain.step()
        same(ours, theirs, flat, plain, exact=True)
        if step % 2:
            again = Flat(ours.parameters(), torch.optim.AdamW, lr=0.1)
            again.load_state_dict(flat.state_dict() if step == 1 else plain.state_dict())
            flat = again
            same(ours, theirs, flat, plain, exact=True)


def test_flat_refuses_unfit_optimizers_and_parameters() -> None:
    with pytest.raises(ValueError, match="not contiguous in memory"):
        Flat([nn.Parameter(torch.ones(3, 4).t())], torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        Flat([nn.Parameter(torch.ones(3))], torch.optim.SGD, lr=-1.0)


@on_threads(2)
def test_a_group_may_be_added_later(rank: int, world: int) -> None:
    ours, theirs = model(), model()
    first, rest = [groups(net, "two")[0] for net in (ours, theirs)], [groups(net, "two")[1] for net in (ours, theirs)]
    flat, plain = Flat([first[0]], torch.optim.AdamW, lr=0.1), torch.optim.AdamW([first[1]], lr=0.1)
    for step in range(3):
        if step == 1:
            flat.add_param_group(rest[0])
            plain.add_param_group(rest[1])
        for net, optimizer in ((ours, flat), (theirs, plain)):
            backward(net, step)
            optimizer.step()
            optimizer.zero_grad()
        same(ours, theirs, flat, plain, exact=True)


@pytest.mark.parametrize("others", [False, True])
@on_threads(2)
def test_parameters_between_a_groups_own_are_left_alone(rank: int, world: int, others: bool) -> None:
    """Biases of 64 bytes lie between weights in the shard. They belong to another param group or to none."""
    models: list[Any] = [filled(nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))) for _ in "ab"]
    fully_shard(models[0], shard_placement_fn=lambda _: Shard(0))
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    for model, kind in zip(models, (Flat, torch.optim.AdamW), strict=True):
        groups: list[dict[str, Any]] = [{"params": [layer.weight for layer in model], "weight_decay": 0.5}]
        if others:
            groups.append({"params": [layer.bias for layer in model], "weight_decay": 0.0, "lr": 0.01})
        optimizer = kind(groups, lr=0.1)
        for _ in range(3):
            model(x).square().sum().backward()
            optimizer.step()
            model.zero_grad()
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(p.full_tensor(), q, atol=1e-5), name


@on_processes(2)
def test_states_of_plain_shards_are_saved_whole(rank: int, world: int, tmp_path: Any) -> None:
    models: list[Any] = [filled(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))) for _ in range(3)]
    fully_shard(models[0], shard_placement_fn=lambda _: Shard(0))
    for model in models[1:]:
        fully_shard(model)
    optimizers = [kind(model.parameters(), lr=0.1) for model, kind in zip(models, (Flat, torch.optim.AdamW, Flat), strict=True)]
    for model, optimizer in zip(models[:2], optimizers, strict=False):
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
    dcp.save(get_optimizer_state_dict(models[0], optimizers[0]), checkpoint_id=str(tmp_path))
    state = get_optimizer_state_dict(models[2], optimizers[2])
    dcp.load(state, checkpoint_id=str(tmp_path))
    set_optimizer_state_dict(models[2], optimizers[2], state)
    for params in zip(*(model.parameters() for model in models), strict=True):
        states = [full(optimizer.state[p]["exp_avg"]) for optimizer, p in zip(optimizers, params, strict=True)]
        assert optimizers[0].state[params[0]]["exp_avg"].placements == params[0].placements
        assert torch.equal(states[0], states[2])
        assert torch.allclose(states[0], states[1])
