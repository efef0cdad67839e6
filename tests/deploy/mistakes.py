"""Mistakes to put into a good manifest, each with who has to catch it and words of the complaint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Documents = list[dict[str, Any]]
Spoil = Callable[[Documents], Any]

JOB, CLUSTER = "RayJob:spec", "RayJob:spec.rayClusterSpec"
HEAD_GROUP, WORKER_GROUP = f"{CLUSTER}.headGroupSpec", f"{CLUSTER}.workerGroupSpecs.0"
HEAD, WORKER = f"{HEAD_GROUP}.template.spec", f"{WORKER_GROUP}.template.spec"
HEAD_ENV, RULES = f"{HEAD}.containers.0.env", f"{JOB}.deletionStrategy.deletionRules"


def at(documents: Documents, path: str) -> Any:
    """What lies at ``Kind/end of name:key.index.key``."""
    which, _, rest = path.partition(":")
    kind, _, name = which.partition("/")
    value: Any = next(one for one in documents if one["kind"] == kind and one["metadata"]["name"].endswith(name))
    for key in filter(None, rest.split(".")):
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


def put(path: str, fields: dict[str, Any] | None = None, /, **more: Any) -> Spoil:
    return lambda documents: at(documents, path).update({**(fields or {}), **more})


def drop(path: str, key: str | int) -> Spoil:
    return lambda documents: at(documents, path).pop(key)


def add(path: str, value: Any) -> Spoil:
    return lambda documents: at(documents, path).append(value)


def without(path: str) -> Spoil:
    return lambda documents: documents.remove(at(documents, path))


def both(*spoils: Spoil) -> Spoil:
    return lambda documents: [spoil(documents) for spoil in spoils]


class Mistake(NamedTuple):
    catcher: str
    what: str
    spoil: Spoil
    words: str


FIELDS = [
    Mistake("fields", what, spoil, words)
    for what, spoil, words in (
        ("a mistyped field", put(JOB, shutdownAfterJobFinish=True), "did you mean shutdownAfterJobFinishes?"),
        ("an unknown field", put(CLUSTER, helmChart="x"), "has no field helmChart"),
        ("a number in rayStartParams", put(f"{HEAD_GROUP}.rayStartParams", {"num-cpus": 0}), "numbers in quotes"),
        ("an unknown autoscaler", put(f"{CLUSTER}.autoscalerOptions", version="v3"), "must be one of v1, v2"),
        ("replicas as text", put(WORKER_GROUP, minReplicas="4"), "must be a whole number"),
        ("more replicas than an int32 holds", put(WORKER_GROUP, maxReplicas=2**31), "must be a whole number"),
        ("no template", drop(HEAD_GROUP, "template"), "has no template"),
        ("a mode in other letters", put(JOB, submissionMode="k8sJobMode"), "must be one of K8sJobMode"),
        ("one group in the place of a list", put(CLUSTER, workerGroupSpecs={}), "must be a list"),
        ("true as text", put(CLUSTER, enableInTreeAutoscaling="true"), "must be true or false"),
        ("a deadline of nothing", put(JOB, activeDeadlineSeconds=0), "whole number from 1"),
        ("a rule without a query", drop("PrometheusRule:spec.groups.0.rules.0", "expr"), "has no expr"),
        ("a rule with a mistyped field", put("PrometheusRule:spec.groups.1.rules.0", annotation={}), "did you mean annotations?"),
        ("a monitor without endpoints", drop("PodMonitor:spec", "podMetricsEndpoints"), "has no podMetricsEndpoints"),
    )
]

KUBERNETES = [
    Mistake("kubernetes", what, spoil, words)
    for what, spoil, words in (
        ("an unknown field in a pod", put(WORKER, gpu=1), "'gpu' was unexpected"),
        ("an env value that is a number", put(f"{HEAD_ENV}.0", value=100), "is not of type 'string'"),
        ("a mistyped hook", put(f"{HEAD}.containers.0", lifecycle={"prestop": {}}), "'prestop' was unexpected"),
        ("a mistyped image", put(f"{WORKER}.containers.0", Image="x"), "'Image' was unexpected"),
        ("a mount without a path", drop(f"{HEAD}.containers.0.volumeMounts.0", "mountPath"), "'mountPath' is a required property"),
        ("a mistyped mount of the autoscaler", put(f"{CLUSTER}.autoscalerOptions.volumeMounts.0", path="/x"), "'path' was unexpected"),
        ("a mistyped policy", put("NetworkPolicy:spec", ingres=[]), "'ingres' was unexpected"),
        ("a mistyped budget", put("PodDisruptionBudget:spec", maxUnavailble=0), "'maxUnavailble' was unexpected"),
        ("a ConfigMap of numbers", put("ConfigMap:data", x=1), "is not of type"),
        ("a priority as text", put("PriorityClass:", value="10"), "is not of type 'integer'"),
    )
]

_queued = put("RayJob:metadata.labels", {"kueue.x-k8s.io/queue-name": "q"})


def _seven_groups(documents: Documents) -> None:
    groups = at(documents, f"{CLUSTER}.workerGroupSpecs")
    groups += [{**groups[0], "groupName": f"g{index}"} for index in range(6)]


_secret = {"name": "r", "key": "k"}
OPERATORS = [
    Mistake("rules", what, spoil, words)
    for what, spoil, words in (
        ("a long name", put("RayJob:metadata", name="a" * 48), "48 characters"),
        ("a name in capitals", put("RayJob:metadata", name="Llama"), "lower-case"),
        ("a long account", put(HEAD, serviceAccountName="a" * 51), "the operator cuts it"),
        (
            "a queue whose name is none",
            put("RayJob:metadata.labels", {"kueue.x-k8s.io/queue-name": "Team_A"}),
            "the queue Team_A: Kueue takes lower-case",
        ),
        ("a budget by the scale of the owner", put("PodDisruptionBudget:spec", maxUnavailable=0), "which has no scale"),
        ("a budget in per cent", put("PodDisruptionBudget:spec", minAvailable="100%"), "a whole number"),
        ("two ways to delete", put(JOB, shutdownAfterJobFinishes=True), "exclude each other"),
        ("suspend without shutdown", put(JOB, suspend=True), "suspend: true needs"),
        ("a ttl without shutdown", put(JOB, ttlSecondsAfterFinished=60), "ttlSecondsAfterFinished needs"),
        ("workers deleted under the autoscaler", put(f"{RULES}.0", policy="DeleteWorkers"), "excludes autoscaling"),
        ("a rule twice", add(RULES, {"policy": "DeleteSelf", "condition": {"jobStatus": "FAILED"}}), "is there twice"),
        ("rules out of order", put(f"{RULES}.3.condition", ttlSeconds=1), "comes before"),
        ("a condition with both", put(f"{RULES}.0.condition", jobDeploymentStatus="Failed"), "either jobStatus or"),
        ("no cluster", drop(JOB, "rayClusterSpec"), "needs rayClusterSpec or clusterSelector"),
        ("a selected cluster and retries", put(JOB, clusterSelector={"a": "b"}), "clusterSelector excludes backoffLimit"),
        ("retries without a submitter", put(JOB, submissionMode="InteractiveMode"), "InteractiveMode excludes backoffLimit"),
        ("a sidecar with a pod of its own", put(JOB, submissionMode="SidecarMode"), "SidecarMode excludes submitterPodTemplate"),
        ("nothing to run", put(JOB, entrypoint=" "), "needs an entrypoint"),
        ("restarts with autoscaler v2", put(WORKER, restartPolicy="Always"), "needs restartPolicy: Never"),
        ("autoscaler v2 chosen twice", add(HEAD_ENV, {"name": "RAY_enable_autoscaler_v2", "value": "1"}), "use the first"),
        ("no bound", drop(WORKER_GROUP, "maxReplicas"), "must both be given"),
        ("bounds that cross", put(WORKER_GROUP, minReplicas=9), "must rise"),
        ("resources twice", put(HEAD_GROUP, resources={"CPU": "0"}), "use one of them"),
        ("labels in rayStartParams", put(f"{WORKER_GROUP}.rayStartParams", labels="a=b"), "use the group's labels"),
        (
            "priority with autoscaler v1",
            both(put(f"{CLUSTER}.autoscalerOptions", version="v1"), put(WORKER_GROUP, priority=1)),
            "needs autoscaler v2",
        ),
        ("a token with an old Ray", put(CLUSTER, rayVersion="2.40.0"), "needs rayVersion 2.52"),
        ("Redis by env", add(HEAD_ENV, {"name": "RAY_REDIS_ADDRESS", "value": "r"}), "needs gcsFaultToleranceOptions"),
        (
            "Redis by env and by option",
            both(add(HEAD_ENV, {"name": "REDIS_PASSWORD", "value": "x"}), put(CLUSTER, gcsFaultToleranceOptions={"redisAddress": "r"})),
            "excludes REDIS_PASSWORD",
        ),
        ("a queue, and a cluster that outlives the job", _queued, "frees its quota"),
        ("a queue, and autoscaling that Kueue has not heard of", _queued, "only with the annotation"),
        ("a queue, and seven groups", both(_queued, _seven_groups), "6 worker groups at most, here are 7"),
        ("a queue, and a group named head", both(_queued, put(WORKER_GROUP, groupName="head")), "keeps the group name head"),
        ("a queue, and a cluster that is there", both(_queued, drop(JOB, "rayClusterSpec")), "no job with a clusterSelector"),
        ("fault tolerance without a Redis", put(CLUSTER, gcsFaultToleranceOptions={}), "has no redisAddress"),
    )
]

OURS = [
    Mistake("rules", what, spoil, words)
    for what, spoil, words in (
        (
            "a password",
            put(CLUSTER, gcsFaultToleranceOptions={"redisAddress": "r", "redisPassword": {"value": "x"}}),
            "password in plain text",
        ),
        (
            "a state that outlives a retry",
            put(CLUSTER, gcsFaultToleranceOptions={"redisAddress": "r", "externalStorageNamespace": "x"}),
            "a retry would read",
        ),
        ("pip at run time", put(JOB, runtimeEnvYAML="pip: [tqdm]"), "nothing is fetched or installed"),
        ("Ray's own time to stop", put(JOB, runtimeEnvYAML="env_vars: {RAY_JOB_STOP_WAIT_TIME_S: '3'}"), "makes no checkpoint"),
        ("a grace as long as the drain", put(WORKER, terminationGracePeriodSeconds=100), "20 s more than the drain"),
        ("no drain", drop(HEAD_ENV, 0), "a race"),
        (
            "ray stop in a hook",
            put(f"{WORKER}.containers.0", lifecycle={"preStop": {"exec": {"command": ["sh", "-c", "ray stop"]}}}),
            "cuts the drain short",
        ),
        ("workers on the head", put(f"{HEAD_GROUP}.rayStartParams", {"num-cpus": "4"}), 'must be "0"'),
        ("no token", drop(CLUSTER, "authOptions"), "authOptions.mode must be token"),
        ("root", put(f"{HEAD}.securityContext", runAsUser=0), "runAsNonRoot"),
        ("no seccomp", drop(f"{HEAD}.securityContext", "seccompProfile"), "RuntimeDefault"),
        ("a token for training code", drop(WORKER, "automountServiceAccountToken"), "needs no rights"),
        ("the node's network", put(WORKER, hostNetwork=True), "gives a pod the node's own"),
        ("a folder of the node", add(f"{WORKER}.volumes", {"name": "x", "hostPath": {"path": "/"}}), "is a folder of the node"),
        ("a temporary folder without a limit", put(f"{WORKER}.volumes.1", emptyDir={}), "could fill the node"),
        ("the autoscaler's capabilities", drop(f"{CLUSTER}.autoscalerOptions", "securityContext"), "autoscalerOptions: securityContext"),
        ("an autoscaler without its token", drop(f"{CLUSTER}.autoscalerOptions", "volumeMounts"), "could not reach Kubernetes' API"),
        ("capabilities", drop(f"{WORKER}.containers.0", "securityContext"), "drop ALL"),
        ("the latest image", put(f"{HEAD}.containers.0", image="registry:5000/x:latest"), "no fixed tag"),
        ("two images", put(f"{HEAD}.containers.0", image="x:2"), "must be the same everywhere"),
        ("requests below limits", put(f"{WORKER}.containers.0.resources.requests", cpu="1"), "there and equal"),
        ("a port's long name", put(f"{HEAD}.containers.0.ports.0", name="x" * 16), "more than 15 characters"),
        ("a port twice", put(f"{HEAD}.containers.0.ports.0", containerPort=8265), "two ports have the containerPort 8265"),
    )
]

NAMES = [
    Mistake("rules", what, spoil, words)
    for what, spoil, words in (
        ("a ConfigMap's name in capitals", put("ConfigMap:metadata", name="Run"), "a name takes lower-case letters"),
        ("a namespace with a dot", put("PodDisruptionBudget:metadata", namespace="a.b"), "the namespace a.b takes"),
        ("a label with a blank", put("RayJob:metadata.labels", team="a b"), "the label team has the value a b"),
        ("a pod's label that is too long", put(f"{WORKER_GROUP}.template.metadata.labels", x="a" * 64), "63 at most"),
        ("a label whose key is none", put("NetworkPolicy:spec.podSelector.matchLabels", {"a/b/c": "d"}), "a/b/c is no key of a label"),
    )
]

REFERENCES = [
    Mistake("references", what, spoil, words)
    for what, spoil, words in (
        ("a missing account", without("ServiceAccount/-worker:"), "no ServiceAccount llama-110m-worker"),
        ("no account", drop(WORKER, "serviceAccountName"), "default account"),
        ("a missing class", without("PriorityClass:"), "no PriorityClass"),
        ("another claim", put(f"{WORKER}.volumes.0.persistentVolumeClaim", claimName="runs"), "no PersistentVolumeClaim runs"),
        ("another ConfigMap", put("ConfigMap:metadata", name="other"), "no ConfigMap"),
        ("a key that the ConfigMap lacks", put(f"{HEAD}.volumes.1.configMap", items=[{"key": "x", "path": "x"}]), "has no key x"),
        ("another program", put(JOB, entrypoint="python train.py"), "is not vescale-ray train"),
        ("a file that is not mounted", put("ConfigMap:", data={"other.yaml": ""}), "no ConfigMap is mounted there"),
        ("a mount without a volume", drop(f"{HEAD}.volumes", 1), "no volume has this name"),
        ("a volume without a mount", drop(f"{WORKER}.containers.0.volumeMounts", 2), "nothing mounts the volume shm"),
        ("two volumes at one place", put(f"{WORKER}.containers.0.volumeMounts.2", mountPath="/tmp"), "two volumes are mounted"),
        (
            "the autoscaler's token for training code",
            add(f"{HEAD}.containers.0.volumeMounts", {"name": "kube-api", "mountPath": "/x"}),
            "only the autoscaler may",
        ),
        ("another metrics port", put(f"{HEAD}.containers.0.ports.5", containerPort=9465), "metrics.port of the run 9464"),
        ("a policy for another port", put("NetworkPolicy/-head:spec.ingress.0.ports.0", port=8266), "none of its pods declares"),
        ("a policy for nothing", put("NetworkPolicy/-head:spec.podSelector", matchLabels={"a": "b"}), "podSelector matches no pod"),
        ("a budget for nothing", put("PodDisruptionBudget:spec.selector", matchLabels={"a": "b"}), "its selector matches no pod"),
        (
            "variables from a Secret that nobody has",
            put(f"{WORKER}.containers.0", envFrom=[{"secretRef": {"name": "keys"}}]),
            "there is no Secret keys",
        ),
        ("pods without their labels", drop(f"{WORKER_GROUP}.template", "metadata"), "no NetworkPolicy covers it"),
        ("a monitor of a port that is gone", drop(f"{HEAD}.containers.0.ports", 3), "has no port as-metrics"),
        (
            "a spread of other pods",
            put(f"{WORKER}.topologySpreadConstraints.0.labelSelector", matchLabels={"a": "b"}),
            "count other pods",
        ),
        ("too few pods", put(WORKER_GROUP, maxReplicas=8), "elastic.max_workers of the run is 16"),
        ("pods without GPUs", drop(f"{WORKER}.containers.0.resources.limits", "nvidia.com/gpu"), "no worker of the run fits"),
        ("runs elsewhere", put(f"{WORKER}.containers.0.volumeMounts.0", mountPath="/data"), "is not on a volume"),
        ("a run with a mistyped key", put("ConfigMap:data", {"run.yaml": "train: {stps: 3}"}), "can't be read"),
        ("two namespaces", put("ConfigMap:metadata", namespace="x"), "different namespaces"),
        ("an object twice", lambda documents: documents.append(at(documents, "ConfigMap:")), "is there twice"),
        (
            "a Secret that nobody has",
            put(CLUSTER, gcsFaultToleranceOptions={"redisAddress": "r", "redisPassword": {"valueFrom": {"secretKeyRef": _secret}}}),
            "no Secret r",
        ),
    )
]


def _in_both(**quantities: str) -> Spoil:
    container = f"{WORKER}.containers.0.resources"
    return both(put(f"{container}.limits", dict(quantities)), put(f"{container}.requests", dict(quantities)))


def _privileged_at_the_start(documents: Documents) -> None:
    container = {**at(documents, f"{WORKER}.containers.0"), "name": "first", "securityContext": {"privileged": True}}
    at(documents, WORKER)["initContainers"] = [container]


VALUES = [
    Mistake("rules", what, spoil, words)
    for what, spoil, words in (
        ("a size in GB", _in_both(memory="64GB"), "resources.requests.memory is 64GB: it is no quantity"),
        ("half a device", _in_both(**{"nvidia.com/gpu": "0.5"}), "nvidia.com/gpu is 0.5: it is no quantity"),
        ("a size with a blank", put(f"{WORKER}.volumes.2.emptyDir", sizeLimit="16 GiB"), "emptyDir.sizeLimit is 16 GiB"),
        ("a mistyped operator", put(f"{WORKER}.tolerations.0", operator="Exist"), "is Exist: it must be one of Exists, Equal"),
        ("a mistyped effect", put(f"{WORKER}.tolerations.0", effect="NoSchedul"), "is NoSchedul: it must be one of NoSchedule"),
        (
            "a mistyped spread",
            put(f"{WORKER}.topologySpreadConstraints.0", whenUnsatisfiable="Anyway"),
            "one of DoNotSchedule, ScheduleAnyway",
        ),
        ("a mistyped pre-emption", put("PriorityClass:", preemptionPolicy="Nevr"), "is Nevr: it must be one of Never"),
        ("a mistyped access", put("PersistentVolumeClaim:spec", accessModes=["ReadWriteMeny"]), "is ReadWriteMeny: it must be one of"),
        ("an interval without its unit", put("PodMonitor:spec.podMetricsEndpoints.0", interval="10"), "Prometheus takes a duration"),
        ("a mistyped duration", put("PrometheusRule:spec.groups.1.rules.0", {"for": "1 min"}), "is 1 min: Prometheus takes a duration"),
        ("a port that is none", put(f"{WORKER}.containers.0.ports.0", containerPort=70000), "a port is a number from 1 to 65535"),
        ("a variable twice", add(HEAD_ENV, {"name": "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "value": "5"}), "is there twice: the last"),
    )
]

PODS = [
    Mistake("rules", what, spoil, words)
    for what, spoil, words in (
        ("a head without Ray's port", drop(f"{HEAD}.containers.0.ports", 0), "no port 6379 named gcs-server"),
        ("a dashboard of another name", put(f"{HEAD}.containers.0.ports.1", name="dash"), "no port 8265 named dashboard"),
        ("a dashboard for the head alone", put(f"{HEAD_GROUP}.rayStartParams", {"dashboard-host": "127.0.0.1"}), "come from other pods"),
        ("a head on any node", drop(HEAD, "affinity"), "keep it from pre-emptible nodes"),
        ("a head that may be moved", drop(f"{HEAD_GROUP}.template.metadata", "annotations"), "does not survive the loss of its head"),
        ("shared memory as large as all", put(f"{WORKER}.volumes.2.emptyDir", sizeLimit="64Gi"), "leave nothing of its"),
        (
            "a store larger than its memory",
            put(f"{WORKER_GROUP}.rayStartParams", {"object-store-memory": str(2**36)}),
            "does not fit into /dev/shm",
        ),
        ("a disk larger than the limit", put(f"{WORKER}.volumes.1.emptyDir", sizeLimit="100Gi"), "the pod would be evicted"),
        ("a privileged beginning", _privileged_at_the_start, "container first: privileged gives it the node"),
        ("root in a container", put(f"{WORKER}.containers.0.securityContext", runAsUser=0), "makes it root, whatever the pod's says"),
        ("a capability", put(f"{WORKER}.containers.0.securityContext.capabilities", add=["SYS_ADMIN"]), "SYS_ADMIN are none that"),
        ("a container's own seccomp", put(f"{WORKER}.containers.0.securityContext", seccompProfile={"type": "Unconfined"}), "as the pod's"),
        ("the node's port", put(f"{WORKER}.containers.0.ports.0", hostPort=8080), "hostPort 8080"),
        (
            "a hook that waits",
            put(f"{WORKER}.containers.0", lifecycle={"preStop": {"exec": {"command": ["sleep", "300"]}}}),
            "cuts the drain",
        ),
        ("a secret in plain text", add(HEAD_ENV, {"name": "AWS_SECRET_ACCESS_KEY", "value": "x"}), "AWS_SECRET_ACCESS_KEY is a secret"),
        ("two hosts for a worker", put(WORKER_GROUP, numOfHosts=2), "come and go one by one"),
        ("a budget of none", put("PodDisruptionBudget:spec", minAvailable=0), "a whole number from 1"),
        (
            "a secret for the job",
            put(JOB, runtimeEnvYAML="env_vars: {RAY_JOB_STOP_WAIT_TIME_S: '100', AWS_SECRET_ACCESS_KEY: x}"),
            "env_vars.AWS_SECRET_ACCESS_KEY is a secret",
        ),
        ("a password in an address", put(CLUSTER, gcsFaultToleranceOptions={"redisAddress": "redis://:pw@r:1"}), "no place for a password"),
        (
            "a submitter that is started again",
            put(f"{JOB}.submitterPodTemplate.spec", restartPolicy="Always"),
            "needs restartPolicy: Never",
        ),
        ("GPUs on nodes that repel it", drop(f"{WORKER}.tolerations", 0), "does not tolerate the taint"),
        ("shared memory on a disk", drop(f"{WORKER}.volumes.2.emptyDir", "medium"), "/dev/shm is no memory"),
        ("a ConfigMap of 2 MiB", put("ConfigMap:data", {"x": "x" * 2**21}), "more than 1 MiB"),
        ("encryption behind a gate", put(CLUSTER, tlsOptions={"enabled": True}), "RayClusterMTLS"),
        ("a state behind a gate", put(CLUSTER, gcsFaultToleranceOptions={"backend": "rocksdb"}), "GCSFaultToleranceEmbeddedStorage"),
        ("a disk for Redis", put(CLUSTER, gcsFaultToleranceOptions={"redisAddress": "r", "storage": {"size": "1Gi"}}), "rocksdb alone"),
        ("Kubernetes' tokens for a job", put(f"{CLUSTER}.authOptions", enableK8sTokenAuth=True), "is not taken in a RayJob"),
        ("idle for a second", put(f"{CLUSTER}.autoscalerOptions", idleTimeoutSeconds=1), "would be taken away again"),
        (
            "suspended, and no queue",
            both(drop(JOB, "deletionStrategy"), put(JOB, suspend=True, shutdownAfterJobFinishes=True)),
            "nobody would start it",
        ),
        (
            "an account with a token",
            put("ServiceAccount:", automountServiceAccountToken=True),
            "automountServiceAccountToken must be false",
        ),
        (
            "a namespace that lets all run",
            put("Namespace:metadata.labels", {"pod-security.kubernetes.io/enforce": "privileged"}),
            "need no more than restricted",
        ),
    )
]

_role = {"vescale-ray/run": "llama-110m", "vescale-ray/role": "worker"}
WAYS = [
    Mistake("references", what, spoil, words)
    for what, spoil, words in (
        ("an entrypoint whose quotes don't close", put(JOB, entrypoint="vescale-ray train '/x"), "is no command: No closing quotation"),
        (
            "two volumes of one name",
            add(f"{WORKER}.volumes", {"name": "shm", "emptyDir": {"sizeLimit": "1Gi"}}),
            "two volumes have the name",
        ),
        ("a run that can't be written", put(f"{WORKER}.containers.0.volumeMounts.0", readOnly=True), "every pod writes to it"),
        ("a claim for one node", put("PersistentVolumeClaim:spec", accessModes=["ReadWriteOnce"]), "is not ReadWriteMany"),
        ("GPUs that Ray is not told of", put(f"{WORKER_GROUP}.rayStartParams", {"num-gpus": "0"}), "no worker of the run fits"),
        ("a budget of workers", put("PodDisruptionBudget:spec.selector", matchLabels=_role), "without which the run goes on"),
        ("a monitor of another namespace", put("PodMonitor:spec", namespaceSelector={"matchNames": ["x"]}), "leaves out the pods' own"),
        ("a policy of what comes in alone", put("NetworkPolicy/-run:spec", policyTypes=["Ingress"]), "policyTypes has no Egress"),
        ("a policy of what goes out alone", put("NetworkPolicy/-run:spec", policyTypes=["Egress"]), "policyTypes has no Ingress"),
        ("a policy for everybody", drop("NetworkPolicy/-head:spec.ingress.1", "from"), "lets in everybody"),
        ("a run's port that is shut", drop("NetworkPolicy/-head:spec.ingress.1.ports", 2), "lets in who asks port 9464: Prometheus"),
        ("a dashboard that is shut", drop("NetworkPolicy/-head:spec.ingress", 0), "lets in who asks port 8265: KubeRay's operator"),
        ("pods that can't reach each other", drop("NetworkPolicy/-run:spec.ingress", 0), "reach each other at all ports"),
        ("no names", drop("NetworkPolicy/-run:spec.egress", 1), "ask DNS (port 53)"),
    )
]

MISTAKES = [*FIELDS, *KUBERNETES, *OPERATORS, *OURS, *NAMES, *REFERENCES, *VALUES, *PODS, *WAYS]
