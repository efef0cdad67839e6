"""Faults found in a review: silently wrong results, crashes, and errors on one rank only. Ranks are processes on gloo."""

from __future__ import annotations

import copy as copy_module
import io
import math
import pickle
import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute

from tests.ranks import on_processes
from vescale_ray import fully_shard
from vescale_ray.dtensor import RaggedDTensor, RaggedFallbackWarning, RaggedShard, distribute_tensor
from vescale_ray.optim import clip_grad_norm_
from vescale_ray.state_dict import StateDictOptions, set_model_state_dict

UNITS = (1, 0, 3)


def ragged(full: torch.Tensor) -> Any:
    return distribute_tensor(full.clone(), init_device_mesh("cpu", (3,)), [RaggedShard((0,), UNITS)], src_data_rank=None)


def whole(value: Any) -> torch.Tensor:
    result: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return result


def values() -> torch.Tensor:
    return torch.arange(40.0).reshape(8, 5) - 50.0


def reductions(rank: int, world: int) -> None:
    for row in (0, 7):  # NaN on the first rank, then on the last
        full = torch.ones(8, 5)
        full[row, 0] = math.nan
        x = ragged(full)
        for value in (x.max(), x.min(), torch.linalg.vector_norm(x, math.inf), torch._foreach_norm([x], math.inf)[0]):
            assert whole(value).isnan() and math.isnan(value.item())
        p = nn.Parameter(ragged(torch.ones(8, 5)))
        p.grad = x
        with pytest.raises(RuntimeError, match="not clipped"):
            clip_grad_norm_([p], 1.0, norm_type=math.inf, error_if_nonfinite=True)
    full, x = values(), ragged(values())
    n, m = x.norm(), full.norm()
    for ours, plain in (
        (torch.stack([n, -n]), torch.stack([m, -m])),
        (torch.cat([n.view(1), -n.view(1)]), torch.stack([m, -m])),
        (torch.stack([n, x.sum(), x.max()]), torch.stack([m, full.sum(), full.max()])),
        (x.min().to(torch.int64), full.min().to(torch.int64)),
        ((x * 0.1).sum().to(torch.int64), (full * 0.1).sum().to(torch.int64)),
        (x.max().to(torch.bfloat16), full.max().to(torch.bfloat16)),
    ):
        torch.testing.assert_close(whole(ours), plain)


def versions(rank: int, world: int) -> None:
    def step(p: Any) -> None:
        optimizer = torch.optim.SGD([p], lr=0.1, foreach=True)
        optimizer.step()

    for write in (
        step,
        lambda p: torch._foreach_zero_([p]),
        lambda p: torch._foreach_copy_([p], [p.detach() * 2]),
        lambda p: torch._amp_foreach_non_finite_check_and_unscale_([p], torch.zeros(1), torch.ones(1)),
    ):
        p = nn.Parameter(ragged(values()))
        y = (p * p).sum()
        y.backward(retain_graph=True)
        with torch.no_grad():
            write(p)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def refusals(rank: int, world: int) -> None:
    x = ragged(values())
    with pytest.raises(RuntimeError, match="to_local"):
        x.share_memory_()
    with pytest.raises(RuntimeError, match="to_local"):
        torch.from_dlpack(x)
    with pytest.raises(RuntimeError, match=r"use its to_local\(\), or full_tensor\(\), taken on every rank"):
        x.numpy()
    mesh = init_device_mesh("cpu", (3,))
    local = torch.zeros(2, 5) if rank != 2 else torch.zeros(5, 5)
    with pytest.raises(ValueError, match=r"local tensor has shape|the rank at \(1,\) of the mesh: local tensor has shape"):
        RaggedDTensor.from_local(local, mesh, [RaggedShard((0,), UNITS)], shape=(8, 5), run_check=True)
    good = ragged(values()).to_local()
    shape = (8, 5)
    RaggedDTensor.from_local(good, mesh, [RaggedShard((0,), UNITS)], shape=shape, run_check=True)
    with pytest.raises(ValueError, match=r"torch.float64"):
        RaggedDTensor.from_local(good.double() if rank else good, mesh, [RaggedShard((0,), UNITS)], shape=shape, run_check=True)


def state_dicts(rank: int, world: int) -> None:
    model: Any = fully_shard(nn.Linear(4, 6))
    before = {name: p.to_local().clone() for name, p in model.named_parameters()}
    full = {"weight": torch.ones(6, 4), "bias": torch.ones(6)}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for bad, why in (
        ({**full, "bias": model.bias.detach()}, "'bias' is a RaggedDTensor"),
        ({**full, "bias": torch.ones(6).to_sparse()}, "'bias' is torch.sparse_coo"),
        ({**full, "bias": torch.ones(6, device="meta")}, "'bias' is .* on meta"),
        ({**full, "extra": lambda: None}, "'extra' can't be pickled: "),
    ):
        with pytest.raises(ValueError, match=re.compile(f"can't be loaded: .*{why}")):
            set_model_state_dict(model, bad if rank == 0 else {}, options=options)
        assert all(torch.equal(p.to_local(), before[name]) for name, p in model.named_parameters())
    set_model_state_dict(model, full if rank == 0 else {}, options=options)
    assert all((whole(p) == 1).all() for p in model.parameters())


def same_or_refused(function: Any, full: torch.Tensor, x: Any) -> None:
    """If the plain tensor refuses the call, the ragged one does; else the results are equal, with equal shapes and dtypes."""
    try:
        expected = function(full)
    except (IndexError, RuntimeError) as error:
        with pytest.raises((IndexError, RuntimeError)) as raised:
            whole(function(x))
        assert isinstance(raised.value, type(error)) or full.numel() == 0
        return
    torch.testing.assert_close(whole(function(x)), expected, rtol=1e-6, atol=0, equal_nan=True)


def dimensions(rank: int, world: int) -> None:
    """Missing dimensions, no dimensions at all, and maxima of empty tensors."""
    mesh = init_device_mesh("cpu", (3,))
    cases = [(torch.tensor(3.5), ((), (0, 1, 0))), (torch.empty(0, 5), ((0,), (1, 0, 0))), (values(), ((0,), UNITS))]
    for full, (dims, units) in cases:
        x = distribute_tensor(full.clone(), mesh, [RaggedShard(dims, units)], src_data_rank=None)
        for name in ("max", "min", "prod"):
            same_or_refused(getattr(torch, name), full, x)
        for name in ("sum", "mean", "amax", "amin", "any", "all"):
            function = getattr(torch, name)
            for dim in (0, 1, -1, -2, 2, -3, (0, 1), (0, 0), ()):
                same_or_refused(lambda t, f=function, d=dim: f(t, d), full, x)
        for order in (2, 0, 1, math.inf, -math.inf, -1):
            same_or_refused(lambda t, o=order: torch._foreach_norm([t], o)[0], full, x)
            same_or_refused(lambda t, o=order: torch.linalg.vector_norm(t, o, dim=1), full, x)
        same_or_refused(lambda t: torch._foreach_max([t])[0], full, x)
    image, ones = ragged(values()).view(1, 8, 5), [ragged(torch.ones(8)) for _ in range(6)]
    normalize: Any = torch.native_batch_norm
    with pytest.raises(RuntimeError, match="can't be written"):  # with training=False the call writes out=, but no running statistics
        normalize(image, *ones[:4], False, 0.1, 1e-5, out=(torch.zeros_like(image), *ones[4:]))
    z = values() * (1 + 1j)
    torch.testing.assert_close(whole((ragged(z) / 50).prod()), (z / 50).prod())


def results(rank: int, world: int) -> None:
    """Copying, printing, formatting and storing the results of operations."""
    full, x = values(), ragged(values())
    for value, plain in ((x.sum(), full.sum()), (x.norm(), full.norm()), (x.max(), full.max()), (x.t(), full.t()), (x.sum(0), full.sum(0))):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        for copy in (copy_module.deepcopy(value), pickle.loads(pickle.dumps(value)), torch.load(buffer, weights_only=True), value.data):
            torch.testing.assert_close(whole(copy), plain)
        assert "contribution" in repr(value) or not any(p.is_partial() for p in value.placements)
    assert math.isclose(x.sum().data.item(), full.sum().item(), rel_tol=1e-6)
    assert x.sum(0).tolist() == pytest.approx(full.sum(0).tolist()) and x.t().tolist() == full.t().tolist()
    for value in (x, x.sum()):
        with pytest.raises(TypeError, match=r"format its item\(\), or full_tensor\(\), taken on every rank"):
            f"{value:.2f}"
    assert f"{x[7][4]:.2f}" == f"{full[7][4]:.2f}"
    for collective in (lambda v: dist.all_reduce(v), lambda v: dist.broadcast(v, 0), lambda v: dist.all_gather([v, v], v)):
        for value in (x, x.norm(), x.t(), x.sum(0)):  # each rank would reduce a copy, and the result would be lost
            with pytest.raises(RuntimeError, match=r"or call it on full_tensor\(\) or on to_local\(\)"):
                collective(value)


def beside_plain(rank: int, world: int) -> None:
    """Plain tensors with ragged ones or with their results: either one clear error, or the gradient of torch's own formula."""
    x, full, plain = ragged(values()), values(), torch.ones(3, 5)
    scale = nn.Parameter(torch.tensor(2.0))
    for call in (
        lambda: torch.nn.functional.linear(plain, x),
        lambda: plain @ x.t(),
        lambda: torch.addmm(torch.zeros(8), plain, x.t()),
        lambda: torch.einsum("ij,kj->ik", plain, x),
        lambda: x.sum(0) + torch.ones(5),
        lambda: (x.t() * 2) @ torch.ones(8, 2),
    ):
        with pytest.raises(ValueError, match="a plain tensor of shape .* meets .*: distribute it first"):
            call()
    for call in (lambda: x * scale, lambda: x.sum() * scale, lambda: x.softmax(0) + scale, lambda: x.t() * scale):
        with pytest.raises(ValueError, match="without dimensions that requires grad meets .* make this one a DTensor"):
            call()
    with torch.no_grad():
        assert torch.equal(whole(x * scale), full * 2)
    shared = nn.Parameter(distribute_tensor(torch.tensor(2.0), x.device_mesh, [Replicate()]))
    whole((x * shared).sum()).backward()
    assert math.isclose(shared.grad.item(), full.sum().item(), rel_tol=1e-6)
    for function in (
        lambda t: t.chunk(2)[0] * 2,
        lambda t: t.split(2, 1)[1],
        lambda t: t.unbind(0)[2],
        lambda t: (t * (t.detach() > 0)).cumprod(1),
    ):
        p, q = ragged(values() / 10).requires_grad_(), (values() / 10).requires_grad_()
        (whole(function(p)) ** 2).sum().backward()
        (function(q) ** 2).sum().backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-4, atol=1e-4)
    p = ragged(values() / 10).requires_grad_()
    with pytest.raises(ValueError, match=r"distribute it first .*or call full_tensor\(\) on"):  # other than the plain tensor's formula
        whole((p + 3).prod(0)).sum().backward()


def clipping(rank: int, world: int) -> None:
    """torch's clip_grad_norm_ and its optimizers over ragged and plain parameters together."""
    full = values() / 10
    for foreach in (None, True, False):
        for order in (2.0, 1.0, math.inf):
            p, q, b = nn.Parameter(ragged(full)), nn.Parameter(full.clone()), nn.Parameter(full.bfloat16())
            p.grad, q.grad, b.grad = ragged(full * 3), full * 2, full.bfloat16()
            norm = whole(nn.utils.clip_grad_norm_([p, q, b], 1.0, norm_type=order, foreach=foreach))
            expected = torch.stack([torch.linalg.vector_norm(g, order) for g in (full * 3, full * 2, full.bfloat16().float())])
            torch.testing.assert_close(norm, torch.linalg.vector_norm(expected, order), rtol=5e-3, atol=0)
            for grad, before in ((whole(p.grad), full * 3), (q.grad, full * 2)):
                torch.testing.assert_close(grad, before / norm)
    for fused in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):  # gradients that had to be gathered
        p, q = nn.Parameter(ragged(full)), nn.Parameter(full.clone())
        for t in (p, q):
            whole((t @ t.t()).sum()).backward()
            fused([t], lr=0.1, fused=True).step()  # type: ignore[operator]
        torch.testing.assert_close(whole(p), q.detach())
        assert torch.allclose(p.norm(), q.norm()) and not torch.allclose(p.sum(), q.sum() + 1)
    for foreach in (True, False):
        parameters = [nn.Parameter(t) for t in (ragged(full), full.clone(), torch_distribute(full.clone(), p.device_mesh, [Shard(0)]))]
        for t in parameters:
            t.grad = torch.ones_like(t)
        alone = nn.Parameter(full.clone())
        alone.grad = torch.ones_like(full)
        for params in (parameters, [alone]):
            torch.optim.AdamW(params, lr=0.1, foreach=foreach).step()
        assert all(torch.equal(whole(t), alone) for t in parameters)


def complex_views(rank: int, world: int) -> None:
    """view_as_real and view_as_complex are true views, so for-loop optimizers accept complex parameters.

    Copies of views notice every write.
    """
    full = torch.complex(values(), values().flip(0))
    x = ragged(full)
    parts = torch.view_as_real(x)
    assert isinstance(parts, RaggedDTensor) and torch.equal(whole(parts), torch.view_as_real(full))
    parts.mul_(2)
    assert torch.equal(whole(x), full * 2) and torch.equal(whole(torch.view_as_complex(parts)), full * 2)
    for make in (
        lambda params: torch.optim.AdamW(params, lr=0.1, foreach=False, amsgrad=True),
        lambda params: torch.optim.RMSprop(params, lr=0.1, foreach=False, momentum=0.5),
    ):
        p, q = nn.Parameter(ragged(full)), nn.Parameter(full.clone())
        p.grad, q.grad = ragged(full.sin()), full.sin()
        make([p]).step()  # type: ignore[no-untyped-call]
        make([q]).step()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(whole(p), q.detach())
    for view in (lambda t: t.view(-1)[3], lambda t: t.unsqueeze(0).transpose(1, 2), lambda t: t[0]):
        y = ragged(values())
        copy = view(y)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            y.to_local().mul_(2)
        with pytest.raises(RuntimeError, match="written since"):
            whole(copy)


def twice(rank: int, world: int) -> None:
    """Second derivatives, through every conversion to and from ragged tensors."""
    mesh, full = init_device_mesh("cpu", (3,)), values() / 10
    placements: list[Any] = [RaggedShard((0,), UNITS)]
    functions: list[Any] = [
        lambda t: whole(t),
        lambda t: whole(t.redistribute(placements=[RaggedShard((0, 1), (3, 1, 4))]) if hasattr(t, "redistribute") else t),
        lambda t: whole(t.redistribute(placements=[Shard(1)]) * 1.0 if hasattr(t, "redistribute") else t),
        lambda t: whole(RaggedDTensor.from_local(t.to_local(), mesh, placements, shape=t.shape) if hasattr(t, "to_local") else t),
        lambda t: whole(t.sin().t()),
        lambda t: whole(t.norm()),
        lambda t: whole(t.softmax(0)),
        lambda t: whole(t.exp().sum(1)),
    ]
    for function in functions:
        found = []
        for t in (ragged(full).requires_grad_(), full.clone().requires_grad_()):
            y: Any = (function(t) ** 3).sum()
            (first,) = torch.autograd.grad(y, t, create_graph=True)
            assert first.requires_grad, "the graph of the first derivative"
            (second,) = torch.autograd.grad((whole(first) ** 2).sum(), t)
            found.append((whole(first).detach(), whole(second)))
        for ours, plain in zip(*found, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def asynchronous(rank: int, world: int) -> None:
    """Write to a tensor that an asynchronous redistribution is reading.

    The write may have come in time or not, so the result is refused.
    """
    for write in (lambda t: t.mul_(2), lambda t: t.to_local().mul_(2), lambda t: torch._foreach_zero_([t])):
        x = ragged(values())
        for placements in ([RaggedShard((0, 1), (3, 1, 4))], [Replicate()], [Shard(1)]):
            early = x.redistribute(placements=placements, async_op=True)
            assert torch.equal(whole(early * 1.0), values()), "nothing was written"
            late = x.redistribute(placements=placements, async_op=True)
            with torch.no_grad():
                write(x)  # type: ignore[no-untyped-call]
            with pytest.raises(RuntimeError, match="was written while an asynchronous redistribution was reading it"):
                late * 1.0
            assert torch.equal(whole(early * 1.0), values()), "what had arrived is its own"
            with torch.no_grad():
                x.copy_(values())


def compiled(rank: int, world: int) -> None:
    """Compiled functions whose collectives a graph would not wait for, forward and backward."""
    full = torch.randn(64, 640, generator=torch.Generator().manual_seed(0))
    functions: list[Any] = [
        lambda t: (t.full_tensor() if isinstance(t, RaggedDTensor) else t) * 2,
        lambda t: t @ t.t(),
        lambda t: (t.redistribute(placements=[RaggedShard((0,), (3, 1, 4))]) if isinstance(t, RaggedDTensor) else t) + (t > 0).any(),
        lambda t: (t * 2).sin().sum(),
    ]
    for function in functions:
        torch._dynamo.reset()
        run = torch.compile(function, backend="aot_eager")
        for scale in (1.0, 2.0):
            p, q = ragged(full * scale).requires_grad_(), (full * scale).requires_grad_()
            found, expected = whole(run(p)), function(q)
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-2)
            found.sum().backward()
            expected.sum().backward()
            torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-3, atol=1e-2)


FOUND = [
    reductions,
    versions,
    refusals,
    state_dicts,
    dimensions,
    results,
    beside_plain,
    clipping,
    complex_views,
    asynchronous,
    compiled,
    twice,
]


@on_processes(3, timeout=200)
def test_reviewed_faults_are_fixed_or_refused_on_every_rank(rank: int, world: int) -> None:
    warnings.simplefilter("ignore", RaggedFallbackWarning)
    for function in FOUND:
        function(rank, world)


ODD = [((0,), (1.5, 2.5, 1)), ((0.7,), (1, 2, 1)), ((0,), "123"), (0, (1, 2, 1)), ((0,), ()), ((0,), (0, 0))]


@pytest.mark.parametrize(("dims", "units"), ODD)
def test_placements_of_anything_but_whole_numbers_are_refused(dims: Any, units: Any) -> None:
    with pytest.raises(ValueError, match="give"):
        RaggedShard(dims, units)
