"""Rendered manifests for the tests, their parts by name, and their schemas."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from referencing import Registry, Resource

from vescale_ray.config import load_config
from vescale_ray.k8s import Options, documents

ROOT = Path(__file__).resolve().parents[2]
KUBERAY = ROOT / "deploy" / "kuberay"
CLUSTER = ROOT / "vescale_ray" / "configs" / "cluster.yaml"
_COMMANDS = re.findall(r"^\t\$\(RENDER\) (.*) > deploy/kuberay/(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
RECIPE = {name: words for words, name in _COMMANDS}
"""File and options of each command of `make manifests`."""
CONFIG = load_config(CLUSTER)
Documents = list[dict[str, Any]]


def committed(name: str) -> Documents:
    return list(yaml.load_all((KUBERAY / name).read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def made(kind: str, changes: Sequence[str] = (), *overlays: str, **given: Any) -> Documents:
    """Return the documents of the example with ``changes``. Overlays get the options that they need."""
    needed: dict[str, dict[str, Any]] = {"kueue": {"queue": "q"}, "gcs-ft": {"redis": "redis.db:6380"}}
    options = {key: value for one in overlays for key, value in needed.get(one, {}).items()}
    run = load_config(CLUSTER, changes) if changes else CONFIG
    return documents(run, Options(overlays=frozenset(overlays), **options, **given), kind)


def the(bundle: Sequence[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    return next(one for one in bundle if one["kind"] == kind and one["metadata"]["name"].endswith(name))


def spec_of(bundle: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return the(bundle, "RayJob")["spec"]


def cluster_of(bundle: Sequence[dict[str, Any]]) -> dict[str, Any]:
    ray = next(one for one in bundle if one["kind"] in ("RayJob", "RayCluster"))
    return ray["spec"].get("rayClusterSpec", ray["spec"])


def templates_of(bundle: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the pod templates of the head, of each worker group by its name, and of the submitter."""
    ray = next(one for one in bundle if one["kind"] in ("RayJob", "RayCluster"))
    cluster = cluster_of(bundle)
    found = {"head": cluster["headGroupSpec"]["template"], **{one["groupName"]: one["template"] for one in cluster["workerGroupSpecs"]}}
    return found | ({"submitter": ray["spec"]["submitterPodTemplate"]} if ray["kind"] == "RayJob" else {})


def pods_of(bundle: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {role: template["spec"] for role, template in templates_of(bundle).items()}


def env_of(bundle: Sequence[dict[str, Any]], role: str) -> dict[str, str]:
    return {one["name"]: one["value"] for one in pods_of(bundle)[role]["containers"][0]["env"]}


VARIANTS: dict[str, Callable[[], Documents]] = {
    **{name: functools.partial(committed, name) for name in RECIPE},
    **{
        f"{kind} {'+'.join(overlays)}": functools.partial(made, kind, (), *overlays)
        for kind in ("job", "cluster")
        for count in range(4)
        for overlays in itertools.combinations(("gcs-ft", "kueue", "spot"), count)
    },
    "cpu": functools.partial(made, "job", ["train.device=cpu", "ray.gpus_per_worker=0", "ray.cpus_per_worker=0.5"], "spot"),
    "store": functools.partial(made, "job", ["checkpoint.dir=s3://runs/x?endpoint=http://minio:9000"], env_secret="keys", pull_secret="r"),
    "charts": functools.partial(made, "cluster", (), prometheus="http://p:9090", grafana="https://g/?a={b}#'c'"),
    "words": functools.partial(made, "job", (), "kueue", name="on", claim="1e3", namespace="null", monitoring="0x10", spot_label="a=yes"),
    "others": functools.partial(made, "job", ["metrics.port=9999"], service_account="y", priority_class="no", drain_s=7, mount="/mnt"),
    "default": functools.partial(made, "setup", (), namespace="default", storage_class="1.5"),
    "label": functools.partial(made, "monitor", (), monitor_label="1=2", runbooks="https://wiki/r.md?x='{\\"),
}
RUNS = [name for name in VARIANTS if not name.startswith(("setup", "monitor", "default", "label"))]


@functools.cache
def schema() -> jsonschema.protocols.Validator:
    """Return the validator of Kubernetes' own types and of the custom resources that the templates emit."""
    core = json.loads((files("kubernetes_validate") / "kubernetes-json-schema/v1.37.0-local-strict/_definitions.json").read_text())
    ours = yaml.safe_load((ROOT / "tests" / "deploy" / "kuberay.schema.yaml").read_text())
    registry: Registry[Any] = Resource.from_contents(core) @ (Resource.from_contents(ours) @ Registry())
    return jsonschema.Draft202012Validator(ours, registry=registry)


def schema_problems(bundle: Documents) -> list[str]:
    found = []
    for document in bundle:
        api, kind = document["apiVersion"], document["kind"]
        if api.startswith(("ray.io/", "monitoring.coreos.com/")):
            errors = schema().iter_errors(document)
        else:
            group = api.partition(".k8s.io/")[0] if ".k8s.io/" in api else api.partition("/")[0] if "/" in api else "core"
            name = f"io.k8s.api.{group}.{api.rpartition('/')[2]}.{kind}"
            errors = schema().evolve(schema={"$ref": f"https://kubernetes.io/api/_definitions.json#/$defs/{name}"}).iter_errors(document)
        found += [f"{kind} {'.'.join(map(str, error.path))}: {error.message}" for error in errors]
    return found
