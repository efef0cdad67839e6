"""A Llama in one file: RMSNorm, rotary positions, grouped-query attention, SwiGLU. Plain PyTorch.

    tokens [B, S] -> embed -> layers -> norm -> head -> logits [B, S, vocab]

Each layer adds two outputs to the residual stream: attention over earlier positions, and a SwiGLU of each position alone. Both read a
normalized copy of the stream (Touvron et al. 2023, arXiv 2302.13971). There are no biases.

The module holds parameters only, no buffers. It can be built on the meta device, given storage with ``to_empty`` and filled parameter
by parameter with :meth:`Llama.init_parameter`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INIT_STD = 0.02


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a :class:`Llama`.

    Attributes:
        dim: width of the residual stream.
        heads: query heads of ``dim // heads`` elements each (even, for the rotation).
        kv_heads: key and value heads; each serves ``heads // kv_heads`` query heads.
        ffn: width of the SwiGLU's hidden layer.
        max_seq: longest sequence that ``forward`` takes.
        tie: the output head is the embedding, transposed.
    """

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int = 256
    max_seq: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie: bool = False

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads", "kv_heads", "ffn", "vocab", "max_seq"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: give at least 1")
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(f"dim = {self.dim} over heads = {self.heads}: each head needs the same even number of elements")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


class RMSNorm(nn.Module):
    """Scale each vector to root mean square 1, then by a learned weight; the mean is taken in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


def document_mask(position_ids: Tensor) -> Tensor:
    """Return which positions ``[B, 1, S, S]`` each position attends to: earlier ones of its document, and itself.

    ``position_ids`` ``[B, S]`` are consecutive within a document, and begin anew with each.
    """
    document = (position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)
    return (document[:, None, :, None] == document[:, None, None, :]).tril()


def rotate(x: Tensor, theta: float, position_ids: Tensor | None = None) -> Tensor:
    """Rotate each pair of elements ``(x[i], x[i + D/2])`` by an angle that grows with the position (Su et al., arXiv 2104.09864).

    ``x`` is ``[B, heads, S, D]``. Positions count from 0, unless ``position_ids`` ``[B, S]`` are given. Pair ``i`` turns by ``position *
    theta ** (-2i / D)``. Every call computes the angles in float32. This costs ``S * D`` elementary operations against ``S * dim * dim``
    multiplications of the projections. It leaves no buffer to shard and no table that mixed precision could round.
    """
    seq, half = x.shape[-2], x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    positions = torch.arange(seq, device=x.device) if position_ids is None else position_ids[:, None]
    angle = positions.float()[..., None] * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second = x.float().split(half, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal attention with ``heads // kv_heads`` query heads per key and value head (Ainslie et al., arXiv 2305.13245)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        kv_dim = config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        c = self.config
        batch, seq, _ = x.shape
        q = self.q_proj(x).view(batch, seq, c.heads, c.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, seq, c.kv_heads, c.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, seq, c.kv_heads, c.head_dim).transpose(1, 2)
        q, k = rotate(q, c.rope_theta, position_ids), rotate(k, c.rope_theta, position_ids)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=c.kv_heads != c.heads)
        return self.o_proj(out.transpose(1, 2).reshape(batch, seq, c.dim))


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))`` (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.dim, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One transformer block: the residual stream plus attention, plus SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = SwiGLU(config)

    def forward(self, x: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), position_ids, mask)
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    """The language model: ``forward(tokens [B, S] int64) -> logits [B, S, vocab]``; logits of position ``s`` predict token ``s + 1``.

    Its parameters have PyTorch's default values until :meth:`reset_parameters` or :meth:`init_parameter` is called.
    """

    shortest_input = 1
    """Minimum number of tokens in a sequence; a worker without a slot in a round computes on such a sequence."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        if config.tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return the logits of the next token at each position.

        Args:
            position_ids: positions within documents ``[B, S]``; attention then stays within a document (:func:`document_mask`).

        Raises:
            ValueError: the sequence is longer than ``config.max_seq``.
        """
        if tokens.shape[-1] > self.config.max_seq:
            raise ValueError(f"a sequence of {tokens.shape[-1]} tokens: this model takes {self.config.max_seq} at most (max_seq)")
        x = self.embed(tokens)
        mask = None if position_ids is None else document_mask(position_ids)
        for layer in self.layers:
            x = layer(x) if mask is None else layer(x, position_ids, mask)
        return self.head(self.norm(x))

    def flops_per_token(self, seq_len: int) -> int:
        """Return the operations of the matrix products for one token of a sequence of ``seq_len``: forward, and backward at twice the
        cost."""
        c = self.config
        projections = c.dim * (2 * c.dim + 2 * c.kv_heads * c.head_dim)
        attention = 2 * seq_len * c.dim  # scores and weighted sums over all positions, masked ones included
        return 3 * 2 * (c.layers * (projections + attention + 3 * c.dim * c.ffn) + c.dim * c.vocab)

    @torch.no_grad()
    def init_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        """Fill ``full``, the whole parameter ``name`` as a plain tensor, in place; equal generator states give equal bits.

        Norm weights are ones. Matrices are normal with standard deviation 0.02, cut off at three deviations. The two matrices per
        layer that write to the residual stream are smaller by ``sqrt(2 * layers)``. Its variance then does not grow with depth
        (GPT-2, section 2.3).
        """
        if full.dim() < 2:
            full.fill_(1.0)
            return
        std = INIT_STD
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= (2 * self.config.layers) ** 0.5
        nn.init.trunc_normal_(full, std=std, a=-3 * std, b=3 * std, generator=generator)

    def reset_parameters(self, seed: int = 0) -> None:
        """Initialize every parameter of an unsharded model, in order, from one generator; for use without the trainer."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            full = torch.empty(parameter.shape)
            self.init_parameter(name, full, generator)
            with torch.no_grad():
                parameter.copy_(full)
