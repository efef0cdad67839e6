"""Mistakes in a folder's config.json are named by key and value, with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models import hf_folders
from tests.models.test_hf import edit, refused

transformers = pytest.importorskip("transformers")
ROPE = {"rope_type": "default", "rope_theta": 1e4}
REFUSES = f"transformers {transformers.__version__} refuses its config.json: "
CANNOT = "transformers can't build the model of its config.json: "
WHOLE = "give a whole number"
FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": "sillu"}, CANNOT + "hidden_act = \"sillu\" (KeyError: 'sillu'); give one of gelu, gelu_10, "),
    (
        "gemma3_text",
        {"hidden_activation": "gelu_tan"},
        CANNOT + "hidden_activation = \"gelu_tan\" (KeyError: 'gelu_tan'); give",
    ),
    (
        "llama",
        {"rope_parameters": {**ROPE, "rope_type": "yarm"}},
        CANNOT + "rope_parameters.rope_type = \"yarm\" (KeyError: 'yarm'); give one of default, linear, dynamic, yarn, ",
    ),
    ("llama", {"rope_parameters": {**ROPE, "rope_theta": "1e4"}}, CANNOT + 'rope_parameters.rope_theta = "1e4" (TypeError: '),
    (
        "llama",
        {"dtype": "bf16"},
        REFUSES + "dtype = \"bf16\" (AttributeError: module 'torch' has no attribute 'bf16'); give one of f",
    ),
    ("llama", {"hidden_size": "32"}, f'{REFUSES}hidden_size = "32"; {WHOLE}'),
    ("llama", {"num_key_value_heads": "2"}, f'{REFUSES}num_key_value_heads = "2"; {WHOLE} or null'),
    ("llama", {"rms_norm_eps": 1}, REFUSES + "rms_norm_eps = 1; give a number with a point, as 1.0"),
    ("llama", {"tie_word_embeddings": "no"}, REFUSES + 'tie_word_embeddings = "no"; give true or false'),
    ("llama", {"eos_token_id": "1"}, REFUSES + f'eos_token_id = "1"; {WHOLE} or a list in brackets or null'),
    ("llama", {"num_attention_heads": 3}, REFUSES + "The hidden size (32) is not a multiple of the number of attention heads (3); correct"),
    ("qwen3", {"layer_types": ["full_attention"]}, REFUSES + "`num_hidden_layers` (2) must be equal to the number of `layer_types` (1); "),
    ("llama", {"head_dim": -8}, CANNOT + "head_dim = -8 (RuntimeError: Trying to create tensor with negative dimension"),
    ("llama", {"num_key_value_heads": 0}, CANNOT + "num_key_value_heads = 0 (ZeroDivisionError: "),
    ("llama", {"pad_token_id": 500}, CANNOT + "pad_token_id = 500, vocab_size = 160 (AssertionError: "),
    ("llama", {"hidden_size": 0}, "its config.json has hidden_size = 0; give at least 1"),
    ("llama", {"num_hidden_layers": 0}, "its config.json has num_hidden_layers = 0; give at least 1"),
    ("llama", {"vocab_size": 0}, "its config.json has vocab_size = 0; give at least 1"),
    (
        "deepseek_v3",
        {"n_group": 3},
        "a forward of DeepseekV3ForCausalLM fails (RuntimeError: shape '[-1, 3, 1]' is invalid for input of size",
    ),
    ("deepseek_v3", {"n_group": 0}, "a forward of DeepseekV3ForCausalLM fails (ZeroDivisionError: "),
]


def test_mistakes_in_a_config_are_named_with_a_remedy(tmp_path: Path) -> None:
    folders: dict[str, Path] = {}
    for kind, changes, words in FAULTS:
        if kind not in folders:
            folders[kind] = hf_folders.write(tmp_path / kind, kind)
            for weights in folders[kind].glob("*.safetensors*"):
                weights.unlink()
        before = (folders[kind] / "config.json").read_text()
        edit(folders[kind], **changes)
        said = refused(folders[kind], tmp_path)
        assert said.startswith(f"model.hf = {folders[kind]}: {words}") and len(said) < 700
        (folders[kind] / "config.json").write_text(before)


def test_a_url_is_no_folder(tmp_path: Path) -> None:
    url: Any = "https://huggingface.co/Qwen/Qwen3-0.6B"
    assert refused(url, tmp_path) == f"model.hf = {url}: is a URL; download it (hf download NAME --local-dir FOLDER), and give the folder"
