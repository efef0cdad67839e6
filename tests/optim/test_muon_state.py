"""Muon's states exist from the start, move to any world size and are never reset silently; ranks agree before a step."""

from __future__ import annotations

import contextlib
import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from tests.dtensor.layouts import Case, one_dim_mesh, ragged, whole
from tests.optim.test_muon import give_gradients, gradient, random_cases, sharded, start
from tests.ranks import on_threads, run_gloo, run_threads
from vescale_ray.dtensor import distribute_tensor
from vescale_ray.fsdp import fully_shard
from vescale_ray.optim import AdamW, CombinedOptimizer, Muon
from vescale_ray.optim.agree import DisagreementError
from vescale_ray.optim.matrix.muon import NonFiniteGradients
from vescale_ray.state_dict import get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict

STACKS = ((33, 20), (7, 40), (3, 8, 6), (24, 24))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for i, shape in enumerate(STACKS):
            setattr(self, f"p{i}", nn.Parameter(start(shape, i)))


def make(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "AdamW":
        return AdamW(model.parameters(), lr=0.02, weight_decay=0.5)
    return Muon(model.parameters(), lr=0.02, weight_decay=0.5, normuon=0.9 if kind == "NorMuon" else None)


def built(kind: str, world: int) -> tuple[Any, torch.optim.Optimizer]:
    from vescale_ray import Block

    model = Model()
    fully_shard(model, mesh=one_dim_mesh(world), block_policy=lambda n, p: Block.rows(1))
    return model, make(kind, model)


def advance(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for i, p in enumerate(model.parameters()):
            full = gradient(tuple(p.shape), i, step)
            p.grad = distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None)  # type: ignore[attr-defined]
        optimizer.step()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    states = [v for p in model.parameters() for v in optimizer.state[p].values() if isinstance(v, Tensor)]
    return [whole(t.detach()).clone().numpy() for t in (*model.parameters(), *states)]


def uninterrupted(rank: int, world: int, kind: str, steps: int) -> list[Any]:
    model, optimizer = built(kind, world)
    advance(model, optimizer, range(steps))
    return everything(model, optimizer)


def save_whole(rank: int, world: int, kind: str) -> tuple[Any, Any]:
    model, optimizer = built(kind, world)
    advance(model, optimizer, range(3))
    options = StateDictOptions(full_state_dict=True)
    weights = {n: whole(p.detach()) for n, p in model.named_parameters()}
    return weights, get_optimizer_state_dict(model, optimizer, options=options)


def load_whole(rank: int, world: int, kind: str, saved: tuple[Any, Any]) -> list[Any]:
    model, optimizer = built(kind, world)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, saved[0], options=options)
    set_optimizer_state_dict(model, optimizer, saved[1], options=options)
    advance(model, optimizer, range(3, 4))
    return everything(model, optimizer)


@pytest.mark.parametrize(("kind", "before", "after"), [("Muon", 3, 2), ("Muon", 1, 4), ("AdamW", 3, 2), ("NorMuon", 1, 4)])
def test_resume_at_another_world_size_equals_uninterrupted_run(kind: str, before: int, after: int) -> None:
    saved = run_threads(before, save_whole, kind)[0]
    expected = run_threads(1, uninterrupted, kind, 4)[0]
    reset = run_threads(1, uninterrupted, kind, 1)[0]
    for got in run_threads(after, load_whole, kind, saved):
        for a, b in zip(got, expected, strict=True):
            assert (a == b).all() if kind != "NorMuon" else abs(a - b).max() < 1e-6
        assert any((a != b).any() for a, b in zip(got, reset, strict=True))


def save_dcp(rank: int, world: int, kind: str, folder: str) -> None:
    model, optimizer = built(kind, world)
    advance(model, optimizer, range(3))
    dcp.save({"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)


def load_dcp(rank: int, world: int, kind: str, folder: str) -> list[Any]:
    model, optimizer = built(kind, world)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    advance(model, optimizer, range(3, 4))
    return everything(model, optimizer)


@pytest.mark.parametrize("kind", ["Muon", "AdamW"])
def test_torchs_dcp_carries_states_to_another_world_size(kind: str, tmp_path: Path) -> None:
    run_gloo(3, save_dcp, kind, str(tmp_path))
    expected = run_threads(1, uninterrupted, kind, 4)[0]
    for got in run_gloo(2, load_dcp, kind, str(tmp_path)):
        assert all((a == b).all() for a, b in zip(got, expected, strict=True))


def test_states_exist_from_the_start_and_loads_never_reset_them() -> None:
    parameters = [nn.Parameter(start((6, 4), i)) for i in range(2)]
    muon = Muon(parameters)
    assert [list(muon.state[p]) for p in parameters] == [["momentum_buffer"]] * 2
    for p in parameters:
        p.grad = torch.ones_like(p)
    muon.step()
    saved = copy.deepcopy(muon.state_dict())
    for state in ({}, {0: saved["state"][0]}, {0: saved["state"][0], 1: {}}):
        with pytest.raises(ValueError, match=r"parameter #0.[01] has nothing, but Muon keeps .* would start from zero"):
            muon.load_state_dict({"state": state, "param_groups": saved["param_groups"]})
    wrong = {0: {"momentum_buffer": torch.zeros(4, 6)}, 1: saved["state"][1]}
    with pytest.raises(ValueError, match="set_optimizer_state_dict"):
        muon.load_state_dict({"state": wrong, "param_groups": saved["param_groups"]})
    assert all(muon.state[p]["momentum_buffer"].any() for p in parameters), "nothing was changed"
    fresh = Muon([nn.Parameter(start((6, 4), i)) for i in range(2)])
    fresh.load_state_dict(saved)
    assert all(torch.equal(fresh.state[p]["momentum_buffer"], saved["state"][i]["momentum_buffer"]) for i, p in enumerate(fresh.state))


def test_torchs_muon_and_ours_load_each_others_state_dicts() -> None:
    def stepped(cls: Any, loaded: Any, steps: range) -> Any:
        p = nn.Parameter(start((6, 4), 0) if loaded is None else loaded[0])
        optimizer = cls([p], lr=0.02)
        if loaded is not None:
            optimizer.load_state_dict(loaded[1])
        for step in steps:
            p.grad = gradient((6, 4), 0, step)
            optimizer.step()
        return p.detach().clone(), copy.deepcopy(optimizer.state_dict())

    expected = stepped(torch.optim.Muon, None, range(4))
    for first, second in ((Muon, torch.optim.Muon), (torch.optim.Muon, Muon)):
        assert torch.equal(stepped(second, stepped(first, None, range(2)), range(2, 4))[0], expected[0])


def test_muon_keeps_the_torch_optimizer_interface() -> None:
    first, second = nn.Parameter(start((6, 4), 0)), nn.Parameter(start((8, 4), 1))
    muon = Muon([{"params": [first], "lr": 0.5}], lr=0.1)
    muon.add_param_group({"params": second, "weight_decay": 0.0})
    schedule = torch.optim.lr_scheduler.LambdaLR(muon, lambda step: 0.5**step)
    calls: list[str] = []
    muon.register_step_pre_hook(lambda *_: calls.append("pre"))
    muon.register_step_post_hook(lambda *_: calls.append("post"))

    def closure() -> Tensor:
        muon.zero_grad()
        loss = (first.square().sum() + second.square().sum()) * 1.0
        loss.backward()
        calls.append("closure")
        return loss

    before = [first.detach().clone(), second.detach().clone()]
    loss = muon.step(closure)
    schedule.step()
    assert calls == ["pre", "closure", "post"] and loss.item() > 0
    assert [g["lr"] for g in muon.param_groups] == [0.25, 0.05]
    assert all(not torch.equal(a, b) for a, b in zip(before, (first, second), strict=True))
    named = Muon([("first", nn.Parameter(start((6, 4), 0)))])
    assert named.param_groups[0]["param_names"] == ["first"]


def frozen_and_absent(rank: int, world: int) -> None:
    cases = random_cases(3, 2, ((12, 8), (9, 5), (8, 8)))
    parameters = sharded(cases, rank, one_dim_mesh(world))
    muon = Muon(parameters, lr=0.1, weight_decay=0.5)
    before = [whole(p.detach()).clone() for p in parameters]
    give_gradients(cases, parameters, rank, 0)
    parameters[1].grad = None  # on every rank: not used in this step
    holders = [r for r, n in enumerate(cases[2].counts) if n]
    if rank == holders[0]:
        parameters[2].grad = None  # a fault of one rank
    assert len(holders) > 1
    muon.step()
    moved = [not torch.equal(whole(p.detach()), b) for p, b in zip(parameters, before, strict=True)]
    assert moved == [True, False, False]
    assert not whole(muon.state[parameters[1]]["momentum_buffer"]).any() and not whole(muon.state[parameters[2]]["momentum_buffer"]).any()


def test_parameter_without_gradient_on_any_rank_stays_unchanged() -> None:
    with pytest.warns(UserWarning, match="parameter 2: a gradient on some ranks only"):
        run_threads(3, frozen_and_absent)


def poisoned(rank: int, world: int, policy: str, where: int) -> Any:
    case = Case((9, 4), 1, (3, 2, 4))
    parameters = [nn.Parameter(ragged(case, start((9, 4), i), one_dim_mesh(world), rank)) for i in range(2)]
    muon = Muon(parameters, lr=0.1, nonfinite=policy)
    give_gradients([case] * 2, parameters, rank, 0)
    if rank == where:
        parameters[1].grad._local_tensor[0, 0] = math.inf  # type: ignore[union-attr]
    before = [whole(p.detach()).clone() for p in parameters]
    if policy == "raise":
        with pytest.raises(NonFiniteGradients):
            muon.step()
    else:
        muon.step()
    changed = [not torch.equal(whole(p.detach()), b) for p, b in zip(parameters, before, strict=True)]
    broken = [bool(whole(p.detach()).isnan().any()) for p in parameters]
    dist.barrier()
    return changed, broken


@pytest.mark.parametrize(
    ("policy", "where", "expected"),
    [
        ("skip", 0, ([False] * 2, [False] * 2)),
        ("raise", 2, ([False] * 2, [False] * 2)),
        ("propagate", 0, ([True] * 2, [False, True])),
    ],
)
def test_all_ranks_follow_one_policy_for_one_ranks_inf(policy: str, where: int, expected: Any) -> None:
    with pytest.warns(UserWarning, match="all ranks skip") if policy == "skip" else contextlib.nullcontext():
        assert run_threads(3, poisoned, policy, where) == [expected] * 3


def laid_out_wrong(rank: int, world: int, combined: bool) -> str:
    case = Case((9, 4), 1, (3, 2, 4))
    parameters = [nn.Parameter(ragged(case, start((9, 4), i), one_dim_mesh(world), rank)) for i in range(2)]
    muon = Muon(parameters[:1] if combined else parameters, lr=0.1)
    optimizer = CombinedOptimizer([muon, AdamW(parameters[1:])]) if combined else muon
    give_gradients([case] * 2, parameters, rank, 0)
    if rank == 1:
        other = Case((9, 4), 1, (3, 3, 3))
        parameters[0].grad = ragged(other, gradient((9, 4), 0, 0), one_dim_mesh(world), rank)
    before = [whole(p.detach()).clone() for p in parameters]
    with pytest.raises((ValueError, DisagreementError)) as caught:
        optimizer.step()
    assert all(torch.equal(whole(p.detach()), b) for p, b in zip(parameters, before, strict=True))
    return str(caught.value)


@pytest.mark.parametrize("combined", [False, True])
def test_a_gradient_that_one_rank_can_not_step_stops_all_of_them(combined: bool) -> None:
    told = run_threads(3, laid_out_wrong, combined)
    assert "redistribute the gradient" in told[1] and told[0] == told[2] and "another rank can't take this optimizer step" in told[0]


@on_threads(3)
def test_step_with_a_failed_last_collective_writes_nothing(rank: int, world: int) -> None:
    """The last collective of a step fails on every rank."""
    cases = [Case((12, 8), 1, (4, 4, 4)), Case((9, 5), 1, (1, 4, 4))]
    parameters = sharded(cases, rank, one_dim_mesh(world))
    muon = Muon(parameters, lr=0.1, bucket_bytes=100)
    give_gradients(cases, parameters, rank, 0)
    before = [whole(p.detach()).clone() for p in parameters]
    (exchange,) = muon._routed().exchanges
    sends, allowed = exchange._send, 2 * len(exchange.itinerary.buckets) - 1

    def limited(*args: Any) -> Any:
        nonlocal allowed
        allowed -= 1
        if allowed < 0:
            raise RuntimeError("connection closed by peer")
        return sends(*args)

    exchange._send = limited  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="connection closed"):
        muon.step()
    same = all(torch.equal(whole(p.detach()), b) for p, b in zip(parameters, before, strict=True))
    assert same and not any(whole(muon.state[p]["momentum_buffer"]).any() for p in parameters)


def bf16_steps(rank: int, world: int, cases: list[Case]) -> list[Any]:
    mesh = one_dim_mesh(world)
    parameters = [nn.Parameter(ragged(c, start(c.shape, i).bfloat16(), mesh, rank)) for i, c in enumerate(cases)]
    muon = Muon(parameters, lr=0.02, weight_decay=0.5)
    for step in range(4):
        for i, (c, p) in enumerate(zip(cases, parameters, strict=True)):
            p.grad = ragged(c, gradient(c.shape, i, step).bfloat16(), mesh, rank)
        muon.step()
    return [whole(t.detach()).float().numpy() for p in parameters for t in (p, muon.state[p]["momentum_buffer"])]


def test_bf16_steps_are_bitwise_equal_at_every_world_size() -> None:
    shapes = ((33, 65), (65, 33), (7, 10), (16, 48))
    expected = run_threads(1, bf16_steps, random_cases(1, 0, shapes))[0]
    for world in (2, 3):
        for got in run_threads(world, bf16_steps, random_cases(world, world, shapes)):
            assert all((a == b).all() for a, b in zip(got, expected, strict=True))
    for i, shape in enumerate(shapes):  # close to torch's, which rounds to BF16 in between
        p = nn.Parameter(start(shape, i).bfloat16())
        theirs = torch.optim.Muon([p], lr=0.02, weight_decay=0.5)
        for step in range(4):
            p.grad = gradient(shape, i, step).bfloat16()
            theirs.step()
        torch.testing.assert_close(torch.as_tensor(expected[2 * i]), p.detach().float(), rtol=0.05, atol=0.02)
