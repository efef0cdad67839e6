"""The forward of a unit: recomputed in backward, compiled, or both. It is set on the module before the module is sharded.

``forward`` is replaced on the instance, inside the sharding hooks. So the names of modules, parameters and checkpoints stay the same, the
hooks are no part of a compiled graph, and backward recomputes while the unit is unsharded.

torch keeps compiled code by the code of the class, for the life of the process. Units of one class with equal sizes share it, and so do the
units of the next generation. It does not depend on the world size, because a unit computes on whole parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from vescale_ray.errors import BadInput, one_line
from vescale_ray.quantization import scaled_mm

if TYPE_CHECKING:
    from vescale_ray.config import RunConfig

Forward = Callable[..., Any]

KEPT: list[Any] = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten._grouped_mm.default,
    *scaled_mm.OPERATIONS,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]
"""Operations whose results selective checkpointing keeps: matrix products and attention, which take most of the time of a forward. The rest
is recomputed."""


def set_forward(unit: nn.Module, config: RunConfig, compiler: UnitCompiler, *, around: Sequence[nn.Module] = ()) -> None:
    """Set the unit's forward as ``train.activation_checkpointing`` and ``train.compile`` say.

    ``around``: modules of experts in the unit that workers share. They are not compiled, and the rest of the unit is compiled in pieces.
    """
    how = config.train.activation_checkpointing
    forward: Forward = unit.forward
    if config.train.compile and around:
        for module in around:
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
        forward = compiler.compiled(type(unit), unit.forward, in_pieces=True)
    if how != "none":
        forward = recomputed(forward, selective=how == "selective", whole=config.train.compile and bool(around))
    if config.train.compile and not around:
        # The recomputation is a part of the compiled graph.
        forward = compiler.compiled(type(unit), forward)
    if forward != unit.forward:
        unit.forward = forward  # type: ignore[method-assign]


def recomputed(forward: Forward, *, selective: bool, whole: bool = False) -> Forward:
    """Return the forward with its recomputation in backward.

    ``whole``: the recomputation does not stop early. That stop is an exception, which a compiled ``forward`` takes for a failure.
    """
    options: dict[str, Any] = {"context_fn": functools.partial(create_selective_checkpoint_contexts, KEPT)} if selective else {}
    if whole:
        options["early_stop"] = False

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return run


def recompute_selectively(units: Iterable[nn.Module]) -> None:
    """Make ``units`` keep the results of matrix products and attention only, and compute the others again in backward."""
    for unit in units:
        unit.forward = recomputed(unit.forward, selective=True)  # type: ignore[method-assign]


@contextmanager
def kept_results() -> Iterator[None]:
    """Name the remedy if a backward pass finds that the model has changed a result that selective checkpointing kept."""
    try:
        yield
    except RuntimeError as error:
        if "selective activation checkpoint has been mutated" not in str(error):
            raise
        raise BadInput(
            "train.activation_checkpointing = selective: a unit changes the result of a matrix product or of attention in place, so it "
            "can't be kept; use full or none"
        ) from None


class UnitCompiler:
    """Compiles the forward of units. It belongs to a worker's process and outlives its generations.

    A unit is compiled as one graph, for each shape of its inputs. If its class breaks the graph, units of this class are compiled in
    pieces. If that fails, too, they run as they are. Without gradients, in an evaluation, all units run as they are.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._ways: dict[type, int] = {}
        """Position, among the ways of :class:`_CompiledForward`, of the one that units of a class take; a class that is missing takes the
        first one."""
        self._problems: list[str] = []

    def compiled(self, kind: type, forward: Forward, *, in_pieces: bool = False) -> Forward:
        """Return a forward of a unit of class ``kind``, to be compiled in its first call."""
        if in_pieces:
            self._ways[kind] = max(self.way(kind), 1)
        # By default inductor measures kernels and takes the fastest. Processes may then differ in the order of a sum.
        options: Any = {"deterministic": True} if self._config.elastic.deterministic else None
        whole, pieces = (torch.compile(forward, fullgraph=graph, dynamic=False, options=options) for graph in (True, False))
        return _CompiledForward(self, kind, (whole, pieces, forward))

    def way(self, kind: type) -> int:
        return self._ways.get(kind, 0)

    def give_up(self, kind: type, way: int, problem: str) -> None:
        """Let units of ``kind`` take the way after ``way``, which has failed."""
        if self.way(kind) > way:
            return
        self._ways[kind] = way + 1
        what = "breaks the graph and is compiled in pieces" if way == 0 else "cannot be compiled and runs uncompiled"
        remedy = f"change {kind.__name__}.forward, or set train.compile=false"
        self._problems.append(f"train.compile = true: {kind.__name__} {what}, which is slower: {remedy} ({problem})")

    def take_problems(self) -> list[str]:
        """Return the problems since the last call, one for each class."""
        problems, self._problems = self._problems, []
        return problems


class _CompiledForward:
    """The forward of one unit in three ways: compiled as one graph, compiled in pieces, and uncompiled."""

    def __init__(self, compiler: UnitCompiler, kind: type, ways: tuple[Forward, Forward, Forward]) -> None:
        self._compiler, self._kind, self._ways = compiler, kind, ways

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._compiler.way(self._kind) if torch.is_grad_enabled() else 2, args, kwargs)

    def _run(self, way: int, args: Any, kwargs: Any) -> Any:
        if way == 2:
            return self._ways[way](*args, **kwargs)
        try:
            return self._ways[way](*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            problem = one_line(error)[:300] or type(error).__name__
        # The model's own errors are raised again here.
        result = self._run(way + 1, args, kwargs)
        self._compiler.give_up(self._kind, way, problem)
        return result
