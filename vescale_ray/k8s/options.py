"""What can be chosen about the manifests of a run, and the sizes that follow from it and the run's configuration."""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

from vescale_ray import __version__
from vescale_ray.config import RunConfig, holds_credentials
from vescale_ray.errors import BadInput
from vescale_ray.k8s import names

KINDS = ("job", "cluster", "setup", "monitor")
OVERLAYS = ("spot", "kueue", "gcs-ft")
RAY_VERSION = "2.60.0"
GRACE_MARGIN_S = 20
"""From the end of Ray's drain to the kubelet's SIGKILL."""
LEAST_STOP_S = 100
"""For a job that is stopped, however short a provider's notice is: its checkpoint, and who scrapes it is let come once more."""
OPERATOR = "KubeRay 1.6"
RUNBOOKS = "https://docs.example.com/vescale-ray/runbooks.md"
"""What deploy/alerts.yml has: a place that does not exist, as that of the image."""
RAYS_PORTS = frozenset({52365, *range(10001, 20000)})
"""Of a head: the dashboard's agent, Ray's client, workers and drivers."""
TAKEN = frozenset({"/", "/tmp", "/etc", "/home", "/home/ray", "/opt", "/var"})
"""Folders of a pod that no volume of others can be mounted at, as they hold more than a mount would."""
SYSTEMS = ("/bin", "/boot", "/dev", "/etc/vescale-ray", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr", "/var/run")
"""The same, with all that is below them."""
ON_A_DISK = ("file://", "local://")
LEAST_SHM = "150Mi"
"""Half of it is Ray's object store, which starts with no less than 75 MiB."""
BOUNDS = {
    "--memory": ("1Gi", "64Ti"),
    "--shm": (LEAST_SHM, "64Ti"),
    "--scratch": ("256Mi", "256Ti"),
    "--head-memory": ("1Gi", "64Ti"),
    "--volume-size": ("1Gi", "1048576Ti"),
}
"""Less does not start, and more no node or volume has: mistyped, most likely."""
MOST_CPUS, MOST_GPUS, MOST_PODS, LONGEST_DRAIN_S = 4096, 128, 150_000, 86_400
"""Of a pod; of a cluster, as Kubernetes is made for; a day."""
_QUANTITY = re.compile(r"([1-9]\d*)(Ki|Mi|Gi|Ti)")
_BYTES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


class ManifestError(BadInput):
    """A manifest can't be made of what was given; one line with the remedy."""


@dataclass(frozen=True)
class Options:
    """Everything that the run's configuration does not say.

    Attributes:
        image: of every pod, with a fixed tag or digest.
        pull_secret: an existing Secret that holds the registry's credentials; None: the nodes have them, or nobody needs any.
        env_secret: an existing Secret whose entries are variables of the head and the workers, such as an object store's keys.
        name: of all objects; None: the run's name.
        claim: the volume claim that every pod mounts at ``mount``; the run's folder must lie there.
        mount: see ``claim``.
        gpus: whole GPUs per worker pod; None: what one worker asks for, rounded up.
        cpus, memory: of a worker pod; None for ``cpus``: what its workers ask for, and two more beside GPUs.
        shm: of ``/dev/shm``, a part of ``memory``; half of it is Ray's object store, the rest NCCL's and the data loader's.
        scratch: of ``/tmp``, which holds Ray's logs and spilled objects.
        head_cpus, head_memory: of the head, which trains nothing.
        overlays: of ``OVERLAYS``.
        queue: Kueue's local queue.
        redis: address of the Redis that keeps Ray's control store.
        drain_s: seconds that a run has to save and move its state when a pod is to end; a job that is stopped has as many, and
            :data:`LEAST_STOP_S` at least.
        service_account: an existing one for all pods, in the place of two that are made here.
        priority_class: an existing one for all pods, in the place of the two of ``--kind setup``.
        spot_label: ``KEY=VALUE`` that the provider puts on pre-emptible nodes.
        deadline_s: after which the operator ends the job, whatever it does.
        monitoring: namespace that Prometheus runs in.
        monitor_label: ``KEY=VALUE`` that the Prometheus operator selects PodMonitors by.
        prometheus, grafana: URLs that Ray's dashboard shows its figures from.
        runbooks: URL of docs/how-to/runbooks.md, as people who get an alert can open it.
        volume_size, storage_class: of the claim that ``--kind setup`` makes.
    """

    image: str = f"registry.example.com/vescale-ray:{__version__}"
    pull_secret: str | None = None
    env_secret: str | None = None
    name: str | None = None
    namespace: str = "vescale-ray"
    claim: str = "training-runs"
    mount: str = "/mnt/shared"
    gpus: int | None = None
    cpus: int | None = None
    memory: str = "64Gi"
    shm: str = "16Gi"
    scratch: str = "20Gi"
    head_cpus: int = 4
    head_memory: str = "16Gi"
    overlays: frozenset[str] = frozenset()
    queue: str | None = None
    redis: str | None = None
    drain_s: int = 100
    service_account: str | None = None
    priority_class: str | None = None
    spot_label: str = "karpenter.sh/capacity-type=spot"
    deadline_s: int = 30 * 24 * 3600
    monitoring: str = "monitoring"
    monitor_label: str = "release=prometheus"
    prometheus: str | None = None
    grafana: str | None = None
    runbooks: str = RUNBOOKS
    volume_size: str = "1Ti"
    storage_class: str | None = None

    def has(self, overlay: str) -> bool:
        return overlay in self.overlays


@dataclass(frozen=True)
class Sizes:
    """What the options and the run's configuration come to.

    Attributes:
        per_pod: workers (ranks) in a pod.
        fewest, first, most: pods for ``elastic.min_workers``, ``elastic.workers`` and ``elastic.max_workers``, rounded up.
        gpus, cpus: of a worker pod.
        grace_s: from SIGTERM to SIGKILL.
        object_store: bytes.
        outside: ports that the run reaches outside of the cluster's own traffic: object stores.
    """

    name: str
    per_pod: int
    fewest: int
    first: int
    most: int
    gpus: int
    cpus: int
    grace_s: int
    object_store: int
    outside: tuple[int, ...]


def sizes(config: RunConfig, options: Options, kind: str) -> Sizes:
    """The sizes.

    Raises:
        ManifestError: what was given does not make a manifest; the first thing found.
    """
    for problem in _misfits(config, options, kind):
        raise ManifestError(problem)
    need_gpus, need_cpus = config.ray.gpus_per_worker, config.ray.cpus_per_worker
    gpus = options.gpus if options.gpus is not None else math.ceil(need_gpus)
    # Without GPUs it is the CPUs that say how many workers fit, so that there must be none to spare.
    cpus = options.cpus if options.cpus is not None else max(1, math.ceil(need_cpus))
    per_pod = places(gpus, need_gpus) if need_gpus else max(1, places(cpus, need_cpus) if need_cpus else 1)
    if options.cpus is None and gpus:
        cpus = max(1, math.ceil(per_pod * need_cpus) + 2)
    if per_pod < 1:
        raise ManifestError(f"--gpus {gpus} is less than ray.gpus_per_worker = {need_gpus:g}: no worker fits into a pod; raise --gpus")
    if per_pod * need_cpus > cpus:
        raise ManifestError(
            f"--cpus {cpus} is less than {per_pod} workers of ray.cpus_per_worker = {need_cpus:g} need: raise --cpus or lower the other"
        )
    for what, count, bound in (("GPUs", gpus, MOST_GPUS), ("CPUs", cpus, MOST_CPUS)):
        if count > bound:
            key = what.lower()
            why = f"a worker pod would have {count} {what}, and no node has more than {bound}"
            raise ManifestError(f"{why}: lower --{key} or ray.{key}_per_worker")
    fewest, first, most = (
        math.ceil(n / per_pod) for n in (config.elastic.min_workers, config.elastic.workers + config.elastic.spares, config.max_workers)
    )
    most = max(most, math.ceil((config.max_workers + config.elastic.spares) / per_pod))
    if most > MOST_PODS:
        raise ManifestError(
            f"elastic.max_workers = {config.max_workers} makes {most:,} pods, and a cluster takes {MOST_PODS:,} at most: "
            "lower it (null: as many as train.slots)"
        )
    if options.has("spot") and fewest == most:
        raise ManifestError(
            f"--overlay spot: all {most} pods are needed for elastic.min_workers = {config.elastic.min_workers}, so none may be "
            "pre-empted; lower elastic.min_workers or raise elastic.max_workers"
        )
    return Sizes(
        name=options.name or config.run.name,
        per_pod=per_pod,
        fewest=fewest,
        first=first,
        most=most,
        gpus=gpus,
        cpus=cpus,
        grace_s=options.drain_s + GRACE_MARGIN_S,
        object_store=quantity(options.shm) // 2,
        outside=ways_out(config),
    )


def places(has: float, each: float) -> int:
    """How many times ``each`` fits into ``has``; Ray counts in ten-thousandths, so that 0.9 hold three times 0.3."""
    return math.floor(has / each + 1e-6)


def quantity(text: str) -> int:
    """Bytes of ``16Gi`` and the like; 0 where it is none."""
    match = _QUANTITY.fullmatch(text)
    return int(match[1]) * _BYTES[match[2]] if match else 0


def port_of(url: str, default: int) -> int:
    """The port that a URL names."""
    parts = urlsplit(url if "://" in url else f"//{url}")
    try:
        return parts.port or {"http": 80, "https": 443}.get(parts.scheme, default)
    except ValueError:
        return default


def inside(path: str, folders: tuple[str, ...]) -> bool:
    return any(f"{path}/".startswith(f"{folder}/") for folder in folders)


def _has_port(url: str) -> bool:
    """Whether a URL's port, if it names one, is one."""
    try:
        return urlsplit(url if "://" in url else f"//{url}").port != 0
    except ValueError:
        return False


def ways_out(config: RunConfig) -> tuple[int, ...]:
    """Ports that a run's pods ask outside of the cluster's own traffic."""
    root = config.checkpoint.dir or ""
    if "://" not in root or root.startswith(ON_A_DISK):
        return ()
    endpoint = parse_qs(urlsplit(root).query).get("endpoint", [""])[0]
    return (port_of(endpoint or root, 443),)


def _no_store(key: str, url: str) -> Iterator[str]:
    """What the store would refuse, in pods that are up; and of another option the endpoint's port would stay shut."""
    scheme = url.partition("://")[0].rpartition("::")[2]
    if url.startswith("s3://"):
        from vescale_ray.checkpoint.s3_calls import parse_s3_url  # imports torch

        try:
            parse_s3_url(url)
        except ValueError as error:
            yield f"{key} = {url}: {error}"
    elif scheme != "s3":
        from fsspec import available_protocols

        if scheme not in available_protocols():
            yield f"{key} = {url}: {scheme}:// is no store that fsspec knows; give s3://bucket/prefix, or a folder below the mount"


def _misfits(c: RunConfig, o: Options, kind: str) -> Iterator[str]:
    """What can't be rendered, by the options and keys that say it."""
    for flag, text in (
        ("--memory", o.memory),
        ("--shm", o.shm),
        ("--scratch", o.scratch),
        ("--head-memory", o.head_memory),
        ("--volume-size", o.volume_size),
    ):
        least, most = BOUNDS[flag]
        if not quantity(text):
            yield f"{flag} {text}: give a whole size with its unit, for example 64Gi"
        elif flag == "--shm" and quantity(text) < quantity(least):
            yield f"{flag} {text}: Ray's object store gets half of it, and starts with no less than 75 MiB; give {least} or more"
        elif not quantity(least) <= quantity(text) <= quantity(most):
            yield f"{flag} {text}: give a size from {least} to {most}"
    if o.head_cpus > MOST_CPUS:
        yield f"--head-cpus {o.head_cpus}: no node has more than {MOST_CPUS}"
    if o.drain_s > LONGEST_DRAIN_S:
        yield f"--drain-s {o.drain_s}: nobody waits longer than a day for a pod's end; give at most {LONGEST_DRAIN_S}"
    if quantity(o.shm) >= quantity(o.memory):
        yield f"--shm {o.shm} is not less than --memory {o.memory}, which it counts against: lower the one or raise the other"
    for flag, text in (("--spot-label", o.spot_label), ("--monitor-label", o.monitor_label)):
        if not names.is_label(text):
            yield f"{flag} {text}: write KEY=VALUE, as Kubernetes takes a label"
    for flag, text in (("--namespace", o.namespace), ("--monitoring", o.monitoring)):
        if not names.is_namespace(text):
            yield f"{flag} {text}: give lower-case letters, digits and '-', 63 at most"
    if o.namespace.startswith("kube-"):
        yield f"--namespace {o.namespace}: names that begin with kube- are Kubernetes' own; give another"
    others = {"--claim": o.claim, "--service-account": o.service_account, "--priority-class": o.priority_class}
    others |= {"--storage-class": o.storage_class, "--pull-secret": o.pull_secret, "--env-secret": o.env_secret}
    for flag, name in others.items():
        if name is not None and not names.is_name(name):
            yield f"{flag} {name}: give lower-case letters, digits, '-' and '.'"
    if o.queue is not None and not (names.is_name(o.queue) and names.is_label_value(o.queue)):
        yield f"--queue {o.queue}: give the name of a local queue: lower-case letters, digits, '-' and '.', 63 at most"
    for flag, url in (("--prometheus", o.prometheus), ("--grafana", o.grafana), ("--runbooks", o.runbooks), ("--redis", o.redis)):
        if url is not None and holds_credentials(url if "://" in url else f"redis://{url}"):  # first: it is not to be shown
            yield f"{flag}: a manifest is no place for a password; give the address without credentials"
    for flag, url in (("--prometheus", o.prometheus), ("--grafana", o.grafana)):
        if url is not None and not re.fullmatch(r"https?://[^\s/]+\S*", url):
            yield f"{flag} {url}: give a URL, for example http://{flag.removeprefix('--')}.monitoring:9090"
    if not re.fullmatch(r"https?://[^\s/#]+[^\s#]*", o.runbooks):
        yield f"--runbooks {o.runbooks}: give the URL of docs/how-to/runbooks.md, without a #"
    if o.redis is not None and not re.fullmatch(r"(rediss?://)?[\w.-]+:\d+", o.redis):
        yield f"--redis {o.redis}: give HOST:PORT"
    if o.has("kueue") and o.queue is None:
        yield "--overlay kueue: give the local queue as --queue NAME"
    if o.queue is not None and not o.has("kueue"):
        yield f"--queue {o.queue}: only Kueue has queues; add --overlay kueue"
    if o.has("gcs-ft") and o.redis is None:
        yield "--overlay gcs-ft: give the Redis that keeps Ray's state as --redis HOST:PORT"
    if o.redis is not None and not o.has("gcs-ft"):
        yield f"--redis {o.redis}: nothing would use it; add --overlay gcs-ft"
    mount = posixpath.normpath(o.mount)
    if not re.fullmatch(r"/[^:\s]+", o.mount) or mount.startswith("//") or mount in TAKEN or inside(mount, SYSTEMS):
        yield f"--mount {o.mount}: give an absolute folder of its own, without ':' and blanks, for example /mnt/shared"
    for flag, address in (("--redis", o.redis), ("--prometheus", o.prometheus), ("--grafana", o.grafana)):
        if address is not None and not _has_port(address):
            yield f"{flag} {address}: its port is none; give one from 1 to 65535"
    if o.name == "":
        yield "--name is empty: give a name, or leave it out for run.name"
    if kind == "monitor" or kind == "setup":
        return
    if c.ray.address not in (None, "auto"):
        yield f"ray.address = {c.ray.address}: the pods are the cluster; set ray.address=auto"
    if c.metrics.port == 0:
        yield "metrics.port = 0: Prometheus can't be told a port that changes; set metrics.port=9464"
    if 0 < c.metrics.port < 1024:
        yield f"metrics.port = {c.metrics.port}: only root could listen there, and the pods are not; set metrics.port=9464"
    if c.metrics.port in RAYS_PORTS:
        yield f"metrics.port = {c.metrics.port}: Ray's own processes on the head may take it; set metrics.port=9464"
    if c.metrics.host not in ("0.0.0.0", "::"):
        yield f"metrics.host = {c.metrics.host}: pods get their addresses later, and other pods must read it; set metrics.host=0.0.0.0"
    on_volume = {"run.dir": c.run.dir, "checkpoint.dir": c.checkpoint.dir, "data.corpus": c.data.corpus}
    for key, path in on_volume.items():
        if path is None or (key == "data.corpus" and path == "stdlib"):
            continue
        if key == "checkpoint.dir" and "://" in path and not path.startswith(ON_A_DISK):
            if not _has_port(parse_qs(urlsplit(path).query).get("endpoint", ["https://"])[0]):
                yield f"{key} = {path}: the endpoint's port is none; give one from 1 to 65535"
            yield from _no_store(key, path)
            continue
        if "://" in path and key != "checkpoint.dir":
            yield f"{key} = {path}: is read as a file or folder; put it on the volume that all pods share, below {mount}"
        elif not f"{posixpath.normpath(re.sub('^(file|local)://', '', path))}/".startswith(f"{mount}/"):
            yield f"{key} = {path} is not on the volume that all pods share: set {key}={mount}/.. or --mount"
    if not c.resources_per_worker:
        yield (
            "ray.cpus_per_worker = 0 with ray.gpus_per_worker = 0: Ray could place the workers anywhere, on the head as well; "
            "set ray.cpus_per_worker=1"
        )
    if c.ray.gpus_per_worker == 0 and o.gpus:
        yield f"--gpus {o.gpus} with ray.gpus_per_worker = 0: no worker would use them; set ray.gpus_per_worker=1"
