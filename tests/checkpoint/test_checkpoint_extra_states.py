"""Extra states of modules: what ``get_extra_state()`` returns is given back, be it a tensor or another value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.checkpoint.plain_values import digest
from vescale_ray import checkpoint as ckpt
from vescale_ray.checkpoint.bridges.dcp import DcpReader


class Counting(nn.Linear):
    """A module whose extra state is a temporary tensor."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.count = 0

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([self.count, 1])

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.count = int(state[0])


def test_modules_get_their_extra_state_back(root):
    first, second, model, other = Counting(), Counting(), [Counting(), Counting()], Counting()
    first.count, second.count = 7, 9
    ckpt.save({"model": nn.Sequential(first, checkpoint_wrapper(second)), "other": first}, root, 1)
    fresh = nn.Sequential(model[0], checkpoint_wrapper(model[1]))
    ckpt.load({"model": fresh, "other": other}, root, exclude="0.*")
    assert [model[0].count, model[1].count, other.count] == [0, 9, 7]
    ckpt.load({"model": fresh}, root)
    assert model[0].count == 7


class Holding(nn.Linear):
    """A module whose extra state is any value."""

    def __init__(self, held: Any = None) -> None:
        super().__init__(2, 2)
        self.held = held

    def get_extra_state(self) -> Any:
        return self.held

    def set_extra_state(self, state: Any) -> None:
        if state == "refused":
            raise KeyError("scale")
        self.held = state


HELD = [{"scales": [torch.arange(3.0), (1, None)], 3: b"x" * 300}, None, "a", torch.arange(5, dtype=torch.uint8), torch.tensor([])]


@pytest.mark.parametrize("live", [None, {"count": 0}, torch.ones(2)], ids=["None", "dict", "tensor"])
def test_extra_states_replace_those_of_any_other_sort(root: Path, live: Any) -> None:
    wanted = [digest(held) for held in HELD]
    ckpt.save({"model": nn.Sequential(*map(Holding, HELD)), "ema": checkpoint_wrapper(nn.Sequential(Holding({"a": 1})))}, root, 1)
    for wrap in (lambda module: module, torch.compile):
        fresh, copy = nn.Sequential(*(Holding(live) for _ in HELD)), nn.Sequential(Holding(live))
        ckpt.load({"model": wrap(fresh), "ema": copy}, root)
        assert [digest(module.held) for module in fresh] == wanted and copy[0].held == {"a": 1}
    states = {**nn.Sequential(*(Holding(live) for _ in HELD)).state_dict()}
    ckpt.load({"model": states}, root)
    assert [digest(states[f"{i}._extra_state"]) for i in range(len(HELD))] == wanted
    with torch.device("meta"):
        meta = nn.Sequential(*(Holding() for _ in HELD))
    ckpt.load({"model": meta}, root)
    assert [digest(module.held) for module in meta] == wanted


def test_an_extra_state_on_one_side_only_is_refused_by_name(root: Path) -> None:
    ckpt.save({"model": nn.Sequential(Holding({"a": 1}), nn.Linear(2, 2))}, root, 1)
    fresh = nn.Sequential(nn.Linear(2, 2), Holding("kept"))
    words = r"is of another model: it lacks '1\._extra_state'; it also has 'model.0._extra_state'"
    with pytest.raises(ckpt.CheckpointMismatch, match=words):
        ckpt.load({"model": fresh}, root)
    ckpt.load({"model": fresh}, root, allow_missing="1._extra_state", allow_unexpected="0._extra_state")
    assert fresh[1].held == "kept"
    into = nn.Sequential(Holding(), nn.Linear(2, 2))
    ckpt.load({"model": into}, root, exclude="*._extra_state")
    assert into[0].held is None


def test_a_refused_extra_state_is_named_with_its_module(root: Path) -> None:
    with pytest.raises(ValueError, match=r"state.model.0._extra_state.a is a set, .*give a sorted list"):
        ckpt.save({"model": nn.Sequential(Holding({"a": {1}}))}, root, 1)
    with pytest.raises(ValueError, match="has the name under which the extra state of a module is stored"):
        ckpt.save({"model": nn.Sequential(Holding()), "model.0._extra_state": 1}, root, 1)
    ckpt.save({"model": nn.Sequential(Holding("refused"))}, root, 1)
    with pytest.raises(ckpt.CheckpointMismatch, match="Holding.set_extra_state of '0._extra_state' failed .*KeyError: 'scale'"):
        ckpt.load({"model": nn.Sequential(Holding())}, root)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_extra_states_pass_through_dcp_both_ways(root: Path, tmp_path: Path) -> None:
    model, wanted = nn.Sequential(*map(Holding, HELD[:4])), [digest(held) for held in HELD[:4]]
    ckpt.save({"model": model}, root, 1)
    live = nn.Sequential(*map(Holding, [None, "", "", torch.zeros(5, dtype=torch.uint8)]))
    states = {"model": {name: value for name, value in live.state_dict().items() if name != "0._extra_state"}}
    dcp.load(states, storage_reader=DcpReader(root))
    assert [digest(states["model"][f"{i}._extra_state"]) for i in (1, 2, 3)] == wanted[1:]
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "theirs")
    ckpt.import_dcp(tmp_path / "theirs", tmp_path / "ours")
    for read in (lambda into: ckpt.import_dcp(tmp_path / "theirs", into), lambda into: ckpt.load(into, tmp_path / "ours")):
        into = nn.Sequential(*map(Holding, HELD[3::-1]))
        read({"model": into})
        assert [digest(module.held) for module in into] == [wanted[0].replace(",3:", ",'3':"), *wanted[1:]]  # as DCP keeps a dict
