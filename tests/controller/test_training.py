"""``vescale_ray.train``: the same run as by the command, with a model and a data set of the caller."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from torch import nn

import vescale_ray
from tests.controller.runs import Finished, environment, tiny
from vescale_ray.cli import main
from vescale_ray.config import RunConfig
from vescale_ray.controller.driver import driver, training
from vescale_ray.controller.driver.driver import RunResult
from vescale_ray.controller.protocol import Outcome
from vescale_ray.data.dataset_loading import load_dataset
from vescale_ray.errors import BadInput
from vescale_ray.runfolder import RunFolder


class Words(nn.Module):
    """A model that predicts the next token from this one."""

    def __init__(self, dim: int = 8, vocab: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.body = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens)).tanh())


def small(folder: Path, name: str, **changes: Any) -> RunConfig:
    return tiny(folder, name, **{"train_steps": 6, "elastic_workers": 2, "checkpoint_every": 1000, **changes})


def losses(config: RunConfig) -> dict[int, float]:
    return Finished(config, RunResult("DONE", 0, 0, None, None, config.run_folder)).losses


@pytest.mark.slow
def test_local_class_and_data_set_train_as_the_command_does(ray_here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Mine(Words):  # it can't be imported
        pass

    by_command = small(tmp_path, "command", model_factory=f"{__name__}:Words", model_args={"dim": 12}, model_units=["body"])
    (tmp_path / "run.yaml").write_text(by_command.to_yaml())
    assert main(["train", str(tmp_path / "run.yaml")]) == 0

    corpus = load_dataset(by_command.data)

    tree = by_command.model_dump(mode="json")
    tree["run"]["name"], tree["model"]["factory"], tree["data"]["vocab"] = "call", None, 256
    tree["train"]["completions"] = {"every": 3, "prompts": ["shard1 ", "x"], "tokens": 4}  # they change no loss
    result = vescale_ray.train(tree, model=Mine, dataset=corpus, progress=False)
    assert losses(by_command) and losses(small(tmp_path, "call")) == losses(by_command), "bit for bit"
    assert result.done and (result.step, result.steps, result.reason) == (6, 6, "all steps are done")
    assert result.folder == tmp_path / "call" and result.checkpoint is not None and Path(result.checkpoint).exists()
    newest = RunFolder(result.folder).last_metrics()
    assert newest is not None and result.losses["loss"] == newest["loss"] and set(result.losses) == {"loss", "heldout_loss"}
    assert ray.is_initialized(), "the caller's Ray goes on"
    shown = [event for event in RunFolder(result.folder).read_events() if event["event"] == "completions"]
    assert [event["step"] for event in shown] == [3, 6]
    assert [one["prompt"] for one in shown[0]["completions"]] == ["shard1 ", "x"] and shown[0]["completions"][0]["tokens"] <= 4

    # The run does not go on without the objects, or with other samples.
    capsys.readouterr()
    for argument, missing in (("model", "model.factory = given:Mine"), ("dataset", "data.corpus = given://Corpus")):
        given: dict[str, Any] = {"model": Mine, "dataset": corpus}
        del given[argument]
        with pytest.raises(BadInput, match=f"{missing}: the run was started by vescale_ray.train.*call it again with the same {argument}"):
            vescale_ray.train(result.folder / "config.yaml", **given)
    assert main(["train", str(result.folder / "config.yaml")]) == 2
    assert "call it again with the same model" in capsys.readouterr().err
    tree["train"]["completions"] = None  # lists of token ids have no text
    with pytest.raises(BadInput, match="was saved with other content of data.corpus: samples would be lost or repeated"):
        vescale_ray.train(tree, model=Mine, dataset=[[1] * 17] * 99, progress=False)


_SCRIPT = """
import sys, threading
import vescale_ray
assert "ray" not in sys.modules and "torch" not in sys.modules
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 9)
    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)))

class Samples:
    vocab = 9
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return [(index + place) % 9 for place in range(5)]

config = {
    "run": {"name": "script", "dir": sys.argv[1]}, "model": {"units": ["body"]}, "data": {"seq_len": 4},
    "train": {"steps": 3, "slots": 2, "device": "cpu"}, "elastic": {"workers": 1}, "ray": {"cpus_per_worker": 0.5},
}
first = vescale_ray.train(config, model=Net, dataset=Samples())
config["train"]["steps"] = 5
second = vescale_ray.train(config, model=lambda: Net(), dataset=Samples(), progress=False)
import ray
print("ended", first.step, second.step, second.done, ray.is_initialized(), flush=True)
"""


@pytest.mark.slow
def test_script_starts_a_local_ray_for_each_call_and_leaves_none(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.stdout.splitlines()[-1:] == ["ended 3 5 True False"], done.stdout + done.stderr
    assert "step 3/3" in done.stdout, "progress is shown by default"
    assert [event["source"] for event in RunFolder(tmp_path / "script").read_events() if event["event"] == "generation"] == [
        "fresh",
        "checkpoint",
    ]


def test_path_of_a_function_is_the_factory_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RunConfig] = []
    monkeypatch.setattr(training, "conduct", lambda config, **_: seen.append(config))
    for model in (Words, f"{__name__}:Words"):
        vescale_ray.train(small(tmp_path, "named"), model=model)
    (tmp_path / "run.yaml").write_text(small(tmp_path, "named", model_factory=f"{__name__}:Words").to_yaml())
    vescale_ray.train(tmp_path / "run.yaml")
    vescale_ray.train(str(tmp_path / "run.yaml"))
    assert all(one == seen[0] for one in seen) and seen[0].model.factory == f"{__name__}:Words"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"config": 3}, "config: int is not a configuration; give a mapping of sections, the path of a YAML file, or a RunConfig"),
        ({"config": {"trian": {}}}, "unknown key trian: "),
        ({"config": "none.yaml"}, "none.yaml: no such file"),
        ({"config": {"train.steps": 3}}, "train.steps: only the command line takes a key with its section; write train: {steps: 3}"),
        ({"model": Words()}, "model: an object of Words has its parameters already; give the class Words, or a function that builds one"),
        ({"model": 5}, "model: int can't be called; give a class or function that returns a module, or pkg.mod:name"),
        ({"model": "nowhere"}, "model.factory = nowhere: give module and function as pkg.mod:fn"),
        ({"model": lambda: 5}, "model.factory = given:lambda: it returns a int; give a function that returns a torch.nn.Module"),
        (
            {"model": lambda: (Words(), threading.Lock())[0], "dataset": [threading.Lock()]},
            "dataset: can't be sent to the workers .TypeErr",
        ),
        ({"dataset": []}, "data.vocab = null: a list does not state its number of token ids"),
    ],
)
def test_bad_input_is_one_line_before_ray_starts(
    given: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "run", lambda *_, **__: pytest.fail("a run was started"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=words) as refused:
        vescale_ray.train(**{"config": small(tmp_path, "refused"), **given})
    assert "\n" not in str(refused.value) and not (tmp_path / "refused").exists()


@pytest.mark.parametrize("step", [0, 43])
def test_wrong_input_after_a_step_leaves_a_run_to_resume(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a run is left if its input is refused before the first step. After it, the folder keeps its configuration."""
    for actor in ("worker_group.supervisor", "controller"):
        monkeypatch.setattr(f"vescale_ray.controller.{actor}.actor_of", lambda *_: None)
    monkeypatch.setattr(driver, "Cluster", lambda config: SimpleNamespace(node="n", capacity=None))
    monkeypatch.setattr(driver._Attempt, "_follow", lambda self: Outcome("FAILED", step, "bad data", refused=True))
    for end in ("_final_scrape", "close"):
        monkeypatch.setattr(driver._Attempt, end, lambda self: None)
    config = small(tmp_path, "late")
    path = config.run_folder / "config.yaml"
    words = rf"^the run failed at step 43: bad data; resume with: vescale-ray train {path}$" if step else "^bad data$"
    with pytest.raises(training.RunFailed if step else BadInput, match=words):
        vescale_ray.train(config)
    assert path.is_file() is bool(step)


def test_too_large_objects_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "MOST_BYTES", 10_000)
    with pytest.raises(BadInput, match="dataset: 0.0 GB are too much to be sent to each worker; open files when they are first used"):
        vescale_ray.train(small(tmp_path, "large"), dataset=[list(range(i, i + 17)) for i in range(500)])


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (RunResult("STOPPED", 3, 6, None, "c", Path(), interrupted=True), ("SIGINT", True, False)),
        (RunResult("STOPPED", 3, 6, None, "c", Path()), ("SIGINT", False, False)),
        (RunResult("DONE", 6, 6, None, "c", Path(), warnings=("a port",)), ("all steps are done", False, True)),
        (RunResult("FAILED", 3, 6, "no workers", None, Path()), "the run failed at step 3: no workers; resume with: vescale-ray train"),
    ],
    ids=["interrupted", "stopped", "done", "failed"],
)
def test_result_tells_how_a_run_ended(end: RunResult, told: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(small(tmp_path, "ended").run_folder)

    def carried_out(config: RunConfig, **_: Any) -> RunResult:
        folder.append_event({"event": "evaluation", "step": 3, "samples": 4, "loss": 2.0, "sets": {"wiki": {"loss": 3.0}, "bad": {}}})
        folder.append_event({"event": "run_stopped", "reason": "SIGINT"})
        folder.append_metrics({"step": 3, "loss": 1.5})
        return end

    monkeypatch.setattr(driver, "run", carried_out)
    if isinstance(told, str):
        with pytest.raises(vescale_ray.RunFailed, match=told):
            vescale_ray.train(small(tmp_path, "ended"), progress=False)
        return
    result = vescale_ray.train(small(tmp_path, "ended"), progress=False)
    assert (result.reason, result.interrupted, result.done) == told and result.warnings == end.warnings
    assert result.losses == {"loss": 1.5, "heldout_loss": 2.0, "wiki_loss": 3.0} and result.checkpoint == "c"


def test_the_guide_shows_calls_that_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RunConfig] = []

    def carried_out(config: RunConfig, **_: Any) -> training.TrainResult:
        seen.append(config)
        return training.TrainResult(tmp_path, 1, 1, {"loss": 2.0}, "c", True, "all steps are done")

    monkeypatch.setattr(training, "conduct", carried_out)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("data: {seq_len: 64}\n")
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "python.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"vescale_ray": vescale_ray, "Net": Words, "tokens": list(range(650))}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == len(seen) == 3 and seen[0].run.name == "first" and seen[1].model.factory == f"{__name__}:Words"
    samples = seen[2].given.dataset
    assert seen[2].data.corpus == "given://Samples" and samples[1] == list(range(64, 129))
    told = re.findall(r"`(\w+)`", page.partition("`TrainResult`: ")[2].split("|")[0])
    assert [field.name for field in fields(training.TrainResult)] == told


@pytest.mark.slow
def test_non_finite_fp8_weights_end_the_run_by_name(ray_here: None, tmp_path: Path) -> None:
    config = small(tmp_path, "diverged", train_lr=1e37, train_grad_clip=0, train_quantize="fp8", train_warmup_steps=0)
    with pytest.raises(vescale_ray.RunFailed, match=r"Inf or NaN in 'layers\.0\.\S+weight' \(1 tile\)"):
        vescale_ray.train(config, progress=False)
    events = list(RunFolder(config.run_folder).read_events())
    assert sum(event["event"] == "worker_started" for event in events) == 2, "the run does not try again"
    assert not any(event["event"] == "checkpoint_saved" and event["step"] for event in events), "it saves no such weights"
