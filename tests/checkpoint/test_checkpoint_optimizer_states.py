"""States of optimizers that no parameter has, or that a checkpoint from before the first step lacks."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.fsdp.towers import filled
from tests.ranks import on_threads
from vescale_ray import checkpoint as ckpt
from vescale_ray.fsdp import fully_shard
from vescale_ray.optim import Flat
from vescale_ray.state_dict import StateDictOptions, get_state_dict, set_state_dict


class Decayed(torch.optim.SGD):
    """SGD that counts its steps under a key that is no parameter, as torch's ``state_dict()`` allows."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        state: dict[Any, Any] = self.state
        state["steps"] = state.get("steps", 0) + 1
        for group in self.param_groups:
            group["lr"] = 0.1 / state["steps"]
        return super().step(closure)


class Counter(torch.optim.Optimizer):
    """An optimizer whose only state is a number for each parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["step"] = self.state[p].get("step", 0) + 1
            p.sub_(p.grad, alpha=0.1 / self.state[p]["step"])


def net() -> nn.Sequential:
    return filled(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)))  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[torch.Tensor]:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_states_of_no_parameter_survive(tmp_path: Path) -> None:
    model, other = net(), net()
    optimizer, resumed = Decayed(model.parameters()), Decayed(other.parameters())
    train(model, optimizer)
    ckpt.save({"model": model, "optimizer": optimizer}, tmp_path, 1)
    train(other, resumed, 3)
    ckpt.load({"model": other, "optimizer": resumed}, tmp_path)
    assert dict[Any, Any](resumed.state)["steps"] == 2
    assert all(map(torch.equal, train(model, optimizer), train(other, resumed)))


def test_other_states_of_no_parameter_are_refused(tmp_path: Path) -> None:
    model = net()
    for key, value, words in (
        ("factors", torch.ones(3), "state 'factors' of optimizer 'optimizer' is a tensor"),
        (3, 1, "under the key 3"),
    ):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        state: dict[Any, Any] = optimizer.state
        state[key] = value
        with pytest.raises(ValueError, match=words):
            ckpt.save({"model": model, "optimizer": optimizer}, tmp_path, 1)


@pytest.mark.parametrize(
    "make",
    [Counter, lambda p: torch.optim.AdamW(p, 0.1), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda p: Flat(p, lr=0.1)],
    ids=["counter", "adamw", "sgd", "flat"],
)
def test_a_checkpoint_from_before_the_first_step_clears_states(tmp_path: Path, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = net()
    optimizer = make(model.parameters())
    ckpt.save({"model": model, "optimizer": optimizer}, tmp_path, 0)
    first = train(model, optimizer)
    ckpt.load({"model": model, "optimizer": optimizer}, tmp_path)
    assert all(map(torch.equal, first, train(model, optimizer)))


def test_a_load_that_fails_clears_no_state(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    ckpt.save({"model": {"0.weight": model[0].weight}, "other": 1}, tmp_path / "a", 0)
    ckpt.save({"model": model, "optimizer": optimizer}, tmp_path / "b", 0)
    train(model, optimizer)
    before = {p: dict(state) for p, state in optimizer.state.items()}
    with pytest.raises(ckpt.CheckpointError):
        ckpt.load({"model": model, "optimizer": optimizer, "missing": 0}, tmp_path / "b")
    assert {p: dict(state) for p, state in optimizer.state.items()} == before


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Flat])
def test_one_parameter_without_states_is_cleared_alone(tmp_path: Path, kind: Any) -> None:
    """A parameter that was frozen until after the checkpoint."""
    model = net()
    optimizer = kind(model.parameters(), lr=0.1)
    model[1].weight.requires_grad_(False)
    train(model, optimizer)
    ckpt.save({"model": model, "optimizer": optimizer}, tmp_path, 0)
    model[1].weight.requires_grad_(True)
    first = train(model, optimizer)
    ckpt.load({"model": model, "optimizer": optimizer}, tmp_path)
    assert model[1].weight not in optimizer.state and model[0].weight in optimizer.state
    assert all(map(torch.equal, first, train(model, optimizer)))


@pytest.mark.parametrize("make", [Counter, lambda p: torch.optim.AdamW(p, 0.1)], ids=["counter", "adamw"])
def test_parameters_that_were_tied_all_get_the_states(tmp_path: Path, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """The numbers among the states went to one of the parameters alone: AdamW's next step failed, a counter began anew."""
    torch.manual_seed(0)
    tied, untied = (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(2))
    tied[1].weight = tied[0].weight
    optimizer, resumed = make(tied.parameters()), make(untied.parameters())
    train(tied, optimizer)
    ckpt.save({"model": tied, "optimizer": optimizer}, tmp_path, 1)
    ckpt.load({"model": untied, "optimizer": resumed}, tmp_path)
    first, second = (resumed.state[p] for name, p in untied.named_parameters() if name.endswith("weight"))
    assert first["step"] == second["step"] == 2 and first.keys() == second.keys()
    train(untied, resumed)


@on_threads(1)
def test_plain_states_of_a_sharded_0d_parameter_load_plain(rank: int, world: int) -> None:
    """As a DTensor, NAdam's ``mu_product`` would be sent between the ranks in every step."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    model, other = fully_shard(Scaled()), fully_shard(Scaled())
    optimizer, resumed = torch.optim.NAdam(model.parameters()), torch.optim.NAdam(other.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    with tempfile.TemporaryDirectory() as root:
        ckpt.save({"model": model, "optimizer": optimizer}, root, 1)
        ckpt.load({"model": other, "optimizer": resumed}, root)
    types = [{key: type(value) for key, value in one.state[p.scale].items()} for one, p in ((optimizer, model), (resumed, other))]
    assert types[0] == types[1] and types[0]["mu_product"] is torch.Tensor


@on_threads(2)
def test_training_follows_a_load_in_inference_mode(rank: int, world: int) -> None:
    folder = Path(tempfile.gettempdir()) / f"vescale-inference-{os.getpid()}"
    first = fully_shard(net())
    optimizer = torch.optim.AdamW(first.parameters(), lr=0.1)
    train(first, optimizer)
    full = StateDictOptions(full_state_dict=True)
    ckpt.save({"model": first, "optimizer": optimizer}, folder, 2)
    saved = copy.deepcopy(get_state_dict(first, optimizer, options=full))

    def by_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        ckpt.load({"model": model, "optimizer": optimizer}, folder)

    def by_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        set_state_dict(model, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1], options=full)

    train(first, optimizer)
    for load in (by_checkpoint, by_state_dict):
        second = fully_shard(net())
        resumed = torch.optim.AdamW(second.parameters(), lr=0.1)
        with torch.inference_mode():
            load(second, resumed)
        train(second, resumed)
        for p, q in zip(second.parameters(), first.parameters(), strict=True):
            assert torch.equal(p.to_local(), q.to_local())
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("without", [0, 1])
@on_threads(2)
def test_states_that_one_rank_lacks_are_refused_with_a_remedy(rank: int, world: int, without: int, tmp_path: Path) -> None:
    """A gradient that a rank drops leaves it without the states of its part."""
    model = fully_shard(nn.Linear(8, 8, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    for drops in (True, False):
        model(torch.ones(2, 8)).sum().backward()
        if drops and rank == without:
            model.weight.grad = None
        optimizer.step()
        if drops:
            with pytest.raises(
                (ckpt.CommitRefused, ckpt.SaveFailed), match="no rank wrote elements .*let all ranks take the same optimizer st"
            ):
                ckpt.save({"model": model, "optimizer": optimizer}, tmp_path, 1)
            optimizer.state.clear()  # the remedy
    ckpt.save({"model": model, "optimizer": optimizer}, tmp_path, 2)
    fresh = torch.optim.AdamW(model.parameters())
    ckpt.load({"model": model, "optimizer": fresh}, tmp_path)
    assert torch.equal(fresh.state[model.weight]["exp_avg"].to_local(), optimizer.state[model.weight]["exp_avg"].to_local())


@pytest.mark.parametrize(
    ("make", "wider"), [(torch.optim.AdamW, False), (torch.optim.AdamW, True), (torch.optim.Adafactor, False), (Flat, True)]
)
def test_states_are_cast_with_their_parameters(tmp_path: Path, make: Callable[[Any], torch.optim.Optimizer], wider: bool) -> None:
    """A new optimizer got the states' stored dtype; the next step then raised."""
    dtypes = [torch.bfloat16, torch.float32] if wider else [torch.float32, torch.bfloat16]
    models = [nn.Linear(4, 4).to(dtype) for dtype in dtypes]
    saved, resumed = (make(model.parameters()) for model in models)
    models[0](torch.ones(2, 4, dtype=dtypes[0])).sum().backward()
    saved.step()
    ckpt.save({"model": models[0], "optimizer": saved}, tmp_path, 1)
    ckpt.load({"model": models[1], "optimizer": resumed}, tmp_path, cast=True)
    copied = make(models[1].parameters())
    copied.load_state_dict(saved.state_dict())
    for p in models[1].parameters():
        assert {key: value.dtype for key, value in resumed.state[p].items()} == {key: value.dtype for key, value in copied.state[p].items()}
        assert all(torch.equal(value, copied.state[p][key]) for key, value in resumed.state[p].items())
    models[1](torch.ones(2, 4, dtype=dtypes[1])).sum().backward()
    resumed.step()
