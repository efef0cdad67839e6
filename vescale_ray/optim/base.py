"""Base class of the block-wise optimizers: eager states, loading that keeps every bit, and errors that name a remedy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.adamw import adamw

from vescale_ray.compat.core import disable_dynamo
from vescale_ray.dtensor.ragged_dtensor import RaggedDTensor
from vescale_ray.dtensor.spec import sharding_of
from vescale_ray.optim.agree import Agreement, Decision, goes_on
from vescale_ray.optim.parameters import check_betas, check_number, in_order, local_of, named_of, refuse_switches, take_sharded
from vescale_ray.optim.state_loading import InPlaceLoading


class BlockOptimizer(InPlaceLoading, ABC):
    """A local optimizer: each rank steps its own elements, and a step communicates only if ``nonfinite`` makes the ranks agree first.

    Subclasses define a parameter's states in :meth:`_new_state` and its step in :meth:`_update`. The constructor makes all states, as
    zeros, with the same keys on every rank, even if a rank holds no elements. Each state is sharded like its parameter. A step leaves
    out parameters without a gradient.

    Args:
        nonfinite: policy for NaN and Inf in gradients. ``propagate``: no check, as in torch. ``skip`` or ``raise``: before each step
            the ranks agree in one all-reduce of two bytes per parameter. If a gradient on any rank isn't finite, all ranks skip the
            step or all raise. Parameters with a gradient on some ranks only are left out on all.
    """

    skipped_steps = 0
    """Number of steps skipped so far because gradients were not finite."""

    def __init__(self, params: Any, defaults: dict[str, Any], nonfinite: str) -> None:
        if nonfinite not in ("propagate", "skip", "raise"):
            raise ValueError(f"nonfinite = {nonfinite!r}: give propagate, skip or raise")
        self.nonfinite = nonfinite
        self._agreement: Agreement | None = None
        super().__init__(in_order(type(self).__name__, params), defaults)

    @abstractmethod
    def _new_state(self, param: Tensor, name: str, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return all states but ``step``, as zeros. ``name`` is "" if it isn't known. Raises ValueError if none is possible."""

    @abstractmethod
    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Step ``params``, those of the group with a (checked) gradient: dense, sharded like the parameter; without autograd."""

    @abstractmethod
    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError for invalid hyperparameters; may convert them into their stored form."""

    # -- construction ------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does, and make the states of its parameters at once.

        Raises:
            ValueError: a parameter can't be stepped by this optimizer; no group was added.
        """
        take_sharded(param_group, self.param_groups)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            refuse_switches(group, type(self).__name__)
            self._check_group(group)
            made = [(param, self._initial(param, name, group)) for name, param in named_of(group, len(self.param_groups) - 1)]
        except BaseException:
            self.param_groups.pop()
            raise
        for param, state in made:
            self.state[param] = state
        self._formats: list[tuple[Any, ...]] = [_format(g) for g in self.param_groups]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "nonfinite": self.nonfinite}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._agreement = None
        if "_formats" not in self.__dict__:  # unpickled or copied
            self._formats = [_format(group) for group in self.param_groups]

    def _initial(self, param: Tensor, name: str, group: dict[str, Any]) -> dict[str, Tensor]:
        known = "" if name.startswith("#") else name
        if param.is_meta:
            raise ValueError(f"parameter {name} is on the meta device, it has no storage: call to_empty() on the model first")
        if param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"parameter {name} is {param.dtype}: {type(self).__name__} computes in FP32, for parameters of at most 32 bits; cast the "
                f"model to float32, or use torch.optim.AdamW"
            )
        try:
            state = self._new_state(param, known, group)
        except ValueError as error:
            raise ValueError(f"parameter {name} of shape {tuple(param.shape)}: {error}") from None
        return {"step": torch.zeros((), dtype=torch.float32), **state}

    # -- step --------------------------------------------------------------------------------------------------------

    @disable_dynamo
    @torch.no_grad()
    def step(self, closure: Any = None, *, decision: Decision | None = None) -> Any:
        """Take one step; ``closure`` recomputes the loss, which is returned. Communicates only if ``nonfinite`` says so.

        Args:
            decision: an earlier decision for these parameters, in this order; the ranks don't agree again.

        Raises:
            RuntimeError: a gradient is sparse, or is not placed like its parameter; or a param group's ``block`` no longer matches
                its states. Nothing was changed.
            NonFiniteGradients: a gradient is not finite, with ``nonfinite="raise"``. Nothing was changed.
            DisagreementError: see :mod:`vescale_ray.optim.agree`. Nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [p for group in self.param_groups for p in group["params"]]
        active: Sequence[bool] = [p.grad is not None for p in params]
        fault = self.fault()
        if decision is None and self.nonfinite != "propagate":
            if self._agreement is None or [*map(id, self._agreement.parameters)] != [*map(id, params)]:
                self._agreement = Agreement(params)
            decision = self._agreement.decide(fault=fault)  # called even if this rank has a fault, because the others wait for it
            if not goes_on(decision, self.nonfinite):
                self.skipped_steps += 1
                return loss
        elif fault is not None:
            raise fault
        if decision is not None:
            for p, mine, all_ranks in zip(params, active, decision.active, strict=True):
                if all_ranks and not mine:  # this rank holds none of it, but counts the step
                    self.state[p]["step"] += 1
            active = [mine and all_ranks for mine, all_ranks in zip(active, decision.active, strict=True)]
        position = 0
        for group in self.param_groups:
            stepped = [p for p, steps in zip(group["params"], active[position:], strict=False) if steps]
            position += len(group["params"])
            if stepped:
                self._update(group, stepped)
        return loss

    def fault(self) -> RuntimeError | None:
        """Return the error that would prevent this rank from taking a step now, or None."""
        try:
            self._check_step()
        except RuntimeError as error:
            return error
        return None

    def _check_step(self) -> None:
        """Raise RuntimeError if this rank can't take a step in its present state."""
        for index, (group, format) in enumerate(zip(self.param_groups, self._formats, strict=True)):
            if _format(group) != format:
                raise RuntimeError(
                    f"param group {index} has (block, codec) {_format(group)}, but its states have {format}: a checkpoint of other blocks "
                    "was loaded; build the optimizer, and shard the model, with the block of the checkpoint"
                )
            for name, param in named_of(group, index):
                if param.grad is not None:
                    _check_gradient(name, param)

    # -- loading -----------------------------------------------------------------------------------------------------

    def _check_loaded_group(self, group: Mapping[str, Any], theirs: dict[str, Any]) -> None:
        """Raise ValueError if the loaded group's states have another format than this group's, or its hyperparameters are invalid."""
        refuse_switches(theirs, type(self).__name__)
        self._check_group(theirs)
        if _format(theirs) != _format(group):
            raise ValueError(
                f"the state is of (block, codec) {_format(theirs)}, this optimizer's of {_format(group)}: build it with the same block"
            )


def _format(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the settings that, with the parameter's shape, define the states' format."""
    return group.get("block"), group.get("codec_version")


def check_common(group: Mapping[str, Any]) -> None:
    """Raise ValueError for a learning rate, betas, eps or weight decay out of range."""
    for key in ("lr", "eps", "weight_decay"):
        check_number(group, key)
    check_betas(group["betas"])


def _check_gradient(name: str, param: Tensor) -> None:
    grad = param.grad
    assert grad is not None
    if grad.is_sparse:
        raise RuntimeError(f"the gradient of parameter {name} is sparse: this optimizer needs dense ones (nn.Embedding(sparse=False))")
    if isinstance(param, RaggedDTensor):
        same = isinstance(grad, RaggedDTensor) and sharding_of(grad._spec).same_layout(sharding_of(param._spec))
    else:
        same = getattr(grad, "placements", None) == getattr(param, "placements", None)
    if not same or local_of(grad).shape != local_of(param).shape:
        raise RuntimeError(
            f"the gradient of parameter {name} is placed {getattr(grad, 'placements', 'plain')}, the parameter "
            f"{getattr(param, 'placements', 'plain')}: redistribute the gradient before the step"
        )


def is_embedding_or_head(name: str) -> bool:
    """Return whether a parameter's name marks it as an embedding or the output head; "" never does."""
    parts = name.lower().split(".")[:-1]
    return any("embed" in part or part in ("wte", "wpe", "lm_head") for part in parts) or parts in (["head"], ["output"])


def step_adamw(
    items: list[tuple[Tensor, dict[str, Tensor]]], lr: float, beta1: float, beta2: float, eps: float, weight_decay: float
) -> None:
    """Run torch's own AdamW on local tensors; BF16 parameters go through FP32 copies."""
    params = [local_of(p) for p, _ in items]
    wide = [p if p.dtype == torch.float32 else p.float() for p in params]
    grads = []
    for p, _ in items:
        assert p.grad is not None
        grads.append(local_of(p.grad).float())
    adamw(
        wide,
        grads,
        [local_of(s["exp_avg"]) for _, s in items],
        [local_of(s["exp_avg_sq"]) for _, s in items],
        [],
        [s["step"] for _, s in items],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )
    for target, updated in zip(params, wide, strict=True):
        if updated is not target:
            target.copy_(updated)


def sqrt_(x: Tensor) -> None:
    """Take the correctly rounded square root, in place.

    torch's root on a CPU is not correctly rounded: torch 2.13 with AVX-512 is one unit off for 20 % of numbers. Vector tails may
    take other instructions, too. A GPU's root is, and so is numpy's, at the same speed.
    """
    if x.device.type == "cpu":
        np.sqrt(x.numpy(), out=x.numpy())
    else:
        x.sqrt_()
