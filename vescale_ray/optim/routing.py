"""Routing of each parameter to an optimizer, by its role in the model, with the block that this optimizer needs.

| role      | parameters                                                           | muon, shampoo, soap | adamw8bit |
|-----------|----------------------------------------------------------------------|---------------------|-----------|
| matrix    | 2-D, of hidden layers (routers and gates, too)                       | the same            | 8 bits    |
| expert    | 3-D: a stack of matrices; not of a convolution                       | the same            | 8 bits    |
| embedding | of ``nn.Embedding``, or named so; also when it is tied to the head   | adamw               | FP32      |
| head      | named so, or the last projection, with as many rows as an embedding  | adamw               | FP32      |
| norm      | of a module whose class is a norm                                    | adamw               | FP32      |
| vector    | others below two dimensions, [1, 1, n] (a token), stacks of biases   | adamw               | FP32      |
| other     | convolutions of any number of dimensions; four dimensions and more   | adamw               | FP32      |

Roles follow from modules, names and *global* shapes, so they are the same before and after sharding, on every rank, at every world
size. (Roles from local shapes would make every parameter 1-D, and Muon silently AdamW: DeepSpeed issue 8438.)
"""

from __future__ import annotations

import fnmatch
import importlib
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from vescale_ray.compat.core import ConvNd
from vescale_ray.geometry import Block
from vescale_ray.optim.matrix.matrices import RowBlocks
from vescale_ray.optim.parameters import check_betas, check_number
from vescale_ray.planner.models.shapes import is_head

if TYPE_CHECKING:
    from vescale_ray.config import RunConfig, TrainSection

Role = Literal["matrix", "expert", "embedding", "head", "norm", "vector", "other"]
Name = Literal["adamw", "adamw8bit", "muon", "shampoo", "soap", "sgd"]

MATRIX_OPTIMIZERS = frozenset({"muon", "shampoo", "soap", "adamw8bit"})
"""Optimizers of matrices and experts; AdamW steps the other parameters."""
CLASSES = {"adamw": "AdamW", "muon": "Muon", "adamw8bit": "AdamW8bit", "shampoo": "Shampoo", "soap": "SOAP"}
_OURS = frozenset({"params", "lr", "weight_decay", "betas", "eps", "row_blocks"})


@dataclass(frozen=True)
class OptimizerConfig:
    """Choice of an optimizer, with its hyperparameters.

    Attributes:
        name: the optimizer; ``adamw`` and ``sgd`` step everything, the others step matrices and experts, and AdamW steps the rest.
        lr: learning rate of AdamW (or SGD), and of the others unless ``matrix_lr`` is given.
        matrix_lr: learning rate of matrices and experts if another optimizer than AdamW steps them; None: ``lr``.
        weight_decay: decoupled weight decay of all parameters but ``no_decay`` (SGD adds it to the gradient).
        betas, eps: for AdamW and its derivatives. SGD's momentum is the first of ``betas``.
        options: further keyword arguments of the optimizer ``name``, as its docstring names them (``{"normuon": 0.95}``).
        no_decay: patterns of names of parameters without weight decay: ``["*.bias", "*norm*"]``.
        routes: optimizer by pattern of parameter names, with precedence over roles: ``{"*.router.weight": "adamw"}``.
        row_blocks: Muon's row blocks by pattern of parameter names: rows of each head, or of the parts of a fused projection.
        whole_matrices: keep each matrix (and each expert) whole on a rank. Muon then sends nothing; costs padding.
        fused: let AdamW step in torch's fused kernel on accelerators, unless ``options`` choose an implementation for it. A run with
            ``elastic.deterministic`` does not, since equal bits at every cut are known of the foreach form only.
    """

    name: Name = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    matrix_lr: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    no_decay: Sequence[str] = ()
    routes: Mapping[str, Name] = field(default_factory=dict)
    row_blocks: Mapping[str, RowBlocks] = field(default_factory=dict)
    whole_matrices: bool = False
    fused: bool = True

    def __post_init__(self) -> None:
        for given in (self.name, *self.routes.values()):
            if given not in get_args(Name):
                raise ValueError(f"there is no optimizer {given!r}: known are {', '.join(get_args(Name))}")
        for key in ("lr", "matrix_lr", "weight_decay", "eps"):
            if getattr(self, key) is not None:
                check_number({key: getattr(self, key)}, key)
        check_betas(self.betas)
        if isinstance(self.no_decay, str):
            raise ValueError(f"no_decay = {self.no_decay!r}: give a list of patterns of parameter names, for example ['*.bias']")
        if self.row_blocks and self.name != "muon":
            raise ValueError(f"row_blocks are Muon's, but the optimizer is {self.name}: leave them out, or use muon")

    @classmethod
    def of(cls, given: OptimizerConfig | RunConfig | TrainSection | Mapping[str, Any] | str) -> OptimizerConfig:
        """Build from a run's configuration or its ``train`` section, from the fields as a mapping, or from just a name."""
        if isinstance(given, OptimizerConfig):
            return given
        if isinstance(given, str):
            return cls(name=given)  # type: ignore[arg-type]
        if isinstance(given, Mapping):
            known = [one.name for one in fields(cls)]
            unknown = [key for key in given if key not in known]
            if unknown:
                raise ValueError(f"the optimizer's configuration has no {unknown[0]!r}: it takes {', '.join(known)}")
            return cls(**given)
        if not hasattr(getattr(given, "train", given), "optimizer_options"):
            raise TypeError(f"config is {given!r}: give the name of an optimizer, such as 'adamw', a mapping, or an OptimizerConfig")
        train: Any = getattr(given, "train", given)
        return cls(
            name=train.optimizer,
            lr=train.lr,
            matrix_lr=train.matrix_lr,
            weight_decay=train.weight_decay,
            betas=train.betas,
            eps=train.eps,
            options=train.optimizer_options,
            no_decay=train.no_decay,
            fused=not (hasattr(given, "elastic") and given.elastic.deterministic),
        )


@dataclass(frozen=True)
class ParameterRoute:
    """Route of one parameter. ``shape`` is global; no shard boundary may cut a ``block`` (None: any cut is allowed). ``decays``: weight
    decay applies."""

    name: str
    role: Role
    optimizer: Name
    shape: tuple[int, ...]
    block: Block | None
    row_blocks: RowBlocks = None
    decays: bool = True


class Routing:
    """Routes of all parameters, and the resulting ``block_policy``. ``print(routing)`` shows the table."""

    def __init__(self, routes: tuple[ParameterRoute, ...], parameters: Mapping[str, nn.Parameter]) -> None:
        self.routes = routes
        self._by_name = {route.name: route for route in routes}
        # fully_shard passes a parameter's name inside its unit, not in the model, so the key is the parameter itself.
        self._by_parameter: Any = WeakIdKeyDictionary({parameters[route.name]: route for route in routes})

    def __getitem__(self, name: str) -> ParameterRoute:
        if name not in self._by_name:
            raise ValueError(f"parameter {name!r} was not in the model when its parameters were routed: route the model that is optimized")
        return self._by_name[name]

    def block_policy(self, name: str, parameter: nn.Parameter) -> Block | None:
        """Return the parameter's block, for ``fully_shard(.., block_policy=routing.block_policy)``. Frozen parameters have none.

        Raises:
            ValueError: the model did not have this trainable parameter when it was routed.
        """
        if not parameter.requires_grad:
            return None
        route = self._by_parameter.get(parameter)
        if route is None:
            raise ValueError(f"parameter {name!r} was not in the model when its parameters were routed: route the model that is sharded")
        block: Block | None = route.block
        return block

    def __str__(self) -> str:
        rows: dict[tuple[str, ...], list[ParameterRoute]] = {}
        for route in self.routes:
            block = "-" if route.block is None else str(route.block)
            rows.setdefault((route.role, route.optimizer, block, "yes" if route.decays else "no"), []).append(route)
        table: list[tuple[str, ...]] = [("role", "optimizer", "block", "decay", "tensors", "parameters", "for example")]
        for key, routes in rows.items():
            numel = sum(math.prod(route.shape) for route in routes)
            table.append((*key, str(len(routes)), f"{numel:,}", f"{routes[0].name} {list(routes[0].shape)}"))
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table)


def route_parameters(model: nn.Module, config: OptimizerConfig | Mapping[str, Any] | str) -> Routing:
    """Route the trainable parameters of ``model``, which may be sharded or on the meta device.

    Args:
        config: an :class:`OptimizerConfig`, or an input of :meth:`OptimizerConfig.of`.

    Raises:
        TypeError: ``model`` is not a module, or ``config`` is not a configuration.
        ValueError: a pattern of ``routes``, ``row_blocks`` or ``no_decay`` matches nothing, a matrix optimizer gets no matrix,
            or an option is unknown.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is a {type(model).__name__}: give the module itself, not its parameters")
    config = OptimizerConfig.of(config)
    taken = inspect.signature(optimizer_class(config.name)).parameters
    for option in config.options:
        if option not in taken or option in _OURS:
            free = ", ".join(name for name in taken if name not in _OURS)
            raise ValueError(f"{config.name} has no option {option!r}: it takes {free}")
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    roles = roles_of(model)
    for what, patterns in (("routes", config.routes), ("row_blocks", config.row_blocks), ("no_decay", config.no_decay)):
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in named):
                raise ValueError(f"{what}: {pattern!r} matches no parameter; there are {', '.join(list(named)[:4])}, ..")
    routes = []
    for name, parameter in named.items():
        role, shape = roles[name], tuple(parameter.shape)
        rest: Name = "adamw" if config.name in MATRIX_OPTIMIZERS else config.name
        optimizer = next(
            (o for pattern, o in config.routes.items() if fnmatch.fnmatchcase(name, pattern)),
            config.name if role in ("matrix", "expert") else rest,
        )
        if optimizer != config.name and optimizer != rest:
            raise ValueError(f"routes: {name} to {optimizer}, but the optimizers of this run are {config.name} and {rest}")
        if optimizer in MATRIX_OPTIMIZERS and not 2 <= len(shape) <= 3:
            raise ValueError(f"routes: {name} of shape {shape} is not a matrix, which {optimizer} needs: route it to adamw")
        blocks = next((b for pattern, b in config.row_blocks.items() if fnmatch.fnmatchcase(name, pattern)), None)
        block = _block(name, parameter, optimizer, config)
        decays = not any(fnmatch.fnmatchcase(name, pattern) for pattern in config.no_decay)
        routes.append(ParameterRoute(name, role, optimizer, shape, block, blocks if optimizer == "muon" else None, decays))
    return Routing(tuple(routes), named)


def _block(name: str, parameter: nn.Parameter, optimizer: Name, config: OptimizerConfig) -> Block | None:
    """Return the block that the optimizer needs whole, or None."""
    shape = tuple(parameter.shape)
    if optimizer == "muon":
        if config.whole_matrices:
            return Block.tensor() if len(shape) == 2 else Block.rows(max(1, shape[-2]))
        return Block.rows(1) if config.options.get("normuon") is not None else None
    if optimizer in ("adamw8bit", "shampoo", "soap"):
        made = optimizer_class(optimizer)
        chosen = {key: config.options[key] for key in ("block", "min_8bit_numel") if key in config.options}
        block: Block | None = made.block_policy(**chosen)(name, parameter)
        return block
    return None


def optimizer_class(name: Name) -> Any:
    """Return the class of optimizer ``name``."""
    return torch.optim.SGD if name == "sgd" else getattr(importlib.import_module("vescale_ray.optim"), CLASSES[name])


def roles_of(model: nn.Module) -> dict[str, Role]:
    """Return every parameter's role, by its first name in the model."""
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((f"{module_name}.{attribute}".lstrip("."), module))
    vocabularies = {
        int(parameter.shape[0])
        for _, parameter in model.named_parameters()
        if any(_is_embedding(name, module, parameter) for name, module in owners[id(parameter)])
    }
    linears = [p for _, p in model.named_parameters() if p.ndim == 2 and any(isinstance(m, nn.Linear) for _, m in owners[id(p)])]
    roles = {name: _role(parameter, owners[id(parameter)]) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if roles[name] == "matrix" and linears and parameter is linears[-1] and int(parameter.shape[0]) in vocabularies:
            roles[name] = "head"
    return roles


def _role(parameter: Tensor, owners: list[tuple[str, nn.Module]]) -> Role:
    if any(_is_embedding(name, module, parameter) for name, module in owners):
        return "embedding"
    if parameter.ndim < 2:
        return "norm" if any(type(module).__name__.lower().rstrip("123d").endswith("norm") for _, module in owners) else "vector"
    if any(isinstance(module, ConvNd) for _, module in owners):
        return "other"  # a filter [out, in, k] is not a stack of matrices
    if parameter.ndim == 2 and any(is_head(name) for name, _ in owners):
        return "head"
    if (parameter.ndim == 3 and tuple(parameter.shape[:2]) == (1, 1)) or all(name.endswith("bias") for name, _ in owners):
        return "vector"
    return "matrix" if parameter.ndim == 2 else "expert" if parameter.ndim == 3 else "other"


def _is_embedding(name: str, module: nn.Module, parameter: Tensor) -> bool:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return True
    parts = name.lower().split(".")
    named = any(part in ("wte", "wpe", "tok_emb", "pos_emb") or "embed" in part for part in parts if not part.endswith("proj"))
    return named and (parameter.ndim == 2 or (parameter.ndim == 3 and parameter.shape[0] == 1))
