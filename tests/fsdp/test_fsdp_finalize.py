"""Finishing a step by hand (``finalize_backward``), and mixed precision policies, compared with the installed torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from tests.fsdp.towers import Tower, grads, inputs, same, seeded, shard_tower
from tests.fsdp.transformer import full
from tests.fsdp.units import unit_of
from tests.ranks import on_threads, run_threads
from vescale_ray.errors import BadArgument
from vescale_ray.fsdp import MixedPrecisionPolicy, PhaseError, fully_shard

since_2_15 = pytest.mark.skipif(
    not hasattr(TorchFSDPModule, "finalize_backward"), reason="torch before 2.15 has no finalize_backward and no dtypes by parameter"
)


def whole_step(model: Any, steps: range, world: int) -> None:
    """Compute the expected gradients: the mean over ranks, summed over micro-batches."""
    for step in steps:
        model(inputs(0, 1, step)).square().mean().backward()


@pytest.mark.parametrize(("asynchronous", "reduces_at_once"), [(False, True), (True, False)])
@on_threads(2)
def test_manually_finalized_step_has_the_whole_models_gradients(rank: int, world: int, asynchronous: bool, reduces_at_once: bool) -> None:
    ours, alone = shard_tower(seeded(Tower)), seeded(Tower)
    assert ours.finalize_backward(async_op=True).wait() is None and ours.finalize_backward() is None, "nothing before the first forward"
    for optimizer_step in range(3):
        ours.set_manual_backward_finalization(True)
        ours.set_is_last_backward(False)  # has no effect, since finalization is manual
        ours.set_reshard_after_backward(False)
        ours.set_requires_gradient_sync(reduces_at_once)
        micro = range(2 * optimizer_step, 2 * optimizer_step + 2)
        for step in micro:
            ours(inputs(rank, world, step)).square().mean().backward()
        if not reduces_at_once:
            assert all(p.grad is None for p in ours.layers[0].parameters()), "only added up so far"
        ours.set_requires_gradient_sync(True)
        ours.set_reshard_after_backward(True)
        handle = ours.finalize_backward(async_op=asynchronous)
        if asynchronous:
            with pytest.raises(PhaseError, match="wait on its handle"):
                ours(inputs(rank, world, 0))
            with pytest.raises(PhaseError, match="wait on its handle before the next"):
                ours.finalize_backward()
            handle.wait()
            handle.wait()
        whole_step(alone, micro, world)
        same(grads(ours), grads(alone))
        assert not unit_of(ours.layers[0]).gathered, "resharded"
        for model in (ours, alone):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
    ours.set_manual_backward_finalization(False)
    ours.set_is_last_backward(True)
    ours(inputs(rank, world, 9)).square().mean().backward()
    whole_step(alone, range(9, 10), world)
    same(grads(ours), grads(alone))


@on_threads(2)
def test_finalizing_a_step_takes_in_assigned_gradients(rank: int, world: int) -> None:
    """The caller computes weight gradients with autograd.grad and assigns them, as in zero-bubble pipelines."""
    ours, alone = shard_tower(seeded(Tower), reshard_after_forward=False), seeded(Tower)
    ours.set_manual_backward_finalization(True)
    ours.set_requires_gradient_sync(False)
    ours.set_reshard_after_backward(False)
    out = ours(inputs(rank, world)).square().mean()
    weights = list(ours.parameters())
    for weight, grad in zip(weights, torch.autograd.grad(out, weights), strict=True):
        weight.grad = grad
    ours.set_requires_gradient_sync(True)
    ours.set_reshard_after_backward(True)
    ours.finalize_backward()
    whole_step(alone, range(1), world)
    same(grads(ours), grads(alone))


def raised(call: Any) -> str:
    """ "RuntimeError" if the call raises one, of which PhaseError is a kind; otherwise an empty string."""
    try:
        call()
    except RuntimeError:
        return "RuntimeError"
    return ""


HOWS = pytest.mark.parametrize("how", [fully_shard, pytest.param(torch_fully_shard, marks=since_2_15)], ids=["ours", "torch's"])


@HOWS
@on_threads(2)
def test_misuse_of_manual_finalization_is_refused(rank: int, world: int, how: Any) -> None:
    model = shard_tower(seeded(Tower), how)
    seen = [raised(lambda: model.set_manual_backward_finalization(False))]
    model(inputs(rank, world)).sum().backward()
    seen.append(raised(lambda: model.layers[0].set_manual_backward_finalization(True)))
    seen.append(raised(lambda: model.layers[0].finalize_backward()))
    seen.append(raised(lambda: model.finalize_backward()))  # manual finalization was not switched on
    model.set_manual_backward_finalization(True)
    out = model.layers[2].register_forward_hook(
        lambda _module, _args, output: output.register_hook(lambda _: seen.append(raised(lambda: model.finalize_backward()))) and None
    )
    model(inputs(rank, world)).sum().backward()
    out.remove()
    seen.append(raised(lambda: model.set_manual_backward_finalization(True)))
    seen.append(raised(lambda: model.set_manual_backward_finalization(False)))
    model.finalize_backward()
    model.set_manual_backward_finalization(False)
    model(inputs(rank, world)).sum().backward()
    model.set_manual_backward_finalization(True)
    model(inputs(rank, world)).sum().backward()
    handle = model.finalize_backward(async_op=True)
    seen.append(raised(lambda: model(inputs(rank, world))))
    model.reset_iter_state()
    seen.append(raised(handle.wait))
    lost = shard_tower(seeded(Tower), how)
    lost.layers[1].set_manual_backward_finalization(True)
    seen.append(raised(lambda: lost(inputs(rank, world))))
    assert seen == ["", *["RuntimeError"] * 4, "", *["RuntimeError"] * 4]


@HOWS
@on_threads(4)
def test_finalizing_requires_the_sum_over_replicas(rank: int, world: int, how: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard_tower(seeded(Tower), how, mesh=mesh)
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    model(inputs(rank, world)).sum().backward()
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(False)
    seen = [raised(lambda: model.finalize_backward())]
    model.set_requires_all_reduce(True)
    seen.append(raised(lambda: model.finalize_backward()))
    assert seen == ["RuntimeError", ""]
    alone = seeded(Tower)
    alone(inputs(0, 1)).sum().div(world).backward()
    same(grads(model), grads(alone))


@on_threads(2)
def test_refused_keep_unsharded_storage_names_a_working_remedy(rank: int, world: int) -> None:
    model = shard_tower(seeded(Tower))
    model.set_keep_unsharded_storage(False)
    with pytest.raises(BadArgument, match=r"call set_reshard_after_forward\(False\) and set_reshard_after_backward\(False\)"):
        model.set_keep_unsharded_storage(True)
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    places = []
    for step in range(2):
        model(inputs(rank, world, step)).sum().backward()
        assert all(unit_of(layer).gathered for layer in model.layers)
        places.append([group.gathered.flat.data_ptr() for layer in model.layers for group in unit_of(layer).groups])
    assert places[0] == places[1]


@pytest.mark.parametrize("after_forward", [True, False])
@on_threads(2)
def test_steps_take_sharded_parameters_if_gathered_values_stay(rank: int, world: int, after_forward: bool) -> None:
    """The gathered ones have no gradients: clipping, an optimizer or an average of them would do nothing, without a word."""
    ours, alone = shard_tower(seeded(Tower), reshard_after_forward=after_forward), seeded(Tower)
    ours.set_reshard_after_backward(False)
    for step in range(3):
        ours(inputs(rank, world, step)).square().mean().backward()
        whole_step(alone, range(step, step + 1), world)
        assert all(unit_of(layer).gathered for layer in ours.layers)
        norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05) for model in (ours, alone)]
        torch.testing.assert_close(norms[0].full_tensor(), norms[1])  # type: ignore[attr-defined]
        same(grads(ours), grads(alone))
        for model in (ours, alone):
            torch.optim.SGD(model.parameters(), lr=0.5).step()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)
            model.zero_grad()
        same({n: full(p) for n, p in ours.named_parameters()}, dict(alone.named_parameters()))


# -- policies ---------------------------------------------------------------------------------------------------------------


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.low.dtype, self.high.dtype
        return (x.to(self.low.dtype) * self.low).sum() + (x.to(self.high.dtype) * self.high).sum()


def small_and_large(rank: int, world: int, how: Any, options: dict[str, Any]) -> Any:
    """The gradients' sum is 1 + 2**-9, which bfloat16 rounds to 1."""
    model = how(Sum(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, **options))
    model(torch.full((4,), 1.0 if rank == 0 else 2.0**-9)).backward()
    return model.seen, full(model.low.grad).tolist(), full(model.high.grad).tolist()


@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16, torch.float32])
def test_gradients_without_a_reduce_dtype_are_summed_as_in_torch(reduce_dtype: torch.dtype | None) -> None:
    ours, theirs = (run_threads(2, small_and_large, how, {"reduce_dtype": reduce_dtype}) for how in (fully_shard, torch_fully_shard))
    assert ours == theirs
    own_dtype = reduce_dtype is torch.float32 or (reduce_dtype is None and hasattr(TorchFSDPModule, "finalize_backward"))
    assert ours[0][1] == [(1 + 2.0**-9 if own_dtype else 1.0) / 2] * 4


def leave_high(param: nn.Parameter, high: Any) -> Any:
    return high if param.shape == (5,) else None


class Uneven(Sum):
    def __init__(self) -> None:
        super().__init__()
        self.high = nn.Parameter(torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.low.dtype, self.high.dtype
        return (x.to(self.low.dtype) * self.low).sum() + self.high.sum() * (1 + 2.0**-9)


def by_parameter(rank: int, world: int, how: Any, high: Any) -> Any:
    policy = MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=lambda p: leave_high(p, high))  # type: ignore[call-arg]
    try:
        model = how(Uneven(), mp_policy=policy)
    except ValueError:
        return "refused"
    model(torch.full((4,), 1.0)).backward()
    return model.seen, full(model.low.grad).tolist(), full(model.high.grad).tolist()


@since_2_15
@pytest.mark.parametrize("high", [torch.float32, torch.bfloat16, None, torch.float16])
def test_a_policy_leaves_single_parameters_in_their_dtype(high: Any) -> None:
    ours, theirs = (run_threads(2, by_parameter, how, high) for how in (fully_shard, torch_fully_shard))
    assert ours == theirs
    assert ours[0] == "refused" if high is torch.float16 else ours[0][0] == (torch.bfloat16, high or torch.bfloat16)


@on_threads(2)
def test_parameter_with_another_gradient_dtype_is_refused(rank: int, world: int) -> None:
    model = seeded(Tower)
    model.head.weight.grad_dtype = torch.bfloat16
    with pytest.raises(BadArgument, match=r"'head.weight' is torch.float32 with grad_dtype torch.bfloat16: .* leave grad_dtype alone"):
        fully_shard(model)
    assert type(model) is Tower and type(model.head.weight) is nn.Parameter, "nothing was changed"
