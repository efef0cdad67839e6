"""Newton-Schulz: the nearest (semi-)orthogonal matrix of a gradient, by matrix products in BF16 alone.

A round is ``X <- a X + (b A + c A A) X`` with ``A = X X^T``. It acts on the singular values of X alone: ``s <- a s + b s^3 + c
s^5``. A few rounds push all of them towards 1 (Jordan et al. 2024, kellerjordan.github.io/posts/muon). The order of operations, the
dtypes and the transposition to the short side follow ``torch.optim.Muon`` (torch 2.13, ``optim/_muon.py``), so results have the same
bits.

Coefficient sets by name (values: microsoft/dion 0a059a45, ``newton_schulz_triton.py``):

| name            | rounds | singular values of [0.01, 1] go to | from                                                       |
|-----------------|--------|------------------------------------|------------------------------------------------------------|
| `keller-jordan` | any    | 0.68 .. 1.13                       | Jordan et al.: one triple, steep at 0; torch's default     |
| `quintic`       | 5      | 0.98 .. 1.03                       | You Jiacheng: five triples, tuned together                 |
| `polar-express` | >= 5   | see there                          | Amsel et al. 2025, arXiv 2505.16932: optimal round by round |
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Triple = tuple[float, float, float]

KELLER_JORDAN: Triple = (3.4445, -4.7750, 2.0315)

MOST_BATCHED = 1 << 24
"""Maximum number of elements in one batch. A larger matrix keeps any device busy by itself, and a batch would only take memory."""
LEAST_SIDE = 32
"""Matrices with a shorter side are batched only on request. For products of at most 16^3 multiplications, torch on a CPU uses other
kernels (not oneDNN's), and counts those of a batch together. A batch then sometimes differs from its matrices alone: 2 % of batches
of 16 x 16 do."""
EVIDENCE = 1 << 18
"""Number of elements that must agree before batches are used; one batch of small matrices is too little evidence."""


@dataclass(frozen=True)
class Coefficients:
    """One triple per round. The input is divided by ``safety`` times its norm; sets tuned for singular values up to 1 need a margin for
    BF16."""

    triples: tuple[Triple, ...]
    safety: float = 1.0


SETS: dict[str, Coefficients] = {
    "keller-jordan": Coefficients((KELLER_JORDAN,)),
    "quintic": Coefficients(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        )
    ),
    "polar-express": Coefficients(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        safety=1.02,
    ),
}


def coefficients(given: str | Sequence[float] | Sequence[Sequence[float]], steps: int) -> Coefficients:
    """Return ``steps`` rounds of ``given`` (a name, one triple, or several); the last triple repeats.

    Raises:
        ValueError: the name is unknown, ``given`` holds no triples of finite numbers, there are fewer steps than triples (a set is
            tuned as a whole), or ``steps`` is not 1 .. 99.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps < 100:
        raise ValueError(f"ns_steps = {steps}: give 1 to 99")
    if isinstance(given, str):
        if given not in SETS:
            raise ValueError(f"ns_coefficients = {given!r}: known sets are {', '.join(SETS)}; or give one triple, or several")
        chosen = SETS[given]
    else:
        several: list[Any] = list(given)
        if several and isinstance(several[0], int | float):
            several = [several]
        if not several or any(isinstance(row, int | float) or len(row) != 3 for row in several):
            raise ValueError(f"ns_coefficients = {given!r}: give three numbers, or several times three, or one of {', '.join(SETS)}")
        chosen = Coefficients(tuple((float(a), float(b), float(c)) for a, b, c in several))
        if not all(math.isfinite(x) for triple in chosen.triples for x in triple):
            raise ValueError(f"ns_coefficients = {given!r}: give finite numbers")
    if steps < len(chosen.triples):
        raise ValueError(f"ns_steps = {steps}, but the coefficients are {len(chosen.triples)} rounds tuned together: give at least as many")
    return Coefficients(chosen.triples + chosen.triples[-1:] * (steps - len(chosen.triples)), chosen.safety)


def flops(rows: int, cols: int, steps: int) -> int:
    """Return the floating-point operations of one matrix: ``steps (4 s^2 l + 2 s^3)``, with s the short side and l the long one."""
    short, long = min(rows, cols), max(rows, cols)
    return steps * (4 * short * short * long + 2 * short**3)


def orthogonalize(matrix: Tensor, rounds: Coefficients, eps: float = 1e-7) -> Tensor:
    """Move the singular values of ``matrix`` [m, n] to about 1; returns BF16 in new memory, row-major or (m > n) transposed."""
    rows, cols = matrix.shape
    scaled = matrix.bfloat16()
    scaled = scaled / _scale(scaled, rounds, eps)
    if rows > cols:
        scaled = scaled.T.contiguous()  # contiguous: the same bits as torch's strided view, and up to 3x faster on the CPU
    for a, b, c in rounds.triples:
        gram = scaled @ scaled.T
        gram = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        scaled = torch.addmm(scaled, gram, scaled, beta=a)
    return scaled.T if rows > cols else scaled


def orthogonalize_batch(matrices: Tensor, rounds: Coefficients, eps: float = 1e-7) -> Tensor:
    """Apply :func:`orthogonalize` to each of ``matrices`` [k, m, n], in batched products.

    The device's kernels decide whether the bits equal those of one matrix at a time: see :class:`NewtonSchulz`.
    """
    _, rows, cols = matrices.shape
    scaled = matrices.bfloat16()
    # Take norms one by one, because a reduction over rows of a batch may add in another order.
    scaled = scaled / torch.stack([_scale(matrix, rounds, eps) for matrix in scaled]).view(-1, 1, 1)
    if rows > cols:
        scaled = scaled.mT.contiguous()
    for a, b, c in rounds.triples:
        gram = scaled @ scaled.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        scaled = torch.baddbmm(scaled, gram, scaled, beta=a)
    return scaled.mT if rows > cols else scaled


def _scale(matrix: Tensor, rounds: Coefficients, eps: float) -> Tensor:
    norm = matrix.norm()
    return (norm if rounds.safety == 1.0 else norm * rounds.safety).clamp(min=eps)


class NewtonSchulz:
    """Orthogonalizer of many matrices of one shape, in batches if that is allowed and faster.

    Args:
        batched: True: always; False: never; None: if a batch gives the same bits as one matrix at a time, and takes less time.

    With None, the first use of each number and shape of matrices on a device tries both ways. Kernels are chosen by shape, not by
    value. A matrix's update must not depend on the other matrices at its root, and thus on the number of ranks; only equal bits
    ensure this. The faster way depends on the machine: batches of 512 x 512 took 2.8x on one CPU and 0.6x on another.
    """

    def __init__(self, batched: bool | None = None) -> None:
        self._batched = batched
        self._pays: dict[tuple[object, ...], bool] = {}

    def __call__(self, matrices: Sequence[Tensor], rounds: Coefficients, eps: float) -> list[Tensor]:
        """Return the orthogonalized ``matrices``, all of one shape and device, in their order."""
        size = max(1, MOST_BATCHED // max(1, matrices[0].numel()))
        out: list[Tensor] = []
        for first in range(0, len(matrices), size):
            out += self._some(matrices[first : first + size], rounds, eps)
        return out

    def _some(self, matrices: Sequence[Tensor], rounds: Coefficients, eps: float) -> list[Tensor]:
        one = matrices[0]
        key = (len(matrices), one.shape, one.device, torch.get_num_threads(), rounds)
        together = self._batched if self._batched is not None else self._pays.get(key)
        if together is None and min(one.shape) < LEAST_SIDE:
            together = False
        if len(matrices) == 1 or together is False:
            return [orthogonalize(matrix, rounds, eps) for matrix in matrices]
        if together:
            return list(orthogonalize_batch(torch.stack(list(matrices)), rounds, eps))
        began = _now(one.device)
        batch = list(orthogonalize_batch(torch.stack(list(matrices)), rounds, eps))
        middle = _now(one.device)
        alone = [orthogonalize(matrix, rounds, eps) for matrix in matrices]
        end = _now(one.device)
        same = all(torch.equal(a, b) for a, b in zip(batch, alone, strict=True))
        if same or all(bool(a.isfinite().all()) for a in alone):  # NaN never equals itself, so it is no evidence
            self._pays[key] = same and middle - began < end - middle and _same_bits(len(matrices), one, rounds, eps)
        return alone


def _same_bits(count: int, like: Tensor, rounds: Coefficients, eps: float) -> bool:
    """Return whether batches of ``count`` random matrices equal the matrices alone, over :data:`EVIDENCE` elements."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(EVIDENCE // (count * like.numel())):
        some = torch.randn(count, *like.shape, generator=generator).to(like.device, torch.bfloat16)
        alone = [orthogonalize(matrix, rounds, eps) for matrix in some]
        if not all(torch.equal(a, b) for a, b in zip(orthogonalize_batch(some, rounds, eps), alone, strict=True)):
            return False
    return True


def _now(device: torch.device) -> float:
    """Return the time in seconds, after all work on ``device`` is done."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    return time.perf_counter()
