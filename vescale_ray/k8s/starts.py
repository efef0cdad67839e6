"""How Ray is started in a pod: KubeRay's operator writes ``ray start`` of ``rayStartParams``, and what a container sets can undo it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from vescale_ray.k8s.names import ALMOST
from vescale_ray.k8s.values import plain_secrets, size_of

Tree = Mapping[str, Any]
PARAMETERS = frozenset(
    {
        "address",
        "block",
        "dashboard-agent-grpc-port",
        "dashboard-agent-listen-port",
        "dashboard-host",
        "dashboard-port",
        "disable-usage-stats",
        "include-dashboard",
        "include-log-monitor",
        "labels",
        "max-worker-port",
        "memory",
        "metrics-export-port",
        "min-worker-port",
        "node-ip-address",
        "node-manager-port",
        "num-cpus",
        "num-gpus",
        "object-manager-port",
        "object-spilling-directory",
        "object-store-memory",
        "plasma-directory",
        "port",
        "ray-client-server-port",
        "redis-password",
        "redis-username",
        "resources",
        "runtime-env-agent-port",
        "system-config",
        "system-reserved-cpu",
        "system-reserved-memory",
        "temp-dir",
        "worker-port-list",
    }
)
"""Of ``ray start`` in Ray 2.60, without ``--``: another one, and the pod ends at its start, again and again."""
_WHOLE = ("num-cpus", "num-gpus", "memory", "object-store-memory")
SET_BY_IT = frozenset({"address", "node-ip-address"})
FOLDERS = {"temp-dir": "/tmp", "plasma-directory": "/dev/shm"}
OVERWRITES = "ray.io/overwrite-container-cmd"
ON_THE_HEAD = "node:__internal_head__"
VOLUMES = ("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret")
"""Kinds of volumes that the namespace's level, restricted, lets in."""
VARIABLES = frozenset(
    {
        "GLOO_SOCKET_IFNAME",
        "NCCL_DEBUG",
        "NCCL_SOCKET_IFNAME",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S",
        "RAY_GRAFANA_HOST",
        "RAY_GRAFANA_IFRAME_HOST",
        "RAY_PROMETHEUS_HOST",
        "TORCH_FR_BUFFER_SIZE",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    }
)
"""Those that we set: one that is almost one of them is mistyped, and read by nobody."""
LOOPBACK = ("lo", "=lo", "127.0.0.1")
OTHERS: Mapping[str, str] = {
    "CUDA_VISIBLE_DEVICES": "Ray sets it, for each worker to its own GPUs",
    "NVIDIA_VISIBLE_DEVICES": "the device plug-in sets it, to the pod's own GPUs",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "every worker of a pod would use its first GPU",
    "TORCH_NCCL_BLOCKING_WAIT": "a collective whose peer has gone would hold its process",
}
"""Variables that are others' to set, and why."""
SLOW: Mapping[str, tuple[str, ...]] = {
    "CUDA_LAUNCH_BLOCKING": ("1",),
    "NCCL_DEBUG": ("TRACE",),
    "NCCL_P2P_DISABLE": ("1",),
    "NCCL_SHM_DISABLE": ("1",),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1",),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL",),
}
"""Left over from a search for a mistake."""
_ALLOCATOR = re.compile(r"[a-z_0-9]+:(\[[^\]]*\]|[^,:=\[\]]+)(,[a-z_0-9]+:(\[[^\]]*\]|[^,:=\[\]]+))*", re.ASCII)


def start_problems(cluster: Tree, spec: Tree) -> Iterator[str]:
    """One sentence for each thing that keeps Ray from being started as the operator means to, or opens it to others.

    Args:
        cluster: a RayCluster's spec.
        spec: the RayJob's that it stands in, or the same.
    """
    head = cluster["headGroupSpec"]
    groups = [("headGroupSpec", head)]
    groups += [(f"worker group {one.get('groupName')}", one) for one in cluster.get("workerGroupSpecs") or ()]
    for where, group in groups:
        if group["template"]["spec"].get("containers"):
            yield from _parameters(where, group)
            yield from _pod(where, group["template"])
    yield from _exposed(head)
    if "nvidia.com/gpu" in _limits(head) or (head.get("rayStartParams") or {}).get("num-gpus", "0") != "0":
        yield "headGroupSpec: it has a GPU, which nothing there uses"
    options = cluster.get("autoscalerOptions") or {}
    images = {one.get("image") for one in head["template"]["spec"].get("containers") or ()}
    if "image" in options and options["image"] not in images:
        yield f"autoscalerOptions.image {options['image']} must be the head's: both have to be of one version of Ray"
    for name in plain_secrets(options):
        yield f"autoscalerOptions: the variable {name} is a secret in plain text: take it from a Secret"
    for container in ((spec.get("submitterPodTemplate") or {}).get("spec") or {}).get("containers") or ():
        if container.get("command") or container.get("args"):
            yield "submitterPodTemplate: command and args take the place of the operator's `ray job submit`: leave them out"
        yield from _variables("submitterPodTemplate", container)
    for field in ("entrypointNumCpus", "entrypointNumGpus"):
        if spec.get(field):
            yield f"{field}: the driver would go to a worker's pod, which may be lost, and has no run's file: leave it out"
    if spec.get("entrypointResources") and ON_THE_HEAD not in str(spec["entrypointResources"]):
        yield f"entrypointResources: without {ON_THE_HEAD} the driver would go to a worker's pod, which may be lost"


def _parameters(where: str, group: Tree) -> Iterator[str]:
    params = group.get("rayStartParams") or {}
    for name, value in params.items():
        if name not in PARAMETERS:
            near = difflib.get_close_matches(name, PARAMETERS, n=1, cutoff=0.7)
            yield f"{where}: rayStartParams.{name}: `ray start` has no --{name}" + (f": did you mean {near[0]}?" if near else "")
        elif (name in _WHOLE or name.endswith("port")) and not str(value).isdigit():
            yield f"{where}: rayStartParams.{name} is {value}: `ray start` takes a whole number, sizes in bytes"
    for name in sorted(SET_BY_IT & params.keys()):
        yield f"{where}: rayStartParams.{name}: the operator sets it, to the head of this cluster"
    for name, folder in FOLDERS.items():
        if name in params and not f"{params[name]}/".startswith(f"{folder}/"):
            yield f"{where}: rayStartParams.{name} {params[name]}: only {folder} is there for it, and can be written"
    if params.get("include-dashboard", "true").lower() != "true":
        yield f"{where}: rayStartParams.include-dashboard: operator and submitter reach the cluster by its dashboard"
    listed = {one.get("name"): str(one.get("containerPort")) for one in group["template"]["spec"]["containers"][0].get("ports") or ()}
    wanted = params.get("metrics-export-port", "8080")
    if "metrics" in listed and listed["metrics"] != wanted:
        yield f"{where}: Ray's metrics are at port {wanted}, its container's port metrics is {listed['metrics']}"
    listed_too = group.get("resources") or {}
    for param, name, limit in (("num-cpus", "CPU", "cpu"), ("num-gpus", "GPU", "nvidia.com/gpu"), ("memory", "memory", "memory")):
        told, has = size_of(listed_too.get(name, params.get(param))), size_of(_limits(group).get(limit, "0"))
        if told is not None and has is not None and told > has:
            shown = f"resources.{name}" if name in listed_too else f"rayStartParams.{param}"
            yield f"{where}: {shown} tells Ray of {told:,g}, the pod has {has:,g}: more would be placed there than it can hold"
    store, memory = size_of(params.get("object-store-memory")), size_of(_limits(group).get("memory"))
    if store is not None and memory is not None and store >= memory:
        yield f"{where}: object-store-memory of {store:,.0f} bytes is not less than its memory of {memory:,.0f}"


def _limits(group: Tree) -> Tree:
    containers = group["template"]["spec"].get("containers") or [{}]
    return (containers[0].get("resources") or {}).get("limits") or {}


def _pod(where: str, template: Tree) -> Iterator[str]:
    pod = template["spec"]
    container = pod["containers"][0]
    if ((template.get("metadata") or {}).get("annotations") or {}).get(OVERWRITES) == "true":
        yield f"{where}: with {OVERWRITES} the operator does not start Ray"
    for field in ("command", "args"):
        if container.get(field):
            yield f"{where}: {field} would be run before the operator's `ray start`: leave it out"
    if not any(str(mount.get("mountPath", "")).rstrip("/") == "/tmp" for mount in container.get("volumeMounts") or ()):
        yield f"{where}: nothing is mounted at /tmp: Ray's logs and what it spills could fill the node"
    if "nodeName" in pod:
        yield f"{where}: nodeName passes the scheduler by, and puts all of them on {pod['nodeName']}"
    for field in ("livenessProbe", "readinessProbe", "startupProbe"):
        if field in container:
            yield f"{where}: {field} takes the place of the operator's, which know how long Ray may take: leave it out"
    if pod.get("dnsPolicy", "ClusterFirst") != "ClusterFirst":
        yield f"{where}: dnsPolicy {pod['dnsPolicy']}: the head is found by a name that the cluster's own DNS knows"
    if (pod.get("securityContext") or {}).get("fsGroup") is None:
        yield f"{where}: securityContext has no fsGroup: a volume that belongs to root can't be written"
    for volume in pod.get("volumes") or ():
        for kind in sorted(volume.keys() - {"name", "hostPath", *VOLUMES}):
            yield f"{where}: volume {volume.get('name')} is of the kind {kind}, which the namespace does not let in"
    contexts = [pod.get("securityContext") or {}, *(one.get("securityContext") or {} for one in pod["containers"])]
    for context in contexts:
        if (context.get("windowsOptions") or {}).get("hostProcess"):
            yield f"{where}: hostProcess gives it the node"
        if (context.get("appArmorProfile") or {}).get("type") == "Unconfined" or context.get("procMount", "Default") != "Default":
            yield f"{where}: appArmorProfile Unconfined and procMount Unmasked take away what holds it in"
    for one in pod["containers"]:
        yield from _variables(where, one)


def _variables(where: str, container: Tree) -> Iterator[str]:
    env = {str(one.get("name")): str(one.get("value", "")) for one in container.get("env") or ()}
    if env.get("RAY_AUTH_MODE", "token") != "token":
        yield f"{where}: RAY_AUTH_MODE {env['RAY_AUTH_MODE']} undoes authOptions: leave it out"
    for name in sorted(env.keys() - VARIABLES):
        near = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=ALMOST)
        if near:
            yield f"{where}: the variable {name} is read by nobody: did you mean {near[0]}?"
    if "RAY_ADDRESS" in env:
        yield f"{where}: RAY_ADDRESS: the operator sets it, to the head of this cluster"
    yield from setting_problems(where, env)


def setting_problems(where: str, env: Mapping[str, str]) -> Iterator[str]:
    """One sentence for each variable that does harm with the value that it has, be it a container's or the job's."""
    for name, why in OTHERS.items():
        if env.get(name, "0") not in ("", "0") or (name.endswith("VISIBLE_DEVICES") and "NOSET" not in name and name in env):
            yield f"{where}: {name}: {why}: leave it out"
    for name, values in SLOW.items():
        if env.get(name, "").upper() in values:
            yield f"{where}: {name} {env[name]} slows every step down; it is for a search for a mistake: leave it out"
    if any(name.lower() in ("http_proxy", "https_proxy") for name in env) and not any(name.lower() == "no_proxy" for name in env):
        yield f"{where}: a proxy and no no_proxy: what the pods ask of each other would go there, too"
    if not f"{env.get('RAY_TMPDIR', '/tmp')}/".startswith("/tmp/"):
        yield f"{where}: RAY_TMPDIR {env['RAY_TMPDIR']}: only /tmp is there for it, and can be written"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if name in env and not _ALLOCATOR.fullmatch(env[name]):
            yield f"{where}: {name} {env[name]}: PyTorch takes NAME:VALUE, several with ',', and ends the process for anything else"
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if env.get(name) in LOOPBACK:
            yield f"{where}: {name} {env[name]}: no other pod can be reached by it"
    handling = env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    if handling != "2":
        yield f"{where}: TORCH_NCCL_ASYNC_ERROR_HANDLING {handling} ends whoever loses a peer, and its shards with it: it must be 2"


def _exposed(head: Tree) -> Iterator[str]:
    kinds = (head.get("serviceType"), ((head.get("headService") or {}).get("spec") or {}).get("type"))
    for kind in kinds:
        if kind not in (None, "ClusterIP"):
            yield f"headGroupSpec: a Service of type {kind} lets in who is outside of the cluster, to the dashboard, too: use ClusterIP"
    if head.get("enableIngress"):
        yield "headGroupSpec: enableIngress lets in who is outside of the cluster"
