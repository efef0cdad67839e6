"""Folders that end with a Ray job or session are refused before anything is made. Every command uses absolute paths."""

from __future__ import annotations

import json
import logging
import re
import tempfile
from pathlib import Path

import pytest
import torch
import yaml

from vescale_ray import checkpoint as ckpt
from vescale_ray import lasting
from vescale_ray.cli import main
from vescale_ray.config import load_config
from vescale_ray.controller.driver import doctor, preflight
from vescale_ray.controller.protocol import RunRefused
from vescale_ray.errors import BadInput

ROOT = Path(__file__).resolve().parents[2]
SESSION = "session_2026-11-26_16-33-59_356303_41018"
PACKAGE = f"ray/{SESSION}/runtime_resources/working_dir_files/_ray_pkg_029f88d5ecc55e1e4d64fc6e388fd103"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The working directory of a job submitted with `--working-dir`, with a run's file in it."""
    folder = tmp_path / PACKAGE
    folder.mkdir(parents=True)
    (folder / "text.txt").write_text("A text of some length, again and again. " * 400)
    (folder / "run.yaml").write_text(yaml.safe_dump({"run": {"name": "j1"}, "data": {"corpus": "text.txt"}}))
    monkeypatch.chdir(folder)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return folder


def files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.parametrize(
    ("path", "what"),
    [
        (f"/tmp/{PACKAGE}/runs", "package"),
        (f"/scratch/{PACKAGE}", "package"),
        ("/tmp/ray/x/runtime_resources/working_dir_files/bucket_code_zip/runs", "package"),
        ("/tmp/ray/x/runtime_resources/py_modules_files/_ray_pkg_0a/mine/runs", "package"),
        (f"file:///tmp/{PACKAGE}/ckpt", "package"),
        (f"/tmp/ray/{SESSION}/artifacts", "session"),
        ("/mnt/shared/runs", None),
        ("/tmp/ray_results/run", None),
        ("/home/a/session_notes/_ray_pkg/runs", None),
        ("s3://bucket/_ray_pkg_0a/runs", None),
        ("memory://x/_ray_pkg_0a", None),
    ],
)
def test_paths_into_ray_packages_and_sessions_are_recognised(path, what):
    reason = lasting.goes_with(path)
    assert (what is None) == (reason is None) and (what or "") in (reason or "")


def test_samples_for_a_cluster_have_absolute_folders():
    """They can be submitted as they are. The README and the pages that submit a job show these samples or absolute folders."""
    samples = {path.name: load_config(path) for path in sorted((ROOT / "vescale_ray" / "configs").glob("*.yaml"))}
    assert len(samples) > 5 and samples.pop("demo.yaml").ray.address == "local"
    for name, config in samples.items():
        given = yaml.safe_load((ROOT / "vescale_ray" / "configs" / name).read_text())
        for folder in (given["run"]["dir"], given.get("checkpoint", {}).get("dir")):
            assert folder is None or "://" in folder or Path(folder).is_absolute(), name
        assert lasting.goes_with(config.run_folder) is None
    pages = [page for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")) if "ray job submit" in page.read_text()]
    assert len(pages) > 2
    for page in pages:
        for folder in re.findall(r"\bdir: *([^\s,}]+)", page.read_text()):
            assert "://" in folder or Path(folder).is_absolute(), (page.name, folder)


def test_symlink_into_a_ray_session_is_resolved(tmp_path):
    (tmp_path / SESSION / "runs").mkdir(parents=True)
    (tmp_path / "session_latest").symlink_to(tmp_path / SESSION)
    assert "session" in str(lasting.goes_with(tmp_path / "session_latest" / "runs"))


@pytest.mark.parametrize(
    ("overrides", "key", "where"),
    [
        ((), "run.dir = runs", "runs/j1"),
        (("run.dir=./deep/runs",), "run.dir = ./deep/runs", "deep/runs/j1"),
        (("run.dir=/{tmp}/lasting", "checkpoint.dir=kept"), "checkpoint.dir = kept", "kept"),
        (("run.dir=/{tmp}/lasting", "checkpoint.dir=file://{cwd}/kept"), "checkpoint.dir = file://", "kept"),
    ],
)
def test_train_refuses_to_write_into_a_jobs_package(package, tmp_path, capsys, overrides, key, where):
    given = [one.format(tmp=str(tmp_path).lstrip("/"), cwd=package) for one in overrides]
    before = files(tmp_path)
    assert main(["train", "run.yaml", *given]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and key in said and f"{package / where} lies in the package that Ray has unpacked for this job" in said
    assert "give an absolute path on storage that all nodes share" in said and ("or a URL" in said) == ("checkpoint" in key)
    assert files(tmp_path) == before


def test_the_remedy_of_a_refused_folder_works(package, tmp_path):
    with pytest.raises(BadInput):
        preflight.foresee(load_config("run.yaml"))
    found = preflight.foresee(load_config("run.yaml", [f"run.dir={tmp_path}/shared", "checkpoint.dir=s3://bucket/runs"]))
    assert found.config.run_folder == tmp_path / "shared" / "j1" and found.warnings == ()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("s3:/bucket/runs", r"a URL has two slashes \(pathlib.Path removes one of them\); give s3://bucket/runs, as text"),
        ("file:/mnt/runs", "give file:///mnt/runs, as text"),
        ("$SCRATCH/runs", r"\$SCRATCH is a variable of the shell, which is not replaced here; give its value"),
        ("/scratch/${USER}/runs", r"\$\{USER\} is a variable"),
        ("~nobody-of-this-name/runs", "~nobody-of-this-name is not a home folder of this machine; give an absolute path"),
    ],
)
def test_misread_paths_are_refused(path, words):
    for key in ("run.dir", "checkpoint.dir", "data.corpus"):
        with pytest.raises(BadInput, match=f"{key} = .*{words}") as caught:
            load_config(None, [f"{key}={path}"])
        assert "\n" not in str(caught.value)
    with pytest.raises(BadInput, match=words):
        lasting.check_lasting("--out", path)


@pytest.mark.parametrize("path", ["/data/a$b", "s3://bucket/x", "a:/b", "~/runs", "host:6379", "C:/x", "/data/$", "runs~"])
def test_unambiguous_paths_are_accepted(path):
    assert lasting.misread(path) is None


def test_url_as_run_dir_is_refused_in_favour_of_checkpoint_dir(package):
    with pytest.raises(
        RunRefused, match=r"run.dir = s3://bucket/runs: run folders are not URLs; give an absolute path .* as checkpoint.dir"
    ):
        preflight.foresee(load_config("run.yaml", ["run.dir=s3://bucket/runs"]))


def test_temporary_folder_warns_on_a_cluster_and_not_locally(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    text = tmp_path / "text.txt"
    text.write_text("A text of some length, again and again. " * 400)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(lasting, "_TEMPORARY", (str(tmp_path / "shm"),))
    config = load_config(None, [f"run.dir={tmp_path}/temporary/runs", f"data.corpus={text}"])
    assert preflight.foresee(config).warnings == ()
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    [warning] = preflight.foresee(config).warnings
    assert warning.startswith(f"run.dir: {config.run_folder} lies in this node's folder for temporary files")
    assert preflight.foresee(load_config(None, [f"run.dir={tmp_path}/kept", f"data.corpus={text}"])).warnings == ()
    both = preflight.foresee(
        load_config(None, [f"run.dir={tmp_path}/kept", f"checkpoint.dir={tmp_path}/temporary/c", f"data.corpus={text}"])
    )
    assert len(both.warnings) == 1 and both.warnings[0].startswith(f"checkpoint.dir: {tmp_path}/temporary/c lies")
    assert len(preflight.foresee(load_config(None, [f"run.dir={tmp_path}/shm/runs", f"data.corpus={text}"])).warnings) == 1
    assert doctor.run_folder(config).verdict == "warn"
    monkeypatch.delenv("RAY_ADDRESS")
    assert doctor.run_folder(config).verdict == "ok"


def test_doctor_fails_folders_in_a_jobs_package(package):
    config = load_config("run.yaml")
    for finding in (doctor.run_folder(config), doctor.storage(config.checkpoint_root)):
        assert finding.verdict == "fail" and str(package / "runs/j1") in finding.text and "absolute path" in finding.remedy
    assert not (package / "runs").exists()


def test_exports_into_a_jobs_package_are_refused_unwritten(package, tmp_path, capsys):
    ckpt.save({"model": {"w": torch.ones(2)}}, tmp_path / "c", 1)
    before = files(tmp_path)
    for words in (["export-hf", str(tmp_path / "c"), "out"], ["export-dcp", str(tmp_path / "c"), "out"], ["import-dcp", "text.txt", "new"]):
        assert main(["ckpt", *words]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and f"{package / words[-1]} lies in the package" in said, said
    assert main(["plan", "--model", "llama-3-8b", "--devices", "8", "--html", "plan.html"]) == 2
    assert f"{package}/plan.html lies in the package" in capsys.readouterr().err
    assert files(tmp_path) == before


def test_a_script_that_saves_into_a_jobs_package_is_warned_once(package, caplog):
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            ckpt.save({"model": {"w": torch.ones(2)}}, "checkpoints", step)
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"checkpoints in {package}/checkpoints will be lost: it lies in the package") and said.endswith("or a URL")


def test_commands_name_folders_by_absolute_paths(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(load_config(None, ["run.name=one"]).to_yaml())
    (run / "run.json").write_text(json.dumps({"run": "one", "state": "DONE", "step": 3, "steps": 3}))
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "time": 1e9 + step, "loss": 1.0}) + "\n" for step in (1, 2, 3)))
    ckpt.save({"model": {"w": torch.ones(2)}}, "runs/one/checkpoints", 3)

    def said(*words: str, code: int = 0) -> str:
        assert main(list(words)) == code
        out = capsys.readouterr()
        return out.out + out.err

    assert str(run) in said("ls") and str(run) in said("ls", "runs", "--json")
    assert json.loads(said("status", "runs/one", "--json"))["folder"] == str(run)
    assert (
        said("dash", "runs/one") == f"wrote {run / 'dash.html'}\n"
        and said("dash", "runs/one", "--out", "x.html") == f"wrote {tmp_path}/x.html\n"
    )
    for words in (["export-hf", "one", "out"], ["export-dcp", "runs/one", "dcp"]):
        assert str(tmp_path / words[-1]) in said("ckpt", *words)
    for words in (["show", "one"], ["ls", "runs/one", "--json"], ["verify", "one"]):
        text = said("ckpt", *words)
        assert "runs/one" not in text or str(run) in text
    assert str(tmp_path / "nowhere") in said("status", "nowhere", code=2)
    assert str(tmp_path / "nowhere") in said("ls", "nowhere", code=2)
    assert str(tmp_path / "nowhere") in said("ckpt", "ls", "nowhere", code=2)
    monkeypatch.chdir(tmp_path / "out")
    assert str(tmp_path / "out" / "runs") in said("status", code=2)
