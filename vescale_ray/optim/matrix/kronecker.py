"""Common part of Shampoo and SOAP: two FP32 factors per block, and their roots and bases, which survive numerical failures.

A block g of r x c elements has the factors ``left`` (r x r), a moving average of g g^T, and ``right`` (c x c), of g^T g. Each block
lies in one matrix (:class:`~vescale_ray.block_grid.Grid`) and is never cut, so factors are local. States of blocks are ragged
tensors of shape ``(*lead, bands, columns, r, r)``; a smaller block at an edge uses the upper left corner of its entry.

Each block is processed by itself, on a copy of its elements. A matrix product or decomposition then gets the same numbers in the same
memory layout on any number of ranks, and gives the same bits.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vescale_ray.block_grid import Grid, block_text, parse_block
from vescale_ray.geometry import Block
from vescale_ray.optim.base import BlockOptimizer, check_common, is_embedding_or_head, step_adamw
from vescale_ray.optim.blocks import block_state, cut_of, like_state, section_grid
from vescale_ray.optim.parameters import check_number, local_of

DEFAULT_BLOCK = Block.tile(256, 256)
MAX_SIDE = 8192
"""Largest side of a block. A factor of this side takes 256 MiB, and its decomposition takes minutes on a CPU."""

Factors = dict[str, Tensor]


class PreconditionerWarning(UserWarning):
    """A root or basis could not be computed; the last good one is used."""


class BlockView(NamedTuple):
    """One block of a parameter: its elements in the rank's flat part, and its entry in the states of blocks."""

    elements: Callable[[Tensor], Tensor]
    """Function that returns the block's elements of a flat tensor, as a view of shape ``(rows, cols)``."""
    entry: int
    rows: int
    cols: int

    def left(self, states: Tensor) -> Tensor:
        return states[self.entry, : self.rows, : self.rows]

    def right(self, states: Tensor) -> Tensor:
        return states[self.entry, : self.cols, : self.cols]


def block_views(grid: Grid, span: tuple[int, int]) -> Iterator[BlockView]:
    """Yield the blocks of elements ``span``, in order."""
    for region in grid.regions(*span):
        for band in range(region.bands):
            start = region.element + band * region.band_numel
            for column in range(region.columns):
                first = column * region.block_cols
                last = min(first + region.block_cols, region.cols)

                def elements(flat: Tensor, start: int = start, first: int = first, last: int = last, region: Any = region) -> Tensor:
                    return flat[start : start + region.band_numel].view(region.rows, region.cols)[:, first:last]

                yield BlockView(elements, region.block + band * region.columns + column, region.rows, last - first)


class KroneckerOptimizer(BlockOptimizer):
    """Optimizer that steps matrices block by block with two factors each, and all other parameters by AdamW.

    Attributes:
        kept_roots: number of times that a root or basis failed in FP32 and in FP64, and the last good one was kept.
    """

    kept_roots: int = 0

    _block_states: tuple[str, str]
    """The two per-block states other than ``left`` and ``right``; they start as the identity."""

    @classmethod
    def block_policy(cls, block: Block | str = DEFAULT_BLOCK) -> Callable[[str, nn.Parameter], Block | None]:
        """Return the ``block_policy`` for ``fully_shard`` that keeps this optimizer's blocks whole.

        It goes by shape alone, also for embeddings and heads. ``fully_shard`` passes a parameter's name inside its unit, which does not
        distinguish the model's ``output`` from an attention's.
        """
        return lambda name, param: block_of("", tuple(param.shape), block)

    @abstractmethod
    def _element_states(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of a matrix's states that have its shape."""

    @abstractmethod
    def _step_block(self, block: BlockView, group: dict[str, Any], step: int, flat: dict[str, Tensor], factors: Factors) -> Tensor:
        """Return the block's update, to be scaled by lr. ``flat`` holds gradient and element states, ``factors`` the states of blocks."""

    def _check_group(self, group: dict[str, Any]) -> None:
        check_common(group)
        block = parse_block(group["block"])
        if isinstance(block, int):
            raise ValueError(
                f"block = {group['block']!r}: {type(self).__name__} needs blocks of rows and columns, such as Block.tile(256, 256)"
            )
        group["block"] = block_text(block)
        check_number(group, "precondition_frequency", whole=True)
        if group["precondition_frequency"] < 1:
            raise ValueError(f"precondition_frequency = {group['precondition_frequency']}: give at least 1")
        beta = group["factor_beta"]
        if beta is not None and not (isinstance(beta, int | float) and 0.0 < beta <= 1.0):
            raise ValueError(f"factor_beta = {beta}: give a number in (0, 1], or None for betas[1]")

    def _new_state(self, param: Tensor, name: str, group: dict[str, Any]) -> dict[str, Tensor]:
        if not has_factors(name, tuple(param.shape)):
            return {"exp_avg": like_state(param, torch.float32), "exp_avg_sq": like_state(param, torch.float32)}
        block = parse_block(group["block"])
        cut = cut_of(param)
        try:
            grid = section_grid(param, cut, block)
        except ValueError as error:
            me = type(self).__name__
            raise ValueError(
                f"{error}; shard with fully_shard(.., block_policy={me}.block_policy({group['block']!r})), or give the parameter to AdamW"
            ) from None
        whole = Grid.of(param.shape, block)
        sides = whole.band_rows, whole.block_cols
        if max(sides) > MAX_SIDE:
            raise ValueError(f"a block of {sides[0]} x {sides[1]} elements needs factors larger than {MAX_SIDE}: use Block.tile(256, 256)")
        state = {kind: like_state(param, torch.float32) for kind in self._element_states(group)}
        for kind, side in zip(("left", "right", *self._block_states), sides * 2, strict=True):
            state[kind] = block_state(param, cut, grid, (side, side), torch.float32)
        for kind in self._block_states:
            local_of(state[kind]).diagonal(dim1=-2, dim2=-1).fill_(1.0)
        return state

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
        beta1, beta2 = map(float, group["betas"])
        plain = [(p, self.state[p]) for p in params if "left" not in self.state[p]]
        if plain:
            step_adamw(plain, lr, beta1, beta2, float(group["eps"]), weight_decay)
        for param in params:
            state = self.state[param]
            if "left" not in state:
                continue
            state["step"] += 1
            step = int(state["step"].item())
            cut = cut_of(param)
            grid = Grid.of(cut.section, parse_block(group["block"]))
            assert param.grad is not None
            target = local_of(param)
            values = target.reshape(-1)
            flat = {kind: local_of(state[kind]).view(-1) for kind in self._element_states(group)}
            flat["grad"] = local_of(param.grad).reshape(-1)
            factors = {k: local_of(state[k]) for k in ("left", "right", *self._block_states)}
            factors = {k: v.view(-1, *v.shape[-2:]) if v.numel() else v for k, v in factors.items()}
            for block in block_views(grid, cut.span):
                update = self._step_block(block, group, step, flat, factors)
                mine = block.elements(values)
                mine.copy_(mine.float().mul_(1 - lr * weight_decay).sub_(update.mul_(lr)))
            if values.data_ptr() != target.data_ptr():  # a plain parameter that is not contiguous
                target.copy_(values.view(target.shape))

    def _move_factors(self, block: BlockView, grad: Tensor, group: dict[str, Any], factors: Factors) -> tuple[Tensor, Tensor]:
        """Add the block's gradient to its factors, and return copies of them."""
        beta = float(group["betas"][1] if group["factor_beta"] is None else group["factor_beta"])
        weight = 1.0 if beta == 1.0 else 1.0 - beta
        moved = []
        for stored, product in ((block.left(factors["left"]), grad @ grad.T), (block.right(factors["right"]), grad.T @ grad)):
            factor = own(stored).mul_(beta).add_(product.mul_(weight))
            stored.copy_(factor)
            moved.append(factor)
        return moved[0], moved[1]

    def _refresh(self, stored: Tensor, made: Tensor | None) -> None:
        """Store a new root or basis; if there is none, keep the last good one and warn once."""
        if made is not None:
            stored.copy_(made)
            return
        if not self.kept_roots:
            warnings.warn(
                f"{type(self).__name__}: a preconditioner could not be computed in FP32 nor in FP64 (its factor is not finite, or the "
                "decomposition failed); the last good one stays in use. kept_roots counts such failures; this is the only warning",
                PreconditionerWarning,
                stacklevel=2,
            )
        self.kept_roots += 1


def own(x: Tensor) -> Tensor:
    """Return a contiguous copy in new memory, so that all copies have the same alignment."""
    return x.clone(memory_format=torch.contiguous_format)


def has_factors(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a parameter is stepped in blocks: matrices and stacks of matrices, except embeddings and heads (by name)."""
    return len(shape) in (2, 3) and 0 not in shape and not is_embedding_or_head(name)


def block_of(name: str, shape: tuple[int, ...], block: Block | str = DEFAULT_BLOCK) -> Block | None:
    """Return the block of a parameter that no shard may cut if :class:`KroneckerOptimizer` steps it; None: any cut is allowed."""
    return Grid.of(shape, parse_block(block)).policy_block() if has_factors(name, shape) else None


def in_fp32_then_fp64(make: Callable[[torch.dtype], Tensor]) -> Tensor | None:
    """Return ``make(torch.float32)``; if it fails or is not finite, ``make(torch.float64)`` as FP32; None if both fail."""
    for dtype in (torch.float32, torch.float64):
        try:
            made = make(dtype).to(torch.float32)
        except torch.linalg.LinAlgError:
            continue
        if bool(torch.isfinite(made).all()):
            return made
    return None


def inverse_root(factor: Tensor, root: float, eps: float) -> Tensor | None:
    """Return ``(factor + eps) ** (-1 / root)`` of a symmetric positive semi-definite matrix, or None if it can't be computed.

    FP32 resolves eigenvalues down to ``n * 2**-23`` of the largest. Smaller ones are noise, and are raised to this floor. Otherwise a
    rank-deficient factor would amplify directions that never had a gradient.
    """
    if not bool(torch.isfinite(factor).all()):
        return None

    def make(dtype: torch.dtype) -> Tensor:
        values, vectors = torch.linalg.eigh(factor.to(dtype))
        floor = values[-1].clamp(min=0.0) * (values.numel() * torch.finfo(torch.float32).eps)
        return (vectors * (torch.maximum(values, floor) + eps).pow(-1.0 / root)) @ vectors.T

    return in_fp32_then_fp64(make)


def eigenbasis(factor: Tensor) -> Tensor | None:
    """Return the eigenvectors of a symmetric matrix as columns, largest eigenvalue first; None if they can't be computed."""
    if not bool(torch.isfinite(factor).all()):
        return None
    return in_fp32_then_fp64(lambda dtype: torch.linalg.eigh(factor.to(dtype))[1].flip(1))


def refined_basis(factor: Tensor, basis: Tensor) -> Tensor | None:
    """Return the Q of ``factor @ basis``, one step of orthogonal iteration; None if it can't be computed. Columns keep their places."""
    if not bool(torch.isfinite(factor).all()):
        return None
    return in_fp32_then_fp64(lambda dtype: torch.linalg.qr(factor.to(dtype) @ basis.to(dtype))[0])
