"""Shapes of a model for the planner: repeated units of named tensors, from a name, a config.json or a module.

Nothing is allocated. :mod:`vescale_ray.planner.models.architectures` turns the figures of a ``config.json`` into these shapes.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from vescale_ray.geometry import Shape

if TYPE_CHECKING:
    from torch import nn

Kind = Literal["matrix", "expert", "embedding", "vector"]

UNQUANTIZED = ("*router*", "*.gate.*", "*_expert_gate.*", "*.lora_A.*", "*.lora_B.*")
"""Usual names of matrices that FP8 leaves alone: routers of experts, gates of shared experts (Qwen3-Next), and adapters."""
HEADS = frozenset({"head", "lm_head", "output", "unembed", "classifier", "score"})
"""Usual names of a model's last projection."""


def holds_experts(module: nn.Module) -> bool:
    """Return whether ``module`` holds stacks of experts that ranks can share: ``vescale_ray.models.moe.Experts``, or fused experts of
    transformers."""
    # transformers' decorator of classes of fused experts sets ``_is_expert_parallel``.
    of_transformers = hasattr(module, "_is_expert_parallel") and hasattr(module, "num_experts")
    return of_transformers or bool(getattr(module, "takes_rows_by_expert", False))


def is_head(name: str) -> bool:
    """Return whether a parameter's module has a head's name at the top of the model, or is a ``lm_head`` anywhere."""
    modules = name.split(".")[:-1]
    return modules[-1:] == ["lm_head"] or (len(modules) == 1 and modules[0] in HEADS)


@dataclass(frozen=True)
class ParamShape:
    """Shape and kind of one tensor.

    Attributes:
        kind: category for block policies and optimizers; experts are matrices that only some tokens use, and heads count as embeddings.
        matrices: number of separate matrices that one expert of this stack becomes (``ModelShapes.with_experts``), cut along its second
            last dimension.
        stack: dimension 0 is the expert, and ranks can share the experts (:func:`holds_experts`).
        policy: whether a run's policy gives the tensor an FP8 format; None: as ``fp8_policy`` does by default.
    """

    name: str
    shape: Shape
    kind: Kind
    trainable: bool = True
    matrices: int = 1
    stack: bool = False
    policy: bool | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def quantizable(self) -> bool:
        """Return whether the run's policy gives the tensor an FP8 format.

        Without a policy, matrices and stacks of matrices have one, except those with a name in :data:`UNQUANTIZED`."""
        if self.policy is not None:
            return self.policy
        kept = any(fnmatch.fnmatchcase(f".{self.name}", pattern) for pattern in UNQUANTIZED)
        return self.kind in ("matrix", "expert") and len(self.shape) in (2, 3) and self.numel > 0 and not kept


@dataclass(frozen=True)
class UnitShape:
    """The tensors of one layer (or of a part outside the layers), and the number of such layers.

    ``resident``: the unit stays gathered from its forward to its backward, as the engine does with the root.
    """

    name: str
    params: tuple[ParamShape, ...]
    count: int = 1
    resident: bool = False

    @property
    def numel(self) -> int:
        """Number of elements of one layer."""
        return sum(p.numel for p in self.params)


@dataclass(frozen=True)
class ModelShapes:
    """Shapes of a model.

    Attributes:
        units: the tensors that are gathered together, in order of use; a tied tensor is listed once.
        hidden: width of the residual stream, for the estimate of activations; 0 if unknown.
        active: number of parameters that one token uses.
        source: origin of the figures.
        top_k: experts of a layer that compute a token; 0 if unknown.
    """

    name: str
    units: tuple[UnitShape, ...]
    hidden: int
    vocab: int
    active: int
    source: str
    top_k: int = 0

    @property
    def numel(self) -> int:
        return sum(u.numel * u.count for u in self.units)

    @property
    def layers(self) -> int:
        return sum(u.count for u in self.units if u.count > 1 or u.name.startswith("layer"))

    def with_experts(self, how: Literal["fused", "separate"]) -> ModelShapes:
        """Return the model with experts as stacks ``[E, n, m]`` ("fused") or as single matrices. Stacks of biases stay stacks."""
        if how == "fused":
            return self
        return replace(self, units=tuple(replace(u, params=tuple(q for p in u.params for q in _separate(p))) for u in self.units))


def _separate(param: ParamShape) -> list[ParamShape]:
    if param.kind != "expert" or len(param.shape) < 3:
        return [param]
    experts, rows, columns = param.shape
    names = [f"{param.name}.{e}" for e in range(experts)]
    if param.matrices > 1:
        names = [f"{name}.{k}" for name in names for k in range(param.matrices)]
    return [ParamShape(name, (rows // param.matrices, columns), param.kind, param.trainable) for name in names]


def from_module(module: nn.Module, name: str, quantized: Callable[[str, nn.Parameter], bool] | None = None) -> ModelShapes:
    """Return the shapes of any module: one unit for each member of its ModuleLists, and one for the rest (embeddings, head, norms).

    Only the outermost ModuleLists count. Consecutive members with the same parameters form one repeated unit. A tied parameter is
    listed once, under its first name. The planner groups a unit's frozen parameters separately, as the engine does. Parameters of more
    than two dimensions count as experts, and biases as vectors.

    Args:
        quantized: ``(name, parameter) -> bool``: whether a run gives the parameter an FP8 format. None: as ``fp8_policy`` does by default.
    """
    from torch import nn

    lists = [n for n, m in module.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    lists = [n for n in lists if not any(n.startswith(outer + ".") for outer in lists)]
    inside: dict[str, list[ParamShape]] = {}
    root: list[ParamShape] = []
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    linears = [m.weight for m in module.modules() if isinstance(m, nn.Linear)]
    rows = {int(m.num_embeddings) for m in module.modules() if isinstance(m, nn.Embedding)}
    embeddings |= {id(weight) for weight in linears[-1:] if len(weight) in rows}  # the head
    hidden = max((int(m.embedding_dim) for m in module.modules() if isinstance(m, nn.Embedding)), default=0)
    vocab = max((int(m.num_embeddings) for m in module.modules() if isinstance(m, nn.Embedding)), default=0)
    stacks = {id(param) for one in module.modules() if holds_experts(one) for param in one.parameters()}
    for path, param in module.named_parameters():
        kind: Kind = "vector" if param.dim() < 2 or path.endswith("bias") else "expert" if param.dim() > 2 else "matrix"
        kind = "embedding" if id(param) in embeddings or (kind == "matrix" and is_head(path)) else kind
        owner = next((outer for outer in lists if path.startswith(outer + ".")), None)
        policy = None if quantized is None else quantized(path, param)
        shape = ParamShape(path, tuple(param.shape), kind, param.requires_grad, stack=id(param) in stacks, policy=policy)
        if owner is None:
            root.append(shape)
            continue
        index, _, rest = path[len(owner) + 1 :].partition(".")
        inside.setdefault(f"{owner}.{index}", []).append(replace(shape, name=rest or index))
    units: list[UnitShape] = []
    for unit, params in inside.items():
        if units and units[-1].params == tuple(params) and units[-1].name.rpartition(".")[0] == unit.rpartition(".")[0]:
            units[-1] = replace(units[-1], count=units[-1].count + 1)
        else:
            units.append(UnitShape(unit, tuple(params)))
    units = [replace(u, name=f"layers {u.name}") for u in units]
    if root:
        units.insert(0, UnitShape("root", tuple(root), resident=True))
    total = sum(u.numel * u.count for u in units)
    chosen = [top_k for m in module.modules() if isinstance(top_k := getattr(m, "top_k", None), int)] if stacks else []
    top_k = max(chosen, default=0)
    idle = sum(p.numel * u.count * (1 - top_k / p.shape[0]) for u in units for p in u.params if p.stack) if top_k else 0
    return ModelShapes(name, tuple(units), hidden, vocab, total - round(idle), "the module's parameters", top_k)
