"""Folders of tiny causal language models of transformers with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

VOCAB, SEQ_LEN = 160, 16
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 2,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": _EXPERTS,
    "mistral": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "head_dim": 4,
    },
}
IMAGES: dict[str, Any] = {
    "text_config": {**_SIZES, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 28,
        "patch_size": 14,
    },
    "mm_tokens_per_image": 4,
    "image_token_index": 159,
    "boi_token_index": 158,
    "eoi_token_index": 157,
}
"""Sizes of Gemma 3 with images (``gemma3``)."""


def build(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A model of ``kind`` on the CPU, with random weights that spread the logits."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**_SIZES, **ARCHITECTURES.get(kind, {}), **changes}))
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.ndim > 1 and tensor.is_floating_point():
                tensor.normal_(0, 0.3 / tensor.shape[-1] ** 0.5 * 4)
            elif "e_score_correction_bias" in name:
                tensor.uniform_(0, 0.1)
    return model.float()


def write(folder: Path, kind: str, dtype: torch.dtype = torch.float32, shard: str = "40KB", **changes: Any) -> Path:
    """Save a model of ``kind`` to ``folder``, in files of at most ``shard``."""
    model = build(kind, **changes)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def write_tokens(path: Path, count: int = 6000, seed: int = 0) -> str:
    """Write token ids that a model can learn: each follows from the one before, with exceptions."""
    rng = np.random.default_rng(seed)
    tokens = np.zeros(count, dtype=np.uint16)
    for i in range(1, count):
        tokens[i] = (int(tokens[i - 1]) * 7 + 3) % VOCAB if rng.random() < 0.9 else rng.integers(VOCAB)
    np.save(path, tokens)
    return str(path)
