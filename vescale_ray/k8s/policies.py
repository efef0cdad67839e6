"""What the NetworkPolicies let through, against what has to: the pods of a run to each other, DNS, the operator, Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

Tree = Mapping[str, Any]
DASHBOARD_PORT, DNS_PORT = 8265, 53
OPERATOR = {"app.kubernetes.io/component": "kuberay-operator"}
NAMESPACE = "kubernetes.io/metadata.name"
WAYS = (("ingress", "from"), ("egress", "to"))


class Pod(Protocol):
    """A pod template, with where it stands, and its ports by name."""

    where: str
    labels: Tree
    ports: Mapping[str, int]


def selects(selector: Tree, pod: Pod) -> bool:
    by_label = (selector.get("matchLabels") or {}).items() <= pod.labels.items()
    return by_label and all(_holds(one, pod.labels.get(one["key"])) for one in selector.get("matchExpressions") or ())


def _holds(expression: Tree, value: str | None) -> bool:
    match expression["operator"]:
        case "In":
            return value in (expression.get("values") or ())
        case "NotIn":
            return value not in (expression.get("values") or ())
        case "Exists":
            return value is not None
        case _:
            return value is None


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
            yield from (f"{where}: a rule of ingress lets in {who}" for peer in rule.get("from") or () for who in _open(peer))
        for way, key in WAYS:
            for rule in spec.get(way) or ():
                peers, ports = rule.get(key) or (), rule.get("ports") or ()
                if not all(peers):
                    yield f"{where}: a rule of {way} has an empty peer"
                if (not peers or _is_wide(peers)) and not (ports and all("port" in one for one in ports)):
                    yield f"{where}: a rule of {way} names no port, and opens them all to others than the run's pods"
    for one in policies:
        rules = [*(one["spec"].get("ingress") or ()), *(one["spec"].get("egress") or ())]
        peers = [peer for rule in rules for peer in (*(rule.get("from") or ()), *(rule.get("to") or ()))]
        for key in sorted({key for peer in peers for key in (peer.get("namespaceSelector") or {}).get("matchLabels") or {}} - {NAMESPACE}):
            yield f"NetworkPolicy {one['metadata']['name']}: a namespaceSelector by {key}: of itself a namespace has {NAMESPACE} alone"
    for pod in pods:
        chosen = [one["spec"] for one in policies if selects(one["spec"]["podSelector"], pod)]
        if not chosen:
            continue  # told of elsewhere
        enters, leaves = ([rule for spec in chosen for rule in spec.get(way) or ()] for way in ("ingress", "egress"))
        if not all(any(_to_all(rule, pods) for rule in rules) for rules in (enters, leaves)):
            yield f"{pod.where}: no NetworkPolicy lets it and the run's other pods reach each other at all ports"
        if not any(_has(rule, DNS_PORT, "UDP") and (not rule.get("to") or _is_wide(rule["to"])) for rule in leaves):
            yield f"{pod.where}: no NetworkPolicy lets it ask DNS (port {DNS_PORT})"
        wanted = list(_wanted(documents, pod))
        for name, port in wanted:
            if not any(_has(rule, port) and _is_wide(rule.get("from") or ()) for rule in enters):
                yield f"{pod.where}: no NetworkPolicy lets in who asks port {port}: {name}"
        allowed = [{space for rule in enters if _has(rule, port) for space in _spaces(rule)} for who, port in wanted if who == "Prometheus"]
        if allowed and all(allowed) and not set.intersection(*allowed):
            yield f"{pod.where}: the NetworkPolicies let in different namespaces to the ports that one Prometheus asks"


def needless_problems(documents: Sequence[Tree], pods: Sequence[Pod], asked: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """One sentence for each port that a policy lets others than the run's pods come to, or the run's pods ask, and nobody does.

    Args:
        asked: ports that pods ask outside of the run: those under ``""`` all, the others the pod of that name.
    """
    for one in documents:
        if one["kind"] != "NetworkPolicy":
            continue
        where, chosen = f"NetworkPolicy {one['metadata']['name']}", [pod for pod in pods if selects(one["spec"]["podSelector"], pod)]
        scraped = {port for pod in chosen for who, port in _wanted(documents, pod) if who == "Prometheus"}
        if not any(one["kind"] == "PodMonitor" for one in documents):
            scraped = {port for pod in chosen for name, port in pod.ports.items() if "metrics" in name}
        for rule in one["spec"].get("ingress") or ():
            for port in sorted({one["port"] for one in rule.get("ports") or () if isinstance(one.get("port"), int)}):
                for peer in rule.get("from") or ():
                    if "namespaceSelector" in peer or "ipBlock" in peer:
                        operators = OPERATOR.items() <= ((peer.get("podSelector") or {}).get("matchLabels") or {}).items()
                        if port not in scraped and not (port == DASHBOARD_PORT and operators):
                            yield f"{where}: lets others come to port {port}: {DASHBOARD_PORT} is the operator's alone to ask, no other one"
        wanted = {DNS_PORT, *asked.get("", ()), *(port for pod in chosen for port in asked.get(pod.where, ()))}
        for rule in one["spec"].get("egress") or ():
            if not rule.get("to") or _is_wide(rule["to"]):
                for port in sorted({one["port"] for one in rule.get("ports") or () if isinstance(one.get("port"), int)} - wanted):
                    yield f"{where}: lets its pods ask port {port} of others, which nothing in the run does"


def _wanted(documents: Sequence[Tree], pod: Pod) -> Iterator[tuple[str, int]]:
    """Ports that pods of other namespaces come to, and who."""
    if pod.ports.get("dashboard") == DASHBOARD_PORT:
        yield "KubeRay's operator", DASHBOARD_PORT
    for one in documents:
        if one["kind"] == "PodMonitor" and selects(one["spec"]["selector"], pod):
            ports = [pod.ports.get(endpoint["port"]) for endpoint in one["spec"]["podMetricsEndpoints"]]
            yield from (("Prometheus", port) for port in ports if port is not None)


def _spaces(rule: Tree) -> set[str]:
    """Namespaces that a rule lets in by their names."""
    labels = [(peer.get("namespaceSelector") or {}).get("matchLabels") or {} for peer in rule.get("from") or ()]
    return {str(one[NAMESPACE]) for one in labels if NAMESPACE in one}


def _to_all(rule: Tree, pods: Sequence[Pod]) -> bool:
    peers = [
        peer for peer in (*(rule.get("from") or ()), *(rule.get("to") or ())) if "podSelector" in peer and "namespaceSelector" not in peer
    ]
    return not rule.get("ports") and any(all(selects(peer["podSelector"], pod) for pod in pods) for peer in peers)


def lets_out(documents: Sequence[Tree], pod: Pod, port: int) -> bool:
    """Whether the policies let the pod ask ``port`` of who is no pod of the run; what no policy covers may ask anybody."""
    chosen = [one["spec"] for one in documents if one["kind"] == "NetworkPolicy" and selects(one["spec"]["podSelector"], pod)]
    leaves = [rule for spec in chosen for rule in spec.get("egress") or ()]
    return not chosen or any(_has(rule, port) and (not rule.get("to") or _is_wide(rule["to"])) for rule in leaves)


def _open(peer: Tree) -> Iterator[str]:
    """Whom a peer is that is more than anybody in particular."""
    pods, spaces = peer.get("podSelector"), peer.get("namespaceSelector")
    if str((peer.get("ipBlock") or {}).get("cidr")) in ("0.0.0.0/0", "::/0"):
        yield "every address"
    elif spaces is not None and _is_all(spaces) and (pods is None or _is_all(pods)):
        yield "all pods of all namespaces"
    elif pods is not None and spaces is None and _is_all(pods):
        yield "all pods of the namespace, not the run's alone"


def _is_all(selector: Tree) -> bool:
    return not selector.get("matchLabels") and not selector.get("matchExpressions")


def _has(rule: Tree, port: int, protocol: str = "TCP") -> bool:
    return not rule.get("ports") or any(one.get("port", port) == port and one.get("protocol", "TCP") == protocol for one in rule["ports"])


def _is_wide(peers: Sequence[Tree]) -> bool:
    """Whether pods of other namespaces, or other addresses, are among them."""
    return any("namespaceSelector" in peer or "ipBlock" in peer for peer in peers)
