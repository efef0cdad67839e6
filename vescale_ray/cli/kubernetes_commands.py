"""``vescale-ray k8s ..``: manifests for Kubernetes, on standard output. Contacts no cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from vescale_ray.cli.common import OK, CommandGroup


@click.group(cls=CommandGroup)
def k8s() -> None:
    """Manifests of a run for Kubernetes with KubeRay."""


def _of(name: str) -> Any:
    """Return the default of a field of Options; the import is late, so that other commands' ``--help`` is fast."""
    from vescale_ray.k8s.options import Options

    return getattr(Options, name)


_Count = click.IntRange(min=1)


@k8s.command("render")
@click.argument("file", metavar="RUN.yaml")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--kind",
    type=click.Choice(["job", "cluster", "setup", "monitor"]),
    default="job",
    show_default=True,
    help="job: the run with its own cluster; cluster: a lasting cluster; setup: a namespace's objects; monitor: metrics and alerts.",
)
@click.option(
    "--overlay", "overlays", multiple=True, metavar="spot|kueue|gcs-ft", help="Variant of job or cluster; may be given several times."
)
@click.option("--image", default=lambda: _of("image"), help="Image of every pod, with a fixed tag. Default: a placeholder.")
@click.option("--pull-secret", metavar="NAME", help="An existing Secret with the credentials of a private registry.")
@click.option("--env-secret", metavar="NAME", help="An existing Secret with environment variables of head and workers: a store's keys.")
@click.option("--name", help="Name of the objects. Default: run.name.")
@click.option("--namespace", default="vescale-ray", show_default=True)
@click.option("--claim", default="training-runs", show_default=True, help="Volume claim that all pods mount.")
@click.option("--mount", default="/mnt/shared", show_default=True, metavar="FOLDER", help="Its mount point; run.dir must lie there.")
@click.option("--gpus", type=click.IntRange(min=0), help="GPUs of a worker pod. Default: ray.gpus_per_worker, rounded up.")
@click.option("--cpus", type=_Count, help="CPUs of a worker pod. Default: its workers' requests, and 2 more with GPUs.")
@click.option("--memory", default="64Gi", show_default=True, metavar="SIZE", help="Memory of a worker pod.")
@click.option("--shm", default="16Gi", show_default=True, metavar="SIZE", help="Size of its /dev/shm, a part of --memory.")
@click.option("--scratch", default="20Gi", show_default=True, metavar="SIZE", help="Size of every pod's /tmp.")
@click.option("--head-cpus", type=_Count, default=4, show_default=True)
@click.option("--head-memory", default="16Gi", show_default=True, metavar="SIZE")
@click.option("--queue", help="Kueue's local queue, with --overlay kueue.")
@click.option("--redis", metavar="HOST:PORT", help="Redis of Ray's state, for --overlay gcs-ft; Secret NAME-redis has its password.")
@click.option("--drain-s", type=_Count, default=100, show_default=True, help="Seconds to save and move state before a pod ends.")
@click.option("--service-account", help="An existing account for all pods. Default: two new ones without rights.")
@click.option("--priority-class", help="An existing class for all pods. Default: the two of --kind setup.")
@click.option(
    "--spot-label",
    default="karpenter.sh/capacity-type=spot",
    show_default=True,
    metavar="KEY=VALUE",
    help="The provider's label of pre-emptible nodes.",
)
@click.option("--deadline-s", type=_Count, default=2592000, show_default=True, help="Seconds after which the job is ended.")
@click.option("--monitoring", default="monitoring", show_default=True, help="Namespace of Prometheus.")
@click.option("--monitor-label", default="release=prometheus", show_default=True, metavar="KEY=VALUE", help="Label of monitoring objects.")
@click.option("--prometheus", metavar="URL", help="Prometheus for the charts in Ray's dashboard.")
@click.option("--grafana", metavar="URL", help="Grafana for the charts in Ray's dashboard.")
@click.option("--runbooks", default=lambda: _of("runbooks"), metavar="URL", help="Address of docs/how-to/runbooks.md.")
@click.option("--volume-size", default="1Ti", show_default=True, metavar="SIZE", help="Size of the claim in --kind setup.")
@click.option("--storage-class", help="Storage class of the claim in --kind setup. Default: the cluster's.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: a List, which kubectl also accepts.")
def render(file: str, overrides: tuple[str, ...], kind: str, overlays: tuple[str, ...], as_json: bool, **given: Any) -> int:
    """Write the manifest of the run that RUN.yaml describes, after checking options and configuration.

    \b
    Example: vescale-ray k8s render run.yaml --image registry.example.com/train:3 --overlay spot | kubectl apply -f -
    """
    from vescale_ray.config import ConfigError, load_config
    from vescale_ray.k8s import Options, documents, render

    if "=" in file and not Path(file).exists():
        raise ConfigError(f"{file}: give the run's YAML file first, then the overrides")
    config, options = load_config(file, overrides), Options(overlays=frozenset(overlays), **given)
    text = render(config, options, kind)
    if as_json:
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": documents(config, options, kind)})
    click.echo(text.rstrip("\n"))
    return OK
