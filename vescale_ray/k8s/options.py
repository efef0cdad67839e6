"""Options of a manifest that a run's configuration lacks, and the sizes that follow from both."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

from vescale_ray import __version__
from vescale_ray.config import RunConfig
from vescale_ray.errors import BadInput

KINDS = ("job", "cluster", "setup", "monitor")
OVERLAYS = ("spot", "kueue", "gcs-ft")
RAY_VERSION = "2.60.0"
RUNBOOKS = "https://docs.example.com/vescale-ray/runbooks.md"
"""The placeholder that deploy/alerts.yml has."""
ON_A_DISK = ("file://", "local://")
MOST_CPUS, MOST_GPUS, MOST_PODS = 4096, 128, 150_000
"""Limits of a pod and of a cluster: Kubernetes is made for 150,000 pods."""
_QUANTITY = re.compile(r"([1-9]\d*)(Ki|Mi|Gi|Ti)")
_BYTES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


class RenderError(BadInput):
    """The input does not make a manifest; one line with the remedy."""


@dataclass(frozen=True)
class Options:
    """Options of a manifest that the run's configuration lacks.

    Each field is an option of ``vescale-ray k8s render``, whose ``--help`` describes it. None means that the default follows from the
    run's configuration, or that the manifest leaves the part out.
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
        """Return whether the overlay was chosen."""
        return overlay in self.overlays


@dataclass(frozen=True)
class Sizes:
    """The sizes that follow from the options and the run's configuration.

    Attributes:
        per_pod: workers (ranks) in a pod.
        fewest, first, most: pods for ``elastic.min_workers``, ``elastic.workers`` and ``elastic.max_workers``, rounded up.
        gpus, cpus: of a worker pod.
        store_port: port of the object store of ``checkpoint.dir``; None: the run needs none.
    """

    name: str
    per_pod: int
    fewest: int
    first: int
    most: int
    gpus: int
    cpus: int
    store_port: int | None


def sizes(config: RunConfig, options: Options) -> Sizes:
    """Return the sizes.

    Raises:
        RenderError: the workers do not fit into the pods, or the pods not into a cluster.
    """
    need_gpus, need_cpus = config.ray.gpus_per_worker, config.ray.cpus_per_worker
    gpus = options.gpus if options.gpus is not None else math.ceil(need_gpus)
    # Without GPUs the CPUs decide how many workers fit: a spare CPU would admit one worker more than counted.
    cpus = options.cpus if options.cpus is not None else max(1, math.ceil(need_cpus))
    per_pod = _places(gpus, need_gpus) if need_gpus else max(1, _places(cpus, need_cpus) if need_cpus else 1)
    if options.cpus is None and gpus:
        cpus = max(1, math.ceil(per_pod * need_cpus) + 2)
    if per_pod < 1:
        raise RenderError(f"--gpus {gpus} is less than ray.gpus_per_worker = {need_gpus:g}: no worker fits into a pod; raise --gpus")
    if per_pod * need_cpus > cpus:
        raise RenderError(
            f"--cpus {cpus} is less than {per_pod} workers of ray.cpus_per_worker = {need_cpus:g} need: raise --cpus or lower the other"
        )
    for what, count, bound in (("GPUs", gpus, MOST_GPUS), ("CPUs", cpus, MOST_CPUS)):
        if count > bound:
            key = what.lower()
            why = f"a worker pod would have {count} {what}, and no node has more than {bound}"
            raise RenderError(f"{why}: lower --{key} or ray.{key}_per_worker")
    elastic = config.elastic
    counts = (elastic.min_workers, elastic.workers + elastic.spares, config.max_workers + elastic.spares)
    fewest, first, most = (math.ceil(count / per_pod) for count in counts)
    if most > MOST_PODS:
        raise RenderError(
            f"elastic.max_workers = {config.max_workers} makes {most:,} pods, and a cluster takes {MOST_PODS:,} at most: "
            "lower it (null: as many as train.slots)"
        )
    if options.has("spot") and fewest == most:
        raise RenderError(
            f"--overlay spot: all {most} pods are needed for elastic.min_workers = {elastic.min_workers}, so none may be "
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
        store_port=_store_port(config.checkpoint.dir or ""),
    )


def _places(has: float, each: float) -> int:
    """Return how many times ``each`` fits into ``has``; Ray counts in ten-thousandths, so 0.9 holds 0.3 three times."""
    return math.floor(has / each + 1e-6)


def _store_port(root: str) -> int | None:
    if "://" not in root or root.startswith(ON_A_DISK):
        return None
    endpoint = parse_qs(urlsplit(root).query).get("endpoint", [""])[0]
    return port_of(endpoint or root, 443)


def quantity(text: str) -> int:
    """Return the bytes of a quantity such as ``16Gi``; 0 for any other text."""
    match = _QUANTITY.fullmatch(text)
    return int(match[1]) * _BYTES[match[2]] if match else 0


def port_of(url: str, default: int) -> int:
    """Return the port of a URL. If the URL names none, return its scheme's port, or ``default``."""
    parts = urlsplit(url if "://" in url else f"//{url}")
    try:
        return parts.port or {"http": 80, "https": 443}.get(parts.scheme, default)
    except ValueError:
        return default
