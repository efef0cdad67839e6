"""Optimizers with blocks: a step sends nothing, and a run resumes on other ranks bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.operations import Operations, collective
from tests.optim.optim_support import State, Weights, full_state, give_gradients, noise, same, sharded, train
from tests.ranks import on_processes, run_gloo
from vescale_ray import checkpoint
from vescale_ray.optim import SOAP, AdamW8bit, Muon, Shampoo
from vescale_ray.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

SHAPES = {"wq_weight": (48, 40), "odd_experts": (2, 13, 9), "embed_weight": (30, 17), "bias": (70,), "filters": (6, 4, 3, 3)}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW8bit": (AdamW8bit, {"min_8bit_numel": 200}),
    "Shampoo": (Shampoo, {"precondition_frequency": 2}),
    "SOAP": (SOAP, {"precondition_frequency": 2}),
}


def build(name: str, world: int, **more: Any) -> tuple[Weights, torch.optim.Optimizer]:
    kind, options = KINDS[name]
    model = sharded(SHAPES, world, kind.block_policy("tile 8x8", *([options["min_8bit_numel"]] if "min_8bit_numel" in options else [])))
    return model, kind(model.named_parameters(), block="tile 8x8", **{"lr": 0.02, **options, **more})


@pytest.mark.parametrize("name", KINDS)
@on_processes(2)
def test_a_step_communicates_nothing(rank: int, world: int, name: str) -> None:
    model, optimizer = build(name, world)
    for step in (1, 2):
        give_gradients(model, step)
        with Operations(collective) as stepping:
            optimizer.step()
        assert not stepping.seen
    with Operations(collective) as control:
        dist.all_reduce(torch.ones(2))
    assert len(control.seen) == 1


def save(rank: int, world: int, folder: str) -> dict[str, State]:
    """Train three steps, save both formats of checkpoint, and train two steps more."""
    found = {}
    for name in KINDS:
        model, optimizer = build(name, world)
        train(model, optimizer, range(1, 4))
        checkpoint.save({"model": model, "optimizer": optimizer}, f"{folder}/ours-{name}", 3)
        held = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(held, checkpoint_id=f"{folder}/dcp-{name}")
        train(model, optimizer, range(4, 6))
        found[name] = full_state(model, optimizer)
    return found


def load(rank: int, world: int, folder: str) -> list[tuple[str, State]]:
    found = []
    for name in KINDS:
        for format in ("ours", "dcp", "full"):
            model, optimizer = build(name, world, lr=5.0)
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            if format == "ours":
                checkpoint.load({"model": model, "optimizer": optimizer}, f"{folder}/ours-{name}")
            else:
                held: dict[str, Any] = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
                dcp.load(held, checkpoint_id=f"{folder}/dcp-{name}")
                model.load_state_dict(held["model"])
                set_optimizer_state_dict(model, optimizer, held["optimizer"])
            if format == "full":  # from rank 0's whole tensors, into an optimizer without states
                whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
                state = get_optimizer_state_dict(model, optimizer, options=whole)
                kind, options = KINDS[name]
                optimizer = kind(model.named_parameters(), block="tile 8x8", lr=5.0, **options)
                set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
            train(model, optimizer, range(4, 6))
            found.append((name, full_state(model, optimizer)))
    return found


def test_resume_on_other_ranks_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    uninterrupted = run_gloo(3, save, str(tmp_path))[0]
    for states in run_gloo(2, load, str(tmp_path)):
        for name, state in states:
            assert not same(state, uninterrupted[name]), name


@pytest.mark.parametrize("kind", [Muon, AdamW8bit, Shampoo, SOAP])
def test_decay_shrinks_parameters_with_zero_gradient(kind: Any) -> None:
    param = nn.Parameter(noise((64, 64), "p", 0))
    before = param.detach().clone()
    optimizer = kind([param], lr=0.1, weight_decay=0.5)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert torch.equal(param, before * 0.95)
