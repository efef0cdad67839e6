"""Which documents a run's manifests hold, and in which namespace. Of a kind that nobody here knows, no other check would find anything."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Tree = Mapping[str, Any]
KINDS: Mapping[str, str] = {
    "Namespace": "v1",
    "PriorityClass": "scheduling.k8s.io/v1",
    "ServiceAccount": "v1",
    "ConfigMap": "v1",
    "PersistentVolumeClaim": "v1",
    "PodDisruptionBudget": "policy/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "RayJob": "ray.io/v1",
    "RayCluster": "ray.io/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
}
"""By kind, the apiVersion. No Role and no binding (the operator makes what the autoscaler needs), no Service, and no Secret: those are
made by hand, so that no password is ever in a manifest."""
NEEDED: Mapping[str, tuple[str, ...]] = {"PodDisruptionBudget": ("selector",), "NetworkPolicy": ("podSelector",)}
OF_THE_CLUSTER = frozenset({"Namespace", "PriorityClass"})


def shape_problems(document: Any) -> Iterator[str]:
    """One sentence for what everything else relies on: kind, name, and what a kind can't be without."""
    if not isinstance(document, Mapping) or not isinstance(document.get("kind"), str):
        yield "a document has no kind"
        return
    kind, metadata = str(document["kind"]), document.get("metadata")
    if not isinstance(metadata, Mapping) or not metadata.get("name") or not isinstance(metadata["name"], str):
        yield f"a {kind} has no metadata.name"
        return
    yield from (f"{kind} {metadata['name']}: {path} is empty: leave it out, or write what it is to be" for path in _empty(document, ""))
    for field in NEEDED.get(kind, ()):
        spec = document.get("spec")
        if not isinstance(spec, Mapping) or not isinstance(spec.get(field), Mapping):
            yield f"{kind} {metadata['name']}: it has no spec.{field}, and would be for all pods of the namespace or for none"


def _empty(tree: Any, path: str) -> Iterator[str]:
    """Where nothing stands: `key:` or `-` without a value."""
    if tree is None:
        yield path
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _empty(value, f"{path}.{key}".removeprefix("."))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _empty(value, f"{path}[{index}]")


def kind_problems(document: Tree) -> Iterator[str]:
    """One sentence for a document that is of no kind of ours, of another version of it, or in no namespace."""
    kind, metadata = str(document.get("kind")), document["metadata"]
    what = f"{kind} {metadata['name']}"
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1, cutoff=0.7)
        remedy = f"did you mean {near[0]}?" if near else "a run's manifests hold none: it would give rights or open ways"
        yield f"{what}: {remedy}"
    elif document.get("apiVersion") != KINDS[kind]:
        yield f"{what}: its apiVersion is {document.get('apiVersion')}: it must be {KINDS[kind]}"
    elif kind not in OF_THE_CLUSTER and not metadata.get("namespace"):
        yield f"{what}: it has no namespace, and would be made in whichever is the default, away from the others"


def namespace_problems(documents: Sequence[Tree]) -> Iterator[str]:
    """One sentence for documents that are not all in one namespace, or not in the one that is made among them."""
    spaces = {str(one["metadata"]["namespace"]) for one in documents if "namespace" in one["metadata"]}
    if len(spaces) > 1:
        yield f"the documents are in different namespaces: {', '.join(sorted(spaces))}"
    for name in sorted({str(one["metadata"]["name"]) for one in documents if one["kind"] == "Namespace"}):
        if spaces and name not in spaces:
            yield f"Namespace {name}: the documents are in {', '.join(sorted(spaces))}, which nothing makes"
