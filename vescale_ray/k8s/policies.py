"""What the NetworkPolicies let through, against what has to: the pods of a run to each other, DNS, the operator, Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

Tree = Mapping[str, Any]
DASHBOARD_PORT, DNS_PORT = 8265, 53


class Pod(Protocol):
    """A pod template, with where it stands, and its ports by name."""

    where: str
    labels: Tree
    ports: Mapping[str, int]


def selects(selector: Tree, pod: Pod) -> bool:
    return (selector.get("matchLabels") or {}).items() <= pod.labels.items()


def policy_problems(documents: Sequence[Tree], pods: Sequence[Pod]) -> Iterator[str]:
    """One sentence for each policy that is open, and each way that is shut."""
    policies = [one for one in documents if one["kind"] == "NetworkPolicy"]
    for one in policies:
        spec, where = one["spec"], f"NetworkPolicy {one['metadata']['name']}"
        for kind in sorted({"Ingress", "Egress"} - set(spec.get("policyTypes") or ())):
            yield f"{where}: policyTypes has no {kind}, so that all of it is let through"
        for rule in spec.get("ingress") or ():
            if not rule.get("from"):
                yield f"{where}: a rule of ingress has no from, and lets in everybody"
    for pod in pods:
        chosen = [one["spec"] for one in policies if selects(one["spec"]["podSelector"], pod)]
        if not chosen:
            continue  # told of elsewhere
        enters, leaves = ([rule for spec in chosen for rule in spec.get(way) or ()] for way in ("ingress", "egress"))
        if not all(any(_to_all(rule, pods) for rule in rules) for rules in (enters, leaves)):
            yield f"{pod.where}: no NetworkPolicy lets it and the run's other pods reach each other at all ports"
        if not any(_has(rule, DNS_PORT) and (not rule.get("to") or _is_wide(rule["to"])) for rule in leaves):
            yield f"{pod.where}: no NetworkPolicy lets it ask DNS (port {DNS_PORT})"
        for name, port in _wanted(documents, pod):
            if not any(_has(rule, port) and _is_wide(rule.get("from") or ()) for rule in enters):
                yield f"{pod.where}: no NetworkPolicy lets in who asks port {port}: {name}"


def _wanted(documents: Sequence[Tree], pod: Pod) -> Iterator[tuple[str, int]]:
    """Ports that pods of other namespaces come to, and who."""
    if pod.ports.get("dashboard") == DASHBOARD_PORT:
        yield "KubeRay's operator", DASHBOARD_PORT
    for one in documents:
        if one["kind"] == "PodMonitor" and selects(one["spec"]["selector"], pod):
            ports = [pod.ports.get(endpoint["port"]) for endpoint in one["spec"]["podMetricsEndpoints"]]
            yield from (("Prometheus", port) for port in ports if port is not None)


def _to_all(rule: Tree, pods: Sequence[Pod]) -> bool:
    peers = [
        peer for peer in (*(rule.get("from") or ()), *(rule.get("to") or ())) if "podSelector" in peer and "namespaceSelector" not in peer
    ]
    return not rule.get("ports") and any(all(selects(peer["podSelector"], pod) for pod in pods) for peer in peers)


def _has(rule: Tree, port: int) -> bool:
    return not rule.get("ports") or any(one.get("port") == port for one in rule["ports"])


def _is_wide(peers: Sequence[Tree]) -> bool:
    """Whether pods of other namespaces, or other addresses, are among them."""
    return any("namespaceSelector" in peer or "ipBlock" in peer for peer in peers)
