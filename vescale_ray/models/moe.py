"""A mixture of experts in one file, in the manner of GPT-OSS: sinks, sliding windows, a top-k router, fused experts. Plain PyTorch.

    tokens [B, S] -> embed -> layers -> norm -> head -> logits [B, S, vocab]

Each layer adds two outputs to the residual stream: attention, and the experts that the router chooses for a position. Both read a
normalized copy of the stream. Attention alternates between a sliding window and all earlier positions, and has one learned *sink* per head:
a score without a value, so a head may attend to nothing (arXiv 2309.17453; gpt-oss model card, arXiv 2508.10925).

The experts are *dropless*: each computes all positions that chose it. Positions are sorted by expert, so that a projection of all experts
is one grouped matrix product on a GPU. The load-balancing loss is a second output of the model.

The module holds parameters only, no buffers, and can be built on the meta device, as :class:`vescale_ray.models.llama.Llama`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_ray.models.llama import INIT_STD, RMSNorm, document_mask, rotate

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""Slope of the gate's sigmoid, and bound of gate and value, as GPT-OSS has them."""


@dataclass(frozen=True)
class MoEConfig:
    """Sizes of a :class:`MoE`.

    Attributes:
        dim: width of the residual stream.
        heads: query heads of ``head_dim`` elements each (even, for the rotation).
        kv_heads: key and value heads; each serves ``heads // kv_heads`` query heads.
        experts: experts of each layer.
        top_k: experts that compute a position.
        ffn: width of an expert's hidden layer.
        window: positions that a layer with a sliding window attends to, its own included. The first layer and every second one have it.
        max_seq: longest sequence that ``forward`` takes.
        router_aux_loss_coef: weight of the load-balancing loss.
    """

    dim: int
    layers: int
    heads: int
    kv_heads: int
    experts: int
    top_k: int
    ffn: int
    head_dim: int = 64
    vocab: int = 256
    max_seq: int = 2048
    window: int = 128
    rope_theta: float = 150000.0
    norm_eps: float = 1e-5
    router_aux_loss_coef: float = 0.01

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads", "kv_heads", "experts", "top_k", "ffn", "head_dim", "vocab", "max_seq", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: give at least 1")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim}: the rotation needs an even number of elements")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}")
        if self.top_k > self.experts:
            raise ValueError(f"top_k = {self.top_k} of experts = {self.experts}: give at most the number of experts")
        if not self.router_aux_loss_coef >= 0:
            raise ValueError(f"router_aux_loss_coef = {self.router_aux_loss_coef}: give a number of at least 0")


class MoEOutput(NamedTuple):
    """Result of a :class:`MoE`. A training loop adds ``router_aux_loss_coef * aux_loss`` to its mean loss.

    Attributes:
        logits: ``[B, S, vocab]``.
        aux_loss: mean of the layers' load-balancing losses, 0-d.
    """

    logits: Tensor
    aux_loss: Tensor


def grouped_product(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Multiply each row by its group's matrix.

    A GPU of compute capability 8.0 or later does this in one kernel if the operands are bfloat16 and aligned to 16 bytes. Otherwise there
    is one product per group, and the host waits for the counts.

    Args:
        rows: ``[N, n]``, ordered by group.
        matrices: ``[groups, n, m]``.
        counts: number of rows of each group, int64 ``[groups]``, with sum ``N``.

    Returns:
        ``[N, m]``. A group without rows takes part in backward: its matrix has a gradient of zeros.
    """
    if rows.is_meta:
        return rows @ matrices[0]  # there are no counts; the shape is the same for all
    if _has_kernel(rows, matrices):
        return F.grouped_mm(rows, matrices, offs=counts.cumsum(0, dtype=torch.int32))
    return torch.cat([part @ matrix for part, matrix in zip(rows.split(counts.tolist()), matrices.unbind(), strict=True)])


def _has_kernel(rows: Tensor, matrices: Tensor) -> bool:
    if not (rows.is_cuda and rows.dtype == matrices.dtype == torch.bfloat16 and len(rows)):
        return False
    elements = 16 // rows.dtype.itemsize
    aligned = not any(n % elements for n in (*matrices.shape[1:], *matrices.stride()[:2], matrices.storage_offset()))
    return aligned and torch.cuda.get_device_capability(rows.device) >= (8, 0)


class SinkAttention(nn.Module):
    """Attention to the allowed positions and to a sink, with ``heads // kv_heads`` query heads per key and value head."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.dim, width)
        self.k_proj = nn.Linear(config.dim, kv_width)
        self.v_proj = nn.Linear(config.dim, kv_width)
        self.o_proj = nn.Linear(width, config.dim)
        self.sinks = nn.Parameter(torch.zeros(config.heads))

    def forward(self, x: Tensor, allowed: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """``allowed`` ``[B or 1, 1, S, S]``: the positions that each position attends to."""
        c = self.config
        batch, seq, _ = x.shape
        q = self.q_proj(x).view(batch, seq, c.heads, c.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, seq, c.kv_heads, c.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, seq, c.kv_heads, c.head_dim).transpose(1, 2)
        q, k = rotate(q, c.rope_theta, position_ids), rotate(k, c.rope_theta, position_ids)
        # The sink is one more key. It and its value are zero, so its score is what the mask adds.
        k, v = (F.pad(one, (0, 0, 0, 1)).repeat_interleave(c.heads // c.kv_heads, dim=1) for one in (k, v))
        scores = torch.zeros((), dtype=q.dtype, device=q.device).where(allowed, float("-inf"))
        sinks = self.sinks.to(q.dtype).view(1, -1, 1, 1).expand(batch, -1, seq, 1)
        mask = torch.cat((scores.expand(batch, c.heads, seq, seq), sinks), dim=-1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).reshape(batch, seq, c.heads * c.head_dim))


class Router(nn.Module):
    """A linear layer that scores the experts. A position's weights are the softmax of its ``top_k`` highest scores."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.weight = nn.Parameter(torch.zeros(config.experts, config.dim))
        self.bias = nn.Parameter(torch.zeros(config.experts))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scores ``[N, experts]``, and weights and indices of each row's experts ``[N, top_k]``."""
        scores = F.linear(rows, self.weight, self.bias)
        best, chosen = scores.topk(self.top_k, dim=-1)
        return scores, best.softmax(-1), chosen


class Experts(nn.Module):
    """Stacks of the experts' matrices. Every parameter's first dimension is the expert; there is no other state.

    An expert is ``down((up + 1) * gate * sigmoid(1.702 * gate))``, with ``gate`` and ``up`` cut off at 7. They are the even and the odd
    columns of ``gate_up_proj``.
    """

    takes_rows_by_expert = True
    """Mark of modules with such stacks and this ``forward``, whose experts ranks can share."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        e, dim, ffn = config.experts, config.dim, config.ffn
        self.gate_up_proj = nn.Parameter(torch.zeros(e, dim, 2 * ffn))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(e, 2 * ffn))
        self.down_proj = nn.Parameter(torch.zeros(e, ffn, dim))
        self.down_proj_bias = nn.Parameter(torch.zeros(e, dim))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Compute each row by its expert.

        Args:
            rows: ``[N, dim]``, ordered by expert.
            counts: rows of each expert, int64 ``[experts]``, with sum ``N``.
        """
        expert = torch.arange(len(counts), device=rows.device).repeat_interleave(counts, output_size=len(rows))
        both = grouped_product(rows, self.gate_up_proj, counts) + self.gate_up_proj_bias[expert]
        gate, up = both[..., ::2].clamp(max=SWIGLU_LIMIT), both[..., 1::2].clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        hidden = (up + 1) * gate * torch.sigmoid(SWIGLU_ALPHA * gate)
        return grouped_product(hidden, self.down_proj, counts) + self.down_proj_bias[expert]


class SparseFFN(nn.Module):
    """Router and experts: the weighted sum of what a position's experts compute."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output, and the load-balancing loss."""
        rows = x.flatten(0, -2)
        scores, weights, chosen = self.router(rows)
        flat = chosen.flatten()
        counts = torch.zeros(scores.shape[-1], dtype=torch.int64, device=x.device).scatter_add_(0, flat, torch.ones_like(flat))
        order = flat.argsort(stable=True)
        out = self.experts(rows[order // weights.shape[-1]], counts)
        out = out[order.argsort()].view(*chosen.shape, -1)
        return (out * weights.unsqueeze(-1)).sum(1).view_as(x), balance_loss(scores, counts)


def balance_loss(scores: Tensor, counts: Tensor) -> Tensor:
    """Return the load-balancing loss of Switch Transformers (arXiv 2101.03961, equations 4 to 6), for any number of experts per row.

    It is ``experts * sum(load * probability)`` over the experts: the share of rows that chose an expert, times its mean probability. Even
    routing gives ``top_k``, and routing to few experts gives more. Its gradient lowers the probability of experts with many rows.

    Args:
        scores: the router's, ``[N, experts]``.
        counts: rows that chose each expert.
    """
    probability = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).mean(0)
    return len(counts) * (counts / len(scores) * probability).sum()


class MoELayer(nn.Module):
    """One transformer block: the residual stream plus attention, plus experts."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = SinkAttention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = SparseFFN(config)

    def forward(self, x: Tensor, allowed: Tensor, position_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the residual stream, and the load-balancing loss."""
        x = x + self.attention(self.attention_norm(x), allowed, position_ids)
        out, balance = self.ffn(self.ffn_norm(x))
        return x + out, balance


class MoE(nn.Module):
    """The language model: ``forward(tokens [B, S] int64) -> MoEOutput``; logits of position ``s`` predict token ``s + 1``.

    Its matrices are zero until :meth:`reset_parameters` or :meth:`init_parameter` is called.
    """

    shortest_input = 1
    """Minimum number of tokens in a sequence; a worker without a slot in a round computes on such a sequence."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.router_aux_loss_coef = config.router_aux_loss_coef
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(MoELayer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> MoEOutput:
        """Return the logits of the next token at each position, and the load-balancing loss.

        Args:
            position_ids: positions within documents ``[B, S]``; attention then stays within a document.

        Raises:
            ValueError: the sequence is longer than ``config.max_seq``.
        """
        seq = tokens.shape[-1]
        if seq > self.config.max_seq:
            raise ValueError(f"a sequence of {seq} tokens: this model takes {self.config.max_seq} at most (max_seq)")
        if position_ids is None:
            earlier = torch.ones(1, 1, seq, seq, dtype=torch.bool, device=tokens.device).tril()
        else:
            earlier = document_mask(position_ids)
        near = earlier.triu(1 - self.config.window)
        x, balances = self.embed(tokens), []
        for number, layer in enumerate(self.layers):
            x, balance = layer(x, earlier if number % 2 else near, position_ids)
            balances.append(balance)
        return MoEOutput(self.head(self.norm(x)), torch.stack(balances).mean())

    def flops_per_token(self, seq_len: int) -> int:
        """Return the operations of the matrix products for one token of a sequence of ``seq_len``: forward, and backward at twice the
        cost."""
        c = self.config
        projections = 2 * c.dim * c.head_dim * (c.heads + c.kv_heads)
        attention = 2 * seq_len * c.heads * c.head_dim  # scores and weighted sums over all positions, masked ones included
        experts = c.top_k * 3 * c.dim * c.ffn + c.dim * c.experts
        return 3 * 2 * (c.layers * (projections + attention + experts) + c.dim * c.vocab)

    @torch.no_grad()
    def init_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        """Fill ``full``, the whole parameter ``name`` as a plain tensor, in place; equal generator states give equal bits.

        Norm weights are ones; biases and sinks are zeros. Matrices are normal with standard deviation 0.02, cut off at three deviations.
        The two per layer that write to the residual stream are smaller by ``sqrt(2 * layers)`` (GPT-2, section 2.3).
        """
        if name.endswith(("bias", "sinks")):
            full.zero_()
        elif name.endswith("norm.weight"):
            full.fill_(1.0)
        else:
            writes = name.endswith(("o_proj.weight", "down_proj"))
            std = INIT_STD / (2 * self.config.layers) ** 0.5 if writes else INIT_STD
            nn.init.trunc_normal_(full, std=std, a=-3 * std, b=3 * std, generator=generator)

    def reset_parameters(self, seed: int = 0) -> None:
        """Initialize every parameter of an unsharded model, in order, from one generator; for use without the trainer."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            full = torch.empty(parameter.shape)
            self.init_parameter(name, full, generator)
            with torch.no_grad():
                parameter.copy_(full)


def build(**sizes: Any) -> MoE:
    """Build a :class:`MoE` from the fields of a :class:`MoEConfig`: a job file's ``model.factory``, with ``model.args``."""
    return MoE(MoEConfig(**sizes))
