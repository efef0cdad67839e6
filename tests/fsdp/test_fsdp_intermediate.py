"""Losses of tensors that a unit does not return: the gradients equal those of one process, or an error is raised; no rank dies."""

from __future__ import annotations

import copy
import dataclasses
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from tests.fsdp.test_fsdp_hooked import Plain, bare
from tests.fsdp.towers import filled
from tests.ranks import on_threads, run_gloo, run_threads
from vescale_ray import fully_shard
from vescale_ray.compat.fsdp import AllGather
from vescale_ray.fsdp.units.marks import kept_tensors


class _Kept(threading.local):
    """Tensors that the rank of this thread keeps outside of modules."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []


KEPT = _Kept()


@dataclasses.dataclass
class Features:
    hidden: torch.Tensor
    name: str = "features"


class Holder:
    """A plain object. Tree functions do not look into it."""

    __slots__ = ("out", "hidden")

    def __init__(self, out: torch.Tensor, hidden: torch.Tensor) -> None:
        self.out, self.hidden = out, hidden


class Scale(nn.Module):
    """A module that computes with its own parameter in its forward, and keeps the result."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.mixing = nn.Parameter(torch.eye(width) + 0.01)
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = ((x @ self.mixing) * self.weight).tanh()
        return x * self.weight


class Block(nn.Module):
    def __init__(self, width: int, way: str) -> None:
        super().__init__()
        self.a, self.norm, self.scale, self.b = nn.Linear(width, width), nn.LayerNorm(width), Scale(width), nn.Linear(width, width)
        self.way = way
        self.kept: Any = None
        if way == "forward hook":
            self.norm.register_forward_hook(lambda _module, _args, output: KEPT.tensors.append(output))

    def forward(self, x: Any) -> Any:
        x = x.out if isinstance(x, Holder) else x
        hidden = self.norm(self.a(x).tanh())
        kept: Any = {
            "attribute": hidden,
            "list": [hidden],
            "dict": {"deep": (1, [hidden])},
            "dataclass": Features(hidden),
        }.get(self.way)
        self.kept = kept
        if self.way == "outside":
            KEPT.tensors.append(hidden)
        out = self.b(self.scale(hidden))
        return Holder(out, hidden) if self.way == "object" else out

    def intermediate(self, output: Any) -> torch.Tensor:
        """The tensor from which the loss is computed."""
        if self.way == "inner attribute":
            return self.scale.kept
        if self.way == "object":
            return output.hidden
        if self.way in ("outside", "forward hook"):
            return KEPT.tensors[-1]
        kept = self.kept
        while not isinstance(kept, torch.Tensor):
            kept = kept.hidden if isinstance(kept, Features) else kept["deep"] if isinstance(kept, dict) else kept[-1]
        return kept


WAYS = ["attribute", "list", "dict", "dataclass", "inner attribute", "outside", "forward hook", "object"]


def losses(rank: int, world: int, width: int, options: dict[str, Any], recompute: bool, bound: float) -> None:
    for way in WAYS:
        for with_output in (False, True):
            plain: Any = filled(nn.Sequential(nn.Linear(width, width), Block(width, way)).double(), scale=width**-0.5)
            ours: Any = copy.deepcopy(plain) if not options else copy.deepcopy(plain).float()
            for layer in ours:
                fully_shard(layer, **options)
            fully_shard(ours, **options)
            x = torch.randn(2 * world, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            for model, given in ((ours, x[2 * rank : 2 * rank + 2]), (plain, x)):
                KEPT.tensors.clear()
                given = given if model is plain or not options else given.float()
                h = model[0](given) if model is plain else None
                if model is ours and not recompute:
                    out = ours(given)
                elif model is ours:
                    out = checkpoint(ours, given, use_reentrant=False)
                else:
                    out = plain[1](h)
                loss = model[1].intermediate(out).double().square().mean()
                if with_output:
                    loss = loss + (out.out if isinstance(out, Holder) else out).double().square().mean()
                loss.backward()
            for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), (way, name)
                if q.grad is not None:
                    torch.testing.assert_close(
                        p.grad.full_tensor().double(), q.grad, rtol=bound, atol=bound, msg=f"{way} {with_output} {name}"
                    )
            ours.zero_grad()


BF16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


@pytest.mark.usefixtures("usual_threshold")
@pytest.mark.parametrize(
    ("world", "width", "options", "recomputed", "bound"),
    [
        *((2, width, {}, False, 1e-9) for width in (6, 300)),
        *(pytest.param(2, width, {}, False, 1e-9, marks=pytest.mark.slow) for width in (200, 600)),
        (3, 90, BF16, False, 5e-2),
        (2, 64, {}, True, 1e-9),
    ],
)
def test_loss_of_a_kept_tensor_trains_as_one_process(
    world: int, width: int, options: dict[str, Any], recomputed: bool, bound: float
) -> None:
    run_threads(world, losses, width, options, recomputed, bound)


class Collecting(nn.Module):
    """A module that adds its results to the containers that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, state: dict[str, Any], seen: list[torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = self.inner(state["x"]).tanh()
        state["x"] = out
        state[f"h{len(seen)}"] = out
        seen.append(out)
        return out


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Collecting() for _ in range(3))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        state: dict[str, Any] = {"x": x, "scale": x * 0.5}
        seen: list[torch.Tensor] = []
        kept = state["scale"]
        for layer in self.layers:
            layer(state, seen)
        assert sorted(state) == ["h0", "h1", "h2", "scale", "x"] and len(seen) == 3 and state["scale"] is kept
        return seen


def collected(rank: int, world: int, options: dict[str, Any], bound: float) -> None:
    plain = filled(Chain())
    ours = copy.deepcopy(plain)
    for layer in ours.layers:
        fully_shard(layer, **options)
    fully_shard(ours, **options)
    x = torch.randn(2 * world, 8, generator=torch.Generator().manual_seed(1))
    for model, given in ((ours, x[2 * rank : 2 * rank + 2]), (plain, x)):
        sum(h.float().square().mean() for h in model(given.clone().requires_grad_())).backward()  # type: ignore[union-attr]
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor().float(), q.grad, rtol=bound, atol=bound)


@pytest.mark.usefixtures("usual_threshold")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_tensors_that_a_unit_adds_to_its_inputs_have_gradients(dtype: torch.dtype | None) -> None:
    options = {} if dtype is None else {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)}
    run_threads(2, collected, options, 1e-5 if dtype is None else 5e-2)


def test_attribute_search_finds_a_kept_tensor_cheaply_and_once() -> None:
    class Odd(dict[str, Any]):
        def values(self) -> Any:
            raise AssertionError("not to be looked into")

    @dataclasses.dataclass
    class Unset:
        late: int = dataclasses.field(init=False)

    module: Any = nn.Module()
    cyclic: dict[str, Any] = {}
    cyclic["me"] = cyclic
    made = torch.ones(3, requires_grad=True) * 2
    module.cyclic, module.odd, module.unset, module.config = cyclic, Odd(a=1), Unset(), {str(i): i for i in range(100_000)}
    module.history = [torch.ones(1)] * 100_000 + [made]
    assert [id(t) for t in kept_tensors(module)] == [id(made)]
    assert kept_tensors(module) == [], "a tensor is marked once"


class Hidden(nn.Module):
    """A module that keeps a tensor where no unit can see it.

    The tensor is computed with a parameter that is used outside of its own module's forward.
    """

    def __init__(self, width: int, use: str) -> None:
        super().__init__()
        self.inner, self.use = nn.Linear(width, width), use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.inner.weight
        KEPT.tensors.append(
            {"product": lambda: F.linear(x, weight), "elementwise": lambda: x * weight[0], "read": lambda: weight}[self.use]()
        )
        return self.inner(x)


@pytest.mark.usefixtures("usual_threshold")
@pytest.mark.parametrize("width", [6, pytest.param(200, marks=pytest.mark.slow), 300])
@on_threads(2)
def test_use_of_an_unseen_tensor_names_its_unit_and_is_recovered(rank: int, world: int, width: int) -> None:
    for use in ("product", "elementwise", "read"):
        KEPT.tensors.clear()
        plain: Any = filled(nn.Sequential(nn.Linear(width, width), Hidden(width, use), nn.Linear(width, 1)), scale=width**-0.5)
        ours: Any = copy.deepcopy(plain)
        for layer in ours:
            fully_shard(layer)
        fully_shard(ours)
        x = torch.randn(2, width, generator=torch.Generator().manual_seed(1))
        ours(x)
        with pytest.raises(RuntimeError, match=r"the parameters of unit '1' \(1\.inner\.weight, 1\.inner\.bias\) are resharded, but"):
            KEPT.tensors[-1].square().sum().backward() if use != "read" else KEPT.tensors[-1].sum().item()
        ours.reset_iter_state()
        for model in (ours, plain):
            model.zero_grad()
            model(x).square().mean().backward()
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-5, atol=1e-6)


class Sine(nn.Module):
    """Returns a plain object that holds a function of its own weight, which no module of torch has computed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Holder:
        return Holder(torch.tanh(self.linear(x)), self.linear.weight.sin().sum())


class AfterSine(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.sine, self.last = Sine(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = self.sine(x)
        out: torch.Tensor = self.last(held.out).sum() + held.hidden
        return out


class ThreadGather(AllGather):
    """A user's all-gather, which a thread of the process group runs later."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


def read_while_it_is_gathered(rank: int, world: int, by: str) -> list[str]:
    """Backward reads the weight of ``sine`` while a prefetch gathers it. Another rank's part may not have arrived yet."""
    told = []
    for width in (6, 200, 600):
        model: Any = AfterSine(width)
        if by == "hooks":
            model.sine.linear.weight = nn.Parameter(Plain(model.sine.linear.weight.detach()))
        for unit in (model.sine, model.last, model):
            fully_shard(unit)
            if by == "a custom all-gather":
                unit.set_custom_all_gather(ThreadGather())
        try:
            model(torch.ones(4, width)).backward()
            told.append("no error")
        except RuntimeError as error:
            told.append(str(error))
        dist.barrier()  # a rank may still wait for a gather of the other
    return told


@pytest.mark.parametrize("by", ["the unit", "hooks", "a custom all-gather"])
def test_parameters_that_are_being_gathered_are_not_read(by: str) -> None:
    for told in run_gloo(2, read_while_it_is_gathered, by):
        assert all(text.startswith("the parameters of unit 'sine' (sine.linear.weight") for text in told), told


def trains_after_a_refusal(rank: int, world: int) -> None:
    """A user's all-gather in its own memory: a read of resharded parameters raises, and the next steps have the right gradients."""
    torch.manual_seed(0)
    plain: Any = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    ours: Any = copy.deepcopy(plain)
    for unit in (*ours, ours):
        fully_shard(unit)
        unit.set_custom_all_gather(ThreadGather())
    x = torch.ones(2, 6)
    for step in range(3):
        for model in (ours, plain):
            model.zero_grad()
            model(x).square().sum().backward()
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)
        kept = []
        handle = ours[0].register_forward_pre_hook(lambda module, _, kept=kept: kept.append(module.weight))
        ours(x)
        handle.remove()
        with pytest.raises(RuntimeError, match=r"the parameters of unit '0' \(0\.weight, 0\.bias\) are resharded"):
            kept[0].sum()
        if step == 1:
            ours[0].set_custom_all_gather(None)


def test_resharded_memory_of_the_users_is_not_read() -> None:
    run_gloo(2, trains_after_a_refusal)


def kept_as_arrays(rank: int, world: int, width: int, hooked: bool) -> None:
    plain: Any = filled(nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(3))), scale=width**-0.5)
    ours: Any = copy.deepcopy(plain)
    for layer in ours:
        if hooked:
            layer.weight = nn.Parameter(Plain(layer.weight.detach()))
        fully_shard(layer)
    fully_shard(ours)
    kept: list[np.ndarray] = []
    for layer in ours:
        layer.register_forward_pre_hook(lambda module, _: kept.append(module.weight.detach()[1:].numpy()))
    x = torch.randn(2, width, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        kept.clear()
        for model in (ours, plain):
            model.zero_grad()
            model(x).square().sum().backward()
        for array, p, q in zip(kept, ours.parameters(), plain.parameters(), strict=True):
            assert np.array_equal(array, q.detach()[1:].numpy())
            found, wanted = (bare(p.grad), q.grad.chunk(world)[rank]) if hooked else (p.grad.full_tensor(), q.grad)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("width", "hooked"), [(6, False), (300, False), (300, True)])
def test_a_numpy_array_of_a_gathered_parameter_keeps_its_memory(width: int, hooked: bool) -> None:
    run_gloo(2, kept_as_arrays, width, hooked)


def shared_memory(rank: int, world: int, width: int) -> None:
    model: Any = fully_shard(nn.Linear(width, width))
    model.unshard()
    model.weight.data.share_memory_()
    with pytest.raises(RuntimeError, match=r"gathered parameters were put in shared memory .*: share a clone\(\)"):
        model.reshard()
        model.unshard()
    model = fully_shard(nn.Linear(width, width))
    model.unshard()
    shared = model.weight.detach().clone().share_memory_()
    model.reshard()
    model.unshard()
    assert torch.equal(shared, model.weight.detach())


@pytest.mark.parametrize("width", [6, 300])
def test_gathered_parameters_in_shared_memory_are_refused(width: int) -> None:
    run_gloo(2, shared_memory, width)
