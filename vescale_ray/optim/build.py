"""One optimizer for a whole model: parameters routed by role to several optimizers, behind one ``torch.optim.Optimizer``.

routing = route_parameters(model, config)                       # needs global shapes only: before or after sharding
fully_shard(layer, block_policy=routing.block_policy)           # keeps the optimizers' blocks whole
optimizer = build_optimizer(model, config)                      # prints the routing and creates all states
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_ray.compat.core import disable_dynamo
from vescale_ray.dtensor.ragged_dtensor import RaggedDTensor
from vescale_ray.optim.agree import Agreement, Decision, goes_on
from vescale_ray.optim.base import BlockOptimizer
from vescale_ray.optim.matrix.muon import Muon
from vescale_ray.optim.parameters import sharded_of
from vescale_ray.optim.routing import Name, OptimizerConfig, ParameterRoute, Routing, optimizer_class, route_parameters
from vescale_ray.optim.state_loading import completed

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
    """Build the optimizer of ``model``'s trainable parameters, after sharding; all of its states exist, as zeros.

    Args:
        config: an :class:`OptimizerConfig`, or an input of :meth:`OptimizerConfig.of`: a run's configuration, a mapping, a name.
        routing: result of :func:`route_parameters`; None: compute it now, with the same result.
        log: called on rank 0 with the routing table; None: no log.
        agree: agree with the other ranks before each step even if no optimizer communicates (with Muon they always agree). All ranks
            then step the same parameters, and skip a step if any gradient is NaN or Inf. Costs one small all-reduce.
        zeroed: fill the states with zeros. False: some states stay uninitialized, for a caller that fills them; this saves one write.

    Returns:
        The only optimizer if it steps everything, or a :class:`CombinedOptimizer`.

    Raises:
        ValueError: as :func:`route_parameters`; also if there is no trainable parameter, one is on the meta device, or an optimizer
            refuses one.
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
    by_optimizer: dict[Name, list[ParameterRoute]] = {}
    for name in named:
        by_optimizer.setdefault(routing[name].optimizer, []).append(routing[name])
    # Optimizers that communicate in their step come first, so nothing is written yet if that fails.
    order = sorted(by_optimizer, key=lambda name: name != "muon")
    made = [_made(name, by_optimizer[name], named, chosen) for name in order]
    for optimizer in made:
        create_states(optimizer, zeroed=zeroed)
    return made[0] if len(made) == 1 and not agree else CombinedOptimizer(made, agree=agree)


def _made(
    name: Name, routes: Sequence[ParameterRoute], named: Mapping[str, nn.Parameter], config: OptimizerConfig
) -> torch.optim.Optimizer:
    main = name == config.name
    options = dict(config.options) if main else {}
    lr = config.matrix_lr if main and config.matrix_lr is not None and name not in ("adamw", "sgd") else config.lr
    common: dict[str, Any] = {"lr": lr, "weight_decay": config.weight_decay}
    groups: dict[str, dict[str, Any]] = {}
    for route in routes:
        about: dict[str, Any] = {"row_blocks": route.row_blocks} if name == "muon" else {}
        about |= {} if route.decays else {"weight_decay": 0.0}
        groups.setdefault(repr(about), {"params": [], **about})["params"].append((route.name, named[route.name]))
    if name == "muon":
        options.setdefault("adjust_lr_fn", "match_rms_adamw")  # one learning rate then serves AdamW and Muon
    elif name == "sgd":
        options.setdefault("momentum", config.betas[0])
    else:
        common |= {"betas": config.betas, "eps": config.eps}
        if name == "adamw" and config.fused and not options.keys() & {"fused", "foreach", "differentiable"}:
            # None, not False: torch then chooses its foreach form.
            options["fused"] = all(named[route.name].device.type != "cpu" for route in routes) or None
    made: torch.optim.Optimizer = optimizer_class(name)(list(groups.values()), **common, **options)
    return made


def check_options(config: OptimizerConfig) -> None:
    """Raise ValueError for options that the optimizer refuses when it is made."""
    route = ParameterRoute("weight", "matrix", config.name, (2, 2), None, None)
    try:
        _made(config.name, [route], {"weight": nn.Parameter(torch.zeros(2, 2))}, config)
    except (TypeError, ValueError) as error:
        options = ", ".join(f"{key}: {value!r}" for key, value in config.options.items())
        raise ValueError(f"train.optimizer_options = {{{options}}}: {config.name} refuses them ({error})") from None


@torch.no_grad()
def create_states(optimizer: torch.optim.Optimizer, *, zeroed: bool = True) -> None:
    """Create the states that ``optimizer`` would create in its first step; parameters and gradients stay.

    ``zeroed``: fill the states with zeros. False leaves them uninitialized, for Adam's family only.

    Eager states can be checkpointed, moved to other ranks, and filled before the first step. Optimizers that create theirs at
    construction are left alone. Adam's family creates states for one parameter of each kind, and the rest copy their form. Others take
    a step with zero gradients and a learning rate of zero; their states are then zeroed, as in torch's ``get_optimizer_state_dict``.
    Such a step takes several times as long, in the pause of each rescale.
    """
    without = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]
    if not without:
        return
    if isinstance(optimizer, torch.optim.Adam):  # includes AdamW
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
    """Create the states of one group.

    torch takes 60 us for each sharded state, and a rescale pauses for hundreds of them. torch therefore creates the states of one
    parameter of each kind only.
    """
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
            p.grad = p.detach()  # Adam only checks for None, so any tensor of the shape will do
            optimizer._init_group({**group, "params": [p]}, [], [], [], [], [], [])  # type: ignore[attr-defined]
        finally:
            p.grad = grad


def _like(states: Mapping[str, Any], of: RaggedDTensor, p: RaggedDTensor, zeroed: bool) -> dict[str, Tensor] | None:
    """Return new states for the parameter ``p``, made like ``states``, which another parameter ``of`` has.

    Returns None if one of the states is neither a tensor of the parameter's shape nor a number.
    """
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

    If one of them agrees with the other ranks before a step (Muon, or one with ``nonfinite`` set), all follow that decision. They step
    the same parameters, and the strictest ``nonfinite`` decides about gradients that are not finite.

    Args:
        agree: agree even if no optimizer does so by itself.

    Attributes:
        optimizers: the parts, in the order of their steps; groups and states belong to them.
        skipped_steps: number of steps skipped so far because gradients were not finite.
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

    # torch's Optimizer assigns these two in its constructor. Here they are views of the parts' values.
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
        """Raise ValueError: add the group to one of ``optimizers`` instead. (torch's constructor calls this once.)"""
        if self._built:
            raise ValueError(
                "a combined optimizer does not know which part should step new parameters: add the group to one of .optimizers"
            )

    @disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step every part. Collective if one of them communicates.

        Raises:
            NonFiniteGradients, DisagreementError: as :meth:`Muon.step`. No part has stepped.
            RuntimeError, ValueError: a part can't step a gradient. No part has stepped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        faults = [part.fault() for part in self.optimizers if isinstance(part, Muon | BlockOptimizer)]
        fault = next((found for found in faults if found is not None), None)
        policy = self._policy()
        if policy is None:
            if fault is not None:  # raised before any part has stepped
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
                f"{len(decision.split)} parameters have a gradient on some ranks only; all ranks leave them out of this step", stacklevel=2
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
        """Return the strictest ``nonfinite`` of the parts; None if the ranks don't agree, and nothing communicates."""
        asked = [part.nonfinite for part in self.optimizers if isinstance(part, Muon | BlockOptimizer)]
        strictest = next((policy for policy in ("raise", "skip") if policy in asked), None)
        if strictest is None and any(isinstance(part, Muon) for part in self.optimizers):
            return "propagate"
        return strictest or ("skip" if self._agree else None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, each part by its own rules (checks, dtypes).

        Raises:
            ValueError: the groups differ, or a part refuses a state. Nothing is changed then.
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
        for optimizer, own_dict in zip(self.optimizers, theirs, strict=True):  # all checks have passed
            optimizer.load_state_dict(own_dict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def adopt_states(self) -> None:
        """Notify the optimizers that keep states elsewhere that their states were replaced from outside."""
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
