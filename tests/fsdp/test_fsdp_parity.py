"""Training with our fully_shard equals training in one process and with torch's fully_shard, at every number of ranks.

The ranks of one world size run all their scenarios at once; each test then checks one scenario's result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from tests.fsdp.transformer import build, train, values, worst
from tests.ranks import on_processes, run_gloo
from vescale_ray.fsdp import fully_shard
from vescale_ray.geometry import Block
from vescale_ray.optim import clip_grad_norm_

BOUND = 1e-5

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=3e-3, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}
CLIPS = {None: None, "ours": clip_grad_norm_, "torch": nn.utils.clip_grad_norm_}


def whole_matrices(name, param):
    return Block.tensor() if param.dim() == 2 else None


def three_rows(name, param):
    return Block.rows(3) if param.dim() == 2 else None


@dataclass(frozen=True)
class Case:
    """One configuration of a training run."""

    steps: int = 2
    optimizer: str = "adamw"
    clip: str | None = None
    accumulate: int = 1
    sync_every: bool = True
    model: tuple[tuple[str, object], ...] = ()
    options: dict = field(default_factory=dict, hash=False)
    root_only: bool = False
    meta: bool | Literal["at once"] = False
    against_torch: bool = False


LONG = Case(steps=10, against_torch=True)
CASES = {
    "sgd": Case(optimizer="sgd", against_torch=True),
    "adamw_foreach": Case(optimizer="adamw_foreach"),
    "adamw_fused": Case(optimizer="adamw_fused"),
    "our_clip": Case(clip="ours"),
    "torch_clip": Case(clip="torch", against_torch=True),
    "accumulate_with_sync": Case(accumulate=3),
    "accumulate_without_sync": Case(accumulate=3, sync_every=False, against_torch=True),
    "checkpoint": Case(model=(("recompute", "plain"),)),
    "checkpoint_reentrant": Case(model=(("recompute", "reentrant"),)),
    "tied": Case(model=(("tie", True),), against_torch=True),
    "no_reshard": Case(options={"reshard_after_forward": False}),
    "reshard_root": Case(options={"reshard_after_forward": True}),
    "root_only": Case(root_only=True),
    "whole_matrices": Case(options={"block_policy": whole_matrices}),
    "three_rows": Case(options={"block_policy": three_rows}),
    "meta": Case(meta=True),
    "meta, storage at once": Case(meta="at once"),
}


def shard(model, how, case):
    if not case.root_only:
        for block in model.blocks:
            how(block, **case.options)
    return how(model, **case.options)


def run_case(rank, world, case):
    model = build(**dict(case.model))
    if case.meta:
        initial = {name: p.detach().clone() for name, p in model.named_parameters()}
        with torch.device("meta"):
            model = build(**dict(case.model))
        if case.meta == "at once":
            shard(model, partial(fully_shard, to_empty=True), case)
            assert not any(tensor.is_meta for tensor in model.parameters())
        else:
            shard(model, fully_shard, case)
            model.to_empty(device="cpu")
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(initial[name])
    else:
        shard(model, fully_shard, case)
    options = {"steps": case.steps, "accumulate": case.accumulate, "sync_every": case.sync_every}
    losses = train(model, OPTIMIZERS[case.optimizer](model.parameters()), rank, world, clip=CLIPS[case.clip], **options)
    result = {"ours": (losses, numpy(values(model)))}
    if case.against_torch:
        theirs: Any = build(**dict(case.model))
        for module in theirs.modules():  # torch's fully_shard refuses 0-dimensional parameters
            if "gain" in module._parameters:
                module.gain = nn.Parameter(module.gain.detach().reshape(1))
        shard(theirs, torch_fully_shard, case)
        clip = nn.utils.clip_grad_norm_ if case.clip else None
        losses = train(theirs, OPTIMIZERS[case.optimizer](theirs.parameters()), rank, world, clip=clip, **options)
        result["torch"] = (losses, numpy(values(theirs)))
    return result


def numpy(tensors):
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def run_cases(rank, world, cases):
    return {name: run_case(rank, world, case) for name, case in cases.items()}


@cache
def alone(steps, optimizer, clips, model):
    """The same training in one process, unsharded. Cases with equal arguments share the result."""
    made = build(**dict(model))
    clip = nn.utils.clip_grad_norm_ if clips else None
    losses = train(made, OPTIMIZERS[optimizer](made.parameters()), 0, 1, steps=steps, clip=clip)
    return losses, numpy(values(made))


def alone_as(case):
    return alone(case.steps, case.optimizer, case.clip is not None, case.model)


def check(result, case, bound=BOUND):
    peers = {"alone": alone_as(case)}
    if case.against_torch:
        peers["torch"] = result["torch"]
    losses, params = result["ours"]
    for peer, (their_losses, their_params) in peers.items():
        assert max(abs(a - b) / abs(b) for a, b in zip(losses, their_losses, strict=True)) <= bound, peer
        difference = worst(*({n: torch.from_numpy(p) for n, p in ps.items()} for ps in (params, their_params)))
        assert difference[0] <= bound, (peer, difference)


@pytest.mark.parametrize("world", [1, 3, *(pytest.param(world, marks=pytest.mark.slow) for world in (2, 4))])
def test_10_steps_of_adamw_equal_a_single_process_and_torch(world):
    for result in run_gloo(world, run_cases, {"long": LONG}):
        check(result["long"], LONG)
    losses, _ = alone_as(LONG)
    assert losses[-1] < losses[0] - 0.05, "the test must train, or it shows nothing"


@pytest.fixture(scope="module")
def on_two():
    return run_gloo(2, run_cases, CASES, timeout=110)


@pytest.mark.parametrize("name", CASES)
def test_on_2_ranks_every_way_to_train_equals_a_single_process(on_two, name):
    for result in on_two:
        check(result[name], CASES[name])


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
@on_processes()
def test_bf16_compute_with_fp32_reduction_matches_torch(rank, world):
    """Train with ours and with torch's fully_shard, with BF16 compute and FP32 reduction."""
    results = {}
    for name, how in (("ours", fully_shard), ("torch", torch_fully_shard)):
        model: Any = build(tie=True)
        for module in model.modules():
            if "gain" in module._parameters:
                module.gain = nn.Parameter(module.gain.detach().reshape(1))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard(model, how, Case(options={"mp_policy": policy}))
        seen = []
        model.blocks[0].norm1.register_forward_hook(lambda m, a, out, seen=seen: seen.append((m.weight.dtype, out.dtype)))
        losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, world, steps=4)
        results[name] = losses, numpy(values(model)), seen[0], {str(p.dtype) for p in model.parameters()}
    ours, theirs = results["ours"], results["torch"]
    assert ours[2] == theirs[2] == (torch.bfloat16, torch.bfloat16)
    assert ours[3] == {"torch.float32"}
    assert max(abs(a - b) / abs(b) for a, b in zip(ours[0], theirs[0], strict=True)) < 2**-8
    difference = worst(*({n: torch.from_numpy(p) for n, p in ps.items()} for ps in (ours[1], theirs[1])))
    assert difference[0] < 2**-8, difference
