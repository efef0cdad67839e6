"""What all ranks have to see alike before a step: which parameters have gradients, and whether the gradients are finite.

A rank sees its own part only. If a parameter's gradient is missing on one rank, or one rank's part of it holds a NaN, ranks that
decide for themselves part ways: those that communicate wait for each other for ever, and those that don't train different models.
So the ranks tell each other, in one all-reduce of two bytes a parameter::

    a parameter's gradient is ..          then, on every rank alike, it is ..
    there wherever there are elements     stepped
    there nowhere                         left out (frozen, or not used in this step)
    there on some ranks only              left out, and named in Decision.split: this is a fault of the training loop

A rank that holds no elements of a parameter (an empty shard) has no say: with or without a gradient, it follows the others.

Who communicates in the step (Muon) has to agree. Purely local optimizers (AdamW, AdamW8bit, Shampoo, SOAP) promise not to
communicate and never agree on their own; in a :class:`~vescale_ray.optim.build.CombinedOptimizer` with Muon they follow its decision, and
one with ``agree=True`` makes them agree.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale_ray import waiting
from vescale_ray.compat.core import foreach_norm
from vescale_ray.optim.parameters import local_of

_HERE, _MISSING = 0, 1  # columns of what is reduced; both set: on some ranks only


class DisagreementError(RuntimeError):
    """The ranks do not take the step together: their optimizers differ, or one of them did not come."""


class NonFiniteGradients(RuntimeError):
    """A gradient holds NaN or Inf on some rank; raised on all of them."""


@dataclass(frozen=True)
class Decision:
    """What every rank of the mesh does in this step.

    Attributes:
        active: per parameter of the agreement, in its order: whether to step it.
        split: indices of parameters whose gradient was there on some ranks and missing on others: left out everywhere.
        finite: whether every element of every gradient that is there, on any rank, is finite; True where that was not asked for.
    """

    active: tuple[bool, ...]
    split: tuple[int, ...]
    finite: bool


def goes_on(decision: Decision, nonfinite: str) -> bool:
    """Whether the step is taken, on every rank alike: not, where gradients are not finite and ``nonfinite`` is ``skip``; with a warning.

    Raises:
        NonFiniteGradients: they are not, and ``nonfinite`` is ``raise``.
    """
    if decision.finite or nonfinite == "propagate":
        return True
    if nonfinite == "raise":
        raise NonFiniteGradients("a gradient holds NaN or Inf on some rank: no rank has taken the step (nonfinite='skip' goes on)")
    warnings.warn("a gradient holds NaN or Inf on some rank: all ranks skip this optimizer step", stacklevel=3)
    return False


class Agreement:
    """The question, put to the ranks of the parameters' meshes once a step.

    Args:
        parameters: DTensors (ragged or torch's) and plain tensors, in an order that all ranks share. Plain tensors have no
            mesh: each rank decides for itself, and the finite flag covers them where a DTensor is present, too.
        also: what else has to be equal on all ranks; compared with the parameters' shapes, before the first decision.
        timeout: seconds to wait for the other ranks; None: as long as a process group waits for any collective, its own timeout.

    Where parameters live on several meshes, each is asked, smaller ones first: a decision is then the same on all ranks of the
    largest mesh, if that holds the others.
    """

    def __init__(self, parameters: Sequence[Tensor], *, also: str = "", timeout: float | None = None) -> None:
        self.parameters = list(parameters)
        self._timeout, self._also = timeout, also
        meshes: dict[DeviceMesh, list[int]] = {}
        for index, parameter in enumerate(self.parameters):
            if isinstance(parameter, DTensor):
                meshes.setdefault(parameter.device_mesh, []).append(index)
        self._meshes = sorted(meshes.items(), key=lambda item: item[0].size())
        self._compared = False

    @property
    def communicates(self) -> bool:
        """Whether there is another rank to ask."""
        return any(mesh.size() > 1 for mesh, _ in self._meshes)

    @torch.no_grad()
    def decide(self, *, check_finite: bool = True, fault: Exception | None = None) -> Decision:
        """The decision for the gradients that are there now. Collective: one all-reduce per mesh dimension of more than one rank.

        Args:
            check_finite: read all gradients for NaN and Inf (one pass over this rank's part).
            fault: why this rank can't take the step. It is raised here, and a DisagreementError on the other ranks.

        Raises:
            DisagreementError: ranks hold different lists of parameters, did not all come within the timeout, or one has a fault.
        """
        if not self._compared and self.communicates:
            self._compare()
        self._compared = True
        said = [_evidence(parameter) for parameter in self.parameters]
        bad = check_finite and fault is None and not _all_finite([p.grad for p in self.parameters if p.grad is not None])
        faulty = fault is not None
        for mesh, indices in self._meshes:
            if mesh.size() > 1:
                words = torch.tensor([int(bad), int(faulty), *(bit for i in indices for bit in said[i])], dtype=torch.uint8)
                told = self._largest(words, mesh).tolist()
                bad, faulty = bool(told[0]), bool(told[1])
                for position, i in enumerate(indices):
                    said[i] = (told[2 + 2 * position], told[3 + 2 * position])
        if fault is not None:
            raise fault
        if faulty:
            raise DisagreementError("another rank can't take this optimizer step, and tells why: no rank has taken it")
        return Decision(
            active=tuple(bool(s[_HERE]) and not s[_MISSING] for s in said),
            split=tuple(i for i, s in enumerate(said) if s[_HERE] and s[_MISSING]),
            finite=not bad,
        )

    def _largest(self, words: Tensor, mesh: DeviceMesh) -> Tensor:
        """The element-wise maximum over all ranks of ``mesh``, on the CPU."""
        words = words.to(mesh.device_type)
        for dim in range(mesh.ndim):
            if mesh.size(dim) == 1:
                continue
            begin = time.monotonic()
            try:
                with waiting.counted("all_reduce"):
                    work = dist.all_reduce(words, op=dist.ReduceOp.MAX, group=mesh.get_group(dim), async_op=True)
                    # Some groups (the threaded one) know no bound and are done by now.
                    work.wait() if self._timeout is None or work.is_completed() else work.wait(timedelta(seconds=self._timeout))
            except RuntimeError as error:
                raise DisagreementError(
                    f"the other ranks of {mesh} did not agree on this optimizer step within {time.monotonic() - begin:.0f} s "
                    f"({str(error).splitlines()[0]}): every rank has to call step() equally often, or one of them has failed"
                ) from error
        return words.cpu()

    def _compare(self) -> None:
        """Once: that all ranks hold the same parameters, or the bits above would be taken for each other's."""
        for mesh, indices in self._meshes:
            if mesh.size() == 1:
                continue
            shapes = [(tuple(self.parameters[i].shape), str(self.parameters[i].dtype)) for i in indices]
            digest = hashlib.sha256(repr((shapes, self._also)).encode()).digest()[:16]
            mine = torch.tensor([*digest, *(255 - byte for byte in digest)], dtype=torch.uint8)
            told = self._largest(mine, mesh)
            if not torch.equal(told, mine) or not torch.equal(told[:16], 255 - told[16:]):
                raise DisagreementError(
                    f"the ranks of {mesh} hold different parameters in this optimizer (here {len(indices)}): build it from the same "
                    f"parameters, in the same order, on every rank"
                )


def _evidence(parameter: Tensor) -> tuple[int, int]:
    """(a gradient is here, it is missing here); neither where this rank holds no elements of a tensor that others hold."""
    held = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    if held.numel() == 0 and parameter.numel() > 0:
        return 0, 0
    here = parameter.grad is not None
    return int(here), int(not here)


def _all_finite(grads: Sequence[Tensor]) -> bool:
    """Whether every element that this rank holds is finite. One pass; one wait for the device."""
    kinds: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        local = local_of(grad)
        if local.numel() and (local.is_floating_point() or local.is_complex()):
            kinds.setdefault(local.device, []).append(local)
    for held in kinds.values():
        # The largest magnitude is NaN if there is one. (A sum or an L2 norm could overflow without any fault.)
        largest = torch.stack([norm.to(torch.float32) for norm in foreach_norm(held, float("inf"))])
        if not bool(torch.isfinite(largest).all()):
            return False
    return True


def largest_of_ranks(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The maximum over the ranks; NaN if there is one. (gloo's own loses it, depending on the rank that has it.)"""
    both = torch.stack([part.nan_to_num(nan=0.0, posinf=torch.inf), part.isnan().to(part.dtype)])
    with waiting.counted("all_reduce"):
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return torch.where(both[1] > 0, torch.full_like(part, torch.nan), both[0])
