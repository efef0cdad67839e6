"""Mistakes in a folder's config.json are named by key and value, with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models import hf_folders
from tests.models.test_hf import configured, edit, refused
from vescale_ray.controller.driver import preflight
from vescale_ray.models.config_faults import below_one, misspelled
from vescale_ray.models.hf import open_folder

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
    ("llama", {"max_position_embeddings": 0}, "its config.json has max_position_embeddings = 0; give at least 1"),
    ("mistral", {"sliding_window": 0}, "its config.json has sliding_window = 0; give at least 1, or null for none"),
    ("gemma3_text", {"sliding_window": -1}, "its config.json has sliding_window = -1; give at least 1, or null for none"),
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


SPELLINGS: list[tuple[str, dict[str, Any], str | None]] = [
    (
        "llama",
        {"num_hiden_layers": 4, "num_hidden_layers": None},
        "num_hiden_layers = 4 in its config.json is not read; did you mean num_hid",
    ),
    ("llama", {"max_position_embedding": 64, "max_position_embeddings": None}, "did you mean max_position_embeddings?"),
    ("gpt2", {"n_layers": 3, "n_layer": None}, "n_layers = 3 in its config.json is not read; did you mean n_layer?"),
    ("gpt2", {"num_hidden_layers": 3, "n_layer": None}, None),  # transformers knows n_layer by this name, too
    ("llama", {"num_hiden_layers": 4}, None),  # beside num_hidden_layers
    ("llama", {"tie_encoder_decoder": False, "_name_or_path": "x", "torch_dtype": "float32"}, None),
    ("llama", {"quantisation": {"bits": 4}, "unsloth_version": "1", "task_specific_params": {"a": 1}, "rope_theta": 1e6}, None),
]


def test_a_misspelled_key_of_a_config_is_told() -> None:
    for kind, changes, words in SPELLINGS:
        given = {key: value for key, value in {**transformers.CONFIG_MAPPING[kind]().to_dict(), **changes}.items() if value is not None}
        told = list(misspelled(transformers.CONFIG_MAPPING[kind](**given), given))
        assert [words in one for one in told] == [True] if words else told == [], (changes, told)
    assert below_one(transformers.CONFIG_MAPPING["dots3_note_text"]()) is None, "its layers differ in num_attention_heads"
    given = {"text_config": {"hidden_sizes": 64, "eod_token_id": None}, "model_type": "gemma3"}
    told = list(misspelled(transformers.CONFIG_MAPPING["gemma3"](**given), given))
    assert told == ["text_config.hidden_sizes = 64 in its config.json is not read; did you mean hidden_size?"]


def test_files_beside_the_weights_are_checked(tmp_path: Path) -> None:
    folder = hf_folders.write(tmp_path / "model", "llama")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("max_position_embeddings", "max_position_embedding"))
    told = "max_position_embedding = 128 in its config.json is not read; did you mean max_position_embeddings?"
    assert preflight.foresee(configured(folder, tmp_path)).warnings == (f"model.hf = {folder}: {told}",)
    for text, words in {
        "[1]": "does not hold keys and values in braces; correct it, or delete it",
        "{": "does not hold keys and values in braces; correct it, or delete it",
        '{"eos_token_id": "</s>"}': 'has eos_token_id = "</s>"; give a token id, or a list of them',
    }.items():
        (folder / "generation_config.json").write_text(text)
        assert refused(folder, tmp_path) == f"model.hf = {folder}: generation_config.json {words}"
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    assert open_folder(folder).end_tokens == {1, 3}


def test_a_url_is_no_folder(tmp_path: Path) -> None:
    url: Any = "https://huggingface.co/Qwen/Qwen3-0.6B"
    assert refused(url, tmp_path) == f"model.hf = {url}: is a URL; download it (hf download NAME --local-dir FOLDER), and give the folder"
