"""torch's optimizers, clipping, GradScaler and torch.compile on ragged parameters, compared with plain tensors."""

from __future__ import annotations

import cProfile
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute

from tests.dtensor.layouts import Case, hsdp, one_dim_mesh, ragged, values, whole
from tests.ranks import on_processes, on_threads, run_threads
from vescale_ray.dtensor import RaggedDTensor, RaggedFallbackWarning, RaggedShard, distribute_tensor

# Cuts at odd elements, an empty rank, a whole tensor on one rank, a scalar.
LAYOUTS = (Case((12, 7), 2, (5, 0, 79)), Case((33,), 1, (11, 11, 11)), Case((4, 3, 5), 0, (0, 1, 0)), Case((), 0, (1, 0, 0)))
# Cuts at multiples of 16 elements, where fused kernels have no vector tails. At other cuts results differed by up to 3.7e-9.
ALIGNED = (Case((8, 16), 1, (3, 0, 5)), Case((64,), 1, (16, 32, 16)), Case((4, 4, 8), 0, (0, 1, 0)))

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5, foreach=True),
    "AdamW loop": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5, foreach=False),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, foreach=True),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.5, foreach=True),
    "Adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.5, foreach=True),
    "SGD nesterov loop": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5),
    "RMSprop foreach": lambda p: torch.optim.RMSprop(p, lr=0.1, foreach=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "Adamax loop": lambda p: torch.optim.Adamax(p, lr=0.1, foreach=False),
    "Adadelta": lambda p: torch.optim.Adadelta(p, foreach=True),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "Rprop foreach": lambda p: torch.optim.Rprop(p, lr=0.1, foreach=True),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "NAdam decoupled": lambda p: torch.optim.NAdam(p, lr=0.1, weight_decay=0.1, decoupled_weight_decay=True),
}


Parameters = list[nn.Parameter]


def parameters(layouts: tuple[Case, ...], mesh: Any, rank: int, dtype: torch.dtype = torch.float32) -> tuple[Parameters, Parameters]:
    plain = [(values(c.shape, seed=i) / 7 + 0.05).to(dtype) for i, c in enumerate(layouts)]
    sharded = [nn.Parameter(ragged(c, t, mesh, rank)) for c, t in zip(layouts, plain, strict=True)]
    return sharded, [nn.Parameter(t.clone()) for t in plain]


def set_gradients(layouts: tuple[Case, ...], sharded: list[nn.Parameter], plain: list[nn.Parameter], rank: int, step: int) -> None:
    for i, (case, p, q) in enumerate(zip(layouts, sharded, plain, strict=True)):
        gradient = (values(case.shape, seed=100 * step + i) / 9).to(q.dtype)
        p.grad = RaggedDTensor.from_spec(case.part(gradient, rank).clone(), p._spec)  # type: ignore[attr-defined]
        q.grad = gradient.clone()


def _steps(rank: int, world: int, layouts: tuple[Case, ...], name: str, make: Callable[..., torch.optim.Optimizer]) -> None:
    mesh = one_dim_mesh(world)
    sharded, plain = parameters(layouts, mesh, rank)
    ours, theirs = make(sharded), make(plain)
    for step in range(3):
        set_gradients(layouts, sharded, plain, rank, step)
        ours.step()
        theirs.step()
    for p, q in zip(sharded, plain, strict=True):
        assert isinstance(p, RaggedDTensor) and isinstance(p, nn.Parameter)
        assert torch.equal(p.full_tensor(), q), name
        for key, value in theirs.state[q].items():
            mine = ours.state[p][key]
            if isinstance(value, Tensor) and value.shape == q.shape and q.ndim:
                assert isinstance(mine, RaggedDTensor) and mine.placements == p.placements, f"{name}: {key} must be cut as its parameter"
            assert not isinstance(value, Tensor) or torch.equal(whole(mine), value), (name, key)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_are_bit_for_bit_those_of_the_whole_tensor(name: str) -> None:
    layouts = ALIGNED if "fused" in name else LAYOUTS
    with warnings.catch_warnings():
        warnings.simplefilter("error", RaggedFallbackWarning)
        run_threads(3, _steps, layouts, name, OPTIMIZERS[name])


@pytest.mark.parametrize("placements", [[RaggedShard((0,), (1, 3)), Shard(0)], [Replicate(), RaggedShard((), (0, 1))]], ids=str)
@pytest.mark.filterwarnings("ignore::vescale_ray.dtensor.RaggedFallbackWarning")
@on_threads(4, timeout=100)
def test_optimizers_and_clipping_are_right_with_tp_and_replicas(rank: int, world: int, placements: list[Any]) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    shapes = ((16, 8), (8,), (8, 2, 6))
    for make in (*OPTIMIZERS.values(), lambda p: torch.optim.AdamW(p, lr=0.1, fused=True), lambda p: torch.optim.Adafactor(p, lr=0.1)):
        plain = [nn.Parameter(values(s, seed=i) / 7 + 0.05) for i, s in enumerate(shapes)]
        sharded = [nn.Parameter(distribute_tensor(p.detach(), mesh, placements)) for p in plain]
        ours, theirs = make(sharded), make(plain)
        for step in range(2):
            for i, (p, q) in enumerate(zip(sharded, plain, strict=True)):
                q.grad = values(tuple(q.shape), seed=10 * step + i) / 9
                p.grad = distribute_tensor(q.grad, mesh, placements, src_data_rank=None)
            norms = [torch.nn.utils.clip_grad_norm_(params, 20.0) for params in (sharded, plain)]
            torch.testing.assert_close(whole(norms[0]), norms[1])
            ours.step()
            theirs.step()
        for p, q in zip(sharded, plain, strict=True):
            torch.testing.assert_close(whole(p), q.detach(), rtol=1e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::vescale_ray.dtensor.RaggedFallbackWarning")
@on_threads(3)
def test_lbfgs_works_gathering(rank: int, world: int) -> None:
    mesh = one_dim_mesh(world)
    for options in ({}, {"line_search_fn": "strong_wolfe"}):
        sharded, plain = parameters(LAYOUTS, mesh, rank)
        for params in (sharded, plain):
            optimizer = torch.optim.LBFGS(params, lr=0.1, **options)  # type: ignore[arg-type]

            def closure(optimizer: Any = optimizer, params: Any = params) -> Any:
                optimizer.zero_grad()
                loss = whole(sum(((p - 0.3) ** 2).sum() for p in params))
                loss.backward()
                return loss

            optimizer.step(closure)
            optimizer.step(closure)
        for p, q in zip(sharded, plain, strict=True):
            torch.testing.assert_close(whole(p), q.detach())


@on_threads(3)
def test_torchs_muon_is_refused_before_anything_is_changed(rank: int, world: int) -> None:
    """Wide, square and tall matrices are all refused. The plain matrix before them, its momentum, and a closure's values do not change."""
    mesh = one_dim_mesh(world)
    for case in (Case((12, 7), 2, (5, 0, 79)), Case((7, 12), 1, (3, 0, 4)), Case((6, 6), 0, (0, 1, 0))):
        (sharded,), _ = parameters((case,), mesh, rank)
        plain = nn.Parameter(torch.ones(4, 4))
        sharded.grad, plain.grad = torch.ones_like(sharded), torch.ones(4, 4)
        before = sharded.to_local().clone()  # type: ignore[attr-defined]
        optimizer = torch.optim.Muon([plain, sharded], lr=0.1)
        with pytest.raises(RuntimeError, match=r"use vescale_ray\.optim\.Muon"):
            optimizer.step()
        assert not optimizer.state and bool((plain == 1).all())
        assert torch.equal(sharded.to_local(), before)  # type: ignore[attr-defined]
    torch.optim.Muon([plain], lr=0.1).step()
    assert bool((plain != 1).any()), "torch's own is left as it was for whole matrices"


@pytest.mark.filterwarnings("ignore::vescale_ray.dtensor.RaggedFallbackWarning")
@on_threads(3)
def test_adafactor_works_gathering_where_it_needs_columns(rank: int, world: int) -> None:
    mesh = one_dim_mesh(world)
    for foreach in (True, False):
        sharded, plain = parameters(LAYOUTS[:2], mesh, rank)
        ours, theirs = torch.optim.Adafactor(sharded, lr=0.1, foreach=foreach), torch.optim.Adafactor(plain, lr=0.1, foreach=foreach)
        for step in range(2):
            set_gradients(LAYOUTS[:2], sharded, plain, rank, step)
            ours.step()
            theirs.step()
        for p, q in zip(sharded, plain, strict=True):
            torch.testing.assert_close(whole(p), q.detach(), rtol=1e-5, atol=1e-6)


@on_threads(3)
def test_fused_adam_is_exact_at_16_element_cuts_close_elsewhere(rank: int, world: int) -> None:
    mesh = one_dim_mesh(world)
    for layouts, tolerance in ((ALIGNED, 0.0), (LAYOUTS, 1e-7)):
        for kind in (torch.optim.AdamW, torch.optim.Adam):
            sharded, plain = parameters(layouts, mesh, rank)
            ours, theirs = kind(sharded, lr=0.1, weight_decay=0.5, fused=True), kind(plain, lr=0.1, weight_decay=0.5, fused=True)
            for step in range(3):
                set_gradients(layouts, sharded, plain, rank, step)
                ours.step()
                theirs.step()
            for p, q in zip(sharded, plain, strict=True):
                torch.testing.assert_close(p.full_tensor(), q.detach(), rtol=tolerance, atol=tolerance)  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("error::vescale_ray.dtensor.RaggedFallbackWarning")
@on_threads(3)
def test_clip_grad_norm_is_that_of_the_whole_gradients(rank: int, world: int) -> None:
    mesh = one_dim_mesh(world)
    for order in (2.0, 1.0, 3.0, math.inf):
        for foreach in (True, False):
            sharded, plain = parameters(LAYOUTS, mesh, rank)
            set_gradients(LAYOUTS, sharded, plain, rank, 1)
            ours = torch.nn.utils.clip_grad_norm_(sharded, 0.5, order, foreach=foreach)
            theirs = torch.nn.utils.clip_grad_norm_(plain, 0.5, order, foreach=foreach)
            torch.testing.assert_close(whole(ours), theirs, rtol=1e-6, atol=0)
            assert math.isclose(ours.item(), theirs.item(), rel_tol=1e-6)
            for p, q in zip(sharded, plain, strict=True):
                assert isinstance(p.grad, RaggedDTensor) and q.grad is not None
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-6, atol=0)
    sharded, plain = parameters(LAYOUTS, mesh, rank)
    set_gradients(LAYOUTS, sharded, plain, rank, 1)
    torch.nn.utils.clip_grad_value_(sharded, 0.5)
    assert all(p.grad is not None and p.grad.abs().max().item() <= 0.5 for p in sharded)


@on_threads(4)
def test_clip_grad_norm_counts_replicas_once(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    gradient, case = values((6, 5)), Case((6, 5), 1, (1, 5))
    mine = case.part(gradient, mesh.get_local_rank(1)).clone()
    p = nn.Parameter(RaggedDTensor.from_local(torch.zeros_like(mine), mesh, hsdp(case), shape=(6, 5)))
    p.grad = RaggedDTensor.from_spec(mine, p._spec)  # type: ignore[attr-defined]
    norm = torch.nn.utils.clip_grad_norm_([p], 1e9)
    assert math.isclose(norm.item(), gradient.norm().item(), rel_tol=1e-6), "replicas don't count twice"


@on_threads(3)
def test_ragged_and_replicated_parameters_share_an_optimizer(rank: int, world: int) -> None:
    """One optimizer for a ragged parameter and a parameter that torch replicates."""
    mesh = one_dim_mesh(world)
    sharded, plain = parameters(LAYOUTS[:1], mesh, rank)
    sharded.append(nn.Parameter(torch_distribute(values((5,)), mesh, [Replicate()], src_data_rank=None)))
    plain.append(nn.Parameter(values((5,))))
    ours, theirs = torch.optim.AdamW(sharded, lr=0.1, foreach=True), torch.optim.AdamW(plain, lr=0.1, foreach=True)
    for step in range(2):
        set_gradients(LAYOUTS[:1], sharded[:1], plain[:1], rank, step)
        sharded[1].grad = torch_distribute(torch.ones(5), mesh, [Replicate()], src_data_rank=None)
        plain[1].grad = torch.ones(5)
        norms = [torch.nn.utils.clip_grad_norm_(ps, 0.5, foreach=True) for ps in (sharded, plain)]
        torch.testing.assert_close(whole(norms[0]), norms[1])
        ours.step()
        theirs.step()
    for p, q in zip(sharded, plain, strict=True):
        torch.testing.assert_close(whole(p), q, rtol=1e-6, atol=1e-6)


@on_threads(3)
def test_grad_scaler_finds_an_inf_that_only_one_rank_has(rank: int, world: int) -> None:
    mesh = one_dim_mesh(world)
    sharded, plain = parameters(LAYOUTS, mesh, rank)
    ours, theirs = torch.optim.SGD(sharded, lr=0.1), torch.optim.SGD(plain, lr=0.1)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu", init_scale=8.0)]
    for step in range(2):
        set_gradients(LAYOUTS, sharded, plain, rank, step)
        if step == 1:  # one element overflows, on one rank only
            assert plain[0].grad is not None and sharded[0].grad is not None
            plain[0].grad.view(-1)[0] = math.inf
            if rank == 0:
                sharded[0].grad.to_local().view(-1)[0] = math.inf  # type: ignore[attr-defined]
        for scaler, optimizer in zip(scalers, (ours, theirs), strict=True):
            scaler.scale(torch.ones(1))
            scaler.step(optimizer)
            scaler.update()
    for p, q in zip(sharded, plain, strict=True):
        assert torch.equal(p.full_tensor(), q)  # type: ignore[attr-defined]
    assert scalers[0].get_scale() == scalers[1].get_scale() == 4.0, "an inf on one rank stops the step on all"
    assert scalers[0].get_scale() == 4.0


COMPILED = [("aot_eager", {"foreach": True}), ("aot_eager", {"fused": True})]


@pytest.mark.parametrize(
    "kinds", [COMPILED, pytest.param([("eager", {"foreach": True})], marks=pytest.mark.slow)], ids=["aot_eager", "eager"]
)
@on_processes(2, timeout=110)
def test_compiled_optimizer_step_equals_that_on_whole_tensors(rank: int, world: int, kinds: list[tuple[str, dict[str, Any]]]) -> None:
    warnings.simplefilter("error", RaggedFallbackWarning)
    mesh = one_dim_mesh(world)
    layouts = (Case((8, 16), 1, (3, 5)), Case((64,), 1, (16, 48)))
    for backend, options in kinds:
        torch._dynamo.reset()
        sharded, plain = parameters(layouts, mesh, rank)
        ours, theirs = torch.optim.AdamW(sharded, lr=0.1, **options), torch.optim.AdamW(plain, lr=0.1, **options)
        steps = [torch.compile(o.step, backend=backend) for o in (ours, theirs)]
        for step in range(2):
            set_gradients(layouts, sharded, plain, rank, step)
            for run in steps:
                run()
        for p, q in zip(sharded, plain, strict=True):
            assert isinstance(p, RaggedDTensor) and isinstance(ours.state[p]["exp_avg"], RaggedDTensor)
            assert torch.equal(p.full_tensor(), q), (backend, options)


@on_threads(3)
def test_bfloat16_parameters_differ_by_at_most_one_ulp(rank: int, world: int) -> None:
    """bfloat16 parameters with AdamW. Vector tails may cost one unit in the last place if a cut is no multiple of 64."""
    mesh = one_dim_mesh(world)
    sharded, plain = parameters(LAYOUTS, mesh, rank, torch.bfloat16)
    ours, theirs = torch.optim.AdamW(sharded, lr=0.1, foreach=True), torch.optim.AdamW(plain, lr=0.1, foreach=True)
    for step in range(3):
        set_gradients(LAYOUTS, sharded, plain, rank, step)
        ours.step()
        theirs.step()
    for p, q in zip(sharded, plain, strict=True):
        assert p.dtype == torch.bfloat16
        torch.testing.assert_close(whole(p), q.detach(), rtol=2**-7, atol=1e-6)
    assert isinstance(sharded[0].placements[0], RaggedShard)  # type: ignore[attr-defined]
    assert not isinstance(whole(sharded[0]), DTensor)


def _step_seconds(rank: int, world: int) -> tuple[float, float]:
    mesh, count = one_dim_mesh(world), 100
    ours = [nn.Parameter(ragged(Case((8, 16), 1, (8,)), torch.ones(8, 16), mesh, rank)) for _ in range(count)]
    theirs = [nn.Parameter(torch_distribute(torch.ones(8, 16), mesh, [Shard(0)])) for _ in range(count)]
    optimizers = [torch.optim.AdamW(params, lr=0.1, foreach=True) for params in (ours, theirs)]
    for p in (*ours, *theirs):
        p.grad = torch.ones_like(p)
    best = [math.inf, math.inf]
    for _ in range(6):  # interleaved, in CPU time of this thread, so that other load affects both alike
        for i, optimizer in enumerate(optimizers):
            began = time.thread_time()
            optimizer.step()
            best[i] = min(best[i], time.thread_time() - began)
    return best[0], best[1]


def test_foreach_step_takes_under_1_5_times_torchs_dtensor_step() -> None:
    """The measured ratio is 0.85 to 0.95 (benchmarks/dtensor_overhead.py).

    The limit of 1.5 leaves room for a busy machine, and still detects specs that are built for each result.
    """
    ours, theirs = run_threads(1, _step_seconds)[0]
    assert ours < 1.5 * theirs, f"{ours * 1e3:.1f} ms against {theirs * 1e3:.1f} ms"


def _calls_per_gradient(rank: int, world: int) -> float:
    mesh, count = one_dim_mesh(world), 100
    params = [nn.Parameter(ragged(Case((8, 16), 1, (8,)), torch.ones(8, 16), mesh, rank)) for _ in range(count)]
    for p in params:
        p.grad = torch.ones_like(p)
    nn.utils.clip_grad_norm_(params, 1.0)
    with cProfile.Profile() as profile:
        nn.utils.clip_grad_norm_(params, 1.0)
    return sum(entry.callcount for entry in profile.getstats()) / count


def test_clipping_makes_under_45_python_calls_per_gradient() -> None:
    """It makes about 35, torch's included. Torch's pytree functions over the norms alone make 60 more."""
    calls = run_threads(1, _calls_per_gradient)[0]
    assert calls < 45, f"{calls:.0f} calls per gradient"
