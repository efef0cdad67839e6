"""What Kubernetes takes as names, label keys and label values; its JSON schemas say only that they are texts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

KNOWN = frozenset(
    {
        "app.kubernetes.io/component",
        "cloud.google.com/gke-preemptible",
        "cloud.google.com/gke-spot",
        "cluster-autoscaler.kubernetes.io/safe-to-evict",
        "eks.amazonaws.com/capacityType",
        "grafana_dashboard",
        "karpenter.sh/capacity-type",
        "karpenter.sh/do-not-disrupt",
        "kubernetes.azure.com/scalesetpriority",
        "kubernetes.io/hostname",
        "kubernetes.io/metadata.name",
        "kueue.x-k8s.io/elastic-job",
        "kueue.x-k8s.io/priority-class",
        "kueue.x-k8s.io/queue-name",
        "nvidia.com/gpu",
        "topology.kubernetes.io/region",
        "topology.kubernetes.io/zone",
        "vescale-ray/role",
        "vescale-ray/run",
        *(f"pod-security.kubernetes.io/{mode}{more}" for mode in ("audit", "enforce", "warn") for more in ("", "-version")),
    }
)
"""Keys that somebody reads: one that is almost one of them is none, and is read by nobody."""
ALMOST = 0.9
_PART = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
LABEL = re.compile(_PART)
"""RFC 1123: a namespace's name."""
SUBDOMAIN = re.compile(rf"{_PART}(\.{_PART})*")
"""RFC 1123: most other names."""
_WORD = re.compile(r"[A-Za-z0-9]([-\w.]*[A-Za-z0-9])?", re.ASCII)


def is_namespace(text: str) -> bool:
    return bool(LABEL.fullmatch(text)) and len(text) <= 63


def is_name(text: str) -> bool:
    return bool(SUBDOMAIN.fullmatch(text)) and len(text) <= 253


def is_label_value(text: str) -> bool:
    return text == "" or bool(_WORD.fullmatch(text)) and len(text) <= 63


def is_label_key(text: str) -> bool:
    prefix, slash, word = text.rpartition("/")
    return (is_name(prefix) if slash else True) and word != "" and is_label_value(word)


def is_label(text: str) -> bool:
    """Of the form ``KEY=VALUE``, the value not empty."""
    key, equals, value = text.partition("=")
    return bool(equals and value) and is_label_key(key) and is_label_value(value)


def name_problems(document: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for each name or label of the document, wherever in it, that an API server would refuse."""
    metadata, what = document["metadata"], f"{document['kind']} {document['metadata']['name']}"
    if not is_name(str(metadata["name"])):
        yield f"{what}: a name takes lower-case letters, digits, '-' and '.'"
    if "namespace" in metadata and not is_namespace(str(metadata["namespace"])):
        yield f"{what}: the namespace {metadata['namespace']} takes lower-case letters, digits and '-', 63 at most"
    for key in sorted(set(_keys(document)) - KNOWN):
        near = difflib.get_close_matches(key, KNOWN, n=1, cutoff=ALMOST)
        if near:
            yield f"{what}: {key} is read by nobody: did you mean {near[0]}?"
    for labels in _labels(document):
        for key, value in labels.items():
            if not is_label_key(str(key)):
                yield f"{what}: {key} is no key of a label"
            if not is_label_value(str(value)):
                yield f"{what}: the label {key} has the value {value}: it takes letters, digits, '-', '_' and '.', 63 at most"


def _keys(tree: Any) -> Iterator[str]:
    """Of labels, annotations, and of what selects or tolerates them."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            if name in ("labels", "annotations", "matchLabels", "nodeSelector", "requests", "limits") and isinstance(value, Mapping):
                yield from map(str, value)
            elif name in ("key", "topologyKey") and isinstance(value, str):
                yield value
            elif name != "data":
                yield from _keys(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _keys(value)


def _labels(tree: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if key in ("labels", "matchLabels", "nodeSelector") and isinstance(value, Mapping):
                yield value
            else:
                yield from _labels(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _labels(value)
