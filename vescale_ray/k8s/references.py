"""What the documents say of each other: names, labels, ports, mounts, and the run's configuration inside of them."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from vescale_ray.config import ConfigError, RunConfig, read_config
from vescale_ray.k8s.kinds import namespace_problems
from vescale_ray.k8s.monitors import watched_problems
from vescale_ray.k8s.nodes import may_vanish
from vescale_ray.k8s.options import SYSTEMS, TAKEN, inside, places, port_of, ways_out
from vescale_ray.k8s.pods import RUN_LABEL
from vescale_ray.k8s.policies import lets_out, needless_problems, policy_problems, selects
from vescale_ray.k8s.rules import TOKEN_FOLDER, pod_templates
from vescale_ray.k8s.values import size_of

Tree = Mapping[str, Any]
Name = tuple[str, str]
"""Kind and name."""
API_PORTS = (443, 6443)
SHOWN = ("RAY_PROMETHEUS_HOST", "RAY_GRAFANA_HOST", "RAY_GRAFANA_IFRAME_HOST")
OUR_FOLDERS = ("/dev/shm", "/etc/vescale-ray", TOKEN_FOLDER)
MADE_BY_KUBERNETES: frozenset[Name] = frozenset({("ConfigMap", "kube-root-ca.crt")})


def reference_problems(documents: Sequence[Tree], outside: AbstractSet[Name] = frozenset()) -> Iterator[str]:
    """One sentence for each thing that one document says of another, and that is not so.

    Args:
        outside: objects that are there without being among the documents.
    """
    names = [(str(one["kind"]), str(one["metadata"]["name"])) for one in documents]
    for kind, name in sorted({pair for pair in names if names.count(pair) > 1}):
        yield f"{kind} {name} is there twice"
    yield from namespace_problems(documents)
    yield from watched_problems(documents)
    known = set(names) | set(outside) | MADE_BY_KUBERNETES
    pods = list(_pods(documents))
    for pod in pods:
        yield from _names(pod, known, documents)
        yield from _mounts(pod)
    yield from _selectors(documents, pods)
    yield from policy_problems(documents, pods)
    yield from _ranks(documents, pods)
    for one in documents:
        if one["kind"] in ("RayJob", "RayCluster"):
            yield from _secrets(one, outside)
            yield from _ways(one, documents, pods)
            yield from _run(one, documents, pods)


class _Pod:
    """A pod template, with where it stands."""

    def __init__(self, where: str, template: Tree, more_mounts: Sequence[Tree] = ()) -> None:
        self.where = where
        self.labels: Tree = (template.get("metadata") or {}).get("labels") or {}
        self.spec: Tree = template["spec"]
        self.containers: Sequence[Tree] = self.spec.get("containers") or ()
        self.more_mounts = more_mounts
        listed = [port for one in self.containers for port in one.get("ports") or () if port.get("protocol", "TCP") == "TCP"]
        self.ports: Mapping[str, int] = {str(port.get("name")): port["containerPort"] for port in listed}

    def of_another_run(self) -> _Pod:
        """The same pod, if a run of another name had it."""
        return _Pod(self.where, {"metadata": {"labels": {**self.labels, RUN_LABEL: "of-another"}}, "spec": self.spec})


def _clusters(documents: Sequence[Tree]) -> Iterator[Tree]:
    for one in documents:
        if one["kind"] == "RayCluster":
            yield one["spec"]
        elif one["kind"] == "RayJob" and one["spec"].get("rayClusterSpec"):
            yield one["spec"]["rayClusterSpec"]


def _pods(documents: Sequence[Tree]) -> Iterator[_Pod]:
    for cluster in _clusters(documents):
        sidecar = (cluster.get("autoscalerOptions") or {}).get("volumeMounts") or ()
        yield _Pod("headGroupSpec", cluster["headGroupSpec"]["template"], sidecar)
        for group in cluster.get("workerGroupSpecs") or ():
            yield _Pod(f"worker group {group.get('groupName')}", group["template"])
    for one in documents:
        if one["kind"] == "RayJob" and "submitterPodTemplate" in one["spec"]:
            yield _Pod("submitterPodTemplate", one["spec"]["submitterPodTemplate"])


# ------------------------------------------------------------------------------------------------------------------- pods


def _names(pod: _Pod, known: AbstractSet[Name], documents: Sequence[Tree]) -> Iterator[str]:
    wanted: list[Name] = []
    for field, kind in (("serviceAccountName", "ServiceAccount"), ("priorityClassName", "PriorityClass")):
        if field in pod.spec:
            wanted.append((kind, pod.spec[field]))
    wanted += [("Secret", secret.get("name", "without a name")) for secret in pod.spec.get("imagePullSecrets") or ()]
    for container in (*(pod.spec.get("initContainers") or ()), *(pod.spec.get("containers") or ())):
        for source in container.get("envFrom") or ():
            kinds = (("configMapRef", "ConfigMap"), ("secretRef", "Secret"))
            wanted += [
                (kind, source[key].get("name", "without a name"))
                for key, kind in kinds
                if key in source and not source[key].get("optional")
            ]
        for one in container.get("env") or ():
            given = one.get("valueFrom") or {}
            for key, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
                if key in given and not given[key].get("optional"):
                    wanted.append((kind, given[key].get("name", "without a name")))
                    if kind == "ConfigMap":
                        yield from _items(pod, {"name": wanted[-1][1], "items": [given[key]]}, documents)
    for volume in pod.spec.get("volumes") or ():
        if "configMap" in volume:
            wanted.append(("ConfigMap", volume["configMap"].get("name", "without a name")))
            if volume["configMap"].get("optional"):
                yield f"{pod.where}: the volume {volume['name']} is optional: without its ConfigMap the pod would start with nothing in it"
            yield from _items(pod, volume["configMap"], documents)
        if "secret" in volume:
            wanted.append(("Secret", volume["secret"]["secretName"]))
        if "persistentVolumeClaim" in volume:
            wanted.append(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
            for claim in documents:
                modes = (claim.get("spec") or {}).get("accessModes") or ()
                if (claim["kind"], claim["metadata"]["name"]) == wanted[-1] and "ReadWriteMany" not in modes:
                    yield f"{pod.where}: the claim {wanted[-1][1]} is not ReadWriteMany: pods of other nodes can't mount it"
        for source in (volume.get("projected") or {}).get("sources") or ():
            kinds = (("configMap", "ConfigMap"), ("secret", "Secret"))
            wanted += [(kind, source[key].get("name", "without a name")) for key, kind in kinds if key in source]
            if "configMap" in source:
                yield from _items(pod, source["configMap"], documents)
    if "serviceAccountName" not in pod.spec:
        yield f"{pod.where}: it has no serviceAccountName, and would share the namespace's default account"
    for kind, name in wanted:
        if (kind, name) not in known:
            yield f"{pod.where}: there is no {kind} {name}"


def _items(pod: _Pod, source: Tree, documents: Sequence[Tree]) -> Iterator[str]:
    maps: dict[str, Tree] = {"kube-root-ca.crt": {"ca.crt": ""}}
    maps |= {one["metadata"]["name"]: one.get("data") or {} for one in documents if one["kind"] == "ConfigMap"}
    data = maps.get(source.get("name", ""))
    for item in source.get("items") or ():
        if data is not None and item["key"] not in data:
            yield f"{pod.where}: ConfigMap {source['name']} has no key {item['key']}"


def _mounts(pod: _Pod) -> Iterator[str]:
    volumes = [volume["name"] for volume in pod.spec.get("volumes") or ()]
    mounts = [*(mount for one in pod.containers for mount in one.get("volumeMounts") or ()), *pod.more_mounts]
    mounted = {mount["name"] for mount in mounts}
    for kind, names in (("volumes", volumes), ("containers", [one.get("name") for one in pod.containers])):
        for name in sorted({str(name) for name in names if names.count(name) > 1}):
            yield f"{pod.where}: two {kind} have the name {name}"
    claims = {volume["name"] for volume in pod.spec.get("volumes") or () if "persistentVolumeClaim" in volume}
    read_only = any((one.get("persistentVolumeClaim") or {}).get("readOnly") for one in pod.spec.get("volumes") or ())
    if read_only or any(mount["name"] in claims and mount.get("readOnly") for mount in mounts):
        yield f"{pod.where}: the claim is mounted readOnly, and every pod writes to it"
    fixed = {one["name"] for one in pod.spec.get("volumes") or () if "emptyDir" in one}
    for mount in mounts:
        if mount["name"] in fixed and mount.get("readOnly"):
            yield f"{pod.where}: {mount['mountPath']} is mounted readOnly, and nothing else writes to it"
        folder = posixpath.normpath(str(mount["mountPath"]))
        hides = folder in TAKEN - {"/tmp"} or inside(folder, SYSTEMS) and not inside(folder, OUR_FOLDERS)
        if hides:
            yield f"{pod.where}: a volume at {folder} hides what the image or the node has there"
    for name in sorted(mounted - set(volumes)):
        yield f"{pod.where}: {name} is mounted, but no volume has this name"
    for name in sorted(set(volumes) - mounted):
        yield f"{pod.where}: nothing mounts the volume {name}"
    for one in pod.containers:
        paths = [mount["mountPath"].rstrip("/") for mount in one.get("volumeMounts") or ()]
        for path in sorted({path for path in paths if paths.count(path) > 1}):
            yield f"{pod.where}: two volumes are mounted at {path}"
        token = [mount for mount in one.get("volumeMounts") or () if mount["name"] in _token_volumes(pod)]
        if token:
            yield f"{pod.where}, container {one['name']}: mounts a token of Kubernetes' API; only the autoscaler may"


def _token_volumes(pod: _Pod) -> set[str]:
    return {
        volume["name"]
        for volume in pod.spec.get("volumes") or ()
        if any("serviceAccountToken" in source for source in (volume.get("projected") or {}).get("sources") or ())
    }


# ------------------------------------------------------------------------------------------------------------ by selectors


def _matching(selector: Tree, pods: Sequence[_Pod]) -> list[_Pod]:
    return [pod for pod in pods if selects(selector, pod)]


def _selectors(documents: Sequence[Tree], pods: Sequence[_Pod]) -> Iterator[str]:
    if not pods:
        return
    covered: set[int] = set()
    for one in documents:
        spec, where = one.get("spec") or {}, f"{one['kind']} {one['metadata']['name']}"
        if one["kind"] == "PodDisruptionBudget":
            matching = _matching(spec["selector"], pods)
            if not matching:
                yield f"{where}: its selector matches no pod"
            yield from (f"{where}: holds {pod.where}, without which the run goes on" for pod in matching if pod.where != "headGroupSpec")
            if any(selects(spec["selector"], pod.of_another_run()) for pod in matching):
                yield f"{where}: counts the pods of other runs, too"
        elif one["kind"] == "PodMonitor":
            matching = _matching(spec["selector"], pods)
            if not matching:
                yield f"{where}: its selector matches no pod"
            spaces = spec.get("namespaceSelector") or {}
            if not spaces.get("any") and one["metadata"].get("namespace") not in spaces.get(
                "matchNames", [one["metadata"].get("namespace")]
            ):
                yield f"{where}: its namespaceSelector leaves out the pods' own"
            for endpoint in spec["podMetricsEndpoints"]:
                yield from (f"{where}: {pod.where} has no port {endpoint['port']}" for pod in matching if endpoint["port"] not in pod.ports)
        elif one["kind"] == "NetworkPolicy":
            matching = _matching(spec["podSelector"], pods)
            covered |= {id(pod) for pod in matching}
            if not matching:
                yield f"{where}: its podSelector matches no pod"
            if any(selects(spec["podSelector"], pod.of_another_run()) for pod in matching):
                yield f"{where}: its podSelector takes the pods of other runs, too"
            declared = {port for pod in matching for port in pod.ports.values()}
            for rule in spec.get("ingress") or ():
                for port in rule.get("ports") or ():
                    if "endPort" in port:
                        yield f"{where}: lets in ports up to {port['endPort']}: a pod declares those that are asked for"
                    if "port" in port and port["port"] not in declared:
                        yield f"{where}: lets in port {port['port']}, which none of its pods declares"
            for rule in [*(spec.get("ingress") or ()), *(spec.get("egress") or ())]:
                for peer in [*(rule.get("from") or ()), *(rule.get("to") or ())]:
                    if "podSelector" in peer and "namespaceSelector" not in peer and not _matching(peer["podSelector"], pods):
                        yield f"{where}: a podSelector in it matches no pod"
    yield from (f"{pod.where}: no NetworkPolicy covers it" for pod in pods if id(pod) not in covered)
    for pod in pods:
        for spread in pod.spec.get("topologySpreadConstraints") or ():
            selector = spread.get("labelSelector") or {}
            if not selects(selector, pod) or selects(selector, pod.of_another_run()):
                yield f"{pod.where}: its topologySpreadConstraints count other pods"
        if pod.where.startswith("worker group") and not pod.spec.get("topologySpreadConstraints"):
            yield f"{pod.where}: it has no topologySpreadConstraints: a node could hold a shard and its copy"


# ---------------------------------------------------------------------------------------------------------------- the run


def _secrets(document: Tree, outside: AbstractSet[Name]) -> Iterator[str]:
    """Secrets are made by hand, so that no password is ever in a manifest: those that are read must be declared."""
    cluster = next(_clusters([document]), {})
    options = cluster.get("gcsFaultToleranceOptions") or {}
    for key in ("redisPassword", "redisUsername"):
        reference = ((options.get(key) or {}).get("valueFrom") or {}).get("secretKeyRef")
        if key in options and not reference and "value" not in options[key]:
            yield f"gcsFaultToleranceOptions.{key} has no valueFrom.secretKeyRef: Redis would be asked without one"
        if reference and ("Secret", reference.get("name")) not in outside:
            yield f"gcsFaultToleranceOptions.{key}: there is no Secret {reference.get('name', 'without a name')}"

    secret = (cluster.get("authOptions") or {}).get("secretName")
    if secret and ("Secret", secret) not in outside:
        yield f"authOptions.secretName: there is no Secret {secret}; without the field the operator makes one"


def _ranks(documents: Sequence[Tree], pods: Sequence[_Pod]) -> Iterator[str]:
    """Heads before workers: whom the scheduler evicts, and to whom the operator gives the autoscaler's rights."""
    values = {one["metadata"]["name"]: one.get("value", 0) for one in documents if one["kind"] == "PriorityClass"}
    policies = {
        one["metadata"]["name"]: one.get("preemptionPolicy", "PreemptLowerPriority") for one in documents if one["kind"] == "PriorityClass"
    }
    accounts = {one["metadata"]["name"] for one in documents if one["kind"] == "ServiceAccount"}
    heads = [pod for pod in pods if pod.where == "headGroupSpec"]
    for head in heads:
        for pod in (one for one in pods if one.where != "headGroupSpec"):
            if "priorityClassName" not in head.spec and "priorityClassName" in pod.spec:
                yield f"headGroupSpec: it has no priorityClassName, and {pod.where} has: heads would be evicted first"
            high, low = (values.get(one.spec.get("priorityClassName")) for one in (head, pod))
            if high is not None and low is not None and low >= high:
                yield f"{pod.where}: its priority {low} is not below the head's {high}, without which no worker is of use"
            name = pod.spec.get("priorityClassName")
            if policies.get(name, "Never") != "Never" and pod.where.startswith("worker group"):
                yield f"{pod.where}: its class {name} evicts others' pods, and a run goes on with fewer workers: preemptionPolicy: Never"
            account = pod.spec.get("serviceAccountName")
            if account in accounts and account == head.spec.get("serviceAccountName"):
                yield f"{pod.where}: the account {account} is the head's: it would have the rights of the autoscaler"


def _ways(document: Tree, documents: Sequence[Tree], pods: Sequence[_Pod]) -> Iterator[str]:
    """What the head asks outside of the run's pods."""
    cluster = next(_clusters([document]), {})
    redis = str((cluster.get("gcsFaultToleranceOptions") or {}).get("redisAddress") or "")
    address = re.fullmatch(r"(rediss?://)?[\w.-]+:(\d+)", redis)
    if redis and not (address and 0 < int(address[2]) < 2**16):
        yield f"gcsFaultToleranceOptions.redisAddress is {redis}: give HOST:PORT"
        redis = ""
    for head in (pod for pod in pods if pod.where == "headGroupSpec"):
        for port in API_PORTS if cluster.get("enableInTreeAutoscaling") else ():
            if not lets_out(documents, head, port):
                # That of the Service, and that of what is behind it: network plug-ins differ in which of them they look at.
                yield f"headGroupSpec: no NetworkPolicy lets the autoscaler ask Kubernetes' API (port {port})"
        if redis and not lets_out(documents, head, port_of(redis, 6379)):
            yield f"headGroupSpec: no NetworkPolicy lets it ask Redis at {redis}"


def _run(document: Tree, documents: Sequence[Tree], pods: Sequence[_Pod]) -> Iterator[str]:
    """What the cluster is made for: the configuration in the head's ConfigMap."""
    cluster = next(_clusters([document]), None)
    if cluster is None:
        return
    (_, head), *workers = pod_templates(cluster)
    files = dict(_files(head, documents))
    path, overrides = next(iter(files), None), []
    if document["kind"] == "RayJob":
        try:
            words = shlex.split(document["spec"].get("entrypoint", ""))
        except ValueError as error:
            yield f"the entrypoint {document['spec']['entrypoint']} is no command: {error}".rstrip(".")
            return
        if words[:2] != ["vescale-ray", "train"] or len(words) < 3:
            yield f"the entrypoint {' '.join(words)} is not vescale-ray train RUN.yaml"
            return
        path, overrides = words[2], words[3:]
        if path not in files:
            yield f"the entrypoint reads {path}, but no ConfigMap is mounted there"
            return
    if path is None:
        yield "no ConfigMap with a run is mounted on the head"
        return
    try:
        config = read_config(files[path], path, overrides)
    except ConfigError as error:
        yield f"the run in {path} can't be read: {' '.join(str(error).split())}"
        return
    if document["kind"] == "RayJob" and config.checkpoint.resume == "never":
        yield "checkpoint.resume of the run is never: a job that is submitted again would begin with its first step; set it to auto"
    yield from _fits(config, cluster, head, workers)
    yield from needless_problems(documents, pods, {"": ways_out(config), "headGroupSpec": _asked_by_the_head(cluster, head)})
    for pod in pods:
        for port in ways_out(config) if pod.where != "submitterPodTemplate" else ():
            if not lets_out(documents, pod, port):
                yield f"{pod.where}: no NetworkPolicy lets it ask the store of checkpoint.dir (port {port})"


def _asked_by_the_head(cluster: Tree, head: Tree) -> tuple[int, ...]:
    """Ports that it alone asks: Kubernetes' API, Redis, and what Ray's dashboard shows its figures from."""
    redis = (cluster.get("gcsFaultToleranceOptions") or {}).get("redisAddress")
    urls = [str(one.get("value", "")) for one in head["containers"][0].get("env") or () if str(one.get("name")) in SHOWN]
    return (*API_PORTS, *([port_of(str(redis), 6379)] if redis else []), *(port_of(url, 443) for url in urls))


def _files(pod: Tree, documents: Sequence[Tree]) -> Iterator[tuple[str, str]]:
    maps = {one["metadata"]["name"]: one.get("data") or {} for one in documents if one["kind"] == "ConfigMap"}
    volumes = {one["name"]: one["configMap"] for one in pod.get("volumes") or () if "configMap" in one}
    for mount in pod["containers"][0].get("volumeMounts") or ():
        if mount["name"] in volumes:
            source, folder = volumes[mount["name"]], mount["mountPath"].rstrip("/")
            data = maps.get(source.get("name"), {})
            shown = {one["path"]: data.get(one["key"], "") for one in source["items"]} if source.get("items") else data
            if "subPath" in mount:
                shown = {"": shown[mount["subPath"]]} if mount["subPath"] in shown else {}
            yield from ((f"{folder}/{name}".rstrip("/"), text) for name, text in shown.items())


def _fits(config: RunConfig, cluster: Tree, head: Tree, workers: Sequence[tuple[str, Tree]]) -> Iterator[str]:
    ports = {port.get("name"): port["containerPort"] for port in head["containers"][0].get("ports") or ()}
    if ports.get("vescale-metrics") != config.metrics.port:
        yield f"the head's port vescale-metrics is {ports.get('vescale-metrics')}, metrics.port of the run {config.metrics.port}"
    if config.metrics.host not in ("0.0.0.0", "::"):
        yield f"metrics.host of the run is {config.metrics.host}: Prometheus asks from another pod"
    if config.ray.address not in (None, "auto"):
        yield f"ray.address of the run is {config.ray.address}: the pods are the cluster"
    need = config.resources_per_worker
    groups = cluster.get("workerGroupSpecs") or ()
    rooms = [_places(pod, need, group) for (_, pod), group in zip(workers, groups, strict=True)]
    for (name, _), room in zip(workers, rooms, strict=True):
        if room < 1:
            yield f"{name}: no worker of the run fits into a pod (it needs {need})"
    if "GPU" not in need:
        for name, pod in workers:
            if "nvidia.com/gpu" in ((pod["containers"][0].get("resources") or {}).get("limits") or {}):
                yield f"{name}: asks for GPUs, which the run does not use (ray.gpus_per_worker = 0)"
    for (name, pod), group, room in zip(workers, groups, rooms, strict=True):
        if "GPU" in need and (idle := _places(pod, {"GPU": need["GPU"]}, group) - room) > 0 and room > 0:
            yield f"{name}: a pod has GPUs for {idle + room} workers and CPUs for {room}: the others would stand idle, and cost"
    if "GPU" in need and config.train.device == "cpu":
        yield "train.device of the run is cpu, and its workers ask for GPUs, which they would not use: set ray.gpus_per_worker=0"
    bounds = list(zip(rooms, groups, strict=True))
    spares = config.elastic.spares
    for key, wanted, most, field in (
        ("elastic.max_workers", config.max_workers, config.max_workers + spares, "maxReplicas"),
        ("elastic.workers", config.elastic.workers, config.elastic.workers + spares, "replicas"),
        ("elastic.min_workers", config.elastic.min_workers, config.elastic.workers + spares, "minReplicas"),
    ):
        room = sum(each * group.get(field, 0) for each, group in bounds)
        if room < wanted:
            yield f"{field} make room for {room} workers, {key} of the run is {wanted}"
        elif room - most >= max(1, *rooms):
            yield f"{field} make room for {room} workers, and the run wants {most} then: pods would stand idle, and cost"
    stay = [(each, group) for each, group in bounds if not may_vanish(group["template"]["spec"])]
    room = sum(each * group.get("minReplicas", 0) for each, group in stay)
    if len(stay) < len(bounds) and room < config.elastic.min_workers:
        least = f"elastic.min_workers of the run is {config.elastic.min_workers}"
        yield f"minReplicas on nodes that stay make room for {room} workers, {least}: without so many it waits"
    corpus = config.data.corpus if config.data.corpus != "stdlib" else None
    paths = {"run.dir": config.run.dir, "checkpoint.dir": config.checkpoint.dir, "data.corpus": corpus}
    for where, pod in workers:
        if _claims(pod) != _claims(head):
            yield f"{where}: it mounts a claim at another place, or another part of it, than the head: they would not meet"
    for where, pod in [("headGroupSpec", head), *workers]:
        claims = {one["name"] for one in pod.get("volumes") or () if "persistentVolumeClaim" in one}
        roots = [m["mountPath"].rstrip("/") + "/" for m in pod["containers"][0].get("volumeMounts") or () if m["name"] in claims]
        for key, path in paths.items():
            there = re.sub("^(file|local)://", "", path or "") if key == "checkpoint.dir" else path
            if there and not (key == "checkpoint.dir" and "://" in there or any(f"{there}/".startswith(root) for root in roots)):
                yield f"{where}: {key} = {path} is not on a volume that it mounts"


def _claims(pod: Tree) -> set[tuple[str, str, str]]:
    """Claim, folder and part of it."""
    claims = {one["name"]: one["persistentVolumeClaim"]["claimName"] for one in pod.get("volumes") or () if "persistentVolumeClaim" in one}
    mounts = [one for one in pod["containers"][0].get("volumeMounts") or () if one["name"] in claims]
    return {(claims[one["name"]], one["mountPath"].rstrip("/"), one.get("subPath", "")) for one in mounts}


def _places(pod: Tree, need: Mapping[str, float], group: Tree) -> int:
    """Workers that fit into the pod, as Ray counts: by its limits, unless ``rayStartParams`` or ``resources`` say otherwise."""
    limits = (pod["containers"][0].get("resources") or {}).get("limits") or {}
    given = group.get("rayStartParams") or {}
    listed = group.get("resources") or {}
    has = {
        name: size_of(listed.get(name, given.get(param, limits.get(limit, "0")))) or 0.0
        for name, param, limit in (("CPU", "num-cpus", "cpu"), ("GPU", "num-gpus", "nvidia.com/gpu"))
    }
    return min((places(has[name], amount) for name, amount in need.items()), default=1)
