"""Mistakes in the options and in the run's configuration that would show only after ``kubectl apply``, each in one sentence.

The checks cover the values that a user can write. They run before those of the API server (``kubectl apply --dry-run=server``). Properties
that the templates guarantee are tested instead.
"""

from __future__ import annotations

import difflib
import posixpath
import re
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

from vescale_ray.config import RunConfig, holds_credentials
from vescale_ray.k8s.options import KINDS, MOST_CPUS, ON_A_DISK, OVERLAYS, Options, quantity

RAYS_PORTS = frozenset({6379, 8080, 8265, 44217, 44227, 52365, *range(10001, 20000)})
"""Ports of Ray's processes on the head: control store, dashboard, metrics, Ray's client, workers and drivers."""
TAKEN = frozenset({"/", "/tmp", "/etc", "/home", "/home/ray", "/opt", "/var"})
"""Folders of a pod that a mount would hide."""
SYSTEMS = ("/bin", "/boot", "/dev", "/etc/vescale-ray", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr", "/var/run")
"""Folders of a pod that a mount must neither hide nor lie in."""
BOUNDS = {
    "memory": ("1Gi", "64Ti"),
    "shm": ("150Mi", "64Ti"),  # half of it is Ray's object store
    "scratch": ("256Mi", "256Ti"),
    "head_memory": ("1Gi", "64Ti"),
    "volume_size": ("1Gi", "1048576Ti"),
}
"""Smallest and largest size of an option: below the smallest nothing starts, and no node or volume has more than the largest."""
LONGEST_DRAIN_S, LEAST_DEADLINE_S = 86_400, 60
LONGEST = {"job": ("RayJob", 47), "cluster": ("RayCluster", 53)}
"""Longest names: the operator appends to them, and a Service's name has 63 characters."""
LONGEST_ACCOUNT = 50
"""Longest name of the head's service account: the operator cuts off the beginning of a longer one."""
SPOT_KEYS = (
    *("karpenter.sh/capacity-type", "eks.amazonaws.com/capacityType", "kubernetes.azure.com/scalesetpriority"),
    *("cloud.google.com/gke-spot", "cloud.google.com/gke-preemptible"),
)
"""The providers' labels of pre-emptible nodes."""
_PART = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_NAMESPACE = rf"(?=.{{1,63}}$){_PART}"
_NAME = rf"(?=[^/]{{1,253}}(/|$)){_PART}(\.{_PART})*"
_WORD = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_LABEL = rf"({_NAME}/)?{_WORD}={_WORD}"
_OBJECTS = ("claim", "service_account", "priority_class", "storage_class", "pull_secret", "env_secret")
FORMS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("spot_label", "monitor_label"), _LABEL, "write KEY=VALUE, as Kubernetes takes a label"),
    (("namespace", "monitoring"), _NAMESPACE, "give lower-case letters, digits and '-', 63 at most"),
    (("namespace",), r"(?!kube-).*", "names that begin with kube- are Kubernetes' own; give another"),
    (_OBJECTS, _NAME, "give lower-case letters, digits, '-' and '.'"),
    (("queue",), rf"(?=.{{1,63}}$){_NAME}", "give the name of a local queue: lower-case letters, digits, '-' and '.', 63 at most"),
    (("prometheus", "grafana"), r"https?://[^\s/]+\S*", "give a URL, for example http://HOST.monitoring:9090"),
    (("runbooks",), r"https?://(?!/)[!\"$-~]+", "give the URL of docs/how-to/runbooks.md, in ASCII and without a #"),
    (("redis",), r"(rediss?://)?[\w.-]+:\d+", "give HOST:PORT"),
)
"""Options, the pattern of their values, and the remedy."""
_IMAGE_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_IMAGE = rf"([A-Za-z0-9.-]+(:\d+)?/)?{_IMAGE_PART}(/{_IMAGE_PART})*(:\w[\w.-]{{0,127}})?(@sha256:[0-9a-f]{{64}})?"
"""Pattern of an image: a registry, a name, and a tag or a digest or both."""


def problems(c: RunConfig, o: Options, kind: str) -> Iterator[str]:
    """Yield one sentence for each mistake; it names the option or key, its value and the remedy."""
    if kind not in KINDS:
        yield f"--kind {kind}: give one of {', '.join(KINDS)}"
    for overlay in sorted(o.overlays - set(OVERLAYS)):
        yield f"--overlay {overlay}: give one of {', '.join(OVERLAYS)}"
    if kind in ("setup", "monitor") and o.overlays:
        yield f"--overlay {min(o.overlays)} with --kind {kind}: overlays change a job or a cluster; leave it out"
    mount = posixpath.normpath(o.mount)
    if not re.fullmatch(r"/[^:\s]+", o.mount) or mount.startswith("//") or mount in TAKEN or _inside(mount, SYSTEMS):
        yield f"--mount {o.mount}: give an absolute folder of its own, without ':' and blanks, for example /mnt/shared"
    yield from _sizes(o)
    yield from _forms(o)
    yield from _overlays(o)
    if kind in LONGEST:
        yield from _objects(c, o, kind)
        yield from _run(c, o, kind)
        yield from _paths(c, mount)


def _inside(path: str, folders: tuple[str, ...]) -> bool:
    return any(f"{path}/".startswith(f"{folder}/") for folder in folders)


def _sizes(o: Options) -> Iterator[str]:
    for field, (least, most) in BOUNDS.items():
        flag, text = f"--{field.replace('_', '-')}", getattr(o, field)
        if not quantity(text):
            yield f"{flag} {text}: give a whole size with its unit, for example 64Gi"
        elif field == "shm" and quantity(text) < quantity(least):
            yield f"{flag} {text}: Ray's object store gets half of it, and starts with no less than 75 MiB; give {least} or more"
        elif not quantity(least) <= quantity(text) <= quantity(most):
            yield f"{flag} {text}: give a size from {least} to {most}"
    if quantity(o.shm) >= quantity(o.memory):
        yield f"--shm {o.shm} is not less than --memory {o.memory}, which it counts against: lower the one or raise the other"
    if o.head_cpus > MOST_CPUS:
        yield f"--head-cpus {o.head_cpus}: no node has more than {MOST_CPUS}"
    if o.drain_s > LONGEST_DRAIN_S:
        yield f"--drain-s {o.drain_s}: a pod has a day at most to end; give at most {LONGEST_DRAIN_S}"


def _forms(o: Options) -> Iterator[str]:
    for field in ("prometheus", "grafana", "redis", "runbooks"):  # credentials first, because the value must not be shown
        url = getattr(o, field) or ""
        if holds_credentials(url if "://" in url else f"redis://{url}"):
            yield f"--{field}: a manifest is no place for a password; give the address without credentials"
    for fields, pattern, remedy in FORMS:
        for field in fields:
            value = getattr(o, field)
            if value is not None and not re.fullmatch(pattern, value):
                yield f"--{field.replace('_', '-')} {value}: {remedy}"
    for field in ("redis", "prometheus", "grafana"):
        if not _has_port(getattr(o, field) or ""):
            yield f"--{field} {getattr(o, field)}: its port is invalid; give one from 1 to 65535"
    if o.name == "":
        yield "--name is empty: give a name, or leave it out for run.name"


def _has_port(url: str) -> bool:
    """Return False if the URL names an invalid port."""
    try:
        return urlsplit(url if "://" in url else f"//{url}").port != 0
    except ValueError:
        return False


def _overlays(o: Options) -> Iterator[str]:
    for overlay, field, value, remedy, lonely in (
        ("kueue", "queue", o.queue, "give the local queue as --queue NAME", "only Kueue has queues"),
        ("gcs-ft", "redis", o.redis, "give the Redis that keeps Ray's state as --redis HOST:PORT", "nothing would use it"),
    ):
        if o.has(overlay) and value is None:
            yield f"--overlay {overlay}: {remedy}"
        if value is not None and not o.has(overlay):
            yield f"--{field} {value}: {lonely}; add --overlay {overlay}"


def _objects(c: RunConfig, o: Options, kind: str) -> Iterator[str]:
    """Yield problems of the run's Kubernetes objects: name, account, image, label and deadline."""
    (resource, most), name = LONGEST[kind], o.name or c.run.name
    if len(name) > most:
        yield f"the name {name} has {len(name)} characters: a {resource} takes {most} at most; give a shorter one with --name"
    if not re.fullmatch(rf"(?=[a-z]){_PART}", name):
        yield f"the name {name} is invalid for a {resource}: give lower-case letters, digits and '-', a letter first, with --name"
    account = o.service_account or name
    if len(account) > LONGEST_ACCOUNT:
        cut = f"has {len(account)} characters, the operator cuts it to {LONGEST_ACCOUNT}"
        yield f"the head's service account {account} {cut}: give a shorter one (--service-account, or --name)"
    tag = o.image.rpartition("/")[2]
    if re.search(r"\s", o.image):
        yield f"--image {o.image!r} holds a blank: give [REGISTRY/]NAME:TAG"
    elif "@sha256:" not in tag and tag.partition(":")[2] in ("", "latest"):
        yield f"--image {o.image} has no fixed tag: a later pod could get another version; give NAME:TAG"
    elif not re.fullmatch(_IMAGE, o.image, re.ASCII):
        yield f"--image {o.image} is not an image's name: give [REGISTRY/]NAME:TAG, NAME in lower case, digits and '.', '_', '-', '/'"
    key = o.spot_label.partition("=")[0]
    if key not in SPOT_KEYS and (near := difflib.get_close_matches(key, SPOT_KEYS, n=1, cutoff=0.9)):
        yield f"--spot-label {o.spot_label}: no provider has the label {key}; did you mean {near[0]}?"
    if kind == "job" and o.deadline_s < LEAST_DEADLINE_S:
        yield f"--deadline-s {o.deadline_s}: less than {LEAST_DEADLINE_S} s are too few for pods to start"


def _run(c: RunConfig, o: Options, kind: str) -> Iterator[str]:
    """Yield values of the run's configuration that do not fit a cluster of pods."""
    port = c.metrics.port
    if c.ray.address not in (None, "auto"):
        yield f"ray.address = {c.ray.address}: the pods are the cluster; set ray.address=auto"
    if port == 0:
        yield "metrics.port = 0: Prometheus can't be told a port that changes; set metrics.port=9464"
    elif port < 1024:
        yield f"metrics.port = {port}: only root could listen there, and the pods are not; set metrics.port=9464"
    elif port in RAYS_PORTS:
        yield f"metrics.port = {port}: Ray's own processes on the head may take it; set metrics.port=9464"
    if c.metrics.host not in ("0.0.0.0", "::"):
        yield f"metrics.host = {c.metrics.host}: pods get their addresses later, and other pods must read it; set metrics.host=0.0.0.0"
    if not c.resources_per_worker:
        yield (
            "ray.cpus_per_worker = 0 with ray.gpus_per_worker = 0: Ray could place the workers anywhere, on the head as well; "
            "set ray.cpus_per_worker=1"
        )
    if c.ray.gpus_per_worker == 0 and o.gpus:
        yield f"--gpus {o.gpus} with ray.gpus_per_worker = 0: no worker would use them; set ray.gpus_per_worker=1"
    if c.ray.gpus_per_worker and c.train.device == "cpu":
        yield "train.device = cpu: the workers would ask for GPUs, which they would not use: set ray.gpus_per_worker=0"
    if kind == "job" and c.checkpoint.resume == "never":
        yield "checkpoint.resume = never: a job that is submitted again would begin with its first step; set it to auto"


def _paths(c: RunConfig, mount: str) -> Iterator[str]:
    """Yield the folders of the run that not all pods would see."""
    data = [(key, path) for key, path in c.data.corpora if path != "stdlib"] + [("data.tokenizer", c.data.tokenizer)]
    for key, path in (("run.dir", c.run.dir), ("checkpoint.dir", c.checkpoint.dir), *data):
        if path is None or (key.startswith("data.") and "://" in path and not path.startswith(ON_A_DISK)):
            continue
        if key == "checkpoint.dir" and "://" in path and not path.startswith(ON_A_DISK):
            yield from _store(path)
        elif "://" in path and key == "run.dir":
            yield f"{key} = {path}: is read as a file or folder; put it on the volume that all pods share, below {mount}"
        elif not _inside(posixpath.normpath(re.sub("^(file|local)://", "", path)), (mount,)):
            yield f"{key} = {path} is not on the volume that all pods share: set {key}={mount}/.. or --mount"


def _store(url: str) -> Iterator[str]:
    """Yield problems of the store's URL that would only show once the pods are up."""
    scheme = url.partition("://")[0].rpartition("::")[2]
    if not _has_port(parse_qs(urlsplit(url).query).get("endpoint", ["https://"])[0]):
        yield f"checkpoint.dir = {url}: the endpoint's port is invalid; give one from 1 to 65535"
    if url.startswith("s3://"):
        from vescale_ray.checkpoint.stores.s3_options import parse_s3_url  # imports torch

        try:
            parse_s3_url(url)
        except ValueError as error:
            yield f"checkpoint.dir = {url}: {error}"
    elif scheme != "s3":
        from fsspec import available_protocols

        if scheme not in available_protocols():
            yield f"checkpoint.dir = {url}: {scheme}:// is unknown to fsspec; give s3://bucket/prefix, or a folder below the mount"
