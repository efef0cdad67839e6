"""``vescale-ray ckpt``: its output, exit codes and JSON, without control characters if the output is no terminal."""

from __future__ import annotations

import json
import logging
import os
import pty
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from tests.checkpoint.checkpoint_ranks import CONFIG
from tests.checkpoint.checkpoint_support import damage
from tests.checkpoint.s3_fake import fake_s3
from vescale_ray import checkpoint
from vescale_ray.checkpoint import S3Store
from vescale_ray.checkpoint.format.manifest_codec import seal
from vescale_ray.cli import app, main
from vescale_ray.cli.checkpoints import checkpoint_conversions, export_hf
from vescale_ray.cli.checkpoints.checkpoint_group import ckpt
from vescale_ray.models.llama import Llama
from vescale_ray.runfolder import RunFolder

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(elsewhere: Path) -> RunFolder:
    """A run with two checkpoints of a small Llama, of steps 10 and 20, which differ in one weight."""
    found = RunFolder(elsewhere / "runs" / "x").create()
    found.write_config("train: {steps: 50}\n")
    found.write_state({"run": "x", "state": "DONE", "step": 20, "steps": 50})
    model = Llama(CONFIG)
    model.reset_parameters(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    checkpoint.save({"model": model, "optimizer": optimizer}, found.checkpoints, 10, meta={"note": "ten"})
    with torch.no_grad():
        model.norm.weight[3] += 0.5
    checkpoint.save({"model": model, "optimizer": optimizer}, found.checkpoints, 20)
    return found


def said(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(["ckpt", *args])
    out, err = capsys.readouterr()
    assert all(c.isprintable() or c == "\n" for c in out + err), "no control characters"
    return code, out, err


def refused(capsys: pytest.CaptureFixture[str], *args: str, code: int = 2) -> str:
    found, out, err = said(capsys, *args)
    assert found == code and len(err.splitlines()) == 1 and not out, (found, out, err)
    return err


NEWEST, BEFORE = "e0000-s000000000020", "e0000-s000000000010"


def test_every_command_has_an_example_or_an_explanation_and_json() -> None:
    assert set(ckpt.commands) >= {
        "ls",
        "show",
        "verify",
        "diff",
        "gc",
        "pin",
        "unpin",
        "export-hf",
        "import-hf",
        "export-dcp",
        "import-dcp",
        "rollback",
    }
    for command in ckpt.commands.values():
        assert command.help and any(p.name == "as_json" for p in command.params), command.name
    assert app.ckpt is ckpt


@pytest.mark.parametrize("path", [[], ["x"], ["runs/x"], ["runs/x/checkpoints"], [f"x@{BEFORE}"], ["runs/x", BEFORE]])
def test_show_takes_run_name_folder_or_checkpoint_name(run, capsys, path):
    code, out, _ = said(capsys, "show", *path)
    step = 10 if BEFORE in " ".join(path) else 20
    assert code == 0 and f"step {step}, epoch 0, written by 1 workers" in out
    about = json.loads(said(capsys, "show", *path, "--json")[1])
    assert about["step"] == step and about["tensors"] == 3 + 9 * CONFIG.layers and about["optimizers"] == {"optimizer": "AdamW"}
    assert about["kinds"]["param float32"]["elements"] == sum(p.numel() for p in Llama(CONFIG).parameters())
    assert about["meta"] == ({"note": "ten"} if step == 10 else {})


def test_rollback_commits_an_earlier_checkpoint_and_deletes_none(run, capsys):
    code, out, _ = said(capsys, "rollback", "x", "10")
    back = "e0001-s000000000010"
    assert code == 0 and f"the run goes on from step 10 ({back}, the data of {BEFORE}), not from {NEWEST}; go on with: vescale-ray" in out
    found = checkpoint.latest(run.checkpoints)
    assert found is not None and found.name == back
    assert [one.name for one in checkpoint.ls(run.checkpoints)] == [BEFORE, NEWEST, back]
    (event,) = run.read_events()
    assert (event["event"], event["step"], event["from"], event["to"]) == ("rolled_back", 10, NEWEST, BEFORE)
    told = json.loads(said(capsys, "rollback", f"x@{NEWEST}", "--json")[1])
    assert (told["commit"], told["step"], told["from"]) == ("e0002-s000000000020", 20, back), "and forth again, by name"
    assert json.loads(said(capsys, "show", "x", "--json")[1])["meta"] == {}


def test_refused_rollback_is_one_sentence_and_changes_nothing(run, capsys):
    assert "no checkpoint of step 15; there are those of 10, 20" in refused(capsys, "rollback", "x", "15")
    assert "e0000-s000000000020.json is the newest checkpoint" in refused(capsys, "rollback", "x", "20")
    assert "say which checkpoint, by its step or as PATH@NAME" in refused(capsys, "rollback", "x")
    assert "say which checkpoint" in refused(capsys, "rollback", f"x@{BEFORE}", "10")
    with run.claim():
        assert "a run is going on here" in refused(capsys, "rollback", "x", "10")
    piece = damage(run.checkpoints, checkpoint.open(run.checkpoints, BEFORE).commit, -7)
    assert "is damaged, nothing was changed" in refused(capsys, "rollback", "x", "10", code=1)
    piece.write_bytes(piece.read_bytes()[:-8])
    assert f"the checkpoint of step 10, {BEFORE}, can't be loaded: object" in refused(capsys, "rollback", "x", "10")
    assert [one.name for one in checkpoint.ls(run.checkpoints)] == [BEFORE, NEWEST] and not run.read_events()


def test_the_tensors_are_listed_on_request(run, capsys):
    _, out, _ = said(capsys, "show", "x", "--tensors", "--include", "layers.0.ffn.*")
    assert "  layers.0.ffn.gate_proj.weight  [40, 24]  param float32, exp_avg float32, exp_avg_sq float32" in out and "head" not in out
    about = json.loads(said(capsys, "show", "x", "--include", "norm.*", "--json")[1])
    assert about["tensor"] == {"norm.weight": {"shape": [24], "kinds": dict.fromkeys(("param", "exp_avg", "exp_avg_sq"), "float32")}}
    assert "has no tensor that fits norm, none*; `ckpt show --tensors`" in refused(
        capsys, "show", "x", "--include", "norm", "--include", "none*"
    )


def test_missing_run_or_checkpoint_is_named_with_the_remedy(run, capsys):
    assert "no such folder of checkpoints, and no run of that name" in refused(capsys, "show", "y")
    assert f"no checkpoint 'e0000-s000000000030' in {run.checkpoints}; newest there: {BEFORE}, {NEWEST}" in refused(
        capsys, "show", "x@e0000-s000000000030", code=1
    )
    assert "did you mean show?" in refused(capsys, "shw")
    assert "ckpt diff --help" in refused(capsys, "diff", "x")


def test_verify_says_what_it_read_and_names_damage(run, capsys):
    about = json.loads(said(capsys, "verify", "x", "--json")[1])
    assert about["commit"] == NEWEST and about["problems"] == []
    damage(run.checkpoints, checkpoint.ls(run.checkpoints)[1])
    assert said(capsys, "verify", f"x@{BEFORE}")[0] == 0
    assert "block 1 (holds embed.weight" in refused(capsys, "verify", "x", code=1)
    code, out, _ = said(capsys, "verify", "x", "--json")
    assert code == 1 and json.loads(out)["problems"][0]["block"] == 1


def test_diff_says_what_changed_and_by_how_much(run, capsys):
    for b in (f"x@{NEWEST}", NEWEST, "x"):
        code, out, _ = said(capsys, "diff", f"x@{BEFORE}", b)
        assert code == 1 and out.splitlines()[0] == "~ 'norm.weight': 1 of 24 elements differ, largest difference 0.5", out
        assert "they differ; " in out.splitlines()[-1] and len(out.splitlines()) == 2
    assert said(capsys, "diff", f"x@{BEFORE}", NEWEST, "--exclude", "norm.*")[0] == 0
    code, out, _ = said(capsys, "diff", "x", "x")
    assert code == 0 and "no difference" in out
    about = json.loads(said(capsys, "diff", f"x@{BEFORE}", NEWEST, "--json")[1])
    assert about["changed"] == [{"name": "norm.weight", "kind": "param", "differing": 1, "numel": 24, "largest": 0.5}]
    assert about["added"] == [] and about["same"] == 3 * (3 + 9 * CONFIG.layers) - 1


def test_hugging_face_export_imports_back_with_equal_weights(run, capsys):
    code, out, _ = said(capsys, "export-hf", f"x@{BEFORE}", "hf", "--names", "llama", "--max-shard", "8KB", "--dtype", "bf16")
    assert code == 0 and f"hf: {BEFORE}, " in out and "files, read back and compared" in out
    files = sorted(p.name for p in Path("hf").glob("*.safetensors"))
    assert len(files) > 1 and any("model.layers.0.self_attn.q_proj.weight" in load_file(f"hf/{name}") for name in files)
    assert "give a folder without model files" in refused(capsys, "export-hf", "x", "hf")
    about = json.loads(said(capsys, "import-hf", "hf", "fresh", "--names", "llama", "--step", "3", "--json")[1])
    assert about["commit"] == "e0000-s000000000003" and about["path"] == str(Path("fresh").absolute())
    got, want = checkpoint.open("fresh").to_state_dict(), checkpoint.open(run.checkpoints, BEFORE).to_state_dict(dtype=torch.bfloat16)
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    assert said(capsys, "import-hf", "hf", "x", "--names", "llama")[0] == 0
    assert [c.name for c in checkpoint.ls(run.checkpoints)] == [BEFORE, NEWEST, "e0001-s000000000000"], "the newest, of a higher epoch"


def test_a_table_of_names_comes_from_a_file(run, capsys):
    Path("table.json").write_text(json.dumps({"layers.*": "blocks.*"}))
    said(capsys, "export-hf", "x", "hf", "--names", "table.json", "--include", "layers.1.*")
    assert {name.split(".")[0] for name in load_file("hf/model.safetensors")} == {"blocks"}
    Path("bad.json").write_text("[1]")
    assert "give one JSON object of names" in refused(capsys, "export-hf", "x", "hf2", "--names", "bad.json")
    assert "not one of llama, and no readable file" in refused(capsys, "export-hf", "x", "hf2", "--names", "lama")
    Path("odd.json").write_text(json.dumps({"a*": "b*c*"}))
    assert "has 1 stars on one side and 2 on the other" in refused(capsys, "export-hf", "x", "hf2", "--names", "odd.json")
    assert "give a size such as 5GB" in refused(capsys, "export-hf", "x", "hf2", "--max-shard", "5 parsecs")
    assert "no tensor of 'model' that fits nothing" in refused(capsys, "export-hf", "x", "hf2", "--include", "nothing")


def test_malformed_files_are_bad_input(run, capsys):
    Path("bad.safetensors").write_bytes(b"\xff" * 20)
    assert "not a complete safetensors file" in refused(capsys, "import-hf", "bad.safetensors", "y")
    assert "no such file or folder" in refused(capsys, "import-hf", "nowhere", "y")
    Path("empty").mkdir()
    assert "not a DCP checkpoint: it has no .metadata" in refused(capsys, "import-dcp", "empty", "y")
    assert "give OTHER=NAME" in refused(capsys, "import-dcp", "empty", "y", "--tied", "a")
    assert not Path("y").exists()


def test_dcp_export_imports_back_with_the_optimizer_state(run, capsys):
    code, out, _ = said(capsys, "export-dcp", "x", "dcp")
    assert code == 0 and f"dcp: {NEWEST}, " in out
    target = {"model": {name: torch.zeros_like(p) for name, p in Llama(CONFIG).state_dict().items()}}
    dcp.load(target, checkpoint_id="dcp", no_dist=True)
    assert all(torch.equal(t, checkpoint.open(run.checkpoints).read(name)) for name, t in target["model"].items())
    assert "give an empty folder" in refused(capsys, "export-dcp", "x", "dcp")
    about = json.loads(said(capsys, "import-dcp", "dcp", "back", "--step", "20", "--json")[1])
    assert about["commit"] == NEWEST
    assert said(capsys, "diff", "x", "back")[0] == 0


def test_gc_deletes_old_checkpoints_and_keeps_pinned_ones(run, capsys):
    assert f"{BEFORE} pinned (cli)" in said(capsys, "pin", f"x@{BEFORE}")[1]
    assert json.loads(said(capsys, "pin", "x", "--as", "eval", "--json")[1]) == {
        "path": str(Path("runs/x/checkpoints").absolute()),
        "commit": NEWEST,
        "pin": "eval",
        "pinned": True,
    }
    code, out, _ = said(capsys, "gc", "x", "--keep", "1")
    assert code == 0 and f"kept {BEFORE} (pinned)" in out and f"kept {NEWEST} (" in out
    assert "has no pin 'eval'; it has cli" in refused(capsys, "unpin", f"x@{BEFORE}", "--as", "eval")
    assert "say which checkpoint" in refused(capsys, "unpin", "x")
    assert "can't be a pin's name" in refused(capsys, "pin", "x", "--as", "a/b")
    assert said(capsys, "unpin", f"x@{BEFORE}")[0] == 0
    code, out, _ = said(capsys, "gc", "x", "--keep", "1", "--dry-run")
    assert code == 0 and f"would delete {BEFORE}" in out and "would be swept" in out and "would be freed" in out
    assert [c.name for c in checkpoint.ls(run.checkpoints)] == [BEFORE, NEWEST], "a dry run changes nothing"
    code, out, _ = said(capsys, "gc", "x", "--keep", "1")
    assert code == 0 and f"deleted {BEFORE}" in out
    assert [c.name for c in checkpoint.ls(run.checkpoints)] == [NEWEST]
    assert json.loads(said(capsys, "gc", "x", "--keep", "1", "--json")[1])["kept"] == [NEWEST]
    assert "Missing option '--keep'" in refused(capsys, "gc", "x")


def test_control_characters_in_names_are_escaped(elsewhere, capsys):
    save_file({"a\x1b[2Jb": torch.ones(2)}, "x.safetensors")
    said(capsys, "import-hf", "x.safetensors", "root")
    code, out, _ = said(capsys, "show", "root", "--tensors")
    assert code == 0 and r"a\x1b[2Jb" in out
    path = next(Path("root/commits").glob("e*"))
    path.write_bytes(seal(path.read_bytes()[:-66].replace(b'"created":"', b'"created":"\\u001b[2J\\udcff')))
    code, out, _ = said(capsys, "show", "root")
    assert code == 0 and r"workers, '\x1b[2J\udcff" in out


LONG = {
    "gc": (["x", "--keep", "1", "--dry-run"], "verifying"),
    "verify": (["x"], "verifying"),
    "diff": (["x", "x"], "comparing"),
    "export-hf": (["x", "hf"], "writing"),
    "import-hf": (["hf", "y"], "importing"),
    "export-dcp": (["x", "dcp"], "writing"),
    "import-dcp": (["dcp", "z"], "importing"),
}


def test_a_bar_is_drawn_on_a_terminal_and_nowhere_else(run, capsys, monkeypatch):
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)

        def drawn() -> str:
            terminal.write("<end>")
            terminal.flush()
            text = ""
            while not text.endswith("<end>"):
                text += os.read(ours, 1 << 16).decode()
            return text.removesuffix("<end>")

        for command, (args, word) in LONG.items():
            assert main(["ckpt", command, *args]) == 0
            text = drawn()
            assert "\x1b" in text and word in text, command
        assert main(["ckpt", "verify", "x", "--json"]) == 0
        assert drawn() == "", "JSON is for programs"
    os.close(ours)
    assert "\x1b" not in capsys.readouterr().out
    monkeypatch.undo()


@pytest.mark.parametrize("command", ["export-hf", "export-dcp"])
def test_ctrl_c_in_an_export_leaves_no_partial_output(run, capsys, monkeypatch, command):
    """The interrupt comes after each file was begun. No file stays, so that a second try finds the names free."""

    @contextmanager
    def interrupted(*_: object) -> Iterator[Callable[[int], None]]:
        calls = iter(range(3))

        def advance(count: int) -> None:
            if next(calls) == 2:
                raise KeyboardInterrupt

        yield advance

    for module in (checkpoint_conversions, export_hf):
        monkeypatch.setattr(module, "bar", interrupted)
    options = ["--max-shard", "1KB"] if command == "export-hf" else []
    code, _, err = said(capsys, command, "x", "out", *options)
    assert (code, err) == (130, "\nvescale-ray: interrupted\n"), "on a line after the terminal's ^C"
    assert not Path("out").exists()
    monkeypatch.undo()
    monkeypatch.chdir(run.path.parents[1])
    assert said(capsys, command, "x", "out", *options)[0] == 0


# ------------------------------------------------------------------------------------------------------------------- URLs


@contextmanager
def root_of(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if kind in ("file", "memory"):
        yield f"file://{folder}/root" if kind == "file" else f"memory://{folder}/root"
        return
    for name, value in (("ACCESS_KEY_ID", "test"), ("SECRET_ACCESS_KEY", "test"), ("REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    if kind == "fake s3":
        with fake_s3() as fake:
            monkeypatch.setenv("AWS_ENDPOINT_URL_S3", fake.url)
            yield "s3://bucket/runs/7"
        return
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://{}:{}".format(*server.get_host_and_port()))
        root = "s3://bucket/runs/7"
        S3Store(root)._fs.call_s3("create_bucket", Bucket="bucket")
        yield root
    finally:
        server.stop()


@pytest.mark.parametrize("kind", ["file", "memory", "fake s3", pytest.param("moto", marks=pytest.mark.slow)])
def test_every_command_takes_a_url(elsewhere, capsys, monkeypatch, kind):
    with root_of(kind, elsewhere, monkeypatch) as root:
        weight = torch.randn(40, 30)
        checkpoint.save({"model": {"w": weight, "v": torch.ones(3)}}, root, 10)
        weight[3, 3] += 1
        checkpoint.save({"model": {"w": weight, "v": torch.ones(3)}}, root, 20)
        capsys.readouterr()

        def told(*args: str, code: int = 0) -> dict[str, object]:
            found, out, err = said(capsys, *args, "--json")
            assert found == code and len(out.splitlines()) == 1, (found, out, err)
            return json.loads(out)  # type: ignore[no-any-return]

        assert [json.loads(line)["step"] for line in said(capsys, "ls", root, "--json")[1].splitlines()] == [10, 20]
        assert said(capsys, "ls", root)[1].startswith(f"{BEFORE}  step 10, ")
        assert told("show", root)["step"] == 20 and told("show", f"{root}@{BEFORE}")["step"] == 10 == told("show", root, BEFORE)["step"]
        assert told("verify", root)["problems"] == [] and told("verify", f"{root}@{BEFORE}")["commit"] == BEFORE
        assert [c["name"] for c in told("diff", f"{root}@{BEFORE}", NEWEST, code=1)["changed"]] == ["w"]  # type: ignore[attr-defined]
        assert told("pin", f"{root}@{BEFORE}") == {"path": root, "commit": BEFORE, "pin": "cli", "pinned": True}
        assert told("gc", root, "--keep", "1")["kept"] == [BEFORE, NEWEST]
        assert told("unpin", f"{root}@{BEFORE}")["pinned"] is False
        assert told("export-hf", root, "hf")["files"] == ["model.safetensors"]
        assert torch.equal(load_file("hf/model.safetensors")["w"], weight)
        assert told("import-hf", "hf", root, "--step", "30")["commit"] == "e0000-s000000000030"
        assert told("export-dcp", root, "dcp")["commit"] == "e0000-s000000000030"
        assert told("import-dcp", "dcp", root + "/other", "--step", "30")["commit"] == "e0000-s000000000030"
        assert told("diff", root, root + "/other")["same"] == 2
        assert told("gc", root, "--keep", "1", "--dry-run")["deleted"] == [BEFORE, NEWEST] == told("gc", root, "--keep", "1")["deleted"]
        assert [json.loads(line)["step"] for line in said(capsys, "ls", root, "--json")[1].splitlines()] == [30]
        for args in (
            ["show", f"{root}@{NEWEST}"],
            ["verify", root, NEWEST],
            ["pin", f"{root}@{NEWEST}"],
            ["export-hf", f"{root}@{NEWEST}", "q"],
        ):
            assert f"no checkpoint '{NEWEST}' in {root.removeprefix('file://')}" in refused(capsys, *args, code=1)
        assert "has no pin 'cli'" in refused(capsys, "unpin", f"{root}@{NEWEST}")
        for args in (
            ["export-hf", root, f"{root}/out"],
            ["export-dcp", root, f"{root}/out"],
            ["import-hf", root, "y"],
            ["import-dcp", root, "y"],
        ):
            assert "is a URL; give a folder of this machine" in refused(capsys, *args)
        assert not any(":" in path.name for path in Path().iterdir()), "no folder was made of a URL"
        if kind == "moto":  # the other service has no buckets
            for args in (["ls"], ["show"], ["verify"], ["gc", "--keep", "1"]):
                err = refused(capsys, args[0], "s3://nowhere/x", *args[1:], code=1)
                assert err == "vescale-ray: bucket 'nowhere' does not exist; create it, since saves never do\n"


def test_a_url_that_leads_nowhere_is_one_sentence(elsewhere, capsys, monkeypatch):
    assert "Protocol not known: foo" in refused(capsys, "ls", "foo://x")
    assert "give file:///absolute/path" in refused(capsys, "ls", "file://rel")
    assert "'s3://' is not of the form s3://bucket/prefix" in refused(capsys, "ls", "s3://")
    assert "S3 URL option 'bogus' is not possible" in refused(capsys, "ls", "s3://bucket/x?bogus=1")
    with root_of("fake s3", elsewhere, monkeypatch) as root:
        checkpoint.save({"model": {"w": torch.ones(3)}}, root, 1)
        capsys.readouterr()
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
            monkeypatch.delenv(f"AWS_{name}")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("HOME", str(elsewhere))
        for args in (["ls"], ["verify"], ["pin"], ["gc", "--keep", "1"]):
            err = refused(capsys, args[0], root, *args[1:], code=1)
            assert "Unable to locate credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in err and "Error" not in err


def test_a_damaged_manifest_is_named_by_every_command(run, capsys):
    Path(checkpoint.ls(run.checkpoints)[1].path).write_bytes(b"{}")
    assert f"{NEWEST}  its manifest is unusable: " in said(capsys, "ls", "x")[1]
    assert json.loads(said(capsys, "ls", "x", "--json")[1].splitlines()[1])["problem"]
    for args in (["show"], ["pin"], ["export-hf", "out"], ["export-dcp", "out"]):
        err = refused(capsys, args[0], f"x@{NEWEST}", *args[1:], code=1)
        assert err.startswith(f"vescale-ray: checkpoint is damaged: commits/{NEWEST}.json: its manifest is unusable: ")
    assert f"{NEWEST} is damaged" in refused(capsys, "verify", "x", code=1)
    assert "an unreadable commit is kept" in said(capsys, "gc", "x", "--keep", "1")[2]
    assert "checkpoint is damaged" in said(capsys, "diff", f"x@{BEFORE}", NEWEST)[2]


def test_empty_and_impossible_paths_are_refused_first(run, capsys):
    """An unset variable of a script must not mean the current folder."""
    Path("file").write_text("x")
    for args in (["ls"], ["gc", "--keep", "1"], ["show"], ["verify"], ["pin"], ["export-hf", "out"], ["import-hf"]):
        given = [args[0], "", *args[1:]] if args[0] != "import-hf" else ["import-hf", "file", ""]
        assert "PATH is empty" in refused(capsys, *given)
    for command in ("export-hf", "export-dcp"):
        assert "the folder to write '' is empty" in refused(capsys, command, "x", "")
        assert "file can't be created as a folder" in refused(capsys, command, "x", "file")
    assert "SOURCE '' is empty" in refused(capsys, "import-hf", "", "y")
    assert "File name too long" in refused(capsys, "show", "x" * 5000, code=1)
