"""The documents: RayJob or RayCluster with what belongs to it, what a cluster needs once, and what watches it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import yaml

from vescale_ray.config import RunConfig
from vescale_ray.k8s import pods
from vescale_ray.k8s.emit import Why
from vescale_ray.k8s.options import LEAST_STOP_S, RAY_VERSION, RUNBOOKS, Options, Sizes, port_of
from vescale_ray.k8s.pods import ROLE_LABEL, RUN_LABEL
from vescale_ray.k8s.rules import KUEUES_ELASTIC, KUEUES_LABEL, TOKEN_FOLDER

Document = dict[str, Any]
WEEK_S = 7 * 24 * 3600
START_S = 1800
KEPT_AFTER_SUCCESS_S, KEPT_AFTER_FAILURE_S = 300, 3600
"""How long a cluster is kept after its job, for a look at it."""


def _document(api: str, kind: str, name: str, o: Options | None, labels: dict[str, str], **rest: Any) -> Document:
    metadata: dict[str, Any] = {"name": name}
    if o is not None:
        metadata["namespace"] = o.namespace
    if labels:
        metadata["labels"] = labels
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **rest}


# -------------------------------------------------------------------------------------------------------------------- run


def run(c: RunConfig, o: Options, s: Sizes, kind: str) -> list[Document]:
    """Everything of one run, in an order that can be applied."""
    return [
        *_accounts(o, s),
        _config_map(c, o, s),
        _disruption_budget(o, s),
        *_network(c, o, s),
        _job(c, o, s) if kind == "job" else _cluster(c, o, s),
    ]


def _of_run(s: Sizes) -> dict[str, str]:
    return {RUN_LABEL: s.name}


def _accounts(o: Options, s: Sizes) -> Iterator[Document]:
    if o.service_account:
        return
    for role in ("head", "worker"):
        reason = (
            "The operator binds to this one what Ray's autoscaler needs: this RayCluster and its pods, nothing else."
            if role == "head"
            else "Has no rights. A role of your cloud for an object store is bound here."
        )
        no_token = Why(False, reason)
        yield _document("v1", "ServiceAccount", pods.account(o, s, role), o, _of_run(s), automountServiceAccountToken=no_token)


def _config_map(c: RunConfig, o: Options, s: Sizes) -> Document:
    data = Why({pods.CONFIG_FILE: c.to_yaml()}, "The resolved run; docs/reference/configuration.md lists every key.")
    return _document("v1", "ConfigMap", pods.config_map(s), o, _of_run(s), data=data)


def _disruption_budget(o: Options, s: Sizes) -> Document:
    spec = {
        "minAvailable": Why(
            1,
            "No drain of a node may take the head. Workers have no budget: a run lives through their loss. (Not maxUnavailable: Kubernetes "
            "counts that by the scale of the pods' owner, and a RayCluster has none.)",
        ),
        "selector": {"matchLabels": pods.labels(s, "head")},
    }
    return _document("policy/v1", "PodDisruptionBudget", f"{s.name}-head", o, _of_run(s), spec=spec)


def _network(c: RunConfig, o: Options, s: Sizes) -> Iterator[Document]:
    def tcp(*ports: int) -> list[dict[str, Any]]:
        return [{"protocol": "TCP", "port": port} for port in ports]

    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": o.monitoring}}}
    own = {"podSelector": {"matchLabels": _of_run(s)}}
    egress: list[Any] = [
        {"to": [own]},
        Why(
            {
                "to": [{"namespaceSelector": {}}, {"ipBlock": {"cidr": "169.254.20.10/32"}}],
                "ports": [{"protocol": "UDP", "port": 53}, *tcp(53)],
            },
            "DNS; the address is that of the cache which some clusters run on each node.",
        ),
    ]
    if s.outside:
        egress.append(Why({"ports": tcp(*s.outside)}, "The object store of checkpoint.dir."))
    yield _document(
        "networking.k8s.io/v1",
        "NetworkPolicy",
        f"{s.name}-run",
        o,
        _of_run(s),
        spec={
            "podSelector": {"matchLabels": _of_run(s)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                Why({"from": [own]}, "Ray, NCCL and gloo choose their ports: everything between the pods of the run."),
                {"from": [monitoring], "ports": tcp(pods.RAY_METRICS_PORT)},
            ],
            "egress": egress,
        },
    )
    egress = [Why({"ports": tcp(443, 6443)}, "Kubernetes' API server, for the autoscaler; it has no label to select.")]
    if o.redis:
        egress.append(Why({"ports": tcp(port_of(o.redis, 6379))}, "Redis, which keeps Ray's control store."))
    shown = [port_of(url, 443) for url in (o.prometheus, o.grafana) if url]
    if shown:
        egress.append(Why({"to": [monitoring], "ports": tcp(*shown)}, "What Ray's dashboard shows its figures from."))
    operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/component": "kuberay-operator"}}}
    scraped = tcp(pods.AUTOSCALER_METRICS_PORT, pods.DASHBOARD_METRICS_PORT, c.metrics.port)
    yield _document(
        "networking.k8s.io/v1",
        "NetworkPolicy",
        f"{s.name}-head",
        o,
        _of_run(s),
        spec={
            "podSelector": {"matchLabels": pods.labels(s, "head")},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                Why({"from": [operator], "ports": tcp(pods.DASHBOARD_PORT)}, "The operator asks how the job does, and stops it."),
                Why({"from": [monitoring], "ports": scraped}, "POST /stop and /rescale are on the run's port, too, and want its token."),
            ],
            "egress": egress,
        },
    )


# -------------------------------------------------------------------------------------------------------- Ray's own kinds


def _job(c: RunConfig, o: Options, s: Sizes) -> Document:
    spec: dict[str, Any] = {
        "entrypoint": Why(
            f"vescale-ray train {pods.CONFIG_FOLDER}/{pods.CONFIG_FILE}",
            "A run is known by its name and folder, not by the job's id: what is submitted again goes on from the newest checkpoint.",
        ),
        "submissionMode": "K8sJobMode",
        "submitterConfig": {"backoffLimit": 3},
        "submitterPodTemplate": pods.submitter(o, s),
        "backoffLimit": Why(3, "Each of these retries is a new RayCluster. What a run survives by itself does not count here."),
        "activeDeadlineSeconds": Why(o.deadline_s, "The operator ends the job after so long, whatever it does."),
        "runtimeEnvYAML": Why(
            yaml.safe_dump({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(max(o.drain_s, LEAST_STOP_S))}}),
            "Time for the last checkpoint when the job is stopped; Ray's own 3 s are too few. Nothing is installed at run time.",
        ),
    }
    if o.has("kueue"):
        spec["suspend"] = Why(True, "Kueue starts it when the queue has room for all of the first pods; it stops by deleting them.")
        spec["shutdownAfterJobFinishes"] = Why(True, "Needed with suspend, and excludes deletionRules.")
        spec["ttlSecondsAfterFinished"] = KEPT_AFTER_SUCCESS_S
    else:
        if o.deadline_s > START_S:  # else that is the earlier one
            spec["preRunningDeadlineSeconds"] = Why(START_S, "A job whose pods find no place fails, instead of waiting unseen.")

        def rule(policy: str, ttl: int, **when: str) -> dict[str, Any]:
            return {"policy": policy, "condition": {**when, "ttlSeconds": ttl}}

        rules = [
            rule("DeleteCluster", KEPT_AFTER_SUCCESS_S, jobStatus="SUCCEEDED"),
            rule("DeleteCluster", KEPT_AFTER_FAILURE_S, jobStatus="FAILED"),
            rule("DeleteCluster", KEPT_AFTER_FAILURE_S, jobDeploymentStatus="Failed"),
            rule("DeleteSelf", WEEK_S, jobStatus="SUCCEEDED"),
            rule("DeleteSelf", WEEK_S, jobStatus="FAILED"),
            rule("DeleteSelf", WEEK_S, jobDeploymentStatus="Failed"),
        ]
        reason = "After success the cluster goes soon, after a failure there is an hour to look at it; the record stays for a week."
        spec["deletionStrategy"] = {"deletionRules": Why(rules, reason)}
    spec["rayClusterSpec"] = _cluster_spec(c, o, s)
    return _ray("RayJob", o, s, spec)


def _cluster(c: RunConfig, o: Options, s: Sizes) -> Document:
    spec = _cluster_spec(c, o, s)
    if o.has("kueue"):
        spec = {"suspend": Why(True, "Kueue starts it when the queue has room for all of the first pods."), **spec}
    return _ray("RayCluster", o, s, spec)


def _ray(kind: str, o: Options, s: Sizes, spec: dict[str, Any]) -> Document:
    if not o.has("kueue"):
        return _document("ray.io/v1", kind, s.name, o, _of_run(s), spec=spec)
    document = _document("ray.io/v1", kind, s.name, o, {**_of_run(s), KUEUES_LABEL: str(o.queue)}, spec=spec)
    document["metadata"]["annotations"] = Why(
        {KUEUES_ELASTIC: "true"},
        "Kueue takes a job that is autoscaled only with this: 0.18 or later, before that (from 0.16) with its feature gate "
        "ElasticJobsViaWorkloadSlices. What the autoscaler adds has to find quota, too.",
    )
    return document


def _cluster_spec(c: RunConfig, o: Options, s: Sizes) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "rayVersion": RAY_VERSION,
        "authOptions": Why({"mode": "token"}, "Without it whoever reaches the dashboard runs code. The operator makes the Secret."),
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {
            "version": "v2",
            "idleTimeoutSeconds": Why(300, "More than a node ever waits for its peers, or nodes would come and go."),
            "upscalingMode": "Default",
            "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "1Gi"}},
            "securityContext": pods.CONTAINER_SECURITY,
            "volumeMounts": [{"name": "kube-api", "mountPath": TOKEN_FOLDER, "readOnly": True}],
        },
    }
    if o.has("gcs-ft"):
        # No externalStorageNamespace: with one of its own name, a retry of the job would read the state of the cluster that failed.
        spec["gcsFaultToleranceOptions"] = Why(
            {
                "redisAddress": str(o.redis),
                "redisPassword": {"valueFrom": {"secretKeyRef": {"name": pods.redis_secret(s), "key": "password"}}},
            },
            "Worker pods and the record of jobs outlive a head that is lost. The job that ran does not, as its driver ran there: "
            "submitted again, it goes on from the newest checkpoint.",
        )
    spec["headGroupSpec"] = {
        "rayStartParams": {
            "num-cpus": Why("0", "Controller and driver only: the head must not be lost to a step that takes too much memory."),
            "dashboard-host": "0.0.0.0",
        },
        "template": pods.head(c, o, s),
    }
    spec["workerGroupSpecs"] = list(_groups(c, o, s))
    return spec


def _groups(c: RunConfig, o: Options, s: Sizes) -> Iterator[dict[str, Any]]:
    def group(name: str, fewest: Any, first: int, most: int, spot: bool, **more: Any) -> dict[str, Any]:
        return {
            "groupName": name,
            **more,
            "minReplicas": fewest,
            "replicas": first,
            "maxReplicas": most,
            "rayStartParams": {
                "object-store-memory": Why(str(s.object_store), "Half of /dev/shm; shards move between the workers' processes without it.")
            },
            "template": pods.worker(c, o, s, spot),
        }

    ranks = f"{s.per_pod} worker{'s' if s.per_pod > 1 else ''} of the run in each pod"
    if not o.has("spot"):
        counts = f"elastic.min_workers = {c.elastic.min_workers}, workers = {c.elastic.workers}, max_workers = {c.max_workers}"
        fewest = Why(s.fewest, f"{ranks}: {counts}.")
        yield group("workers", fewest, s.first, s.most, False)
        return
    yield group(
        "workers",
        Why(s.fewest, f"{ranks}: elastic.min_workers = {c.elastic.min_workers} are on nodes that stay."),
        s.fewest,
        s.fewest,
        False,
    )
    yield group(
        "spot",
        Why(0, "All of these may go at once. A pre-empted pod has as long as the provider gives: set --drain-s below that."),
        max(0, s.first - s.fewest),
        s.most - s.fewest,
        True,
        priority=Why(10, "The autoscaler asks for these first; 0 is the other group's."),
    )


# ------------------------------------------------------------------------------------------------- once in each namespace


def setup(o: Options) -> list[Document]:
    """What is there before the first run."""
    documents: list[Document] = []
    if o.namespace != "default":
        level = {"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/warn": "restricted"}
        documents.append(_document("v1", "Namespace", o.namespace, None, level))
    if o.priority_class is None:
        for name, value, policy, text in (
            (pods.PRIORITIES[0], 10000, "PreemptLowerPriority", "Heads of Ray clusters: a run does not survive their loss."),
            (pods.PRIORITIES[1], 1000, "Never", "Workers: a run goes on with fewer of them, and waits rather than evict others."),
        ):
            rest = {"value": value, "preemptionPolicy": policy, "globalDefault": False, "description": text}
            documents.append(_document("scheduling.k8s.io/v1", "PriorityClass", name, None, {}, **rest))
    spec: dict[str, Any] = {
        "accessModes": Why(["ReadWriteMany"], "Every pod writes its part of a checkpoint."),
        "resources": {"requests": {"storage": o.volume_size}},
    }
    if o.storage_class:
        spec["storageClassName"] = o.storage_class
    documents.append(_document("v1", "PersistentVolumeClaim", o.claim, o, {}, spec=spec))
    return documents


def monitor(o: Options) -> list[Document]:
    """For all runs of the namespace: what the Prometheus operator scrapes, the alerts, and Grafana's dashboard."""
    key, _, value = o.monitor_label.partition("=")

    def endpoint(port: str) -> dict[str, Any]:
        relabel = {"sourceLabels": ["__meta_kubernetes_pod_label_ray_io_cluster"], "targetLabel": "ray_io_cluster"}
        # vescale_worker_info tells the pod of each worker: without this, Prometheus would put the pod that was scraped in its place.
        own = {"honorLabels": True} if port == "vescale-metrics" else {}
        return {"port": port, "interval": "10s", **own, "relabelings": [relabel]}

    documents = []
    for role, ports in (("head", ("metrics", "as-metrics", "dash-metrics", "vescale-metrics")), ("worker", ("metrics",))):
        spec = {"selector": {"matchLabels": {ROLE_LABEL: role}}, "podMetricsEndpoints": [endpoint(port) for port in ports]}
        documents.append(_document("monitoring.coreos.com/v1", "PodMonitor", f"vescale-ray-{role}", o, {key: value}, spec=spec))
    shipped = files("vescale_ray.deploy")
    alerts = yaml.safe_load((shipped / "alerts.yml").read_text(encoding="utf-8").replace(f"{RUNBOOKS}#", f"{o.runbooks}#"))
    documents.append(_document("monitoring.coreos.com/v1", "PrometheusRule", "vescale-ray", o, {key: value}, spec=alerts))
    board = {"vescale.json": (shipped / "grafana" / "vescale.json").read_text(encoding="utf-8")}
    # The label that Grafana's sidecar of kube-prometheus-stack looks for.
    documents.append(_document("v1", "ConfigMap", "vescale-ray-dashboard", o, {"grafana_dashboard": "1"}, data=board))
    return documents
