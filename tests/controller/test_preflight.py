"""Bad input is found before Ray is started. Each refusal is one line that names the value and the remedy."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.controller.runs import tiny
from tests.data.sources import train_tokenizer
from vescale_ray import checkpoint
from vescale_ray.config import RunConfig
from vescale_ray.controller.checkpointing.coordinator import CheckpointCoordinator
from vescale_ray.controller.driver import driver, preflight
from vescale_ray.controller.policy import choose_source
from vescale_ray.controller.protocol import ScheduledAction
from vescale_ray.controller.statistics.checkpoint_stats import CheckpointStats
from vescale_ray.data.dataset_loading import load_dataset
from vescale_ray.errors import BadInput
from vescale_ray.workers.building.model_building import build_model
from vescale_ray.workers.messages import Origin


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any) -> None:
        raise AssertionError("Ray was about to be started")

    monkeypatch.setattr(driver, "Cluster", started)


def save(config: RunConfig, step: int, epoch: int = 3, more: Any = None) -> None:
    """Write a checkpoint of ``config``'s model as one rank, without a trainer."""
    pieces = []
    for name, parameter in build_model(config).named_parameters():
        for kind in ("param", *preflight.STATES[config.train.optimizer]):
            shape = tuple(parameter.shape)
            pieces.append(checkpoint.ShardPiece(name, kind, 0, parameter.numel(), shape, torch.float32, torch.zeros(parameter.numel())))
    attempt = f"a{step}-{epoch}"
    vote = checkpoint.write_shard(config.checkpoint_root, attempt, 0, pieces, step=step, epoch=epoch)
    meta = {"stream": preflight.stream_of(config, load_dataset(config.data)), **(more or {})}
    checkpoint.commit(config.checkpoint_root, [vote], step=step, epoch=epoch, attempt=attempt, world=1, meta=meta)


def refused(config: RunConfig) -> str:
    """The line that a run of ``config`` ends with before it begins."""
    with pytest.raises(BadInput) as caught:
        driver.run(config)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_unwritable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "can't be written" in refused(tiny(tmp_path, "r", run_dir=str(tmp_path / "file")))
    assert "s3://bucket/p?x=1: can't be written (S3 URL option 'x'" in refused(tiny(tmp_path, "r", checkpoint_dir="s3://bucket/p?x=1"))
    assert "set checkpoint.dir to a folder or URL that can" in refused(tiny(tmp_path, "r", checkpoint_dir=str(tmp_path / "file" / "x")))


def test_foreign_address_is_refused_and_a_port_in_use_is_not(tmp_path: Path, port: int) -> None:
    assert "can't be listened on" in refused(tiny(tmp_path, "r", metrics_host="192.0.2.1", metrics_port=port))
    assert "can't be listened on" in refused(tiny(tmp_path, "r", metrics_host="192.0.2.1", metrics_port=0))
    assert not (tmp_path / "r").exists(), "nothing is left of it"
    preflight.check(tiny(tmp_path, "r", metrics_port=port))


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    save(tiny(tmp_path, "r"), 10)
    wider = refused(tiny(tmp_path, "r", model_dim=64))
    assert "is of another model" in wider and "has shape" in wider and "checkpoint.resume=never" in wider
    assert "it has no layers.2" in refused(tiny(tmp_path, "r", model_layers=3))
    assert "it has layers.1" in refused(tiny(tmp_path, "r", model_layers=1))
    assert "another optimizer than train.optimizer = sgd: it has no momentum_buffer" in refused(tiny(tmp_path, "r", train_optimizer="sgd"))


def test_checkpoint_of_adamw_is_refused_with_8_bit_states(tmp_path: Path) -> None:
    """The names of 8-bit states depend on the parameter, so the preflight does not know them."""
    config = tiny(tmp_path, "r")
    save(config, 10, more={"config": config.model_dump(mode="json")})
    line = refused(tiny(tmp_path, "r", train_optimizer="adamw8bit"))
    assert "was saved with train.optimizer = adamw, now it is adamw8bit, which has other states; train with the one that saved" in line
    preflight.check(config)


def test_checkpoint_of_another_sample_stream_is_refused(tmp_path: Path) -> None:
    save(tiny(tmp_path, "r"), 10)
    assert "run.seed = 7, now it is 8" in refused(tiny(tmp_path, "r", run_seed=8))
    assert "train.slots * train.slot_batch = 12, now it is 24" in refused(tiny(tmp_path, "r", train_slot_batch=4))
    (tmp_path / "other.txt").write_text("other words " * 500)
    assert "data.corpus" in refused(tiny(tmp_path, "r", data_corpus=str(tmp_path / "other.txt")))


def write_tokens(path: Path, seed: int = 0) -> None:
    rows = np.random.default_rng(seed).integers(0, 300, (400, 40)).tolist()
    pq.write_table(pa.table({"ids": pa.array(rows, pa.list_(pa.int32()))}), path)


def test_checkpoint_of_another_token_stream_is_refused(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.parquet")
    data = {"data_corpus": str(tmp_path / "a.parquet"), "data_column": "ids", "data_vocab": 300}
    save(tiny(tmp_path, "r", **data), 10)
    preflight.check(tiny(tmp_path, "r", **data))
    assert "data.shuffle_blocks = 16, now it is 3" in refused(tiny(tmp_path, "r", **data, data_shuffle_blocks=3))
    assert "data.end_token = None, now it is 5" in refused(tiny(tmp_path, "r", **data, data_end_token=5))
    assert "is of another model: embed.weight has shape" in refused(tiny(tmp_path, "r", **{**data, "data_vocab": 400}))
    write_tokens(tmp_path / "a.parquet", seed=1)
    said = refused(tiny(tmp_path, "r", **data))
    assert "was saved with other content of data.corpus: " in said and "samples would be lost or repeated" in said and "\n" not in said


def test_checkpoint_of_another_mixture_is_refused(tmp_path: Path) -> None:
    for name in "ab":
        write_tokens(tmp_path / f"{name}.parquet", seed=ord(name))
    a, b = ({"corpus": str(tmp_path / f"{name}.parquet"), "weight": weight} for name, weight in (("a", 0.7), ("b", 0.3)))
    data = {"data_corpus": None, "data_column": "ids", "data_vocab": 300}
    save(tiny(tmp_path, "r", **data, data_mixture=[a, b]), 10)
    preflight.check(tiny(tmp_path, "r", **data, data_mixture=[a, b]))
    changed = refused(tiny(tmp_path, "r", **data, data_mixture=[a, {**b, "weight": 0.7}]))
    assert "was saved with data.mixture = weights 7 : 3, now it is weights 1 : 1: samples would be lost or repeated" in changed
    assert "data.mixture = weights 7 : 3" in refused(tiny(tmp_path, "r", **data, data_mixture=[b, a]))
    assert "data.mixture.1.corpus" in refused(tiny(tmp_path, "r", **data, data_mixture=[a, {**a, "weight": 0.3}]))
    assert "data.corpus = a mixture" in refused(tiny(tmp_path, "r", **{**data, "data_corpus": a["corpus"]}))


def test_the_model_has_the_vocabulary_of_the_data(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.parquet")
    data = {"data_corpus": str(tmp_path / "a.parquet"), "data_column": "ids", "data_vocab": 300}
    assert preflight.foresee(tiny(tmp_path, "r", **data)).expected["embed.weight"].shape[0] == 300
    factory = {"model_factory": "tests.workers.tiny_models:DropoutModel", "model_units": ["body"]}
    assert "the embedding of model.factory = tests.workers.tiny_models:DropoutModel has 256 rows" in refused(
        tiny(tmp_path, "r", **data, **factory)
    )
    assert "set data.vocab to the number of tokens" in refused(tiny(tmp_path, "r", **{**data, "data_vocab": None}))


def test_the_vocabulary_comes_from_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(tmp_path / "tokenizer.json", ["shard worker ring"] * 10)
    pq.write_table(pa.table({"text": ["shard worker ring"] * 500}), tmp_path / "a.parquet")
    with contextlib.chdir(tmp_path):
        data = {"data_corpus": ["a.parquet"], "data_tokenizer": "tokenizer.json", "data_end_token": "<|end|>"}
        found = preflight.foresee(tiny(tmp_path, "r", **data))
    assert found.config.data.vocab == tokenizer.get_vocab_size() == found.expected["embed.weight"].shape[0]
    assert found.config.data.corpus == [str(tmp_path / "a.parquet")]
    assert found.config.data.tokenizer == str(tmp_path / "tokenizer.json")
    assert preflight.foresee(found.config).config == found.config


def test_checkpoint_past_last_step_or_missing_one_is_refused(tmp_path: Path) -> None:
    save(tiny(tmp_path, "r"), 100)
    assert "beyond train.steps = 60" in refused(tiny(tmp_path, "r"))
    assert "checkpoint.resume = must, but" in refused(tiny(tmp_path, "other", checkpoint_resume="must"))


def test_model_that_can_not_be_built_is_refused(tmp_path: Path) -> None:
    assert "'blocks.*' matches no module" in refused(tiny(tmp_path, "r", model_units=["blocks.*"]))
    assert "no_such_module" in refused(tiny(tmp_path, "r", model_factory="no_such_module:make"))


def test_experts_that_workers_can_not_share_are_refused(tmp_path: Path) -> None:
    sizes = {"dim": 16, "layers": 2, "heads": 2, "kv_heads": 1, "experts": 4, "top_k": 2, "ffn": 12, "head_dim": 8}
    shared: dict[str, Any] = {"train_expert_parallel": 2, "elastic_workers": 2, "model_factory": "vescale_ray.models.moe:build"}
    preflight.foresee(tiny(tmp_path, "r", **shared, model_args=sizes))
    uneven = refused(tiny(tmp_path, "r", **shared, model_args={**sizes, "experts": 3}))
    assert uneven == (
        "train.expert_parallel = 2: layers.0.ffn.experts.gate_up_proj of shape (3, 16, 24): the 2 workers do not divide its experts; "
        "use a number that does"
    )
    dense = {**shared, "model_factory": "tests.workers.tiny_models:DropoutModel", "model_units": ["body"]}
    assert "train.expert_parallel = 2: DropoutModel has no fused experts" in refused(tiny(tmp_path, "r", **dense))


FACTORIES = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 4)
    def init_parameter(self, name, full, generator):
        pass

def raising():
    raise RuntimeError("no\\nvalue")
def missing_attribute():
    return torch.no_such_thing()
def needs(size):
    return Small()
def the_class():
    return Small
def leaving():
    raise SystemExit(3)
number = 5
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raising", " with no arguments raises RuntimeError: no value"),
        ("missing_attribute", " with no arguments raises AttributeError: module 'torch' has no attribute 'no_such_thing'"),
        ("needs", " with no arguments raises TypeError: needs() missing 1 required positional argument: 'size'"),
        ("number", " with no arguments raises TypeError: 'int' object is not callable"),
        ("leaving", ": it ends the process, with 3; raise an error"),
        ("the_class", ": it returns the class Small; give a function that returns a torch.nn.Module"),
    ],
)
def test_a_model_factory_that_fails_is_named(name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "factories_that_fail.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    said = refused(tiny(tmp_path, "r", model_factory=f"factories_that_fail:{name}", model_units=["embed"]))
    assert said.startswith(f"model.factory = factories_that_fail:{name}{words}")


OUTPUTS = """
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self, tokens=256, back="logits"):
        super().__init__()
        self.embed, self.blocks, self.head, self.back = nn.Embedding(256, 4), nn.ModuleList([nn.Linear(4, 4)]), nn.Linear(4, tokens), back
        self.requires_grad_(back != "frozen")
    def forward(self, tokens):
        logits = self.head(self.blocks[0](self.embed(tokens)))
        if self.back == "last":
            return logits[:, [-1]]
        return (logits, None) if self.back == "pair" else logits.flatten(0, 1) if self.back == "flat" else logits

def three(output, targets, weights):
    return output.sum()
def summed(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")
def mean(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())
def padded_mean(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="none").mean()
def each(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="none")
"""


@pytest.mark.parametrize(
    ("args", "loss", "words"),
    [
        ({"back": "pair"}, None, "its forward returns a tuple; return logits (batch, seq_len, vocab), or set model.loss"),
        ({"back": "flat"}, None, "its forward returns logits of 2 dimensions; return logits (batch, seq_len, vocab), or set model.loss"),
        ({"tokens": 90}, None, "its forward returns logits of 90 tokens, but data.vocab = 256; give each token one"),
        ({"back": "last"}, None, "logits (2, 1, 256) for tokens (2, 16); return those of each token, (batch, seq_len, vocab)"),
        ({}, "three", "missing 1 required positional argument: 'weights'; it is called with the model's output and the targets"),
        ({"back": "frozen"}, None, "no parameter has requires_grad, so there is nothing to train"),
        ({}, "mean", "it returns the mean over the targets; return their sum (reduction='sum')"),
        ({}, "padded_mean", "it returns the mean over the targets; return their sum (reduction='sum')"),
        ({}, "each", "it returns a Tensor of shape [8]; return the sum over the targets, one number"),
    ],
)
def test_what_a_model_and_a_loss_return_is_checked(
    args: dict[str, Any], loss: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models_of_outputs.py").write_text(OUTPUTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    shared: dict[str, Any] = {"model_factory": "models_of_outputs:Net", "model_units": "auto"}
    preflight.foresee(tiny(tmp_path, "r", **shared, model_loss="models_of_outputs:summed"))
    given = {} if loss is None else {"model_loss": f"models_of_outputs:{loss}"}
    assert refused(tiny(tmp_path, "r", **shared, model_args=args, **given)).endswith(words)


def test_a_model_without_a_row_for_each_byte_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "factories_of_small.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    said = refused(tiny(tmp_path, "r", model_factory="factories_of_small:Small", model_units=["embed"]))
    assert "data.vocab = 256: the embedding of model.factory = factories_of_small:Small has 100 rows" in said


@pytest.mark.parametrize(
    ("optimizer", "options", "words"),
    [
        ("sgd", {"momentum": "x"}, "train.optimizer_options = {momentum: 'x'}: sgd refuses them ("),
        ("muon", {"ns_steps": -1}, "train.optimizer_options = {ns_steps: -1}: muon refuses them (ns_steps = -1: give 1 to 99)"),
    ],
)
def test_options_that_an_optimizer_refuses_are_named(optimizer: str, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in refused(tiny(tmp_path, "r", train_optimizer=optimizer, train_optimizer_options=options))


def test_each_optimizer_takes_its_own_options(tmp_path: Path) -> None:
    preflight.foresee(tiny(tmp_path, "r", train_optimizer="sgd", train_optimizer_options={"nesterov": True}))
    for one in ("adamw", "adamw8bit", "muon", "shampoo", "soap", "sgd"):
        preflight.foresee(tiny(tmp_path, "r", train_optimizer=one))


def test_unknown_scheduled_action_is_refused() -> None:
    with pytest.raises(BadInput):
        ScheduledAction(1, "explode", 0)  # type: ignore[arg-type]


@pytest.mark.fault("E3", "E4")
def test_resume_uses_newest_checkpoint_and_a_higher_generation(tmp_path: Path) -> None:
    config = tiny(tmp_path, "r")
    save(config, 30, epoch=2)
    save(config, 20, epoch=5)  # the run went back to before step 30 and wrote this later
    found = preflight.check(config)
    assert (found.source.origin, found.source.step, found.first_generation) == (Origin.CHECKPOINT, 20, 6)
    never = preflight.check(tiny(tmp_path, "r", checkpoint_resume="never"))
    assert (never.source.origin, never.first_generation) == (Origin.FRESH, 6)


def test_resume_never_run_returns_only_to_its_own_checkpoints(tmp_path: Path) -> None:
    """If the run loses shards before its first checkpoint, it must not resume the run before it. If its supervisor is lost later, it
    must not begin from its first step."""
    config = tiny(tmp_path, "r", checkpoint_resume="never")
    save(config, 20, epoch=5)
    first = preflight.check(config)
    worker_group: Any = SimpleNamespace(alive=lambda worker: False)
    log: Any = SimpleNamespace(stats=SimpleNamespace(checkpoints=CheckpointStats()))
    generation: Any = SimpleNamespace(world=None)
    nothing: Any = None
    coordinator = CheckpointCoordinator(
        config.checkpoint_root, "r", worker_group, log, generation, nothing, nothing, 1.0, nothing, first.oldest
    )
    assert coordinator.newest() is None and choose_source({}, "a", coordinator.newer("a")).origin is Origin.FRESH
    again = preflight.check(config, oldest=first.oldest)
    assert (again.source.origin, again.first_generation, again.oldest) == (Origin.FRESH, 6, 6)
    save(config, 7, epoch=6)
    assert choose_source({}, "a", coordinator.newer("a")).step == 7
    again = preflight.check(config, oldest=first.oldest)
    assert (again.source.origin, again.source.step, again.first_generation, again.oldest) == (Origin.CHECKPOINT, 7, 7, 6)
    assert preflight.check(config).source.origin is Origin.FRESH, "whoever starts it once more begins anew"


def test_a_run_whose_steps_are_all_done_needs_no_ray(tmp_path: Path) -> None:
    config = tiny(tmp_path, "r")
    save(config, config.train.steps)
    result = driver.run(config)
    assert (result.state, result.step, result.exit_code) == ("DONE", config.train.steps, 0)


def test_paths_mean_the_same_in_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = tiny(tmp_path, "r", run_dir="here", checkpoint_dir="there", data_corpus="text.txt")
    absolute = preflight.absolute(config)
    assert (absolute.run_folder, absolute.checkpoint_root) == (tmp_path / "here" / "r", str(tmp_path / "there"))
    assert absolute.data.corpus == str(tmp_path / "text.txt")
    assert preflight.absolute(tiny(tmp_path, "r", data_corpus="stdlib")).data.corpus == "stdlib"
    mixture, sets = [{"corpus": ["a", "stdlib"]}, {"corpus": "s3://b/c"}], {"w": {"corpus": "w"}}
    found = preflight.absolute(tiny(tmp_path, "r", data_corpus=None, data_mixture=mixture, data_eval=sets)).data
    assert [path for _, path in found.corpora] == [str(tmp_path / "a"), "stdlib", "s3://b/c", str(tmp_path / "w")]


def test_an_option_that_the_optimizer_does_not_have_is_refused(tmp_path: Path) -> None:
    line = refused(tiny(tmp_path, "r", train_optimizer="muon", train_optimizer_options={"nesterof": True}))
    assert line.startswith("muon has no option 'nesterof': it takes momentum, nesterov")


def test_a_quantize_keep_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    line = refused(tiny(tmp_path, "r", train_quantize="fp8", train_quantize_keep=["*.gate"]))
    assert line.startswith("train.quantize = fp8: keep: '*.gate' matches no parameter; there are embed.weight, ")


def test_fp8_products_of_tiles_that_are_not_square_are_refused(tmp_path: Path) -> None:
    line = refused(tiny(tmp_path, "r", train_quantize="fp8 1x128", train_quantize_products=True))
    assert (
        line.startswith("train.quantize = fp8 1x128: products of 'layers.0.") and "needs square tiles, such as Fp8Block(128, 128)" in line
    )


def test_a_pattern_of_no_decay_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    line = refused(tiny(tmp_path, "r", train_no_decay=["*.bias"]))
    assert line.startswith("no_decay: '*.bias' matches no parameter; there are embed.weight, ")


def test_wandb_without_its_package_or_a_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    line = refused(tiny(tmp_path, "r", metrics_wandb={"project": "p", "mode": "online"}))
    assert line.startswith("metrics.wandb.mode = online: this machine has no key of W&B; run `wandb login`, set WANDB_API_KEY,")
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    line = refused(tiny(tmp_path, "r", metrics_wandb={"project": "p"}))
    assert line == "metrics.wandb.project = p: the package wandb is not installed; pip install 'vescale-ray[wandb]'"
