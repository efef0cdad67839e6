"""The manifests follow Kubernetes' and KubeRay's schemas and are consistent. The committed files equal the command's output."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest

from tests.deploy.manifests import (
    CLUSTER,
    KUBERAY,
    RECIPE,
    RUNS,
    VARIANTS,
    Documents,
    cluster_of,
    committed,
    made,
    schema_problems,
    templates_of,
    the,
)
from vescale_ray.cli import main


def test_make_manifests_writes_the_committed_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert {path.name for path in KUBERAY.iterdir()} == RECIPE.keys()
    for name, words in RECIPE.items():
        assert main(["k8s", "render", str(CLUSTER), *shlex.split(words)]) == 0
        assert (KUBERAY / name).read_text(encoding="utf-8") == capsys.readouterr().out, f"{name}: run `make manifests`"


@pytest.mark.parametrize("name", VARIANTS)
def test_every_document_keeps_to_its_schema(name: str) -> None:
    assert schema_problems(VARIANTS[name]()) == []


def test_kubernetes_validate_accepts_the_committed_setup() -> None:
    for document in committed("setup.yaml"):  # one at a time, because it reads its schemas for each document, which is slow
        assert kubernetes_validate.validate(document, "1.37", strict=True) == "1.37"


def holes(bundle: Documents) -> Iterator[str]:
    """Yield the inconsistencies in names, labels, ports and volumes of a run and of its surroundings."""
    around = [*bundle, *made("setup", namespace=bundle[0]["metadata"]["namespace"])]
    names = {(one["kind"], one["metadata"]["name"]) for one in around}
    cluster, templates = cluster_of(bundle), templates_of(bundle)
    given = {("ServiceAccount", "y"), ("PriorityClass", "no"), ("PersistentVolumeClaim", "1e3")}
    for role, template in templates.items():
        pod, labels = template["spec"], template["metadata"]["labels"]
        (container,) = pod["containers"]
        volumes = {one["name"]: one for one in pod.get("volumes", ())}
        mounts = [*container.get("volumeMounts", ()), *(cluster["autoscalerOptions"]["volumeMounts"] if role == "head" else ())]
        wanted = {("ServiceAccount", pod["serviceAccountName"])}
        for one in volumes.values():
            wanted |= {("ConfigMap", one[key]["name"]) for key in one if key == "configMap"}
            wanted |= {("PersistentVolumeClaim", one[key]["claimName"]) for key in one if key == "persistentVolumeClaim"}
        wanted |= {("PriorityClass", pod["priorityClassName"])} if role != "submitter" else set()
        yield from (f"{role}: there is no {kind} {name}" for kind, name in wanted - names - given)
        if {one["name"] for one in mounts} != volumes.keys() or len({one["mountPath"] for one in mounts}) != len(mounts):
            yield f"{role}: volumes and mounts differ"
        if any("serviceAccountToken" in str(volumes[one["name"]]) for one in container.get("volumeMounts", ()) if one["name"] in volumes):
            yield f"{role}: training code sees the autoscaler's token"
        resources = container["resources"]
        if resources["requests"] != resources["limits"] or not resources["limits"]["cpu"].isdigit() or len(resources["limits"]) < 3:
            yield f"{role}: requests and limits differ"
        drain = next((int(one["value"]) for one in container.get("env", ()) if one["name"] == "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"), 0)
        if role != "submitter" and not 0 < drain <= pod["terminationGracePeriodSeconds"] - 20:
            yield f"{role}: the kubelet's SIGKILL races the drain"
        for spread in pod.get("topologySpreadConstraints", ()):
            if spread["labelSelector"]["matchLabels"] != labels:
                yield f"{role}: its spread counts other pods"
    if len({template["spec"]["containers"][0]["image"] for template in templates.values()}) != 1:
        yield "the pods have different images"
    files_at = {mount["mountPath"]: mount["name"] for mount in templates["head"]["spec"]["containers"][0]["volumeMounts"]}
    if files_at.get("/etc/vescale-ray") != "config" or "run.yaml" not in the(bundle, "ConfigMap", "-run")["data"]:
        yield "the entrypoint's file is not mounted"
    yield from _ways(bundle, templates)


def _ways(bundle: Documents, templates: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the ports that NetworkPolicies, the budget and the monitors close by mistake, or open to others."""
    labels = {role: template["metadata"]["labels"] for role, template in templates.items()}
    declared = {role: template["spec"]["containers"][0].get("ports", ()) for role, template in templates.items()}
    ports = {role: {one["name"]: one["containerPort"] for one in those} for role, those in declared.items()}
    into: dict[str, set[int]] = {role: set() for role in templates}
    for policy in (one for one in bundle if one["kind"] == "NetworkPolicy"):
        roles = {role for role in labels if policy["spec"]["podSelector"]["matchLabels"].items() <= labels[role].items()}
        if "vescale-ray/run" not in policy["spec"]["podSelector"]["matchLabels"] or policy["spec"]["policyTypes"] != ["Ingress", "Egress"]:
            yield f"{policy['metadata']['name']}: it is open, or takes the pods of other runs"
        for rule in policy["spec"]["ingress"]:
            asked = {one["port"] for one in rule.get("ports", ())}
            if not asked <= {port for role in roles for port in ports[role].values()} or not rule["from"]:
                yield f"{policy['metadata']['name']}: it lets in more than the pods declare"
            for role in roles:
                into[role] |= asked
    for monitor in (one for one in made("monitor") if one["kind"] == "PodMonitor"):
        for role in (role for role in labels if monitor["spec"]["selector"]["matchLabels"].items() <= labels[role].items()):
            for port in (ports[role].get(end["port"]) for end in monitor["spec"]["podMetricsEndpoints"]):
                if port not in into[role]:
                    yield f"{role}: Prometheus can't ask port {port}"
    budget = the(bundle, "PodDisruptionBudget")["spec"]
    if [role for role in labels if budget["selector"]["matchLabels"].items() <= labels[role].items()] != ["head"]:
        yield "the budget holds other pods than the head"


@pytest.mark.parametrize("name", RUNS)
def test_objects_of_a_run_pass_the_cross_checks(name: str) -> None:
    assert list(holes(VARIANTS[name]())) == []


JOB, GROUP = "RayJob:spec", "RayJob:spec.rayClusterSpec.workerGroupSpecs.0"
HEAD = "RayJob:spec.rayClusterSpec.headGroupSpec.template.spec"
GONE = object()


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (f"{JOB}.shutdownAfterJobFinish", True, "'shutdownAfterJobFinish' was unexpected"),
        (f"{JOB}.shutdownAfterJobFinishes", True, "False schema"),
        (f"{JOB}.suspend", True, "'shutdownAfterJobFinishes' is a required property"),
        (f"{JOB}.submitterPodTemplate.spec.restartPolicy", "Always", "'Never' was expected"),
        (f"{JOB}.rayClusterSpec.authOptions", GONE, "'authOptions' is a required property"),
        (f"{JOB}.rayClusterSpec.headGroupSpec.rayStartParams.num-cpus", "4", "'0' was expected"),
        (f"{JOB}.deletionStrategy.deletionRules.0.condition.jobDeploymentStatus", "Failed", "too many properties"),
        ("RayJob:metadata.labels.kueue.x-k8s.io/queue-name", "q", "'annotations' is a required property"),
        (f"{GROUP}.maxReplicas", GONE, "'maxReplicas' is a required property"),
        (f"{GROUP}.minReplicas", "4", "is not of type 'integer'"),
        (f"{GROUP}.template.spec.containers.0.Image", "x", "'Image' was unexpected"),
        (f"{HEAD}.containers.0.env.0.value", 100, "is not of type 'string'"),
        ("NetworkPolicy:spec.ingres", [], "'ingres' was unexpected"),
        ("ConfigMap:data.x", 1, "is not of type 'string'"),
        ("PrometheusRule:spec.groups.0.rules.0.expr", GONE, "'expr' is a required property"),
        ("PodMonitor:spec.podMetricsEndpoints.0.interval", "10", "does not match"),
        (f"{HEAD}.serviceAccountName", "other", "head: there is no ServiceAccount other"),
        (f"{GROUP}.template.spec.volumes.0.persistentVolumeClaim.claimName", "x", "workers: there is no PersistentVolumeClaim x"),
        (f"{GROUP}.template.spec.volumes.2.name", "x", "workers: volumes and mounts differ"),
        (f"{HEAD}.containers.0.volumeMounts.2.name", "kube-api", "training code sees the autoscaler's token"),
        (f"{GROUP}.template.spec.automountServiceAccountToken", True, "False was expected"),
        (f"{HEAD}.containers.0.securityContext", {}, "was expected"),
        (f"{GROUP}.template.spec.containers.0.resources.requests.cpu", "1", "requests and limits differ"),
        (f"{GROUP}.template.spec.terminationGracePeriodSeconds", 100, "SIGKILL races the drain"),
        (f"{GROUP}.template.metadata.labels.vescale-ray/run", "x", "its spread counts other pods"),
        (f"{HEAD}.containers.0.image", "x:2", "different images"),
        (f"{HEAD}.containers.0.volumeMounts.1.mountPath", "/etc/x", "the entrypoint's file is not mounted"),
        ("NetworkPolicy:spec.podSelector.matchLabels", {}, "takes the pods of other runs"),
        ("NetworkPolicy:spec.ingress.1.ports.0.port", 22, "lets in more than the pods declare"),
        (f"{HEAD}.containers.0.ports.5.containerPort", 9465, "Prometheus can't ask port 9465"),
        ("PodDisruptionBudget:spec.selector.matchLabels.vescale-ray/role", "worker", "holds other pods than the head"),
    ],
)
def test_schema_or_cross_checks_find_each_fault(path: str, value: Any, words: str) -> None:
    """Put a mistake at ``path`` of the committed job or of the monitors."""
    bundle = committed("monitor.yaml" if path.startswith(("Prom", "PodM")) else "rayjob.yaml")
    kind, _, rest = path.partition(":")
    *steps, last = re.findall(r"(?:vescale-ray|kueue\.x-k8s\.io)/[\w-]+|[\w-]+", rest)
    place: Any = the(bundle, kind)
    for step in steps:
        place = place[int(step)] if isinstance(place, list) else place[step]
    if value is GONE:
        del place[last]
    else:
        place[last] = value
    found = schema_problems(bundle) or list(holes(bundle))
    assert any(re.search(words, problem) for problem in found), found
