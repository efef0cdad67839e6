"""``set_optimizer_state_dict`` loads every full state that ``get_optimizer_state_dict`` returns."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.fsdp.towers import filled
from tests.ranks import on_threads
from vescale_ray import fully_shard
from vescale_ray.optim import SOAP, AdamW, AdamW8bit, Flat, Muon
from vescale_ray.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

FULL = StateDictOptions(full_state_dict=True)


class Nested(torch.optim.Optimizer):
    """An optimizer whose states are nested dicts, as those of distributed Shampoo, and hold None."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state |= {"factors": {"ema": torch.zeros_like(p), "root": None}, "note": "new"}
                state["factors"]["ema"].lerp_(p.grad, 0.5)
                state["note"] = "old"
                p.add_(state["factors"]["ema"], alpha=-group["lr"])


class OnDemand(torch.optim.Optimizer):
    """An optimizer that makes states, and a hyperparameter, only as they are needed, as D-Adaptation and Prodigy do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        for p in (p for group in self.param_groups for p in group["params"]):
            assert not self.state[p]  # now it has an entry, as after train() of schedule-free optimizers

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None and p.grad.any()):
                state = self.state[p]
                state["total"] = state.get("total", 0) + 1 if "ema" in state else 1.0
                state.setdefault("ema", torch.zeros_like(p)).lerp_(p.grad, 0.5)
                group["reached"] = max(group.get("reached", 0.0), state["total"])
                p.add_(state["ema"], alpha=-group["lr"] / group["reached"])


class Restless(torch.optim.Optimizer):
    """An optimizer whose steps move the parameters whatever the learning rate, as FTRL's, and that keeps norms, as LAMB does."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            state["scale"] = 0.5 if not state else torch.ones_like(p)  # a number at first
            state.setdefault("ema", torch.zeros_like(p)).lerp_(p.grad, 0.5)
            state["norm"] = torch.linalg.vector_norm(p)
            p.mul_(0.5 * state["scale"]).sub_(state["ema"] / (1 + state["norm"]))


def net() -> nn.Sequential:
    model = filled(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    model(torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
    optimizer.step()


def in_two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """The groups have another order than the model."""
    matrices, vectors = ([p for p in model.parameters() if p.ndim == ndim] for ndim in (2, 1))
    groups: list[dict[str, Any]] = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices}]
    return torch.optim.AdamW(groups, lr=0.01)


def with_empty_group(model: nn.Module) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": list(model.parameters())}, {"params": [], "lr": 0.5}]
    return torch.optim.AdamW(groups, lr=0.01)


@pytest.mark.parametrize("gradients", [False, True], ids=["fresh", "after a backward"])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda m: torch.optim.AdamW(m.parameters(), lr=0.01), id="adamw"),
        pytest.param(lambda m: torch.optim.SGD(m.parameters(), lr=0.01), id="without states"),
        pytest.param(lambda m: Nested(m.parameters(), lr=0.01), id="nested"),
        pytest.param(with_empty_group, id="an empty group"),
        pytest.param(lambda m: OnDemand(m.parameters(), lr=0.01), id="on demand"),
        pytest.param(lambda m: Restless(m.parameters(), lr=0.01), id="restless"),
    ],
)
@on_threads(2)
def test_training_goes_on_from_a_full_optimizer_state(
    rank: int, world: int, make: Callable[[nn.Module], torch.optim.Optimizer], gradients: bool
) -> None:
    """The target optimizer has no states yet, and perhaps gradients of another backward, which stay."""
    model, other = net(), net()
    optimizer = make(model)
    for seed in (2, 0):
        train(model, optimizer, seed)
    saved = get_optimizer_state_dict(model, optimizer, options=FULL)
    other.load_state_dict(model.state_dict())
    resumed = make(other)
    if gradients:
        other(torch.ones(1, 4)).sum().backward()
    before = [p.grad for p in other.parameters()]
    set_optimizer_state_dict(other, resumed, saved, options=FULL)
    assert all(p.grad is grad for p, grad in zip(other.parameters(), before, strict=True))
    for one, another in ((model, optimizer), (other, resumed)):
        train(one, another, 1)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local())
    if isinstance(resumed, Nested):
        assert all(state["note"] == "old" and state["factors"]["root"] is None for state in resumed.state.values())


@on_threads(2)
def test_an_optimizer_that_needs_a_closure_is_named(rank: int, world: int) -> None:
    model = net()
    with pytest.raises(ValueError, match=r"LBFGS can't make its states without a closure .*: take a step before"):
        get_optimizer_state_dict(model, torch.optim.LBFGS(model.parameters()), options=FULL)


@on_threads(2)
def test_state_dicts_of_new_optimizers_move_no_parameter(rank: int, world: int) -> None:
    model = net()
    before = [p.to_local().clone() for p in model.parameters()]
    for options in (FULL, StateDictOptions()):
        saved = get_optimizer_state_dict(model, Restless(model.parameters(), lr=0.01), options=options)
        set_optimizer_state_dict(model, Restless(model.parameters(), lr=0.01), saved, options=options)
        assert all(torch.equal(p.to_local(), old) for p, old in zip(model.parameters(), before, strict=True))


@on_threads(2)
def test_schedulers_hyperparameters_may_be_on_either_side_alone(rank: int, world: int) -> None:
    model = net()
    plain, scheduled = (torch.optim.AdamW(model.parameters(), lr=0.01) for _ in range(2))
    torch.optim.lr_scheduler.LinearLR(scheduled)
    for source, target in ((plain, scheduled), (scheduled, plain)):
        train(model, source, 0)
        saved = get_optimizer_state_dict(model, source, options=FULL)
        set_optimizer_state_dict(model, target, saved, options=FULL)
        assert target.param_groups[0]["initial_lr"] == 0.01 and target.param_groups[0]["lr"] == source.param_groups[0]["lr"]


@on_threads(2)
def test_states_and_numbers_that_differ_by_rank_are_refused(rank: int, world: int) -> None:
    """Without the check, the ranks would wait for each other, or train with different learning rates."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, 0)
    saved = get_optimizer_state_dict(model, optimizer, options=FULL)
    saved["param_groups"][0]["lr"] = 0.5 + rank
    with pytest.raises(ValueError, match="the ranks have different full optimizer state dicts"):
        set_optimizer_state_dict(model, optimizer, saved, options=FULL)
    assert optimizer.param_groups[0]["lr"] == 0.01
    if rank == 1:
        del optimizer.state[next(model.parameters())]
    with pytest.raises(ValueError, match="optimizer states of different parameters or shapes, .* let all ranks take the same steps"):
        get_optimizer_state_dict(model, optimizer, options=FULL)


@on_threads(2)
def test_a_state_of_no_parameter_is_named(rank: int, world: int) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    states: dict[Any, Any] = optimizer.state
    states["steps"] = 3
    with pytest.raises(ValueError, match="SGD has a state of no parameter, 'steps', .*: vescale_ray.checkpoint stores it"):
        get_optimizer_state_dict(model, optimizer, options=FULL)


@pytest.mark.parametrize("sent", [False, True], ids=["on every rank", "from rank 0"])
@on_threads(2)
def test_the_state_dict_of_an_unsharded_optimizer_loads(rank: int, world: int, sent: bool) -> None:
    alone, ours = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), net()
    alone.load_state_dict({name: value.full_tensor() for name, value in ours.state_dict().items()})
    plain = in_two_groups(alone)
    for seed in (2, 0):
        train(alone, plain, seed)
    ours.load_state_dict(alone.state_dict())
    saved = copy.deepcopy(plain.state_dict())

    optimizer = in_two_groups(ours)
    optimizer.load_state_dict(copy.deepcopy(saved))
    with pytest.raises(ValueError, match="load it with vescale_ray.state_dict.set_optimizer_state_dict and full_state_dict=True"):
        train(ours, optimizer, 1)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=sent)
    with pytest.raises(ValueError, match=r"groups of \[2, 2\] parameters, and the optimizer of \[4\]: build the optimizer with the groups"):
        set_optimizer_state_dict(ours, torch.optim.AdamW(ours.parameters()), saved, options=options)
    optimizer = in_two_groups(ours)
    set_optimizer_state_dict(ours, optimizer, {} if sent and rank else saved, options=options)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.01]
    ours.load_state_dict(alone.state_dict())  # the step that failed may have written some parameters
    for model, one in ((ours, optimizer), (alone, plain)):
        train(model, one, 1)
    for p, q in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q)


SHARDED, FLAT = StateDictOptions(), StateDictOptions(flatten_optimizer_state_dict=True)
KINDS = pytest.mark.parametrize("options", [SHARDED, FLAT, FULL], ids=["sharded", "flat", "full"])


def named(value: Any) -> str | None:
    """Return the part of a case's name for one of the three options; None for another value, which pytest names."""
    return next((name for name, one in (("sharded", SHARDED), ("flat", FLAT), ("full", FULL)) if one is value), None)


TAKEN_EARLY: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "a state looked up": lambda ps: (o := torch.optim.AdamW(ps)).state[o.param_groups[0]["params"][0]] or o,
    "decay in the moments": lambda ps: torch.optim.Adam(ps, lr=0.1, weight_decay=0.1),
    "decay in the momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
    "a product": lambda ps: torch.optim.NAdam(ps, lr=0.1),
    "a learning rate": lambda ps: torch.optim.ASGD(ps, lr=0.1),
    "step sizes": lambda ps: torch.optim.Rprop(ps, lr=0.1),
    "shared counters": lambda ps: Flat(ps, torch.optim.AdamW, lr=0.1),
    "a counter in the group": lambda ps: CountsInGroups(ps),
}
SHARED_AND_COUNTED = ("shared counters", "a counter in the group")


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, FULL) for kind in TAKEN_EARLY), *((kind, options) for kind in SHARED_AND_COUNTED for options in (SHARDED, FLAT))],
    ids=named,
)
@on_threads(2)
def test_states_taken_before_the_first_step_count_none(rank: int, world: int, kind: str, options: StateDictOptions) -> None:
    """torch's own getter leaves the states after a step: the bias corrections of AdamW are then always those of the next step."""
    models = [net(), net(), net()]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    untouched, saved, resumed = (TAKEN_EARLY[kind](model.parameters()) for model in models)
    states = copy.deepcopy(get_optimizer_state_dict(models[1], saved, options=options))
    set_optimizer_state_dict(models[2], resumed, states, options=options)
    for seed in (1, 2):
        for model, optimizer in zip(models, (untouched, saved, resumed), strict=True):
            train(model, optimizer, seed)
    for p, *others in zip(*(model.parameters() for model in models), strict=True):
        assert all(torch.equal(p.full_tensor(), q.full_tensor()) for q in others)


class CountsInGroups(torch.optim.Optimizer):
    """An optimizer that counts its steps in its groups, as many of other libraries do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "seen": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["seen"] += 1
            group["step"] = group.get("step", 0) + 1
            for p in (p for p in group["params"] if p.grad is not None):
                self.state[p].setdefault("ema", torch.zeros_like(p)).lerp_(p.grad, 0.5)
                p.add_(self.state[p]["ema"], alpha=-group["lr"] / (group["seen"] + group["step"]))


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.AdamW, FULL), (torch.optim.Adagrad, SHARDED), (AdamW8bit, FLAT), (AdamW8bit, FULL), (SOAP, SHARDED), (Muon, FULL)],
    ids=named,
)
@on_threads(2)
def test_states_of_frozen_parameters_are_loaded(rank: int, world: int, kind: Any, options: StateDictOptions) -> None:
    models = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)]
    for model in models:
        fully_shard(model, block_policy=SOAP.block_policy())
    optimizers = [kind([p for p in models[0].parameters() if kind is not Muon or p.ndim == 2])]
    models[0](torch.ones(2, 8)).sum().backward()
    optimizers[0].step()
    for model in models:
        model[0].requires_grad_(False)
    optimizers.append(kind([p for p in models[1].parameters() if kind is not Muon or p.ndim == 2]))
    set_optimizer_state_dict(models[1], optimizers[1], get_optimizer_state_dict(models[0], optimizers[0], options=options), options=options)
    assert [p.requires_grad for p in models[1].parameters()] == [False, False, True, True]
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        states, loaded = optimizers[0].state.get(p, {}), optimizers[1].state.get(q, {})
        assert states.keys() == loaded.keys()
        assert all(torch.equal(whole(states[key]), whole(loaded[key])) for key in states)


def rates(optimizer: torch.optim.Optimizer) -> dict[int, float]:
    return {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}


@KINDS
@on_threads(2)
def test_groups_may_be_split_and_reordered_but_not_merged(rank: int, world: int, options: StateDictOptions) -> None:
    """torch's setter took the learning rate of one group for all, or left a group without any."""
    models = [net(), net()]
    saved, resumed = in_two_groups(models[0]), in_two_groups(models[1])
    resumed.param_groups.reverse()
    for lr, group in enumerate(saved.param_groups, 1):
        group["lr"] = lr / 8
    train(models[0], saved, 0)
    states = copy.deepcopy(get_optimizer_state_dict(models[0], saved, options=options))
    set_optimizer_state_dict(models[1], resumed, states, options=options)
    assert [group["lr"] for group in resumed.param_groups] == [2 / 8, 1 / 8]
    assert [group["weight_decay"] for group in resumed.param_groups] == [0.01, 0.0]
    single = torch.optim.AdamW(list(models[1].named_parameters()), lr=0.5)
    with pytest.raises(ValueError, match=r"are in one parameter group here, but (lr is 0\.\d+ and 0\.\d+|weight_decay is)"):
        set_optimizer_state_dict(models[1], single, states, options=options)
    assert single.param_groups[0]["lr"] == 0.5

    for group in saved.param_groups:
        group.update(lr=0.25, weight_decay=0.0)
    set_optimizer_state_dict(models[1], single, get_optimizer_state_dict(models[0], saved, options=options), options=options)
    assert single.param_groups[0]["lr"] == 0.25 and single.param_groups[0]["param_names"] == [n for n, _ in models[1].named_parameters()]
    single.param_groups[0]["lr"] = 0.125
    set_optimizer_state_dict(models[0], saved, get_optimizer_state_dict(models[1], single, options=options), options=options)
    assert set(rates(saved).values()) == {0.125}
    train(models[0], saved, 1)


@pytest.mark.parametrize(("kind", "options"), [(torch.optim.AdamW, FULL), (AdamW, SHARDED), (Flat, FLAT), (Flat, FULL)], ids=named)
@on_threads(2)
def test_missing_states_are_refused_or_left(rank: int, world: int, kind: Any, options: StateDictOptions) -> None:
    models = [net(), net()]
    saved, resumed = (kind([*model[0].parameters()], lr=0.1) for model in models)
    train(models[0], saved, 0)
    for model, optimizer in zip(models, (saved, resumed), strict=True):
        optimizer.add_param_group({"params": [*model[1].parameters()]})
    states = copy.deepcopy(get_optimizer_state_dict(models[0], saved, options=options))
    with pytest.raises(ValueError, match=r"(has no states of|lacks \[).*1\.weight.* with StateDictOptions\(strict=False\)"):
        set_optimizer_state_dict(models[1], resumed, states, options=options)
    options = StateDictOptions(full_state_dict=options.full_state_dict, strict=False)
    set_optimizer_state_dict(models[1], resumed, states, options=options)
    first = [int(resumed.state[p]["step"]) for p in models[1].parameters()]
    assert first == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.AdamW, SHARDED), (AdamW, FLAT), (Flat, SHARDED), (Flat, FLAT), (AdamW8bit, SHARDED)],
    ids=named,
)
@on_threads(2)
def test_sharded_states_of_another_layout_are_resharded(rank: int, world: int, kind: Any, options: StateDictOptions) -> None:
    """A layer lies on both ranks in one model, on one rank in the other."""
    models = [net(), fully_shard(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))]
    saved, resumed = (kind(model.parameters(), lr=0.1) for model in models)
    train(models[0], saved, 0)
    states = copy.deepcopy(get_optimizer_state_dict(models[0], saved, options=options))
    set_optimizer_state_dict(models[1], resumed, states, options=options)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert all(torch.equal(whole(value), whole(resumed.state[q][key])) for key, value in saved.state[p].items())
        assert all(value.placements == q.placements for value in resumed.state[q].values() if isinstance(value, DTensor))
    if kind is not AdamW8bit:  # it has its states from the start
        with pytest.raises(ValueError, match=r"exp_avg of parameter \S+ is .* sharded differently \(vescale_ray.state_dict.set_optimizer"):
            Flat(models[1].parameters()).load_state_dict(saved.state_dict())


@pytest.mark.parametrize("options", [SHARDED, FLAT], ids=["sharded", "flat"])
@on_threads(2)
def test_a_missing_kind_of_state_is_named(rank: int, world: int, options: StateDictOptions) -> None:
    models = [net(), net()]
    saved, resumed = (torch.optim.AdamW(model.parameters(), amsgrad=number > 0) for number, model in enumerate(models))
    train(models[0], saved, 0)
    states = copy.deepcopy(get_optimizer_state_dict(models[0], saved, options=options))
    with pytest.raises(ValueError, match=r"has no state 'max_exp_avg_sq' of '0\.weight'.* build the model and the groups as they"):
        set_optimizer_state_dict(models[1], resumed, states, options=options)
    as_saved = torch.optim.AdamW(models[1].parameters())
    set_optimizer_state_dict(models[1], as_saved, states, options=options)
    train(models[1], as_saved, 1)


@KINDS
@on_threads(2)
def test_optimizers_without_states_load_beside_others(rank: int, world: int, options: StateDictOptions) -> None:
    models = [net(), net()]
    saved, resumed = (
        [torch.optim.SGD(model[0].parameters(), lr=lr), torch.optim.AdamW(model[1].parameters(), lr=lr)]
        for model, lr in zip(models, (0.25, 0.5), strict=True)
    )
    set_optimizer_state_dict(models[1], resumed, get_optimizer_state_dict(models[0], saved, options=options), options=options)
    assert [optimizer.param_groups[0]["lr"] for optimizer in resumed] == [0.25, 0.25]


@on_threads(2)
def test_states_that_a_template_lacks_are_refused(rank: int, world: int) -> None:
    """torch's DCP reads only the states that the optimizer has: Adagrad has none of a group that was added."""
    models = [net(), net()]
    optimizers = [torch.optim.Adagrad([*model[0].parameters()], lr=0.1) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.add_param_group({"params": [*model[1].parameters()]})
    template = get_optimizer_state_dict(models[1], optimizers[1])
    with pytest.raises(ValueError, match=r"has no states of '1.weight', '1.bias'"):
        set_optimizer_state_dict(models[1], optimizers[1], template)


@KINDS
@on_threads(2)
def test_the_state_dict_of_another_optimizer_is_refused(rank: int, world: int, options: StateDictOptions) -> None:
    model = net()
    saved = torch.optim.AdamW(model.parameters())
    train(model, saved, 0)
    states = copy.deepcopy(get_optimizer_state_dict(model, saved, options=options))
    for momentum in (0.0, 0.5):
        with pytest.raises(ValueError, match=r"not one of SGD: they differ in the hyperparameters amsgrad|lacks \["):
            set_optimizer_state_dict(model, torch.optim.SGD(model.parameters(), momentum=momentum), states, options=options)


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)
