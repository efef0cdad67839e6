"""More mistakes, of those that an operator makes in a manifest that was good: each with who has to catch it and words of the complaint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.deploy.mistakes import (
    CLUSTER,
    HEAD,
    HEAD_ENV,
    HEAD_GROUP,
    JOB,
    RULES,
    WORKER,
    WORKER_GROUP,
    Documents,
    Mistake,
    Spoil,
    add,
    at,
    both,
    drop,
    put,
)

HEADS, WORKERS = f"{HEAD}.containers.0", f"{WORKER}.containers.0"
ON_RUN, ON_HEAD = "NetworkPolicy/-run:spec", "NetworkPolicy/-head:spec"
ENDS, ALERT = "PodMonitor/-head:spec.podMetricsEndpoints", "PrometheusRule:spec.groups.1.rules.0"
TERMS = f"{HEAD}.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms"
RUN = "vescale-ray train /etc/vescale-ray/run.yaml"
TOKEN = f"{HEAD}.volumes.3.projected.sources"


def changed(path: str, change: Callable[[Any], Any]) -> Spoil:
    return lambda documents: change(at(documents, path))


def in_the_run(old: str, new: str) -> Spoil:
    def spoil(documents: Documents) -> None:
        data = at(documents, "ConfigMap:data")
        assert old in data["run.yaml"]
        data["run.yaml"] = data["run.yaml"].replace(old, new)

    return spoil


def another(kind: str, version: str, **more: Any) -> Spoil:
    made = {"apiVersion": version, "kind": kind, "metadata": {"name": "x", "namespace": "vescale-ray"}, **more}
    return lambda documents: documents.append(made)


def _spot(documents: Documents) -> None:
    """A second group, on pre-emptible nodes, which nothing keeps the first one from."""
    groups = at(documents, f"{CLUSTER}.workerGroupSpecs")
    first = groups[0]["template"]
    spec = {**first["spec"], "nodeSelector": {"karpenter.sh/capacity-type": "spot"}}
    groups.append({**groups[0], "groupName": "spot", "minReplicas": 0, "template": {**first, "spec": spec}})
    first["spec"] = {key: value for key, value in first["spec"].items() if key != "affinity"}


def _sized(**quantities: str) -> Spoil:
    return both(*(put(f"{HEADS}.resources.{side}", dict(quantities)) for side in ("limits", "requests")))


def _variable(**source: Any) -> Spoil:
    return add(HEAD_ENV, {"name": "A", **source})


SHAPES = [
    Mistake("rules", what, spoil, words)
    for what, spoil, words in (
        ("an old version of RayJob", put("RayJob:", apiVersion="ray.io/v1alpha1"), "it must be ray.io/v1"),
        ("an old version of a budget", put("PodDisruptionBudget:", apiVersion="policy/v1beta1"), "it must be policy/v1"),
        ("another's group", put("PrometheusRule:", apiVersion="monitoring.coreos.io/v1"), "it must be monitoring.coreos.com/v1"),
        ("a mistyped kind", put("ConfigMap:", kind="Configmap"), "did you mean ConfigMap?"),
        ("no namespace", drop("ConfigMap:metadata", "namespace"), "it has no namespace"),
        ("all rights", another("ClusterRoleBinding", "rbac.authorization.k8s.io/v1"), "a run's manifests hold none"),
        ("a role", another("Role", "rbac.authorization.k8s.io/v1", rules=[{"verbs": ["*"]}]), "a run's manifests hold none"),
        ("a password among them", another("Secret", "v1", stringData={"a": "b"}), "a run's manifests hold none"),
        ("a way in from outside", another("Service", "v1", spec={"type": "LoadBalancer"}), "a run's manifests hold none"),
        ("a namespace without a level", drop("Namespace:metadata", "labels"), "enforce is missing"),
    )
]
EMPTY = [
    Mistake("fields", what, spoil, words)
    for what, spoil, words in (
        ("an entry without a value", add(f"{ON_RUN}.ingress", None), "spec.ingress[2] is empty"),
        ("a key without a value", put(f"{WORKER}.volumes.1", emptyDir=None), "is empty: leave it out"),
        ("a policy for nobody in particular", drop(ON_RUN, "podSelector"), "it has no spec.podSelector"),
        ("an object without a name", drop("ConfigMap:metadata", "name"), "a ConfigMap has no metadata.name"),
        ("a document without a kind", drop("ConfigMap:", "kind"), "a document has no kind"),
        ("a pod without a container", drop(f"{WORKER}.containers", 0), "template has no container"),
    )
]
PARTS = [
    Mistake("rules", what, spoil, words)
    for what, spoil, words in (
        ("Exists, and a value", put(f"{WORKER}.tolerations.0", value="present"), "operator Exists takes no value"),
        ("a time for another effect", put(f"{WORKER}.tolerations.0", tolerationSeconds=60), "needs the effect NoExecute"),
        ("a toleration of all", drop(f"{WORKER}.tolerations.0", "key"), "without a key every taint is tolerated"),
        ("In nothing", drop(f"{TERMS}.0.matchExpressions.0", "values"), "operator NotIn needs values"),
        ("a term of nothing", put(f"{TERMS}.0", matchExpressions=[]), "is for no node at all"),
        ("a skew of none", put(f"{WORKER}.topologySpreadConstraints.0", maxSkew=0), "maxSkew is 0"),
        ("a volume of two kinds", put(f"{WORKER}.volumes.1", secret={"secretName": "x"}), "has emptyDir and secret as its source"),
        ("a volume of none", drop(f"{WORKER}.volumes.1", "emptyDir"), "has nothing as its source"),
        ("a volume's name", put(f"{WORKER}.volumes.1", name="Scratch_1"), "the name Scratch_1 takes"),
        ("a container's name", put(WORKERS, name="ray_worker"), "the name ray_worker takes"),
        ("two values", _variable(value="x", valueFrom={"fieldRef": {"fieldPath": "metadata.name"}}), "has value and valueFrom"),
        ("no value", _variable(), "the variable A has no value"),
        ("a variable without a name", add(HEAD_ENV, {"name": "", "value": "x"}), "is no variable's name"),
        ("a field that is none", _variable(valueFrom={"fieldRef": {"fieldPath": "metadata.nam"}}), "is none that a pod can be told"),
        ("an address in a range's place", put(f"{ON_RUN}.egress.1.to.1.ipBlock", cidr="169.254.20.10"), "no range of addresses"),
        ("a user below zero", put(f"{WORKER}.securityContext", runAsUser=-1), "runAsUser is -1"),
        ("a port in quotes", put(f"{ON_HEAD}.egress.0.ports.0", port="443"), "write the number, without quotes"),
        ("a spread over nothing", put(f"{WORKER}.topologySpreadConstraints.0", topologyKey=""), "topologyKey '' is no key"),
        ("a claim of a mebibyte", put("PersistentVolumeClaim:spec.resources.requests", storage="1Mi"), "too little for a run"),
        ("a token for a minute", put(f"{TOKEN}.0.serviceAccountToken", expirationSeconds=60), "a token lives 600 s at least"),
        ("a limit of next to nothing", put(f"{WORKER}.volumes.1.emptyDir", sizeLimit="1Mi"), "a pod that writes more is evicted"),
        ("a limit of none", put(f"{WORKER}.volumes.1.emptyDir", sizeLimit="0"), "which Kubernetes takes as none"),
        (
            "requests above limits",
            put(f"{CLUSTER}.autoscalerOptions", resources={"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}),
            "more than its limit",
        ),
        ("thousandths of bytes", _sized(memory="16m"), "memory is 16m, 0.016 bytes"),
        ("a priority of Kubernetes' own", put("PriorityClass:", value=2_000_000_000), "the most that is not Kubernetes' own"),
        ("a priority for everybody", put("PriorityClass:", globalDefault=True), "to every pod of the cluster"),
        ("a claim of no size", put("PersistentVolumeClaim:spec", resources={}), "it asks for no storage"),
        ("a claim of blocks", put("PersistentVolumeClaim:spec", volumeMode="Block"), "pods mount it as a file system"),
        ("a way out of a volume", put(f"{WORKERS}.volumeMounts.0", subPath="../x"), "subPath ../x leaves the volume"),
        ("a mistyped policy of eviction", put("PodDisruptionBudget:spec", unhealthyPodEvictionPolicy="Always"), "one of IfHealthyBudget"),
        ("a mistyped change of groups", put(f"{WORKER}.securityContext", fsGroupChangePolicy="OnRoot"), "one of OnRootMismatch"),
        (
            "a key that is almost one",
            put(f"{ON_RUN}.ingress.1.from.0.namespaceSelector", matchLabels={"kubernetes.io/metadata.nam": "monitoring"}),
            "did you mean kubernetes.io/metadata.name?",
        ),
    )
]
STARTS = [
    Mistake("rules", what, spoil, words)
    for what, spoil, words in (
        (
            "a mistyped parameter",
            put(f"{HEAD_GROUP}.rayStartParams", {"num_gpus": "0"}),
            "`ray start` has no --num_gpus: did you mean num-gpus?",
        ),
        (
            "a store with its unit",
            put(f"{WORKER_GROUP}.rayStartParams", {"object-store-memory": "8Gi"}),
            "takes a whole number, sizes in bytes",
        ),
        (
            "metrics elsewhere",
            put(f"{WORKER_GROUP}.rayStartParams", {"metrics-export-port": "9090"}),
            "its container's port metrics is 8080",
        ),
        ("no dashboard", put(f"{HEAD_GROUP}.rayStartParams", {"include-dashboard": "false"}), "reach the cluster by its dashboard"),
        (
            "a store larger than the head",
            put(f"{HEAD_GROUP}.rayStartParams", {"object-store-memory": str(2**36)}),
            "is not less than its memory",
        ),
        ("Ray's own share for the store", drop(f"{WORKER_GROUP}.rayStartParams", "object-store-memory"), "30% of its memory"),
        ("another head", put(f"{WORKER_GROUP}.rayStartParams", address="10.0.0.1:6379"), "rayStartParams.address: the operator sets it"),
        ("a folder that is not there", put(f"{HEAD_GROUP}.rayStartParams", {"temp-dir": "/data"}), "only /tmp is there for it"),
        ("one node for all", put(WORKER, nodeName="n"), "nodeName passes the scheduler by"),
        ("a long name of a group", put(WORKER_GROUP, groupName="a" * 64), "63 at most"),
        ("another command", put(WORKERS, command=["sleep", "infinity"]), "before the operator's `ray start`"),
        (
            "no command of Ray's",
            put(f"{HEAD_GROUP}.template.metadata.annotations", {"ray.io/overwrite-container-cmd": "true"}),
            "not start Ray",
        ),
        ("a probe of its own", put(HEADS, livenessProbe={"httpGet": {"port": 9999}}), "takes the place of the operator's"),
        ("the node's DNS", put(WORKER, dnsPolicy="Default"), "the cluster's own DNS knows"),
        ("an end after an hour", put(WORKER, activeDeadlineSeconds=3600), "activeDeadlineSeconds 3600 ends the pod"),
        ("volumes that belong to root", drop(f"{WORKER}.securityContext", "fsGroup"), "has no fsGroup"),
        (
            "a volume that the namespace refuses",
            add(f"{WORKER}.volumes", {"name": "x", "nfs": {"path": "/", "server": "x"}}),
            "of the kind nfs",
        ),
        ("a host's process", put(f"{WORKER}.securityContext", windowsOptions={"hostProcess": True}), "hostProcess gives it the node"),
        ("no AppArmor", put(f"{WORKER}.securityContext", appArmorProfile={"type": "Unconfined"}), "what holds it in"),
        ("no token by a variable", add(HEAD_ENV, {"name": "RAY_AUTH_MODE", "value": "disabled"}), "undoes authOptions"),
        ("a mistyped variable", put(f"{WORKERS}.env.2", name="NCCL_SOCKET_IFNAM"), "did you mean NCCL_SOCKET_IFNAME?"),
        ("nothing at /tmp", put(f"{WORKERS}.volumeMounts.1", mountPath="/temp"), "nothing is mounted at /tmp"),
        ("NCCL to itself", put(f"{WORKERS}.env.2", value="lo"), "no other pod can be reached by it"),
        ("NCCL that ends its process", put(f"{WORKERS}.env.4", value="1"), "it must be 2"),
        ("a head for all the world", put(HEAD_GROUP, serviceType="LoadBalancer"), "a Service of type LoadBalancer lets in"),
        ("an ingress", put(HEAD_GROUP, enableIngress=True), "enableIngress lets in"),
        ("a GPU for the head", _sized(**{"nvidia.com/gpu": "1"}), "which nothing there uses"),
        ("an autoscaler of another Ray", put(f"{CLUSTER}.autoscalerOptions", image="ray:2.9.0"), "must be the head's"),
        (
            "a secret of the autoscaler's",
            put(f"{CLUSTER}.autoscalerOptions", env=[{"name": "REDIS_PASSWORD", "value": "x"}]),
            "autoscalerOptions: the variable REDIS_PASSWORD is a secret",
        ),
        (
            "a submitter that sleeps",
            put(f"{JOB}.submitterPodTemplate.spec.containers.0", command=["sleep"]),
            "`ray job submit`: leave them out",
        ),
        ("a driver on a worker", put(JOB, entrypointNumCpus=1), "entrypointNumCpus: the driver would go to a worker's pod"),
        ("a token that is elsewhere", put(f"{TOKEN}.0.serviceAccountToken", path="tokn"), "has no file token"),
        ("a head on nodes that vanish", put(HEAD, nodeSelector={"cloud.google.com/gke-spot": "true"}), "asks for a pre-emptible node"),
        ("workers that stay among those that go", _spot, "nothing keeps it from the pre-emptible nodes"),
        (
            "a head that may be disrupted",
            drop(f"{HEAD_GROUP}.template.metadata.annotations", "karpenter.sh/do-not-disrupt"),
            'must be "true"',
        ),
        ("bounds of nobody's", drop(CLUSTER, "enableInTreeAutoscaling"), "need enableInTreeAutoscaling: true"),
        ("a group that is idle for a second", put(WORKER_GROUP, idleTimeoutSeconds=1), "would be taken away again"),
        ("priority with an older Ray", both(put(CLUSTER, rayVersion="2.54.0"), put(WORKER_GROUP, priority=1)), "needs rayVersion 2.56"),
    )
]
JOBS = [
    Mistake("rules", what, spoil, words)
    for what, spoil, words in (
        ("a cluster for ever", drop(JOB, "deletionStrategy"), "nothing deletes the cluster of a job that has succeeded"),
        (
            "a cluster that failed, for ever",
            changed(RULES, lambda rules: [rules.remove(one) for one in list(rules) if "jobDeploymentStatus" in one["condition"]]),
            "nothing deletes the cluster of a job that has failed",
        ),
        ("no retry", drop(JOB, "backoffLimit"), "would not be taken up again"),
        ("one try of the submitter", put(f"{JOB}.submitterConfig", backoffLimit=0), "would end a job that is well"),
        ("the operator's own submitter", drop(JOB, "submitterPodTemplate"), "submitterPodTemplate is missing"),
        ("five seconds to start", put(JOB, preRunningDeadlineSeconds=5), "too few for pods to start"),
        ("an end before the beginning", put(JOB, activeDeadlineSeconds=600), "is over before"),
        ("MultiKueue, and no queue", put(JOB, managedBy="kueue.x-k8s.io/multikueue"), "nobody would start it"),
        ("a cluster by another label", put(JOB, clusterSelector={"cluster": "x"}), "clusterSelector has no ray.io/cluster"),
        ("ten seconds to stop", put(JOB, runtimeEnvYAML="env_vars: {RAY_JOB_STOP_WAIT_TIME_S: '10'}"), "in less than 30 s"),
        ("variables in a list", put(JOB, runtimeEnvYAML="env_vars: [A=1]"), "env_vars holds no mapping"),
        ("another cluster by a variable", put(JOB, runtimeEnvYAML="env_vars: {RAY_ADDRESS: x}"), "RAY_ADDRESS: Ray sets it"),
        (
            "another image at run time",
            put(JOB, runtimeEnvYAML="image_uri: x\nenv_vars: {RAY_JOB_STOP_WAIT_TIME_S: '100'}"),
            "has image_uri",
        ),
        (
            "no token for the job",
            put(JOB, runtimeEnvYAML="env_vars: {RAY_JOB_STOP_WAIT_TIME_S: '100', RAY_AUTH_MODE: disabled}"),
            "RAY_AUTH_MODE disabled undoes",
        ),
    )
]
WATCHING = [
    Mistake("rules", what, spoil, words)
    for what, spoil, words in (
        ("another path", put(f"{ENDS}.3", path="/metric"), "the path /metric is none"),
        ("a timeout above the interval", put(f"{ENDS}.0", scrapeTimeout="30s"), "is longer than the interval"),
        ("an interval of ten minutes", put(f"{ENDS}.0", interval="10m"), "an interval of 10m is too long"),
        ("another's pod", drop(f"{ENDS}.3", "honorLabels"), "without honorLabels"),
        ("a port twice", put(f"{ENDS}.1", port="metrics"), "the port metrics is scraped twice"),
        ("nothing to scrape", put("PodMonitor/-head:spec", podMetricsEndpoints=[]), "it has no endpoint"),
        ("a label that is none", put(f"{ENDS}.0.relabelings.0", sourceLabels=["ray.io/cluster"]), "ray.io/cluster is no label's name"),
        ("no regular expression", put(f"{ENDS}.0.relabelings.0", regex="("), "is no regular expression"),
        ("brackets that don't close", put(ALERT, expr="sum(rate(vescale_steps_total[5m])"), "of its expr don't close"),
        ("no question", put(ALERT, expr=" "), "its expr is empty"),
        ("no rules", put("PrometheusRule:spec", groups=[]), "it has no rule"),
        ("a runbook without an address", put(f"{ALERT}.annotations", runbook_url="runbooks.md#x"), "is no address"),
        ("a severity of nobody's", put(f"{ALERT}.labels", severity="pager"), "its severity is pager"),
        ("an alert that records", put(ALERT, record="x:y"), "either alert or record"),
        ("a record that waits", put("PrometheusRule:spec.groups.0.rules.0", {"for": "5m"}), "a rule that records takes no for"),
        ("a series with a blank", put("PrometheusRule:spec.groups.0.rules.0", record="good put"), "a series has letters"),
        ("a group twice", put("PrometheusRule:spec.groups.1", name="vescale-recorded"), "the group vescale-recorded is there twice"),
        ("an alert twice", put("PrometheusRule:spec.groups.1.rules.1", alert="VescaleTrainingStalled"), "is there twice"),
        ("no runbook", drop(f"{ALERT}.annotations", "runbook_url"), "it has no runbook_url"),
        ("braces that don't close", put(f"{ALERT}.annotations", summary="{{ $labels.run }: stalled"), "the braces of its summary"),
        ("a dashboard that nobody finds", drop("ConfigMap/dashboard:metadata", "labels"), "by which Grafana's sidecar finds it"),
        ("half a dashboard", put("ConfigMap/dashboard:data", {"vescale.json": "{"}), "vescale.json is not valid JSON"),
    )
]
BETWEEN = [
    Mistake("references", what, spoil, words)
    for what, spoil, words in (
        (
            "a namespace that nothing makes",
            put("Namespace:metadata", name="vescale"),
            "the documents are in vescale-ray, which nothing makes",
        ),
        ("an override with a mistyped key", put(JOB, entrypoint=f"{RUN} train.stps=5"), "did you mean train.steps"),
        ("an override that leaves the volume", put(JOB, entrypoint=f"{RUN} run.dir=/data"), "is not on a volume"),
        ("checkpoints off the volume", put(JOB, entrypoint=f"{RUN} checkpoint.dir=file:///data"), "= file:///data is not on a"),
        ("a relative folder", put(JOB, entrypoint=f"{RUN} run.dir=runs"), "run.dir = runs is not on a volume"),
        ("an option that is none", put(JOB, entrypoint=f"{RUN} --resum auto"), "can't be read"),
        (
            "another name for the run's file",
            put(f"{HEAD}.volumes.1.configMap", items=[{"key": "run.yaml", "path": "x"}]),
            "no ConfigMap is mounted there",
        ),
        ("the run's file in a folder's place", put(f"{HEADS}.volumeMounts.1", subPath="run.yaml"), "no ConfigMap is mounted there"),
        ("a key twice in the run", in_the_run("\nmetrics:", "\nray: {}\nmetrics:"), "is given twice"),
        ("metrics for the head alone", in_the_run("host: 0.0.0.0", "host: 127.0.0.1"), "Prometheus asks from another pod"),
        ("a cluster elsewhere", in_the_run("ray: {address: null", "ray: {address: 'other:6379'"), "the pods are the cluster"),
        (
            "a store that is shut off",
            in_the_run("checkpoint: {dir: null", "checkpoint: {dir: 's3://bucket/x'"),
            "ask the store of checkpoint.dir (port 443)",
        ),
        (
            "GPUs for a run without",
            both(in_the_run("gpus_per_worker: 1.0", "gpus_per_worker: 0"), in_the_run("device: cuda", "device: cpu")),
            "which the run does not use",
        ),
        ("GPUs that the group denies", put(WORKER_GROUP, resources={"CPU": "6", "GPU": "0"}), "no worker of the run fits"),
        ("a part of the claim", put(f"{WORKERS}.volumeMounts.0", subPath="w"), "they would not meet"),
        ("a range of ports", put(f"{ON_HEAD}.ingress.1.ports.0", endPort=65535), "lets in ports up to 65535"),
        ("a claim that only reads", put(f"{WORKER}.volumes.0.persistentVolumeClaim", readOnly=True), "mounted readOnly"),
        ("a folder that only reads", put(f"{WORKERS}.volumeMounts.1", readOnly=True), "nothing else writes to it"),
        ("a volume over the image", put(f"{WORKERS}.volumeMounts.1", mountPath="/usr"), "hides what the image"),
        ("a port by UDP", put(f"{HEADS}.ports.5", protocol="UDP"), "has no port vescale-metrics"),
        ("a way by UDP", put(f"{ON_HEAD}.ingress.0.ports.0", protocol="UDP"), "lets in who asks port 8265"),
        ("names by TCP alone", drop(f"{ON_RUN}.egress.1.ports", 0), "ask DNS"),
        ("every address", put(f"{ON_HEAD}.ingress.0", {"from": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]}), "lets in every address"),
        ("all namespaces", put(f"{ON_HEAD}.ingress.1", {"from": [{"namespaceSelector": {}}]}), "all pods of all namespaces"),
        ("all of the namespace", put(f"{ON_RUN}.ingress.0", {"from": [{"podSelector": {}}]}), "not the run's alone"),
        ("all ports", drop(f"{ON_HEAD}.ingress.1", "ports"), "names no port"),
        ("all ports of the world", drop(f"{ON_HEAD}.egress.0", "ports"), "names no port"),
        ("nobody in particular", add(f"{ON_RUN}.egress.1.to", {}), "has an empty peer"),
        (
            "a selector that leaves workers out",
            put(f"{ON_RUN}.podSelector", matchExpressions=[{"key": "vescale-ray/role", "operator": "NotIn", "values": ["worker"]}]),
            "no NetworkPolicy covers it",
        ),
        ("a policy for other runs", drop(f"{ON_HEAD}.podSelector.matchLabels", "vescale-ray/run"), "takes the pods of other runs"),
        ("a budget of all runs", drop("PodDisruptionBudget:spec.selector.matchLabels", "vescale-ray/run"), "counts the pods of other runs"),
        ("no way to Kubernetes' API", drop(f"{ON_HEAD}.egress", 0), "lets the autoscaler ask Kubernetes' API"),
        ("no way to Redis", put(CLUSTER, gcsFaultToleranceOptions={"redisAddress": "redis:6379"}), "lets it ask Redis at redis:6379"),
        ("a port of Redis' that is none", put(CLUSTER, gcsFaultToleranceOptions={"redisAddress": "redis:70000"}), "give HOST:PORT"),
        (
            "a password that is nowhere",
            put(CLUSTER, gcsFaultToleranceOptions={"redisAddress": "redis:6379", "redisPassword": {}}),
            "redisPassword has no valueFrom.secretKeyRef",
        ),
        ("variables of a Secret without a name", put(HEADS, envFrom=[{"secretRef": {}}]), "there is no Secret without a name"),
        ("a Redis without its port", put(CLUSTER, gcsFaultToleranceOptions={"redisAddress": "redis"}), "give HOST:PORT"),
        ("a token of nobody's", put(f"{CLUSTER}.authOptions", secretName="x"), "authOptions.secretName: there is no Secret x"),
        ("a certificate's other name", put(f"{TOKEN}.1.configMap.items.0", key="ca.cert"), "has no key ca.cert"),
        ("a variable of nobody's", _variable(valueFrom={"secretKeyRef": {"name": "x", "key": "k"}}), "there is no Secret x"),
        (
            "a variable of a key that is not there",
            _variable(valueFrom={"configMapKeyRef": {"name": "llama-110m-run", "key": "k"}}),
            "has no key k",
        ),
        ("priorities the wrong way round", put(WORKER, priorityClassName="vescale-ray-head"), "is not below the head's"),
        ("a head without a priority", drop(HEAD, "priorityClassName"), "heads would be evicted first"),
        ("the head's account for training code", put(WORKER, serviceAccountName="llama-110m"), "the rights of the autoscaler"),
        ("shards and copies on one node", drop(WORKER, "topologySpreadConstraints"), "a shard and its copy"),
        ("no run to be seen", drop(ENDS, 3), "no PodMonitor scrapes the port vescale-metrics"),
        ("rules of another Prometheus", put("PrometheusRule:metadata", labels={"release": "x"}), "have different labels"),
    )
]


def _ended_after(state: str, seconds: int) -> Spoil:
    def spoil(documents: Documents) -> None:
        for one in at(documents, RULES):
            if state in one["condition"].values():
                one["condition"]["ttlSeconds"] = seconds

    return spoil


def _spot_again(**more: Any) -> Spoil:
    """A second group, on pre-emptible nodes, as the overlay makes it."""

    def spoil(documents: Documents) -> None:
        groups = at(documents, f"{CLUSTER}.workerGroupSpecs")
        template = groups[0]["template"]
        spec = {key: value for key, value in template["spec"].items() if key != "affinity"}
        spec["nodeSelector"] = {"karpenter.sh/capacity-type": "spot"}
        taint = {"key": "karpenter.sh/capacity-type", "operator": "Equal", "value": "spot", "effect": "NoSchedule"}
        spec["tolerations"] = [*spec["tolerations"], taint]
        groups.append({**groups[0], "groupName": "spot", "minReplicas": 0, "template": {**template, "spec": {**spec, **more}}})

    return spoil


_params = f"{WORKER_GROUP}.rayStartParams"
_kueue = put("RayJob:metadata.labels", {"kueue.x-k8s.io/queue-name": "q"})
_drops = {"sourceLabels": ["__name__"], "regex": "vescale_.*_sum", "action": "drop"}
LEFT_OVER = [
    Mistake("rules", what, spoil, words)
    for what, spoil, words in (
        ("one container sees another's", put(HEAD, shareProcessNamespace=True), "training code the autoscaler's token"),
        ("an image that is never fetched", put(WORKERS, imagePullPolicy="Never"), "on a node that is new the image is not there"),
        ("a registry's credentials for some", put(WORKER, imagePullSecrets=[{"name": "x"}]), "imagePullSecrets are not those of"),
        ("a store's keys for some", put(HEADS, envFrom=[{"secretRef": {"name": "x"}}]), "envFrom are not those of"),
        ("GPUs that the pod has not", put(_params, {"num-gpus": "4"}), "tells Ray of 4, the pod has 1"),
        ("CPUs that the pod has not", put(WORKER_GROUP, resources={"CPU": "64"}), "resources.CPU tells Ray of 64, the pod has 6"),
        ("memory that the pod has not", put(_params, memory=str(2**40)), "rayStartParams.memory tells Ray of"),
        ("another taint's effect", put(f"{WORKER}.tolerations.0", effect="NoExecute"), "does not tolerate the taint of that name"),
        ("nodes of a taint that keeps it off", _spot_again(tolerations=[]), "which such nodes may have"),
        (
            "nodes of another kind than the toleration's",
            _spot_again(nodeSelector={"karpenter.sh/capacity-type": "on-demand"}),
            "asks for karpenter.sh/capacity-type=on-demand, its toleration is for",
        ),
        ("spilling into memory", put(f"{WORKER}.volumes.1.emptyDir", medium="Memory"), "what Ray spills there is meant to leave it"),
        ("a head of 512 MiB", put(f"{HEADS}.resources.limits", memory="512Mi"), "less than Ray's own processes take"),
        ("an autoscaler of 128 MiB", put(f"{CLUSTER}.autoscalerOptions.resources.limits", memory="128Mi"), "less than the operator's own"),
        ("one GPU for all", add(f"{WORKERS}.env", {"name": "CUDA_VISIBLE_DEVICES", "value": "0"}), "each worker to its own GPUs"),
        ("all GPUs of the node", add(f"{WORKERS}.env", {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}), "device plug-in sets it"),
        ("kernels one by one", add(f"{WORKERS}.env", {"name": "CUDA_LAUNCH_BLOCKING", "value": "1"}), "slows every step down"),
        ("an allocator's option in other words", put(f"{WORKERS}.env.6", value="expandable_segments=True"), "PyTorch takes NAME:VALUE"),
        (
            "a job's variable that slows it down",
            put(JOB, runtimeEnvYAML="env_vars: {RAY_JOB_STOP_WAIT_TIME_S: '100', NCCL_P2P_DISABLE: '1'}"),
            "env_vars: NCCL_P2P_DISABLE 1 slows every step down",
        ),
        (
            "a job's variable to itself",
            put(JOB, runtimeEnvYAML="env_vars: {RAY_JOB_STOP_WAIT_TIME_S: '100', NCCL_SOCKET_IFNAME: lo}"),
            "no other pod can be reached by it",
        ),
        ("a cluster for a week", _ended_after("Failed", 604800), "is deleted after 604800 s"),
        (
            "an end after half a minute",
            both(drop(JOB, "preRunningDeadlineSeconds"), put(JOB, activeDeadlineSeconds=30)),
            "too few for pods",
        ),
        ("nothing of the cluster deleted", put(f"{RULES}.0", policy="DeleteNone"), "for more than a day"),
        (
            "a queued cluster for a week",
            both(drop(JOB, "deletionStrategy"), put(JOB, shutdownAfterJobFinishes=True, ttlSecondsAfterFinished=604800)),
            "ttlSecondsAfterFinished 604800: its pods would stay",
        ),
        ("a queue, and not waiting", _kueue, "without suspend: true"),
        ("a run that can't be changed", put("ConfigMap/-run:", immutable=True), "that changes it would be refused"),
        (
            "a relabelling that mixes runs",
            put(f"{ENDS}.0.relabelings.0", targetLabel="namespace"),
            "by which alerts tell runs apart",
        ),
        (
            "a share of 80",
            changed("PrometheusRule:spec.groups.1.rules", lambda rules: rules[-1].update(expr="vescale:goodput:ratio_rate6h < 80")),
            "compares a ratio",
        ),
    )
]
APART = [
    Mistake("references", what, spoil, words)
    for what, spoil, words in (
        ("half a way to Kubernetes' API", drop(f"{ON_HEAD}.egress.0.ports", 1), "ask Kubernetes' API (port 6443)"),
        (
            "a Prometheus of two namespaces",
            put(f"{ON_HEAD}.ingress.1.from.0.namespaceSelector.matchLabels", {"kubernetes.io/metadata.name": "monitorin"}),
            "different namespaces to the ports",
        ),
        (
            "a namespace by a label that it may not have",
            put(f"{ON_HEAD}.ingress.1.from.0.namespaceSelector", matchLabels={"name": "monitoring"}),
            "a namespaceSelector by name",
        ),
        (
            "workers that evict others",
            lambda documents: at(documents, "PriorityClass/-worker:").pop("preemptionPolicy"),
            "evicts others' pods",
        ),
        ("a run that begins again at each retry", in_the_run("resume: auto", "resume: never"), "would begin with its first step"),
        ("GPUs for a run on CPUs", in_the_run("device: cuda", "device: cpu"), "which they would not use"),
        ("GPUs without CPUs", put(f"{WORKERS}.resources.limits", {"nvidia.com/gpu": "8"}), "has GPUs for 8 workers and CPUs for 1"),
        ("twice as many pods", put(WORKER_GROUP, maxReplicas=32), "pods would stand idle, and cost"),
        ("as many at the least as at the most", put(WORKER_GROUP, minReplicas=16), "minReplicas make room for 16 workers"),
        (
            "the fewest on nodes that vanish",
            both(_spot_again(), put(WORKER_GROUP, minReplicas=0)),
            "minReplicas on nodes that stay make room for 0 workers",
        ),
        ("a run's file that may be missing", put(f"{HEAD}.volumes.1.configMap", optional=True), "start with nothing in it"),
        (
            "a series under another name",
            put("PrometheusRule:spec.groups.0.rules.2", record="vescale:worker_tokens:rate_10m"),
            "asks for vescale:worker_tokens:rate10m, which none records",
        ),
        ("series that are left out", put(f"{ENDS}.3", metricRelabelings=[_drops]), "take away vescale_step_duration_seconds_sum"),
        (
            "a label that is left out",
            put(f"{ENDS}.3", metricRelabelings=[{"regex": "state", "action": "labeldrop"}]),
            "take away state, which alerts ask for",
        ),
    )
]

_near = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"vescale-ray/role": "worker"}}}
_other_space = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "team"}}}


def _as_a_wish(documents: Documents) -> None:
    affinity = at(documents, f"{HEAD}.affinity.nodeAffinity")
    (term,) = affinity.pop("requiredDuringSchedulingIgnoredDuringExecution")["nodeSelectorTerms"]
    affinity["preferredDuringSchedulingIgnoredDuringExecution"] = [{"weight": 1, "preference": term}]


ADDED = [
    Mistake("rules", what, spoil, words)
    for what, spoil, words in (
        ("a mesh", put(f"{WORKER_GROUP}.template.metadata", annotations={"sidecar.istio.io/inject": "true"}), "a mesh's proxy"),
        ("the operator's own label", put(f"{WORKER_GROUP}.template.metadata.labels", {"ray.io/cluster": "x"}), "is the operator's to set"),
        (
            "an end of the submitter",
            put(f"{JOB}.submitterPodTemplate.spec", activeDeadlineSeconds=3600),
            "activeDeadlineSeconds 3600 ends the pod",
        ),
        ("another scheduler", put(WORKER, schedulerName="gpu"), "a scheduler that may not be there"),
        ("a gate before the scheduler", put(WORKER, schedulingGates=[{"name": "x"}]), "until somebody lifts it"),
        ("a gate before it is ready", put(HEAD, readinessGates=[{"conditionType": "x"}]), "until somebody else says so"),
        ("a priority of its own", put(WORKER, priority=5), "is the priority class's to say"),
        ("the group root", put(f"{WORKER}.securityContext", runAsGroup=0), "runAsGroup is 0"),
        ("the group root besides", put(f"{WORKER}.securityContext", supplementalGroups=[0]), "supplementalGroups has 0"),
        (
            "a setting of the node's",
            put(f"{WORKER}.securityContext", sysctls=[{"name": "net.core.somaxconn", "value": "9"}]),
            "sysctl net.core",
        ),
        ("SELinux that lets all through", put(f"{WORKER}.securityContext", seLinuxOptions={"type": "spc_t"}), "seLinuxOptions.type spc_t"),
        (
            "a capability that the namespace refuses",
            put(f"{WORKERS}.securityContext.capabilities", add=["IPC_LOCK"]),
            "IPC_LOCK are none that the namespace's level",
        ),
        (
            "what is installed at the start",
            put(WORKER, initContainers=[{"name": "x", "command": ["sh", "-c", "pip install wandb"]}]),
            "calls pip: nothing is fetched or installed",
        ),
        (
            "workers on one node",
            put(f"{WORKER}.affinity", podAffinity={"requiredDuringSchedulingIgnoredDuringExecution": [_near]}),
            "on one node",
        ),
        ("a head that would rather stay", _as_a_wish, "keep it from pre-emptible nodes"),
        (
            "no limit of what it writes",
            both(*(drop(f"{HEADS}.resources.{side}", "ephemeral-storage") for side in ("limits", "requests"))),
            "node",
        ),
        ("idle for a day", put(f"{CLUSTER}.autoscalerOptions", idleTimeoutSeconds=86400), "for more than six hours"),
        ("a group that is idle for a day", put(WORKER_GROUP, idleTimeoutSeconds=86400), "for more than six hours"),
        ("an autoscaler that is never fetched", put(f"{CLUSTER}.autoscalerOptions", imagePullPolicy="Never"), "imagePullPolicy Never"),
        ("pods to be deleted", put(WORKER_GROUP, scaleStrategy={"workersToDelete": ["x"]}), "is the autoscaler's to write"),
        ("a cluster made anew", put(CLUSTER, upgradeStrategy={"type": "Recreate"}), "would end what runs"),
        ("another Ray than the image's", put(CLUSTER, rayVersion="2.59.0"), "is not that of the image"),
        ("a proxy for all", add(f"{WORKERS}.env", {"name": "https_proxy", "value": "http://p:1"}), "a proxy and no no_proxy"),
        ("a folder of Ray's that is not there", add(HEAD_ENV, {"name": "RAY_TMPDIR", "value": "/data"}), "RAY_TMPDIR /data: only /tmp"),
        ("memory that is never kept", add(f"{WORKERS}.env", {"name": "PYTORCH_NO_CUDA_MEMORY_CACHING", "value": "1"}), "slows every step"),
        ("pods that no node is bought for", put("PriorityClass/-worker:", value=-100), "no cluster autoscaler makes room"),
        ("a hook at the start", put(WORKERS, lifecycle={"postStart": {"exec": {"command": ["sleep", "600"]}}}), "beside `ray start`"),
        ("a store of all shared memory", put(_params, {"object-store-memory": str(2**34)}), "leaves nothing to NCCL"),
        ("monitors of all namespaces", put("PodMonitor/-head:spec", namespaceSelector={"any": True}), "would be counted twice"),
        ("runs taken together", put(ALERT, expr="sum by (namespace) (vescale_stragglers) > 0"), "takes several runs for one"),
        ("a series that no run has", put(ALERT, expr="vescale_straggler_count > 0"), "asks for vescale_straggler_count, which no run has"),
        ("a state that is none", put(ALERT, expr='vescale_run_state{state="TRAINING"} == 1'), "the state TRAINING, which no run is in"),
        ("one of two states", put(ALERT, expr='vescale_run_state{state=~"RUNNING|STOPED"} == 1'), "the state STOPED, which no run is in"),
        ("a window of one sample", put(ALERT, expr="rate(vescale_tokens_total[10s]) == 0"), "there may be no two samples"),
        ("a label that is none", put(f"{ALERT}.annotations", summary="{{ $labels.rnu }}"), "the label rnu, which no series"),
        ("an alert after ten hours", put(ALERT, {"for": "10h"}), "more than an hour"),
        ("an alert of no run's", put(f"{ALERT}.labels", run="all"), "takes the place of the series' own"),
        ("an alert for one run", put(ALERT, expr='vescale_stragglers{run="a"} > 0'), "silent for all others"),
    )
]
NEEDLESS = [
    Mistake("references", what, spoil, words)
    for what, spoil, words in (
        (
            "a dashboard for who scrapes",
            add(f"{ON_HEAD}.ingress.1.ports", {"protocol": "TCP", "port": 8265}),
            "the operator's alone to ask",
        ),
        (
            "Ray's own port for another team",
            add(f"{ON_HEAD}.ingress", {"from": [_other_space], "ports": [{"protocol": "TCP", "port": 6379}]}),
            "lets others come to port 6379",
        ),
        ("a way to anybody's ssh", add(f"{ON_RUN}.egress", {"ports": [{"protocol": "TCP", "port": 22}]}), "ask port 22 of others"),
        (
            "a way to the node's credentials",
            add(f"{ON_RUN}.egress", {"to": [{"ipBlock": {"cidr": "169.254.169.254/32"}}], "ports": [{"protocol": "TCP", "port": 80}]}),
            "ask port 80 of others, which nothing in the run does",
        ),
    )
]

OPERATORS_MISTAKES = [*SHAPES, *EMPTY, *PARTS, *STARTS, *JOBS, *WATCHING, *BETWEEN, *LEFT_OVER, *APART, *ADDED, *NEEDLESS]
