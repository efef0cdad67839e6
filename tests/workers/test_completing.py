"""``train.completions``: against a loop over the whole model, at several world sizes, and without an effect on training."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models import hf_folders
from tests.workers.fleet import Fleet, State
from tests.workers.test_balance_loss import SIZES
from tests.workers.tiny import Run, forget, leave, same_bits, text_of, tiny
from vescale_ray.config import ConfigError, RunConfig
from vescale_ray.controller.driver import preflight
from vescale_ray.data.text.prompts import encoded_prompts
from vescale_ray.errors import BadInput
from vescale_ray.models.llama import Llama, LlamaConfig
from vescale_ray.workers.steps.completing import Completer

os.environ["HF_HUB_OFFLINE"] = "1"
PROMPTS = ["shard1 ", "x", "naïve worker", "a prompt that is longer than a sample"]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(3) as workers:
        yield workers


def shown(**changes: Any) -> dict[str, Any]:
    return {"train_completions": {"every": 1, "prompts": PROMPTS, "tokens": 6, **changes}, "elastic_deterministic": True}


def complete(state: State) -> list[dict[str, Any]]:
    trainer = state["trainer"]
    before = torch.get_rng_state()
    made = Completer(trainer.config, trainer.dataset).complete(trainer)
    assert torch.equal(torch.get_rng_state(), before) and trainer.model.training
    return made


@contextmanager
def begun(fleet: Fleet, world: int, config: RunConfig) -> Iterator[Run]:
    run = Run(fleet, config)
    run.fresh(list(range(world)))
    try:
        yield run
    finally:
        fleet.run(run.members, leave, False)
        fleet.run(run.members, forget)


def completed(run: Run) -> list[dict[str, Any]]:
    """The completions, which are the same on all ranks."""
    every = list(run.fleet.run(run.members, complete).values())
    assert all(one == every[0] for one in every)
    return every[0]


def looped(model: Any, prompts: list[list[int]], count: int, context: int) -> list[list[int]]:
    """The most likely tokens, one after another, by a whole model."""
    found = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(count):
            with torch.no_grad():
                output = model(torch.tensor([ids[-context:]]))
            ids.append(int((output if isinstance(output, torch.Tensor) else output.logits)[0, -1].argmax()))
        found.append(ids[len(prompt) :])
    return found


@pytest.mark.parametrize("world", [1, 3])
def test_completions_are_those_of_a_loop_over_the_whole_model(world: int, fleet: Fleet, text: str) -> None:
    with begun(fleet, world, tiny(text, **shown())) as run:
        run.train(6)
        state = {name: torch.from_numpy(value) for (name, kind), value in run.full_state().items() if kind == "param"}
        made = completed(run)
    model = Llama(LlamaConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn=56, vocab=256, max_seq=16))
    model.load_state_dict(state, strict=False)
    expected = looped(model, [list(prompt.encode()) for prompt in PROMPTS], 6, 16)
    assert [one["prompt"] for one in made] == PROMPTS
    for one, ids in zip(made, expected, strict=True):
        kept = ids[: ids.index(0)] if 0 in ids else ids
        assert (one["text"], one["tokens"]) == (bytes(kept).decode(errors="replace"), len(kept))


def test_drawn_completions_depend_on_seed_and_step_alone(fleet: Fleet, text: str) -> None:
    def drawn(world: int, steps: int = 4, **changes: Any) -> list[str]:
        with begun(fleet, world, tiny(text, **shown(temperature=0.9, tokens=12), **changes)) as run:
            run.train(steps)
            return [one["text"] for one in completed(run)]

    one = drawn(1)
    assert drawn(3) == one
    assert drawn(1, steps=5) != one


MODELS: dict[str, dict[str, Any]] = {
    "dropout": {"model_factory": "tests.workers.tiny_models:DropoutModel", "model_units": ["body"]},  # takes no shorter input than a sample
    "experts": {"model_factory": "vescale_ray.models.moe:build", "model_args": SIZES},
}


@pytest.mark.parametrize("kind", list(MODELS))
def test_training_is_bit_for_bit_the_same_with_completions(kind: str, fleet: Fleet, text: str) -> None:

    def trained(shows: bool) -> tuple[list[tuple[float, float]], Any]:
        with begun(fleet, 2, tiny(text, **shown(temperature=0.5), **MODELS[kind])) as run:
            for step in range(1, 5):
                run.train(step)
                if shows:
                    assert len(completed(run)) == 4
            return [(record.loss, record.grad_norm) for record in run.records.values()], run.full_state()

    (losses, state), (others, other) = trained(True), trained(False)
    assert len(losses) == 4 and losses == others and same_bits(state, other)


def test_model_of_transformers_completes_as_its_own_generate(fleet: Fleet, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from tests.data.sources import train_tokenizer

    tokenizer = train_tokenizer(tmp_path / "tokenizer.json", PROMPTS)
    folder = hf_folders.write(tmp_path / "model", "llama", vocab_size=320)
    ids = np.random.default_rng(0).integers(3, 300, 4000).astype(np.uint16)
    ids.tofile(tmp_path / "tokens.bin")
    data = {"data_vocab": 320, "data_seq_len": 32, "data_tokenizer": str(tmp_path / "tokenizer.json"), "data_heldout": 0.0}
    with begun(fleet, 2, tiny(str(tmp_path / "tokens.bin"), model_hf=str(folder), **shown(), **data)) as run:
        made = completed(run)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for one in made:
        given = torch.tensor([tokenizer.encode(one["prompt"]).ids])
        out = model.generate(given, do_sample=False, min_new_tokens=6, max_new_tokens=6, pad_token_id=0)[0, given.shape[1] :].tolist()
        assert one["text"] == tokenizer.decode(out, skip_special_tokens=False) and one["tokens"] == 6


def test_completions_of_a_transformers_model_end_as_its_own(text: str, tmp_path: Path) -> None:
    """The files of a model may name several tokens that end a text, and a chat template another one than documents."""
    folder = hf_folders.write(tmp_path / "model", "llama")
    config = tiny(text, model_hf=str(folder), **shown())

    def told(**settings: Any) -> str:
        (folder / "generation_config.json").write_text(json.dumps(settings))
        completer: Any = Completer(config, text_of(config))
        return str(completer._told("p", [97, 98, 99, 0])["text"])

    assert [told(eos_token_id=[5, 98]), told(eos_token_id=99), told()] == ["a", "ab", "abc"]
    (folder / "generation_config.json").unlink()
    end = json.loads((folder / "config.json").read_text())["eos_token_id"]
    completer: Any = Completer(config, text_of(config))
    assert completer._told("p", [97, end, 98])["text"] == "a"


def test_completion_ends_before_the_token_that_ends_a_document(text: str) -> None:
    config = tiny(text, **shown())
    completer: Any = Completer(config, text_of(config))
    assert completer._told("p", [97, 98, 0, 99]) == {"prompt": "p", "text": "ab", "tokens": 2}
    assert completer._told("p", [0xC3, 97]) == {"prompt": "p", "text": "\ufffda", "tokens": 2}
    assert completer._told("p", [0]) == {"prompt": "p", "text": "", "tokens": 0}


def test_interval_and_last_step_are_due(text: str) -> None:
    config: RunConfig = tiny(text, train_steps=7, train_completions={"every": 3, "prompts": ["x"]})
    completer = Completer(config, text_of(config))
    assert [step for step in range(1, 8) if completer.is_due(step)] == [3, 6, 7]
    without = Completer(tiny(text), text_of(config))
    assert not any(without.is_due(step) for step in range(1, 21))


def test_nan_logits_give_a_token_and_other_shapes_are_refused(text: str) -> None:
    config = tiny(text, **shown(temperature=1.0))
    completer: Any = Completer(config, text_of(config))
    broken = torch.full((1, 3, 256), float("nan"))
    assert 0 <= completer._next(broken, 2, (1, 0, 0)) < 256
    with pytest.raises(BadInput, match="the model returns 2 dimensions; it must return logits"):
        completer._next(broken[0], 2, (1, 0, 0))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prompts": ["x"]}, "train.completions.every must be given"),
        ({"every": 0, "prompts": ["x"]}, "train.completions.every = 0: give at least 1"),
        ({"every": 5}, "train.completions.prompts must be given"),
        ({"every": 5, "prompts": []}, "train.completions.prompts = "),
        ({"every": 5, "prompts": [""]}, "train.completions.prompts.0 = .*: must not be empty"),
        ({"every": 5, "prompts": "x"}, "train.completions.prompts = x: give a list in brackets"),
        ({"every": 5, "prompts": ["x"] * 65}, "train.completions.prompts = "),
        ({"every": 5, "prompts": ["x"], "tokens": 5000}, "train.completions.tokens = 5000: give at most 4096"),
        ({"every": 5, "prompts": ["x"], "temperature": -1}, "train.completions.temperature = -1: give at least 0"),
        ({"every": 5, "prompts": ["x"], "toknes": 5}, "train.completions.toknes"),
    ],
)
def test_settings_that_can_not_be_used_are_one_line(settings: dict[str, Any], words: str, text: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        tiny(text, train_completions=settings)
    assert "\n" not in str(refused.value)


def test_prompts_without_tokens_are_refused_before_the_run(tmp_path: Path) -> None:
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    config = tiny(str(tmp_path / "a.bin"), data_vocab=1000, **shown())
    with pytest.raises(BadInput, match="train.completions: the data holds token ids, and nothing tells their text; set data.tokenizer"):
        preflight.foresee(config.model_copy(update={"run": config.run.model_copy(update={"dir": str(tmp_path)})}))
    with pytest.raises(BadInput, match="prompts: 'é' has token 195, but there are 100"):
        encoded_prompts(["é"], None, "bytes", 100)
