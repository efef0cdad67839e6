"""Several optimizers behind one interface: their steps, states and common decisions."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from tests.dtensor.layouts import one_dim_mesh, whole
from tests.optim.llamas import MUON, llama, loss_of
from tests.ranks import on_threads, run_gloo, run_threads
from vescale_ray.fsdp import fully_shard
from vescale_ray.optim import AdamW, AdamW8bit, CombinedOptimizer, Muon, OptimizerConfig, build_optimizer, route_parameters
from vescale_ray.state_dict import get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict


def two_optimizers(steps: int) -> list[Tensor]:
    """torch's own two optimizers side by side, on one process."""
    model = llama()
    hidden = [p for n, p in model.named_parameters() if "_proj" in n]
    rest = [p for n, p in model.named_parameters() if "_proj" not in n]
    theirs = [
        torch.optim.Muon(hidden, lr=0.02, weight_decay=0.5, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.02, weight_decay=0.5, betas=(0.9, 0.95)),
    ]
    for step in range(steps):
        loss_of(model, step).backward()
        for optimizer in theirs:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def test_combined_step_equals_its_parts_steps_with_hooks_working() -> None:
    model = llama()
    combined: Any = build_optimizer(model, MUON, log=None)
    assert isinstance(combined, CombinedOptimizer) and isinstance(combined, torch.optim.Optimizer)
    calls: list[str] = []
    combined.register_step_post_hook(lambda *_: calls.append("post"))
    schedule = torch.optim.lr_scheduler.LambdaLR(combined, lambda step: 1.0)

    def closure() -> Tensor:
        combined.zero_grad()
        loss = loss_of(model, len(calls))
        loss.backward()
        return loss

    for _ in range(3):
        assert combined.step(closure).item() > 0
        schedule.step()
    assert calls == ["post"] * 3
    for p, q in zip(model.parameters(), two_optimizers(3), strict=True):
        assert torch.equal(p, q)
    torch.optim.lr_scheduler.LambdaLR(combined, lambda step: 0.5)
    assert all(group["lr"] == 0.01 for part in combined.optimizers for group in part.param_groups)
    with pytest.raises(ValueError, match=r"add the group to one of \.optimizers"):
        combined.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))]})
    with pytest.raises(ValueError, match="in two of the combined"):
        CombinedOptimizer([combined.optimizers[0], combined.optimizers[0]])
    again = pickle.loads(pickle.dumps(combined))
    assert isinstance(again, CombinedOptimizer) and len(again.state) == len(combined.state)


def test_combined_state_dict_loads_into_all_parts_or_none() -> None:
    model = llama()
    combined: Any = build_optimizer(model, MUON, log=None)
    for step in range(2):
        loss_of(model, step).backward()
        combined.step()
        combined.zero_grad()
    saved, weights = copy.deepcopy(combined.state_dict()), copy.deepcopy(model.state_dict())
    other = llama()
    other.load_state_dict(weights)
    fresh: Any = build_optimizer(other, MUON, log=None)
    fresh.load_state_dict(saved)
    for m, o in ((model, combined), (other, fresh)):
        loss_of(m, 2).backward()
        o.step()
    for p, q, r in zip(model.parameters(), other.parameters(), two_optimizers(3), strict=True):
        assert torch.equal(p, q) and torch.equal(p, r)
    before = copy.deepcopy(fresh.state_dict())
    broken = copy.deepcopy(saved)
    del broken["state"][0]
    broken["param_groups"][1]["lr"] = 7.0
    for wrong in (broken, {"state": saved["state"], "param_groups": saved["param_groups"][:1]}):
        with pytest.raises(ValueError, match=r"start from zero|has 1 parameter groups"):
            fresh.load_state_dict(wrong)
    after = fresh.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, state in before["state"].items():
        assert all(torch.equal(v, after["state"][key][k]) for k, v in state.items())


def trained(rank: int, world: int, folder: str, save: bool) -> list[Any]:
    model = llama()
    routing = route_parameters(model, MUON)
    for layer in model.layers:
        fully_shard(layer, mesh=one_dim_mesh(world), block_policy=routing.block_policy)
    fully_shard(model, mesh=one_dim_mesh(world), block_policy=routing.block_policy)
    combined: Any = build_optimizer(model, MUON, log=None)
    if not save:
        state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, combined)}
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, combined, state["optim"])
    for step in range(2) if save else range(2, 3):
        for i, p in enumerate(model.parameters()):
            full = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
            p.grad = torch.zeros_like(p)
            p.grad.copy_(full)
        combined.step()
    if save:
        dcp.save({"model": model.state_dict(), "optim": get_optimizer_state_dict(model, combined)}, checkpoint_id=folder)
        whole_state = get_optimizer_state_dict(model, combined, options=StateDictOptions(full_state_dict=True))
        assert len(whole_state["state"]) == len(list(model.parameters()))
    return [whole(p.detach()).numpy() for p in model.parameters()]


def test_sharded_checkpoint_resumes_at_another_world_size(tmp_path: Path) -> None:
    run_gloo(3, trained, str(tmp_path), True)
    resumed = run_gloo(2, trained, str(tmp_path), False)[0]
    model = llama()
    hidden = [p for n, p in model.named_parameters() if "_proj" in n]
    rest = [p for n, p in model.named_parameters() if "_proj" not in n]
    theirs = [
        torch.optim.Muon(hidden, lr=0.02, weight_decay=0.5, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.02, weight_decay=0.5, betas=(0.9, 0.95)),
    ]
    for step in range(3):
        for i, p in enumerate(model.parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
        for optimizer in theirs:
            optimizer.step()
    for got, p in zip(resumed, model.parameters(), strict=True):
        assert torch.equal(torch.as_tensor(got), p)


def combined_agreement(rank: int, world: int) -> tuple[list[bool], list[bool]]:
    model = llama()
    fully_shard(model, mesh=one_dim_mesh(world))
    combined: Any = build_optimizer(model, MUON, log=None)
    named = dict(model.named_parameters())

    def attempt(spoil: Any) -> list[bool]:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        spoil()
        before = [whole(p.detach()).clone() for p in model.parameters()]
        combined.step()
        return [not torch.equal(whole(p.detach()), b) for p, b in zip(model.parameters(), before, strict=True)]

    def missing() -> None:
        p: Any = named["embed.weight"]
        if rank == 0 and p._local_tensor.numel():
            p.grad = None

    def infinite() -> None:
        local = named["embed.weight"].grad._local_tensor
        if local.numel():
            local.view(-1)[0] = math.nan

    return attempt(missing), attempt(infinite)


def test_non_communicating_parts_follow_the_common_decision() -> None:
    names = [n for n, _ in llama().named_parameters()]
    with pytest.warns(UserWarning, match="all ranks skip|some ranks only"):
        results = run_threads(3, combined_agreement)
    assert all(r == results[0] for r in results)
    missing, infinite = results[0]
    assert [n for n, moved in zip(names, missing, strict=True) if not moved] == ["embed.weight"]
    assert not any(infinite)


def local_agreement(rank: int, world: int, agree: bool) -> list[bool]:
    model = llama()
    fully_shard(model, mesh=one_dim_mesh(world))
    optimizer = build_optimizer(model, "adamw", log=None, agree=agree)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    if rank == 1:
        local: Any = next(p for p in model.parameters() if p._local_tensor.numel()).grad  # type: ignore[attr-defined]
        local._local_tensor.view(-1)[0] = math.inf
    before = [whole(p.detach()).clone() for p in model.parameters()]
    optimizer.step()
    return [not torch.equal(whole(p.detach()), b) for p, b in zip(model.parameters(), before, strict=True)]


EXPECTED = [("skip", (False, "")), ("raise", (False, "NonFiniteGradients")), ("propagate", (True, ""))]


@pytest.mark.filterwarnings("ignore:a gradient holds NaN")
@pytest.mark.parametrize(("policy", "expected"), EXPECTED)
@on_threads(2)
def test_nan_policy_of_one_part_holds_for_all_parts(rank: int, world: int, policy: str, expected: tuple[bool, str]) -> None:
    """Only the 8-bit part has a policy for NaN, but the NaN is in the AdamW part, on one rank."""
    model = llama()
    config = OptimizerConfig("adamw8bit", options={"nonfinite": policy, "min_8bit_numel": 1, "block": 8})
    routing = route_parameters(model, config)
    fully_shard(model, mesh=one_dim_mesh(world), block_policy=routing.block_policy)
    optimizer: Any = build_optimizer(model, config, log=None)
    assert [type(part).__name__ for part in optimizer.optimizers] == ["AdamW", "AdamW8bit"]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    local = model.embed.weight.grad._local_tensor  # type: ignore[union-attr, attr-defined]
    if local.numel() and rank == 0:
        local.view(-1)[0] = math.nan
    before = [whole(p.detach()).clone() for p in model.parameters()]
    told = ""
    try:
        optimizer.step()
    except RuntimeError as error:
        told = type(error).__name__
    moved = {not torch.equal(whole(p.detach()), b) for p, b in zip(model.parameters(), before, strict=True)}
    assert (moved, told) == ({expected[0]}, expected[1])


@pytest.mark.parametrize("agree", [False, True])
@pytest.mark.parametrize("first", [Muon, AdamW])
def test_later_parts_bad_gradient_stops_the_step_before_any_part(first: Any, agree: bool) -> None:
    one, two = (nn.Parameter(torch.ones(8, 8)) for _ in range(2))
    combined = CombinedOptimizer([first([one], lr=0.1), AdamW8bit([two], min_8bit_numel=1)], agree=agree)
    one.grad, two.grad = torch.randn(8, 8), torch.eye(8).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        combined.step()
    assert bool((one == 1).all()) and not any(bool(v.any()) for v in combined.state.get(one, {}).values())


def test_non_communicating_optimizers_agree_only_with_agree() -> None:
    with pytest.warns(UserWarning, match="all ranks skip"):
        assert not any(any(moved) for moved in run_threads(3, local_agreement, True))
    assert all(all(moved) for moved in run_threads(3, local_agreement, False))
