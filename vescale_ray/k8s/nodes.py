"""Which nodes pods ask for, which they keep away from, and which taints they bear: a head must not be on one that vanishes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Tree = Mapping[str, Any]
GPU = "nvidia.com/gpu"
SPOT = {
    "karpenter.sh/capacity-type": "spot",
    "eks.amazonaws.com/capacityType": "SPOT",
    "cloud.google.com/gke-spot": "true",
    "cloud.google.com/gke-preemptible": "true",
    "kubernetes.azure.com/scalesetpriority": "spot",
}
"""What providers label pre-emptible nodes with."""


def node_problems(cluster: Tree, templates: Sequence[tuple[str, Tree]]) -> Iterator[str]:
    """One sentence for each group whose pods find no node, or one that they must not be on.

    Args:
        cluster: a RayCluster's spec.
        templates: the name of each of its groups and its pod's spec, the head first.
    """
    (where, head), *workers = templates
    for key, value in _chosen(head):
        if SPOT.get(key) == value:
            yield f"{where}: it asks for a pre-emptible node ({key}={value}), and a run does not survive the loss of its head"
    yield from _stays(cluster, templates)
    for where, pod in workers:
        yield from _tainted(where, pod)
        containers = pod.get("containers") or [{}]
        if GPU in ((containers[0].get("resources") or {}).get("limits") or {}) and not _tolerates(pod, GPU):
            yield f"{where}: asks for {GPU} and does not tolerate the taint of that name, which nodes with GPUs have"


def may_vanish(pod: Tree) -> bool:
    """Whether it asks for a pre-emptible node, of a provider that we know."""
    return any(SPOT.get(key) == value for key, value in _chosen(pod))


def _chosen(pod: Tree) -> Iterator[tuple[str, str]]:
    """Labels that a node must have."""
    yield from (pod.get("nodeSelector") or {}).items()
    for one in expressions(pod):
        if one.get("operator") == "In":
            yield from ((one["key"], value) for value in one.get("values") or ())


def _stays(cluster: Tree, templates: Sequence[tuple[str, Tree]]) -> Iterator[str]:
    """Where one group asks for pre-emptible nodes, the pods that have to stay must not find room there."""
    for label in sorted({one for _, pod in templates[1:] for one in (pod.get("nodeSelector") or {}).items() if SPOT.get(one[0]) == one[1]}):
        for (where, pod), group in zip(templates, (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]), strict=True):
            stays = pod.get("nodeSelector") or label in _shunned(pod) or (where != "headGroupSpec" and not group.get("minReplicas"))
            if not stays:
                yield f"{where}: nothing keeps it from the pre-emptible nodes ({'='.join(label)}) that another group asks for"


def _shunned(pod: Tree) -> set[tuple[str, str]]:
    """Labels that a node must not have."""
    return {(one["key"], value) for one in expressions(pod) if one.get("operator") == "NotIn" for value in one.get("values") or ()}


def expressions(pod: Tree) -> Iterator[Tree]:
    """What its nodes must be like; wishes (preferred ..) left out."""
    required = ((pod.get("affinity") or {}).get("nodeAffinity") or {}).get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    for term in required.get("nodeSelectorTerms") or ():
        yield from term.get("matchExpressions") or ()


def _tolerates(pod: Tree, key: str, value: str | None = None) -> bool:
    """Whether its tolerations cover the taint ``key[=value]:NoSchedule``."""
    return any(
        one.get("key", key) == key
        and one.get("effect", "NoSchedule") == "NoSchedule"
        and (one.get("operator") == "Exists" or (value is not None and one.get("value") == value))
        for one in pod.get("tolerations") or ()
    )


def _tainted(where: str, pod: Tree) -> Iterator[str]:
    """Nodes are labelled and tainted with the same words: what asks for the one has to bear the other."""
    for key, value in (pod.get("nodeSelector") or {}).items():
        others = [one["value"] for one in pod.get("tolerations") or () if one.get("key") == key and one.get("value", value) != value]
        if others:
            yield f"{where}: its nodeSelector asks for {key}={value}, its toleration is for {key}={others[0]}"
        elif SPOT.get(key) == value and not _tolerates(pod, key, value):
            yield f"{where}: asks for nodes with {key}={value} and does not tolerate the taint of that name, which such nodes may have"
