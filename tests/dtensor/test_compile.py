"""``torch.compile`` does not change the results of functions over ragged tensors.

The cases include pending reductions, changing shapes and empty ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.convert_frame import register_bytecode_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torchs_distribute_tensor
from torch.utils._pytree import tree_map

from tests.dtensor.layouts import whole
from tests.ranks import on_processes, on_threads
from vescale_ray import fully_shard
from vescale_ray.dtensor import RaggedDTensor, distribute_tensor
from vescale_ray.dtensor.placement import RaggedShard
from vescale_ray.dtensor.spec import norm_partial

BACKEND = "aot_eager"
CUT: list[Placement] = [RaggedShard((0,), (1, 2))]


def full(seed: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (6, 4)), generator=torch.Generator().manual_seed(seed)) + 0.5


def ragged(tensor: Tensor, mesh: DeviceMesh, placements: list[Placement] | None = None) -> DTensor:
    return distribute_tensor(tensor, mesh, placements or CUT, src_data_rank=None)


def close(found: Any, expected: Any, what: object) -> None:
    torch.testing.assert_close(tree_map(whole, found), expected, rtol=1e-4, atol=1e-4, msg=lambda text: f"{what}: {text}")


norm = torch.linalg.vector_norm

JOINS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "stack norms": lambda a, b: torch.stack([norm(a), norm(b)]),
    "stack sums": lambda a, b: torch.stack([a.sum(), b.sum()], -1),
    "stack 1-norms": lambda a, b: torch.stack([norm(a, 1), norm(b, 1)]),
    "stack maxima": lambda a, b: torch.stack([a.amax(), b.amax()]),
    "stack of two kinds": lambda a, b: torch.stack([a.sum(), norm(b), a.mean(), b.amin(), a.prod()]),
    "cat": lambda a, b: torch.cat([a.sum((0, 1), keepdim=True), b.sum((0, 1), keepdim=True)]),
    "add": lambda a, b: a.sum() + b.sum(),
    "add norms": lambda a, b: norm(a) + norm(b),
    "sub": lambda a, b: a.mean() - b.mean(),
    "mul": lambda a, b: a.sum() * b.sum(),
    "div": lambda a, b: a.sum() / b.sum(),
    "maximum": lambda a, b: torch.maximum(a.sum(), b.sum()),
    "where": lambda a, b: torch.where(a.sum() > b.sum(), a.sum(), b.sum()),
    "addcmul": lambda a, b: torch.addcmul(a.sum(), a.sum(), b.sum(), value=2),
    "addcdiv": lambda a, b: torch.addcdiv(a.sum(), a.sum(), b.sum()),
    "lerp": lambda a, b: torch.lerp(a.sum(), b.sum(), 0.3),
    "foreach add": lambda a, b: torch._foreach_add([a.sum(), norm(b)], [b.sum(), norm(a)]),
    "foreach mul": lambda a, b: torch._foreach_mul([a.sum(), norm(b)], [b.sum(), norm(a)]),
    "foreach by a number": lambda a, b: torch._foreach_mul([a.sum(), norm(b)], -2.0),
    "foreach norm": lambda a, b: torch.stack(torch._foreach_norm([a, b])),  # type: ignore[arg-type]
    "norm of norms": lambda a, b: norm(torch.stack(torch._foreach_norm([a, b]))),  # type: ignore[arg-type]
    "sum of norms": lambda a, b: torch.stack([norm(a), norm(b)]).sum(),
    "mean of sums": lambda a, b: torch.stack([a.sum(), b.sum()]).mean(),
    "seen otherwise": lambda a, b: torch.stack([norm(a), norm(b)]).view(1, 2).expand(3, 2).t()[1],
    "in place": lambda a, b: a.sum().mul_(2).add_(norm(b)),
    "out": lambda a, b: torch.add(a.sum(), b.sum(), out=torch.zeros_like(a.sum())),
    "with the tensors": lambda a, b: a * norm(b) + b / torch.stack([a.sum(), b.sum()]).sum(),
}


@on_threads(2)
def test_pending_torch_dtensors_join_ragged_tensors(rank: int, world: int) -> None:
    """Pending values of torch's DTensors join ours, for example norms of parameters of which only some have ragged placements."""
    mesh = init_device_mesh("cpu", (world,))
    a, b, refused = full(1), full(2) * 3, []
    for name, function in JOINS.items():
        expected = tree_map(Tensor.float, function(a.double(), b.double()))
        for first in (True, False):
            ours = ragged(a if first else b, mesh)
            theirs = torchs_distribute_tensor(b if first else a, mesh, [Shard(0)], src_data_rank=None)
            try:
                found = function(ours, theirs) if first else function(theirs, ours)
            except (NotImplementedError, RuntimeError):
                refused.append(name)  # torch has no rule for it
                continue
            close(found, expected, (name, first))
    assert len(refused) <= len(JOINS) // 3, refused
    total = ragged(a, mesh).sum()
    total.add_(torchs_distribute_tensor(b, mesh, [Shard(0)], src_data_rank=None).sum())
    close(total, a.sum() + b.sum(), "written")


OF_EACH_KIND = ("stack of two kinds", "add", "foreach mul", "norm of norms", "in place", "with the tensors")
"""Joins that ``make test`` compiles."""


@pytest.mark.parametrize("dimensions", [1, 2])
@pytest.mark.parametrize(
    "compiled", [OF_EACH_KIND, pytest.param(tuple(JOINS), marks=pytest.mark.slow)], ids=["some compiled", "all compiled"]
)
@on_processes(2, timeout=250)
def test_pending_reductions_that_meet_are_reduced_once(rank: int, world: int, dimensions: int, compiled: Sequence[str]) -> None:
    a, b = full(1), full(2) * 3
    mesh = init_device_mesh("cpu", (world,) if dimensions == 1 else (1, world))
    placements = CUT if dimensions == 1 else [RaggedShard((0,), (1,)), Shard(1)]

    def joins(names: Sequence[str]) -> Callable[[Tensor, Tensor], dict[str, Any]]:
        return lambda a, b: {name: JOINS[name](a, b) for name in names}

    for how in (joins(tuple(JOINS)), torch.compile(joins(compiled), backend=BACKEND)):
        found = how(ragged(a, mesh, placements), ragged(b, mesh, placements))
        for name, result in found.items():
            close(result, tree_map(Tensor.float, JOINS[name](a.double(), b.double())), (name, placements, how))


@on_processes(4, timeout=250)
def test_compiled_function_moves_elements_over_two_dimensions(rank: int, world: int) -> None:
    """A reduction of parts of sections needs elements of all ranks. torch reads the mesh's coordinates while it traces."""
    mesh, a = init_device_mesh("cpu", (2, 2)), full(1)
    placements: list[Placement] = [RaggedShard((0,), (1, 2)), Shard(0)]

    def function(t: Tensor) -> list[Tensor]:
        return [t.sum(0), torch.cat([t.sum(1), t.sum(1)]), t @ t.t()]

    close(torch.compile(function, backend=BACKEND)(ragged(a, mesh, placements)), function(a), "moved")


@on_processes(2, timeout=120)
def test_pending_argument_joins_is_written_and_has_gradients(rank: int, world: int) -> None:
    """A pending tensor enters a compiled function, is written in it, and is differentiated."""
    mesh = init_device_mesh("cpu", (world,))
    a, b = full(1), full(2)
    for make in (lambda t: t.sum(), lambda t: norm(t), lambda t: t.amax()):
        torch._dynamo.reset()
        functions: list[Any] = [lambda x, y: [torch.stack([x, y]), x * 2 + y], lambda x, y: x.mul_(y)]
        for function in functions[: 1 if make(ragged(a, mesh)).placements == (norm_partial(2),) else 2]:  # a write makes it no norm
            args = [make(ragged(t, mesh)) for t in (a, b)]
            close(torch.compile(function, backend=BACKEND)(*args), function(make(a), make(b)), function)
            written = make(a)
            function(written, make(b))
            close(args[0], written, "the argument afterwards")
    for loss in (lambda x, y: torch.stack([norm(x), norm(y)]).sum(), lambda x, y: (x.sum() + y.sum()) * x.mean()):
        torch._dynamo.reset()
        ours = [ragged(t, mesh).requires_grad_() for t in (a, b)]
        theirs = [t.clone().requires_grad_() for t in (a, b)]
        whole(torch.compile(loss, backend=BACKEND)(*ours)).backward()
        loss(*theirs).backward()  # type: ignore[no-untyped-call]
        close([t.grad for t in ours], [t.grad for t in theirs], loss)


@on_processes(2)
def test_loss_outside_a_compiled_function_reaches_parameters(rank: int, world: int) -> None:
    """The gradient of ``sum()`` is whole on every rank, and the compiled function's result is ragged."""
    mesh, a, b = init_device_mesh("cpu", (world,)), full(1), full(2)
    ours = [ragged(t, mesh).requires_grad_() for t in (a, b)]
    whole((torch.compile(lambda x, y: x * y, backend=BACKEND)(*ours)).sum()).backward()
    close([t.grad for t in ours], [b, a], "gradients")


@on_processes(2)
def test_write_to_view_of_a_pending_tensor_reaches_it_or_raises(rank: int, world: int) -> None:
    mesh, a = init_device_mesh("cpu", (world,)), full(1)
    for make in (lambda t: t.sum(), lambda t: t.amax(), lambda t: t.mean(), lambda t: t.prod()):
        ours, theirs = torch.stack([make(ragged(a, mesh)), make(ragged(a * 2, mesh))]), torch.stack([make(a), make(a * 2)])
        for tensor in (ours, theirs):
            one, two = tensor.unbind()
            one.mul_(-3)
            tensor.view(2, 1)[1].add_(tensor[0])
            two.sub_(1)
        close(ours, theirs, "written through views")
    length = norm(ragged(a, mesh))
    with pytest.raises(RuntimeError, match="would write to a view of a norm whose reduction is pending"):
        length.view(1).add_(1)
    close(length, norm(a), "unchanged")


@on_processes(2, timeout=120)
def test_a_compiled_clip_grad_norm_clips_as_much_as_the_other(rank: int, world: int) -> None:
    """The compiled function breaks at the generator ``model.parameters()``, and torch then compiles each Python frame that it calls."""
    files: list[str] = []
    handle = register_bytecode_hook(lambda code, _: files.append(code.co_filename))
    torch._dynamo.reset()
    for compiled in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(3, 3))
        fully_shard(model)
        (model(torch.ones(5, 4) * 30) ** 2).sum().backward()
        grads = [whole(p.grad) for p in model.parameters()]
        clip: Any = torch.compile(nn.utils.clip_grad_norm_, backend=BACKEND) if compiled else nn.utils.clip_grad_norm_
        expected = norm(torch.cat([grad.double().view(-1) for grad in grads])).float()
        close(clip(model.parameters(), 1.0), expected, compiled)
        close([p.grad for p in model.parameters()], [grad / expected for grad in grads], compiled)
    handle.remove()
    assert not [file for file in files if "/vescale_ray/" in file], "ours run as they are; torch 2.15 compiles no frame here at all"


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow)])
@on_processes(2, timeout=300)
def test_function_compiles_over_tensors_of_several_shapes(rank: int, world: int, dynamic: bool | None) -> None:
    mesh = init_device_mesh("cpu", (world,))
    functions: list[Any] = [
        lambda t: (t * 2).sin(),
        lambda t: torch.stack([norm(t), t.sum()]),
        lambda t: t.view(-1) * norm(t),
        lambda t: t @ t.t(),
        lambda t: whole(t) * 2,
        lambda t: t.redistribute(placements=[RaggedShard((0,), (2, 1))]) + 1 if isinstance(t, DTensor) else t + 1,
        lambda t: t.redistribute(placements=[Shard(1)]) + 1 if isinstance(t, DTensor) else t + 1,
    ]
    run: Any = torch.compile(lambda t: [function(t) for function in functions], backend=BACKEND, dynamic=dynamic)
    for rows in (3, 6, 3):
        close(run(ragged(full(rows, rows, 4), mesh)), [function(full(rows, rows, 4)) for function in functions], (dynamic, rows))
    torch._dynamo.reset()
    run = torch.compile(functions[0], backend=BACKEND, dynamic=dynamic)
    # Unless `dynamic` already did, the second shape makes torch compile for any shape. The next shape must not run that code.
    with torch._dynamo.config.patch(recompile_limit=3):
        for rows in range(3, 18, 3):  # more shapes than torch compiles a function for
            close(run(ragged(full(rows, rows, 2), mesh)), functions[0](full(rows, rows, 2)), rows)
    torch._dynamo.reset()
    several = torch.compile(lambda ts: [t * norm(t) for t in ts], backend=BACKEND, dynamic=True)
    for k in (1, 2):
        shapes = [(3 * k, 4), (6,), (k, 3, 2), (9, k)]
        placements = [CUT, CUT, [RaggedShard((0, 1), (1, 2))], CUT]
        tensors = [full(i, *s) for i, s in enumerate(shapes)]
        found = several([ragged(t, mesh, p) for t, p in zip(tensors, placements, strict=True)])  # type: ignore[arg-type]
        close(found, [t * norm(t) for t in tensors], shapes)


@on_processes(2, timeout=120)
def test_pending_norms_of_any_order_pass_a_graph_break(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    t = full(3)
    for order in (1, 3, 0.5, float("inf"), 0):
        torch._dynamo.reset()

        def function(t: Tensor, order: float = order) -> list[Tensor]:
            pending = norm(t, order)
            torch._dynamo.graph_break()
            return [pending * 2, torch.stack([pending, t.sum()])]

        close(torch.compile(function, backend=BACKEND)(ragged(t, mesh)), function(t), order)


@on_processes(2, timeout=120)
def test_code_compiled_for_one_shape_never_runs_on_another(rank: int, world: int) -> None:
    """Two tensors may have equal parts on a rank, or none. The code compiled for one must not run for the other."""
    mesh = init_device_mesh("cpu", (world,))

    def function(t: DTensor) -> list[Tensor]:
        return [t * 2, t.sum() / t.numel(), t.redistribute(placements=[Replicate()]) * 2]

    for placements in ([RaggedShard((0,), (1, 0))], [RaggedShard((0,), (0, 1))]):
        torch._dynamo.reset()
        several = torch.compile(function, backend=BACKEND, dynamic=False)
        for rows in (3, 4):
            found = several(ragged(full(rows, rows, 2), mesh, placements))  # type: ignore[arg-type]
            expected = [full(rows, rows, 2) * 2, full(rows, rows, 2).mean(), full(rows, rows, 2) * 2]
            assert [f.shape for f in found] == [e.shape for e in expected], (rows, placements)
            close(found, expected, (rows, placements))
    torch._dynamo.reset()
    run = torch.compile(lambda t: t * 2, backend=BACKEND, dynamic=False)
    for rows in (3, 4):  # rank 0 has two rows of both
        found = run(ragged(full(rows, rows, 2), mesh, [RaggedShard((0,), (1, 0))]).redistribute(placements=[Shard(0)]))
        assert found.shape == (rows, 2)
        close(found, full(rows, rows, 2) * 2, rows)


@on_processes(2, timeout=120)
def test_parameters_with_plain_shards_enter_compiled_functions(rank: int, world: int) -> None:
    """Parameters with plain Shard placements are views of one buffer. All but the first begin inside it."""
    seen = {}
    for how in ("compiled", "eager", "torch's"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4), nn.LayerNorm(4))
        torchs_fully_shard(model) if how == "torch's" else fully_shard(model, shard_placement_fn=lambda p: Shard(0))
        assert not any(isinstance(p, RaggedDTensor) for p in model.parameters())
        clip: Any = nn.utils.clip_grad_norm_
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step: Any = optimizer.step
        if how == "compiled":
            clip, step = torch.compile(clip, backend=BACKEND), torch.compile(step, backend=BACKEND)
        for i in range(3):
            model(torch.ones(2, 4) * (rank + i)).square().sum().backward()
            clip(model.parameters(), 1.0)
            step()
            optimizer.zero_grad()
        seen[how] = [whole(p).detach() for p in model.parameters()]
        if how == "compiled":
            double = torch.compile(lambda ts: [t * 2 for t in ts], backend=BACKEND)
            close(double([p.detach() for p in model.parameters()]), [p * 2 for p in seen[how]], how)
    close(seen["compiled"], seen["torch's"], "compiled")
    close(seen["eager"], seen["torch's"], "eager")
