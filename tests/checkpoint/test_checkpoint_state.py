"""State of a training script in one process: modules, optimizers, schedulers and plain values.

Loads are strict about a state that does not fit.
"""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.checkpoint.checkpoint_support import bits
from vescale_ray import checkpoint as ckpt
from vescale_ray.optim import AdamW8bit, CombinedOptimizer, Flat, Shampoo

LR = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: LR.LambdaLR(o, lambda step: 0.9**step),
    "step": lambda o: LR.StepLR(o, 3),
    "milestones": lambda o: LR.MultiStepLR(o, [3, 5]),
    "cosine": lambda o: LR.CosineAnnealingLR(o, 10),
    "cyclic": lambda o: LR.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "one cycle": lambda o: LR.OneCycleLR(o, 0.1, total_steps=30),
    "restarts": lambda o: LR.CosineAnnealingWarmRestarts(o, 4),
    "plateau": lambda o: LR.ReduceLROnPlateau(o, patience=1),
    "largest": lambda o: LR.ReduceLROnPlateau(o, mode="max", patience=3),
    "sequence": lambda o: LR.SequentialLR(o, [LR.ConstantLR(o), LR.MultiStepLR(o, [2, 3])], [3]),
    "chain": lambda o: LR.ChainedScheduler([LR.ConstantLR(o), LR.ExponentialLR(o, 0.9)]),
    "average": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05),
}


def rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step(1.0) if isinstance(scheduler, LR.ReduceLROnPlateau) else scheduler.step()
        found.append(float(optimizer.param_groups[0]["lr"]))
    return found


@pytest.mark.parametrize(("which", "tensor"), [*((which, False) for which in SCHEDULERS), ("step", True), ("milestones", True)])
def test_every_torch_scheduler_resumes_without_a_difference(which, tensor):
    """JSON has no dicts with numbers as keys, such as a Counter of milestones, and no infinity, the first best value of a plateau."""

    def fresh() -> tuple[torch.optim.Optimizer, Any, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1) if tensor else 0.1, momentum=0.9)
        scheduler = SCHEDULERS[which](optimizer)
        return optimizer, scheduler, {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    root = ckpt.MemoryStore()
    optimizer, scheduler, state = fresh()
    rates(optimizer, scheduler, 2)
    ckpt.save(state, root, 2)
    kept = copy.deepcopy(scheduler.state_dict())
    wanted = rates(optimizer, scheduler, 8)
    other, resumed, into = fresh()
    ckpt.load(into, root)
    assert repr(resumed.state_dict()) == repr(kept), "types too"
    assert rates(other, resumed, 8) == wanted


def test_plain_values_that_look_like_format_tags_round_trip():
    values: list[Any] = [
        {3: "a", -1: [math.inf, {"float": "inf"}]},
        {"float": "inf"},
        {"items": {"items": []}},
        {"counter": {"float": 2, "n": 1}},
        {None: 1, True: {}, 2.5: -math.inf, "": ()},
        Counter({"b": 2, 7: 1}),
        {"float": math.inf, "items": 1},
        {"tensor": {"tensor": torch.tensor(2, dtype=torch.int16)}},
    ]
    root = ckpt.MemoryStore()
    ckpt.save({"model": {"w": torch.zeros(1)}, "x": values}, root, 1)
    state: dict[str, Any] = {"model": {"w": torch.ones(1)}, "x": None}
    loaded = ckpt.load(state, root)
    assert repr(state["x"]) == repr(values) == repr(loaded.values["x"])


def test_save_refuses_a_numpy_generator_that_is_not_mt19937(root):
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        with pytest.raises(ValueError, match="is a PCG64, whose state is not stored: set_bit_generator"):
            ckpt.save({"model": {"w": torch.ones(1)}}, root, 1)
    finally:
        np.random.set_bit_generator(before)
    assert not list(root.iterdir())
    ckpt.save({"model": {"w": torch.ones(1)}}, root, 1)


class Net(nn.Module):
    """Tied embedding, a frozen parameter, 0-d, buffers of several dtypes, a bf16 parameter."""

    def __init__(self, seed: int = 0, *, tie: bool = True, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))
        self.scale = nn.Parameter(torch.randn(()))
        self.narrow = nn.Parameter(torch.randn(5).bfloat16())
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.head = nn.Linear(width, 11, bias=False)
        if tie:
            self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("seen", torch.rand(4) < 0.5)
        self.register_buffer("scratch", torch.rand(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.body(self.embed(tokens)) * self.scale + self.narrow.float().mean()
        return self.head(hidden)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 11, (4, 3), generator=generator)
        loss = nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adam(net: nn.Module, lr: float = 1e-2) -> torch.optim.AdamW:
    decay = [p for p in net.parameters() if p.dim() >= 2]
    rest = [p for p in net.parameters() if p.dim() < 2 and p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": rest, "weight_decay": 0.0}, {"params": decay}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.8, 0.9))


def same_module(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return list(left) == list(right) and all(bits(left[k]) == bits(right[k]) for k in left)


def test_training_resumed_from_a_checkpoint_goes_on_bit_for_bit(root):
    net = Net(0)
    optimizer = adam(net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    train(net, optimizer, 3)
    scheduler.step()
    state = {"model": net, "optimizer": optimizer, "scheduler": scheduler, "stream": {"consumed": 17}, "note": "x"}
    handle = ckpt.save(state, root, 3, meta={"config": {"lr": 0.01}})
    assert handle.wait().name == "e0000-s000000000003"

    other = Net(1)
    fresh = adam(other, lr=9.0)  # no step was made, so its states do not exist yet
    restored = {
        "model": other,
        "optimizer": fresh,
        "scheduler": torch.optim.lr_scheduler.StepLR(fresh, 2, 0.5),
        "stream": None,
        "note": None,
    }
    loaded = ckpt.load(restored, root)
    assert (loaded.step, loaded.epoch, loaded.meta, loaded.skipped) == (3, 0, {"config": {"lr": 0.01}}, ())
    assert restored["stream"] == {"consumed": 17} and restored["note"] == "x"
    assert same_module(net, other)
    assert restored["scheduler"].last_epoch == scheduler.last_epoch
    assert [g["lr"] for g in fresh.param_groups] == [g["lr"] for g in optimizer.param_groups]
    assert [g["betas"] for g in fresh.param_groups] == [(0.8, 0.9)] * 2
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert optimizer.state[ours].keys() == fresh.state[theirs].keys()
        for key, value in optimizer.state[ours].items():
            assert bits(value) == bits(fresh.state[theirs][key]) and value.dtype == fresh.state[theirs][key].dtype, key
    assert train(net, optimizer, 3, seed=5) == train(other, fresh, 3, seed=5)
    assert same_module(net, other)


def test_tied_weights_are_stored_once_under_the_first_name(root):
    net = Net(0)
    ckpt.save({"model": net}, root, 1)
    checkpoint = ckpt.open(root)
    assert checkpoint.aliases == {"head.weight": "embed.weight"} and "head.weight" not in checkpoint.tensors
    assert bits(checkpoint.read("head.weight")) == bits(net.embed.weight)
    untied = Net(1, tie=False)
    ckpt.load({"model": untied}, root)
    assert bits(untied.head.weight) == bits(net.embed.weight) == bits(untied.embed.weight)
    assert untied.head.weight is not untied.embed.weight


def test_load_refuses_two_stored_tensors_for_one_tied_parameter(root):
    ckpt.save({"model": Net(0, tie=False)}, root, 1)
    tied = Net(1)
    before = copy.deepcopy(tied.state_dict())
    with pytest.raises(ckpt.CheckpointMismatch, match=r"head.weight"):
        ckpt.load({"model": tied}, root)
    assert all(bits(before[k]) == bits(v) for k, v in tied.state_dict().items())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Net(1, width=8), r"'embed.weight' has shape \(11, 6\), wanted \(11, 8\)"),
        (lambda: Net(1).double(), "is float32, wanted float64"),
        (lambda: nn.Sequential(Net(1)), "lacks '0"),
        (lambda: nn.Linear(2, 2), r"lacks 'weight' \(nearest there: 'embed.weight'\), 'bias'; it also has"),
    ],
)
def test_load_of_another_model_raises_and_changes_nothing(root, make, words):
    ckpt.save({"model": Net(0)}, root, 1)
    other = make()
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ckpt.CheckpointMismatch, match=words) as caught:
        ckpt.load({"model": other}, root)
    assert "\n" not in str(caught.value) and "of another model" in str(caught.value)
    assert all(bits(before[k]) == bits(v) for k, v in other.state_dict().items())


def test_an_optimizer_with_other_groups_or_states_is_refused(root):
    net = Net(0)
    optimizer = adam(net)
    train(net, optimizer, 1)
    ckpt.save({"model": net, "optimizer": optimizer}, root, 1)
    other = Net(1)
    with pytest.raises(ckpt.CheckpointMismatch, match="has 1 parameter groups, 2 in the checkpoint; build it with .* or load without it"):
        ckpt.load({"model": other, "optimizer": torch.optim.AdamW(other.parameters())}, root)
    momentum = torch.optim.SGD([{"params": g["params"]} for g in adam(other).param_groups], lr=1.0, momentum=0.9)
    with pytest.raises(ckpt.CheckpointMismatch, match="no state 'momentum'; it has 'model' .tensors., 'optimizer' .an optimizer."):
        ckpt.load({"model": other, "momentum": momentum}, root)
    before = copy.deepcopy(momentum.state_dict())
    for trained in (False, True):
        with pytest.raises(ckpt.CheckpointMismatch, match="is SGD, the checkpoint's is AdamW: they differ in the hyperparameters amsgrad"):
            ckpt.load({"model": other, "optimizer": momentum}, root)
        if not trained:
            assert momentum.state_dict() == before, "nothing was changed"
            train(other, momentum, 1)


SORTS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params),
    "AdamW": lambda params: torch.optim.AdamW(params),
    "AdamW8bit": lambda params: AdamW8bit(params),
    "Shampoo": lambda params: Shampoo(params),
    "Flat SGD": lambda params: Flat(params, torch.optim.SGD, momentum=0.9),
    "Flat AdamW": lambda params: Flat(params, torch.optim.AdamW),
}


def stepped(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    return [bits(parameter) for parameter in net.parameters()]


@pytest.mark.parametrize("saved", SORTS)
def test_optimizer_loads_states_of_its_own_kind_only(root, saved):
    """States of another kind would stay unused beside fresh ones, or fail in the next step.

    After a refusal the optimizer can go on.
    """
    torch.manual_seed(0)
    net = nn.Linear(12, 9)
    optimizer = SORTS[saved](list(net.parameters()))
    stepped(net, optimizer)
    ckpt.save({"model": net, "optimizer": optimizer}, root, 1)
    truth = stepped(net, optimizer)
    for sort, make in SORTS.items():
        other = nn.Linear(12, 9)
        fresh = make(list(other.parameters()))
        before = [bits(p) for p in other.parameters()], [sorted(fresh.state.get(p, {})) for p in other.parameters()]
        if sort.removeprefix("Flat ") == saved.removeprefix("Flat "):
            ckpt.load({"model": other, "optimizer": fresh}, root)
            assert stepped(other, fresh) == truth, sort
        else:
            with pytest.raises(ckpt.CheckpointMismatch, match="they differ in the hyperparameters"):
                ckpt.load({"model": other, "optimizer": fresh}, root)
            assert ([bits(p) for p in other.parameters()], [sorted(fresh.state.get(p, {})) for p in other.parameters()]) == before
            stepped(other, fresh)


@pytest.mark.parametrize("combined", [False, True])
@pytest.mark.parametrize("begun", ["fresh", "stepped", "on meta"])
def test_a_flat_optimizer_goes_on_from_a_checkpoint_bit_for_bit(root, begun, combined):
    """The states are views of flat tensors. Values that are loaded into the views must reach the tensors that the step uses."""

    def made(net: nn.Module) -> torch.optim.Optimizer:
        flat = Flat(net.parameters(), torch.optim.AdamW, lr=0.01)
        return CombinedOptimizer([flat]) if combined else flat

    net = nn.Sequential(nn.Linear(12, 9), nn.Linear(9, 2))
    optimizer = made(net)
    for _ in range(3):
        stepped(net, optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    ckpt.save({"model": net, "optimizer": optimizer}, root, 1)
    with torch.device("meta" if begun == "on meta" else "cpu"):
        other = nn.Sequential(nn.Linear(12, 9), nn.Linear(9, 2))
    fresh = made(other)
    if begun == "stepped":
        stepped(other, fresh)
    ckpt.load({"model": other, "optimizer": fresh}, root)
    for _ in range(2):
        assert stepped(other, fresh) == stepped(net, optimizer)


def test_refused_load_removes_the_optimizer_states_that_it_made(root):
    """If the states stayed, the optimizer would have moments without a step count, and fail in its next step."""
    net = Net(0)
    optimizer = adam(net)
    train(net, optimizer, 1)
    ckpt.save({"model": net, "optimizer": optimizer}, root, 1)
    other = Net(1, width=8)
    fresh = adam(other)
    with pytest.raises(ckpt.CheckpointMismatch, match="has shape"):
        ckpt.load({"model": other, "optimizer": fresh}, root)
    assert not fresh.state
    train(other, fresh, 1)


def test_several_models_and_optimizers_keep_apart(root):
    a, b = Net(0), nn.Linear(3, 2)
    first, second = adam(a), torch.optim.SGD(b.parameters(), lr=0.1, momentum=0.9)
    train(a, first, 1)
    b(torch.ones(1, 3)).sum().backward()
    second.step()
    average = {"weight": torch.randn(2, 3), "steps": torch.tensor(5)}
    ckpt.save({"model": a, "critic": b, "optimizer": first, "critic_optimizer": second, "ema": average}, root, 1)
    names = ckpt.open(root).tensors
    assert {"embed.weight", "critic/weight", "ema/weight", "ema/steps"} <= set(names)
    assert set(names["critic/weight"].kinds) == {"param", "critic_optimizer.momentum_buffer"}
    b2 = nn.Linear(3, 2)
    second2 = torch.optim.SGD(b2.parameters(), lr=0.5, momentum=0.9)
    ema2 = {k: torch.zeros_like(v) for k, v in average.items()}
    ckpt.load({"critic": b2, "critic_optimizer": second2, "ema": ema2}, root)
    assert bits(b2.weight) == bits(b.weight) and all(bits(ema2[k]) == bits(average[k]) for k in average)
    assert bits(second2.state[b2.weight]["momentum_buffer"]) == bits(second.state[b.weight]["momentum_buffer"])
    assert second2.param_groups[0]["lr"] == 0.1


def test_factored_optimizer_states_and_odd_scalars_round_trip(root):
    weight = nn.Parameter(torch.randn(4, 3))
    optimizer = torch.optim.Adafactor([weight], lr=0.01) if hasattr(torch.optim, "Adafactor") else torch.optim.RMSprop([weight])
    for _ in range(2):
        weight.grad = torch.randn(4, 3)
        optimizer.step()
    optimizer.state[weight]["note"] = float("inf")
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25, dtype=torch.float64)
    ckpt.save({"model": {"w": weight}, "optimizer": optimizer}, root, 1)
    again = nn.Parameter(torch.zeros(4, 3))
    fresh = type(optimizer)([again], lr=0.01)
    ckpt.load({"model": {"w": again}, "optimizer": fresh}, root)
    assert fresh.state[again].keys() == optimizer.state[weight].keys() and fresh.state[again]["note"] == float("inf")
    for key, value in optimizer.state[weight].items():
        if isinstance(value, torch.Tensor):
            assert bits(value) == bits(fresh.state[again][key]) and value.shape == fresh.state[again][key].shape
    lr = fresh.param_groups[0]["lr"]
    assert isinstance(lr, torch.Tensor) and lr.dtype == torch.float64 and lr.item() == 0.25


def test_wrapped_modules_store_unwrapped_names(root):

    net = Net(0)
    linear = net.body[0]
    net.body[0] = checkpoint_wrapper(linear)
    compiled = torch.compile(net, backend="eager")
    ckpt.save({"model": compiled}, root, 1)
    plain = Net(1)
    ckpt.load({"model": plain}, root)
    assert bits(plain.state_dict()["body.0.weight"]) == bits(linear.state_dict()["weight"])


def test_random_generators_come_back(root):
    ckpt.save({"model": Net(0)}, root, 1)
    first = (torch.rand(3).tolist(), random.random(), np.random.rand(), np.random.standard_normal(), torch.randn(2).tolist())
    ckpt.load({"model": Net(1)}, root)
    again = (torch.rand(3).tolist(), random.random(), np.random.rand(), np.random.standard_normal(), torch.randn(2).tolist())
    assert first == again
    before = torch.get_rng_state()
    ckpt.load({"model": Net(1)}, root, rng=False)
    torch.set_rng_state(before)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"model": Net(0), "x": object()}, "state.x is a object, which a checkpoint can't hold; give numbers, .* with state_dict"),
        ({"model": Net(0), "optimizer": {"state": {"w": {"exp_avg": torch.zeros(2)}}}}, "give the objects, .* and not their state_dict"),
        ({"model": {"a": torch.zeros(2), "b": 3}}, "'b' of state entry 'model' is a int"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(2))])}, "belongs to no module in the state"),
        ({"model": {"a": torch.zeros(2, 2).to_sparse()}}, "only dense tensors"),
        ({"model": nn.Linear(2, 2, device="meta")}, "is on the meta device"),
        ({"model": nn.LazyLinear(2)}, "'weight' is a lazy module's, which has no shape yet"),
        ({"model": {"a": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)}}, "'a' is a nested tensor"),
        ({"model": {0: torch.ones(2)}}, "state entry 'model' holds a tensor under the key 0; give texts"),
        ({"model": {"ema/w": torch.ones(2)}, "ema": {"v": torch.ones(1)}}, "'ema/w' of .* would be mistaken for one of entry 'ema'"),
    ],
)
def test_save_rejects_unstorable_state_before_writing(root, state, words):
    with pytest.raises(ValueError, match=words):
        ckpt.save(state, root, 1)
    assert not list(root.iterdir())


def test_tensors_that_are_not_contiguous_are_stored_and_filled(root):
    base = torch.randn(4, 6)
    ckpt.save({"model": {"w": base.t(), "v": base[:, ::2]}}, root, 1)
    target = {"w": torch.zeros(4, 6).t(), "v": torch.zeros(4, 6)[:, ::2]}
    ckpt.load({"model": target}, root)
    assert torch.equal(target["w"], base.t()) and torch.equal(target["v"], base[:, ::2])


def test_conjugated_and_negated_views_round_trip_by_value(root):
    given = torch.randn(6, dtype=torch.complex64)
    held = {"c": given.conj(), "n": torch._neg_view(given.real.clone()), "i": given.conj().imag, "e": torch.ones(1).expand(4)}
    ckpt.save({"model": held}, root, 1)
    ckpt.Saver(root).save({"model": held}, 2)
    for step in (1, 2):
        target = {"c": torch.zeros(6, dtype=torch.complex64).conj(), "n": torch._neg_view(torch.zeros(6))}
        target |= {"i": torch.zeros(6), "e": torch.zeros(4)}
        ckpt.load({"model": target}, root, commit=f"e0000-s{step:012d}")
        assert target["c"].is_conj() and target["n"].is_neg()
        assert all(torch.equal(target[name], held[name]) for name in held)


def test_load_refuses_an_expanded_tensor_before_loading_anything(root):
    ckpt.save({"model": {"a": torch.ones(3), "e": torch.ones(4)}}, root, 1)
    target = {"a": torch.zeros(3), "e": torch.zeros(1).expand(4)}
    with pytest.raises(ValueError, match=r"'e' is expanded: several elements share memory, .* clone\(\) it first"):
        ckpt.load({"model": target}, root)
    assert not target["a"].any()
    ckpt.load({"model": target}, root, exclude="e")
    assert target["a"].all()


def test_a_learning_rate_of_one_element_keeps_its_shape(root):
    """torch's optimizers accept a tensor of any shape with one element."""

    def fresh(lr: float) -> tuple[torch.optim.Optimizer, Any, dict[str, Any]]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor([lr]), foreach=False)
        scheduler = LR.StepLR(optimizer, 1, 0.5)
        return optimizer, scheduler, {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    optimizer, scheduler, state = fresh(0.1)
    rates(optimizer, scheduler, 2)
    ckpt.save(state, root, 2)
    other, resumed, into = fresh(9.0)
    ckpt.load(into, root)
    assert other.param_groups[0]["lr"].shape == (1,) and repr(resumed.state_dict()) == repr(scheduler.state_dict())
    assert rates(other, resumed, 3) == rates(optimizer, scheduler, 3)


def test_entries_with_a_common_name_prefix_stay_separate(root):
    ckpt.save({"a": {"x": torch.ones(2)}, "a/b": {"c": torch.ones(3)}}, root, 1)
    for state in ({"a": {"x": torch.zeros(2)}}, {"a/b": {"c": torch.zeros(3)}}):
        ckpt.load(state, root)
        assert all(tensor.all() for held in state.values() for tensor in held.values())
    assert list(ckpt.open(root).to_state_dict(key="a")) == ["x"] and list(ckpt.open(root).to_state_dict(key="a/b")) == ["c"]


def test_a_run_that_went_back_saves_into_a_higher_epoch(root):
    net = Net(0)
    names = [ckpt.save({"model": net}, root, step).commit.name for step in (10, 20, 15, 16, 16)]
    assert names == [f"e{e:04d}-s{s:012d}" for e, s in [(0, 10), (0, 20), (1, 15), (1, 16), (2, 16)]]
    assert ckpt.latest(root).name == names[-1]  # type: ignore[union-attr]


def test_load_of_a_missing_checkpoint_or_entry_raises_clearly(root):
    with pytest.raises(ckpt.NoCheckpoint, match="no checkpoint in"):
        ckpt.load({"model": Net(0)}, root)
    ckpt.save({"model": Net(0)}, root, 1)
    other = Net(1)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ckpt.CheckpointMismatch, match="has no state 'stream'"):
        ckpt.load({"model": other, "stream": 1}, root)
    assert all(bits(before[k]) == bits(v) for k, v in other.state_dict().items())
