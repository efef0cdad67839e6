"""What an API server refuses of values, which Kubernetes' JSON schemas call texts: sizes, words of a closed set, durations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?")
_POWERS = {"n": -3, "u": -2, "m": -1, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
_DURATION = re.compile(r"0|(?=\d)(\d+y)?(\d+w)?(\d+d)?(\d+h)?(\d+m)?(\d+s)?(\d+ms)?")
_WORDS: Mapping[str, tuple[str, ...]] = {
    "preemptionPolicy": ("Never", "PreemptLowerPriority"),
    "whenUnsatisfiable": ("DoNotSchedule", "ScheduleAnyway"),
    "imagePullPolicy": ("Always", "IfNotPresent", "Never"),
    "restartPolicy": ("Always", "OnFailure", "Never"),
    "protocol": ("TCP", "UDP", "SCTP"),
    "medium": ("", "Memory"),
    "accessModes": ("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"),
    "policyTypes": ("Ingress", "Egress"),
    "fsGroupChangePolicy": ("OnRootMismatch", "Always"),
    "unhealthyPodEvictionPolicy": ("IfHealthyBudget", "AlwaysAllow"),
}
_IN: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "tolerations": {"operator": ("Exists", "Equal"), "effect": ("NoSchedule", "PreferNoSchedule", "NoExecute")},
    "matchExpressions": {"operator": ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt")},
}
"""Words of entries of these lists."""
_SECRETS = re.compile(r"(?i)passw|secret|token|credential|(access|api|private)_?key")


def size_of(text: Any) -> float | None:
    """What a quantity comes to (``64Gi``, ``1500m``, ``1e9``); None: it is none."""
    match = _QUANTITY.fullmatch(str(text))
    if match is None:
        return None
    number, suffix = float(match[1]), match[2] or ""
    if suffix.endswith("i"):
        return number * 1024.0 ** _POWERS[suffix[0].replace("K", "k")]
    return number * 1000.0 ** _POWERS[suffix] if suffix in _POWERS else float(f"{match[1]}{suffix}")


def value_problems(document: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for each value of the document, wherever in it."""
    what = f"{document['kind']} {document['metadata']['name']}"
    durations = str(document.get("apiVersion")).startswith("monitoring.coreos.com/")
    for path, value in _leaves(document, ()):
        keys = ["", *(step for step in path if isinstance(step, str))]
        above, key = keys[-2:]
        shown = "".join(f".{step}" if isinstance(step, str) else f"[{step}]" for step in path).removeprefix(".")
        among = _IN.get(above, {}).get(key, _WORDS.get(key))
        if above in ("requests", "limits") or key == "sizeLimit":
            if size_of(value) is None or ("/" in key and not str(value).isdigit()):
                yield f"{what}: {shown} is {value}: it is no quantity, such as 4, 500m or 64Gi (of devices a whole number)"
        elif key in ("containerPort", "hostPort", "port") and isinstance(value, int) and not 1 <= value <= 65535:
            yield f"{what}: {shown} is {value}: a port is a number from 1 to 65535"
        elif among is not None and value not in among:
            yield f"{what}: {shown} is {value}: it must be one of {', '.join(filter(None, among))}"
        elif durations and key in ("for", "interval", "scrapeTimeout") and not _DURATION.fullmatch(str(value)):
            yield f"{what}: {shown} is {value}: Prometheus takes a duration, such as 10s or 5m"
    for names in _variables(document):
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"{what}: the variable {name} is there twice: the last one counts"


def plain_secrets(container: Mapping[str, Any]) -> list[str]:
    """Variables whose names say that they are secret, and whose values can be read in the manifest."""
    return [str(one["name"]) for one in container.get("env") or () if one.get("value") and is_secret(str(one["name"]))]


def is_secret(name: str) -> bool:
    """Whether a variable of this name holds one, most likely."""
    return bool(_SECRETS.search(name))


def _leaves(tree: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            if name not in ("labels", "annotations", "matchLabels", "data"):  # texts of anybody's
                yield from _leaves(value, (*path, str(name)))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _leaves(value, (*path, index))
    else:
        yield path, tree


def _variables(tree: Any) -> Iterator[Sequence[str]]:
    if isinstance(tree, Mapping):
        if isinstance(tree.get("env"), list):
            yield [str(one.get("name")) for one in tree["env"] if isinstance(one, Mapping)]
        for value in tree.values():
            yield from _variables(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _variables(value)
