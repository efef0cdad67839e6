"""Unusual uses of fully_shard, against torch's fully_shard or a plain module in the same test. Ranks are threads."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from tests.fsdp.branches import Branches
from tests.fsdp.towers import Tower, alike, grads, inputs, same, seeded, shard_tower
from tests.fsdp.transformer import Transformer, batch, full, loss_of, part
from tests.fsdp.units import unit_of
from tests.ranks import on_processes, on_threads, run_threads
from vescale_ray.fsdp import FSDPModule, PhaseError, explain, fully_shard, register_fsdp_forward_method
from vescale_ray.geometry import Block


@on_threads(2)
def test_unused_and_frozen_parameters_keep_no_gradient(rank, world):
    ours, alone = fully_shard(seeded(Branches)), seeded(Branches)
    alike(ours, alone, rank, world)
    assert ours.unused.weight.grad is None and ours.frozen.weight.grad is None
    ours.set_reduce_scatter_unused_params(True)
    ours.zero_grad()
    ours(inputs(rank, world)).square().mean().backward()
    assert full(ours.unused.weight.grad).count_nonzero() == 0


class Aside(nn.Module):
    """The loss does not depend on ``aside``."""

    def __init__(self):
        super().__init__()
        self.used, self.aside = nn.Linear(20, 20), nn.Linear(20, 20)

    def forward(self, x):
        return self.used(x) + self.aside(x).detach()


@on_threads(2)
def test_a_unit_without_gradients_reduces_zeros_if_told(rank, world):
    ours = seeded(Aside)
    fully_shard(ours.aside)
    fully_shard(ours)
    for told in (False, True):
        ours.set_reduce_scatter_unused_params(told)
        ours(inputs(rank, world)).square().mean().backward()
        gradient = ours.aside.weight.grad
        assert full(gradient).count_nonzero() == 0 if told else gradient is None


class TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(20, 20), nn.Linear(20, 5).double()

    def forward(self, x):
        return self.b(self.a(x).double())


@on_threads(3)
def test_a_unit_may_hold_several_dtypes(rank, world):
    ours, alone = fully_shard(seeded(TwoDtypes)), seeded(TwoDtypes)
    assert len(explain(ours).units[0].groups) == 2
    alike(ours, alone, rank, world)
    assert ours.b.weight.dtype == torch.float64


def ranks_with_nothing(rank, world):
    ours, alone = fully_shard(seeded(lambda: nn.Linear(3, 2)), block_policy=lambda n, p: Block.tensor()), seeded(lambda: nn.Linear(3, 2))
    held = sum(p.to_local().numel() for p in ours.parameters())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (ours, alone)]
    for step in range(3):
        ours(inputs(rank, world, step, width=3)).square().mean().backward()
        alone(inputs(0, 1, step, width=3)).square().mean().backward()
        same(grads(ours), grads(alone))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return held


def test_ranks_that_hold_nothing_take_part():
    assert sorted(run_threads(4, ranks_with_nothing))[:2] == [0, 0]


# -- several calls, orders, and what is between them -----------------------------------------------------------------------


@on_threads(2)
def test_a_model_may_run_several_times_before_backward(rank, world):
    ours, alone = shard_tower(seeded(Tower)), seeded(Tower)
    for _ in range(3):  # after the first step the buffers are assigned anew
        for model, r, w in ((ours, rank, world), (alone, 0, 1)):
            model.zero_grad()
            first, second = model(inputs(r, w, 0)), model(inputs(r, w, 1))
            (first.square().mean() + second.sum(-1).square().mean()).backward()
        same(grads(ours), grads(alone))
        for model, r, w in ((ours, rank, world), (alone, 0, 1)):  # two graphs; the first graph's backward runs last
            model.zero_grad()
            first, second = model(inputs(r, w, 0)), model(inputs(r, w, 1))
            second.square().mean().backward(retain_graph=True)
            first.square().mean().backward()
            second.square().mean().backward()
        same(grads(ours), grads(alone))


class Siamese(nn.Module):
    """The first layer's input needs no gradient, so that its part of backward stays open while other layers run again."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(20, 20), nn.Tanh()) for _ in range(4))

    def encode(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x):
        return (self.encode(x) - self.encode(x.flip(0))).square().sum(-1)


@on_threads(2)
def test_units_with_open_backward_share_no_buffers_with_others(rank, world):
    ours, alone = shard_tower(seeded(Siamese)), seeded(Siamese)
    for step in range(4):
        for model, r, w in ((ours, rank, world), (alone, 0, 1)):
            model.zero_grad()
            x = torch.cat([inputs(k, world, step) for k in range(world)]) if w == 1 else inputs(r, w, step)
            out = model(x) if w > 1 else torch.cat([model(part(x, k, world)) for k in range(world)])
            out.mean().backward()
        same(grads(ours), grads(alone))


@on_threads(2)
def test_forward_always_uses_the_newest_parameters(rank, world):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = [shard_tower(seeded(Tower), how, mp_policy=policy) for how in (fully_shard, torch_fully_shard)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, foreach=True) for m in models]
    for step in range(3):
        seen = []
        for model, optimizer in zip(models, optimizers, strict=True):
            model(inputs(rank, world, step)).float().square().mean().backward()
            with torch.no_grad():
                before = model(inputs(rank, world, 5))
            model.reshard()  # torch's fully_shard would keep the root's old parameters
            optimizer.step()
            optimizer.zero_grad()
            with torch.inference_mode():
                after = model(inputs(rank, world, 5))
            model.reshard()
            seen.append((before, after))
        (a, b), (c, d) = seen
        assert torch.equal(a, c) and torch.equal(b, d)
        assert not torch.equal(a, b)


# -- lists of modules, other entry points ----------------------------------------------------------------------------------


class Chunked(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 20), nn.Tanh())
        self.norm, self.head = nn.LayerNorm(20), nn.Linear(20, 9)

    def forward(self, x, with_head=True):
        x = self.norm(self.body(x))
        return self.head(x) if with_head else x


@on_threads(2)
def test_a_list_of_modules_is_one_unit_and_may_run_in_parts(rank, world):
    models = []
    for how in (fully_shard, torch_fully_shard, None):
        model = seeded(Chunked)
        if how is not None:
            how(model.body)
            how([model.norm, model.head])
            how(model)
        models.append(model)
    for _ in range(3):
        collected = []
        for model in models:
            model.zero_grad()
            r, w = (0, 1) if model is models[-1] else (rank, world)
            model(inputs(r, w)).square().mean().backward()  # uses all modules of the list
            hidden = model(inputs(r, w, 1), with_head=False)  # uses only some; the rest runs in chunks
            detached = hidden.detach().requires_grad_()
            for chunk in detached.chunk(2):
                (model.head(chunk).square().mean() / 2).backward()
            hidden.backward(detached.grad)
            collected.append(grads(model))
        same(collected[0], collected[2])
        same(collected[1], collected[2])


class WithGenerate(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(20, 20)

    def forward(self, x):
        return self.inner(x).tanh()

    def generate(self, x):
        return self.forward(x) + self(x)


@on_threads(2)
def test_another_method_can_be_a_forward(rank, world):
    ours, alone = fully_shard(seeded(WithGenerate)), seeded(WithGenerate)
    register_fsdp_forward_method(ours, "generate")
    register_fsdp_forward_method(alone, "generate")  # no effect on a module that is not sharded
    ours.generate(inputs(rank, world)).square().mean().backward()
    alone.generate(inputs(0, 1)).square().mean().backward()
    same(grads(ours), grads(alone))
    with pytest.raises(ValueError, match="does not have a method 'absent'"):
        register_fsdp_forward_method(ours, "absent")


@dataclass
class Output:
    value: torch.Tensor
    extra: dict


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(20, 5), nn.Linear(20, 5)

    def forward(self, batch, *, scale):
        return Output(self.a(batch["x"]) * scale, {"aux": [self.b(batch["x"])], "note": "text", "none": None})


@on_threads(2)
def test_inputs_and_outputs_may_be_nested(rank, world):
    ours, alone = fully_shard(seeded(Structured)), seeded(Structured)
    for model, r, w in ((ours, rank, world), (alone, 0, 1)):
        x = inputs(r, w).requires_grad_()
        out = model({"x": x}, scale=2.0)
        (out.value.square().mean() + out.extra["aux"][0].square().mean()).backward()
        assert x.grad is not None and out.extra["note"] == "text"
    same(grads(ours), grads(alone))


# -- state -----------------------------------------------------------------------------------------------------------------


@on_threads(3)
def test_state_dicts_are_views_and_load_from_sharded_or_full(rank, world):
    tokens, targets = batch(0)
    model, other = (fully_shard(seeded(Transformer, s)) for s in (1, 2))
    saved = model.state_dict()
    assert saved["head.weight"].to_local().data_ptr() == model.head.weight.to_local().data_ptr(), "state_dict copies nothing"
    other.load_state_dict(saved)
    expected = loss_of(model, tokens, targets)
    assert torch.equal(loss_of(other, tokens, targets), expected)
    third = fully_shard(seeded(Transformer, 3))
    third.load_state_dict({k: full(v).clone() for k, v in saved.items()})
    assert torch.equal(loss_of(third, tokens, targets), expected)
    with torch.device("meta"):
        fourth: Any = Transformer()
    fully_shard(fourth)
    fourth.load_state_dict({k: v.clone() for k, v in saved.items()}, assign=True)
    assert torch.equal(loss_of(fourth, tokens, targets), expected)
    fourth.reshard()
    one_buffer = {p.to_local().untyped_storage().data_ptr() for p in fourth.parameters() if p.to_local().numel()}
    assert len(one_buffer) == 1, "assigned parameters become one buffer again"


@on_threads(2)
def test_casting_the_model_casts_its_shards(rank, world):
    model = shard_tower(seeded(Tower)).to(torch.bfloat16)
    reference = seeded(Tower).to(torch.bfloat16)
    x = inputs(rank, world).bfloat16()
    assert torch.equal(model(x), reference(x))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    model(x).sum().backward()
    model.double()
    assert torch.equal(model(x.double()), reference.double()(x.double()))


# -- misuse ----------------------------------------------------------------------------------------------------------------


class Faulty(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(20, 20), nn.Tanh()) for _ in range(3))
        self.fail = None

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if self.fail == ("forward", i):
                raise KeyError("in forward")
            if self.fail == ("backward", i):
                x.register_hook(lambda g: (_ for _ in ()).throw(KeyError("in backward")))
        return x


@on_threads(2)
def test_after_an_exception_a_step_can_be_repeated(rank, world):
    ours, alone = shard_tower(seeded(Faulty)), seeded(Faulty)
    ours(inputs(rank, world)).sum().backward()
    ours.zero_grad()
    ours.fail = ("forward", 1)
    with pytest.raises(KeyError):
        ours(inputs(rank, world))
    assert all(hasattr(p, "placements") for p in ours.parameters())
    ours.fail = None
    alike(ours, alone, rank, world)
    ours.zero_grad()
    ours.fail = ("backward", 1)
    with pytest.raises(KeyError):
        ours(inputs(rank, world)).sum().backward()
    ours.fail = None
    with pytest.raises(PhaseError, match="reset_iter_state"):
        ours(inputs(rank, world))
    with pytest.raises(RuntimeError, match="root"):
        ours.layers[0].reset_iter_state()
    ours.reset_iter_state()
    ours.zero_grad()
    ours(inputs(rank, world)).square().mean().backward()
    same(grads(ours), grads(alone))


def test_every_method_of_torchs_fsdpmodule_is_ours():
    theirs = {name for name, value in vars(TorchFSDPModule).items() if callable(value)}
    missing = {name for name in theirs if getattr(FSDPModule, name) is getattr(TorchFSDPModule, name)}
    assert not missing
    assert issubclass(FSDPModule, TorchFSDPModule)


@on_threads(1)
def test_the_class_is_both_ours_and_the_original(rank, world):
    model = fully_shard(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    assert isinstance(model, FSDPModule) and isinstance(model, TorchFSDPModule) and isinstance(model, nn.Sequential)
    assert type(model).__name__ == "FSDPSequential"
    assert type(model[:1]) is nn.Sequential, "slicing builds the original class"
    dist.barrier()


@on_processes(2)
def test_blocks_may_be_compiled(rank, world):
    ours, alone = (seeded(lambda: Tower(layers=2)) for _ in range(2))
    for layer in ours.layers:
        layer.compile(backend="aot_eager")
    shard_tower(ours)
    alike(ours, alone, rank, world, range(3))


# -- several buffers -------------------------------------------------------------------------------------------------------


class Mixture(nn.Module):
    """Two matrices. The lengths of their whole rows of blocks have no small common multiple."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.zeros(96, 1000))
        self.down = nn.Parameter(torch.zeros(96, 1016))
        self.scale = nn.Parameter(torch.zeros(1000))

    def forward(self, x):
        return ((x @ self.up) * self.scale) @ torch.ones(1000, 1) + (x @ self.down).sum(-1, keepdim=True)


def several_buffers(rank, world):
    def block(name, param):
        return Block.rows(4) if param.dim() == 2 else None

    ours, alone = fully_shard(seeded(Mixture), block_policy=block), seeded(Mixture)
    groups = unit_of(ours).groups
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ours, alone)]
    for step in range(3):
        for model, r, w in ((ours, rank, world), (alone, 0, 1)):
            model(inputs(r, w, step, width=96, rows=16)).square().mean().backward()
        same(grads(ours), grads(alone))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same({n: full(p) for n, p in ours.named_parameters()}, dict(alone.named_parameters()), 1e-4)
    held = [p.to_local().shape[0] for p in (ours.up, ours.down)]
    assert all(rows % 4 == 0 for rows in held), "no block is cut"
    return len(groups), sum(g.layout.numel - g.layout.tensor_numel for g in groups)


def test_row_lengths_without_a_common_multiple_get_a_buffer_each(monkeypatch):
    from vescale_ray.planner import plan_buffers, unit_plan

    (one, wasted), *_ = run_threads(8, several_buffers)
    assert one == 1, "too little to be worth a collective"
    monkeypatch.setattr(unit_plan, "plan_buffers", functools.partial(plan_buffers, padding_bytes=0))
    (several, left), *_ = run_threads(8, several_buffers)
    assert several >= 2 and left < wasted / 2
