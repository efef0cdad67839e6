"""FSDP2's arguments and methods that other files do not test. Each is applied to ours and to torch's, and both must train alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from tests.fsdp.towers import filled
from tests.fsdp.transformer import full
from tests.ranks import on_threads, run_gloo, run_threads
from vescale_ray.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.dtype
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Adapted(nn.Module):
    """An embedding and blocks with low-rank adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(11, WIDTH), nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, 11)
        filled(self, 4, 0.25)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sharded(how: Any, model: Any, **options: Any) -> Any:
    for unit in (model.embed, *model.blocks, model.head, model):
        how(unit, **options)
    return model


def tokens(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, 11, (2, 3), generator=torch.Generator().manual_seed(100 * step + rank))


Knob = Callable[[Any, int], None]


def steady(model: Any, step: int) -> None:
    pass


def buffers(model: Any, step: int) -> None:
    model.set_reduce_scatter_max_input_buffers(1 + step)


def separate_group(model: Any, step: int) -> None:
    model.set_separate_reduce_scatter_group(step % 2 == 0)


def embedding_stays_sharded(model: Any, step: int) -> None:
    model.embed.set_unshard_in_backward(False)


def sums(model: Any, step: int) -> None:
    model.blocks[0].set_force_sum_reduction_for_comms(True)
    model.blocks[0].set_reduce_scatter_divide_factor(3.0)


def unsharded_between(model: Any, step: int) -> None:
    model.set_reshard_after_backward(step == 2)
    model.set_reshard_after_forward(step == 1, recurse=False)


def adapters_only_in_the_middle(model: Any, step: int) -> None:
    for name, p in model.named_parameters():
        p.requires_grad_(step != 1 or ".up." in name or ".down." in name)


def doubled(model: Any, step: int) -> None:
    for unit in (model.embed, *model.blocks):
        unit.set_all_reduce_hook(lambda flat: flat.mul_(2.0))


def asynchronous(model: Any, step: int) -> None:
    model._set_unshard_async_op(True)
    for unit in (*model.blocks, model.head):
        unit.unshard(async_op=True)


HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
UNCAST = MixedPrecisionPolicy(torch.float64, torch.float64, output_dtype=torch.float64, cast_forward_inputs=False)
CASES: dict[str, tuple[Knob, dict[str, Any]]] = {
    "several reductions at a time": (buffers, {}),
    "a group for reductions": (separate_group, {}),
    "an embedding that backward does not need": (embedding_stays_sharded, {}),
    "sums and another divisor": (sums, {}),
    "gathered between passes": (unsharded_between, {}),
    "low-rank adapters alone for a step": (adapters_only_in_the_middle, {}),
    "a hook after the reduction": (doubled, {}),
    "gathered ahead by hand": (asynchronous, {}),
    "in host memory": (steady, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "to one rank": (steady, {"reshard_after_forward": 1}),
    "cast outputs": (steady, {"mp_policy": HALF}),
    "inputs as they are": (steady, {"mp_policy": UNCAST}),
}


def alike(rank: int, world: int, case: str) -> None:
    knob, options = CASES[case]
    built = [sharded(how, Adapted(), **options) for how in (fully_shard, torch_fully_shard)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in built]
    close: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2} if options.get("mp_policy") is HALF else {"rtol": 1e-4, "atol": 1e-5}
    for step in range(3):
        outs = []
        for model, optimizer in zip(built, optimizers, strict=True):
            optimizer.zero_grad()
            knob(model, step)
            for micro in range(2):
                outs.append(model(tokens(rank, 2 * step + micro)))
                outs[-1].square().mean().backward()
            for unit in model.modules():
                if hasattr(unit, "reshard"):
                    unit.reshard()
        ours, theirs = built
        for mine, other in zip(outs[:2], outs[2:], strict=True):
            assert mine.dtype == other.dtype
            torch.testing.assert_close(mine, other, **close)
        assert [b.seen for b in ours.blocks] == [b.seen for b in theirs.blocks]
        for (name, p), q in zip(theirs.named_parameters(), ours.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None and q.grad is not None:
                assert p.grad.dtype == q.grad.dtype and p.requires_grad == q.requires_grad
                torch.testing.assert_close(full(q.grad), full(p.grad), **close, msg=name)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("case", CASES)
def test_each_option_trains_as_torchs_fully_shard(case: str) -> None:
    (run_gloo if "group" in case else run_threads)(2, alike, case)


@pytest.mark.usefixtures("usual_threshold")
@on_threads(2)
def test_ignored_parameters_are_left_alone(rank: int, world: int) -> None:
    """Ignored parameters are not sharded, moved or reduced, both in their own units and in outer ones."""
    for how in (fully_shard, torch_fully_shard):
        model = Adapted()
        ignored = {model.head.weight, model.blocks[1].base.weight}
        sharded(how, model, ignored_params=ignored, mesh=init_device_mesh("cpu", (world,)))
        assert {p for p in model.parameters() if not isinstance(p, DTensor)} == ignored
        model(tokens(rank, 0)).square().mean().backward()
        alone = Adapted()
        alone(tokens(rank, 0)).square().mean().backward()
        for (name, p), q in zip(alone.named_parameters(), model.named_parameters(), strict=True):
            assert p.grad is not None and q[1].grad is not None
            mean = p.grad.clone()
            dist.all_reduce(mean)
            expected = p.grad if q[1] in ignored else mean / world
            torch.testing.assert_close(full(q[1].grad), expected, msg=name)
