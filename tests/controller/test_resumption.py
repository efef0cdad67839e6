"""The checkpoint that a start resumes from. A run never starts at step 0 in silence where it has been before."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.controller.runs import tiny
from vescale_ray import checkpoint
from vescale_ray.checkpoint.stores.posix import PosixStore
from vescale_ray.controller.driver import preflight, training
from vescale_ray.controller.driver.resumed_keys import TOLD
from vescale_ray.controller.driver.resumption import changes_since, choose_commit
from vescale_ray.controller.protocol import RunRefused, StateSource
from vescale_ray.runfolder import RunFolder
from vescale_ray.workers.messages import Origin

REFUSED: dict[str, frozenset[str]] = {
    "data": frozenset(
        {
            *("corpus", "mixture", "format", "column", "dtype", "tokenizer", "end_token", "vocab", "seq_len", "heldout"),
            "shuffle_blocks",
        }
    ),
    "model": frozenset({"kind", "dim", "layers", "ffn", "tie", "lora.rank", "lora.targets"}),
    "train": frozenset({"slots", "slot_batch", "optimizer"}),
}
"""Keys whose change is refused if it changes a sample, the global batch, or the name, shape or states of a parameter."""
FREE: dict[str, frozenset[str]] = {
    "data": frozenset({"eval", "eval_samples", "readahead_mb", "damaged"}),
    "model": frozenset({"hf", "units"}),
    "train": frozenset(
        {
            *("keep_cast", "reduce_staging_mb", "zero_stage", "reshard_after_forward", "sharding", "expert_parallel", "offload"),
            *("activation_checkpointing", "compile", "threads", "device"),
            *("eval_every", "completions", "early_stop", "profile"),
        }
    ),
}
"""Keys that may change without a word. Of ``model.hf``, ``config.json`` is compared, and with adapters the weights."""


def saved(root: Path, *steps: int) -> list[Path]:
    """The commit objects of checkpoints of these steps."""
    for step in steps:
        checkpoint.save({"model": {"w": torch.ones(3)}}, root, step, epoch=step)
    return [root / commit.key for commit in checkpoint.ls(root)]


def chosen(config: Any, root: Path) -> tuple[Any, tuple[str, ...]]:
    return choose_commit(config, checkpoint.ls(root))


@pytest.fixture
def config(tmp_path: Path) -> Any:
    return tiny(tmp_path, "r", checkpoint_dir=str(tmp_path / "kept"))


def test_damaged_newer_checkpoints_are_named(tmp_path: Path, config: Any) -> None:
    _, second, third = saved(tmp_path / "kept", 2, 4, 6)
    assert chosen(config, tmp_path / "kept")[0].step == 6 and not chosen(config, tmp_path / "kept")[1]
    third.write_text("{")
    second.write_bytes(second.read_bytes()[:-40])
    found, warnings = chosen(config, tmp_path / "kept")
    assert found.step == 2 and len(warnings) == 2
    assert all(path.name in line and "is skipped: its manifest" in line for path, line in zip((third, second), warnings, strict=True))


def test_a_run_with_only_damaged_checkpoints_is_not_begun_anew(tmp_path: Path, config: Any) -> None:
    for commit in saved(tmp_path / "kept", 2, 4):
        commit.write_text("{")
    with pytest.raises(RunRefused, match=r"holds 2 checkpoints, of which none is whole \(e0004.*; .*checkpoint.resume=never to begin anew"):
        chosen(config, tmp_path / "kept")
    never = tiny(tmp_path, "r", checkpoint_dir=str(tmp_path / "kept"), checkpoint_resume="never")
    assert preflight.check(never).source.origin is Origin.FRESH


def test_an_older_checkpoint_does_not_replace_one_out_of_reach(tmp_path: Path, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = saved(tmp_path / "kept", 2, 4)[1]
    read = PosixStore.get

    def denied(store: PosixStore, key: str, *more: Any) -> Any:
        if key.endswith(newest.name):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), key)
        return read(store, key, *more)

    monkeypatch.setattr(PosixStore, "get", denied)
    with pytest.raises(OSError, match="e0004"):
        chosen(config, tmp_path / "kept")


def test_a_start_at_step_0_beside_steps_of_before_is_told(tmp_path: Path, config: Any) -> None:
    assert not preflight.check(config).warnings
    RunFolder(config.run_folder).append_metrics({"step": 70, "loss": 1.0})
    ready = preflight.check(config)
    assert ready.warnings == (
        f"{config.run_folder} has a run of 70 steps, but {tmp_path / 'kept'} holds no checkpoint: this one starts at step 0",
    )
    assert "starting 3 workers" in training._starting(ready) and "resuming" not in training._starting(ready)
    source = StateSource(Origin.CHECKPOINT, 5, "e0001-s5", "/kept/e0001-s5.json")
    assert training._starting(preflight.Preflight(config, source, 1, {})).endswith(", resuming at step 5 from /kept/e0001-s5.json")


@pytest.mark.parametrize(
    ("then", "now", "key"),
    [
        ({"heads": 8, "kv_heads": 4}, {}, "model.heads = 8, now it is 4"),
        ({"rope_theta": 5e5}, {}, "model.rope_theta = 500000.0, now it is 10000.0"),
        ({"factory": "a:b", "args": {"eps": 1}}, {"factory": "a:b", "args": {"eps": 2}}, "model.args = {'eps': 1}, now it is {'eps': 2}"),
    ],
)
def test_settings_that_no_shape_shows_are_told(tmp_path: Path, then: Any, now: Any, key: str) -> None:
    def opened(**model: Any) -> Any:
        meta = {"config": tiny(tmp_path, "r", **{f"model_{name}": value for name, value in model.items()}).model_dump(mode="json")}
        return SimpleNamespace(meta=meta, commit=SimpleNamespace(path="/c.json"))

    config = tiny(tmp_path, "r", **{f"model_{name}": value for name, value in now.items()})
    assert not list(changes_since(opened(**now), config)) and not list(changes_since(SimpleNamespace(meta={}), config))  # type: ignore[arg-type]
    told = list(changes_since(opened(**then), config))
    assert f"/c.json was saved with {key}: its weights were trained with the former" in told


SIZES = {"heads": 8, "kv_heads": 4, "rope_theta": 5e5, "dim": 64, "layers": 3, "ffn": 40, "tie": True}
SCHEDULE = {"steps": 7, "warmup_steps": 3, "schedule": "wsd", "decay_steps": 2, "decay_type": "sqrt", "min_lr_ratio": 0.5}
RATES = {"lr": 0.5, "matrix_lr": 0.5, "weight_decay": 0.5, "no_decay": ["*norm*"], "betas": (0.5, 0.5), "eps": 0.5, "grad_clip": 0.5}
DTYPES = {"param_dtype": "bfloat16", "quantize": "fp8", "quantize_keep": ["*head*"], "quantize_products": True, "reduce_dtype": "fp8"}
STREAM = {"column": "other", "end_token": "5", "vocab": 300, "seq_len": 8, "heldout": 0.5, "shuffle_blocks": 3}
OTHER: dict[str, dict[str, Any]] = {
    "data": {"document_mask": True, **STREAM},
    "model": {"factory": "a:c", "args": {"dim": 8}, "loss": "a:b", **SIZES},
    "train": {"slots": 7, "slot_batch": 5, "optimizer_options": {"amsgrad": True}, **SCHEDULE, **RATES, **DTYPES},
}
"""Another value of each key that is told, and of those that are refused by samples and shapes."""


def changed(config: Any, key: str) -> Any:
    section, _, name = key.partition(".")
    return config.model_copy(update={section: getattr(config, section).model_copy(update={name: OTHER[section][name]})})


def of(table: Any) -> set[str]:
    return {f"{section}.{key}" for section, keys in table.items() for key in keys}


def test_each_key_is_refused_told_or_free_on_resume(tmp_path: Path) -> None:
    config, tables = tiny(tmp_path, "r"), (of(REFUSED), of(TOLD), of(FREE))
    assert sum(map(len, tables)) == len(set.union(*tables))
    top = {f"{section}.{name}" for section in TOLD for name in type(getattr(config, section)).model_fields}
    assert {".".join(key.split(".")[:2]) for key in set.union(*tables)} == top
    guide = (Path(__file__).parents[2] / "docs" / "how-to" / "checkpoints.md").read_text(encoding="utf-8")
    for key in of(REFUSED) | of(TOLD):
        assert f"`{key}`" in guide or f"`{key.partition('.')[2]}`" in guide
    opened: Any = SimpleNamespace(meta={"config": config.model_dump(mode="json")}, commit=SimpleNamespace(path="/c.json"))
    assert not list(changes_since(opened, config))
    for key in of(TOLD) - {"model.lora.alpha", "model.lora.dropout"}:
        (line,) = changes_since(opened, changed(config, key))
        assert line.startswith(f"/c.json was saved with {key} = ")


def test_refused_keys_change_samples_or_shapes(tmp_path: Path) -> None:
    ids = pa.array([[1, 2]] * 900, pa.list_(pa.int32()))
    pq.write_table(pa.table({"text": ids, "other": ids}), tmp_path / "a.parquet", row_group_size=100)
    config = tiny(tmp_path, "r", data_corpus=str(tmp_path / "a.parquet"), data_vocab=256)
    before = preflight.foresee(config)
    for key in of(REFUSED) & of(OTHER):
        after = preflight.foresee(changed(config, key))
        assert (before.stream, before.expected) != (after.stream, after.expected), key


def test_a_change_without_effect_is_not_told(tmp_path: Path) -> None:
    def told(saved: dict[str, Any], given: dict[str, Any]) -> list[str]:
        meta = {"config": tiny(tmp_path, "r", **saved).model_dump(mode="json")}
        opened: Any = SimpleNamespace(meta=meta, commit=SimpleNamespace(path="/c.json"))
        return list(changes_since(opened, tiny(tmp_path, "r", **given)))

    constant, factory = {"train_schedule": "constant"}, {"model_factory": "a:b"}
    assert told({**constant, "train_steps": 10}, {**constant, "train_steps": 20}) == []
    assert told({**factory, "model_heads": 8}, factory) == []
    assert told({}, {"data_document_mask": True}) == [
        "/c.json was saved with data.document_mask = false, now it is true: its weights were trained with the former"
    ]
    assert told({"train_lr": 0.1}, {"train_lr": 0.2}) == [
        "/c.json was saved with train.lr = 0.1, now it is 0.2: the steps to come use the latter"
    ]
