"""The report of a run, from synthetic run folders with a known result."""

from __future__ import annotations

import math
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from vescale_ray import checkpoint
from vescale_ray.config import RunConfig, load_config
from vescale_ray.data.dataset_loading import load_dataset
from vescale_ray.data.order.stream import SampleStream
from vescale_ray.reporting import report
from vescale_ray.reporting.event_words import describe_event
from vescale_ray.reporting.report import accounting, draw, summarize, table
from vescale_ray.runfolder import RunFolder, RunFolderError

BATCH = 6
STREAM = SampleStream(50, 3)
TEXT = "to be or not to be, that is the question " * 400


def ids(step: int) -> list[int]:
    return STREAM.ids(step * BATCH, BATCH).tolist()


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "runs" / "synthetic").create()


@pytest.mark.parametrize(
    ("lines", "steps", "expected"),
    [
        ([(step, 1, ids(step)) for step in range(40)], 40, (0, 0, 0)),
        ([(0, 1, ids(1)[::-1]), (1, 1, ids(0))], 2, (0, 0, 0)),
        ([*((step, 1, ids(step)) for step in range(5)), *((step, 2, ids(step)) for step in range(3, 8))], 8, (0, 0, 2)),
        ([(0, 1, ids(0)), (1, 1, [0] * BATCH), (1, 2, ids(1))], 2, (0, 0, 1)),
        ([(0, 1, ids(0)), (1, 1, ids(1)[1:]), (2, 1, ids(2))], 3, (1, 0, 0)),
        ([(step, 1, ids(step)) for step in (0, 1, 3)], 4, (BATCH, 0, 0)),
        ([(0, 1, ids(0)), (1, 1, ids(0))], 2, (BATCH, BATCH, 0)),
        ([(0, 1, [*ids(0), 999])], 1, (0, 1, 0)),
        ([], 2, (2 * BATCH, 0, 0)),
    ],
    ids=[
        *("undisturbed", "another order", "steps replayed", "replayed with other samples", "a sample lost", "a step lost"),
        *("a batch read twice", "a sample that does not exist", "nothing read"),
    ],
)
def test_lost_repeated_and_replayed_samples_are_counted(
    run: RunFolder, lines: list[tuple[int, int, list[int]]], steps: int, expected: tuple[int, int, int]
) -> None:
    for line in lines:
        run.append_samples(*line)
    result = accounting(run, STREAM, BATCH, steps)
    assert (result.due, result.lost, result.repeated, result.replayed_steps) == (steps * BATCH, *expected)
    assert result.exact == (expected[:2] == (0, 0))


def test_accounting_counts_repeats_and_losses_per_epoch(run: RunFolder) -> None:
    small = SampleStream(BATCH, 0)
    for step in range(3):
        run.append_samples(step, 1, small.ids(step * BATCH, BATCH).tolist())
    assert accounting(run, small, BATCH, 3).exact
    run.append_samples(3, 1, [0] * BATCH)
    result = accounting(run, small, BATCH, 4)
    assert (result.lost, result.repeated) == (BATCH - 1, BATCH - 1)


def test_accounting_refuses_an_empty_batch(run: RunFolder) -> None:
    with pytest.raises(ValueError, match="global_batch = 0"):
        accounting(run, STREAM, 0, 2)


# ------------------------------------------------------------------------------------------- a whole run, made up by hand


@pytest.fixture
def whole(tmp_path: Path) -> tuple[RunFolder, RunConfig]:
    """20 steps. A worker is lost at step 7 (2 steps are replayed from a peer's memory), and the run grows back at 14."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    config = load_config(
        None,
        [
            f"run.dir={tmp_path}/runs",
            "run.name=whole",
            f"data.corpus={text}",
            "data.seq_len=16",
            "train.steps=20",
            "train.slots=3",
            "train.slot_batch=2",
        ],
    )
    corpus = load_dataset(config.data)
    stream = SampleStream(corpus.num_samples, 0)
    run = RunFolder(config.run_folder).create()
    run.write_config(config.to_yaml())
    at = 1000.0
    run.append_event({"event": "run_started", "time": at, "step": 0, "generation": 1})
    for worker in range(3):
        run.append_event({"event": "worker_started", "time": at + 1, "worker": f"w{worker}", "pid": 100 + worker, "node": "n"})
    run.append_event({"event": "evaluation", "time": at + 2, "step": 0, "loss": 5.5, "bpb": 7.93, "samples": 8})

    def train(first: int, last: int, world: int, generation: int) -> None:
        for step in range(first, last):
            run.append_samples(step, generation, stream.ids(step * 6, 6).tolist())
            run.append_metrics(
                {
                    "step": step + 1,
                    "loss": 5.0 - 0.2 * step,
                    "bpb": 7.0 - 0.2 * step,
                    "tokens": (step + 1) * 96,
                    "tokens_per_second": 960.0,
                    "world": world,
                    "generation": generation,
                    "lr": 1e-3,
                    "step_seconds": 0.1,
                    "time": at + step,
                }
            )

    train(0, 7, 3, 1)
    run.append_event({"event": "worker_lost", "time": at + 8, "worker": "w2", "pid": 102, "reason": "died", "step": 7, "generation": 1})
    run.append_event(
        {
            "event": "rescaled",
            "time": at + 9,
            "step": 5,
            "generation": 2,
            "from": 3,
            "to": 2,
            "direction": "shrink",
            "reason": "failure",
            "source": "peer",
            "pause_seconds": 1.25,
            "steps_replayed": 2,
        }
    )
    train(5, 14, 2, 2)
    run.append_event({"event": "worker_started", "time": at + 18, "worker": "w3", "pid": 103, "node": "n"})
    run.append_event(
        {
            "event": "rescaled",
            "time": at + 19,
            "step": 14,
            "generation": 3,
            "from": 2,
            "to": 3,
            "direction": "grow",
            "reason": "manual",
            "source": "memory",
            "pause_seconds": 0.5,
            "steps_replayed": 0,
        }
    )
    train(14, 20, 3, 3)
    run.append_event({"event": "evaluation", "time": at + 25, "step": 20, "loss": 2.1, "bpb": 3.03, "samples": 8})
    run.append_event({"event": "run_finished", "time": at + 26, "step": 20, "generation": 3})
    run.write_state({"run": "whole", "state": "DONE", "step": 20, "steps": 20, "world": 3, "generation": 3, "error": None})
    return run, config


def test_summary_holds_the_figures_of_the_run_folder(whole: tuple[RunFolder, RunConfig]) -> None:
    summary = summarize(whole[0])
    assert (summary.run, summary.state, summary.steps, summary.steps_done) == ("whole", "DONE", 20, 20)
    assert summary.loss_first == pytest.approx(5.0) and summary.loss_last == pytest.approx(1.2)
    assert summary.heldout == ((0, 7.93), (20, 3.03))
    assert summary.tokens == 20 * 96
    assert summary.tokens_per_second == pytest.approx(960.0)
    assert summary.processes == (("w0", 100), ("w1", 101), ("w2", 102), ("w3", 103))
    assert summary.accounting is not None and summary.accounting.exact and summary.accounting.replayed_steps == 2
    pauses = [(step, pause) for _, step, what, pause in summary.events if "workers" in what]
    assert pauses == [(5, 1.25), (14, 0.5)]
    assert summary.sound


def test_checkpoint_events_are_described_in_few_words() -> None:
    saved = {"event": "checkpoint_saved", "bytes": 12.3e6, "seconds": 2.5, "stall_seconds": 0.031}
    assert describe_event(saved) == ("checkpoint, 12.3 MB, written in 2.50 s", 0.031)
    interval = {"event": "checkpoint_interval", "seconds": 142.2, "by": "most", "stall_seconds": 0.155, "mtbf_hours": 18.0}
    told = describe_event(interval)
    assert told == ("checkpoint every 142 s (stall 0.155 s, a failure every 18 h, held at its most)", None) and len(told[0]) < 85
    skipped = describe_event({"event": "checkpoint_skipped", "reason": "slow disk"})
    assert skipped == ("checkpoint skipped: slow disk", None)


def test_table_shows_the_summary_in_under_25_lines(whole: tuple[RunFolder, RunConfig]) -> None:
    text = table(whole[0])
    assert "5.000 -> 1.200" in text
    assert "7.930 -> 3.030 bits per byte" in text
    assert "960 tokens/s" in text
    assert "lost 0, repeated 0, of 120 due (2 steps replayed)" in text
    assert "3 -> 2 workers (failure), state from peer, 2 steps replayed  paused 1.25 s" in text
    assert "2 -> 3 workers (manual), state from memory  paused 0.50 s" in text
    assert "worker w2 lost: died" in text
    assert "4 started: w0 (pid 100)" in text
    assert str(whole[0].path) in text
    assert len(text.splitlines()) < 25


def test_table_shows_evaluation_sets_in_rows_of_their_own(whole: tuple[RunFolder, RunConfig]) -> None:
    run, _ = whole
    for step, loss in ((0, 5.0), (20, 2.0)):
        figures = {"loss": loss, "perplexity": math.exp(loss), "bpb": None if step else 7.2, "samples": 8}
        run.append_event(
            {"event": "evaluation", "time": 1030.0, "step": step, "loss": 2.0, "bpb": 3.0, "samples": 8, "sets": {"wiki": figures}}
        )
    text = table(run)
    assert "evaluation wiki   5.000 (perplexity 148.4, 7.200 bits/byte) -> 2.000 (perplexity 7.389)" in text
    assert "evaluation: " not in text, "the list of events leaves evaluations out"


def test_table_lists_the_restart_of_a_lost_controller(whole: tuple[RunFolder, RunConfig]) -> None:
    """The table, the page and top must show the restart. Otherwise the alert on failures in a row has no counterpart there."""
    run, _ = whole
    run.append_event({"event": "controller_restarted", "time": 1021.0, "generation": 0, "step": None, "epoch": 2})
    assert "21.0 s            controller lost, and started again\n" in table(run)


def test_summary_of_a_long_run_skips_large_files_and_says_so(whole: tuple[RunFolder, RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = whole
    monkeypatch.setattr(report, "LONG_METRICS", 500)
    monkeypatch.setattr(report, "LONG_SAMPLES", 500)
    monkeypatch.setattr(RunFolder, "read_all_metrics", None)
    monkeypatch.setattr(RunFolder, "each_samples", None)
    for index in range(100):
        run.append_event({"event": "worker_started", "time": 1e9 + index, "worker": f"x{index}", "pid": 1000 + index})
        run.append_event({"event": "checkpoint_saved", "time": 1e9 + index, "step": index, "bytes": 1e6})
    summary = summarize(run)
    assert (summary.steps_done, summary.accounting, summary.tokens_per_second) == (20, None, None) and summary.sound
    assert summary.loss_first == pytest.approx(5.0) and summary.loss_last == pytest.approx(1.2)
    assert "metrics.jsonl (0.0 GB) was not read: vescale-ray dash" in summary.left_out
    assert "samples.jsonl (0.0 GB) was not" in summary.left_out
    text = table(run, summary)
    assert summary.left_out in text and "earlier events" in text and "104 started: .., " in text
    assert text.count("checkpoint, 1.0 MB") == 40 and len(text.splitlines()) < 60
    with pytest.raises(RunFolderError, match=r"metrics.jsonl has 0.0 GB; vescale-ray dash .* can draw it"):
        draw(run)


def test_summary_skips_accounting_of_missing_or_cut_samples(whole: tuple[RunFolder, RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = whole
    samples, last = (run.path / "samples.jsonl").read_text().splitlines(), run.read_metrics()[-1]
    run.append_metrics({**last, "step": 3_000_000})
    monkeypatch.setattr(report, "accounting", None)
    (run.path / "samples.jsonl").write_text(samples[-1] + "\n")
    cut = summarize(run)
    assert (cut.accounting, cut.left_out) == (None, "samples.jsonl was not compared with the 18,000,000 samples that were due")
    (run.path / "samples.jsonl").unlink()
    gone = summarize(run)
    assert (gone.accounting, gone.left_out, gone.sound) == (None, "there is no samples.jsonl to compare with what was due", True)
    assert gone.left_out in table(run, gone)


def test_data_that_has_changed_is_not_counted(whole: tuple[RunFolder, RunConfig]) -> None:
    run, config = whole
    root, stream = config.checkpoint_root, dict(load_dataset(config.data).identity())
    vote = checkpoint.write_shard(root, "a1", 0, [], step=20, epoch=1)
    checkpoint.commit(root, [vote], step=20, epoch=1, attempt="a1", world=1, meta={"stream": stream})
    counted = summarize(run).accounting
    assert counted is not None and counted.exact
    for change in (lambda file: file.write_text(TEXT + "more " * 500), Path.unlink):
        change(Path(str(config.data.corpus)))
        changed = summarize(run)
        assert changed.accounting is None and changed.sound and changed.left_out in table(run)
        assert changed.left_out.startswith("samples.jsonl was not compared with what was due: data.corpus")


def test_processes_are_listed_in_start_order(whole: tuple[RunFolder, RunConfig]) -> None:
    run, _ = whole
    for worker in range(4, 24):
        run.append_event({"event": "worker_started", "time": 1e9 + worker, "worker": f"w{worker}", "pid": 100 + worker})
    processes = summarize(run).processes
    assert [pid for _, pid in processes] == list(range(100, 124))
    assert "24 started: .., w8 (pid 108), " in table(run) and "w23 (pid 123)" in table(run)


def test_lost_sample_makes_a_run_unsound_and_shows_in_the_table(whole: tuple[RunFolder, RunConfig]) -> None:
    run, _ = whole
    lines = (run.path / "samples.jsonl").read_text().splitlines()
    (run.path / "samples.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    assert not summarize(run).sound
    assert "lost 6, repeated 0" in table(run)


def test_curve_is_a_png_of_800_by_400_or_more_named_in_the_table(whole: tuple[RunFolder, RunConfig]) -> None:
    path = draw(whole[0])
    data = path.read_bytes()
    assert path == whole[0].curve_path and data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width >= 800 and height >= 400
    assert len(set(_pixels(data))) > 50, "a blank picture"
    assert str(path) in table(whole[0])


def test_the_picture_shows_steps_that_were_undone(whole: tuple[RunFolder, RunConfig]) -> None:
    run, _ = whole
    with_undone = draw(run).read_bytes()
    kept = {line["step"]: line for line in run.read_metrics()}
    (run.path / "metrics.jsonl").unlink()
    for line in kept.values():
        run.append_metrics({**line, "loss": line["loss"]})
    assert draw(run).read_bytes() != with_undone


def test_drawing_needs_no_display_and_leaves_nothing_global(whole: tuple[RunFolder, RunConfig]) -> None:
    import sys

    draw(whole[0])
    assert "matplotlib.pyplot" not in sys.modules


def test_a_run_without_steps_has_a_table_but_no_picture(tmp_path: Path) -> None:
    config = load_config(None, [f"run.dir={tmp_path}", "run.name=young"])
    run = RunFolder(config.run_folder).create()
    run.write_config(config.to_yaml())
    run.append_event({"event": "run_failed", "error": "no node\nfree", "step": 0})
    run.write_state({"state": "FAILED", "step": 0, "error": "no node\nfree"})
    assert "young: FAILED, 0 of 200 steps" in table(run)
    assert "no node free" in table(run)
    with pytest.raises(RunFolderError, match="nothing to draw"):
        draw(run)


def test_nan_loss_is_drawn_as_a_gap(whole: tuple[RunFolder, RunConfig]) -> None:
    run, _ = whole
    run.append_metrics({**run.read_metrics()[-1], "step": 21, "loss": float("nan")})
    assert draw(run).is_file()
    assert summarize(run).loss_last is None


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"holds no config\.yaml"):
        summarize(tmp_path)


def _pixels(png: bytes) -> bytes:
    chunks, at = b"", 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            chunks += png[at + 8 : at + 8 + length]
        at += 12 + length
    return bytes(np.frombuffer(zlib.decompress(chunks), dtype=np.uint8))
