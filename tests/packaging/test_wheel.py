"""The wheel's contents, and what an installation of it needs."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.packaging.sources import MAPPED, PRODUCT, ROOT, module_of

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built offline from a copy of the sources, because setuptools writes build/ and *.egg-info next to them."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    listing = ["pyproject.toml", "README.md", "LICENSE", "vescale_ray", *MAPPED]
    source.mkdir()
    subprocess.run(["cp", "-r", *(str(ROOT / name) for name in listing), str(source)], check=True, timeout=60)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(work), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (path,) = work.glob("*.whl")
    return path


def test_wheel_lists_exactly_the_packages_of_the_tree() -> None:
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == {module_of(path) for path in PRODUCT if path.name == "__init__.py"}


def test_wheel_holds_exactly_the_modules_under_vescale_ray(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    modules = {module_of(path) for path in PRODUCT}
    assert {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in names if name.endswith(".py")} == modules
    assert {name.split("/")[0].split("-")[0] for name in names} == {"vescale_ray"}, "a user's own checkpoint.py must not collide"


def test_wheel_holds_data_files_licence_and_entry_point(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    assert {"vescale_ray/py.typed", "vescale_ray/configs/demo.yaml", "vescale_ray/configs/cluster.yaml"} <= names
    templates = {path.relative_to(ROOT).as_posix() for path in (ROOT / "vescale_ray" / "k8s" / "templates").iterdir()}
    assert templates and templates <= names
    assert {f"vescale_ray/deploy/{name}" for name in ("kuberay/rayjob.yaml", "kuberay/setup.yaml", "prometheus.yml", "Dockerfile")} <= names
    info = next(name.split("/")[0] for name in names if ".dist-info/" in name)
    assert "vescale-ray = vescale_ray.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
    metadata = archive.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata and f"{info}/licenses/LICENSE" in names
    assert "Requires-Python: <3.14,>=3.11" in metadata


def test_wheel_works_alone_with_a_single_package_path(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import sys, importlib.resources as r, importlib.util as u, vescale_ray, vescale_ray.config\n"
        "assert len(list(vescale_ray.__path__)) == 1, list(vescale_ray.__path__)\n"
        "for name in 'checkpoint', 'workers', 'controller.http.metrics': assert 'site' in u.find_spec('vescale_ray.' + name).origin\n"
        "assert (r.files('vescale_ray.deploy') / 'kuberay' / 'rayjob.yaml').is_file()\n"
        "from vescale_ray.cli.demo import demo_config; print(demo_config().train.steps)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and int(done.stdout) > 0, done.stderr


def test_constraints_pin_every_requirement_that_make_installs() -> None:
    pins = {line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    wanted = [
        *PROJECT["project"]["dependencies"],
        *(one for extra in ("dev", "plots") for one in PROJECT["project"]["optional-dependencies"][extra]),
    ]
    names = {requirement.split("[")[0].split(">")[0].split("=")[0].split("<")[0].lower().replace("_", "-") for requirement in wanted}
    assert names <= pins, names - pins
    assert "torch==2.13.0\n" in (ROOT / "constraints.txt").read_text(), "no local version: plain pip must find it"


def test_ci_installs_promtool_and_calls_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert lines[-1] == "exec make test" and lines[:2] == ["set -euo pipefail", 'cd "$(dirname "$0")/.."']
    assert "promtool" in lines[2] and len(lines) == 5, "besides, it installs what some tests are skipped without"
