"""Optimizer states that are dicts or lists, flattened, or of one element: stored by path, loaded as they were saved."""

from __future__ import annotations

import tempfile
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard as fully_shard_of_torch
from torch.distributed.tensor import DTensor

from tests.fsdp.towers import filled
from tests.ranks import on_threads, run_gloo
from vescale_ray import RaggedDTensor
from vescale_ray import checkpoint as ckpt
from vescale_ray.checkpoint.bridges.dcp import DcpReader
from vescale_ray.checkpoint.plain_values.scalars import encode
from vescale_ray.checkpoint.state import optimizer_state
from vescale_ray.checkpoint.state.saved_meta import check_saved_meta
from vescale_ray.fsdp import fully_shard

pytestmark = pytest.mark.filterwarnings("ignore::vescale_ray.dtensor.RaggedFallbackWarning")

Make = Callable[[Any], torch.optim.Optimizer]
SHARD: dict[str, Callable[[nn.Module], Any]] = {"ours": fully_shard, "torch": fully_shard_of_torch, "no": lambda module: module}


class Extra(torch.optim.SGD):
    """SGD with momentum kept by ``first`` and used by ``use``, whose states may be nested."""

    def __init__(self, params: Any, first: Callable[[torch.Tensor], Any], use: Callable[[Any], torch.Tensor]) -> None:
        super().__init__(params, 0.05)
        self.first, self.use = first, use

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state.update(self.first(p))
            kept = self.use(state)
            kept.mul_(0.5).add_(p.grad.reshape(kept.shape))
            p.add_(kept.view(p.shape), alpha=-0.05)
            for step in (one for one in state.values() if isinstance(one, torch.Tensor) and one.shape == (1,) and p.shape != (1,)):
                step += 1


def nested(params: Any) -> Extra:
    def first(p: torch.Tensor) -> dict[str, Any]:
        factors = OrderedDict(ema=torch.zeros_like(p), scale=torch.tensor(2.0), name="a")
        return {"f": {"block": factors, 3: [torch.ones_like(p), (1, None)]}, "empty": []}

    return Extra(params, first, lambda state: state["f"]["block"]["ema"])


def flattened(params: Any) -> Extra:
    return Extra(params, lambda p: {"mom": torch.zeros_like(p).flatten(), "step": torch.zeros(1)}, lambda state: state["mom"])


def queued(params: Any) -> Extra:
    """A deque of tensors, as in AdaShift, and hyperparameters that are a dtype and a device, as in Rose."""
    made = Extra(params, lambda p: {"q": deque([torch.zeros_like(p), torch.ones_like(p)], maxlen=3)}, lambda state: state["q"][0])
    made.param_groups[0].update(compute_dtype=torch.bfloat16, home=torch.device("cpu"), kept={"dtypes": (torch.int8,)})
    return made


def lbfgs(params: Any) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(params, lr=0.1, max_iter=4, history_size=6)


def lbfgs_searching(params: Any) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(params, lr=0.1, max_iter=4, history_size=6, line_search_fn="strong_wolfe")


class Net(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.a = nn.Linear(5, 6, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x)  # type: ignore[no-any-return]


def net(seed: int, sort: str) -> Net:
    model = filled(Net(bias=sort != "one parameter"), seed)
    SHARD["ours" if sort == "one parameter" else sort](model)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[torch.Tensor]:
    def closure() -> Any:
        optimizer.zero_grad()
        loss: torch.Tensor = (model(torch.arange(10.0).view(2, 5) / 9) - 0.3).pow(4).sum()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return [whole(p) for p in model.parameters()]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def common_folder() -> str:
    box = [tempfile.mkdtemp() if not dist.is_initialized() or dist.get_rank() == 0 else ""]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def resumes_exactly(make: Make, sort: str) -> None:
    """A load into a new optimizer, and one into a used one, go on as the run that was saved; for every number of steps before."""
    for steps in (0, 2):
        model, other = net(0, sort), net(1, sort)
        optimizer, resumed = make(model.parameters()), make(other.parameters())
        train(model, optimizer, steps)
        root, saved = common_folder(), described(optimizer)
        ckpt.save({"model": model, "optimizer": optimizer}, root, 1)
        expected = train(model, optimizer, 2)
        for to, into in ((other, resumed), (model, optimizer)):
            ckpt.load({"model": to, "optimizer": into}, root)
            assert described(into) == saved
            assert all(map(torch.equal, expected, train(to, into, 2)))


def described(value: Any) -> Any:
    """The value with shapes and dtypes in the place of tensors."""
    if isinstance(value, torch.optim.Optimizer):
        states = [value.state.get(p, {}) for group in value.param_groups for p in group["params"]]
        groups = [{key: item for key, item in group.items() if key != "params"} for group in value.param_groups]
        return [{key: described(item) for key, item in one.items()} for one in (*states, *groups)]
    if isinstance(value, Mapping):
        return type(value).__name__, [(key, described(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return type(value).__name__, getattr(value, "maxlen", None), [described(item) for item in value]
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("make", [nested, flattened, queued, lbfgs, lbfgs_searching])
def test_nested_and_flattened_states_resume_exactly(make: Make) -> None:
    resumes_exactly(make, "no")


# torch's tensors don't support the operations of L-BFGS.
SHARDED = [(nested, "ours"), (nested, "torch"), (flattened, "ours"), (flattened, "torch"), (queued, "ours"), (lbfgs, "ours")]


@pytest.mark.parametrize(("make", "sort"), [*SHARDED, (flattened, "one parameter"), (lbfgs, "one parameter")])
@on_threads(2)
def test_sharded_nested_and_flattened_states_resume_exactly(rank: int, world: int, make: Make, sort: str) -> None:
    resumes_exactly(make, sort)


MAKES: dict[str, Make] = {"nested": nested, "flattened": flattened, "lbfgs": lbfgs}


def goes_on(model: Any, optimizer: Any) -> list[Any]:
    return [p.numpy() for p in train(model, optimizer, 2)]


def saved_rank(rank: int, world: int, root: str) -> dict[str, list[Any]]:
    found = {}
    for name, make in MAKES.items():
        model = net(0, "ours")
        optimizer = make(model.parameters())
        train(model, optimizer, 2)
        ckpt.save({"model": model, "optimizer": optimizer}, f"{root}/{name}", 2)
        found[name] = goes_on(model, optimizer)
    return found


def loaded_rank(rank: int, world: int, root: str) -> dict[str, list[Any]]:
    found = {}
    for name, make in MAKES.items():
        model = net(1, "ours")
        optimizer = make(model.parameters())
        ckpt.load({"model": model, "optimizer": optimizer}, f"{root}/{name}")
        found[name] = goes_on(model, optimizer)
    return found


def test_other_numbers_of_ranks_load_the_same_states(tmp_path: Path) -> None:
    expected = run_gloo(2, saved_rank, str(tmp_path))[0]
    for found in run_gloo(3, loaded_rank, str(tmp_path)):
        torch.testing.assert_close(found, expected)
    for name, make in MAKES.items():
        model = net(1, "no")
        optimizer = make(model.parameters())
        ckpt.load({"model": model, "optimizer": optimizer}, tmp_path / name)
        ckpt.save({"model": model, "optimizer": optimizer}, tmp_path / name, 3)  # and back, from one process to two
        torch.testing.assert_close(goes_on(model, optimizer), expected[name])
    for found in run_gloo(2, loaded_rank, str(tmp_path)):
        torch.testing.assert_close(found, expected)


@on_threads(2)
def test_a_flattened_state_loads_sharded_as_its_parameter_is(rank: int, world: int) -> None:
    model, other = net(0, "ours"), net(1, "ours")
    optimizer, resumed = flattened(model.parameters()), flattened(other.parameters())
    train(model, optimizer, 2)
    root = common_folder()
    ckpt.save({"model": model, "optimizer": optimizer}, root, 1)
    ckpt.load({"model": other, "optimizer": resumed}, root)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        mine, theirs = optimizer.state[p]["mom"], resumed.state[q]["mom"]
        assert isinstance(theirs, RaggedDTensor) and theirs.placements == mine.placements
        assert torch.equal(mine.to_local(), theirs.to_local()) and theirs.to_local().numel() == q.to_local().numel()  # type: ignore[attr-defined]
        assert type(resumed.state[q]["step"]) is torch.Tensor and resumed.state[q]["step"].shape == (1,)


@on_threads(2)
def test_a_plain_part_in_a_nested_state_is_refused(rank: int, world: int) -> None:
    model = net(0, "ours")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.state[model.a.weight]["f"] = {"ema": torch.ones(3)}
    with pytest.raises(ValueError, match=r"state 'f/ema' of 'a.weight' .* which part this rank holds is unknown; make it a DTensor"):
        ckpt.save({"model": model, "optimizer": optimizer}, common_folder(), 1)


def test_a_nested_state_keeps_types_and_shared_tensors(tmp_path: Path) -> None:
    model = net(0, "no")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    one = torch.arange(4.0)
    value: dict[Any, Any] = {
        "a/b": [one, one],
        1: (torch.tensor([[2.0]]), None),
        "size": torch.Size([2]),
        "o": OrderedDict(x=b"y"),
        "none": {},
    }
    value["inner"] = {"state": {0: {"m": torch.ones(2)}}, "param_groups": []}  # as an optimizer within has it
    optimizer.state[model.a.weight].update(f=value, ro=[torch.tensor(0.5)], pair=(1, 2))
    groups: dict[str, Any] = {"config": {"beta": 0.5, "dims": [1, (2, 3)]}}
    optimizer.param_groups[0].update(groups)
    shared: dict[Any, Any] = optimizer.state
    shared["counts"] = {"steps": [1, 2]}
    ckpt.save({"model": model, "optimizer": optimizer}, tmp_path, 1)
    again = torch.optim.SGD(model.parameters(), 0.1)
    again.param_groups[0]["config"] = None
    ckpt.load({"model": model, "optimizer": again}, tmp_path)
    found = again.state[model.a.weight]
    assert described(again) == described(optimizer)
    assert torch.equal(found["f"]["a/b"][0], one) and found["f"]["a/b"][1] is found["f"]["a/b"][0]
    assert found["f"][1][0].tolist() == [[2.0]] and found["ro"][0].item() == 0.5
    assert again.param_groups[0]["config"] == groups["config"] and dict[Any, Any](again.state)["counts"] == {"steps": [1, 2]}
    assert {"a.weight/f/a/b/0", "a.weight/f/inner/state/0/m"} == {
        name for name in ckpt.open(tmp_path).tensors if name.startswith("a.weight/")
    }


def test_states_in_the_form_of_older_checkpoints_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There, a tuple was a list of JSON, and a plain tensor of one element a tensor."""
    model = net(0, "no")
    optimizer, resumed = (torch.optim.SGD(model.parameters(), 0.1) for _ in range(2))
    optimizer.state[model.a.weight].update(pair=(1, 2.5), step=torch.tensor([3.0]))
    with monkeypatch.context() as older:
        older.setattr(optimizer_state, "fold", lambda what, name, value, paths: encode(what, value))
        older.setattr(optimizer_state, "_is_scalar", lambda param, state_key, value: value.dim() == 0)
        ckpt.save({"model": model, "optimizer": optimizer}, tmp_path, 1)
    saved = ckpt.open(tmp_path).meta["optimizers"]["optimizer"]
    assert saved["scalars"] == {"pair": {"a.weight": [1, 2.5]}} and saved["kinds"] == ["step"]
    for live in ({}, {"pair": (0, 0), "step": torch.tensor([9.0])}):
        resumed.state[model.a.weight].update(live)
        ckpt.load({"model": model, "optimizer": resumed}, tmp_path)
        found = resumed.state[model.a.weight]
        assert found["pair"] == (1, 2.5) and torch.equal(found["step"], torch.tensor([3.0]))


def test_what_a_nested_state_can_not_hold_is_named(tmp_path: Path) -> None:
    model = net(0, "no")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.state[model.a.weight]["f"] = {"seen": [{1, 2}]}
    with pytest.raises(ValueError, match=r"state 'f' of 'a.weight': f.seen\[0\] is a set, .*; give a sorted list"):
        ckpt.save({"model": model, "optimizer": optimizer}, tmp_path, 1)
    loop: list[Any] = []
    loop.append(loop)
    optimizer.state[model.a.weight]["f"] = loop
    with pytest.raises(ValueError, match="deep, or holds itself"):
        ckpt.save({"model": model, "optimizer": optimizer}, tmp_path, 1)


def test_a_failed_load_leaves_nested_states_alone(tmp_path: Path) -> None:
    model = net(0, "no")
    optimizer = lbfgs(model.parameters())
    train(model, optimizer, 2)
    ckpt.save({"model": model, "optimizer": optimizer}, tmp_path, 1)
    fresh = lbfgs(model.parameters())
    with pytest.raises(ckpt.CheckpointMismatch):
        ckpt.load({"model": model, "optimizer": fresh, "none": 1}, tmp_path)
    other = nn.Module()
    other.a = nn.Linear(5, 7)
    with pytest.raises(ckpt.CheckpointMismatch):
        ckpt.load({"model": other, "optimizer": (of_other := lbfgs(other.parameters()))}, tmp_path)
    assert not fresh.state and not of_other.state


def test_a_nested_state_of_an_excluded_parameter_stays(tmp_path: Path) -> None:
    model = net(0, "no")
    optimizer = nested(model.parameters())
    train(model, optimizer, 1)
    ckpt.save({"model": model, "optimizer": optimizer}, tmp_path, 1)
    train(model, optimizer, 1)
    kept = optimizer.state[model.a.bias]["f"]["block"]["ema"].clone()
    ckpt.load({"model": model, "optimizer": optimizer}, tmp_path, include="a.weight")
    assert torch.equal(optimizer.state[model.a.bias]["f"]["block"]["ema"], kept)
    ckpt.load({"model": model, "optimizer": optimizer}, tmp_path, exclude="a.weight")
    assert not torch.equal(optimizer.state[model.a.bias]["f"]["block"]["ema"], kept)


def test_stock_dcp_reads_nested_states(tmp_path: Path) -> None:
    model = net(0, "no")
    optimizer = nested(model.parameters())
    train(model, optimizer, 2)
    ckpt.save({"model": model, "optimizer": optimizer}, tmp_path, 1)
    held = optimizer.state[model.a.weight]["f"]
    want = {"optim": {"state": {"a.weight": {"f": {"block": {"ema": torch.zeros(6, 5)}, "3": {"0": torch.zeros(6, 5)}}}}}}
    dcp.load(want, storage_reader=DcpReader(tmp_path))
    assert torch.equal(want["optim"]["state"]["a.weight"]["f"]["block"]["ema"], held["block"]["ema"])
    assert torch.equal(want["optim"]["state"]["a.weight"]["f"]["3"]["0"], held[3][0])


@pytest.mark.parametrize("make", [nested, lbfgs])
def test_nested_states_of_stock_dcp_are_imported(make: Make, tmp_path: Path) -> None:
    model = net(0, "no")
    optimizer = make(model.parameters())
    train(model, optimizer, 2)
    dcp.save({"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path / "theirs")
    again = net(1, "no")
    resumed = make(again.parameters())
    ckpt.import_dcp(tmp_path / "theirs", {"model": again, "optimizer": resumed})
    assert all(map(torch.equal, train(model, optimizer, 2), train(again, resumed, 2)))
    ckpt.import_dcp(tmp_path / "theirs", tmp_path / "ours")
    ckpt.load({"model": again, "optimizer": resumed}, tmp_path / "ours")
    ckpt.export_dcp(tmp_path / "ours", None, tmp_path / "back")


def test_a_forged_name_in_a_nested_state_is_refused(tmp_path: Path) -> None:
    model = net(0, "no")
    optimizer = nested(model.parameters())
    train(model, optimizer, 1)
    ckpt.save({"model": model, "optimizer": optimizer}, tmp_path, 1)
    opened = ckpt.open(tmp_path)
    saved = opened.meta["optimizers"]["optimizer"]
    assert sorted(saved["nested"]) == ["f/3/0", "f/block/ema"] and not saved["kinds"]
    check_saved_meta("x", opened.meta)
    saved["nested"].remove("f/3/0")
    with pytest.raises(ckpt.CheckpointMismatch, match=r"meta.optimizers.optimizer.scalars.f.a.weight is not a number, text or list"):
        check_saved_meta("x", opened.meta)
