"""QK-clip: limits attention logits that grow without bound under Muon, by scaling query and key weights (Kimi K2, arXiv 2507.20534).

After a step, for each head whose largest logit of that step exceeded ``tau``::

    eta = tau / largest        W_q <- eta^alpha W_q        W_k <- eta^(1 - alpha) W_k        so that q k^T shrinks by eta

Heads are rows of the projections, so the scaling acts on rows: it is local on every shard, for any cut. The only communication is one
all-reduce of a number per head, for the largest logits over all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vescale_ray.optim.agree import largest_of_ranks
from vescale_ray.optim.matrix.matrices import flat_local, holding


@torch.no_grad()
def qk_clip_(
    query: Tensor,
    key: Tensor,
    max_logits: Tensor,
    *,
    tau: float = 100.0,
    alpha: float = 0.5,
    rope_rows: int = 0,
    value_rows: int = 0,
) -> Tensor:
    """Scale the rows of ``query`` and ``key`` whose heads' logits exceeded ``tau``. Collective over the mesh of ``query``.

    Args:
        query: projection ``[heads * rows_q, d]``, sharded or plain; the heads one after the other.
        key: projection ``[kv_heads * rows_k, d]``. Each key head serves ``heads / kv_heads`` query heads; the largest logit of all of
            them scales it and them.
        max_logits: ``[heads]``: the largest scaled logit of each head that this rank saw in the step.
        rope_rows: number of last rows of each query head that meet a key shared by all heads (MLA); they are scaled by eta, since
            that key is not scaled.
        value_rows: number of last rows of each key head that are values (MLA's fused up-projection of key and value); they are not
            scaled.

    Returns:
        eta per key head, ``[kv_heads]``, FP32, the same on all ranks; 1 for heads that were not scaled.

    Raises:
        ValueError: sizes don't match, a logit is NaN or infinite on some rank (raised on all ranks; nothing is scaled), tau or alpha
            is out of range, or another mesh dimension also cuts the rows.
    """
    if not tau > 0 or not 0 <= alpha <= 1:
        raise ValueError(f"tau = {tau}, alpha = {alpha}: give tau above 0 and alpha between 0 and 1")
    heads = max_logits.numel()
    rows_q, rows_k = int(query.shape[0]), int(key.shape[0])
    if max_logits.ndim != 1 or not heads or rows_q % heads:
        raise ValueError(f"max_logits has shape {tuple(max_logits.shape)}: give one number for each head; query has {rows_q} rows")
    if query.ndim != 2 or key.ndim != 2:
        raise ValueError(f"query and key have shapes {tuple(query.shape)} and {tuple(key.shape)}: give matrices")
    # A head's keys have as many rows as the part of its queries that is multiplied with them.
    head_rows = rows_q // heads
    key_rows = head_rows - rope_rows + value_rows
    if not 0 <= rope_rows < head_rows or value_rows < 0 or rows_k % key_rows or heads % (rows_k // key_rows):
        raise ValueError(
            f"query has {heads} heads of {head_rows} rows, {rope_rows} of them for rotation; key has {rows_k} rows, which do not form "
            f"heads of {key_rows} rows that divide the query heads: give rope_rows and value_rows as they are in the projections"
        )
    kv_heads = rows_k // key_rows
    for matrix, name in ((query, "query"), (key, "key")):  # check both before scaling either
        holding(matrix, name)
        flat_local(matrix)
    largest = max_logits.detach().float()
    if isinstance(query, DTensor):
        for dim in range(query.device_mesh.ndim):
            if query.device_mesh.size(dim) > 1:
                largest = largest_of_ranks(largest, query.device_mesh.get_group(dim))
    if not bool(torch.isfinite(largest).all()):
        head = int((~torch.isfinite(largest)).nonzero()[0])
        raise ValueError(f"max_logits of head {head} is not finite on some rank: nothing was scaled")
    eta = (tau / largest.view(kv_heads, -1).amax(dim=1).clamp(min=tau)).clamp(max=1.0)
    if not bool((eta < 1).any()):
        return eta
    by_query_head = eta.repeat_interleave(heads // kv_heads)[:, None]
    q = torch.cat([by_query_head.pow(alpha).expand(-1, head_rows - rope_rows), by_query_head.expand(-1, rope_rows)], dim=1)
    k = torch.cat([eta[:, None].pow(1 - alpha).expand(-1, key_rows - value_rows), eta.new_ones(kv_heads, value_rows)], dim=1)
    _scale_rows(query, q.reshape(-1), "query")
    _scale_rows(key, k.reshape(-1), "key")
    return eta


def _scale_rows(matrix: Tensor, factors: Tensor, name: str) -> None:
    """Multiply row i by ``factors[i]``, on this rank's elements."""
    held = holding(matrix, name)
    start, end = held.intervals[held.rank]
    flat = flat_local(matrix)
    if end > start:
        cols = int(matrix.shape[1])
        first, last = start // cols, -(-end // cols)
        wide = factors[first:last].to(flat.device).repeat_interleave(cols)[start - first * cols : end - first * cols]
        flat.copy_(flat.float() * wide)
    torch.autograd.graph.increment_version([matrix])
