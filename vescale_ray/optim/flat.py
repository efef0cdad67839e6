"""Flat: an element-wise optimizer with one tensor per buffer instead of one per parameter.

The sharded parameters of a group are adjacent in one flat shard, and so are their gradients. An element-wise optimizer (SGD, Adam,
AdamW, RMSprop, Lion, ..) does not depend on the borders between parameters. It gets the flat pieces and launches one kernel per
piece instead of one per parameter, without any DTensor dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vescale_ray.communication.collectives import in_parameter_order
from vescale_ray.compat.core import disable_dynamo
from vescale_ray.dtensor.ragged_dtensor import RaggedDTensor
from vescale_ray.dtensor.spec import enclose
from vescale_ray.optim.parameters import in_order, local_of, take_sharded
from vescale_ray.optim.state_loading import StrictLoading
from vescale_ray.planner import START_BYTES

_SCALARS = {"step", "mu_product", "eta", "mu"}
"""Names of torch's one-element states; their shape does not depend on the parameter."""

NOT_ELEMENTWISE = {"Adafactor", "LBFGS", "Muon", "Shampoo", "SOAP", "AdamW8bit", "SparseAdam"}


class _Piece:
    """Adjacent parameters of one param group; ``flat`` is the memory from the start of the first to the end of the last."""

    def __init__(self, members: list[torch.Tensor]) -> None:
        self.members = members
        locals_ = [local_of(p) for p in members]
        base, last = locals_[0], locals_[-1]
        self.starts = [t.storage_offset() - base.storage_offset() for t in locals_]
        self.numel = self.starts[-1] + last.numel()
        self.flat = torch.nn.Parameter(base.as_strided((self.numel,), (1,), base.storage_offset()))
        self._from = (base.untyped_storage()._cdata, base.storage_offset())

    def check(self) -> None:
        """Check that the parameters are still at their addresses.

        Raises:
            RuntimeError: they were moved (``model.to(..)``, ``to_empty``) since the optimizer was built.
        """
        base = local_of(self.members[0])
        if (base.untyped_storage()._cdata, base.storage_offset()) != self._from:
            raise RuntimeError("the model's parameters were moved or cast since the Flat optimizer was built: build it again")

    def runs(self, label: Callable[[torch.Tensor], Any]) -> list[tuple[int, _Piece]]:
        """Split into runs of equal ``label``; return each with its offset in this piece."""
        found = [list(run) for _, run in groupby(range(len(self.members)), key=lambda index: label(self.members[index]))]
        return [(int(self.starts[run[0]]), _Piece([self.members[index] for index in run]) if len(found) > 1 else self) for run in found]

    def gradient(self) -> torch.Tensor | None:
        """Return the gradients of all members as one tensor, or None if there are none.

        If the gradients lie like the parameters, the result is a view; otherwise it is a copy.
        """
        grads = [p.grad for p in self.members]
        locals_ = [local_of(grad) for grad in grads if grad is not None]
        if not locals_:
            return None
        base = locals_[0]
        storage = base.untyped_storage()
        together = all(
            t.untyped_storage()._cdata == storage._cdata and t.storage_offset() - base.storage_offset() == start and t.is_contiguous()
            for t, start in zip(locals_, self.starts, strict=True)
        )
        if together:
            return base.as_strided((self.numel,), (1,), base.storage_offset())
        whole = base.new_zeros(self.numel)
        for grad, start in zip(locals_, self.starts, strict=True):
            whole[start : start + grad.numel()] = grad.reshape(-1)
        return whole

    def holds(self, state: Any) -> bool:
        """Return whether a state has one element for each element of ``flat``."""
        return isinstance(state, torch.Tensor) and state.shape == self.flat.shape

    def view(self, state: torch.Tensor, index: int) -> torch.Tensor:
        """Return member ``index``'s part of a state of ``flat``'s shape, shaped and placed like the parameter."""
        param, start = self.members[index], self.starts[index]
        local = local_of(param)
        part = state[start : start + local.numel()].view(local.shape)
        if isinstance(param, RaggedDTensor):
            return RaggedDTensor.from_spec(part, param._spec)
        return enclose(DTensor, part, param._spec) if isinstance(param, DTensor) else part


class Flat(StrictLoading):
    """``optimizer_class`` over the flat shards of ``params``.

    It has the full ``Optimizer`` interface: param groups, learning-rate schedulers, hooks, closures, and a ``state_dict`` with a state
    for each parameter. If one buffer holds parameters of several groups, it forms several pieces.

    Args:
        params: parameters or param groups, in any order; sharded by ``fully_shard``, or plain tensors.
        optimizer_class: a class of ``torch.optim``, or one with its interface. It must be element-wise; each state has the
            parameter's shape or one element.
        options: options for ``optimizer_class``.

    Raises:
        TypeError: ``optimizer_class`` is not the class of an optimizer.
        ValueError: the optimizer is known not to be element-wise, or ``fully_shard`` has replaced a parameter.
    """

    def __init__(self, params: Iterable[Any], optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> None:
        if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, torch.optim.Optimizer):
            shown = repr(optimizer_class) if isinstance(optimizer_class, str | type) else f"a {type(optimizer_class).__name__}"
            raise TypeError(f"optimizer_class is {shown}: give the class of an optimizer, such as torch.optim.AdamW")
        if optimizer_class.__name__ in NOT_ELEMENTWISE:
            raise ValueError(f"{optimizer_class.__name__} is not element-wise: it needs to know where a parameter begins; use it by itself")
        self._class, self._options = optimizer_class, options
        self._inner: torch.optim.Optimizer | None = None
        self._pieces: list[list[_Piece]] = []
        # The class itself supplies and checks the defaults of its options.
        super().__init__(in_order(type(self).__name__, params), optimizer_class([torch.nn.Parameter(torch.zeros(1))], **options).defaults)
        self._build()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        take_sharded(param_group, self.param_groups)
        for position, one in enumerate(param_group["params"]):
            name, param = one[:2] if isinstance(one, tuple) else (f"parameter {position}", one)
            if isinstance(param, torch.Tensor) and not (param.is_floating_point() or param.is_complex()):
                raise ValueError(f"{name} of shape {tuple(param.shape)} is {param.dtype}, which Flat can't step: leave it out")
        super().add_param_group(param_group)
        if self._inner is not None:
            states = self.state_dict()["state"]
            self._build()
            self._fill(states)

    def _build(self) -> None:
        self._pieces = [_pieces(group["params"]) for group in self.param_groups]
        groups = [
            {**{k: v for k, v in group.items() if k not in ("params", "param_names")}, "params": [piece.flat for piece in pieces]}
            for group, pieces in zip(self.param_groups, self._pieces, strict=True)
        ]
        self._inner = self._class(groups, **self._options)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_class": self._class, "_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_pieces" not in self.__dict__:  # unpickled or copied: parameters and states have new addresses
            states = {index: dict(self.state[p]) for index, p in enumerate(self._parameters()) if p in self.state}
            self._build()
            self._fill(states)

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert self._inner is not None
        self._split(lambda p: p.grad is None)
        found = [[piece.gradient() for piece in pieces] for pieces in self._pieces]
        for group, inner, pieces, grads in zip(self.param_groups, self._inner.param_groups, self._pieces, found, strict=True):
            inner.update((key, value) for key, value in group.items() if key not in ("params", "param_names"))
            for piece, grad in zip(pieces, grads, strict=True):
                piece.check()
                piece.flat.grad = grad
        self._inner.step()
        for pieces in self._pieces:
            for piece in pieces:
                piece.flat.grad = None
        self._show()
        return loss

    def _split(self, label: Callable[[torch.Tensor], Any]) -> None:
        """Split pieces whose members differ in ``label``, with their states, because one tensor is stepped as a whole."""
        assert self._inner is not None
        for pieces, group in zip(self._pieces, self._inner.param_groups, strict=True):
            runs = [(piece, piece.runs(label)) for piece in pieces]
            if len(pieces) == sum(len(parts) for _, parts in runs):
                continue
            for piece, parts in runs:
                states = self._inner.state.pop(piece.flat, {}) if len(parts) > 1 else {}
                for start, part in parts if states else ():
                    self._inner.state[part.flat] = {
                        key: value[start : start + part.numel] if piece.holds(value) else _own(value) for key, value in states.items()
                    }
                    for param in part.members:
                        self.state.pop(param, None)
            pieces[:] = [part for _, parts in runs for _, part in parts]
            group["params"] = [piece.flat for piece in pieces]
        self._show()

    def _show(self) -> None:
        """Fill :attr:`state` of every parameter with views of its piece's states; once is enough, because these never move.

        The states come in the order of the parameters. Adjacency in memory differs by rank, and collectives over states follow this
        order.
        """
        assert self._inner is not None
        changed = False
        for piece in (piece for pieces in self._pieces for piece in pieces):
            states = self._inner.state.get(piece.flat)
            if not states or all(p in self.state and self.state[p].keys() == states.keys() for p in piece.members):
                continue
            changed = True
            for index, param in enumerate(piece.members):
                self.state[param] = {key: piece.view(value, index) if piece.holds(value) else value for key, value in states.items()}
        if changed:
            in_parameter_order(self.state, self._parameters())

    def state_dict(self) -> dict[str, Any]:
        """Return a state for each parameter, as ``optimizer_class`` over the parameters would.

        Tensors are the states themselves, except one-element states (``step``). A piece's parameters share those, so each gets a copy.
        """
        found: dict[str, Any] = super().state_dict()
        ordered = self._parameters()
        for index, states in found["state"].items():
            found["state"][index] = {
                key: value.clone() if isinstance(value, torch.Tensor) and not _is_like(key, [value], [ordered[index]]) else value
                for key, value in states.items()
            }
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load the state dict of a Flat optimizer, or of ``optimizer_class`` over the same parameters.

        Raises:
            ValueError: as :meth:`StrictLoading.load_state_dict`.
        """
        super().load_state_dict(state_dict)
        self._fill({index: dict(self.state[p]) for index, p in enumerate(self._parameters()) if p in self.state})

    def adopt_states(self) -> None:
        """Take over the contents of :attr:`state` and of the param groups after a checkpoint has replaced them."""
        states = {index: dict(self.state[p]) for index, p in enumerate(self._parameters()) if self.state.get(p)}
        self._build()  # parameters from the meta device have new memory now
        self._fill(states)

    @torch.no_grad()
    def _fill(self, states: dict[int, dict[str, Any]]) -> None:
        """Write ``states``, by the position of the parameter, into the pieces."""
        assert self._inner is not None
        position = {id(p): index for index, p in enumerate(self._parameters())}
        self._split(lambda p: _signature(states.get(position[id(p)], {}), p))
        filled: list[tuple[_Piece, dict[str, Any]]] = []
        for piece in (piece for pieces in self._pieces for piece in pieces):
            given = [states.get(position[id(p)], {}) for p in piece.members]
            if not any(given):
                continue
            joined: dict[str, Any] = {}
            for key, value in given[0].items():
                values = [one[key] for one in given]
                if _is_like(key, values, piece.members):
                    flat = torch.zeros_like(piece.flat, dtype=local_of(value).dtype)
                    for part, start in zip(map(local_of, values), piece.starts, strict=True):
                        flat[start : start + part.numel()] = part.reshape(-1)
                    joined[key] = flat
                else:
                    joined[key] = _own(value)
            filled.append((piece, joined))
        self.state.clear()
        for piece, joined in filled:
            self._inner.state[piece.flat] = joined
        self._show()


def _is_like(key: str, values: list[Any], params: list[torch.Tensor]) -> bool:
    """Return whether a state has one element for each element of its parameter; for a plain 0-d parameter the name decides."""
    for value, param in zip(values, params, strict=True):
        if not isinstance(value, torch.Tensor) or value.shape != param.shape or isinstance(value, DTensor) != isinstance(param, DTensor):
            return False
        if not param.dim() and not isinstance(param, DTensor) and key in _SCALARS:
            return False
    return True


def _signature(states: dict[str, Any], param: torch.Tensor) -> list[Any]:
    """Return the properties that parameters must share to be stepped as one: state names, and values of states not shaped like them."""
    return [(key, None if _is_like(key, [value], [param]) else _number(value)) for key, value in states.items()]


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _next_start(param: torch.Tensor, end: int) -> int:
    """Return the earliest start of a parameter behind one that ends at ``end`` in a shard.

    The space before it is zero padding without gradient. A small parameter of another param group, or of none, may lie behind it. Plain
    tensors have no padding.
    """
    quantum = START_BYTES // param.element_size() if isinstance(param, DTensor) else 1
    return -(-end // quantum) * quantum


def _pieces(params: list[torch.Tensor]) -> list[_Piece]:
    """Group parameters that are adjacent in memory. Parameters without elements on this rank form empty pieces, so they have states."""
    runs: list[list[torch.Tensor]] = []
    end, where = -1, None
    buffers: dict[int, int] = {}  # in the order of the parameters, because addresses differ by rank
    for param in params:
        buffers.setdefault(local_of(param).untyped_storage()._cdata, len(buffers))
    for param in sorted(params, key=lambda p: (buffers[local_of(p).untyped_storage()._cdata], local_of(p).storage_offset())):
        local = local_of(param)
        if not local.is_contiguous():
            raise ValueError(f"a parameter of shape {tuple(param.shape)} is not contiguous in memory: use the optimizer itself")
        if not local.numel():
            continue
        kind = (local.untyped_storage()._cdata, local.dtype, param.requires_grad)
        if runs and kind == where and int(local.storage_offset()) in (end, _next_start(param, end)):
            runs[-1].append(param)
        else:
            runs.append([param])
        end, where = int(local.storage_offset()) + local.numel(), kind
    return [_Piece(run) for run in (*runs, *([p] for p in params if not local_of(p).numel()))]
