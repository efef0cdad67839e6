"""What KubeRay's operator refuses although its schema takes it, and what we demand of every pod.

The operator's rules are those of its ``ray-operator/controllers/ray/utils/validation.go``; it would report a breach in the resource's
status, after the manifest was applied. Ours are the ones whose breach is found at the worst time: at a pre-emption, or by an intruder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vescale_ray.k8s.additions import addition_problems
from vescale_ray.k8s.jobs import job_problems
from vescale_ray.k8s.kinds import kind_problems
from vescale_ray.k8s.monitors import monitor_problems
from vescale_ray.k8s.names import is_name, name_problems
from vescale_ray.k8s.nodes import expressions, node_problems
from vescale_ray.k8s.options import GRACE_MARGIN_S, RAY_VERSION
from vescale_ray.k8s.parts import part_problems
from vescale_ray.k8s.starts import start_problems
from vescale_ray.k8s.values import plain_secrets, size_of, value_problems

Tree = Mapping[str, Any]
LONGEST = {"RayJob": 47, "RayCluster": 53}
"""Names: the operator appends to them, and a Service's name has 63 characters."""
LONGEST_ACCOUNT = 50
"""Of the head's service account: what is longer loses its beginning on the way, and is not found."""
TOKEN_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where a client of Kubernetes' API looks for its token: Ray's autoscaler, too."""
KUEUES_LABEL, KUEUES_ELASTIC = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/elastic-job"
MULTIKUEUE = "kueue.x-k8s.io/multikueue"
LEVEL = "pod-security.kubernetes.io/enforce"
SAFE_TO_EVICT = "cluster-autoscaler.kubernetes.io/safe-to-evict"
DO_NOT_DISRUPT = "karpenter.sh/do-not-disrupt"
HEADS_PORTS = {"gcs-server": ("port", "6379"), "dashboard": ("dashboard-port", "8265")}
"""By name, with the parameter that changes it: the operator makes the head's Service of the ports that are listed, if any is."""
MAY_BE_ADDED = frozenset({"NET_BIND_SERVICE"})
"""With the namespace's level restricted; IPC_LOCK for RDMA needs another level."""
LEAST_IDLE_S, LONGEST_IDLE_S = 60, 6 * 3600
MOST_OF_A_MAP = 2**20
LEAST_RAYS_MEMORY, LEAST_AUTOSCALERS_MEMORY = 2**30, 512 * 2**20
RAYS_SHARE = 0.3
"""Of a node's memory, for the object store, where nothing is said."""
KUEUES_GROUPS = 6
"""A Kueue workload has 8 pod sets: the head's, the submitter's, the groups'."""
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
IMAGE = re.compile(rf"([A-Za-z0-9.-]+(:\d+)?/)?{_PART}(/{_PART})*(:\w[\w.-]{{0,127}})?(@sha256:[0-9a-f]{{64}})?", re.ASCII)
"""A registry, a name, and a tag or a digest or both: what a kubelet takes."""


def rule_problems(document: Tree) -> Iterator[str]:
    """One sentence for each rule that a document breaks: of a RayJob or RayCluster all, of other kinds those for names and labels."""
    kind = document.get("kind")
    yield from kind_problems(document)
    yield from part_problems(document)
    if kind not in LONGEST:
        yield from name_problems(document)
        yield from value_problems(document)
        yield from monitor_problems(document)
        if kind == "PodDisruptionBudget":
            yield from _budget(document)
        if document.get("immutable"):
            yield f"{kind} {document['metadata']['name']}: immutable: the next `kubectl apply` that changes it would be refused"
        if kind == "ServiceAccount" and document.get("automountServiceAccountToken") is not False:
            yield f"ServiceAccount {document['metadata']['name']}: automountServiceAccountToken must be false"
        if kind == "ConfigMap" and sum(len(str(text).encode()) for text in (document.get("data") or {}).values()) > MOST_OF_A_MAP:
            yield f"ConfigMap {document['metadata']['name']}: it holds more than 1 MiB, the most that Kubernetes takes"
        level = (document["metadata"].get("labels") or {}).get(LEVEL, "missing")
        if kind == "Namespace" and level != "restricted":
            yield f"Namespace {document['metadata']['name']}: {LEVEL} is {level}: the pods of a run need no more than restricted"
        return
    name, spec = str(document["metadata"]["name"]), document["spec"]
    if len(name) > LONGEST[kind]:
        yield f"the name {name} has {len(name)} characters: a {kind} takes {LONGEST[kind]} at most; give a shorter one with --name"
    if not _DNS_1035.fullmatch(name):
        yield f"the name {name} is none for a {kind}: give lower-case letters, digits and '-', a letter first, with --name"
    else:
        yield from name_problems(document)
    yield from value_problems(document)
    annotations = document["metadata"].get("annotations") or {}
    if kind == "RayJob":
        yield from job_problems(spec)
    cluster = spec.get("rayClusterSpec") if kind == "RayJob" else spec
    for field, value in (("suspend", True), ("managedBy", MULTIKUEUE)):
        if spec.get(field) == value and KUEUES_LABEL not in (document["metadata"].get("labels") or {}):
            yield f"{field}: {str(value).lower()} without a queue ({KUEUES_LABEL}): nobody would start it"
    if KUEUES_LABEL in (document["metadata"].get("labels") or {}):
        queue = str(document["metadata"]["labels"][KUEUES_LABEL])
        if not is_name(queue):
            yield f"the queue {queue}: Kueue takes lower-case letters, digits, '-' and '.' as the name of a queue"
        if spec.get("suspend") is not True:
            yield f"the queue {queue} without suspend: true: it could start before there is quota for it"
        yield from _kueue(spec, cluster, annotations, in_job=kind == "RayJob")
    if cluster:
        yield from _cluster(cluster, annotations, in_job=kind == "RayJob")
        yield from _pods(cluster, spec)
        yield from start_problems(cluster, spec)


def _budget(document: Tree) -> Iterator[str]:
    """The other two forms are counted by the scale of the pods' owner; without one Kubernetes gives up on the budget, with a warning."""
    least = document["spec"].get("minAvailable")
    if not isinstance(least, int) or least < 1 or "maxUnavailable" in document["spec"]:
        yield (
            f"PodDisruptionBudget {document['metadata']['name']}: of the pods of a RayCluster, which has no scale, Kubernetes counts only "
            "minAvailable, a whole number from 1"
        )


# ---------------------------------------------------------------------------------------------- the operator's: RayCluster


def _env(container: Tree) -> dict[str, Tree]:
    return {one["name"]: one for one in container.get("env") or ()}


def _cluster(spec: Tree, annotations: Tree, in_job: bool) -> Iterator[str]:
    head, workers = spec["headGroupSpec"], spec.get("workerGroupSpecs") or []
    groups = [("headGroupSpec", head), *((f"worker group {one.get('groupName')}", one) for one in workers)]
    for where, group in groups:
        if not group["template"].get("spec", {}).get("containers"):
            yield f"{where} has no container"
            return
        params = group.get("rayStartParams") or {}
        if group.get("resources") and {"num-cpus", "num-gpus", "memory", "resources"} & params.keys():
            yield f"{where}: resources stand in rayStartParams and in resources: use one of them"
        if "labels" in params:
            yield f"{where}: rayStartParams.labels is not taken: use the group's labels"
    container = head["template"]["spec"]["containers"][0]
    env = _env(container)
    yield from _autoscaling(spec, groups, env)
    yield from _fault_tolerance(spec, annotations, head, env, in_job)
    account = str(head["template"]["spec"].get("serviceAccountName", ""))
    if len(account) > LONGEST_ACCOUNT:
        cut = f"has {len(account)} characters, the operator cuts it to {LONGEST_ACCOUNT}"
        yield f"the head's serviceAccountName {account} {cut}: give a shorter one (--service-account, or --name)"
    names = [one.get("groupName") for one in workers]
    for name in sorted({str(name) for name in names if names.count(name) > 1}):
        yield f"two worker groups have the name {name}"
    for name in names:
        if not _DNS_1035.fullmatch(str(name)) or len(str(name)) > 63:
            yield f"the worker group's name {name} becomes a part of pods' names: give lower-case letters, digits and '-', 63 at most"
    if in_job and (spec.get("authOptions") or {}).get("enableK8sTokenAuth"):
        yield "authOptions.enableK8sTokenAuth is not taken in a RayJob"
    if _version(spec) != tuple(map(int, RAY_VERSION.split(".")[:2])):
        yield f"rayVersion {spec.get('rayVersion')} is not that of the image, which has Ray {RAY_VERSION}"
    if (spec.get("upgradeStrategy") or {}).get("type") == "Recreate":
        yield "upgradeStrategy Recreate: the next `kubectl apply` that changes anything would end what runs: leave it out"
    if (spec.get("tlsOptions") or {}).get("enabled"):
        yield "tlsOptions is behind a feature gate of KubeRay's that is off (RayClusterMTLS)"
    if (spec.get("authOptions") or {}).get("mode") == "token":
        if _version(spec) < (2, 52):
            yield f"authOptions.mode: token needs rayVersion 2.52 or later; here it is {spec.get('rayVersion')}"


def _version(spec: Tree) -> tuple[int, int]:
    """Ray's; the oldest, where none can be read."""
    match = re.match(r"(\d+)\.(\d+)", str(spec.get("rayVersion", "")))
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _autoscaling(spec: Tree, groups: Sequence[tuple[str, Tree]], env: Tree) -> Iterator[str]:
    on, options = bool(spec.get("enableInTreeAutoscaling")), spec.get("autoscalerOptions") or {}
    if on and options.get("idleTimeoutSeconds", LEAST_IDLE_S) < LEAST_IDLE_S:
        yield f"autoscalerOptions.idleTimeoutSeconds is less than {LEAST_IDLE_S}: nodes that wait for others would be taken away again"
    if on and options.get("idleTimeoutSeconds", LEAST_IDLE_S) > LONGEST_IDLE_S:
        idle = options["idleTimeoutSeconds"]
        yield f"autoscalerOptions.idleTimeoutSeconds {idle}: idle nodes would stay, and cost, for more than six hours"
    by_env = str(env.get("RAY_enable_autoscaler_v2", {}).get("value", ""))
    if on and "version" in options and by_env:
        yield "autoscalerOptions.version and RAY_enable_autoscaler_v2 are both set: use the first"
    if not on and by_env in ("1", "true"):
        yield "RAY_enable_autoscaler_v2 needs enableInTreeAutoscaling: true"
    v2 = on and (options.get("version", "v2") == "v2" or by_env in ("1", "true"))
    for where, group in groups:
        if v2 and group["template"]["spec"].get("restartPolicy", "Never") != "Never":
            yield f"{where}: autoscaler v2 needs restartPolicy: Never"
    for where, group in groups[1:]:
        for field in ("idleTimeoutSeconds", "priority"):
            if field in group and not v2:
                yield f"{where}: {field} needs autoscaler v2"
        if (group.get("scaleStrategy") or {}).get("workersToDelete"):
            yield f"{where}: scaleStrategy.workersToDelete is the autoscaler's to write: it would end these pods"
        if on and group.get("idleTimeoutSeconds", LEAST_IDLE_S) > LONGEST_IDLE_S:
            yield f"{where}: idleTimeoutSeconds {group['idleTimeoutSeconds']}: idle nodes would stay, and cost, for more than six hours"
        if on and group.get("idleTimeoutSeconds", LEAST_IDLE_S) < LEAST_IDLE_S:
            yield f"{where}: idleTimeoutSeconds is less than {LEAST_IDLE_S}: nodes that wait for others would be taken away again"
        if "priority" in group and _version(spec) < (2, 56):
            yield f"{where}: priority needs rayVersion 2.56 or later; here it is {spec.get('rayVersion')}"
        if group.get("numOfHosts", 1) != 1:
            yield f"{where}: numOfHosts must be 1: a run's workers come and go one by one"
        if on and group.get("suspend"):
            yield f"{where}: suspend excludes autoscaling"
        fewest, most = group.get("minReplicas"), group.get("maxReplicas")
        if fewest is None or most is None:
            yield f"{where}: minReplicas and maxReplicas must both be given"
        elif not on and fewest != most:
            yield f"{where}: minReplicas {fewest} and maxReplicas {most} need enableInTreeAutoscaling: true"
        elif not 0 <= fewest <= group.get("replicas", fewest) <= most:
            yield f"{where}: minReplicas {fewest}, replicas {group.get('replicas', fewest)} and maxReplicas {most} must rise in this order"


def _fault_tolerance(spec: Tree, annotations: Tree, head: Tree, env: Tree, in_job: bool) -> Iterator[str]:
    options, params = spec.get("gcsFaultToleranceOptions"), head.get("rayStartParams") or {}
    if params.get("redis-username") or "REDIS_USERNAME" in env:
        yield "Redis' user name belongs into gcsFaultToleranceOptions.redisUsername"
    if options is None:
        if "RAY_REDIS_ADDRESS" in env:
            yield "RAY_REDIS_ADDRESS needs gcsFaultToleranceOptions, which sets it"
        return
    for name in ("REDIS_PASSWORD", "RAY_REDIS_ADDRESS"):
        if name in env:
            yield f"gcsFaultToleranceOptions excludes {name} in the head's env"
    if params.get("redis-password"):
        yield "gcsFaultToleranceOptions excludes rayStartParams.redis-password: use its redisPassword"
    for name in ("ray.io/external-storage-namespace", "ray.io/ft-enabled"):
        if annotations.get(name):
            yield f"gcsFaultToleranceOptions excludes the annotation {name}"
    if options.get("backend", "redis") == "rocksdb":
        gate = "GCSFaultToleranceEmbeddedStorage"
        yield f"gcsFaultToleranceOptions.backend rocksdb is behind a feature gate of KubeRay's that is off ({gate}): use redis"
    elif not options.get("redisAddress"):
        yield "gcsFaultToleranceOptions has no redisAddress"
    elif "@" in str(options["redisAddress"]):
        yield "gcsFaultToleranceOptions.redisAddress is no place for a password: take it from a Secret with redisPassword"
    elif "storage" in options:
        yield "gcsFaultToleranceOptions.storage is for the backend rocksdb alone"
    if "value" in (options.get("redisPassword") or {}):
        yield "gcsFaultToleranceOptions.redisPassword.value is a password in plain text: take it from a Secret with valueFrom"
    if in_job and options.get("externalStorageNamespace"):
        yield "externalStorageNamespace in a RayJob: a retry would read the state of the cluster that failed; leave it out"


# ---------------------------------------------------------------------------------------------------------------- Kueue's


def _kueue(spec: Tree, cluster: Tree | None, annotations: Tree, in_job: bool) -> Iterator[str]:
    """What its webhooks for RayJob and RayCluster refuse."""
    if cluster is None:
        yield "Kueue takes no job with a clusterSelector"
        return
    if in_job and not spec.get("shutdownAfterJobFinishes"):
        yield "Kueue takes no job without shutdownAfterJobFinishes: true, which frees its quota"
    if cluster.get("enableInTreeAutoscaling") and annotations.get(KUEUES_ELASTIC) != "true":
        yield f'Kueue takes autoscaling only with the annotation {KUEUES_ELASTIC}: "true"'
    groups = cluster.get("workerGroupSpecs") or []
    if len(groups) > KUEUES_GROUPS:
        yield f"Kueue takes {KUEUES_GROUPS} worker groups at most, here are {len(groups)}"
    if [one for one in groups if one.get("groupName") == "head"]:
        yield "Kueue keeps the group name head for itself"


# ------------------------------------------------------------------------------------------------------------- ours: pods


def pod_templates(cluster: Tree) -> Iterator[tuple[str, Tree]]:
    """The name of each group and its pod's spec, the head first."""
    yield "headGroupSpec", cluster["headGroupSpec"]["template"]["spec"]
    for group in cluster.get("workerGroupSpecs") or ():
        yield f"worker group {group.get('groupName')}", group["template"]["spec"]


def _pods(cluster: Tree, spec: Tree) -> Iterator[str]:
    templates = list(pod_templates(cluster))
    for where, pod in templates:
        yield from _grace(where, pod)
    if "submitterPodTemplate" in spec:
        templates.append(("submitterPodTemplate", spec["submitterPodTemplate"]["spec"]))
    yield from _head(cluster["headGroupSpec"])
    yield from node_problems(cluster, list(pod_templates(cluster)))
    if (cluster["headGroupSpec"].get("rayStartParams") or {}).get("num-cpus") != "0":
        yield 'headGroupSpec.rayStartParams.num-cpus must be "0": a worker on the head could take the run down with it'
    if (cluster.get("authOptions") or {}).get("mode") != "token":
        yield "authOptions.mode must be token: whoever reaches the dashboard could run code on the cluster"
    if cluster.get("enableInTreeAutoscaling"):
        yield from _autoscalers_container(cluster)
    for where, pod in templates:
        yield from _security(where, pod)
        for container in (*(pod.get("initContainers") or ()), *(pod.get("containers") or ())):
            yield from _container(f"{where}, container {container.get('name')}", container)
    workers = [(f"worker group {group.get('groupName')}", group) for group in cluster.get("workerGroupSpecs") or ()]
    for where, group in workers:
        yield from _room(where, group)
    yield from _alike(templates)
    whole = [(where, group["template"]) for where, group in (("headGroupSpec", cluster["headGroupSpec"]), *workers)]
    yield from addition_problems([*whole, *(("submitterPodTemplate", spec[key]) for key in ("submitterPodTemplate",) if key in spec)])
    images = {str(container.get("image")) for _, pod in templates for container in pod.get("containers") or ()}
    if len(images) > 1:
        yield f"the pods have different images ({', '.join(sorted(images))}): Ray's and our versions must be the same everywhere"


def _alike(templates: Sequence[tuple[str, Tree]]) -> Iterator[str]:
    """Pods of one image take it from one registry, and what trains has the same keys for a store, whatever group it is of."""

    def first(pod: Tree) -> Tree:
        return next(iter(pod.get("containers") or ()), {})

    for what, of, those in (
        ("imagePullSecrets", lambda pod: pod.get("imagePullSecrets") or [], templates),
        ("envFrom", lambda pod: first(pod).get("envFrom") or [], [one for one in templates if one[0] != "submitterPodTemplate"]),
    ):
        for where, pod in those:
            if of(pod) != of(those[0][1]):
                yield f"{where}: its {what} are not those of {those[0][0]}, which has the same image and asks the same store"


def _head(group: Tree) -> Iterator[str]:
    params, pod = group.get("rayStartParams") or {}, group["template"]["spec"]
    if not pod.get("containers"):
        return  # told of elsewhere
    ports = {one.get("name"): str(one.get("containerPort")) for one in pod["containers"][0].get("ports") or ()}
    for name, (param, default) in HEADS_PORTS.items():
        wanted = params.get(param, default)
        if ports and ports.get(name) != wanted:
            yield f"headGroupSpec: its container has no port {wanted} named {name}: the operator's Service for the head would lack it"
    if params.get("dashboard-host", "0.0.0.0") not in ("0.0.0.0", "::"):
        yield f"headGroupSpec.rayStartParams.dashboard-host is {params['dashboard-host']}: operator and submitter come from other pods"
    yield from _enough("headGroupSpec", pod)
    annotations = (group["template"].get("metadata") or {}).get("annotations") or {}
    for name, value in ((SAFE_TO_EVICT, "false"), (DO_NOT_DISRUPT, "true")):
        if annotations.get(name) != value:
            yield f'headGroupSpec: the annotation {name} must be "{value}": a run does not survive the loss of its head'
    if not pod.get("nodeSelector") and not any(expressions(pod)):
        yield "headGroupSpec: a nodeSelector or nodeAffinity must keep it from pre-emptible nodes"


def _enough(where: str, pod: Tree) -> Iterator[str]:
    limits = (pod["containers"][0].get("resources") or {}).get("limits") or {}
    memory = size_of(limits.get("memory"))
    if limits and "ephemeral-storage" not in limits:
        yield f"{where}: no limit of ephemeral-storage: what it writes beside its volumes could fill the node"
    if memory is not None and memory < LEAST_RAYS_MEMORY:
        yield f"{where}: its memory of {memory:,.0f} bytes is less than Ray's own processes take: the kernel would end them"


def _room(where: str, group: Tree) -> Iterator[str]:
    """Volumes against the limits that they count against, where both are quantities."""
    pod = group["template"]["spec"]
    if not pod.get("containers"):
        return
    limits = (pod["containers"][0].get("resources") or {}).get("limits") or {}
    yield from _enough(where, pod)
    for mount in pod["containers"][0].get("volumeMounts") or ():
        if mount.get("mountPath") == "/dev/shm":
            for one in pod.get("volumes") or ():
                if one.get("name") == mount.get("name") and (one.get("emptyDir") or {}).get("medium") != "Memory":
                    yield f"{where}: /dev/shm is no memory: the volume {one['name']} needs medium: Memory"
        if str(mount.get("mountPath")).rstrip("/") == "/tmp":
            for one in pod.get("volumes") or ():
                if one.get("name") == mount.get("name") and (one.get("emptyDir") or {}).get("medium") == "Memory":
                    yield f"{where}: /tmp is memory: what Ray spills there is meant to leave it"
    memory, disk = (size_of(limits.get(key)) for key in ("memory", "ephemeral-storage"))
    volumes = [one["emptyDir"] or {} for one in pod.get("volumes") or () if "emptyDir" in one]
    on_disk, in_memory = (
        sum(size_of(one.get("sizeLimit")) or 0 for one in volumes if (one.get("medium") == "Memory") == wanted) for wanted in (False, True)
    )
    if memory is not None and in_memory >= memory:
        yield f"{where}: volumes in memory of {in_memory:,.0f} bytes leave nothing of its {memory:,.0f}, which they count against"
    if disk is not None and on_disk > disk:
        yield f"{where}: volumes of {on_disk:,.0f} bytes are more than its ephemeral-storage of {disk:,.0f}: the pod would be evicted"
    store = size_of((group.get("rayStartParams") or {}).get("object-store-memory"))
    if store is None and memory is not None and 0 < in_memory < RAYS_SHARE * memory:
        yield f"{where}: without object-store-memory Ray takes {RAYS_SHARE:.0%} of its memory, more than /dev/shm holds"
    if store is not None and in_memory and store == in_memory:
        yield f"{where}: object-store-memory takes all of /dev/shm, and leaves nothing to NCCL and data loaders"
    if store is not None and in_memory and store > in_memory:
        yield f"{where}: object-store-memory of {store:,.0f} bytes does not fit into /dev/shm of {in_memory:,.0f}"


def _autoscalers_container(cluster: Tree) -> Iterator[str]:
    """The one that the operator adds to the head, as far as it is ours to say."""
    options = cluster.get("autoscalerOptions") or {}
    yield from _privileges("autoscalerOptions", options)
    if options.get("imagePullPolicy") == "Never":
        yield "autoscalerOptions: imagePullPolicy Never: on a node that is new the image is not there"
    memory = size_of(((options.get("resources") or {}).get("limits") or {}).get("memory"))
    if memory is not None and memory < LEAST_AUTOSCALERS_MEMORY:
        yield f"autoscalerOptions: its memory of {memory:,.0f} bytes is less than the operator's own 512Mi: the kernel would end it"
    paths = [str(mount.get("mountPath", "")).rstrip("/") for mount in options.get("volumeMounts") or ()]
    at = {mount["name"] for mount in options.get("volumeMounts") or () if str(mount.get("mountPath", "")).rstrip("/") == TOKEN_FOLDER}
    for volume in cluster["headGroupSpec"]["template"]["spec"].get("volumes") or ():
        if volume.get("name") in at and "projected" in volume:
            for name in ("token", "ca.crt"):
                if name not in _projected(volume["projected"]):
                    yield f"autoscalerOptions.volumeMounts: the volume {volume['name']} has no file {name}, which the autoscaler reads"
    if TOKEN_FOLDER not in paths:
        yield f"autoscalerOptions.volumeMounts has nothing at {TOKEN_FOLDER}: the autoscaler could not reach Kubernetes' API"


def _projected(source: Tree) -> set[str]:
    """Paths of the files that a projected volume names."""
    parts = [part for one in source.get("sources") or () for part in one.values() if isinstance(part, Mapping)]
    return {str(one["path"]) for part in parts for one in (part, *(part.get("items") or ())) if "path" in one}


def _grace(where: str, pod: Tree) -> Iterator[str]:
    if not pod.get("containers"):
        return
    container = pod["containers"][0]
    drain = str(_env(container).get("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", {}).get("value", ""))
    grace = pod.get("terminationGracePeriodSeconds")
    if not drain.isdigit() or int(drain) < 1:
        yield f"{where}: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S must be set: Ray's 30 s are a race against Kubernetes' 30 s"
    elif not isinstance(grace, int) or grace < int(drain) + GRACE_MARGIN_S:
        yield f"{where}: terminationGracePeriodSeconds {grace} must be {GRACE_MARGIN_S} s more than the drain of {drain} s"
    if (container.get("lifecycle") or {}).get("preStop"):
        yield f"{where}: preStop cuts the drain short, which its time is taken from (`ray stop` ends it); leave it out"
    if (container.get("lifecycle") or {}).get("postStart"):
        yield f"{where}: postStart is run beside `ray start`, and ends the container if it fails; leave it out"


def _security(where: str, pod: Tree) -> Iterator[str]:
    context = pod.get("securityContext") or {}
    if context.get("runAsNonRoot") is not True or not context.get("runAsUser"):
        yield f"{where}: securityContext must say runAsNonRoot: true and a runAsUser that is not 0"
    if (context.get("seccompProfile") or {}).get("type") != "RuntimeDefault":
        yield f"{where}: securityContext.seccompProfile must be RuntimeDefault"
    if pod.get("automountServiceAccountToken") is not False:
        yield f"{where}: automountServiceAccountToken must be false: training code needs no rights in the cluster"
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(field):
            yield f"{where}: {field} gives a pod the node's own"
    if pod.get("shareProcessNamespace"):
        yield f"{where}: shareProcessNamespace lets one container read another's files: training code the autoscaler's token"
    for volume in pod.get("volumes") or ():
        if "hostPath" in volume:
            yield f"{where}: volume {volume.get('name')} is a folder of the node"
        if "emptyDir" in volume and not (volume["emptyDir"] or {}).get("sizeLimit"):
            yield f"{where}: volume {volume.get('name')} has no sizeLimit: it could fill the node"


def _container(where: str, container: Tree) -> Iterator[str]:
    resources = container.get("resources") or {}
    yield from _privileges(where, container)
    image = str(container.get("image", ""))
    tag = image.rpartition("/")[2]
    if re.search(r"\s", str(container.get("image", " "))):
        yield f"{where}: the image's name {container.get('image')!r} holds a blank"
    if "@sha256:" not in tag and tag.partition(":")[2] in ("", "latest"):
        yield f"{where}: the image {container.get('image')} has no fixed tag: a later pod could get another version; give one with --image"
    elif not IMAGE.fullmatch(image):
        yield f"{where}: {image} is no image's name: give [REGISTRY/]NAME:TAG, NAME in lower-case letters, digits and '.', '_', '-', '/'"
    if container.get("imagePullPolicy") == "Never":
        yield f"{where}: imagePullPolicy Never: on a node that is new the image is not there"
    requests, limits = resources.get("requests"), resources.get("limits")
    if not requests or requests != limits:
        yield f"{where}: requests and limits must be there and equal"
    elif not str(limits.get("cpu", "")).isdigit() or "memory" not in limits:
        yield f"{where}: resources need memory and whole CPUs, from which Ray counts its own"
    ports = container.get("ports") or ()
    for field in ("name", "containerPort"):
        values = [port.get(field) for port in ports]
        for value in sorted({str(one) for one in values if values.count(one) > 1}):
            yield f"{where}: two ports have the {field} {value}"
    for name in plain_secrets(container):
        yield f"{where}: the variable {name} is a secret in plain text: take it from a Secret (--env-secret)"
    for port in ports:
        if "hostPort" in port:
            yield f"{where}: hostPort {port['hostPort']} is the node's own port: one pod alone could have it"
        if len(str(port.get("name", ""))) > 15:
            yield f"{where}: the port's name {port['name']} has more than 15 characters"


def _privileges(where: str, container: Tree) -> Iterator[str]:
    context = container.get("securityContext") or {}
    if context.get("allowPrivilegeEscalation") is not False or "ALL" not in (context.get("capabilities") or {}).get("drop", ()):
        yield f"{where}: securityContext must say allowPrivilegeEscalation: false and drop ALL capabilities"
    if context.get("privileged"):
        yield f"{where}: privileged gives it the node"
    added = set((context.get("capabilities") or {}).get("add") or ()) - MAY_BE_ADDED
    if added:
        yield f"{where}: the capabilities {', '.join(sorted(added))} are none that the namespace's level, restricted, lets in"
    if context.get("runAsUser") == 0 or context.get("runAsNonRoot") is False:
        yield f"{where}: its securityContext makes it root, whatever the pod's says"
    if (context.get("seccompProfile") or {}).get("type", "RuntimeDefault") != "RuntimeDefault":
        yield f"{where}: its seccompProfile must be RuntimeDefault, as the pod's"
