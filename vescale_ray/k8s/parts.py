"""What an API server refuses of a document's parts, or would understand otherwise than it was meant; its JSON schemas let it pass."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vescale_ray.k8s.names import LABEL, is_label_key
from vescale_ray.k8s.values import size_of

Tree = Mapping[str, Any]
LEAST_MEMORY = 64 * 2**20
LEAST_STORAGE = 2**30
LEAST_TOKEN_S = 600
LEAST_PRIORITY, MOST_PRIORITY = -10, 1_000_000_000
"""Above are Kubernetes' own."""
_NOT_SOURCES = {"name"}
_FIELDS = re.compile(
    r"metadata\.(name|namespace|uid)|metadata\.(labels|annotations)\['[^']+'\]|spec\.(nodeName|serviceAccountName)|status\.(hostIPs?|podIPs?)"
)


def part_problems(document: Tree) -> Iterator[str]:
    """One sentence for each part of the document, wherever in it."""
    what = f"{document['kind']} {document['metadata']['name']}"
    for path, above, part in _mappings(document, "", ""):
        check = _CHECKS.get(above)
        if check is not None:
            yield from (f"{what}: {path}: {problem}" for problem in check(part))
    spec = document.get("spec") or {}
    if document["kind"] == "PriorityClass":
        if int(document.get("value") or 0) > MOST_PRIORITY:
            yield f"{what}: the value {document['value']} is more than {MOST_PRIORITY:,}, the most that is not Kubernetes' own"
        if int(document.get("value") or 0) < LEAST_PRIORITY:
            yield f"{what}: the value {document['value']} is below {LEAST_PRIORITY}: no cluster autoscaler makes room for such pods"
        if document.get("globalDefault"):
            yield f"{what}: globalDefault would give it to every pod of the cluster"
    if document["kind"] == "PersistentVolumeClaim":
        storage = (spec.get("resources") or {}).get("requests", {}).get("storage")
        if not storage:
            yield f"{what}: it asks for no storage"
        elif (size_of(storage) or LEAST_STORAGE) < LEAST_STORAGE:
            yield f"{what}: it asks for {storage}, too little for a run; give a unit, such as 1Ti"
        if spec.get("volumeMode", "Filesystem") != "Filesystem":
            yield f"{what}: volumeMode {spec['volumeMode']}: pods mount it as a file system"


def _toleration(one: Tree) -> Iterator[str]:
    if not one.get("key"):
        yield "without a key every taint is tolerated, that of a node which is not ready, too"
    if one.get("operator") == "Exists" and one.get("value"):
        yield f"operator Exists takes no value ({one['value']}): leave it out, or write Equal"
    if "tolerationSeconds" in one and one.get("effect") != "NoExecute":
        yield "tolerationSeconds needs the effect NoExecute"


def _expression(one: Tree) -> Iterator[str]:
    operator, values = one.get("operator"), one.get("values")
    if not is_label_key(str(one.get("key", ""))):
        yield f"{one.get('key')!r} is no key of a label"
    if operator in ("In", "NotIn", "Gt", "Lt") and not values:
        yield f"operator {operator} needs values"
    if operator in ("Exists", "DoesNotExist") and values:
        yield f"operator {operator} takes no values"


def _nodes_or_pods(one: Tree) -> Iterator[str]:
    """The key is that of a node's affinity, or of a pod's."""
    if "topologyKey" not in one and "podAffinityTerm" not in one:
        yield from _nodes(one)


def _nodes(one: Tree) -> Iterator[str]:
    terms = one.get("nodeSelectorTerms")
    if not terms or not all(term.get("matchExpressions") or term.get("matchFields") for term in terms):
        yield "a term without expressions is for no node at all"


def _spread(one: Tree) -> Iterator[str]:
    if not is_label_key(str(one.get("topologyKey", ""))):
        yield f"topologyKey {one.get('topologyKey')!r} is no key of a label"
    if one.get("maxSkew", 1) < 1:
        yield f"maxSkew is {one['maxSkew']}: it must be 1 or more"


def _volume(one: Tree) -> Iterator[str]:
    sources = sorted(str(key) for key in one.keys() - _NOT_SOURCES)
    if len(sources) != 1:
        yield f"the volume {one.get('name')} has {' and '.join(sources) or 'nothing'} as its source: it must be one"
    yield from _label(one)


def _label(one: Tree) -> Iterator[str]:
    if "name" in one and not (LABEL.fullmatch(str(one["name"])) and len(str(one["name"])) <= 63):
        yield f"the name {one['name']} takes lower-case letters, digits and '-', 63 at most"


def _variable(one: Tree) -> Iterator[str]:
    name = str(one.get("name", ""))
    if not name or re.search(r"[=\s]", name):
        yield f"{name!r} is no variable's name"
    if not {"value", "valueFrom"} & one.keys():
        yield f"the variable {name} has no value"
    if one.get("value") and "valueFrom" in one:
        yield f"the variable {name} has value and valueFrom: give one of them"


def _field(one: Tree) -> Iterator[str]:
    if not _FIELDS.fullmatch(str(one.get("fieldPath"))):
        yield f"fieldPath {one.get('fieldPath')} is none that a pod can be told"


def _block(one: Tree) -> Iterator[str]:
    for text in (one.get("cidr"), *(one.get("except") or ())):
        try:
            good = "/" in str(text) and ipaddress.ip_network(str(text)) is not None
        except ValueError:
            good = False
        if not good:
            yield f"{text} is no range of addresses, such as 10.0.0.0/8"


def _token(one: Tree) -> Iterator[str]:
    if one.get("expirationSeconds", LEAST_TOKEN_S) < LEAST_TOKEN_S:
        yield f"expirationSeconds is {one['expirationSeconds']}: a token lives {LEAST_TOKEN_S} s at least"


def _empty(one: Tree) -> Iterator[str]:
    size = size_of(one.get("sizeLimit"))
    if size == 0:
        yield "sizeLimit is 0, which Kubernetes takes as none"
    elif size is not None and size < LEAST_MEMORY:
        yield f"sizeLimit is {one['sizeLimit']}, {size:g} bytes: a pod that writes more is evicted"


def _limits(one: Tree) -> Iterator[str]:
    memory = size_of(one.get("memory"))
    if memory is not None and memory < LEAST_MEMORY:
        yield f"memory is {one['memory']}, {memory:g} bytes: nothing starts in that; give a unit, such as 16Gi"


def _identity(one: Tree) -> Iterator[str]:
    for field in ("runAsUser", "runAsGroup", "fsGroup"):
        if isinstance(one.get(field), int) and one[field] < 0:
            yield f"{field} is {one[field]}: it must be 0 or more"


def _port(one: Tree) -> Iterator[str]:
    if isinstance(one.get("port"), str) and one["port"].isdigit():
        yield f"port {one['port']!r} is a text: write the number, without quotes"


def _resources(one: Tree) -> Iterator[str]:
    requests, limits = (one.get(side) or {} for side in ("requests", "limits"))
    for name in sorted(requests.keys() & limits.keys()):
        wanted, most = size_of(requests[name]), size_of(limits[name])
        if wanted is not None and most is not None and wanted > most:
            yield f"it requests {requests[name]} of {name}, more than its limit of {limits[name]}"


def _mount(one: Tree) -> Iterator[str]:
    path, sub = str(one.get("mountPath", "")), str(one.get("subPath", ""))
    if not path.startswith("/") or ":" in path:
        yield f"mountPath {path} is no absolute path without ':'"
    if sub.startswith("/") or ".." in sub.split("/"):
        yield f"subPath {sub} leaves the volume"


_CHECKS: Mapping[str, Callable[[Tree], Iterator[str]]] = {
    "tolerations": _toleration,
    "matchExpressions": _expression,
    "requiredDuringSchedulingIgnoredDuringExecution": _nodes_or_pods,
    "topologySpreadConstraints": _spread,
    "volumes": _volume,
    "containers": _label,
    "initContainers": _label,
    "env": _variable,
    "fieldRef": _field,
    "ipBlock": _block,
    "serviceAccountToken": _token,
    "emptyDir": _empty,
    "limits": _limits,
    "ports": _port,
    "resources": _resources,
    "securityContext": _identity,
    "volumeMounts": _mount,
}
"""By the key that a mapping, or a list of mappings, stands under."""


def _mappings(tree: Any, path: str, above: str) -> Iterator[tuple[str, str, Tree]]:
    if isinstance(tree, Mapping):
        if above:
            yield path, above, tree
        for key, value in tree.items():
            if key not in ("labels", "annotations", "matchLabels", "data"):
                yield from _mappings(value, f"{path}.{key}".removeprefix("."), str(key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _mappings(value, f"{path}[{index}]", above)
