"""Holders of a parameter hold the sharded one or get an error: optimizers, averaged weights, replaced and added parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from tests.fsdp.towers import filled
from tests.fsdp.transformer import full
from tests.fsdp.units import unit_of
from tests.operations import Operations, collective
from tests.ranks import on_processes, on_threads
from vescale_ray import Block, fully_shard
from vescale_ray.optim import SOAP, AdamW, AdamW8bit, Flat, Muon, OptimizerConfig, Shampoo, build_optimizer, clip_grad_norm_


class Net(nn.Module):
    """Matrices of one shape, so that every optimizer accepts all of them. The head belongs to the root."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))
        self.head = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        out: torch.Tensor = self.head(x)
        return out


def models(width: int = 8, **options: Any) -> tuple[Any, Any]:
    """A sharded model, and the same model unsharded."""
    alone = filled(Net(width), 3, width**-0.5)
    ours = copy.deepcopy(alone)
    for layer in ours.layers:
        fully_shard(layer, **options)
    return fully_shard(ours, **options), alone


def batch(width: int = 8) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(5))


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        model(batch(model.head.in_features)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(ours: Any, alone: Any) -> None:
    ours.reshard()
    for (name, p), q in zip(ours.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(p), q.detach(), rtol=1e-5, atol=1e-6, msg=name)


def trains_alike(ours: Any, alone: Any, steps: int = 2) -> None:
    for model in (ours, alone):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps)
    assert_same(ours, alone)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "torch AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1),
    "torch Adam, fused": lambda m: torch.optim.Adam(m.parameters(), lr=0.1, fused=True),
    "build adamw": lambda m: build_optimizer(m, OptimizerConfig("adamw", lr=0.1), log=None),
    "build muon": lambda m: build_optimizer(m, OptimizerConfig("muon", lr=0.1), log=None),
    "Flat": lambda m: Flat(m.parameters(), torch.optim.AdamW, lr=0.1),
    "AdamW": lambda m: AdamW(m.parameters(), lr=0.1),
    "AdamW8bit": lambda m: AdamW8bit(m.named_parameters(), lr=0.1),
    "Muon": lambda m: Muon(m.parameters(), lr=0.1),
    "Shampoo": lambda m: Shampoo(m.parameters(), lr=0.1),
    "SOAP": lambda m: SOAP(m.parameters(), lr=0.1),
}
WHOLE: dict[str, Any] = {"block_policy": lambda name, param: Block.tensor()}
"""Every optimizer accepts matrices that are not cut."""


@pytest.mark.parametrize("names", [[n] for n in OPTIMIZERS])
@on_threads(2)
def test_optimizer_built_after_an_evaluation_trains_everything(rank: int, world: int, names: list[str]) -> None:
    for name in names:
        for context in (torch.no_grad, torch.inference_mode):
            for options in ({}, {"reshard_after_forward": False}, {"reshard_after_forward": True}):
                ours, alone = models(**WHOLE, **options)
                with context():
                    ours(batch())
                optimizers = [OPTIMIZERS[name](model) for model in (ours, alone)]
                for model, optimizer in zip((ours, alone), optimizers, strict=True):
                    train(model, optimizer)
                assert_same(ours, alone)


@on_threads(2)
def test_optimizer_built_mid_step_trains_or_raises(rank: int, world: int) -> None:
    """Gather parameters and then build the optimizers.

    The root is gathered between forward and backward, as with FSDP2, or the user gathers all units.
    """
    for gather in (lambda m: m(batch()).square().mean(), lambda m: [m.unshard(), *(layer.unshard() for layer in m.layers)]):
        for name, build in OPTIMIZERS.items():
            ours, alone = models(**WHOLE)
            loss = gather(ours)
            optimizer = build(ours)
            if isinstance(loss, torch.Tensor):
                loss.backward()
                ours.zero_grad()
            if name.startswith("torch"):
                ours(batch()).square().mean().backward()
                with pytest.raises(RuntimeError, match=r"holds the gathered parameter '(head|layers.0).weight'.* after reshard\(\)"):
                    optimizer.step()
                continue
            train(ours, optimizer)
            train(alone, build(alone))
            assert_same(ours, alone)


@on_threads(2)
def test_optimizer_holding_parameters_not_in_the_model_raises(rank: int, world: int) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model)
    model(batch()).sum().backward()
    with pytest.raises(RuntimeError, match=r"original of parameter '[\w.]+' of shape .* has replaced.*build the optimizer after"):
        optimizer.step()
    # A parameter is replaced by another sharded one after the optimizer was built.
    model = fully_shard(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone() * 2)
    model(batch()).sum().backward()
    with pytest.raises(RuntimeError, match="original of parameter 'head.weight' .* a sharded one has replaced"):
        optimizer.step()
    before = full(model.head.weight)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not torch.equal(before, full(model.head.weight))


@on_threads(2)
def test_optimizer_whose_parameters_are_exchanged_raises(rank: int, world: int) -> None:
    """Replace the parameters after a first step in which the optimizer held the right ones."""
    model = fully_shard(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    model.load_state_dict({k: v.detach().clone() for k, v in model.state_dict().items()}, assign=True)
    model(batch()).sum().backward()
    with pytest.raises(RuntimeError, match="a sharded one has replaced"):
        optimizer.step()
    model = fully_shard(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    loss = model(batch()).sum()
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": list(model.parameters())})
    loss.backward()
    with pytest.raises(RuntimeError, match="holds the gathered parameter"):
        optimizer.step()


WRITES: dict[str, Callable[[Any, dict[str, torch.Tensor]], object]] = {
    "copy": lambda m, values: [p.copy_(values[k]) for k, p in m.named_parameters()],
    "in place": lambda m, values: [p.mul_(0).add_(values[k]) for k, p in m.named_parameters()],
    "interpolation": lambda m, values: [p.lerp_(values[k], 1.0) for k, p in m.named_parameters()],
    "state dict": lambda m, values: m.load_state_dict(values),
    "data": lambda m, values: [setattr(p, "data", values[k].detach().clone()) for k, p in m.named_parameters()],
    "for each": lambda m, values: torch._foreach_copy_(list(m.parameters()), list(values.values())),
}


@on_threads(2)
def test_values_that_are_assigned_through_data_are_trained(rank: int, world: int) -> None:
    """Values assigned through ``.data`` between steps reach the model, the optimizer and the state dict."""
    ours, alone = models()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, alone)]
    for step in range(3):
        for model, optimizer in zip((ours, alone), optimizers, strict=True):
            for p in model.parameters():
                p.data = p.data * (0.5 + step)
            train(model, optimizer, 1)
    assert_same(ours, alone)
    for (name, saved), p in zip(ours.state_dict().items(), alone.parameters(), strict=True):
        torch.testing.assert_close(saved.full_tensor(), p.detach(), msg=name)


@pytest.mark.usefixtures("usual_threshold")
@on_threads(2)
def test_averaged_weights_go_in_and_out_around_evaluations(rank: int, world: int) -> None:
    for width in (6, 300):
        for options in ({}, {"reshard_after_forward": False}):
            for way, write in WRITES.items():
                ours, alone = models(width, **options)
                ours(batch(width)).square().mean().backward()
                ours.zero_grad()
                keep = {k: p.detach().clone() for k, p in ours.named_parameters()}
                average = {k: v * 0.5 for k, v in keep.items()}
                with torch.no_grad():
                    for p in alone.parameters():
                        p.mul_(0.5)
                    for values, factor in ((average, 1.0), (keep, 2.0), (average, 0.5), (keep, 2.0)):
                        for p in alone.parameters():
                            p.mul_(factor)
                        write(ours, values)
                        out = ours(batch(width))
                        torch.testing.assert_close(out, alone(batch(width)), rtol=1e-5, atol=1e-6, msg=f"{way} {width}")
                assert_same(ours, alone)


@pytest.mark.usefixtures("usual_threshold")
@on_threads(2)
def test_write_to_a_gathered_parameter_raises_at_any_size(rank: int, world: int) -> None:
    for width in (6, 300):
        for then in ("backward", "forward", "reshard"):
            ours, _ = models(width)
            loss = ours(batch(width)).sum()
            with torch.no_grad():
                ours.head.weight.mul_(2)
            said = r"written in place, which is lost.*: head.weight\. Call reshard"
            said = "modified by an inplace operation" if then == "backward" else said
            with pytest.raises(RuntimeError, match=said):
                loss.backward() if then == "backward" else ours(batch(width)) if then == "forward" else ours.reshard()


@pytest.mark.usefixtures("usual_threshold")
@on_threads(2)
def test_write_to_a_kept_gathered_parameter_raises(rank: int, world: int) -> None:
    """Write a gathered parameter, taken in the middle of a step, after an evaluation that has kept the parameters gathered."""
    for width in (6, 300):
        for then in ("forward", "reshard"):
            ours, _ = models(width)
            loss = ours(batch(width)).sum()
            held = ours.head.weight
            loss.backward()
            with torch.no_grad():
                ours(batch(width))
                held.mul_(3)
            with pytest.raises(RuntimeError, match="written in place, which is lost.*: head.weight"):
                ours(batch(width)) if then == "forward" else ours.reshard()


@on_threads(2)
def test_clipping_works_for_parameters_listed_mid_step(rank: int, world: int) -> None:
    """Clipping works with parameters that were listed in the middle of a step, when the root is gathered."""
    ours, alone = models()
    norms = []
    for model in (ours, alone):
        loss = model(batch()).square().sum()
        listed = list(model.parameters())
        loss.backward()
        norms.append(clip_grad_norm_(listed, 0.1))
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=0.0)


@on_threads(2)
def test_manually_gathered_parameters_stay_so_over_an_evaluation(rank: int, world: int) -> None:
    """Parameters that the user gathered stay in the modules after a forward that keeps them."""
    for options in ({}, {"reshard_after_forward": False}):
        ours, alone = models(**options)
        with torch.no_grad():
            ours.unshard()
            ours(batch())
            torch.testing.assert_close(ours.head.weight, alone.head.weight)
            ours.reshard()
        train(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
        train(alone, torch.optim.SGD(alone.parameters(), lr=0.1))
        assert_same(ours, alone)


@on_processes(2)
def test_an_evaluation_gathers_the_root_no_more_often_than_fsdp2(rank: int, world: int) -> None:
    ours, theirs = Net(), Net()
    for model, how in ((ours, fully_shard), (theirs, torch_fully_shard)):
        for layer in model.layers:
            how(layer)  # type: ignore[operator]
        how(model)  # type: ignore[operator]
    with torch.no_grad():
        ours(batch())
        theirs(batch())
        lane = unit_of(ours).lanes.gather  # type: ignore[union-attr]
        before = lane.issued
        with Operations(collective) as seen:
            for _ in range(3):
                theirs(batch())
        for _ in range(3):
            ours(batch())
        assert lane.issued - before == sum("allgather" in name for name in seen.seen) == 3 * 2


class Adapter(nn.Module):
    def __init__(self, inner: nn.Module, rank: int = 2) -> None:
        super().__init__()
        self.inner, self.down, self.up = inner, nn.Linear(8, rank), nn.Linear(rank, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) + self.up(self.down(x))
        return out


def _set(model: Any, name: str, value: Any) -> None:
    module, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(module), attribute, value)


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "another value": (lambda m: _set(m, "head.weight", nn.Parameter(torch.ones(8, 8))), "'head.weight' was replaced"),
    "in a layer": (lambda m: _set(m, "layers.1.weight", nn.Parameter(torch.ones(8, 8))), "'layers.1.weight' was replaced"),
    "frozen": (lambda m: _set(m, "head.weight", nn.Parameter(torch.ones(8, 8), requires_grad=False)), "'head.weight' was replaced"),
    "none": (lambda m: _set(m, "head.weight", None), "'head.weight' was removed"),
    "deleted": (lambda m: delattr(m.head, "weight"), "'head.weight' was removed"),
    "new head": (lambda m: _set(m, "head", nn.Linear(8, 8)), "'head.weight' was added"),
    "new layer": (lambda m: m.layers.append(nn.Linear(8, 8)), "'layers.2.(weight|bias)' was added"),
    "adapter": (lambda m: _set(m, "layers.0", Adapter(m.layers[0])), "'layers.0.(up|down).(weight|bias)' was added"),
    "new parameter": (lambda m: m.layers[0].register_parameter("scale", nn.Parameter(torch.ones(8))), "'layers.0.scale' was added"),
    "bias that was none": (lambda m: _set(m, "head.bias", nn.Parameter(torch.ones(8))), "'head.bias' was added"),
    "parametrized": (lambda m: nn.utils.parametrizations.weight_norm(m.head), "'head.weight' was removed"),
    "tied": (lambda m: _set(m, "head.weight", m.layers[0].weight), "'head.weight' (was replaced|is shared)"),
}


@pytest.mark.parametrize("before", [True, False])
@on_threads(2)
def test_next_forward_names_a_parameter_changed_after_sharding(rank: int, world: int, before: bool) -> None:
    for what, (change, message) in CHANGES.items():
        for training in (True, False):
            ours, _ = models()
            if not before:
                with nullcontext() if training else torch.no_grad():
                    out = ours(batch())
                if training:
                    out.sum().backward()
                    ours.zero_grad()
            change(ours)
            with pytest.raises(ValueError, match=message), nullcontext() if training else torch.no_grad():
                ours(batch())
                raise AssertionError(what)


@on_threads(2)
def test_each_remedy_that_the_refusals_name_works(rank: int, world: int) -> None:
    for before in (True, False):
        # Write into the parameter.
        ours, alone = models()
        if not before:
            ours(batch()).sum().backward()
            ours.zero_grad()
        with torch.no_grad():
            ours.head.weight.copy_(torch.full((8, 8), 0.5))
            alone.head.weight.fill_(0.5)
        trains_alike(ours, alone)
        # Load the new values.
        ours, alone = models()
        ours.load_state_dict({k: p.detach() * 0.5 for k, p in ours.named_parameters()}, assign=True)
        alone.load_state_dict({k: p.detach() * 0.5 for k, p in alone.named_parameters()})
        trains_alike(ours, alone)
        # Shard the added module.
        ours, alone = models()
        if not before:
            ours(batch()).sum().backward()
            ours.zero_grad()
        adapter = Adapter(nn.Identity())
        generator = torch.Generator().manual_seed(1)
        for p in adapter.parameters():
            nn.init.normal_(p, generator=generator)
        for model in (ours, alone):
            mine = copy.deepcopy(adapter)
            mine.inner = model.layers[0]
            model.layers[0] = mine
            if model is ours:
                fully_shard(mine)
        trains_alike(ours, alone, steps=3)
        # An adapter around a layer of an outer unit: each of its new modules is sharded separately.
        _, alone = models()
        ours = fully_shard(copy.deepcopy(alone))
        for model in (ours, alone):
            mine = copy.deepcopy(adapter)
            mine.inner = model.layers[0]
            model.layers[0] = mine
            if model is ours:
                with pytest.raises(ValueError, match="adapters. each by itself"):
                    fully_shard(mine)
                fully_shard(mine.up)
                fully_shard(mine.down)
        trains_alike(ours, alone, steps=3)
        # Frozen added parameters stay the same on every rank.
        ours, alone = models()
        for model in (ours, alone):
            model.layers.append(nn.Linear(8, 8).requires_grad_(False))
            model.layers[-1].load_state_dict({"weight": torch.eye(8), "bias": torch.ones(8)})
            train(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    # Ignored parameters may be replaced, because they are not managed.
    free: Any = Net()
    fully_shard(free, ignored_params={free.head.weight})
    free.head.weight = nn.Parameter(torch.eye(8))
    free(batch()).sum().backward()
    assert free.head.weight.grad is not None


@on_processes(2)
def test_hook_that_is_never_called_causes_a_warning(rank: int, world: int) -> None:
    _, ours = models()
    called: list[str] = []
    ours.head.weight.register_hook(lambda grad: called.append("before") or grad)
    ours.layers[0].weight.register_post_accumulate_grad_hook(lambda p: called.append("before"))
    with pytest.warns(UserWarning, match="has gradient hooks.*register_post_accumulate_grad_hook") as told:
        fully_shard(ours)
    assert sorted(str(one.message).split("'")[1] for one in told) == ["head.weight", "layers.0.weight"]
    assert {one.filename for one in told} == {__file__}
    # Tensor hooks on a sharded parameter see no gradient.
    ours.layers[1].weight.register_hook(lambda grad: called.append("tensor") or grad)
    ours.head.weight.register_post_accumulate_grad_hook(lambda p: called.append(f"after {p.grad is not None}"))
    with pytest.warns(UserWarning, match=r"'layers.1.weight' has a hook of register_hook\(\)"):
        ours(batch()).sum().backward()
    assert called == ["after True"]
    # Between forward and backward, head.weight is the gathered parameter, and its hook sees what this rank alone adds.
    loss = ours(batch()).sum()
    ours.head.weight.register_hook(lambda grad: called.append("gathered"))
    with pytest.warns(UserWarning, match=r"'head.weight' has a hook of register_hook\(\), which got this rank's own gradient"):
        loss.backward()
    assert called[1:] == ["gathered", "after True"]
    loss = ours(batch()).sum()
    ours.layers[0].weight.register_post_accumulate_grad_hook(lambda p: called.append(f"no gradient: {p.grad is None}"))
    with pytest.warns(UserWarning, match=r"'layers.0.weight' has a hook of .*, which found no .grad, since it is on the gathered"):
        loss.backward()
    assert "no gradient: True" in called
