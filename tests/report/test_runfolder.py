"""The run's folder: lines that survive crashes, objects that are replaced as a whole, and the lock on the folder."""

from __future__ import annotations

import errno
import json
import math
import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from vescale_ray.errors import BadInput
from vescale_ray.runfolder import RunFolder, RunFolderError, committed, list_runs, newest_run


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "runs" / "a").create()


def test_appended_lines_are_read_back_in_order(run: RunFolder) -> None:
    for step in range(1, 4):
        run.append_metrics({"step": step, "loss": 3.0 / step, "memory": {0: 10, 1: 20}})
        run.append_samples(step - 1, 1, [step, step + 1])
    run.append_event({"event": "run_started", "time": 5.0})
    run.append_event({"event": "run_finished"})
    assert [line["loss"] for line in run.read_metrics()] == [3.0, 1.5, 1.0]
    assert run.read_metrics()[0]["memory"] == {"0": 10, "1": 20}
    assert committed(run.each_samples())[2] == {"step": 2, "generation": 1, "ids": [3, 4]}
    assert run.read_events()[0]["time"] == 5.0
    assert run.read_events()[1]["time"] > 1e9


def test_an_empty_or_missing_folder_reads_as_nothing(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "none")
    assert run.read_metrics() == run.read_events() == list(run.each_samples()) == []
    assert run.read_state() is None and run.read_control() is None
    assert not run.is_run()


def test_a_line_cut_short_by_a_crash_costs_that_line_only(run: RunFolder) -> None:
    run.append_metrics({"step": 1})
    with open(run.path / "metrics.jsonl", "ab") as handle:
        handle.write(b'{"step":2,"lo')
    assert [line["step"] for line in run.read_metrics()] == [1]
    run.append_metrics({"step": 3})
    assert [line["step"] for line in run.read_metrics()] == [1, 3]


def test_readers_skip_lines_of_foreign_form(run: RunFolder) -> None:
    run.append_event({"event": "run_started", "time": 1.0})
    run.append_metrics({"step": 1, "loss": 2.0})
    run.append_samples(0, 1, [4])
    foreign = ['{"foo": 1}', '{"step": "x", "time": "y"}', '{"step": true}', '{"event": "e", "time": "soon"}', '{"event": 3, "time": 1}']
    foreign += ['{"event": "e", "time": NaN}', '{"event": "e", "time": 1e300}', '{"step": 2, "time": NaN}', '{"step": 2, "time": -1e18}']
    foreign += ['{"step": 2, "time": "now"}', '{"step": 2}', "[1]", "3", "[" * 100_000, '{"step": 2, "ids": 5}', "\x00\xff"]
    for name, own in (("metrics.jsonl", '{"step": 2}'), ("events.jsonl", ""), ("samples.jsonl", "")):
        text = "".join(line + "\n" for line in foreign if line != own)
        (run.path / name).write_bytes((run.path / name).read_bytes() + text.encode("latin-1"))
    assert [line["step"] for line in run.read_metrics()] == [1, 2], "a line with the ids of another file is a line with more"
    assert [event["event"] for event in run.read_events()] == ["run_started"] == [event["event"] for event in run.tail_events().read()]
    assert [line["ids"] for line in committed(run.each_samples())] == [[4]] and (run.last_samples() or {})["ids"] == [4]


def test_lines_of_several_writers_never_mix(run: RunFolder) -> None:
    def write(name: str) -> None:
        for number in range(200):
            run.append_event({"event": name, "number": number, "padding": "x" * 500})

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = run.read_events()
    assert len(events) == 800
    for name in "abcd":
        assert [e["number"] for e in events if e["event"] == name] == list(range(200))


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ([1, 2, 3], [(1, 0), (2, 1), (3, 2)]),
        ([1, 2, 3, 2, 3, 4], [(1, 0), (2, 3), (3, 4), (4, 5)]),
        ([1, 2, 3, 4, 2], [(1, 0), (2, 4)]),  # steps 3 and 4 are undone and not yet repeated
        ([1, 2, 1, 2, 1, 2], [(1, 4), (2, 5)]),
        ([3, 3, 3], [(3, 2)]),
        ([], []),
    ],
)
def test_last_line_of_each_step_counts_after_a_rollback(written: list[int], kept: list[tuple[int, int]]) -> None:
    lines = [{"step": step, "line": number} for number, step in enumerate(written)]
    assert [(line["step"], line["line"]) for line in committed(lines)] == kept


def test_non_finite_figures_become_null_in_json_lines(run: RunFolder) -> None:
    run.append_metrics({"step": 1, "loss": math.nan, "nested": {"x": [math.inf, 1.0]}})
    raw = (run.path / "metrics.jsonl").read_text()
    assert json.loads(raw, parse_constant=lambda name: pytest.fail(name)) == {"step": 1, "loss": None, "nested": {"x": [None, 1.0]}}


def test_the_state_is_replaced_whole_while_others_read_it(run: RunFolder) -> None:
    stop = threading.Event()
    seen: list[int] = []
    problems: list[BaseException] = []

    def read() -> None:
        try:
            while not stop.is_set():
                state = run.read_state()
                if state is not None:
                    assert state["filler"] == "x" * 5000
                    seen.append(state["step"])
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    for step in range(300):
        run.write_state({"step": step, "filler": "x" * 5000})
    stop.set()
    thread.join()
    assert not problems and seen == sorted(seen)
    assert sorted(path.name for path in run.path.iterdir()) == ["run.json"]


def test_the_token_is_readable_by_the_owner_only(run: RunFolder) -> None:
    run.write_control("http://127.0.0.1:1", "secret")
    run.write_control("http://127.0.0.1:2", "secret2")
    assert stat.S_IMODE((run.path / "control.json").stat().st_mode) == 0o600
    assert run.read_control() == {"url": "http://127.0.0.1:2", "token": "secret2", "host": socket.gethostname()}
    run.clear_control()
    run.clear_control()
    assert run.read_control() is None


def test_discovery_file_lists_the_newest_address_until_cleared(run: RunFolder) -> None:
    run.write_discovery("http://127.0.0.1:1")
    run.write_discovery("http://[::1]:2")
    path = run.path / "vescale_service_discovery.json"
    assert json.loads(path.read_text()) == [{"labels": {"job": "vescale-ray"}, "targets": ["[::1]:2"]}]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644, "Prometheus is another user"
    run.clear_control()
    assert not list(run.path.iterdir())


def test_tail_gives_each_complete_line_once(run: RunFolder) -> None:
    tail = run.tail_metrics()
    assert tail.read() == []
    run.append_metrics({"step": 1})
    assert [line["step"] for line in tail.read()] == [1]
    with open(run.path / "metrics.jsonl", "ab") as handle:
        handle.write(b'{"step":2}\n{"st')
        handle.flush()
        assert [line["step"] for line in tail.read()] == [2]
        handle.write(b'ep":3}\n')
    assert [line["step"] for line in tail.read()] == [3]
    assert run.tail_metrics(skip_old=True).read() == []


def test_a_folder_that_can_not_be_made_or_written_is_bad_input(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(RunFolderError, match=r"file.*can't be written .*run\.dir") as caught:
        RunFolder(file / "run").create()
    assert isinstance(caught.value, BadInput) and "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(RunFolderError, match="can't be written"):
        RunFolder(tmp_path / "locked").create()


def test_claimed_folder_stays_locked_until_its_process_ends(run: RunFolder) -> None:
    code = (
        "import sys; from vescale_ray.runfolder import RunFolder; h = RunFolder(sys.argv[1]).claim()\n"
        "print('have', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "have\n"
        with pytest.raises(RunFolderError, match=f"process {holder.pid}.*vescale-ray stop") as caught:
            run.claim()
        assert "\n" not in str(caught.value)
    finally:
        holder.kill()  # SIGKILL, so the holder cleans up nothing
        holder.wait(timeout=10)
    with run.claim():
        pass


def test_storage_without_file_locks_is_named_as_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre without -o flock gives ENOSYS, NFS without a lock manager ENOLCK.

    The user must not read that another run is still going on.
    """

    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    fresh, used = RunFolder(tmp_path / "fresh").create(), RunFolder(tmp_path / "used").create()
    used.write_config("{}")
    with monkeypatch.context() as without:
        without.setattr("vescale_ray.runfolder.fcntl.flock", none)
        for run in (fresh, used):
            with pytest.raises(RunFolderError, match="can't be locked there .No locks available.*run.dir") as caught:
                run.claim()
            assert "going on" not in str(caught.value) and str(run.path) in str(caught.value) and "\n" not in str(caught.value)
        assert used.owner() is None and not fresh.path.exists() and used.config_path.exists()
    with used.claim():
        assert used.owner() == f"{os.getpid()} on {socket.gethostname()}"


def test_the_newest_run_is_the_one_whose_state_changed_last(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with pytest.raises(RunFolderError, match="holds no run"):
        newest_run(runs)
    for number, name in enumerate(("b", "c", "a")):
        run = RunFolder(runs / name).create()
        run.write_state({"state": "DONE"})
        os.utime(run.path / "run.json", (1000 + number, 1000 + number))
    RunFolder(runs / "no-run").create()
    assert [run.path.name for run in list_runs(runs)] == ["b", "c", "a"]
    assert newest_run(runs).path.name == "a"


@pytest.mark.parametrize("ids", [1, 3000, 40_000])
def test_the_newest_samples_are_read_from_the_end_of_the_file(tmp_path: Path, ids: int) -> None:
    run = RunFolder(tmp_path / "r").create()
    assert run.last_samples() is None
    for step in range(4):
        run.append_samples(step, 1, list(range(step, step + ids)))
        assert run.last_samples() == list(run.each_samples())[-1]
    with (run.path / "samples.jsonl").open("ab") as file:
        file.write(b'{"step": 9, "ids": [1, 2')  # cut short
    newest = run.last_samples()
    assert newest == list(run.each_samples())[-1] and newest["step"] == 3


def test_second_hang_report_of_a_step_keeps_the_first(tmp_path: Path) -> None:
    """A worker that does not leave the generation of a hang makes a second report. It must not replace the first, which shows the cause."""
    folder = RunFolder(tmp_path)
    paths = [folder.write_hang("generation-3-step-40", text) for text in ("the first", "the second", "the third")]
    assert [path.name for path in paths] == ["generation-3-step-40.txt", "generation-3-step-40-2.txt", "generation-3-step-40-3.txt"]
    assert [path.read_text() for path in paths] == ["the first", "the second", "the third"]
