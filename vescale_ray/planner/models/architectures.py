"""The tensors of a model from a published ``config.json``, and the configs of well-known models.

The tensors follow the architectures in Hugging Face transformers, with fused experts ``[E, n, m]``. If a config leaves out
head_dim or tied embeddings, that library's default applies. Any other missing figure is an error.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vescale_ray.errors import BadInput
from vescale_ray.planner.models.shapes import Kind, ModelShapes, ParamShape, UnitShape

# The published config.json of each model, as of its release, with its sources. tests/planner/test_shapes.py checks the totals against
# the publishers' parameter counts.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    # The Llama 3 Herd of Models, arXiv 2407.21783, table 3; vocabulary 128,256 from the released config.json.
    "llama-3-8b": (
        "arXiv 2407.21783, table 3; meta-llama/Meta-Llama-3-8B config.json",
        {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 128256},
    ),
    "llama-3-70b": (
        "arXiv 2407.21783, table 3; meta-llama/Meta-Llama-3-70B config.json",
        {"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672, "num_attention_heads": 64,
         "num_key_value_heads": 8, "vocab_size": 128256},
    ),
    "llama-3-405b": (
        "arXiv 2407.21783, table 3; meta-llama/Llama-3.1-405B config.json",
        {"model_type": "llama", "hidden_size": 16384, "num_hidden_layers": 126, "intermediate_size": 53248, "num_attention_heads": 128,
         "num_key_value_heads": 8, "vocab_size": 128256},
    ),
    # gpt-oss model card, arXiv 2508.10925, section 2 and table 1 (20.91 B and 116.83 B parameters).
    "gpt-oss-20b": (
        "arXiv 2508.10925; openai/gpt-oss-20b config.json",
        {"model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "intermediate_size": 2880, "num_attention_heads": 64,
         "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201088},
    ),
    "gpt-oss-120b": (
        "arXiv 2508.10925; openai/gpt-oss-120b config.json",
        {"model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36, "intermediate_size": 2880, "num_attention_heads": 64,
         "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4, "vocab_size": 201088},
    ),
    # DeepSeek-V3 technical report, arXiv 2412.19437, section 4.2 (671 B parameters, 37 B active; without the MTP module).
    "deepseek-v3": (
        "arXiv 2412.19437, section 4.2; deepseek-ai/DeepSeek-V3 config.json",
        {"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "intermediate_size": 18432,
         "moe_intermediate_size": 2048, "num_attention_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
         "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
         "first_k_dense_replace": 3, "vocab_size": 129280},
    ),
    # Qwen3 technical report, arXiv 2505.09388, tables 1 and 2; head_dim and widths from the released config.json.
    "qwen3-8b": (
        "arXiv 2505.09388, table 1; Qwen/Qwen3-8B config.json",
        {"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    ),
    "qwen3-30b-a3b": (
        "arXiv 2505.09388, table 2; Qwen/Qwen3-30B-A3B config.json",
        {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "moe_intermediate_size": 768, "num_attention_heads": 32,
         "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936},
    ),
    # Kimi K2, arXiv 2507.20534, table 2 (1.04 T parameters, 32.6 B active, 384 experts, 64 heads, 1 dense layer).
    "kimi-k2": (
        "arXiv 2507.20534, table 2; moonshotai/Kimi-K2-Base config.json",
        {"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "intermediate_size": 18432,
         "moe_intermediate_size": 2048, "num_attention_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
         "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8,
         "first_k_dense_replace": 1, "vocab_size": 163840},
    ),
}  # fmt: skip
_ALIASES = {"deepseek-v3-671b": "deepseek-v3", "llama-3.1-405b": "llama-3-405b"}


def published(name: str) -> ModelShapes:
    """Return a well-known model by its name.

    Raises:
        BadInput: the name is unknown; the message suggests the nearest known name.
    """
    key = name.lower().replace("_", "-")
    key = _ALIASES.get(key, key)
    if key not in PUBLISHED:
        near = difflib.get_close_matches(key, PUBLISHED, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(PUBLISHED)}"
        raise BadInput(f"model {name!r} is unknown: {hint} (or give the path of a config.json, or pkg.mod:factory)")
    source, config = PUBLISHED[key]
    shapes = from_config(config, key)
    return replace(shapes, name=key, source=source)


class _Figures:
    """A config's figures. A missing figure, or one that is not a non-negative integer, raises BadInput with its name."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def __call__(self, *keys: str, default: int | None = None) -> int:
        for key in keys:
            value = self.config.get(key)
            if value is not None:
                if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                    raise BadInput(f"{self.where}: {key} is {value!r}: give an integer of at least 0")
                return value
        if default is None:
            raise BadInput(f"{self.where}: {keys[0]} is missing: give the full config.json of the model")
        return default


def from_config(config: dict[str, Any], where: str) -> ModelShapes:
    """Return the tensors of a config.json, with fused experts.

    Raises:
        BadInput: the architecture is not known, or a figure is missing.
    """
    kind = str(config.get("model_type", ""))
    if kind not in _LAYERS:
        known = ", ".join(_LAYERS)
        raise BadInput(f"{where}: model_type {kind!r} is not known: known are {known}; give any other model as pkg.mod:factory")
    f = _Figures(config, where)
    hidden, layers, vocab = f("hidden_size"), f("num_hidden_layers"), f("vocab_size")
    if not (hidden and layers and vocab):
        raise BadInput(f"{where}: hidden_size {hidden}, num_hidden_layers {layers}, vocab_size {vocab}: each must be at least 1")
    dense = min(layers, f("first_k_dense_replace", default=0)) if kind == "deepseek_v3" else 0
    plain, sparse = _LAYERS[kind](f, config)
    units = [UnitShape("embed", (ParamShape("embed_tokens", (vocab, hidden), "embedding"),))]
    if dense:
        units.append(UnitShape("layer (dense)", plain, dense))
    if layers > dense:
        units.append(UnitShape("layer (experts)" if sparse else "layer", sparse or plain, layers - dense))
    head = [ParamShape("norm", (hidden,), "vector")]
    if not config.get("tie_word_embeddings", kind in ("gemma",)):
        head.append(ParamShape("lm_head", (vocab, hidden), "embedding"))
    units.append(UnitShape("head", tuple(head)))
    total = sum(u.numel * u.count for u in units)
    idle = top_k = 0
    if sparse:
        experts = sum(p.numel for p in sparse if p.stack)
        routed, top_k = f("num_local_experts", "n_routed_experts", "num_experts"), f("num_experts_per_tok", "top_k_experts")
        idle = (layers - dense) * experts * (routed - top_k) // routed
    return ModelShapes(str(config.get("_name_or_path") or where), tuple(units), hidden, vocab, total - idle, where, top_k)


Params = tuple[ParamShape, ...]


def _p(name: str, *shape: int, kind: Kind | None = None) -> ParamShape:
    return ParamShape(name, shape, kind or ("vector" if len(shape) < 2 else "matrix"), stack=name.startswith("experts."))


def _attention(f: _Figures, *, bias: bool = False, out_bias: bool = False, qk_norm: bool = False) -> list[ParamShape]:
    """Return the tensors of grouped-query attention."""
    hidden, heads = f("hidden_size"), f("num_attention_heads")
    kv, dim = f("num_key_value_heads", default=heads), f("head_dim", default=hidden // max(heads, 1))
    found = [
        _p("q_proj", heads * dim, hidden),
        _p("k_proj", kv * dim, hidden),
        _p("v_proj", kv * dim, hidden),
        _p("o_proj", hidden, heads * dim),
    ]
    if bias:
        found += [_p("q_proj.bias", heads * dim), _p("k_proj.bias", kv * dim), _p("v_proj.bias", kv * dim)]
    if out_bias:
        found.append(_p("o_proj.bias", hidden))
    if qk_norm:
        found += [_p("q_norm", dim), _p("k_norm", dim)]
    return found


def _swiglu(prefix: str, hidden: int, width: int) -> list[ParamShape]:
    return [_p(f"{prefix}gate_proj", width, hidden), _p(f"{prefix}up_proj", width, hidden), _p(f"{prefix}down_proj", hidden, width)]


def _experts(count: int, hidden: int, width: int) -> list[ParamShape]:
    """Return the tensors of fused experts as in transformers: gate and up projections share one tensor, output dimension first."""
    gate_up = ParamShape("experts.gate_up_proj", (count, 2 * width, hidden), "expert", matrices=2, stack=True)
    return [gate_up, _p("experts.down_proj", count, hidden, width, kind="expert")]


def _norms(hidden: int) -> list[ParamShape]:
    return [_p("input_norm", hidden), _p("post_attention_norm", hidden)]


def _llama(f: _Figures, config: dict[str, Any]) -> tuple[Params, Params]:
    hidden = f("hidden_size")
    bias = bool(config.get("attention_bias", config.get("model_type") == "qwen2"))
    out_bias = bool(config.get("attention_bias", False)) and config.get("model_type") == "llama"
    attention = _attention(f, bias=bias, out_bias=out_bias, qk_norm=config.get("model_type") == "qwen3")
    return (*attention, *_swiglu("mlp.", hidden, f("intermediate_size")), *_norms(hidden)), ()


def _mixtral(f: _Figures, config: dict[str, Any]) -> tuple[Params, Params]:
    hidden, count = f("hidden_size"), f("num_local_experts")
    return (), (*_attention(f), _p("router", count, hidden), *_experts(count, hidden, f("intermediate_size")), *_norms(hidden))


def _qwen3_moe(f: _Figures, config: dict[str, Any]) -> tuple[Params, Params]:
    hidden, count = f("hidden_size"), f("num_experts", "num_local_experts")  # transformers 5 writes the second name
    attention = _attention(f, qk_norm=True)
    return (), (*attention, _p("router", count, hidden), *_experts(count, hidden, f("moe_intermediate_size")), *_norms(hidden))


def _gpt_oss(f: _Figures, config: dict[str, Any]) -> tuple[Params, Params]:
    hidden, count, width = f("hidden_size"), f("num_local_experts"), f("intermediate_size")
    experts = [
        # input dimension first, as in transformers
        _p("experts.gate_up_proj", count, hidden, 2 * width, kind="expert"),
        _p("experts.gate_up_proj_bias", count, 2 * width, kind="vector"),
        _p("experts.down_proj", count, width, hidden, kind="expert"),
        _p("experts.down_proj_bias", count, hidden, kind="vector"),
    ]
    attention = [*_attention(f, bias=True, out_bias=True), _p("sinks", f("num_attention_heads"))]
    return (), (*attention, _p("router", count, hidden), _p("router.bias", count), *experts, *_norms(hidden))


def _deepseek_v3(f: _Figures, config: dict[str, Any]) -> tuple[Params, Params]:
    """Return the tensors of a dense layer and of an expert layer with multi-head latent attention (arXiv 2405.04434, section 2.1)."""
    hidden, heads = f("hidden_size"), f("num_attention_heads")
    q, kv, nope, rope, v = f("q_lora_rank"), f("kv_lora_rank"), f("qk_nope_head_dim"), f("qk_rope_head_dim"), f("v_head_dim")
    attention = [
        _p("q_a_proj", q, hidden),
        _p("q_a_norm", q),
        _p("q_b_proj", heads * (nope + rope), q),
        _p("kv_a_proj", kv + rope, hidden),
        _p("kv_a_norm", kv),
        _p("kv_b_proj", heads * (nope + v), kv),
        _p("o_proj", hidden, heads * v),
    ]
    count, width = f("n_routed_experts"), f("moe_intermediate_size")
    shared = _swiglu("shared_experts.", hidden, width * f("n_shared_experts", default=1))
    router = [_p("router", count, hidden), _p("router.score_correction_bias", count)]
    plain = (*attention, *_swiglu("mlp.", hidden, f("intermediate_size")), *_norms(hidden))
    return plain, (*attention, *router, *_experts(count, hidden, width), *shared, *_norms(hidden))


_LAYERS: dict[str, Callable[[_Figures, dict[str, Any]], tuple[Params, Params]]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
}
