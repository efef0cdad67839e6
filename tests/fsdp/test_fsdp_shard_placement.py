"""``shard_placement_fn``: parameters with a plain ``Shard`` placement, alone and next to ragged ones, against torch's fully_shard."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard

from tests.fsdp.towers import filled, grads, same
from tests.fsdp.transformer import apart, full, part, values
from tests.ranks import on_processes, on_threads, run_gloo, run_threads
from vescale_ray import RaggedDTensor, checkpoint, explain, fully_shard
from vescale_ray.optim import clip_grad_norm_

Choice = Callable[[nn.Parameter], Shard | None]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 24), nn.Linear(24, 12, bias=False)
        self.experts = nn.Parameter(torch.randn(4, 12, 8) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(self.up(self.norm(x)).tanh())
        return x + torch.einsum("bi,eij->bj", x, self.experts).repeat(1, 2)[:, :12]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(step: int) -> torch.Tensor:
    return torch.randn(12, 12, generator=torch.Generator().manual_seed(step))


def largest(param: nn.Parameter) -> Shard:
    return Shard(max(range(param.dim()), key=lambda d: (param.shape[d], -d)))


def last(param: nn.Parameter) -> Shard:
    return Shard(-1)


def first(param: nn.Parameter) -> Shard:
    return Shard(0)


def matrices_only(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.dim() == 2 else None


CHOICES: dict[str, Choice] = {"largest": largest, "last": last, "first": first, "matrices only": matrices_only}


def shard(model: Any, how: Callable[..., Any], **options: Any) -> Any:
    for layer in model.layers:
        how(layer, **options)
    return how(model, **options)


def trains_as_torchs(rank: int, world: int, choice: str, shape: tuple[int, ...], dtype: str, foreach: bool) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    precision = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
    base = filled(Model())
    pick = CHOICES[choice]
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": precision}
    ours = shard(copy.deepcopy(base), fully_shard, shard_placement_fn=pick, **options)
    theirs = shard(copy.deepcopy(base), torch_fully_shard, shard_placement_fn=lambda p: pick(p) or Shard(0), **options)
    for p, q, original in zip(ours.parameters(), theirs.parameters(), base.parameters(), strict=True):
        assert isinstance(p, DTensor)
        if pick(original) is None:
            assert isinstance(p, RaggedDTensor)
            continue
        assert type(p) is DTensor and p.placements == q.placements and p.device_mesh == q.device_mesh
        assert torch.equal(p.to_local(), q.to_local()) and p.stride() == q.stride()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=foreach) for m in (ours, theirs)]
    for step in range(2):
        for model in (ours, theirs):
            for micro in range(2):
                model.set_requires_gradient_sync(micro == 1)
                model(part(batch(10 * step + micro), rank, world)).float().square().mean().backward()
        same(grads(ours), grads(theirs), 1e-5 if dtype == "float32" else 2e-2)
        norms = [float(clip_grad_norm_(m.parameters(), 0.5)) for m in (ours, theirs)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5 if dtype == "float32" else 2e-2)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same(values(ours), values(theirs), 1e-4 if dtype == "float32" else 3e-2)
    assert "S(" in str(explain(ours)) or "Shard" in str(explain(ours))


@pytest.mark.parametrize(
    ("choice", "shape", "dtype", "foreach"),
    [
        ("largest", (2,), "float32", True),
        ("matrices only", (2,), "float32", True),
        ("last", (2, 2), "float32", False),
        ("matrices only", (4,), "bfloat16", True),
    ],
)
def test_training_is_that_of_torchs_fully_shard(choice: str, shape: tuple[int, ...], dtype: str, foreach: bool) -> None:
    run_threads(math.prod(shape), trains_as_torchs, choice, shape, dtype, foreach)


def test_training_on_gloo_and_on_one_rank_is_that_of_torch() -> None:
    run_gloo(3, trains_as_torchs, "first", (3,), "float32", True)
    run_threads(1, trains_as_torchs, "largest", (1,), "float32", True)


class Uneven(nn.Module):
    """Fewer rows than ranks, and a number of rows that the ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 2), nn.Linear(2, 7)
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh()) + self.empty.sum()


@on_processes(3)
def test_uneven_rows_train_checkpoint_and_cast(rank: int, world: int, tmp_path: Any) -> None:
    base = filled(Uneven())
    ours, plain = fully_shard(copy.deepcopy(base), shard_placement_fn=first), copy.deepcopy(base)
    x = torch.randn(2 * world, 6, generator=torch.Generator().manual_seed(1))
    ours(part(x, rank, world)).square().mean().backward()
    plain(x).square().mean().backward()
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert p.shape == q.shape
        if q.numel():
            assert apart(full(p.grad), q.grad) <= 1e-5, name
    # torch's own DCP and state dicts handle such parameters.
    state = {"model": ours.state_dict()}
    dcp.save(state, checkpoint_id=str(tmp_path))
    other = fully_shard(Uneven())
    loaded = {"model": other.state_dict()}
    dcp.load(loaded, checkpoint_id=str(tmp_path))
    other.load_state_dict(loaded["model"])
    for p, q in zip(other.parameters(), base.parameters(), strict=True):
        assert torch.equal(full(p), q)
    # After casts and moves the chunks are still one buffer.
    ours.double()
    assert torch.allclose(ours(x.double()).float(), base(x))


@on_threads(2)
def test_keep_vars_gives_the_parameters_themselves(rank: int, world: int) -> None:
    model = shard(Model(), fully_shard, shard_placement_fn=largest)
    kept = model.state_dict(keep_vars=True)
    assert all(kept[name] is param for name, param in model.named_parameters())


@on_processes(2)
def test_checkpoint_holds_plain_shards_and_optimizer(rank: int, world: int, tmp_path: Any) -> None:
    model, other = (shard(filled(Model()), fully_shard, shard_placement_fn=choice) for choice in (largest, first))
    optimizer, loaded = (torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, other))
    model(batch(0)).square().mean().backward()
    optimizer.step()
    checkpoint.save({"model": model, "optimizer": optimizer}, tmp_path, 1)
    checkpoint.load({"model": other, "optimizer": loaded}, tmp_path)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(full(p), full(q))
        assert torch.equal(full(optimizer.state[p]["exp_avg"]), full(loaded.state[q]["exp_avg"]))


@on_threads(2)
def test_model_from_the_meta_device_takes_values_and_trains(rank: int, world: int) -> None:
    with torch.device("meta"):
        model = Model()
    shard(model, fully_shard, shard_placement_fn=largest)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.fill_(0.01 * i)
    model(batch(0)).square().mean().backward()
    assert all(torch.all(full(p) == torch.tensor(0.01 * i)) for i, p in enumerate(model.parameters()))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.between, self.head = nn.Embedding(13, 6), nn.Linear(6, 6), nn.Linear(6, 13, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.between(self.embed(x))))


@pytest.mark.parametrize(("dtype", "reshard", "units"), [(None, True, 3), (None, False, 3), (torch.bfloat16, True, 3), (None, True, 1)])
@on_threads(2)
def test_weights_with_uneven_rows_may_be_tied_after_sharding(
    rank: int, world: int, dtype: torch.dtype | None, reshard: bool, units: int
) -> None:
    plain, model = filled(Words()), filled(Words())
    options: dict[str, Any] = {"shard_placement_fn": lambda p: Shard(0), "reshard_after_forward": reshard}
    if dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for one in (model.embed, model.between, model)[-units:]:
        fully_shard(one, **options)
    plain.head.weight, model.head.weight = plain.embed.weight, model.embed.weight  # like transformers' tie_weights() after loading
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
    tolerance = 1e-5 if dtype is None else 3e-2
    x = torch.arange(12).view(4, 3) % 13
    start = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(6):
        if step == 3 and dtype is None:
            plain.double()
            model.double()
            optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
        if step == 4:
            model.load_state_dict(start)
            plain.load_state_dict({name: value.full_tensor() for name, value in start.items()})
        model(part(x, rank, world)).float().square().mean().backward()
        plain(x).square().mean().backward()
        for name, p in plain.named_parameters():
            assert apart(full(dict(model.named_parameters())[name].grad), p.grad) <= tolerance, (step, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert model.head.weight is model.embed.weight
        if dtype is None:
            assert apart(full(model.embed.weight), plain.embed.weight) <= 1e-4
