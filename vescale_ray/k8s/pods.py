"""The three kinds of pod: Ray's head, its workers, and the one that submits the job."""

from __future__ import annotations

from typing import Any

from vescale_ray.config import RunConfig
from vescale_ray.k8s.emit import Why
from vescale_ray.k8s.options import Options, Sizes, quantity

CONFIG_FOLDER, CONFIG_FILE = "/etc/vescale-ray", "run.yaml"
RUN_LABEL, ROLE_LABEL = "vescale-ray/run", "vescale-ray/role"
GCS_PORT, DASHBOARD_PORT, RAY_METRICS_PORT, AUTOSCALER_METRICS_PORT, DASHBOARD_METRICS_PORT = 6379, 8265, 8080, 44217, 44227
USER = 1000
"""The image's."""
PRIORITIES = ("vescale-ray-head", "vescale-ray-worker")

CONTAINER_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def labels(s: Sizes, role: str) -> dict[str, str]:
    """Ours, beside those that the operator sets: a job's cluster has a name that only the operator knows."""
    return {RUN_LABEL: s.name, ROLE_LABEL: role}


def config_map(s: Sizes) -> str:
    return f"{s.name}-run"


def account(o: Options, s: Sizes, role: str) -> str:
    # The operator cuts the name of the head's account after 50 characters: it gets the run's own, which has 47 at most.
    return o.service_account or (s.name if role == "head" else f"{s.name}-worker")


def redis_secret(s: Sizes) -> str:
    return f"{s.name}-redis"


def head(c: RunConfig, o: Options, s: Sizes) -> dict[str, Any]:
    """The head's pod template: driver, controller and Ray's control store; no worker."""
    env: list[Any] = [_drain(o)]
    if o.prometheus:
        env += [{"name": "RAY_PROMETHEUS_HOST", "value": o.prometheus}]
    if o.grafana:
        env += [{"name": "RAY_GRAFANA_HOST", "value": o.grafana}, {"name": "RAY_GRAFANA_IFRAME_HOST", "value": o.grafana}]
    room = _room(o.head_cpus, o.head_memory, o.scratch)
    return {
        "metadata": {
            "labels": labels(s, "head"),
            "annotations": Why(
                {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"},
                "The head is the one pod that a run does not survive: no autoscaler may move it to save a node.",
            ),
        },
        "spec": {
            **_pod(o, s, "head"),
            "affinity": _not_on_spot(o),
            "containers": [
                {
                    "name": "ray-head",
                    "image": o.image,
                    "securityContext": CONTAINER_SECURITY,
                    "ports": [
                        {"name": "gcs-server", "containerPort": GCS_PORT},
                        {"name": "dashboard", "containerPort": DASHBOARD_PORT},
                        {"name": "metrics", "containerPort": RAY_METRICS_PORT},
                        {"name": "as-metrics", "containerPort": AUTOSCALER_METRICS_PORT},
                        {"name": "dash-metrics", "containerPort": DASHBOARD_METRICS_PORT},
                        Why({"name": "vescale-metrics", "containerPort": c.metrics.port}, "metrics.port; the controller is here."),
                    ],
                    "env": env,
                    **_secret_variables(o),
                    "resources": room,
                    "volumeMounts": [
                        {"name": "runs", "mountPath": o.mount},
                        {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
                        {"name": "scratch", "mountPath": "/tmp"},
                    ],
                }
            ],
            "volumes": [
                _runs(o),
                {"name": "config", "configMap": {"name": config_map(s)}},
                _scratch(o),
                Why(
                    {
                        "name": "kube-api",
                        "projected": {
                            "sources": [
                                {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
                                {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
                                {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
                            ]
                        },
                    },
                    "The token that may change this RayCluster is mounted into the autoscaler's container alone (autoscalerOptions), "
                    "not where training code runs.",
                ),
            ],
        },
    }


def worker(c: RunConfig, o: Options, s: Sizes, spot: bool) -> dict[str, Any]:
    """A worker's pod template: ``per_pod`` ranks of the run."""
    env: list[Any] = [_drain(o), {"name": "GLOO_SOCKET_IFNAME", "value": "eth0"}]
    tolerations: list[Any] = []
    room = _room(s.cpus, o.memory, o.scratch)
    if s.gpus:
        for side in room.values():
            side["nvidia.com/gpu"] = str(s.gpus)
        tolerations.append({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"})
        env += [
            Why({"name": "NCCL_SOCKET_IFNAME", "value": "eth0"}, "A pod's own interface; NCCL would try others, too."),
            {"name": "NCCL_DEBUG", "value": "WARN"},
            Why(
                {"name": "TORCH_NCCL_ASYNC_ERROR_HANDLING", "value": "2"},
                "A collective whose peer has gone is ended, the process is not: the run goes on in it.",
            ),
            Why({"name": "TORCH_FR_BUFFER_SIZE", "value": "2000"}, "PyTorch's flight recorder: the last collectives, for when one hangs."),
            {"name": "PYTORCH_ALLOC_CONF", "value": "expandable_segments:True"},
        ]
    key, _, value = o.spot_label.partition("=")
    if spot:
        place: dict[str, Any] = {"nodeSelector": {key: value}}
        tolerations.append(Why({"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"}, "Where spot nodes are tainted."))
    else:
        place = {"affinity": _not_on_spot(o)}
    return {
        "metadata": {"labels": labels(s, "worker")},
        "spec": {
            **_pod(o, s, "worker"),
            **place,
            **({"tolerations": tolerations} if tolerations else {}),
            "topologySpreadConstraints": Why(
                [
                    {
                        "maxSkew": 1,
                        "topologyKey": "kubernetes.io/hostname",
                        "whenUnsatisfiable": "ScheduleAnyway",
                        "labelSelector": {"matchLabels": labels(s, "worker")},
                    }
                ],
                "A node that goes should take few workers along: copies of shards lie on other nodes.",
            ),
            "containers": [
                {
                    "name": "ray-worker",
                    "image": o.image,
                    "securityContext": CONTAINER_SECURITY,
                    "ports": [{"name": "metrics", "containerPort": RAY_METRICS_PORT}],
                    "env": env,
                    **_secret_variables(o),
                    "resources": Why(room, "Limits equal to requests, whole CPUs: the pod is not throttled, and the last to be evicted."),
                    "volumeMounts": [
                        {"name": "runs", "mountPath": o.mount},
                        {"name": "scratch", "mountPath": "/tmp"},
                        {"name": "shm", "mountPath": "/dev/shm"},
                    ],
                }
            ],
            "volumes": [
                _runs(o),
                _scratch(o),
                Why(
                    {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": o.shm}},
                    "Counts against the memory limit. Without it NCCL and data loaders get 64 MiB and die of a bus error.",
                ),
            ],
        },
    }


def submitter(o: Options, s: Sizes) -> dict[str, Any]:
    """The pod of the Kubernetes Job that runs ``ray job submit``; the operator gives it its command."""
    return {
        "metadata": {"labels": labels(s, "submitter")},
        "spec": {
            "serviceAccountName": account(o, s, "worker"),
            "automountServiceAccountToken": False,
            **_registry(o),
            "securityContext": _security(),
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": "ray-job-submitter",
                    "image": o.image,
                    "securityContext": CONTAINER_SECURITY,
                    "resources": {
                        "requests": {"cpu": "1", "memory": "1Gi", "ephemeral-storage": "1Gi"},
                        "limits": {"cpu": "1", "memory": "1Gi", "ephemeral-storage": "1Gi"},
                    },
                }
            ],
        },
    }


def _pod(o: Options, s: Sizes, role: str) -> dict[str, Any]:
    return {
        "serviceAccountName": account(o, s, role),
        "automountServiceAccountToken": False,
        **_registry(o),
        "priorityClassName": o.priority_class or PRIORITIES[role == "worker"],
        "terminationGracePeriodSeconds": Why(
            s.grace_s,
            f"On SIGTERM Ray drains its node for up to {o.drain_s} s, in which the run saves and moves what is there; the kubelet waits "
            "longer than that. Kubernetes' 30 s would be a race.",
        ),
        "securityContext": _security(),
    }


def _registry(o: Options) -> dict[str, Any]:
    return {"imagePullSecrets": [{"name": o.pull_secret}]} if o.pull_secret else {}


def _secret_variables(o: Options) -> dict[str, Any]:
    if not o.env_secret:
        return {}
    why = "Its entries are variables of what trains: no key or password stands in a manifest."
    return {"envFrom": Why([{"secretRef": {"name": o.env_secret}}], why)}


def _security() -> dict[str, Any]:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _drain(o: Options) -> dict[str, str]:
    return {"name": "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "value": str(o.drain_s)}


def _room(cpus: int, memory: str, scratch: str) -> dict[str, dict[str, str]]:
    disk = f"{2 * quantity(scratch) // 2**20}Mi"  # /tmp, and as much again for the container's layer and Ray's logs beside the autoscaler's
    one = {"cpu": str(cpus), "memory": memory, "ephemeral-storage": disk}
    return {"requests": dict(one), "limits": dict(one)}


def _runs(o: Options) -> dict[str, Any]:
    return {"name": "runs", "persistentVolumeClaim": {"claimName": o.claim}}


def _scratch(o: Options) -> dict[str, Any]:
    return {"name": "scratch", "emptyDir": {"sizeLimit": o.scratch}}


def _not_on_spot(o: Options) -> Why:
    key, _, value = o.spot_label.partition("=")
    term = {"matchExpressions": [{"key": key, "operator": "NotIn", "values": [value]}]}
    rule = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}
    return Why(rule, "Not on a pre-emptible node; a node without the label will do.")
