"""Third-party optimizers train on our parameters as on those of torch's ``fully_shard``, and as in one process.

The optimizers here make the same DTensor calls as torchao's low-bit Adam (states from ``DTensor.from_local``, a compiled update of
``p.detach()``), pytorch_optimizer's Scion (whole matrices, with in-place changes of the results), and dion's Muon (equal shards that the
optimizer exchanges itself). If the packages are installed, they are tested, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.ranks import on_processes, run_gloo
from vescale_ray.dtensor import RaggedDTensor
from vescale_ray.fsdp import stand_in_for_torch

WIDTH, STEPS = 8, 2
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def newton_schulz(matrix: Any) -> Any:
    x = matrix / (torch.linalg.vector_norm(matrix) + 1e-7)
    for _ in range(3):
        a = x @ x.mT
        x = 1.5 * x - 0.5 * a @ x
    return x


class Steps(torch.optim.Optimizer):
    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.update([p for p in group["params"] if p.grad is not None], group["lr"])

    def update(self, params: list[Any], lr: float) -> None:
        for p in params:
            self.one(p, p.grad, lr)

    def one(self, p: Any, grad: Any, lr: float) -> None:
        raise NotImplementedError


def adam(p: Tensor, grad: Tensor, mean: Tensor, square: Tensor, lr: float) -> None:
    new_mean, new_square = mean.float().lerp(grad, 0.1), square.float().lerp(grad.square(), 0.05)
    mean.copy_(new_mean)
    square.copy_(new_square)
    p.copy_(p - lr * new_mean / (new_square.sqrt() + 1e-3))


class StatesFromLocal(Steps):
    """Like torchao's: the optimizer makes its states as DTensors, and the update is compiled."""

    def one(self, p: Any, grad: Any, lr: float) -> None:
        state = self.state[p]
        for name in ("mean", "square"):
            if name not in state:
                state[name] = self.buffer(p)
        torch.compile(adam, backend="aot_eager", fullgraph=True, dynamic=False)(p.detach(), grad, state["mean"], state["square"], lr)

    @staticmethod
    def buffer(p: Any) -> Tensor:
        if not isinstance(p, DTensor):
            return torch.zeros_like(p)
        local = torch.zeros_like(p.to_local(), dtype=torch.bfloat16)
        made = DTensor.from_local(local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
        return made.to(p.device).to(p.dtype)


class WholeInPlace(Steps):
    """Like Scion: the update of a whole matrix is scaled in place and added to the parameter."""

    def one(self, p: Any, grad: Any, lr: float) -> None:
        momentum = self.state[p].setdefault("momentum", torch.zeros_like(grad)).lerp_(grad, 0.5)
        update = newton_schulz(momentum.reshape(len(momentum), -1)).view(momentum.shape) if p.ndim > 1 else torch.sign(momentum)
        update *= 0.2
        p.add_(update, alpha=-lr)


class ThereAndBack(Steps):
    """Gathers, computes, and redistributes the update to the parameter's placements."""

    def one(self, p: Any, grad: Any, lr: float) -> None:
        if not isinstance(grad, DTensor):
            p.add_(newton_schulz(grad) if p.ndim > 1 else grad, alpha=-lr)
            return
        whole = grad.redistribute(placements=[Replicate()])
        update = newton_schulz(whole) if p.ndim > 1 else whole * 1
        p.add_(update.redistribute(placements=p.placements), alpha=-lr)


class PlainAndBack(Steps):
    """The same on plain tensors, with ``full_tensor()`` and ``DTensor.from_local``."""

    def one(self, p: Any, grad: Any, lr: float) -> None:
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        update = newton_schulz(whole) if p.ndim > 1 else whole
        if isinstance(p, DTensor):
            update = DTensor.from_local(update, p.device_mesh, [Replicate()]).redistribute(placements=p.placements)
        p.add_(update, alpha=-lr)


class ThroughRows(Steps):
    """Each rank gets equal rows of a gradient, for any placements of the parameter, and returns them by ``from_local``."""

    def one(self, p: Any, grad: Any, lr: float) -> None:
        if not isinstance(p, DTensor):
            p.sub_(torch.sign(grad) * grad.abs().sqrt() * lr)
            return
        rows = grad.redistribute(placements=[Shard(0)])
        local = rows.to_local()
        local = torch.sign(local) * local.abs().sqrt() * lr
        update = DTensor.from_local(local, p.device_mesh, [Shard(0)], run_check=False, shape=p.shape, stride=p.stride())
        p.sub_(update.redistribute(placements=p.placements))


def momentum_step(grads: list[Tensor], momentums: list[Tensor], decay: Tensor) -> list[Tensor]:
    torch._foreach_mul_(momentums, decay)
    torch._foreach_add_(momentums, grads)
    return list(torch._foreach_add(grads, torch._foreach_mul(momentums, decay)))


def weight_step(params: list[Tensor], updates: list[Tensor], lr: Tensor) -> None:
    torch._foreach_mul_(params, 1 - 0.1 * lr)
    torch._foreach_sub_(params, torch._foreach_mul(updates, lr))


class ExchangedShards(Steps):
    """Like dion's Muon: each rank assembles one matrix from equal ``Shard(0)`` parts by its own all-to-all, and sends it back.

    The last batch of matrices is filled up. Compiled functions write to the lists of local parts, which are views of one buffer here.
    """

    def update(self, params: list[Any], lr: float) -> None:
        compiled = [torch.compile(f, backend="aot_eager", fullgraph=True) for f in (momentum_step, weight_step)]
        before, after = cast(list[Callable[..., Any]], compiled)
        decay, rate = torch.tensor(0.9), torch.tensor(lr)
        for p in (p for p in params if p.ndim < 2):
            p.sub_(p.grad * lr)
        matrices = [p for p in params if p.ndim > 1]
        momentums = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in matrices]
        if not isinstance(matrices[0], DTensor):
            updates = before([p.grad for p in matrices], momentums, decay)
            after([p.data for p in matrices], [newton_schulz(update) for update in updates], rate)
            return
        world, rank, group = dist.get_world_size(), dist.get_rank(), self.param_groups[0]["params"][0].device_mesh.get_group()
        for start in range(0, len(matrices), world):
            batch = slice(start, start + world)
            parts = [[t.to_local() for t in filled_up(ts, world)] for ts in (matrices[batch], [p.grad for p in matrices[batch]])]
            held = [t.to_local() for t in filled_up(momentums[batch], world)]
            assert all(p.placements[0].dim == 0 and p.device_mesh.get_group(0) == group for p in matrices[batch])
            given = before(parts[1], held, decay)
            got = [torch.empty_like(given[rank]) for _ in range(world)]
            exchange(got, given)
            whole = [part.contiguous() for part in newton_schulz(torch.cat(got)).tensor_split(world)]
            back = [torch.empty_like(part) for part in given]
            exchange(back, whole)
            after(parts[0], back, rate)


def filled_up(tensors: list[Tensor], world: int) -> list[Tensor]:
    return tensors + [torch.zeros_like(tensors[0]) for _ in range(world - len(tensors))]


def exchange(out: list[Tensor], given: list[Tensor]) -> None:
    """``dist.all_to_all`` of lists, which gloo lacks."""
    joined = torch.cat([t.reshape(-1) for t in given])
    landed = torch.empty(sum(t.numel() for t in out))
    dist.all_to_all_single(landed, joined, [t.numel() for t in out], [t.numel() for t in given])
    for t, part in zip(out, landed.split([t.numel() for t in out]), strict=True):
        t.copy_(part.view(t.shape))


def losses(make: Make, how: str, rank: int, world: int, width: int = WIDTH) -> list[float]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    if how != "one process":
        torch_fsdp.fully_shard(model)
        assert isinstance(next(model.parameters()), RaggedDTensor) == (how == "ours"), how
    optimizer, found = make(list(model.parameters())), []
    for step in range(STEPS + 1):
        x = torch.randn(4 * world, width, generator=torch.Generator().manual_seed(step))
        x = x if how == "one process" else x.chunk(world)[rank]
        loss = (model(x) - 1).square().mean()
        total = loss.detach().clone()
        if how != "one process":
            dist.all_reduce(total)
            total /= world
        found.append(total.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def compare(rank: int, world: int, make: Make, names: tuple[str, ...], width: int = WIDTH) -> None:
    expected = {how: losses(make, how, rank, world, width) for how in ("one process", "torch's")}
    for name in names:
        with stand_in_for_torch(plain_shards=name == "plain shards"):
            found = losses(make, name, rank, world, width)
        for how, values in expected.items():
            torch.testing.assert_close(found, values, rtol=2e-4, atol=1e-5, msg=f"{make}, {name}, {how}: ".__add__)
    assert len(set(expected["one process"])) == STEPS + 1, "it trains"


@on_processes(2, timeout=120)
def test_third_party_style_optimizers_train_as_over_fsdp2(rank: int, world: int) -> None:
    for kind in (StatesFromLocal, WholeInPlace, ThereAndBack, PlainAndBack, ThroughRows, ExchangedShards):
        compare(rank, world, kind, ("plain shards",) if kind is ExchangedShards else ("ours", "plain shards"))


def packaged(rank: int, world: int, module: str, name: str, width: int) -> None:
    import importlib

    make = getattr(importlib.import_module(module), name)
    compare(rank, world, lambda params: make(params, lr=1e-2), ("ours", "plain shards"), width)


@pytest.mark.parametrize(
    ("module", "name", "width"),
    [("torchao.optim", "AdamW8bit", 96), ("pytorch_optimizer", "SCION", WIDTH), ("pytorch_optimizer", "SCIONLight", WIDTH)],
)
def test_installed_optimizer_packages_train_as_over_fsdp2(module: str, name: str, width: int) -> None:
    pytest.importorskip(module)
    run_gloo(2, packaged, module, name, width, timeout=300)
