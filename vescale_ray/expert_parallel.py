"""Expert parallelism: each rank holds some of the experts, and computes the rows of all ranks that chose them.

    rank 0 | rows for experts 0 1 | 2 3        ->  rows of both ranks for experts 0 1  ->  rows of rank 0
    rank 1 | rows for experts 0 1 | 2 3            rows of both ranks for experts 2 3      rows of rank 1

The ranks are one dimension of a mesh. Each also has its own batch, so they are data-parallel ranks for all other parameters. Experts are
cut along dimension 0; :func:`vescale_ray.fully_shard` divides each rank's experts over the other dimension of the mesh. The model has no
code for any of this: :func:`parallelize_experts` replaces the forward of the modules that hold experts.

An exchange sends each row to the rank of its expert and back, so there are two all-to-alls per layer in forward and two in backward. No
row is dropped. The host waits once per layer for the numbers of rows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from vescale_ray.communication import point_to_point, wait_notes
from vescale_ray.compat.core import disable_dynamo
from vescale_ray.fsdp.construction.arguments import check_type
from vescale_ray.fsdp.layouts.group_parameter import SUMMED_OVER
from vescale_ray.fsdp.units.forward_checks import is_managed
from vescale_ray.fsdp.units.schedule import unit_of
from vescale_ray.models.moe import Experts
from vescale_ray.planner.models.shapes import holds_experts


def parallelize_experts(model: nn.Module, mesh: DeviceMesh, *, kind: type[nn.Module] | None = None) -> list[Any]:
    """Distribute the experts of ``model`` over the ranks of ``mesh``, in place, before ``fully_shard``::

        mesh = init_device_mesh("cuda", (dp, ep), mesh_dim_names=("dp", "ep"))
        for experts in parallelize_experts(model, mesh["ep"]):
            fully_shard(experts, mesh=mesh["dp"])
        for layer in model.layers:
            fully_shard(layer)          # over all ranks
        fully_shard(model)

    The parameters become DTensors with ``Shard(0)``. Forward, gradients, optimizer steps and state dicts are those of the same model
    without expert parallelism on the same ranks, up to rounding. By default ``fully_shard`` divides the sum of an expert's gradients by
    the number of all data-parallel ranks, those of ``mesh`` included.

    Args:
        model: a model whose ranks have equal parameters, or that is on the meta device.
        mesh: one dimension of the mesh, whose ranks hold different experts. Each rank has its own part of the batch.
        kind: class of the modules that hold experts. The first dimension of each parameter is the expert. ``forward(rows, counts)``
            computes rows that are ordered by expert, ``counts`` of each, and returns as many elements. It reads the number of experts from
            ``counts`` or its parameters.
            None: :class:`vescale_ray.models.moe.Experts`, and the fused experts of transformers.

    Returns:
        The modules that hold experts, for ``fully_shard`` with the other dimension of the mesh.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there are no experts, the ranks do not divide them, or the model is parallel or sharded already.
    """
    check_type("model", model, nn.Module, "the model itself")
    check_type("mesh", mesh, DeviceMesh, "mesh['ep']")
    if mesh.ndim != 1:
        raise ValueError(f"parallelize_experts got {mesh}: give the one dimension whose ranks share the experts, such as mesh['ep']")
    if mesh.get_coordinate() is None:
        raise ValueError(f"this process is not part of {mesh}: give the dimension of a mesh of all ranks, such as mesh['ep']")
    found = experts_of(model, kind)
    check_experts(model, mesh.size(), f"ranks of {mesh}", kind)
    placed: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in found.items():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[attribute] = placed.setdefault(parameter, _part(parameter, mesh))
        adapter = _TransformersForward if kind is None and not isinstance(module, Experts) else _RowsForward
        module.forward = adapter(module, mesh, name)  # type: ignore[method-assign]
    return list(found.values())


def experts_of(model: nn.Module, kind: type[nn.Module] | None = None) -> dict[str, nn.Module]:
    """Return the modules that hold experts by name; ``kind`` as for :func:`parallelize_experts`."""
    return {name: module for name, module in model.named_modules() if (isinstance(module, kind) if kind else holds_experts(module))}


def check_experts(model: nn.Module, ranks: int, of: str, kind: type[nn.Module] | None = None) -> None:
    """Check whether :func:`parallelize_experts` can distribute the experts of ``model`` over this number of ranks.

    Args:
        of: name of the ranks, for messages.

    Raises:
        ValueError: there are no experts, the ranks do not divide them, or the model is parallel or sharded already.
    """
    found = experts_of(model, kind)
    if not found:
        named = "vescale_ray.models.moe.Experts or fused experts of transformers" if kind is None else f"class {kind.__name__}"
        raise ValueError(
            f"{type(model).__name__} has no module of {named}: name the class of its experts with kind=.., whose forward takes (rows, "
            f"counts)"
        )
    for name, module in found.items():
        _check(name or type(module).__name__, module, ranks, of)


def _check(name: str, module: nn.Module, ranks: int, of: str) -> None:
    """Raise ValueError if the experts of ``module`` can't be distributed over ``ranks`` ranks."""
    inside = next((n for n, one in module.named_modules() if one is not module and any(True for _ in one.parameters(recurse=False))), None)
    inside = inside or next((n for n, _ in module.named_buffers()), None)
    if inside is not None:
        raise ValueError(f"{name}.{inside}: all experts must be parameters of one module; name the class that holds them with kind=..")
    for attribute, parameter in module.named_parameters():
        if is_managed(module, attribute):
            raise ValueError(f"fully_shard has sharded {name} already: call parallelize_experts before it, on the plain model")
        if isinstance(parameter, DTensor):
            raise ValueError(f"{name}.{attribute} is a DTensor already: call parallelize_experts once, on the plain model")
        if parameter.ndim == 0 or parameter.shape[0] % ranks:
            raise ValueError(
                f"{name}.{attribute} of shape {tuple(parameter.shape)}: the {ranks} {of} do not divide its experts; use a number that does"
            )


def _part(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """Return this rank's experts of ``parameter``."""
    own = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].clone(memory_format=torch.contiguous_format)
    part = nn.Parameter(DTensor.from_local(own, mesh, [Shard(0)], run_check=False), requires_grad=parameter.requires_grad)
    part.__dict__.update({**parameter.__dict__, SUMMED_OVER: mesh.size()})
    return part


class _ParallelForward(ABC):
    """The forward of experts that are distributed over ranks. A subclass knows the arguments of the module's own forward."""

    def __init__(self, module: Any, mesh: DeviceMesh, name: str) -> None:
        self.module, self.kind = module, type(module)
        self._lane = _Lane(mesh.get_group(), name)

    def exchanged(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Compute ``rows``, ordered by expert, ``counts`` of each of all experts, on the ranks of the experts."""
        unit = unit_of(self.module)
        if unit is not None and not unit.options.contributes and torch.is_grad_enabled():
            # Zero times a gradient would keep NaN and infinity of these rows in the experts, so other ranks get none of them.
            return rows.new_zeros(rows.shape) + self._on_their_ranks(rows[:0], torch.zeros_like(counts)).sum()
        return self._on_their_ranks(rows, counts)

    def _on_their_ranks(self, rows: Tensor, counts: Tensor) -> Tensor:
        lane = self._lane
        sent = counts.view(lane.ranks, -1)
        received = torch.empty_like(sent)
        lane.exchange(received, sent, [1] * lane.ranks, [1] * lane.ranks)
        given, taken = torch.stack((sent.sum(1), received.sum(1))).tolist()
        arrived = _SendRows.apply(rows, taken, given, lane)
        # They are ordered by rank, and by expert within a rank.
        expert = torch.arange(received.shape[1], device=rows.device).repeat(lane.ranks)
        order = expert.repeat_interleave(received.flatten(), output_size=len(arrived)).argsort(stable=True)
        local = self._local()
        if len(arrived):
            computed = self.compute(local, arrived[order], received.sum(0))
        else:
            # Backward must exchange rows here, too, and give each parameter a gradient: ranks that hold parts of it have one.
            computed = arrived + sum(parameter.flatten()[:0].sum() for parameter in local.parameters())
        result: Tensor = _SendRows.apply(computed[order.argsort()], given, taken, lane)
        return result

    @abstractmethod
    def compute(self, local: Any, rows: Tensor, counts: Tensor) -> Tensor:
        """Compute ``rows`` by this rank's experts, those of ``local``."""

    def _local(self) -> Any:
        """Return a stand-in for the module that holds this rank's experts as plain tensors, for one call. The module does not change."""
        local = object.__new__(self.kind)
        held = self.module._parameters.items()
        plain = {name: parameter if parameter is None else parameter.to_local() for name, parameter in held}
        local.__dict__.update({**self.module.__dict__, "_parameters": plain})
        return local


class _RowsForward(_ParallelForward):
    """Forward of experts that takes rows ordered by expert, and the counts of each."""

    @disable_dynamo
    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        return self.exchanged(rows, counts)

    def compute(self, local: Any, rows: Tensor, counts: Tensor) -> Tensor:
        computed: Tensor = self.kind.forward(local, rows, counts)
        return computed


class _TransformersForward(_ParallelForward):
    """Forward of fused experts of transformers. It takes rows, and the indices and weights of each row's experts."""

    @disable_dynamo
    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        chosen = top_k_index.flatten()
        counts = torch.zeros(self.module.num_experts, dtype=torch.int64, device=chosen.device)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        order = chosen.argsort(stable=True)
        computed = self.exchanged(hidden_states[order // top_k_index.shape[-1]], counts)
        computed = computed[order.argsort()].view(*top_k_index.shape, -1)
        return (computed * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)

    def compute(self, local: Any, rows: Tensor, counts: Tensor) -> Tensor:
        local.num_experts = len(counts)
        expert = torch.arange(len(counts), device=rows.device).repeat_interleave(counts, output_size=len(rows)).unsqueeze(1)
        computed: Tensor = self.kind.forward(local, rows, expert, rows.new_ones(expert.shape))
        return computed


class _Lane:
    """Exchanges of one module of experts.

    Attributes:
        ranks: number of ranks that share the experts.
    """

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self.ranks = group.size()
        self._group, self._name, self._tag = group, name, point_to_point.tag_of(f"experts of {name}")

    def exchange(self, out: Tensor, given: Tensor, received: list[int], sent: list[int]) -> None:
        """Send the first ``sent[0]`` rows of ``given`` to rank 0, and so on, and receive ``received`` rows of each rank in ``out``."""
        wait_notes.begin("all-to-all", f"rows of {self._name}", given.nbytes, self.ranks)
        with wait_notes.counted("all_to_all"):
            if point_to_point.is_pairwise(self._group, out.device):
                # gloo's own all-to-all may wait for a peer that has died until its timeout.
                width = math.prod(out.shape[1:])
                arriving, leaving = ([count * width for count in counts] for counts in (received, sent))
                point_to_point.all_to_all(out.view(-1), given.view(-1), arriving, leaving, self._group, self._tag).wait()
            else:
                dist.all_to_all_single(out, given, received, sent, group=self._group)
        wait_notes.end()


class _SendRows(torch.autograd.Function):
    """Send rows to the ranks of a lane, ``sent`` to each, and receive ``received`` from each. Backward sends gradients the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], lane: _Lane) -> Tensor:
        ctx.received, ctx.sent, ctx.lane = received, sent, lane
        out = rows.new_empty(sum(received), *rows.shape[1:])
        lane.exchange(out, rows.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _SendRows.apply(grad, ctx.sent, ctx.received, ctx.lane), None, None, None
