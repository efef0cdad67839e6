"""docs/how-to/kuberay.md, followed as by a newcomer: every command parses or runs, and names only things that exist."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from vescale_ray.cli.app import cli, main
from vescale_ray.cli.kubernetes_commands import k8s
from vescale_ray.k8s import Options

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "how-to" / "kuberay.md").read_text(encoding="utf-8")
OTHERS = {"pods", "secret", "svc", "workloads"}
"""Kinds that no manifest contains, because operators or the user create them."""


def lines(text: str) -> Iterator[str]:
    """The commands of the code blocks. A command inside $(..) comes before the one around it."""
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            inner = re.search(r"\$\((.*)\)", line)
            if inner:
                yield inner[1]
            else:
                yield line


def inline(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


class Walk:
    """The documents rendered so far, and checks of one command after the other."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._files: set[str] = set()
        self.documents: list[dict[str, Any]] = []
        self.seen: list[str] = []

    def line(self, line: str) -> None:
        for part in line.split(" | "):
            words = shlex.split(part)
            if words[0] == "export" and "=" in words[1]:
                return
            if words[0] in ("base64",):
                continue
            getattr(self, f"_{words[0].replace('-', '_')}")(words[1:])
            self.seen.append(words[0])

    def _vescale_ray(self, words: list[str]) -> None:
        output = words[words.index(">") + 1] if ">" in words else None
        words = words[: words.index(">")] if ">" in words else words
        command: click.Command = cli
        rest = list(words)
        while isinstance(command, click.Group):
            command = command.commands[rest.pop(0)]
        if "--help" in words:
            return
        command.make_context(command.name, rest)
        if words[:2] == ["k8s", "render"]:
            assert main(words) == 0
            self.documents += list(yaml.load_all(self._capsys.readouterr().out, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
            if output:
                self._files.add(output)

    def _docker(self, words: list[str]) -> None:
        assert words[0] in ("build", "push")
        assert Options().image in words
        if "-f" in words:
            assert (ROOT / words[words.index("-f") + 1]).is_file()

    def _ray(self, words: list[str]) -> None:
        assert words[:2] == ["job", "submit"]
        end = words.index("--")
        ray = importlib.util.find_spec("ray")
        assert ray is not None and ray.origin is not None
        source = (Path(ray.origin).parent / "dashboard" / "modules" / "job" / "cli.py").read_text()
        for word in words[2:end]:
            assert not word.startswith("--") or f'"{word}"' in source, word
        assert words[end + 1] == "vescale-ray"
        self._vescale_ray(words[end + 2 :])
        self._in_a_pod(words[end + 2 :])

    def _kubectl(self, words: list[str]) -> None:
        if "--" in words:
            end = words.index("--")
            assert words[end + 1] == "vescale-ray"
            self._vescale_ray(words[end + 2 :])
            self._in_a_pod(words[end + 2 :])
            words = words[:end]
        if words[0] == "-n":
            assert words[1] == Options().namespace
            words = words[2:]
        flags = dict(zip(words, words[1:], strict=False))
        verb = words[0]
        if "-f" in flags and verb != "logs":
            assert flags["-f"] == "-" or flags["-f"] in self._files, words
            return
        if "-l" in flags:
            wanted = dict(pair.split("=") for pair in flags["-l"].split(","))
            assert any(wanted.items() <= labels.items() for labels in self._labels()), wanted
        if verb == "exec":
            assert flags["-c"] in {one["name"] for pod in self._pods() for one in pod["containers"]}
        elif verb == "port-forward":
            kind, name = words[1].split("/")
            clusters = {one["metadata"]["name"] for one in self.documents if one["kind"] == "RayCluster"}
            assert kind == "svc" and name.removesuffix("-head-svc") in clusters
            ports = {port["containerPort"] for pod in self._pods() for one in pod["containers"] for port in one.get("ports", ())}
            assert int(words[2].split(":")[1]) in ports
        elif verb in ("get", "describe", "delete", "create"):
            self._object(verb, words[1:])
        else:
            assert verb == "logs" and "-l" in flags

    def _object(self, verb: str, words: list[str]) -> None:
        kind = words[0]
        assert kind in OTHERS | {one["kind"].lower() for one in self.documents}, kind
        name = words[2] if verb == "create" else words[1] if len(words) > 1 and not words[1].startswith("-") else None
        if name is None:
            return
        if kind == "secret":
            made = {one["metadata"]["name"] for one in self.documents if one["kind"] == "RayCluster"}  # made by the operator
            assert name in made | set(re.findall(r"'secret(?:Key)?Ref': {'name': '([\w-]+)'", str(self.documents))), name
        else:
            assert (kind, name) in {(one["kind"].lower(), one["metadata"]["name"]) for one in self.documents}

    def _in_a_pod(self, words: list[str]) -> None:
        """Check the paths in a command that runs in the head's pod."""
        maps = [one["data"] for one in self.documents if one["kind"] == "ConfigMap"]
        folders = {f"{run['dir']}/{run['name']}" for one in maps for run in [yaml.safe_load(one["run.yaml"])["run"]]}
        for word in words:
            if word.startswith("/"):
                assert word in folders | {"/etc/vescale-ray/run.yaml"}, word

    def _clusters(self) -> Iterator[dict[str, Any]]:
        for one in self.documents:
            if one["kind"] in ("RayJob", "RayCluster"):
                yield one["spec"].get("rayClusterSpec", one["spec"])

    def _templates(self) -> Iterator[dict[str, Any]]:
        for cluster in self._clusters():
            yield cluster["headGroupSpec"]["template"]
            yield from (group["template"] for group in cluster["workerGroupSpecs"])
        for one in self.documents:
            if "submitterPodTemplate" in one.get("spec", {}):
                yield one["spec"]["submitterPodTemplate"]

    def _labels(self) -> list[dict[str, str]]:
        return [template["metadata"]["labels"] for template in self._templates()]

    def _pods(self) -> list[dict[str, Any]]:
        return [template["spec"] for template in self._templates()]


@pytest.fixture
def walk(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Walk:
    monkeypatch.chdir(ROOT)
    return Walk(capsys)


def test_guide_commands_work_in_order(walk: Walk) -> None:
    for line in lines(TEXT):
        walk.line(line)
    assert {"vescale-ray", "kubectl", "docker", "ray"} == set(walk.seen) and len(walk.seen) > 20
    for text in inline(TEXT):
        if re.match(r"kubectl \S+ \S", text):
            walk.line(text)
        elif re.match(r"vescale-ray k8s render --", text):
            walk.line(text)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("kubectl apply -f deploy.yaml", "no command made it"),
        ("kubectl -n other get rayjob llama-110m", "another namespace"),
        ("kubectl -n vescale-ray get rayjob llama", "another name"),
        ("kubectl -n vescale-ray get deployment", "nothing makes one"),
        ("kubectl -n vescale-ray get pods -l app=llama-110m", "no pod has this label"),
        ("kubectl -n vescale-ray exec $HEAD -c head -- vescale-ray status", "no container has this name"),
        ("kubectl -n vescale-ray exec $HEAD -c ray-head -- vescale-ray stop /mnt/runs/llama-110m", "the run is elsewhere"),
        ("kubectl -n vescale-ray port-forward svc/llama-110m-head-svc 8265:8266", "no such cluster, no such port"),
        ("vescale-ray k8s rendr vescale_ray/configs/cluster.yaml", "no such command"),
        ("vescale-ray k8s render vescale_ray/configs/cluster.yaml --oerlay spot", "no such option"),
        ("vescale-ray k8s render vescale_ray/configs/none.yaml", "no such file"),
        ("docker build -f Dockerfile -t registry.example.com/vescale-ray:0.1.0 .", "the file is elsewhere"),
    ],
)
def test_broken_guide_command_is_caught(line: str, why: str, walk: Walk) -> None:
    walk.line("vescale-ray k8s render vescale_ray/configs/cluster.yaml > run.yaml")
    with pytest.raises((AssertionError, KeyError, click.ClickException)):
        walk.line(line)


def test_every_option_that_the_guide_names_exists() -> None:
    known = {flag for param in k8s.commands["render"].params for flag in param.opts} | {"--help", "--build-arg", "--working-dir"}
    named = {flag for text in inline(TEXT) if text.startswith("--") for flag in re.findall(r"--[a-z-]+", text)}
    assert named and named <= known, named - known


def test_guide_says_it_was_not_tried_on_a_cluster() -> None:
    assert "**Not verified: none of this was applied to a cluster by us" in TEXT
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "docs/how-to/kuberay.md" in readme and "not yet run by us" in readme
