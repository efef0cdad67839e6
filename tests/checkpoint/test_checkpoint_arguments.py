"""Meaningless arguments are refused before anything is written, in one sentence with the value and the remedy."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.ranks import on_processes
from vescale_ray import checkpoint as ckpt

loose: Any = ckpt


def hf(root: Any) -> Path:
    """Path of a safetensors file that holds the checkpoint in ``root``."""
    return next(Path(root).rglob("*.safetensors"))


def zeros() -> dict[str, Any]:
    return {"model": {"w": torch.zeros(10)}}


W = {"model": {"w": torch.ones(10)}}
SAVES: list[tuple[dict[str, Any], str]] = [
    ({"step": "5"}, "step is '5'; give the number of completed steps"),
    ({"step": 5.5}, "step is 5.5; give the number of completed steps"),
    ({"step": None}, "step is None"),
    ({"step": True}, "step is True"),
    ({"step": -1}, "step is -1"),
    ({"step": 10**18}, "step is 1000000000000000000"),
    ({"epoch": "1"}, "epoch is '1'; give the incarnation of the run"),
    ({"epoch": 1.5}, "epoch is 1.5"),
    ({"timeout_s": 0}, "timeout_s is 0; give seconds above 0"),
    ({"timeout_s": math.nan}, "timeout_s is nan"),
    ({"timeout_s": "10"}, "timeout_s is '10'"),
    ({"retention": 3}, "retention is a int; give Retention(keep_last=2)"),
    ({"metrics": {"loss": "low"}}, "metrics.loss is a str; give a number"),
    ({"metrics": [1]}, "metrics is a list; give a dict"),
    ({"meta": "x"}, "meta is a str; give a dict"),
    ({"state": None}, 'the state is a NoneType; give its parts by name, for example {"model": model'),
    ({"state": {}}, "the state is empty: give its parts by name"),
    ({"state": nn.Linear(1, 1)}, "the state is a Linear"),
    ({"state": {1: nn.Linear(1, 1)}}, "the state's key 1 is a int; give text"),
    ({"root": None}, "checkpoint root is None; give a folder's path, a URL or a store"),
    ({"root": "a\0b"}, "without zero bytes"),
    ({"root": b"abc"}, "checkpoint root is b'abc'"),
    ({"group": "mine"}, "group"),
]


ONE_OF_EACH = list({next(iter(given)): (given, words) for given, words in SAVES}.values())


@pytest.mark.parametrize(("how", "given", "words"), [*(("save", *one) for one in SAVES), *(("async_save", *one) for one in ONE_OF_EACH)])
def test_save_with_invalid_arguments_writes_nothing(tmp_path, monkeypatch, how, given, words):
    monkeypatch.chdir(tmp_path)
    every = {"state": W, "root": tmp_path / "ckpt", "step": 5, **given}
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        if how == "save":
            ckpt.save(**every)
        else:
            made = {name: every.pop(name) for name in ("root", "retention", "timeout_s", "group") if name in every}
            with ckpt.Saver(**made) as saver:
                saver.async_save(**every)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_numpys_whole_numbers_are_steps(tmp_path):
    assert loose.save(W, tmp_path, np.int64(7), epoch=np.int64(2)).commit.name == "e0002-s000000000007"
    with loose.Saver(tmp_path) as saver:
        assert saver.async_save(W, np.int64(8)).wait(10).step == 8


def test_a_quantized_tensor_is_refused_not_read_beyond_its_end(tmp_path):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    with pytest.raises(ValueError, match="'w' is of the quantized type torch.quint8.*dequantize"):
        ckpt.save({"model": {"w": tensor}}, tmp_path, 1)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arguments")
    ckpt.save(W, folder, 1)
    return folder


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda root: loose.load({"model": {"w": torch.ones(10)}}, root, include="zz*"),
            "no tensor of the state fits include='zz*'",
        ),
        (lambda root: loose.load(None, root), "the state is a NoneType"),
        (lambda root: loose.load(W, root, commit=3), "no checkpoint 3 in"),
        (lambda root: loose.load(W, root, include=3), "3 is not a glob of names"),
        (lambda root: loose.load(W, root, rename=[1]), "rename is a list; give a table"),
        (lambda root: loose.load(W, root, device="nosuch"), "device is 'nosuch'; give 'cpu'"),
        (lambda root: loose.open(root, 3), "no checkpoint 3 in"),
        (lambda root: loose.load(W, root, group="gloo"), "group is a str; give a process group, as new_group() makes it, or none"),
        (lambda root: loose.save(root, {"model": torch.nn.Linear(1, 1)}, 1), "checkpoint root is a dict; give a folder's path"),
        (
            lambda root: loose.save(W, Path("s3://bucket/run"), 1),
            "'s3:/bucket/run': a URL has two slashes (pathlib.Path removes one of",
        ),
        (lambda root: loose.save(W, "/data/$USER/run", 1), "$USER is a variable of the shell, which is not replaced here; give its value"),
        (lambda root: loose.save(W, "~nobody-of-this-name/run", 1), "~nobody-of-this-name is not a home folder of this machine"),
        (lambda root: loose.load(W, f"{root}/commits"), "/commits: it is a part of a checkpoint's folder; give "),
        (lambda root: loose.load(W, next(root.glob("commits/*"))), "it is a file; give the folder that was saved to"),
        (lambda root: loose.load(W, f"{root}/nothing"), "/nothing: there is no such folder"),
        (lambda root: loose.load(W, hf(root).parent), "it has files of safetensors; import_hf() reads them"),
        (lambda root: loose.verify(root, 3), "no checkpoint 3 in"),
        (lambda root: loose.open(root).to_state_dict(dtype="bf16"), "dtype is a str; give a dtype of torch"),
        (lambda root: loose.open(root).to_state_dict(device="zzz"), "device is 'zzz'"),
        (lambda root: loose.gc(root, 3), "retention is a int"),
        (lambda root: loose.gc(root, ckpt.Retention(), grace=5), "grace is a int"),
        (lambda root: loose.Retention(keep_last=1.5), "keep_last is 1.5; at least the newest checkpoint must stay"),
        (lambda root: loose.Retention(keep_every=0.5), "keep_every is 0.5; give 0 (off) or more"),
        (lambda root: loose.Grace(orphans="1 h"), "orphans of the grace is '1 h'; give seconds"),
        (lambda root: loose.Grace(readers=math.nan), "readers of the grace is nan"),
        (lambda root: loose.pin(root, 3, "me"), "3 is not a name of a checkpoint"),
        (lambda root: loose.pin(root, "e0000-s000000000001", 3), "3 can't be a pin's name"),
        (lambda root: loose.diff(root, root), "give what checkpoint.open(root) returns"),
        (lambda root: loose.import_dcp(root, 5), "the target is a int; give a module, a state"),
        (lambda root: loose.import_hf(hf(root), 5), "the target is a int; give a module, a dict of tensors"),
        (lambda root: loose.import_hf(hf(root), root, object_bytes="x"), "object_bytes is 'x'; give a whole number of bytes"),
        (lambda root: loose.import_hf(hf(root), root, step=2.5), "step is 2.5; give the number of completed steps"),
        (lambda root: loose.export_hf(root, None, f"{root}/out", max_shard_bytes=-1), "max_shard_bytes is -1; give a whole number"),
        (lambda root: loose.load({"model": {"w": torch.ones(3)}}, root, budget_bytes=None), "budget_bytes is None; give a whole number"),
        (lambda root: loose.load({"model": {"w": torch.ones(3)}}, root, budget_bytes=math.nan), "budget_bytes is nan; give a whole"),
        (lambda root: loose.open(root).read("w", budget_bytes=True), "budget_bytes is True; give a whole number of bytes"),
        (lambda root: loose.choose_interval(math.nan, 1, 100, least_s=1, most_s=10), "cost_s is nan"),
        (lambda root: loose.choose_interval(1, 1, 100, least_s=10, most_s=1), "least_s up to most_s"),
        (lambda root: loose.expected_mtbf(-1, 3, 4), "-1 failures in 3 s"),
    ],
)
def test_invalid_call_raises_one_sentence_and_changes_nothing(root, call, words):
    before = {path: path.stat().st_mtime_ns for path in Path(root).rglob("*")}
    with pytest.raises((ValueError, ckpt.CheckpointError), match=re.escape(words)) as caught:
        call(root)
    assert "\n" not in str(caught.value) and {path: path.stat().st_mtime_ns for path in Path(root).rglob("*")} == before


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda good: None, "it is a NoneType"),
        (lambda good: {}, "KeyError: 'python'"),
        (lambda good: {**good, "python": 3}, "TypeError"),
        (lambda good: {**good, "python": [3, "AAAA", None]}, "ValueError"),
        (lambda good: {**good, "numpy": ["PCG64", *good["numpy"][1:]]}, "MT19937"),
        (lambda good: {**good, "numpy": [*good["numpy"][:4], "one"]}, "hexadecimal"),
        (lambda good: {**good, "numpy": [*good["numpy"][:2], 625, *good["numpy"][3:]]}, "NumPy's position is 625, of 624 words"),
        (lambda good: {**good, "numpy": [*good["numpy"][:2], -1, *good["numpy"][3:]]}, "NumPy's position is -1"),
        (lambda good: {**good, "torch": good["torch"][:8]}, "RuntimeError"),
        (lambda good: {**good, "torch": "\u20ac"}, "ValueError"),
    ],
)
def test_invalid_rng_state_changes_no_generator(harm, words):
    good = loose.capture_rng()
    random.random(), np.random.rand(), torch.rand(1)
    now = loose.capture_rng()
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        loose.restore_rng(harm(good))
    assert "\n" not in str(caught.value) and "give what capture_rng() returned" in str(caught.value)
    assert loose.capture_rng() == now
    loose.restore_rng(good)
    assert loose.capture_rng() == good


def test_error_for_a_foreign_folder_names_its_loader(tmp_path):
    run, stock = tmp_path / "run", tmp_path / "stock"
    ckpt.save(W, run / "checkpoints", 1)
    with pytest.raises(ckpt.NoCheckpoint, match=f"it is a run's folder; give {run}/checkpoints"):
        ckpt.load(zeros(), run)
    assert ckpt.load(zeros(), run / "checkpoints").step == 1
    dcp.save({"model": W["model"]}, checkpoint_id=stock)
    with pytest.raises(ckpt.NoCheckpoint, match=r"torch.distributed.checkpoint has written it; import_dcp\(\) reads that"):
        ckpt.load(zeros(), stock)
    assert ckpt.import_dcp(stock, zeros()).tensors


def test_tilde_in_a_root_expands_to_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    ckpt.save(W, "~/run", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["run"] and ckpt.load(zeros(), tmp_path / "run").step == 1


class Wrapper(torch.nn.Module):
    """Puts a name before those of a module, as DistributedDataParallel does."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize(("save", "into", "rename"), [(True, False, {"*": "module.*"}), (False, True, {"module.*": "*"})])
def test_a_wrappers_prefix_is_named_with_its_remedy(tmp_path: Path, save: bool, into: bool, rename: dict[str, str]) -> None:
    saved, fresh = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    ckpt.save({"model": Wrapper(saved) if save else saved}, tmp_path, 1)
    state = {"model": Wrapper(fresh) if into else fresh}
    with pytest.raises(ckpt.CheckpointMismatch, match=re.escape(f"; give rename={rename}")):
        ckpt.load(state, tmp_path)
    ckpt.load(state, tmp_path, rename=rename)
    assert torch.equal(fresh.weight, saved.weight)
    with pytest.raises(ckpt.CheckpointMismatch) as caught:
        ckpt.load({"model": {"other.weight": torch.zeros(2, 2)}}, tmp_path)
    assert "rename" not in str(caught.value)


@on_processes(2)
def test_several_ranks_refuse_an_invalid_root_alike(rank, world):
    for root, text in ((None, "root is None"), (3, "root is 3"), (b"abc", "root is b'abc'"), (W, "root is a dict"), ("", "root is empty")):
        for save in (lambda root: loose.save(W, root, 1), loose.Saver):
            with pytest.raises(ValueError, match=text):
                save(root)
