"""The manifests that are committed under deploy/kuberay: those of configs/cluster.yaml with default options."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import as_file, files

from vescale_ray.config import RunConfig, load_config
from vescale_ray.k8s.options import Options
from vescale_ray.k8s.render import render

FILES: dict[str, tuple[str, Options]] = {
    "setup.yaml": ("setup", Options()),
    "monitor.yaml": ("monitor", Options()),
    "rayjob.yaml": ("job", Options()),
    "rayjob-spot.yaml": ("job", Options(overlays=frozenset({"spot"}))),
    "rayjob-kueue.yaml": ("job", Options(overlays=frozenset({"kueue"}), queue="training")),
    "raycluster.yaml": ("cluster", Options()),
    "raycluster-gcs-ft.yaml": ("cluster", Options(overlays=frozenset({"gcs-ft"}), redis="redis:6379")),
}
"""By name: kind and options."""


def example() -> RunConfig:
    """The run that the committed manifests train."""
    with as_file(files("vescale_ray.configs") / "cluster.yaml") as path:
        return load_config(path)


def rendered() -> Iterator[tuple[str, str]]:
    """Name and text of each committed manifest."""
    config = example()
    for name, (kind, options) in FILES.items():
        yield name, render(config, options, kind)
