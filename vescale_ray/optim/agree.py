"""Agreement of all ranks before a step: which parameters have gradients, and whether all gradients are finite.

A rank sees only its own part. One rank may lack a parameter's gradient, or its part may hold a NaN. If each rank decided for
itself, ranks that communicate would wait forever, and the others would train different models. One all-reduce of two bytes per
parameter therefore gives all ranks the same answer::

    a parameter's gradient is ..             then, on every rank, it is ..
    present on all ranks with elements       stepped
    present on no rank                       left out (frozen, or not used in this step)
    present on some ranks only               left out, and listed in Decision.split: this is a fault of the training loop

A rank that holds no elements of a parameter (an empty shard) has no vote: with or without a gradient, it follows the others.

Optimizers that communicate in the step (Muon) always agree first. Purely local ones (AdamW8bit, Shampoo, SOAP) agree only if
``nonfinite`` is ``skip`` or ``raise``; AdamW never does. In a :class:`~vescale_ray.optim.build.CombinedOptimizer` with Muon all follow
its decision; ``agree=True`` makes any combination agree.
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

from vescale_ray.communication import wait_notes
from vescale_ray.compat.core import foreach_norm
from vescale_ray.optim.parameters import local_of

_HERE, _MISSING = 0, 1  # columns of the all-reduced tensor; both set: present on some ranks only


class DisagreementError(RuntimeError):
    """The ranks cannot take the step together: their optimizers differ, or one rank did not take part."""


class NonFiniteGradients(RuntimeError):
    """A gradient holds NaN or Inf on some rank. All ranks raise this error."""


@dataclass(frozen=True)
class Decision:
    """The ranks' common decision about one step.

    Attributes:
        active: whether to step each parameter, in the agreement's order.
        split: indices of parameters with a gradient on some ranks only; all ranks leave them out.
        finite: whether every gradient element on every rank is finite; True if that was not checked.
    """

    active: tuple[bool, ...]
    split: tuple[int, ...]
    finite: bool


def goes_on(decision: Decision, nonfinite: str) -> bool:
    """Return whether to take the step; all ranks get the same answer.

    If gradients are not finite and ``nonfinite`` is ``skip``, warn and return False.

    Raises:
        NonFiniteGradients: gradients are not finite, and ``nonfinite`` is ``raise``.
    """
    if decision.finite or nonfinite == "propagate":
        return True
    if nonfinite == "raise":
        raise NonFiniteGradients("a gradient holds NaN or Inf on some rank: no rank has taken the step (nonfinite='skip' skips such steps)")
    warnings.warn("a gradient holds NaN or Inf on some rank: all ranks skip this optimizer step", stacklevel=3)
    return False


class Agreement:
    """Collective vote before each step over the ranks of the parameters' meshes.

    Args:
        parameters: DTensors (ragged or torch's) and plain tensors, in an order that all ranks share. Plain tensors have no mesh, so
            each rank decides for itself. If a DTensor is present, the finite flag covers them, too.
        also: further text that must be equal on all ranks; compared with the parameters' shapes before the first decision.
        timeout: seconds to wait for the other ranks; None: the process group's own timeout.

    If parameters live on several meshes, each mesh votes, smaller ones first. If the largest mesh contains the others, its ranks all
    get the same decision.
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
        """True if there is another rank to ask."""
        return any(mesh.size() > 1 for mesh, _ in self._meshes)

    @torch.no_grad()
    def decide(self, *, check_finite: bool = True, fault: Exception | None = None) -> Decision:
        """Decide about the current gradients. Collective: one all-reduce per mesh dimension of more than one rank.

        Args:
            check_finite: read all gradients for NaN and Inf (one pass over this rank's part).
            fault: the reason why this rank can't take the step. This rank raises it; the other ranks raise DisagreementError.

        Raises:
            DisagreementError: ranks hold different parameters, some did not arrive within the timeout, or one has a fault.
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
            raise DisagreementError("another rank can't take this optimizer step (its own error says why): no rank has taken it")
        return Decision(
            active=tuple(bool(s[_HERE]) and not s[_MISSING] for s in said),
            split=tuple(i for i, s in enumerate(said) if s[_HERE] and s[_MISSING]),
            finite=not bad,
        )

    def _largest(self, words: Tensor, mesh: DeviceMesh) -> Tensor:
        """Return the element-wise maximum over all ranks of ``mesh``, on the CPU."""
        words = words.to(mesh.device_type)
        for dim in range(mesh.ndim):
            if mesh.size(dim) == 1:
                continue
            begin = time.monotonic()
            try:
                with wait_notes.counted("all_reduce"):
                    work = dist.all_reduce(words, op=dist.ReduceOp.MAX, group=mesh.get_group(dim), async_op=True)
                    # Some process groups (the threaded one) support no timeout, and are done by now.
                    work.wait() if self._timeout is None or work.is_completed() else work.wait(timedelta(seconds=self._timeout))
            except RuntimeError as error:
                raise DisagreementError(
                    f"the other ranks of {mesh} did not agree on this optimizer step within {time.monotonic() - begin:.0f} s "
                    f"({str(error).splitlines()[0]}): every rank has to call step() equally often, or one of them has failed"
                ) from error
        return words.cpu()

    def _compare(self) -> None:
        """Check that all ranks hold the same parameters; the votes are matched by position."""
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
    """Return (a gradient is here, a gradient is missing here); both are 0 if only other ranks hold elements of the tensor."""
    held = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    if held.numel() == 0 and parameter.numel() > 0:
        return 0, 0
    here = parameter.grad is not None
    return int(here), int(not here)


def _all_finite(grads: Sequence[Tensor]) -> bool:
    """Return whether every element that this rank holds is finite. Takes one pass and one wait for the device."""
    kinds: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        local = local_of(grad)
        if local.numel() and (local.is_floating_point() or local.is_complex()):
            kinds.setdefault(local.device, []).append(local)
    for held in kinds.values():
        # The largest magnitude is NaN if any element is. A sum or an L2 norm could overflow although all elements are finite.
        largest = torch.stack([norm.to(torch.float32) for norm in foreach_norm(held, float("inf"))])
        if not bool(torch.isfinite(largest).all()):
            return False
    return True


def largest_of_ranks(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the maximum over the ranks; NaN if any rank has one. (gloo's maximum may lose NaN, depending on the rank that has it.)"""
    both = torch.stack([part.nan_to_num(nan=0.0, posinf=torch.inf), part.isnan().to(part.dtype)])
    with wait_notes.counted("all_reduce"):
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return torch.where(both[1] > 0, torch.full_like(part, torch.nan), both[0])
