"""AdamW8bit as a torch optimizer: groups, schedulers, hooks.

Its states are saved, loaded and copied, and all ranks refuse a step together.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from tests.optim.optim_support import Weights, full_state, give_gradients, noise, same, sharded, train
from tests.ranks import on_threads, run_threads
from vescale_ray import checkpoint
from vescale_ray.dtensor import RaggedDTensor
from vescale_ray.optim import SOAP, AdamW8bit, Shampoo, clip_grad_norm_

# ------------------------------------------------------------------------------------- torch.optim.Optimizer's own interface


def test_adamw8bit_keeps_the_torch_optimizer_interface() -> None:
    shapes = {"a": (64, 64), "b": (64, 64), "c": (64, 64)}
    model, other = Weights(shapes), Weights(shapes)
    optimizer = AdamW8bit(
        [{"params": [model.get_parameter("a")], "lr": 0.1, "block": "tile 16x16"}, {"params": model.get_parameter("b")}],
        lr=torch.tensor(0.01),
    )
    assert [g["block"] for g in optimizer.param_groups] == ["tile 16x16", "flat 1024"]
    optimizer.add_param_group({"params": [model.get_parameter("c")], "block": None})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.stack([((p - 1) ** 2).sum() for p in model.parameters()]).sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item()]
    scheduler.step()
    losses.append(optimizer.step(closure).item())
    assert losses[1] < losses[0] and called == ["before", "after"] * 2
    assert [float(g["lr"]) for g in optimizer.param_groups] == pytest.approx([0.05, 0.005, 0.005])
    # The same with plain numbers.
    groups = [
        {"params": [other.get_parameter("a")], "lr": 0.1, "block": "tile 16x16"},
        {"params": other.get_parameter("b")},
        {"params": other.get_parameter("c"), "block": None},
    ]
    plain = AdamW8bit(groups, lr=0.01)
    for factor in (1.0, 0.5):
        for group, lr in zip(plain.param_groups, (0.1, 0.01, 0.01), strict=True):
            group["lr"] = lr * factor
        plain.zero_grad()
        torch.stack([((p - 1) ** 2).sum() for p in other.parameters()]).sum().backward()
        plain.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_parameters_without_gradient_are_left_out() -> None:
    model = Weights({"a": (64, 64), "b": (64, 64)})
    optimizer = AdamW8bit(model.parameters())
    before = model.get_parameter("b").detach().clone()
    model.get_parameter("a").grad = noise((64, 64), "a", 1)
    optimizer.step()
    assert (
        torch.equal(model.get_parameter("b"), before)
        and optimizer.state[model.get_parameter("b")]["step"] == 0
        and optimizer.state[model.get_parameter("a")]["step"] == 1
    )


def test_non_contiguous_parameter_is_updated_in_place() -> None:
    start = noise((64, 96), "p", 0)
    param, plain = nn.Parameter(start.t().contiguous().t()), nn.Parameter(start.clone())
    assert not param.is_contiguous()
    optimizer = AdamW8bit([param, plain])
    param.grad, plain.grad = noise((64, 96), "p", 1), noise((64, 96), "p", 1)
    optimizer.step()
    assert torch.equal(param, plain) and not torch.equal(param, start)


# --------------------------------------------------------------------------------------------------- saving and loading


def _watch(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> list[str]:
    seen: list[str] = []
    optimizer.register_load_state_dict_pre_hook(lambda o, d: seen.append("pre"))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(str(o.state[param]["step"].item())))
    return seen


def test_state_dict_restores_fp32_and_bfloat16_runs_bit_for_bit() -> None:
    shapes = {"w": (96, 64), "small": (8, 8)}
    for dtype in (torch.float32, torch.bfloat16):
        first, second = Weights(shapes, dtype), Weights(shapes, dtype)
        one = AdamW8bit(first.parameters(), lr=0.1)
        train(first, one, range(1, 4))
        second.load_state_dict(first.state_dict())
        two = AdamW8bit(second.parameters(), lr=9.0)
        seen = _watch(two, second.get_parameter("w"))
        two.load_state_dict(one.state_dict())
        assert seen == ["pre", "3.0"], "hooks see the loaded states"
        assert not same(full_state(first, one), full_state(second, two)) and two.param_groups[0]["lr"] == 0.1
        assert two.state[second.get_parameter("w")]["exp_avg_scale"].dtype == torch.float32
        train(first, one, range(4, 5))
        assert same(full_state(first, one), full_state(second, two)), "a loaded state must be a copy"
        train(second, two, range(4, 5))
        assert not same(full_state(first, one), full_state(second, two))


def test_states_of_another_block_are_refused_unchanged() -> None:
    model = Weights({"w": (96, 64), "v": (96, 64)})
    optimizer = AdamW8bit(model.parameters(), lr=0.1)
    train(model, optimizer, range(1, 3))
    before = full_state(model, optimizer)
    other = AdamW8bit(model.parameters(), block="tile 32x32").state_dict()
    with pytest.raises(ValueError, match=r"\('tile 32x32', 1\), this optimizer's of \('flat 1024', 1\): build it with the same block"):
        optimizer.load_state_dict(other)
    assert not same(full_state(model, optimizer), before)


def test_step_refuses_other_blocks_with_equally_many_scales(tmp_path: Path) -> None:
    """64 rows make two bands in blocks of 32 or of 40. Loading restores the saved block in the param group."""
    model = Weights({"w": (64, 128)})
    optimizer = AdamW8bit(model.parameters(), block="tile 40x32")
    train(model, optimizer, range(1, 2))
    checkpoint.save({"model": model, "optimizer": optimizer}, tmp_path, 1)
    other = AdamW8bit(model.parameters(), block="tile 32x32")
    checkpoint.load({"model": model, "optimizer": other}, tmp_path)
    give_gradients(model, 2)
    before = full_state(model, other)
    with pytest.raises(RuntimeError, match=r"param group 0 .*\('tile 40x32', 1\).*\('tile 32x32', 1\).*block of the checkpoint"):
        other.step()
    assert not same(full_state(model, other), before)


@on_threads(3)
def test_all_ranks_see_one_ranks_inf_gradient_before_the_step(rank: int, world: int) -> None:
    kinds: list[tuple[Any, dict[str, Any]]] = [(AdamW8bit, {"min_8bit_numel": 1}), (Shampoo, {}), (SOAP, {})]
    for kind, options in kinds:
        model = sharded({"w": (64, 64)}, world, AdamW8bit.block_policy("tile 8x8", 1))
        optimizer = kind(model.parameters(), block="tile 8x8", **options)
        give_gradients(model, 1)
        if rank == 1:
            grad = model.get_parameter("w").grad
            assert isinstance(grad, RaggedDTensor) and grad.to_local().numel()
            grad.to_local().view(-1)[0] = math.inf
        before = full_state(model, optimizer)
        with pytest.raises(RuntimeError, match="gradients were not clipped"):
            clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()
        assert not same(full_state(model, optimizer), before)


def _agreed(rank: int, world: int) -> None:
    kinds: list[tuple[Any, dict[str, Any]]] = [(AdamW8bit, {"min_8bit_numel": 1}), (Shampoo, {}), (SOAP, {})]
    for kind, options in kinds:
        for nonfinite in ("skip", "raise"):
            model = sharded({"w": (64, 64), "v": (64, 64)}, world, AdamW8bit.block_policy("tile 8x8", 1))
            optimizer = kind(model.parameters(), block="tile 8x8", nonfinite=nonfinite, **options)
            w, v = model.get_parameter("w"), model.get_parameter("v")
            give_gradients(model, 1)
            if rank == 1:
                w.grad.to_local().view(-1)[0] = math.nan  # type: ignore[union-attr, operator]
            before = full_state(model, optimizer)
            if nonfinite == "raise":
                with pytest.raises(RuntimeError, match="NaN or Inf on some rank: no rank has taken the step"):
                    optimizer.step()
            else:
                optimizer.step()
            assert not same(full_state(model, optimizer), before)
            give_gradients(model, 2)
            if rank == 1:
                v.grad = None
            optimizer.step()
            assert optimizer.state[w]["step"] == 1 and optimizer.state[v]["step"] == 0, "one rank has no gradient of v"
            if rank == 1:
                w.grad = DTensor.from_local(noise((64, 64), "w", 3), init_device_mesh("cpu", (world,)), [Replicate()])
            with pytest.raises(RuntimeError, match="redistribute the gradient" if rank == 1 else "another rank can't take this"):
                optimizer.step()


@pytest.mark.filterwarnings("ignore:a gradient holds NaN or Inf on some rank")
def test_agreeing_ranks_skip_or_refuse_a_step_together() -> None:
    run_threads(3, _agreed)
    with pytest.raises(ValueError, match="nonfinite = 'maybe': give propagate, skip or raise"):
        AdamW8bit([nn.Parameter(torch.zeros(3))], nonfinite="maybe")
