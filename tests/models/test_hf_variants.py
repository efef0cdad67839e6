"""Folders that differ from what save_pretrained writes today, and architectures whose values come from elsewhere than their modules."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.data.chats import write_folder
from tests.models import hf_folders
from tests.models.test_hf import configured, edit, refused
from tests.ranks import run_threads
from tests.workers.tiny import tiny
from vescale_ray import checkpoint, fully_shard
from vescale_ray.config import Given
from vescale_ray.controller.driver import model_checks, preflight
from vescale_ray.errors import BadInput
from vescale_ray.models import hf, probes
from vescale_ray.models.unit_selection import select_units
from vescale_ray.runfolder import RunFolder
from vescale_ray.workers.building.initial_values import buffer_values, layout_of
from vescale_ray.workers.building.model_building import build_model
from vescale_ray.workers.building.unit_forward import UnitCompiler, set_forward

transformers = pytest.importorskip("transformers")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Tensors = dict[str, Tensor]


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    """Change the tensors of a folder with one file."""
    file = folder / "model.safetensors"
    save_file({name: value.clone() for name, value in change(load_file(file)).items()}, file, {"format": "pt"})


def loaded(folder: Path, home: Path) -> Any:
    """The folder's model as a worker fills it, in one process."""
    config = preflight.foresee(configured(folder, home)).config
    model = build_model(config)
    buffers, layout = buffer_values(config, model), layout_of(config, model)
    model.to_empty(device="cpu")
    names = [name for name, _ in model.named_buffers()]
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    model.tie_weights()  # type: ignore[operator]
    checkpoint.import_hf(folder, model, layout=layout, exclude=names, cast=True)
    return model.eval()


def check_logits(folder: Path, home: Path) -> None:
    tokens = torch.arange(1, 17)[None]
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(folder, home)(tokens).logits, expected(tokens).logits, rtol=1e-5, atol=1e-5)


def test_a_head_that_differs_from_tied_embeddings_is_refused(tmp_path: Path) -> None:
    """transformers would not tie the two."""
    folder = hf_folders.write(tmp_path / "model", "llama", shard="1GB")
    edit(folder, tie_word_embeddings=True)
    said = refused(folder, tmp_path)
    assert said == (
        f"model.hf = {folder}: '{HEAD}' and '{EMBEDDING}' differ, but config.json ties them; set tie_word_embeddings to false there to "
        "train both"
    )
    edit(folder, tie_word_embeddings=False)
    check_logits(folder, tmp_path)
    edit(folder, tie_word_embeddings=True)
    rewrite(folder, lambda old: {**old, HEAD: 1 * old[EMBEDDING]})
    check_logits(folder, tmp_path)
    rewrite(folder, lambda old: {**old, HEAD: 1 * old[EMBEDDING][:-1]})
    assert "differ, but config.json ties them" in refused(folder, tmp_path)


def test_tied_embeddings_may_be_stored_as_the_head(tmp_path: Path) -> None:
    folder = hf_folders.write(tmp_path / "model", "qwen3", shard="1GB")
    rewrite(folder, lambda old: {HEAD if name == EMBEDDING else name: value for name, value in old.items()})
    check_logits(folder, tmp_path)


def test_names_may_lack_the_prefix_of_the_base_model(tmp_path: Path) -> None:
    """The published files of GPT-2 and BLOOM are of the model below the head, with the masks of an old transformers."""
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 48}
    folder = hf_folders.write(tmp_path / "model", "gpt2", shard="1GB", **sizes)
    masks = {"h.0.attn.bias": torch.ones(1, 1, 8, 8)}
    rewrite(folder, lambda old: {**{name.removeprefix("transformer."): value for name, value in old.items()}, **masks})
    check_logits(folder, tmp_path)


FALCON_H1 = {"mamba_d_state": 4, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_ssm": 32, "mamba_n_groups": 1}
GEMMA3N = {
    "vocab_size_per_layer_input": hf_folders.VOCAB,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "num_kv_shared_layers": 1,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


@pytest.mark.parametrize(("kind", "sizes"), [("falcon_h1", FALCON_H1), ("gemma3n_text", GEMMA3N)])
def test_buffers_that_other_modules_fill_are_right(kind: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    """Falcon-H1's model fills the buffers of its blocks, and Gemma 3n's inner model has an initialization of its own."""
    check_logits(hf_folders.write(tmp_path / "model", kind, **sizes), tmp_path)


def test_parameters_without_initial_values_are_refused(tmp_path: Path) -> None:
    """Apertus computes some parameters when it is built, which gives nothing on the meta device."""
    folder = hf_folders.write(tmp_path / "model", "apertus")
    check_logits(folder, tmp_path)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    assert "gives the parameter model.layers.0.mlp.act_fn.alpha_p no initial values" in refused(folder, tmp_path)


def test_every_mistake_in_weights_has_a_remedy(tmp_path: Path) -> None:
    folder = hf_folders.write(tmp_path / "model", "llama")
    whole = shutil.copytree(folder, tmp_path / "whole")
    first = sorted(folder.glob("*.safetensors"))[0]
    first.write_bytes(first.read_bytes()[:-10])
    said = refused(folder, tmp_path)
    assert said.startswith(f"model.hf = {folder}: {first.name}: not a complete safetensors file")
    assert said.endswith("; download the folder again, or save it anew")
    index = json.loads((whole / "model.safetensors.index.json").read_text())
    del index["weight_map"][HEAD]
    (whole / "model.safetensors.index.json").write_text(json.dumps(index))
    said = refused(whole, tmp_path)
    assert said == (f"model.hf = {whole}: lacks 1 of the model's 21 tensors: {HEAD}; give the config.json and the weights of one model")


@pytest.mark.parametrize(
    ("kind", "sizes", "kept"),
    [
        ("falcon_h1", FALCON_H1, False),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, False),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}, True),
    ],
)
def test_layers_with_states_do_not_keep_documents_apart(kind: str, sizes: dict[str, Any], kept: bool, tmp_path: Path) -> None:
    folder = hf_folders.write(tmp_path / "model", kind, **sizes)
    built = hf.build(hf.open_folder(folder))
    assert probes.masks_documents(built, probes.try_forward(built, positions=True)) is kept
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, use_cache=False).eval()
    tokens, positions = torch.arange(16)[None], torch.arange(8).repeat(2)[None]
    with torch.no_grad():
        apart = torch.allclose(model(tokens, position_ids=positions).logits[:, 8:], model(tokens[:, 8:]).logits, atol=1e-4)
    assert apart is kept


def test_a_model_with_images_keeps_no_cache(tmp_path: Path) -> None:
    """With one, attention would cross documents, and a recomputed layer would have its keys twice."""
    model = loaded(hf_folders.write(tmp_path / "model", "gemma3", **hf_folders.IMAGES), tmp_path)
    built = build_model(preflight.foresee(configured(tmp_path / "model", tmp_path)).config)
    assert probes.masks_documents(built, probes.try_forward(built, positions=True))
    tokens, positions = torch.arange(16)[None], torch.arange(8).repeat(2)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, position_ids=positions).logits[:, 8:], model(tokens[:, 8:]).logits, rtol=1e-5, atol=1e-5)

    def gradient() -> Tensor:
        (found,) = torch.autograd.grad(model(tokens).logits.logsumexp(-1).sum(), model.get_input_embeddings().weight)
        return found

    expected, config = gradient(), tiny("stdlib", train_activation_checkpointing="full")
    for unit in select_units(model, "auto"):
        set_forward(unit, config, UnitCompiler(config))
    torch.testing.assert_close(gradient(), expected, rtol=0, atol=0)


def test_encoders_without_mask_functions_are_refused(tmp_path: Path) -> None:
    small = {"vocab_size": 160, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    sizes = {"vocab_size": 160, "n_layer": 1, "n_head": 2}
    configs = {
        "xlm": (transformers.XLMConfig(vocab_size=160, emb_dim=16, n_layers=1, n_heads=2), ', or set "causal": true in its config.json'),
        "xlnet": (transformers.XLNetConfig(**sizes, d_model=16, d_inner=24), "give a causal model"),
        "xmod": (transformers.XmodConfig(**small, default_language="en_XX"), ', or set "is_decoder": true in its config.json'),
        "llama": (transformers.LlamaConfig(**small, is_causal=False), ', or set "is_causal": true in its config.json'),
    }
    for name, (config, remedy) in configs.items():
        config.save_pretrained(tmp_path / name)
        said = refused(tmp_path / name, tmp_path)
        assert "is an encoder, whose attention reads the tokens that training predicts" in said and said.endswith(remedy)
    for name in ("xlm", "xmod", "llama"):
        edit(tmp_path / name, causal=True, is_decoder=True, is_causal=True)
        preflight.foresee(configured(tmp_path / name, tmp_path))


def encoder() -> Any:
    return transformers.BertLMHeadModel(
        transformers.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, vocab_size=256)
    )


class Misfit(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = torch.nn.Embedding(256, 16), torch.nn.ModuleList([torch.nn.Linear(8, 256)])

    def forward(self, tokens: Tensor) -> Any:
        return self.layers[0](self.embed(tokens))


class NeedsMask(Misfit):
    def forward(self, tokens: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        return self.embed(tokens) * mask


class Particular(torch.nn.Module):
    """Takes position_ids, bfloat16 alone and as many rows as a slot has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = torch.nn.Embedding(256, 16), torch.nn.ModuleList([torch.nn.Linear(16, 256)])
        self.rows = 3

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Any:
        if self.rows:
            return self.layers[0](self.embed(tokens) + self.embed(position_ids).view(self.rows, -1, 16))
        raise ValueError("only float16 and bfloat16 are supported")


class InHalf(Particular):
    def __init__(self) -> None:
        super().__init__()
        self.rows = 0


def test_an_encoder_of_a_factory_is_refused(tmp_path: Path) -> None:
    config = tiny("stdlib", model_factory=f"{__name__}:encoder")
    with pytest.raises(BadInput, match=r'BertLMHeadModel is an encoder, .* or set "is_decoder": true in its configuration$'):
        preflight.foresee(config)
    other = config.with_given(Given(dataset=[([1] * config.data.seq_len, [2] * config.data.seq_len)] * 20))  # targets of its own
    preflight.foresee(other.model_copy(update={"data": other.data.model_copy(update={"vocab": 256})}).with_given(other.given))


def test_forwards_that_fail_are_refused_before_a_worker(tmp_path: Path) -> None:
    folder = hf_folders.write(tmp_path / "model", "llama", num_attention_heads=4, num_key_value_heads=3)
    said = refused(folder, tmp_path)
    assert said.endswith("fails (num_key_value_heads = 3 does not divide num_attention_heads = 4); correct its config.json")
    transformers.XmodConfig(vocab_size=160, hidden_size=16, num_hidden_layers=1, num_attention_heads=2).save_pretrained(tmp_path / "xmod")
    assert "fails (ValueError: Input language unknown" in refused(tmp_path / "xmod", tmp_path)
    for kind, words in ((Misfit, "same reduction dim"), (NeedsMask, "missing 1 required positional argument: 'mask'")):
        with pytest.raises(BadInput, match=f"{kind.__name__}: its forward fails with tokens .*{words}.*; correct it$"):
            preflight.foresee(tiny("stdlib", model_factory=f"{__name__}:{kind.__name__}"))


def test_forwards_are_tried_as_in_a_run() -> None:
    config = tiny("stdlib", model_factory="any:model", train_slot_batch=3, data_document_mask=True)
    plain = tiny("stdlib", model_factory="any:model", data_seq_len=64)
    chunks = {"num_attention_heads": 2, "axial_pos_embds_dim": [8, 8], "axial_pos_shape": [8, 8], "local_attn_chunk_length": 16}
    sizes = {"hidden_size": 16, "attention_head_size": 8, "feed_forward_size": 24, "vocab_size": 256, "is_decoder": True}
    with torch.device("meta"):
        for model in (Particular(), InHalf()):
            model_checks.check_model(model, config)
        reformer = transformers.ReformerModelWithLMHead(transformers.ReformerConfig(attn_layers=["local"], **chunks, **sizes))
    model_checks.check_model(reformer, plain)


def test_more_experts_per_token_than_experts_are_refused(tmp_path: Path) -> None:
    for kind, name in {"qwen3_moe": "num_local_experts", "gpt_oss": "num_local_experts", "deepseek_v3": "n_routed_experts"}.items():
        folder = hf_folders.write(tmp_path / kind, kind)
        edit(folder, num_experts_per_tok=5)
        assert refused(folder, tmp_path).endswith(f"fails (num_experts_per_tok = 5 is more than {name} = 4); correct its config.json")


def pooling() -> Any:
    """An encoder of transformers in a module of the user's, which returns one row for a sample."""

    class Pooling(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([encoder().bert])

        def forward(self, tokens: Tensor) -> Tensor:
            return self.layers[0](tokens).last_hidden_state.mean(1)  # type: ignore[no-any-return]

        def init_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None: ...
        def init_buffer(self, name: str, full: Tensor) -> None: ...

    return Pooling()


def test_an_encoder_within_a_module_is_seen() -> None:
    config = tiny("stdlib", model_factory=f"{__name__}:pooling")
    with torch.device("meta"):
        model = pooling()
    with pytest.raises(BadInput, match=r"pooling: its forward returns logits of 2 dimensions; return logits \(batch, seq_len, vocab\)"):
        model_checks.check_model(model, config)


def test_results_changed_in_place_are_refused_before_a_worker(tmp_path: Path) -> None:
    for kind, kept in {"gpt_oss": False, "qwen3_moe": True, "llama": True}.items():
        folder = hf_folders.write(tmp_path / kind, kind)
        if kept:
            preflight.foresee(configured(folder, tmp_path, train_activation_checkpointing="selective"))
        else:
            said = refused(folder, tmp_path, train_activation_checkpointing="selective")
            assert said.startswith("train.activation_checkpointing = selective: a unit changes the result of a matrix product")


def factory() -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=256)
    )


def test_a_factory_of_transformers_keeps_no_cache() -> None:
    assert factory().config.use_cache
    assert not build_model(tiny("stdlib", model_factory=f"{__name__}:factory")).config.use_cache


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    folder = hf_folders.write(tmp_path / "model", "bert")
    assert "BertLMHeadModel is an encoder, whose attention reads the tokens that training predicts" in refused(folder, tmp_path)
    edit(folder, is_decoder=True)
    check_logits(folder, tmp_path)
    both = hf_folders.write(tmp_path / "both", "gemma3_text", use_bidirectional_attention=True)
    assert refused(both, tmp_path).endswith('or set "use_bidirectional_attention": false in its config.json')


def test_an_export_has_all_chat_templates(tmp_path: Path) -> None:
    folder = hf_folders.write(tmp_path / "model", "llama")
    tokenizer = write_folder(folder, None)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template={"default": "a", "tool_use": "b"})
    made.save_pretrained(folder)
    hf.write_description(hf.open_folder(folder), {}, tmp_path / "run")
    (tmp_path / "out").mkdir()
    hf.copy_description(hf.open_folder(tmp_path / "run"), tmp_path / "out", None)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").get_chat_template(tools=[{}]) == "b"


def test_an_export_has_the_runs_tokenizer_and_the_processor(tmp_path: Path) -> None:
    folder = hf_folders.write(tmp_path / "model", "llama", vocab_size=304)
    tokenizer = write_folder(tmp_path / "made")
    (folder / "processor_config.json").write_text("{}")
    (folder / "generation_config.json").unlink()
    (tmp_path / "made" / "generation_config.json").write_text("{}")  # of another model
    config = configured(folder, tmp_path, data_tokenizer=str(tmp_path / "made" / "tokenizer.json"))
    copied = RunFolder(preflight.check(config).config.run_folder).model
    assert (copied / "processor_config.json").is_file()
    found = transformers.AutoTokenizer.from_pretrained(copied)
    assert found.encode("a question", add_special_tokens=False) == tokenizer.encode("a question", add_special_tokens=False).ids
    assert found.eos_token == "<|im_end|>" and found.chat_template
    assert not (copied / "generation_config.json").exists()


def as_documented(rank: int, world: int, folder: Path) -> Tensor:
    """Logits of the model that the guide's script loads."""
    script = (Path(__file__).parents[2] / "docs/how-to/hugging-face.md").read_text().split("```python\n")[-1].split("```")[0]
    shards = "for block in model.model.layers:\n    fully_shard(block)\nfully_shard(model)"
    names: dict[str, Any] = {"fully_shard": fully_shard}
    changes = {"/mnt/shared/models/Qwen3-8B": str(folder), '"cuda"': '"cpu"', "# .. fully_shard the blocks and the model ..": shards}
    for text, here in changes.items():
        assert text in script
        script = script.replace(text, here)
    exec(script, names)
    with torch.no_grad():
        logits: Tensor = names["model"].eval()(torch.arange(1, 17)[None]).logits
    return logits


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "deepseek_v3"])
def test_the_script_of_the_guide_loads_a_model(kind: str, tmp_path: Path) -> None:
    folder = hf_folders.write(tmp_path / "model", kind)
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = expected(torch.arange(1, 17)[None]).logits
    torch.testing.assert_close(run_threads(1, as_documented, folder)[0], logits, rtol=1e-5, atol=1e-5)
