"""Muon on sharded parameters: each matrix is orthogonalized whole, on one rank, wherever its pieces lie.

This is ``torch.optim.Muon`` (torch 2.13) on ragged shards, bit for bit for FP32 parameters, at any world size and any cut. Momentum
stays on the shard. BF16 pieces go to the matrix's root rank, Newton-Schulz runs there, and the result comes back (``exchange.py``;
[veScale-FSDP], section 4). Sources: Jordan et al. 2024; Liu et al. 2025 (arXiv 2502.16982) for the update's size.

A step has two halves. The first agrees, communicates and computes, and writes nothing. The second writes momentum and parameters
without any communication. A rank that fails in a collective therefore still holds the state before the step.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vescale_ray.compat.core import disable_dynamo
from vescale_ray.optim.agree import Agreement, Decision, NonFiniteGradients, goes_on
from vescale_ray.optim.matrix.exchange import BUCKET_BYTES, Exchange, Itinerary, Job, domains, plan
from vescale_ray.optim.matrix.matrices import (
    Holding,
    MatrixSpan,
    RowBlocks,
    check_gradient,
    flat_local,
    flat_values,
    holding,
    matrices,
    wide,
)
from vescale_ray.optim.matrix.newton_schulz import KELLER_JORDAN, NewtonSchulz, coefficients
from vescale_ray.optim.matrix.normuon import RowMoments
from vescale_ray.optim.parameters import check_number, in_order, named_of, refuse_switches, take_sharded
from vescale_ray.optim.state_loading import InPlaceLoading

__all__ = ["SCALES", "Muon", "NonFiniteGradients"]

MOMENTUM = "momentum_buffer"

SCALES: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, cols: math.sqrt(max(1, rows / cols)),
    "match_rms_adamw": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
    "spectral": lambda rows, cols: math.sqrt(max(rows, cols)),
    "spectral_unclamped": lambda rows, cols: math.sqrt(rows / cols),
}
"""Rules for the factor on the learning rate of a ``rows x cols`` matrix. Sources, in order: Jordan et al.; Liu et al. (as large as
AdamW's update); NVIDIA's Emerging-Optimizers; torchtitan and dion."""


class Muon(InPlaceLoading):
    """Muon for sharded parameters. The arguments of ``torch.optim.Muon`` have the same meaning; further arguments are keyword-only.

    Args:
        params: matrices ``[m, n]`` and stacks of them ``[E, m, n]`` (experts; each is orthogonalized alone): RaggedDTensors, torch's
            DTensors under Shard(0), or plain tensors.
        lr, weight_decay, momentum, nesterov: per group. The decay is decoupled: ``lr * weight_decay``, without the scaling rule.
        ns_coefficients, ns_steps, eps: settings of Newton-Schulz, per group; coefficients are a set's name, one triple or several
            (:func:`~vescale_ray.optim.matrix.newton_schulz.coefficients`).
        adjust_lr_fn: per group: a rule of :data:`SCALES`; None: ``original``. Rows and columns are those of the orthogonalized
            matrix: an expert or a row block, never a shard.
        row_blocks: per group: sizes of row blocks that are orthogonalized alone: the rows of each head (a number), or of each part of
            a fused projection (all of them, in order).
        normuon: per group: decay of the second moment of each row (NorMuon, Li et al. 2025, arXiv 2510.05491; they use 0.95); None:
            off. Needs cuts at whole rows.
        nonfinite: policy if a gradient on any rank holds NaN or Inf: ``skip`` the step with a warning; ``raise``
            :class:`NonFiniteGradients`; or ``propagate`` it, as torch does (this saves one pass over the gradients).
        share_replicas: with replicated shards (HSDP), let each replica do a part of the Newton-Schulz, at the cost of one more
            exchange between replicas.
        batched: see :class:`~vescale_ray.optim.matrix.newton_schulz.NewtonSchulz`.
        bucket_bytes: approximate BF16 bytes that a root receives in one bucket.

    Every rank of the parameters' meshes must call :meth:`step` equally often. All states exist from the start.

    Raises:
        ValueError: a parameter is not a matrix, is complex, is cut in an unsupported way, or was replaced by ``fully_shard``; or a
            number is out of range. The message gives the remedy.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: str | Sequence[float] | Sequence[Sequence[float]] = KELLER_JORDAN,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        row_blocks: RowBlocks = None,
        normuon: float | None = None,
        nonfinite: str = "skip",
        share_replicas: bool = False,
        batched: bool | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        if nonfinite not in ("skip", "raise", "propagate"):
            raise ValueError(f"nonfinite = {nonfinite!r}: give skip, raise or propagate")
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes = {bucket_bytes}: give at least 1")
        self.nonfinite, self._share_replicas, self._bucket_bytes = nonfinite, share_replicas, bucket_bytes
        self._newton_schulz = NewtonSchulz(batched)
        self._route: _Route | None = None
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "row_blocks": row_blocks,
            "normuon": normuon,
        }
        super().__init__(in_order(type(self).__name__, params), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does; checks the parameters and creates their states."""
        take_sharded(param_group, self.param_groups)
        group = {**self.defaults, **param_group}
        refuse_switches(group, "Muon")
        _check_numbers(group)
        for index, entry in enumerate(param_group["params"]):
            name, parameter = entry if isinstance(entry, tuple) else (f"parameter {index}", entry)
            if not isinstance(parameter, Tensor):
                continue  # torch raises its own error for it
            if parameter.is_complex() or not parameter.is_floating_point():
                raise ValueError(f"Muon does not support {parameter.dtype} parameters such as {name}: give it to AdamW")
            if parameter.is_meta:
                raise ValueError(f"{name} is on the meta device, it has no storage: call to_empty(device=..) on the model first")
            _matrices(parameter, name, group)
            flat_local(parameter)
        super().add_param_group(param_group)
        self._route = None
        for parameter in self.param_groups[-1]["params"]:
            if parameter.requires_grad:
                self._make_state(parameter, group)

    def _make_state(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(parameter, requires_grad=False)
        if group["normuon"] is not None and RowMoments.KEY not in state:
            state[RowMoments.KEY] = RowMoments.zeros(parameter)

    skipped_steps = 0
    """Number of steps skipped so far because gradients were not finite."""

    @property
    def itineraries(self) -> tuple[Itinerary, ...]:
        """Plans of the communication, one for each set of ranks that share parameters: roots, buckets, balance, bytes."""
        return tuple(exchange.itinerary for exchange in self._routed().exchanges)

    @disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, decision: Decision | None = None) -> Any:  # type: ignore[override]
        """Take one step. Collective over the parameters' meshes.

        Args:
            decision: an earlier decision for these parameters, in this order; None: the ranks agree now.

        Raises:
            NonFiniteGradients: a gradient is not finite, with ``nonfinite="raise"``. Nothing was written.
            DisagreementError: ranks have different parameters, or a rank did not take part. Nothing was written.
            ValueError: a gradient is placed unlike its parameter. Nothing was written.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        route = self._routed()
        if decision is None:
            decision = route.agreement.decide(check_finite=self.nonfinite != "propagate", fault=self.fault())
            if decision.split:
                names = ", ".join(route.names[i] for i in decision.split[:3])
                warnings.warn(f"{names}: a gradient on some ranks only; all ranks leave it out of this step", stacklevel=2)
        if not goes_on(decision, self.nonfinite):
            self.skipped_steps += 1
            return loss
        active = frozenset(i for i, is_active in enumerate(decision.active) if is_active)
        parts = {i: self._part(route, i) for i in sorted(active)}
        landed = [(exchange, exchange.run(lambda job, where: _update(parts[job.param], where), active)) for exchange in route.exchanges]
        moments = [
            RowMoments.of(
                exchange, updates, {i: part.moments for i, part in parts.items() if part.moments is not None}, self._beta2s(parts)
            )
            for exchange, updates in landed
        ]
        # Nothing below communicates.
        for part in parts.values():
            part.advance()
        for (exchange, updates), rows in zip(landed, moments, strict=True):
            for index, update in updates.items():
                job = exchange.itinerary.jobs[index]
                scaled = rows.scaled(index, update) if rows is not None and rows.covers(index) else update
                parts[job.param].apply(job, exchange.rank, scaled)
        for part in parts.values():
            part.store()
        return loss

    def fault(self) -> Exception | None:
        """Return the error that would prevent this rank from taking a step now, or None.

        A gradient that is sparse, or is placed unlike its parameter, prevents it.
        """
        route = self._routed()
        for parameter, name in zip(route.parameters, route.names, strict=True):
            if parameter.grad is not None:
                try:
                    check_gradient(parameter, name)
                except (RuntimeError, ValueError) as error:
                    return error
        return None

    def _check_loaded_group(self, group: Mapping[str, Any], theirs: dict[str, Any]) -> None:
        """Raise ValueError if the loaded hyperparameters are invalid for this group's parameters."""
        refuse_switches(theirs, "Muon")
        _check_numbers(theirs)
        for name, parameter in named_of(group, 0):
            _matrices(parameter, name, theirs)

    def __getstate__(self) -> dict[str, Any]:
        settings = {key: self.__dict__[key] for key in ("nonfinite", "_share_replicas", "_bucket_bytes", "_newton_schulz")}
        return {**super().__getstate__(), **settings}  # without the route, which holds process groups and can be rebuilt

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._route = None

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _routed(self) -> _Route:
        if self._route is None or self._route.settings != _settings(self.param_groups):  # users may change a group between steps
            self._route = _Route(self.param_groups, self._newton_schulz, self._bucket_bytes, self._share_replicas)
        return self._route

    def _part(self, route: _Route, index: int) -> _Part:
        parameter, group = route.parameters[index], route.groups[index]
        self._make_state(parameter, group)
        return _Part(parameter, self.state[parameter], group)

    @staticmethod
    def _beta2s(parts: dict[int, _Part]) -> dict[int, float]:
        return {i: part.group["normuon"] for i, part in parts.items() if part.group["normuon"] is not None}


class _Route:
    """Data derived once from the param groups: the matrices, and the ranks that orthogonalize them."""

    def __init__(self, param_groups: Sequence[dict[str, Any]], newton_schulz: NewtonSchulz, bucket_bytes: int, share: bool) -> None:
        self.settings = _settings(param_groups)
        self.parameters: list[Tensor] = []
        self.names: list[str] = []
        self.groups: list[dict[str, Any]] = []
        for group in param_groups:
            names = group.get("param_names")
            for k, parameter in enumerate(group["params"]):
                self.names.append(names[k] if names else f"parameter {len(self.parameters)}")
                self.parameters.append(parameter)
                self.groups.append(group)
        found = [_matrices(p, name, group) for p, name, group in zip(self.parameters, self.names, self.groups, strict=True)]
        held = {i: holding for i, (holding, _) in enumerate(found)}
        self.exchanges: list[Exchange] = []
        for indices in domains(held.items()).values():
            jobs = []
            for i in indices:
                group = self.groups[i]
                rounds = coefficients(group["ns_coefficients"], group["ns_steps"])
                for span in found[i][1]:
                    jobs.append(Job.of(i, span, held[i].intervals, rounds, group["eps"]))
            first = held[indices[0]]
            replicas = first.replicas if share else 1
            itinerary = plan(jobs, len(first.intervals), replicas=replicas, bucket_bytes=bucket_bytes)
            one = self.parameters[indices[0]]
            home = flat_local(one).device
            # With CPU offload, the process group and the exchange are on the accelerator.
            device = torch.device(one.device_mesh.device_type) if isinstance(one, DTensor) and home.type == "cpu" else home
            self.exchanges.append(Exchange(itinerary, first, device, newton_schulz, home=home))
        self.agreement = Agreement(self.parameters, also="".join(e.itinerary.fingerprint() for e in self.exchanges))


class _Part:
    """One parameter's elements on this rank, during a step.

    FP32 parameters are written in place. Narrower ones go through an FP32 copy with one rounding, because BF16 arithmetic rounds
    differently at vector tails.
    """

    def __init__(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.group, self._parameter = group, parameter
        self._value, self._momentum = flat_local(parameter), flat_local(state[MOMENTUM])
        dtype = wide(self._value.dtype)
        # A rank without elements of it may have no gradient.
        self._gradient = flat_values(parameter.grad).to(dtype) if parameter.grad is not None else self._value.new_zeros(0, dtype=dtype)
        self._wide = self._value
        self.moments: Tensor | None = flat_local(state[RowMoments.KEY]) if group["normuon"] is not None else None
        lr = group["lr"]
        self._lr = float(lr.item() if isinstance(lr, Tensor) else lr)

    def direction(self, where: slice) -> Tensor:
        """Return the input of the orthogonalization for these elements; writes nothing."""
        gradient, mu = self._gradient[where], self.group["momentum"]
        new = self._momentum[where].to(gradient.dtype).lerp(gradient, 1 - mu)
        return gradient.lerp(new, mu) if self.group["nesterov"] else new

    def advance(self) -> None:
        """Write the momentum, and decay the parameter."""
        momentum = self._momentum.to(self._gradient.dtype)  # no copy if the momentum is FP32
        momentum.lerp_(self._gradient, 1 - self.group["momentum"])
        if momentum is not self._momentum:
            self._momentum.copy_(momentum)
        self._wide = self._value.to(self._gradient.dtype)
        self._wide.mul_(1 - self._lr * self.group["weight_decay"])

    def apply(self, job: Job, rank: int, update: Tensor) -> None:
        scale = SCALES[self.group["adjust_lr_fn"] or "original"](job.span.rows, job.span.cols)
        self._wide[job.local(rank)].add_(update, alpha=-(self._lr * scale))

    def store(self) -> None:
        if self._wide is not self._value:
            self._value.copy_(self._wide)
        torch.autograd.graph.increment_version([self._parameter])


def _update(part: _Part, where: slice) -> Tensor:
    return part.direction(where)


def _matrices(parameter: Tensor, name: str, group: Mapping[str, Any]) -> tuple[Holding, tuple[MatrixSpan, ...]]:
    """Return a parameter's division over the ranks, and its matrices; raises ValueError if the group's settings can't step it."""
    held = holding(parameter, name)
    spans = matrices(held.shape, group["row_blocks"], name)
    if group["normuon"] is not None:
        RowMoments.check(spans, held, name)
    return held, spans


def _settings(groups: Iterable[Mapping[str, Any]]) -> str:
    """Return the settings that the plan depends on, besides the parameters."""
    return repr([[group[key] for key in ("ns_coefficients", "ns_steps", "eps", "row_blocks", "normuon")] for group in groups])


def _check_numbers(group: Mapping[str, Any]) -> None:
    for key in ("lr", "weight_decay", "eps"):
        check_number(group, key)
    check_number(group, "momentum", most=1.0)
    if group["adjust_lr_fn"] is not None and group["adjust_lr_fn"] not in SCALES:
        raise ValueError(f"adjust_lr_fn = {group['adjust_lr_fn']!r}: known rules are {', '.join(SCALES)}")
    if group["normuon"] is not None and not (isinstance(group["normuon"], int | float) and 0.0 <= group["normuon"] < 1.0):
        raise ValueError(f"normuon = {group['normuon']}: give the second moment's decay, at least 0 and below 1, or None")
    coefficients(group["ns_coefficients"], group["ns_steps"])
