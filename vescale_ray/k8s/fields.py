"""The fields of Ray's and the Prometheus operator's own resources, as far as a manifest of ours may use them.

Kubernetes refuses a field that it does not know in its own kinds; in a custom resource a mistyped one is dropped without a word, therefore
this table. Written from KubeRay's ``ray.io/v1`` types of August 2026 (without what is behind feature gates that are off) and
from ``monitoring.coreos.com/v1``. What is Kubernetes' own inside of them (a pod template, a volume mount) is named by
:class:`Core` and checked by whoever has Kubernetes' schemas.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

LARGEST = 2**31 - 1
"""KubeRay's numbers are int32."""


@dataclass(frozen=True)
class Core:
    """A type of Kubernetes' own API, by the name that its schema has."""

    schema: str


@dataclass(frozen=True)
class Template(Core):
    """A pod template, of which the other checks rely on the containers."""

    schema: str = "podtemplatespec"


@dataclass(frozen=True)
class Whole:
    """A whole number, at least ``least``."""

    least: int = 0


@dataclass(frozen=True)
class Each:
    """A list of ``item``."""

    item: Any


@dataclass(frozen=True)
class One:
    """One of these texts."""

    of: tuple[str, ...]


@dataclass(frozen=True)
class Fields:
    """A mapping with these fields and no other."""

    known: Mapping[str, Any]
    required: frozenset[str] = frozenset()


TEXT, FLAG, NUMBER, TEXTS = "a text", "true or false", "a number", "texts by name"
"""Leaves. ``TEXTS``: a mapping whose values are texts, like labels and rayStartParams."""

METADATA = Fields({"name": TEXT, "namespace": TEXT, "labels": TEXTS, "annotations": TEXTS}, frozenset({"name"}))

AUTOSCALER = Fields(
    {
        "version": One(("v1", "v2")),
        "idleTimeoutSeconds": Whole(),
        "upscalingMode": One(("Default", "Aggressive", "Conservative")),
        "resources": Core("resourcerequirements"),
        "image": TEXT,
        "imagePullPolicy": One(("Always", "IfNotPresent", "Never")),
        "env": Each(Core("envvar")),
        "envFrom": Each(Core("envfromsource")),
        "volumeMounts": Each(Core("volumemount")),
        "securityContext": Core("securitycontext"),
        "command": Each(TEXT),
        "args": Each(TEXT),
    }
)
CREDENTIAL = Fields({"value": TEXT, "valueFrom": Core("envvarsource")})
FAULT_TOLERANCE = Fields(
    {
        "backend": One(("redis", "rocksdb")),
        "redisAddress": TEXT,
        "redisUsername": CREDENTIAL,
        "redisPassword": CREDENTIAL,
        "externalStorageNamespace": TEXT,
        "storage": Fields(
            {
                "size": TEXT,
                "storageClassName": TEXT,
                "accessModes": Each(TEXT),
                "claimName": TEXT,
                "subPath": TEXT,
                "deletionPolicy": One(("DeleteWithCluster", "Retain")),
            },
        ),
    }
)
GROUP = {
    "rayStartParams": TEXTS,
    "template": Template(),
    "labels": TEXTS,
    "resources": TEXTS,
}
HEAD_GROUP = Fields(
    {
        **GROUP,
        "serviceType": One(("ClusterIP", "NodePort", "LoadBalancer")),
        "enableIngress": FLAG,
        "headService": Core("service"),
    },
    frozenset({"template"}),
)
WORKER_GROUP = Fields(
    {
        **GROUP,
        "groupName": TEXT,
        "replicas": Whole(),
        "minReplicas": Whole(),
        "maxReplicas": Whole(),
        "numOfHosts": Whole(1),
        "idleTimeoutSeconds": Whole(),
        "priority": Whole(),
        "suspend": FLAG,
        "scaleStrategy": Fields({"workersToDelete": Each(TEXT)}),
    },
    frozenset({"groupName", "template"}),
)
CLUSTER_SPEC = Fields(
    {
        "rayVersion": TEXT,
        "headGroupSpec": HEAD_GROUP,
        "workerGroupSpecs": Each(WORKER_GROUP),
        "enableInTreeAutoscaling": FLAG,
        "autoscalerOptions": AUTOSCALER,
        "gcsFaultToleranceOptions": FAULT_TOLERANCE,
        "authOptions": Fields({"mode": One(("token", "disabled")), "secretName": TEXT, "enableK8sTokenAuth": FLAG}),
        "tlsOptions": Fields({"enabled": FLAG}),
        "headServiceAnnotations": TEXTS,
        "managedBy": One(("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue")),
        "suspend": FLAG,
        "upgradeStrategy": Fields({"type": One(("Recreate", "None"))}),
    },
    frozenset({"headGroupSpec"}),
)
DELETION_RULE = Fields(
    {
        "policy": One(("DeleteCluster", "DeleteWorkers", "DeleteSelf", "DeleteNone")),
        "condition": Fields(
            {"jobStatus": One(("SUCCEEDED", "FAILED")), "jobDeploymentStatus": One(("Failed",)), "ttlSeconds": Whole()},
        ),
    },
    frozenset({"policy", "condition"}),
)
JOB_SPEC = Fields(
    {
        "entrypoint": TEXT,
        "runtimeEnvYAML": TEXT,
        "jobId": TEXT,
        "metadata": TEXTS,
        "submissionMode": One(("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")),
        "submitterPodTemplate": Template(),
        "submitterConfig": Fields({"backoffLimit": Whole()}),
        "backoffLimit": Whole(),
        "activeDeadlineSeconds": Whole(1),
        "preRunningDeadlineSeconds": Whole(1),
        "shutdownAfterJobFinishes": FLAG,
        "ttlSecondsAfterFinished": Whole(),
        "deletionStrategy": Fields({"deletionRules": Each(DELETION_RULE)}, frozenset({"deletionRules"})),
        "entrypointNumCpus": NUMBER,
        "entrypointNumGpus": NUMBER,
        "entrypointResources": TEXT,
        "suspend": FLAG,
        "managedBy": One(("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue")),
        "clusterSelector": TEXTS,
        "rayClusterSpec": CLUSTER_SPEC,
    }
)
RELABELING = Fields(
    {
        "sourceLabels": Each(TEXT),
        "separator": TEXT,
        "targetLabel": TEXT,
        "regex": TEXT,
        "replacement": TEXT,
        "action": One(("replace", "keep", "drop", "labelmap", "labeldrop", "labelkeep")),
    }
)
ENDPOINT = Fields(
    {
        "port": TEXT,
        "path": TEXT,
        "interval": TEXT,
        "scrapeTimeout": TEXT,
        "honorLabels": FLAG,
        "relabelings": Each(RELABELING),
        "metricRelabelings": Each(RELABELING),
    },
    frozenset({"port"}),
)
POD_MONITOR_SPEC = Fields(
    {
        "selector": Core("labelselector"),
        "namespaceSelector": Fields({"any": FLAG, "matchNames": Each(TEXT)}),
        "podMetricsEndpoints": Each(ENDPOINT),
        "jobLabel": TEXT,
        "podTargetLabels": Each(TEXT),
    },
    frozenset({"selector", "podMetricsEndpoints"}),
)
RULE = Fields(
    {"alert": TEXT, "record": TEXT, "expr": TEXT, "for": TEXT, "labels": TEXTS, "annotations": TEXTS},
    frozenset({"expr"}),
)
PROMETHEUS_RULE_SPEC = Fields(
    {"groups": Each(Fields({"name": TEXT, "interval": TEXT, "rules": Each(RULE)}, frozenset({"name", "rules"})))},
    frozenset({"groups"}),
)


def _resource(spec: Fields) -> Fields:
    return Fields({"apiVersion": TEXT, "kind": TEXT, "metadata": METADATA, "spec": spec}, frozenset({"metadata", "spec"}))


CUSTOM: Mapping[tuple[str, str], Fields] = {
    ("ray.io/v1", "RayJob"): _resource(JOB_SPEC),
    ("ray.io/v1", "RayCluster"): _resource(CLUSTER_SPEC),
    ("monitoring.coreos.com/v1", "PodMonitor"): _resource(POD_MONITOR_SPEC),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _resource(PROMETHEUS_RULE_SPEC),
}
"""By apiVersion and kind."""

OnCore = Callable[[str, Any, str], Iterator[str]]


def field_problems(document: Mapping[str, Any], on_core: OnCore | None = None) -> Iterator[str]:
    """What the document's fields are not, one sentence each; nothing for a kind that is Kubernetes' own.

    Args:
        on_core: called with schema, value and path of each part that is of Kubernetes' own types; what it yields is handed on.
    """
    table = CUSTOM.get((str(document.get("apiVersion")), str(document.get("kind"))))
    if table is not None:
        yield from _walk(document, table, str(document["kind"]), on_core)


def _walk(value: Any, kind: Any, path: str, on_core: OnCore | None) -> Iterator[str]:
    match kind:
        case Core(schema):
            if isinstance(kind, Template) and not _has_containers(value):
                yield f"{path} has no container"
            elif on_core is not None:
                yield from on_core(schema, value, path)
        case Fields(known, required):
            if not isinstance(value, Mapping):
                yield f"{path} is {_shown(value)}: it must be a mapping"
                return
            for name in sorted(required - value.keys()):
                yield f"{path} has no {name}"
            for name, one in value.items():
                if name not in known:
                    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.7)
                    yield f"{path} has no field {name}" + (f": did you mean {near[0]}?" if near else "")
                else:
                    yield from _walk(one, known[name], f"{path}.{name}", on_core)
        case Each(item):
            if not isinstance(value, list):
                yield f"{path} is {_shown(value)}: it must be a list"
                return
            for index, one in enumerate(value):
                yield from _walk(one, item, f"{path}[{index}]", on_core)
        case One(of):
            if value not in of:
                yield f"{path} is {_shown(value)}: it must be one of {', '.join(of)}"
        case Whole(least):
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
                yield f"{path} is {_shown(value)}: it must be a whole number from {least} to {LARGEST}"
        case "texts by name":
            good = isinstance(value, Mapping) and all(isinstance(one, str) for pair in value.items() for one in pair)
            if not good:
                yield f"{path} is {_shown(value)}: names and values must be texts, numbers in quotes"
        case "true or false":
            if not isinstance(value, bool):
                yield f"{path} is {_shown(value)}: it must be true or false"
        case "a number":
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                yield f"{path} is {_shown(value)}: it must be a number"
        case _:
            if not isinstance(value, str):
                yield f"{path} is {_shown(value)}: it must be a text"


def _has_containers(template: Any) -> bool:
    spec = template.get("spec") if isinstance(template, Mapping) else None
    containers = spec.get("containers") if isinstance(spec, Mapping) else None
    return isinstance(containers, list) and bool(containers) and all(isinstance(one, Mapping) for one in containers)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
