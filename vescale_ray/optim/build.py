"""One optimizer for a whole model: parameters routed by role, several optimizers behind one ``torch.optim.Optimizer``.

routing = route_parameters(model, config)                       # from global shapes: before or after sharding
fully_shard(layer, block_policy=routing.block_policy)           # the blocks that the optimizers need stay whole
optimizer = build_optimizer(model, config)                      # prints the routing; all states exist
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_ray.dtensor import RaggedDTensor
from vescale_ray.optim.agree import Agreement, Decision, goes_on
from vescale_ray.optim.base import BlockOptimizer
from vescale_ray.optim.loading import completed
from vescale_ray.optim.muon import Muon
from vescale_ray.optim.parameters import sharded_of
from vescale_ray.optim.routing import Name, OptimizerConfig, Route, Routing, optimizer_class, route_parameters

if TYPE_CHECKING:
    from vescale_ray.config import RunConfig, TrainSection

__all__ = ["CombinedOptimizer", "OptimizerConfig", "Routing", "build_optimizer", "route_parameters"]


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig | RunConfig | TrainSection | Mapping[str, Any] | str,
    *,
    routing: Routing | None = None,
    log: Callable[[str], object] | None = print,
    agree: bool = False,
    zeroed: bool = True,
) -> torch.optim.Optimizer:
    """The optimizer of ``model``'s trainable parameters, after sharding; all its states exist, and are zero.

    Args:
        config: an :class:`OptimizerConfig`, or what :meth:`OptimizerConfig.of` makes one of: a run's configuration, a mapping, a name.
        routing: from :func:`route_parameters`; None: routed now, which gives the same.
        log: gets the routing table, on rank 0; None: nobody.
        agree: agree with the other ranks before each step even where no optimizer communicates (with Muon they always do): the same
            parameters everywhere, and no step where a gradient of any rank is NaN or Inf. Costs one small all-reduce.
        zeroed: the states are zero. False: where their values are to come from elsewhere, some have none yet, and their memory is not
            touched twice.

    Returns:
        The one optimizer that steps everything, or a :class:`CombinedOptimizer`.

    Raises:
        ValueError: as :func:`route_parameters`; no trainable parameter; one on the meta device; what the optimizers themselves refuse.
    """
    chosen = OptimizerConfig.of(config)
    if log is not None and not callable(log):
        raise TypeError(f"log = {log!r} can't be called: give a function of one string, or None")
    routing = routing or route_parameters(model, chosen)
    named = {name: sharded_of(p) for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise ValueError("the model has no trainable parameter: there is nothing to optimize")
    on_meta = next((name for name, p in named.items() if p.is_meta), None)
    if on_meta is not None:
        raise ValueError(f"parameter {on_meta!r} is on the meta device, it has no storage: call to_empty(device=..) on the model first")
    if log is not None and (not dist.is_initialized() or dist.get_rank() == 0):
        log(str(routing))
    by_optimizer: dict[Name, list[Route]] = {}
    for name in named:
        by_optimizer.setdefault(routing[name].optimizer, []).append(routing[name])
    # What communicates in its step comes first: nothing is written yet if it fails.
    order = sorted(by_optimizer, key=lambda name: name != "muon")
    made = [_made(name, by_optimizer[name], named, chosen) for name in order]
    for optimizer in made:
        create_states(optimizer, zeroed=zeroed)
    return made[0] if len(made) == 1 and not agree else CombinedOptimizer(made, agree=agree)


def _made(name: Name, routes: Sequence[Route], named: Mapping[str, nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    main = name == config.name
    options = dict(config.options) if main else {}
    lr = config.matrix_lr if main and config.matrix_lr is not None and name not in ("adamw", "sgd") else config.lr
    common: dict[str, Any] = {"lr": lr, "weight_decay": config.weight_decay}
    pairs = [(route.name, named[route.name]) for route in routes]
    made = optimizer_class(name)
    if name == "muon":
        options.setdefault("adjust_lr_fn", "match_rms_adamw")  # so that one learning rate serves AdamW and Muon
        groups: dict[str, dict[str, Any]] = {}
        for route, pair in zip(routes, pairs, strict=True):
            group = groups.setdefault(repr(route.row_blocks), {"params": [], "row_blocks": route.row_blocks})
            group["params"].append(pair)
        optimizer: torch.optim.Optimizer = Muon(list(groups.values()), **common, **options)
    elif name == "sgd":
        optimizer = made(pairs, **common, **{"momentum": config.betas[0], **options})
    else:
        optimizer = made(pairs, betas=config.betas, eps=config.eps, **common, **options)
    return optimizer


@torch.no_grad()
def create_states(optimizer: torch.optim.Optimizer, *, zeroed: bool = True) -> None:
    """Let ``optimizer`` make the states that it would make in its first step; parameters and gradients stay.

    ``zeroed``: they are zero, and not just there; False holds for Adam's family alone.

    States that exist from the start can be checkpointed, moved to other ranks, and filled before the first step. Optimizers that make
    theirs at construction are left alone. Adam's family is asked for the states of a parameter of each kind, which the rest are made like.
    Others take a step with zero gradients and a rate of zero, after which their states are set to zero, as torch's
    ``get_optimizer_state_dict`` does; that takes several times as long, in the pause of each rescale.
    """
    without = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]
    if not without:
        return
    if isinstance(optimizer, torch.optim.Adam):  # AdamW is one, too
        for group in optimizer.param_groups:
            _ask_for_states(optimizer, group, zeroed)
        return
    grads = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for p, _ in grads:
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        optimizer.step()
    finally:
        for p, grad in grads:
            p.grad = grad
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = lr
    for p in without:
        for value in optimizer.state[p].values():
            if isinstance(value, Tensor):
                value.zero_()


def _ask_for_states(optimizer: torch.optim.Optimizer, group: dict[str, Any], zeroed: bool) -> None:
    """Torch takes 60 us for each sharded state, which counts where there are hundreds, in the pause of a rescale: so it makes those of one
    parameter of a kind."""
    first: dict[tuple[torch.dtype, torch.device], RaggedDTensor] = {}
    for p in group["params"]:
        if not p.requires_grad or optimizer.state.get(p):
            continue
        if isinstance(p, RaggedDTensor):
            model = first.setdefault((p.dtype, p.device), p)
            made = _like(optimizer.state[model], model, p, zeroed) if model is not p else None
            if made is not None:
                optimizer.state[p] = made
                continue
        grad = p.grad
        try:
            p.grad = p.detach()  # it only looks whether there is one: any tensor of the shape will do
            optimizer._init_group({**group, "params": [p]}, [], [], [], [], [], [])  # type: ignore[attr-defined]
        finally:
            p.grad = grad


def _like(states: Mapping[str, Any], of: RaggedDTensor, p: RaggedDTensor, zeroed: bool) -> dict[str, Tensor] | None:
    """States of ``p`` like fresh ones of ``of``; None: what these are is not known here."""
    made: dict[str, Tensor] = {}
    for key, value in states.items():
        if isinstance(value, RaggedDTensor) and value.shape == of.shape:
            local = p._local_tensor
            empty = (torch.zeros if zeroed else torch.empty)(local.shape, dtype=value.dtype, device=local.device)
            made[key] = RaggedDTensor.from_spec(empty, p._spec)
        elif type(value) is Tensor and value.dim() == 0:
            made[key] = value.clone()
        else:
            return None
    return made


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers over different parameters as one: their param groups, states, state dicts and steps, one after the other.

    Where one of them agrees with the other ranks before a step (Muon, or one that is told to by ``nonfinite``), all follow that one
    decision: on the same parameters, and all of them skip a step whose gradients are not finite, or whatever the strictest ``nonfinite``
    among them says.

    Args:
        agree: agree also where none of them does by itself.

    Attributes:
        optimizers: in the order of their steps; groups and states are theirs.
        skipped_steps: not taken so far, for gradients that were not finite.
    """

    skipped_steps = 0

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], *, agree: bool = False) -> None:
        if not isinstance(optimizers, Iterable):
            raise TypeError(f"CombinedOptimizer got a {type(optimizers).__name__}: give a list of optimizers")
        self.optimizers = tuple(optimizers)
        if not self.optimizers or not all(isinstance(one, torch.optim.Optimizer) for one in self.optimizers):
            kinds = ", ".join(type(one).__name__ for one in self.optimizers) or "nothing"
            raise TypeError(f"CombinedOptimizer got a list of {kinds}: give at least one optimizer, and nothing else")
        self._agree = agree
        seen: set[int] = set()
        for p in self._parameters():
            if id(p) in seen:
                raise ValueError(f"a parameter of shape {tuple(p.shape)} is in two of the combined optimizers: give it to one")
            seen.add(id(p))
        self._agreement: Agreement | None = None
        self._built = False
        super().__init__([{"params": self._parameters()}], {})
        self._built = True

    def _parameters(self) -> list[Tensor]:
        return [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]

    # torch's Optimizer assigns these two in its constructor; here they are views of what the parts have.
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        pass

    @property
    def state(self) -> Any:  # type: ignore[override]
        return _States(self.optimizers)

    @state.setter
    def state(self, value: Any) -> None:
        pass

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not here: add it to one of ``optimizers``. (torch's constructor calls this once.)"""
        if self._built:
            raise ValueError(
                "a combined optimizer does not know which part should step new parameters: add the group to one of .optimizers"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of every part. Collective if one of them communicates.

        Raises:
            NonFiniteGradients, DisagreementError: as :meth:`Muon.step`; RuntimeError, ValueError: a gradient that a part can't step. Then
                no part has stepped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        faults = [part.fault() for part in self.optimizers if isinstance(part, Muon | BlockOptimizer)]
        fault = next((found for found in faults if found is not None), None)
        policy = self._policy()
        if policy is None:
            if fault is not None:  # before another part has stepped
                raise fault
            for optimizer in self.optimizers:
                optimizer.step()
            return loss
        parameters = self._parameters()
        if self._agreement is None or [*map(id, self._agreement.parameters)] != [*map(id, parameters)]:
            self._agreement = Agreement(parameters)
        decision = self._agreement.decide(check_finite=policy != "propagate", fault=fault)
        if not goes_on(decision, policy):
            self.skipped_steps += 1
            return loss
        if decision.split:
            warnings.warn(
                f"{len(decision.split)} parameters have a gradient on some ranks only; left out of this step on all of them", stacklevel=2
            )
        position = 0
        for optimizer in self.optimizers:
            own = [p for group in optimizer.param_groups for p in group["params"]]
            active = decision.active[position : position + len(own)]
            position += len(own)
            if isinstance(optimizer, Muon | BlockOptimizer):
                optimizer.step(decision=Decision(active, (), True))
                continue
            hidden = [(p, p.grad) for p, steps in zip(own, active, strict=True) if not steps and p.grad is not None]
            try:
                for p, _ in hidden:
                    p.grad = None
                optimizer.step()
            finally:
                for p, grad in hidden:
                    p.grad = grad
        return loss

    def _policy(self) -> str | None:
        """What is done about NaN and Inf: the strictest that a part asks for. None: the ranks don't agree, nothing communicates."""
        asked = [part.nonfinite for part in self.optimizers if isinstance(part, Muon | BlockOptimizer)]
        strictest = next((policy for policy in ("raise", "skip") if policy in asked), None)
        if strictest is None and any(isinstance(part, Muon) for part in self.optimizers):
            return "propagate"
        return strictest or ("skip" if self._agree else None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, each part by its own rules (checks, dtypes).

        Raises:
            ValueError: other groups, or a state that a part refuses. Nothing is changed then.
        """
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = changed if changed is not None else state_dict
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError(f"loaded state dict has {len(groups)} parameter groups, this optimizer {len(self.param_groups)}")
        position = 0
        theirs: list[dict[str, Any]] = []
        unknown = dict(state_dict["state"])
        for optimizer in self.optimizers:
            own = groups[position : position + len(optimizer.param_groups)]
            position += len(own)
            ids = [i for group in own for i in group["params"] if i in unknown]
            theirs.append(completed(optimizer, {"state": {i: unknown.pop(i) for i in ids}, "param_groups": own}))
        if unknown:
            raise ValueError(f"the state dict has states of parameters {list(unknown)[:3]}, which are in none of its param groups")
        for optimizer, own_dict in zip(self.optimizers, theirs, strict=True):  # nothing is left to refuse
            optimizer.load_state_dict(own_dict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def adopt_states(self) -> None:
        """States were put in from outside: tell those optimizers that keep them elsewhere."""
        for optimizer in self.optimizers:
            adopt = getattr(optimizer, "adopt_states", None)
            if adopt is not None:
                adopt()

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": self.optimizers, "agree": self._agree}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["optimizers"], agree=state["agree"])  # type: ignore[misc]


class _States(MutableMapping[Any, Any]):
    """The states of several optimizers, by parameter."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def _of(self, parameter: Any) -> MutableMapping[Any, Any]:
        for optimizer in self._optimizers:
            if any(p is parameter for group in optimizer.param_groups for p in group["params"]):
                return optimizer.state
        raise KeyError(parameter)

    def __getitem__(self, parameter: Any) -> Any:
        for optimizer in self._optimizers:
            if parameter in optimizer.state:
                return optimizer.state[parameter]
        return self._of(parameter)[parameter]

    def __setitem__(self, parameter: Any, value: Any) -> None:
        self._of(parameter)[parameter] = value

    def __delitem__(self, parameter: Any) -> None:
        del self._of(parameter)[parameter]

    def __iter__(self) -> Iterator[Any]:
        return (parameter for optimizer in self._optimizers for parameter in optimizer.state)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)

    def get(self, parameter: Any, default: Any = None) -> Any:
        return next((o.state[parameter] for o in self._optimizers if parameter in o.state), default)
