"""The image's Dockerfile passes a linter, and agrees with the package, the pods and Ray. No engine builds it here."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from vescale_ray.config import load_config
from vescale_ray.runfolder import DISCOVERY, RunFolder

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def instructions(text: str) -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", "\n".join(line for line in text.splitlines() if not line.strip().startswith("#")))
    lines = [line.split(None, 1) for line in text.splitlines() if line.strip()]
    return [(word.upper(), rest) for word, rest in lines]


def complaints(text: str) -> Iterator[str]:
    """Faults that a reviewer would reject."""
    stages: list[list[tuple[str, str]]] = []
    for word, rest in instructions(text):
        if word == "FROM":
            stages.append([])
        if stages:
            stages[-1].append((word, rest))
    bases = {rest.split()[0] for stage in stages for word, rest in stage if word == "FROM"}
    for base in bases:
        version = re.fullmatch(r"python:3\.(\d+)\.\d+-slim-bookworm(@sha256:[0-9a-f]{64})?", base)
        if not version or int(version[1]) not in (11, 12, 13):
            yield f"base {base} is no exact version of a Python that the package supports"
    if len(bases) > 1:
        yield "the wheel is built with another Python than it is installed in"
    last = stages[-1]
    words = [word for word, _ in last]
    users = [rest for word, rest in last if word == "USER"]
    if not users or users[-1].split(":")[0] in ("0", "root"):
        yield "it runs as root"
    elif [word for word in words[words.index("USER") :] if word in ("RUN", "COPY", "ADD")]:
        yield "something is installed as the user of the pods, who could change it"
    if "HEALTHCHECK" not in words or ("HEALTHCHECK", "NONE") in last:
        yield "it has no healthcheck"
    for word, rest in [pair for stage in stages for pair in stage]:
        if word == "ADD":
            yield "ADD fetches and unpacks: use COPY"
        if word == "COPY" and "." in rest.split()[:-1]:
            yield "whatever lies around is copied into the image"
        if word == "RUN" and re.search(r"\bpip3? install\b", rest):
            for flag in ("--no-cache-dir", "constraints.txt"):
                if flag not in rest:
                    yield f"a pip install is without {flag}"
        if word == "RUN" and re.search(r"\b(curl|wget|apt|apt-get|git|conda|npm|urllib)\b", rest):
            yield "something is fetched that no constraint pins"
        if word in ("CMD", "ENTRYPOINT") and re.search(r"\b(pip3?|uv|apt|apt-get|curl|git|wget)\b", rest):
            yield "the network is used at start"
        if word in ("CMD", "ENTRYPOINT") and not rest.startswith("["):
            yield "a shell would keep SIGTERM from the program"
        if word in ("ENV", "ARG") and re.search(r"(?i)(token|password|secret|_key)\b\S*=\S", rest):
            yield "a secret stays in the image"
    if not [rest for word, rest in last if word == "RUN" and ".whl" in rest]:
        yield "the wheel is not what is installed"
    if "RAY_USAGE_STATS_ENABLED=0" not in " ".join(rest for word, rest in last if word == "ENV"):
        yield "Ray would report its use over the network"


def test_dockerfile_has_no_lint_complaints() -> None:
    assert list(complaints(DOCKERFILE)) == []


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("FROM python:3.11.14-slim-bookworm\n", "FROM python:3.11-slim\n", "no exact version"),
        ("FROM python:3.11.14-slim-bookworm\n", "FROM python:latest\n", "no exact version"),
        ("FROM python:3.11.14-slim-bookworm\n", "FROM python:3.12.1-slim-bookworm\n", "another Python"),
        ("USER 1000:1000\n", "", "runs as root"),
        ("USER 1000:1000\n", "USER root\n", "runs as root"),
        ("WORKDIR /home/ray\n", "RUN pip install --no-cache-dir -c constraints.txt x\n", "who could change it"),
        ("HEALTHCHECK --interval", "LABEL --interval", "no healthcheck"),
        ("COPY deploy ./deploy", "ADD https://example.com/deploy.tar.gz .", "use COPY"),
        (" -c constraints.txt build", " build", "without constraints.txt"),
        ("--no-cache-dir --disable-pip-version-check -c /opt", "-c /opt", "without --no-cache-dir"),
        ("RUN groupadd", "RUN curl -s https://example.com | sh && groupadd", "no constraint pins"),
        ("RUN groupadd", "RUN apt install htop && groupadd", "no constraint pins"),
        ("RUN groupadd", "RUN pip3 install x && groupadd", "without constraints.txt"),
        ("RUN groupadd", "RUN git clone https://example.com/x && groupadd", "no constraint pins"),
        ("COPY constraints.txt /opt/vescale-ray/", "COPY . /opt/vescale-ray/", "whatever lies around"),
        ('CMD ["vescale-ray", "--help"]', 'CMD ["sh", "-c", "pip install x && vescale-ray"]', "network is used at start"),
        ('CMD ["vescale-ray", "--help"]', "CMD vescale-ray --help", "keep SIGTERM"),
        ("HF_HUB_OFFLINE=1", "WANDB_API_KEY=abc", "a secret stays"),
        ('"$(echo /opt/vescale-ray/dist/*.whl)[plots,hf]"', "vescale-ray", "not what is installed"),
        ("RAY_USAGE_STATS_ENABLED=0", "RAY_X=0", "report its use"),
    ],
)
def test_a_mistake_in_the_dockerfile_is_caught(old: str, new: str, words: str) -> None:
    assert old in DOCKERFILE
    head, _, tail = DOCKERFILE.rpartition(old)  # the last stage, if both stages contain it
    assert [one for one in complaints(head + new + tail) if words in one]


def test_image_copies_every_wheel_source_and_only_existing_paths() -> None:
    copied = {source for word, rest in instructions(DOCKERFILE) if word == "COPY" and "--from" not in rest for source in rest.split()[:-1]}
    assert all((ROOT / source).exists() for source in copied), copied
    folders = {folder.split("/")[0] for folder in PROJECT["tool"]["setuptools"]["package-dir"].values()}
    assert folders | {"pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]} <= copied


def test_the_image_runs_as_the_user_of_the_pods() -> None:
    job: dict[str, Any] = next(
        one for one in yaml.safe_load_all((DEPLOY / "kuberay" / "rayjob.yaml").read_text()) if one["kind"] == "RayJob"
    )
    context = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["securityContext"]
    (user,) = [rest for word, rest in instructions(DOCKERFILE) if word == "USER"]
    assert user == f"{context['runAsUser']}:{context['runAsGroup']}"


def test_healthcheck_asks_the_address_of_rays_agent() -> None:
    ray = importlib.util.find_spec("ray")  # only its sources are read, because importing its dashboard takes seconds
    assert ray is not None and ray.origin is not None
    folder = Path(ray.origin).parent
    ((port, path),) = re.findall(r"http://127\.0\.0\.1:(\d+)(/\S+)'", DOCKERFILE)
    assert f"DEFAULT_DASHBOARD_AGENT_LISTEN_PORT = {port}\n" in (folder / "_private" / "ray_constants.py").read_text()
    assert f'@routes.get("{path}")' in (folder / "dashboard" / "modules" / "reporter" / "healthz_agent.py").read_text()


# -------------------------------------------------------------------------------------------------------------- other files


def test_package_ships_the_deploy_files() -> None:
    names = {entry.name for entry in files("vescale_ray.deploy").iterdir()}
    assert {"kuberay", "grafana", "prometheus.yml", "alerts.yml", "Dockerfile"} <= names


def test_prometheus_reads_the_discovery_files_of_runs_and_ray() -> None:
    prometheus = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    assert set(prometheus) == {"global", "rule_files", "scrape_configs"}
    assert all((DEPLOY / file).is_file() for file in prometheus["rule_files"])
    jobs = {one["job_name"]: one for one in prometheus["scrape_configs"]}
    assert jobs["vescale-ray"]["metrics_path"] == "/metrics"
    (file,) = jobs["vescale-ray"]["file_sd_configs"][0]["files"]
    # The file that a run without any settings writes, if it is started in the repository.
    assert (DEPLOY / file).resolve() == ROOT / load_config().run_folder / DISCOVERY
    example = load_config(ROOT / "vescale_ray" / "configs" / "cluster.yaml")
    assert f'targets: ["HOST:{example.metrics.port}"]' in (DEPLOY / "prometheus.yml").read_text()
    assert jobs["ray"]["file_sd_configs"][0]["files"] == ["/tmp/ray/prom_metrics_service_discovery.json"]


def test_promtool_accepts_the_configuration_and_discovery_file(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    (tmp_path / "deploy").mkdir()
    for name in ("prometheus.yml", "alerts.yml"):
        shutil.copy(DEPLOY / name, tmp_path / "deploy" / name)
    run = RunFolder(tmp_path / "runs" / "demo").create()

    def check() -> subprocess.CompletedProcess[str]:
        command = ["promtool", "check", "config", "deploy/prometheus.yml"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)

    def missing(done: subprocess.CompletedProcess[str]) -> bool:
        return any(DISCOVERY in line and "does not exist" in line for line in done.stderr.splitlines() + done.stdout.splitlines())

    before = check()
    assert before.returncode == 0 and missing(before), before.stdout + before.stderr
    run.write_discovery("http://[::1]:1234")
    during = check()
    assert during.returncode == 0 and "SUCCESS" in during.stdout and not missing(during), during.stdout + during.stderr
    (run.path / DISCOVERY).write_text('[{"targets": "127.0.0.1:1"}]')
    assert check().returncode != 0, "the file itself is looked at"
