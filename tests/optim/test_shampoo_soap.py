"""Shampoo and SOAP over blocks: the formulas in float64, equal bits on every number of ranks, and failing roots."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.optim.optim_support import State, Weights, full_state, give_gradients, noise, same, sharded, straddles, train
from tests.ranks import on_threads, run_threads
from vescale_ray import Block
from vescale_ray.optim import SOAP, Shampoo
from vescale_ray.optim.matrix import kronecker
from vescale_ray.optim.matrix.kronecker import KroneckerOptimizer, PreconditionerWarning, inverse_root

KINDS: list[Any] = [Shampoo, SOAP]
SHAPES = {"wq_weight": (48, 40), "odd": (37, 29), "experts": (3, 16, 20), "odd_experts": (2, 13, 9), "bias": (70,), "filters": (6, 4, 3, 3)}
BLOCKS: list[Any] = ["tile 8x8", "tile 5x12", "rows 16", "tensor"]


def waves(m: int, n: int, k: int) -> Tensor:
    """Gradients without a random generator: ``sin(0.37 i + 0.2 + k) + 0.5 cos(0.11 i^2 + k)``."""
    i = torch.arange(m * n, dtype=torch.float64)
    return (torch.sin(0.37 * i + 0.2 + k) + 0.5 * torch.cos(0.11 * i * i + k)).view(m, n).float()


@pytest.mark.parametrize(
    ("shape", "side", "total", "norm"),
    [((4, 4), 4, -0.331637746396, 0.675424237157), ((6, 4), 2, -1.278941508825, 1.069402927303)],
)
def test_three_steps_of_shampoo_give_the_published_numbers(shape: tuple[int, int], side: int, total: float, norm: float) -> None:
    # Computed in float64 by a program that shares no code with this one.
    param = nn.Parameter(0.1 * waves(*shape, 9))
    how: dict[str, Any] = {"weight_decay": 0.0, "precondition_frequency": 1, "grafting": None}
    optimizer = Shampoo([param], lr=0.1, betas=(0.9, 0.99), block=Block.tile(side, side), **how)
    for step in range(3):
        param.grad = waves(*shape, step)
        optimizer.step()
    assert math.isclose(param.sum().item(), total, rel_tol=2e-6) and math.isclose(param.norm().item(), norm, rel_tol=2e-6)


def test_summed_factor_step_is_the_gradients_orthogonal_factor() -> None:
    grad = waves(6, 6, 3) + torch.eye(6)
    param = nn.Parameter(torch.zeros(6, 6))
    how: dict[str, Any] = {"weight_decay": 0.0, "precondition_frequency": 1, "grafting": None, "factor_beta": 1.0}
    optimizer = Shampoo([param], lr=0.5, betas=(0.0, 0.99), block="tensor", **how)
    param.grad = grad
    optimizer.step()
    u, _, v = torch.linalg.svd(grad.double())
    torch.testing.assert_close(param.detach().double(), -0.5 * (u @ v), rtol=0, atol=1e-4)


# ------------------------------------------------------------------------------------------------ the formulas, in float64


def by_hand(kind: Any, p: np.ndarray, grads: list[np.ndarray], lr: float, decay: float, frequency: int, grafting: str | None) -> np.ndarray:
    """One block in numpy float64."""
    b1, b2 = (0.9, 0.99)
    m, v = np.zeros_like(p), np.zeros_like(p)
    left, right = np.zeros((p.shape[0],) * 2), np.zeros((p.shape[1],) * 2)
    roots: Any = None
    for t, g in enumerate(grads, 1):
        left, right = b2 * left + (1 - b2) * g @ g.T, b2 * right + (1 - b2) * g.T @ g
        m = b1 * m + (1 - b1) * g
        f = m / (1 - b1**t)
        if kind is Shampoo:
            v = b2 * v + (1 - b2) * g * g
            corrected = v / (1 - b2**t) if grafting == "adamw" else v
            step = f if grafting in ("sgd", None) else f / (np.sqrt(corrected) + 1e-8)
            if t % frequency == 0:
                roots = []
                for factor in (left, right):
                    values, vectors = np.linalg.eigh(factor / (1 - b2**t))
                    roots.append(vectors @ np.diag(values**-0.25) @ vectors.T)
            if t >= frequency:
                u = roots[0] @ f @ roots[1]
                step = u if grafting is None else u * (np.linalg.norm(step) / np.linalg.norm(u))
        else:
            if t < frequency:
                roots = [np.eye(p.shape[0]), np.eye(p.shape[1])]
            elif t == frequency:
                roots = [np.linalg.eigh(left)[1][:, ::-1], np.linalg.eigh(right)[1][:, ::-1]]
            elif t % frequency == 0:
                roots = [np.linalg.qr(left @ roots[0])[0], np.linalg.qr(right @ roots[1])[0]]
            turned = roots[0].T @ g @ roots[1]
            v = b2 * v + (1 - b2) * turned * turned
            n = (roots[0].T @ f @ roots[1]) / (np.sqrt(v / (1 - b2**t)) + 1e-8)
            step = roots[0] @ n @ roots[1].T
        p = p * (1 - lr * decay) - lr * step
    return p


@pytest.mark.parametrize(
    ("kind", "options", "block"),
    [
        *((Shampoo, {"grafting": grafting}, "tile 8x8") for grafting in ("adamw", "rmsprop", "sgd", None)),
        (Shampoo, {"grafting": "adamw"}, "rows 8"),
        *((SOAP, {}, block) for block in ("tile 8x8", "rows 8", "tensor")),
    ],
)
def test_steps_match_the_formulas_block_by_block(kind: Any, options: dict[str, Any], block: str) -> None:
    shapes = {"wide": (16, 24), "experts": (2, 16, 8)}
    model = Weights(shapes)
    start = {name: p.detach().double().numpy().copy() for name, p in model.named_parameters()}
    how: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.5, "precondition_frequency": 3, **options}
    optimizer = kind(model.parameters(), block=block, **how)

    def gradient(shape: tuple[int, ...], name: str, step: int) -> Tensor:
        rows, cols = shape[-2:]  # well conditioned, so that float32 and float64 agree
        return noise(shape, name, step) * 0.3 + torch.eye(max(rows, cols))[:rows, :cols] * 2 + 0.2 * step

    for step in range(1, 8):
        give_gradients(model, step, gradient)
        optimizer.step()
    for name, param in model.named_parameters():
        rows, cols = {"tile 8x8": (8, 8), "rows 8": (8, param.shape[-1]), "tensor": tuple(param.shape[-2:])}[block]
        got, begin = param.detach().double().numpy(), start[name]
        for matrix in range(param.shape[0]) if param.ndim == 3 else [slice(None)]:
            for top in range(0, param.shape[-2], rows):
                for first in range(0, param.shape[-1], cols):
                    here = (matrix, slice(top, top + rows), slice(first, first + cols)) if param.ndim == 3 else (
                        slice(top, top + rows), slice(first, first + cols),
                    )  # fmt: skip
                    grads = [gradient(tuple(param.shape), name, t).double().numpy()[here] for t in range(1, 8)]
                    expected = by_hand(kind, begin[here], grads, 0.01, 0.5, 3, options.get("grafting"))
                    moved = np.abs(expected - begin[here] * (1 - 0.005) ** 7).max()
                    np.testing.assert_allclose(got[here], expected, rtol=0, atol=2e-3 * moved, err_msg=f"{name} {here}")


# ------------------------------------------------------------------------------------------------- on any number of ranks


def trained(rank: int, world: int, kind: Any, block: Any, ranks: int) -> tuple[State, set[str]]:
    model = sharded(SHAPES, ranks, kind.block_policy(block))
    optimizer = kind(model.named_parameters(), lr=0.02, weight_decay=0.2, block=block, precondition_frequency=2)
    train(model, optimizer, range(1, 6))
    return full_state(model, optimizer), straddles(model)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("kind", KINDS)
def test_cuts_between_blocks_equal_one_process_bit_for_bit(kind: Any, block: Any) -> None:
    alone = trained(0, 1, kind, block, 0)[0]
    cut: set[str] = set()
    for state, partly in run_threads(3, trained, kind, block, 3):
        assert not same(state, alone), same(state, alone)
        cut |= partly
    assert block == "tensor" or {"wq_weight", "odd", "experts"} & cut, "no matrix lies on two ranks: this test shows nothing"


@on_threads(3)
def test_a_cut_inside_a_block_can_not_be_built(rank: int, world: int) -> None:
    model = sharded({"w": (48, 40), "v": (37, 29)}, world, lambda name, p: Block.rows(1))
    for kind in KINDS:
        inside = r"parameter v of shape \(37, 29\): a shard boundary lies at element \d+, inside a block \(tile 36x8"
        with pytest.raises(ValueError, match=inside + rf".*block_policy={kind.__name__}.block_policy\('tile 36x8'\)"):
            kind([("v", model.get_parameter("v"))], block="tile 36x8")


def build(kind: Any, world: int, saved: bool = True) -> tuple[Weights, KroneckerOptimizer]:
    model = sharded(SHAPES, world, kind.block_policy("tile 8x8"))
    options = {"precondition_frequency": 2, "lr": 0.02 if saved else 5.0}
    return model, kind(model.named_parameters(), block="tile 8x8", **options)


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_restores_every_bit_and_refuses_missing_state(kind: Any) -> None:
    model, optimizer = build(kind, 0)
    train(model, optimizer, range(1, 4))
    other, loaded = build(kind, 0, saved=False)
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(optimizer.state_dict())
    assert not same(full_state(model, optimizer), full_state(other, loaded))
    train(model, optimizer, range(4, 6))
    train(other, loaded, range(4, 6))
    assert not same(full_state(model, optimizer), full_state(other, loaded))
    given = optimizer.state_dict()
    given["state"] = {**given["state"], 0: {k: v for k, v in given["state"][0].items() if k != "left"}}
    with pytest.raises(ValueError, match=r"state of parameter wq_weight has .*, but .* keeps .*'left'"):
        loaded.load_state_dict(given)


# ---------------------------------------------------------------------------------------------------- roots that fail


def failing(dtypes: tuple[torch.dtype, ...], plain: Callable[..., Any]) -> Callable[..., Any]:
    def decompose(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dtype in dtypes:
            raise torch.linalg.LinAlgError("did not converge")
        return plain(x, *args, **kwargs)

    return decompose


@pytest.mark.parametrize("kind", KINDS)
def test_failed_roots_fall_back_to_fp64_then_to_last_good_root(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"w": (8, 8)}

    def run(steps: int, fails_at: int, dtypes: tuple[torch.dtype, ...]) -> tuple[State, KroneckerOptimizer]:
        model = Weights(shapes)
        optimizer = kind(model.parameters(), lr=0.02, block="tile 8x8", precondition_frequency=1)
        for step in range(1, steps + 1):
            with monkeypatch.context() as patched:
                if step >= fails_at:
                    for name in ("eigh", "qr"):
                        patched.setattr(torch.linalg, name, failing(dtypes, getattr(torch.linalg, name)))
                train(model, optimizer, range(step, step + 1))
        return full_state(model, optimizer), optimizer

    undisturbed, _ = run(3, 9, ())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_fp64, _ = run(3, 3, (torch.float32,))
    np.testing.assert_allclose(by_fp64["w"], undisturbed["w"], rtol=0, atol=1e-5)
    assert same(by_fp64, undisturbed), "FP64 was not used"
    before, _ = run(2, 9, ())
    with pytest.warns(PreconditionerWarning, match="the last good one stays in use") as caught:
        kept, optimizer = run(5, 3, (torch.float32, torch.float64))
    assert len(caught) == 1 and optimizer.kept_roots == 6, "loud once, counted always"
    for side in ("left", "right"):
        state = f"w/{side}_root" if kind is Shampoo else f"w/{side}_basis"
        assert kept[state].tobytes() == before[state].tobytes() and kept[f"w/{side}"].tobytes() != before[f"w/{side}"].tobytes()
    assert np.isfinite(kept["w"]).all() and kept["w"].tobytes() != before["w"].tobytes(), "it goes on with the last good root"


def test_non_finite_factor_keeps_the_last_good_root() -> None:
    model = Weights({"w": (8, 8)})
    optimizer = Shampoo(model.parameters(), block="tile 8x8", precondition_frequency=1)
    train(model, optimizer, range(1, 2))
    root = optimizer.state[model.get_parameter("w")]["left_root"].clone()
    optimizer.state[model.get_parameter("w")]["left"][0, 0, 3, 3] = math.inf
    with pytest.warns(PreconditionerWarning):
        train(model, optimizer, range(2, 3))
    assert torch.equal(root, optimizer.state[model.get_parameter("w")]["left_root"]) and optimizer.kept_roots == 1


def test_inverse_roots_are_exact_to_condition_and_ignore_noise() -> None:
    q = torch.linalg.qr(noise((24, 24), "q", 0).double())[0]
    # FP32 errors of `eigh`, measured by condition number: 2e-6 at 1e2, 2e-4 at 1e4. The bounds leave a factor of ten.
    for condition, bound in ((1e2, 2e-5), (1e4, 2e-3)):
        values = torch.logspace(0, -math.log10(condition), 24, dtype=torch.float64)
        exact = (q * values**-0.25) @ q.T
        found = inverse_root(((q * values) @ q.T).float(), 4.0, 1e-12)
        assert found is not None and ((found - exact).norm() / exact.norm()) < bound
    flat = torch.cat([torch.ones(4), torch.zeros(20)]).double()
    found = inverse_root(((q * flat) @ q.T).float(), 4.0, 1e-12)
    assert found is not None and found.abs().max() < 30, "a null space must not be blown up to eps ** -1/4 = 1000"
    zero = inverse_root(torch.zeros(3, 3), 4.0, 1e-12)
    assert zero is not None and torch.allclose(zero, 1000 * torch.eye(3), rtol=1e-4)


# ------------------------------------------------------------------------------------------------------- other behaviour


@pytest.mark.parametrize("kind", KINDS)
def test_non_matrices_and_embeddings_step_as_torchs_adamw(kind: Any) -> None:
    shapes = {"bias": (70,), "filters": (6, 4, 3, 3), "embed": (30, 8)}
    model, plain = Weights(shapes), Weights(shapes)
    named = [(f"{name}.weight", p) for name, p in model.named_parameters()]
    how: dict[str, Any] = {"lr": 0.05, "betas": (0.9, 0.98), "weight_decay": 0.3}
    optimizer, theirs = kind(named, **how), torch.optim.AdamW(plain.parameters(), **how)
    train(model, optimizer, range(1, 4))
    train(plain, theirs, range(1, 4))
    for ours, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, other) and "left" not in optimizer.state[ours]


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_parameters_keep_fp32_states_and_round_once(kind: Any) -> None:
    narrow, wide = Weights({"w": (16, 16)}, torch.bfloat16), Weights({"w": (16, 16)})
    wide.load_state_dict({"w": narrow.get_parameter("w").detach().float()})
    for model in (narrow, wide):
        optimizer = kind(model.parameters(), block="tile 8x8", precondition_frequency=1)
        give_gradients(model, 1, lambda shape, name, step: noise(shape, name, step).bfloat16().float())
        optimizer.step()
        assert all(t.dtype == torch.float32 for t in optimizer.state[model.get_parameter("w")].values())
    assert torch.equal(narrow.get_parameter("w"), wide.get_parameter("w").bfloat16())


def test_shampoo_steps_as_adamw_until_preconditioning_starts() -> None:
    model, plain = Weights({"w": (16, 16)}), Weights({"w": (16, 16)})
    how: dict[str, Any] = {"lr": 0.05, "betas": (0.9, 0.98), "weight_decay": 0.3}
    optimizer = Shampoo(model.parameters(), block="tile 8x8", precondition_frequency=2, start_preconditioning_step=3, **how)
    theirs = torch.optim.AdamW(plain.parameters(), **how)
    for step in range(1, 4):
        train(model, optimizer, range(step, step + 1))
        train(plain, theirs, range(step, step + 1))
        near = torch.allclose(model.get_parameter("w"), plain.get_parameter("w"), rtol=1e-5, atol=1e-6)
        assert near == (step < 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 1024}, "block = 1024: Shampoo needs blocks of rows and columns"),
        ({"precondition_frequency": 0}, "precondition_frequency = 0: give at least 1"),
        ({"grafting": "lion"}, "grafting = 'lion': give one of 'adamw', 'rmsprop', 'sgd', None"),
        ({"root": 0.0}, "root = 0.0: give a positive number"),
        ({"factor_beta": 1.5}, "factor_beta = 1.5"),
        ({"start_preconditioning_step": 0}, "start_preconditioning_step = 0"),
        ({"block": "rows 9000"}, r"shape \(9000, 4\): a block of 9000 x 4 elements needs factors larger than 8192: use Block.tile"),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shampoo([nn.Parameter(torch.zeros(9000, 4))], **options)
    assert kronecker.MAX_SIDE == 8192


@pytest.mark.parametrize("kind", KINDS)
def test_kronecker_optimizers_beat_adamw_on_badly_scaled_problem(kind: Any) -> None:
    """A linear least-squares problem with strongly correlated inputs, for which preconditioners are made."""
    mix = torch.linalg.qr(noise((32, 32), "mix", 0))[0] * torch.logspace(0, -2, 32)
    inputs, answer = noise((512, 32), "inputs", 0) @ mix.T, noise((16, 32), "answer", 0)

    def loss_after(make: Callable[[Any], torch.optim.Optimizer]) -> float:
        param = nn.Parameter(torch.zeros(16, 32))
        optimizer = make([param])
        loss = torch.zeros(())
        for _ in range(150):
            optimizer.zero_grad()
            loss = ((inputs @ (param - answer).T) ** 2).mean()
            loss.backward()
            optimizer.step()
        return loss.item()

    how: dict[str, Any] = {"lr": 0.03, "weight_decay": 0.0}
    ours = loss_after(lambda p: kind(p, block="tensor", precondition_frequency=2, **how))
    assert ours < 0.7 * loss_after(lambda p: torch.optim.AdamW(p, **how))
