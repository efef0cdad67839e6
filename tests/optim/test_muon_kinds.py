"""Muon on experts, fused projections, heads, replicas, expert parallelism and FSDP2's own tensors.

The tests also cover scaling rules, sets, NorMuon and refusals.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute

from tests.dtensor.layouts import Case, one_dim_mesh, whole
from tests.optim.test_muon import SHAPES, alone, gradient, random_cases, start, steps_on_shards
from tests.ranks import on_threads, run_threads
from vescale_ray.dtensor import RaggedDTensor, RaggedShard, distribute_tensor
from vescale_ray.fsdp import fully_shard
from vescale_ray.optim import Muon
from vescale_ray.optim.matrix.muon import SCALES
from vescale_ray.optim.matrix.newton_schulz import NewtonSchulz, coefficients, orthogonalize, orthogonalize_batch

SETTINGS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.5}


def torchs(pieces: list[tuple[Tensor, list[Tensor]]], **settings: Any) -> list[Tensor]:
    """torch.optim.Muon with each matrix as its own parameter: (start, gradient of each step)."""
    parameters = [nn.Parameter(value.clone()) for value, _ in pieces]
    theirs = torch.optim.Muon(parameters, **SETTINGS, **settings)
    for step in range(len(pieces[0][1])):
        for p, (_, gradients) in zip(parameters, pieces, strict=True):
            p.grad = gradients[step].clone()
        theirs.step()
    return [p.detach() for p in parameters]


def ours(rank: int, world: int, case: Case, settings: dict[str, Any], steps: int = 3) -> Tensor:
    (result,) = steps_on_shards(rank, world, [case], steps, settings)
    return torch.as_tensor(result[0])


EXPERTS = (5, 12, 7)


@pytest.mark.parametrize("counts", [(2, 0, 3), (11, 22, 27), (137, 200, 83)])
def test_experts_are_matrices_of_their_own_wherever_they_are_cut(counts: tuple[int, ...]) -> None:
    dims = {5: 1, 60: 2, 420: 3}[sum(counts)]
    grads = [gradient(EXPERTS, 0, s) for s in range(3)]
    expected = torch.stack(torchs([(start(EXPERTS, 0)[e], [g[e] for g in grads]) for e in range(5)]))
    for got in run_threads(3, ours, Case(EXPERTS, dims, counts), {}):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("blocks", "sizes"), [((8, 4, 4), (8, 4, 4)), (4, (4, 4, 4, 4)), (None, (16,))])
def test_row_blocks_are_orthogonalized_and_scaled_on_their_own(blocks: Any, sizes: Any) -> None:
    shape = (16, 10)
    grads = [gradient(shape, 0, s).split(sizes) for s in range(3)]
    expected = torch.cat(torchs([(part, [g[i] for g in grads]) for i, part in enumerate(start(shape, 0).split(sizes))]))
    for got in run_threads(3, ours, Case(shape, 1, (3, 0, 13)), {"row_blocks": blocks}):
        assert torch.equal(got, expected)


def replicated(rank: int, world: int, share: bool) -> tuple[list[Tensor], tuple[int, ...], tuple[int, ...]]:
    mesh = init_device_mesh("cpu", (2, 2))
    cases = random_cases(2, 4)
    parameters = [nn.Parameter(distribute_tensor(start(c.shape, i), mesh, [Replicate(), c.placement])) for i, c in enumerate(cases)]
    muon = Muon(parameters, **SETTINGS, share_replicas=share, bucket_bytes=4096)
    for step in range(3):
        for i, p in enumerate(parameters):
            p.grad = distribute_tensor(gradient(tuple(p.shape), i, step), mesh, p.placements, src_data_rank=None)  # type: ignore[attr-defined]
        muon.step()
    (itinerary,) = muon.itineraries
    return [p.full_tensor() for p in parameters], itinerary.roots.load, itinerary.roots.cost  # type: ignore[attr-defined]


@pytest.mark.parametrize("share", [False, True])
def test_replicas_stay_equal_and_may_share_the_work(share: bool) -> None:
    expected = alone(SHAPES, 3)
    for got, load, cost in run_threads(4, replicated, share):
        for g, (e, _) in zip(got, expected, strict=True):
            assert torch.equal(g, e)
        assert len(load) == (4 if share else 2) and sum(load) == sum(cost), "half of the work each"


def expert_parallel(rank: int, world: int) -> Tensor:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    placements = [RaggedShard((0,), (1, 2)), Shard(0)]
    parameter = nn.Parameter(distribute_tensor(start((6, 8, 5), 0), mesh, placements))
    muon = Muon([parameter], **SETTINGS)
    for step in range(3):
        parameter.grad = distribute_tensor(gradient((6, 8, 5), 0, step), mesh, placements, src_data_rank=None)
        muon.step()
    return whole(parameter).detach()


def test_expert_parallelism_is_supported() -> None:
    shape = (6, 8, 5)
    grads = [gradient(shape, 0, s) for s in range(3)]
    expected = torch.stack(torchs([(start(shape, 0)[e], [g[e] for g in grads]) for e in range(6)]))
    for got in run_threads(4, expert_parallel):
        assert torch.equal(got, expected)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for i, shape in enumerate(((7, 10), (33, 20))):
            setattr(self, f"p{i}", nn.Parameter(start(shape, i)))


@pytest.mark.parametrize("shard", [fully_shard, torch_fully_shard], ids=["ours", "torch's"])
@on_threads(3)
def test_our_and_torchs_fully_shard_equal_torchs_muon_bitwise(rank: int, world: int, shard: Any) -> None:
    model = Two()
    shard(model, mesh=one_dim_mesh(world))
    muon = Muon(model.parameters(), **SETTINGS)
    for step in range(3):
        for i, p in enumerate(model.parameters()):
            full = gradient(tuple(p.shape), i, step)
            p.grad = (
                distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None)
                if isinstance(p, RaggedDTensor)
                else torch_distribute(full, p.device_mesh, p.placements, src_data_rank=None)  # type: ignore[attr-defined]
            )
        muon.step()
    got = [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]
    for g, (e, _) in zip(got, alone(((7, 10), (33, 20)), 3), strict=True):
        assert torch.equal(g, e)


def test_plain_tensors_work_without_a_process_group() -> None:
    assert not dist.is_initialized()
    for nesterov in (True, False):
        parameters = [nn.Parameter(start(s, i)) for i, s in enumerate(SHAPES)]
        muon = Muon(parameters, **SETTINGS, nesterov=nesterov)
        for step in range(3):
            for i, p in enumerate(parameters):
                p.grad = gradient(tuple(p.shape), i, step).T.contiguous().T  # not contiguous, as some that autograd leaves
            muon.step()
        for p, (e, _) in zip(parameters, alone(SHAPES, 3, nesterov=nesterov), strict=True):
            assert torch.equal(p, e)


@pytest.mark.parametrize("rule", [None, "match_rms_adamw"])
def test_scaling_rules_that_torch_has_are_torchs(rule: str | None) -> None:
    results = run_threads(2, steps_on_shards, random_cases(2, 8), 2, {"adjust_lr_fn": rule})
    for (got, _), (expected, _) in zip(results[0], alone(SHAPES, 2, adjust_lr_fn=rule), strict=True):
        assert torch.equal(torch.as_tensor(got), expected)


def test_the_other_scaling_rules_are_their_formulas() -> None:
    # Rules: Emerging-Optimizers' spectral sqrt(max(m, n)); torchtitan's and dion's sqrt(m / n), not clamped at 1.
    assert SCALES["spectral"](6, 24) == math.sqrt(24) and SCALES["spectral_unclamped"](6, 24) == 0.5
    for rule, factor in (("spectral", math.sqrt(10)), ("spectral_unclamped", math.sqrt(0.7))):
        moved = []
        for chosen in ("original", rule):
            p = nn.Parameter(torch.zeros(7, 10))
            p.grad = gradient((7, 10), 0, 0)
            Muon([p], lr=1.0, weight_decay=0.0, adjust_lr_fn=chosen).step()
            moved.append(p.detach())
        torch.testing.assert_close(moved[1], moved[0] * factor, rtol=1e-6, atol=0)


# (sigma, f^5(sigma)): five iterations of the scalar polynomial, computed in FP64 by a program that shares no code with this one.
SCALAR = {
    "keller-jordan": [
        (1e-4, 0.048473085),
        (1e-3, 0.470543951),
        (0.01, 0.698917063),
        (0.1, 0.712120082),
        (0.5, 0.76543853),
        (1, 0.696436409),
    ],
    "quintic": [(0.01, 1.018025225), (0.1, 1.019049889), (0.5, 0.985869354), (1, 0.97834556)],
}


@pytest.mark.parametrize("name", SCALAR)
def test_coefficient_sets_move_singular_values_as_published(name: str) -> None:
    for sigma, expected in SCALAR[name]:
        for a, b, c in coefficients(name, 5).triples:
            sigma = a * sigma + b * sigma**3 + c * sigma**5
        assert math.isclose(sigma, expected, rel_tol=1e-7)


@pytest.mark.parametrize(("name", "shape"), [("keller-jordan", (48, 96)), ("quintic", (96, 48)), ("polar-express", (64, 64))])
def test_results_are_close_to_orthogonal_and_to_fp64(name: str, shape: tuple[int, int]) -> None:
    matrix, rounds = gradient(shape, 0, 0), coefficients(name, 5)
    got = orthogonalize(matrix, rounds).double()
    exact = matrix.double() / (matrix.double().norm() * rounds.safety)
    u, s, v = torch.linalg.svd(exact, full_matrices=False)
    for a, b, c in rounds.triples:
        s = a * s + b * s**3 + c * s**5
    expected = u @ torch.diag(s) @ v
    assert (got - expected).norm() / expected.norm() < 2e-2  # BF16 to FP64, Gaussian matrices: 1.0e-2 to 1.3e-2 was measured
    assert 0.6 < s.min() and s.max() < 1.2


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (33, 17)])
def test_batch_is_used_only_if_bitwise_equal_to_single_matrices(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, many = coefficients("quintic", 5), [gradient(shape, i, 0).bfloat16() for i in range(5)]
    expected = [orthogonalize(m, rounds) for m in many]
    automatic = NewtonSchulz()
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(automatic(many, rounds, 1e-7), expected, strict=True))
    always = NewtonSchulz(batched=True)(many, rounds, 1e-7)
    assert all((a - b).float().abs().max() <= 2e-2 for a, b in zip(always, expected, strict=True))
    # A device whose batched kernels round differently.
    import vescale_ray.optim.matrix.newton_schulz as module

    monkeypatch.setattr(module, "orthogonalize_batch", lambda *a: orthogonalize_batch(*a) * 1.01)
    fresh = NewtonSchulz()
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(fresh(many, rounds, 1e-7), expected, strict=True))


@pytest.mark.parametrize("rarely", [2, 40])
def test_a_batch_that_differs_only_now_and_then_is_not_used(rarely: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 16 x 16 matrices differ now and then on CPUs, so one equal batch proves nothing."""
    import vescale_ray.optim.matrix.newton_schulz as module

    calls = iter(range(1, 1 << 20))

    def sometimes(*args: Any) -> Tensor:
        return orthogonalize_batch(*args) * (1.01 if next(calls) % rarely == 0 else 1.0)

    monkeypatch.setattr(module, "orthogonalize_batch", sometimes)
    clock = iter([0.0, 1.0, 3.0])  # the batch is faster
    monkeypatch.setattr(module, "_now", lambda device: next(clock))
    rounds, automatic = coefficients("quintic", 5), NewtonSchulz()
    for step in range(2 * rarely):
        many = [gradient((32, 33), i, step).bfloat16() for i in range(3)]
        assert all(torch.equal(a, orthogonalize(m, rounds)) for a, m in zip(automatic(many, rounds, 1e-7), many, strict=True)), step


@pytest.mark.parametrize("shape", [(16, 16), (2, 64), (16, 300)])
def test_batches_of_small_matrices_give_the_bits_of_each_alone(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """If batched, about one batch of fifty differs (torch 2.13 on CPUs with oneDNN's BF16)."""
    import vescale_ray.optim.matrix.newton_schulz as module

    clock = itertools.cycle([0.0, 1.0, 3.0])  # batches are faster
    monkeypatch.setattr(module, "_now", lambda device: next(clock))
    rounds, automatic = coefficients("keller-jordan", 5), NewtonSchulz()
    for step in range(150):
        many = [gradient(shape, i, step).bfloat16() for i in range(5)]
        assert all(torch.equal(a, orthogonalize(m, rounds)) for a, m in zip(automatic(many, rounds, 1e-7), many, strict=True)), step


def normuon_alone(shape: tuple[int, ...], steps: int, beta2: float) -> Tensor:
    """An oracle from the paper's formulas, in FP64 except for Newton-Schulz."""
    p, b, v = start(shape, 0).double(), torch.zeros(shape), torch.zeros(shape[0], dtype=torch.float64)
    for step in range(steps):
        g = gradient(shape, 0, step)
        b.lerp_(g, 0.05)
        u = torch.optim._muon._zeropower_via_newtonschulz(g.lerp(b, 0.95), (3.4445, -4.7750, 2.0315), 5, 1e-7).double()
        v = beta2 * v + (1 - beta2) * u.square().mean(1)
        n = u / (v.sqrt() + 1e-8)[:, None]
        p = p * (1 - 0.02 * 0.5) - 0.02 * math.sqrt(max(1, shape[0] / shape[1])) * n * (u.norm() / n.norm())
    return p


@pytest.mark.parametrize("counts", [(24, 0, 0), (5, 0, 19), (8, 8, 8)])
def test_normuon_normalizes_rows_alike_wherever_they_are(counts: tuple[int, ...]) -> None:
    expected = normuon_alone((24, 10), 4, 0.9)
    plain = alone(((24, 10),), 4)[0][0]
    for got in run_threads(3, ours, Case((24, 10), 1, counts), {"normuon": 0.9}, 4):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)
        assert (got - plain).norm() / plain.norm() > 0.01, "it is not plain Muon"


def normuon_elsewhere(rank: int, world: int, where: str) -> list[Tensor]:
    """NorMuon on FSDP2's tensors, with replicas that share the work, or with experts that are sharded first."""
    if where == "fsdp2":
        model = Two()
        torch_fully_shard(model, mesh=one_dim_mesh(world))
        parameters = list(model.parameters())
        mesh, placements = one_dim_mesh(world), [[Shard(0)]] * 2
    else:
        mesh = init_device_mesh("cpu", (2, 2))
        other = Replicate() if where == "replicas" else Shard(0)
        shapes = ((7, 10), (33, 20)) if where == "replicas" else ((4, 6, 10), (2, 33, 20))
        placements = [[other, RaggedShard((0,), (3, 4))], [other, RaggedShard((0,), (11, 22))]]  # type: ignore[list-item]
        if where == "experts":
            placements = [[RaggedShard((0, 1), (5, 7)), other], [RaggedShard((0, 1), (1, 2)), other]]  # type: ignore[list-item]
        parameters = [
            nn.Parameter(distribute_tensor(start(s, i), mesh, p)) for i, (s, p) in enumerate(zip(shapes, placements, strict=True))
        ]
    muon = Muon(parameters, **SETTINGS, normuon=0.9, share_replicas=where == "replicas")
    for step in range(3):
        for i, p in enumerate(parameters):
            full = gradient(tuple(p.shape), i, step)
            give = torch_distribute if where == "fsdp2" else distribute_tensor
            p.grad = give(full, mesh, placements[i], src_data_rank=None)
        muon.step()
    return [whole(p).detach() for p in parameters] + [whole(muon.state[p]["row_second_moment"]) for p in parameters]


@pytest.mark.parametrize(("where", "world"), [("fsdp2", 3), ("replicas", 4), ("experts", 4)])
def test_normuon_matches_plain_on_fsdp2_replicas_and_experts(where: str, world: int) -> None:
    shapes = ((4, 6, 10), (2, 33, 20)) if where == "experts" else ((7, 10), (33, 20))
    parameters = [nn.Parameter(start(s, i)) for i, s in enumerate(shapes)]
    muon = Muon(parameters, **SETTINGS, normuon=0.9)
    for step in range(3):
        for i, p in enumerate(parameters):
            p.grad = gradient(tuple(p.shape), i, step)
        muon.step()
    expected = [p.detach() for p in parameters] + [muon.state[p]["row_second_moment"] for p in parameters]
    for got in run_threads(world, normuon_elsewhere, where):
        for g, e in zip(got, expected, strict=True):
            torch.testing.assert_close(g, e, rtol=1e-6, atol=1e-7)


@on_threads(4)
def test_unsupported_layouts_are_refused_with_the_remedy(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for placements in ([RaggedShard((0,), (1, 1)), Shard(1)], [RaggedShard((0,), (1, 1)), Shard(0)]):
        cut = nn.Parameter(distribute_tensor(torch.zeros(8, 4), mesh, placements))
        with pytest.raises(ValueError, match="also cut by another mesh dimension .* train it with AdamW"):
            Muon([cut])
    flat = nn.Parameter(torch_distribute(torch.zeros(8, 4), one_dim_mesh(world), [Shard(1)]))
    with pytest.raises(ValueError, match=r"its matrices are cut along dimension 1.* shard dimension 0 .* or train it with AdamW"):
        Muon([flat])
    rows = nn.Parameter(distribute_tensor(torch.zeros(8, 4), one_dim_mesh(world), [RaggedShard((0, 1), (1, 1, 1, 29))]))
    with pytest.raises(ValueError, match=r"normuon needs whole rows, .* Block.rows"):
        Muon([rows], normuon=0.9)
    good = nn.Parameter(distribute_tensor(torch.zeros(8, 4), one_dim_mesh(world), [RaggedShard((0,), (1, 1, 1, 1))]))
    muon = Muon([good])
    good.grad = distribute_tensor(torch.ones(8, 4), one_dim_mesh(world), [RaggedShard((0,), (1, 1, 2, 0))])
    with pytest.raises(ValueError, match="redistribute the gradient"):
        muon.step()
    assert not whole(good).any() and not whole(muon.state[good]["momentum_buffer"]).any(), "nothing was written"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ns_steps": 0}, "ns_steps = 0"),
        ({"ns_steps": 3, "ns_coefficients": "quintic"}, "5 rounds tuned together"),
        ({"ns_coefficients": "kj"}, "known sets are keller-jordan, quintic, polar-express"),
        ({"ns_coefficients": (1.0, 2.0)}, "give three numbers"),
        ({"adjust_lr_fn": "rms"}, "known rules are original"),
        ({"row_blocks": 3}, "does not divide the 4 rows"),
        ({"row_blocks": (1, 2)}, "are 3 rows, but parameter 0 has 4"),
        ({"normuon": 1.0}, "normuon = 1.0"),
        ({"nonfinite": "ignore"}, "give skip, raise or propagate"),
    ],
)
def test_numbers_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon([nn.Parameter(torch.zeros(4, 4))], **settings)


def test_empty_matrices_step_and_non_row_major_ones_are_refused() -> None:
    some, none = nn.Parameter(torch.ones(3, 4)), [nn.Parameter(torch.zeros(shape)) for shape in ((0, 4), (4, 0), (0, 3, 4))]
    muon = Muon([some, *none])
    for p in (some, *none):
        p.grad = torch.ones_like(p)
    muon.step()
    assert not torch.equal(some, torch.ones(3, 4))
    only = Muon(none)
    only.step()
    assert only.itineraries[0].collectives == 0 and only.itineraries[0].roots.balance == 1.0
    with pytest.raises(ValueError, match="row-major memory"):
        Muon([nn.Parameter(torch.zeros(3, 4).T)])
    with pytest.raises(ValueError, match="to_empty"):
        Muon([nn.Parameter(torch.zeros(3, 4, device="meta"))])


@pytest.mark.parametrize("parameter", [torch.zeros(4), torch.zeros(()), torch.zeros(2, 2, 2, 2), torch.zeros(4, 4, dtype=torch.complex64)])
def test_parameters_that_are_no_matrices_are_refused(parameter: Tensor) -> None:
    with pytest.raises(ValueError, match=r"give it to AdamW"):
        Muon([nn.Parameter(parameter)])
