"""What is added to a pod that was good, and undoes something: fields, labels and containers that Kubernetes takes and a run is hurt by."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Tree = Mapping[str, Any]
FIELDS: Mapping[str, str] = {
    "activeDeadlineSeconds": "ends the pod so long after its start",
    "preemptionPolicy": "is the priority class's to say, and the pod is refused where the two differ",
    "priority": "is the priority class's to say, and the pod is refused where the two differ",
    "readinessGates": "keeps the pod from being ready until somebody else says so",
    "schedulerName": "leaves the pod to a scheduler that may not be there",
    "schedulingGates": "keeps the pod from any node until somebody lifts it",
}
MESHES: Mapping[str, str] = {"sidecar.istio.io/inject": "true", "linkerd.io/inject": "enabled"}
OPERATORS = "ray.io/"
SAFE_SYSCTLS = frozenset(
    {
        "kernel.shm_rmid_forced",
        "net.ipv4.ip_local_port_range",
        "net.ipv4.ip_local_reserved_ports",
        "net.ipv4.ip_unprivileged_port_start",
        "net.ipv4.ping_group_range",
        "net.ipv4.tcp_fin_timeout",
        "net.ipv4.tcp_keepalive_intvl",
        "net.ipv4.tcp_keepalive_probes",
        "net.ipv4.tcp_keepalive_time",
        "net.ipv4.tcp_rmem",
        "net.ipv4.tcp_syncookies",
        "net.ipv4.tcp_wmem",
    }
)
"""Those that Kubernetes lets a pod set."""
CONTAINED = ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")
"""Types of SELinux that the namespace's level lets in."""
NODE = "kubernetes.io/hostname"
_FETCHES = re.compile(r"(?<![\w./-])(?:apt|apt-get|conda|curl|git|pip3?|uv|wget)(?![\w./-])")


def addition_problems(templates: Sequence[tuple[str, Tree]]) -> Iterator[str]:
    """One sentence for each thing in a pod template that does harm by being there.

    Args:
        templates: the name of each group, and its pod template; the submitter's, too.
    """
    for where, template in templates:
        metadata, pod = template.get("metadata") or {}, template["spec"]
        for field in (field for field in FIELDS if field in pod):
            value = f" {pod[field]}" if isinstance(pod[field], int | str) else ""
            yield f"{where}: {field}{value} {FIELDS[field]}: leave it out"
        for key in metadata.get("labels") or ():
            if str(key).startswith(OPERATORS):
                yield f"{where}: the label {key} is the operator's to set: it finds its pods by it"
        for kind in ("labels", "annotations"):
            for key, value in MESHES.items():
                if (metadata.get(kind) or {}).get(key) == value:
                    yield f"{where}: {key}: a mesh's proxy would stand between the pods, whose ports it does not know: leave it out"
        contexts = [pod.get("securityContext") or {}, *(one.get("securityContext") or {} for one in pod.get("containers") or ())]
        for context in contexts:
            yield from (f"{where}: {problem}" for problem in _context(context))
        for one in pod.get("initContainers") or ():
            words = " ".join(map(str, [*(one.get("command") or ()), *(one.get("args") or ())]))
            if found := _FETCHES.search(words):
                yield f"{where}: {one.get('name')} calls {found[0]}: nothing is fetched or installed at run time; put it into the image"
        labels = (metadata.get("labels") or {}).items()
        near = ((pod.get("affinity") or {}).get("podAffinity") or {}).get("requiredDuringSchedulingIgnoredDuringExecution") or ()
        for term in near:
            if term.get("topologyKey") == NODE and ((term.get("labelSelector") or {}).get("matchLabels") or {}).items() <= labels:
                yield f"{where}: its podAffinity wants all such pods on one node"


def _context(context: Tree) -> Iterator[str]:
    for field in ("runAsGroup", "fsGroup"):
        if context.get(field) == 0:
            yield f"securityContext.{field} is 0, the group root"
    if 0 in (context.get("supplementalGroups") or ()):
        yield "securityContext.supplementalGroups has 0, the group root"
    if (context.get("seLinuxOptions") or {}).get("type", "") not in CONTAINED:
        yield f"seLinuxOptions.type {context['seLinuxOptions']['type']} is none that the namespace lets in"
    for one in context.get("sysctls") or ():
        if one.get("name") not in SAFE_SYSCTLS:
            yield f"sysctl {one.get('name')} is none that Kubernetes lets a pod set: the pod would be refused"
