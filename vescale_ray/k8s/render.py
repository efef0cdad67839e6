"""From a run's configuration to YAML that has been checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from vescale_ray import __version__
from vescale_ray.config import RunConfig
from vescale_ray.k8s import objects, pods
from vescale_ray.k8s.emit import plain, to_yaml
from vescale_ray.k8s.fields import OnCore, field_problems
from vescale_ray.k8s.kinds import shape_problems
from vescale_ray.k8s.options import KINDS, OPERATOR, OVERLAYS, ManifestError, Options, sizes
from vescale_ray.k8s.references import Name, reference_problems
from vescale_ray.k8s.rules import LONGEST, rule_problems

ABOUT = {
    "job": "A training run as a KubeRay RayJob: a Ray cluster of its own, which goes when the run is done.",
    "cluster": "A Ray cluster that stays, to submit a run to by hand.",
    "setup": "What a namespace needs before the first run. To be applied by someone who may make namespaces and priority classes.\n"
    "Deleting all this deletes the volume claim, and with it the runs: delete single objects.",
    "monitor": "What watches all runs of the namespace: PodMonitors and alerts, for the Prometheus operator, and a dashboard for Grafana.",
}


def render(config: RunConfig, options: Options, kind: str) -> str:
    """The manifest as YAML.

    Args:
        kind: ``job``, ``cluster``, ``setup`` or ``monitor``.

    Raises:
        ManifestError: it can't be made of what was given, or would break a rule of KubeRay's or of ours; the first that was found.
    """
    built = _checked(config, options, kind)
    overlays = "".join(f" --overlay {one}" for one in OVERLAYS if options.has(one))
    head = (
        f"{ABOUT[kind]}\n"
        f"Written for {OPERATOR} or later; held to the rules of KubeRay and Kubernetes by tests, not yet applied to a cluster by us.\n"
        f"Made by: vescale-ray {__version__}, vescale-ray k8s render RUN.yaml --kind {kind}{overlays}"
    )
    return to_yaml(built, head)


def documents(config: RunConfig, options: Options, kind: str) -> list[dict[str, Any]]:
    """The manifest as plain mappings; arguments and errors are those of :func:`render`."""
    return [plain(one) for one in _checked(config, options, kind)]


def _checked(config: RunConfig, options: Options, kind: str) -> list[objects.Document]:
    built = build(config, options, kind)
    # A run is checked together with what it expects to be there.
    around = [*objects.setup(options), *objects.monitor(options)] if kind in ("job", "cluster") else []
    for problem in problems([plain(one) for one in (*built, *around)], outside(config, options)):
        raise ManifestError(problem)
    return built


def build(config: RunConfig, options: Options, kind: str) -> list[objects.Document]:
    """The documents with their reasons, unchecked.

    Raises:
        ManifestError: they can't be made of what was given.
    """
    if kind not in KINDS:
        raise ManifestError(f"--kind {kind}: give one of {', '.join(KINDS)}")
    for overlay in sorted(options.overlays - set(OVERLAYS)):
        raise ManifestError(f"--overlay {overlay}: give one of {', '.join(OVERLAYS)}")
    if kind in ("setup", "monitor") and options.overlays:
        raise ManifestError(f"--overlay {min(options.overlays)} with --kind {kind}: overlays change a job or a cluster; leave it out")
    derived = sizes(config, options, kind)
    if kind == "setup":
        return objects.setup(options)
    if kind == "monitor":
        return objects.monitor(options)
    return objects.run(config, options, derived, kind)


def problems(
    documents: Sequence[Mapping[str, Any]], outside: AbstractSet[Name] = frozenset(), on_core: OnCore | None = None
) -> Iterator[str]:
    """What is wrong with plain documents, one sentence each: with a document's fields, or with what it means and refers to.

    Args:
        outside: objects that are there without being among the documents.
        on_core: sees the parts that are of Kubernetes' own types (:func:`~vescale_ray.k8s.fields.field_problems`).
    """
    found = [problem for one in documents for problem in shape_problems(one)]
    found = found or [problem for one in documents for problem in field_problems(one, on_core)]
    yield from found
    if not found:  # the others rely on the shape
        # Ray's resources first: what is wrong with a run's name is said best of them.
        for one in sorted(documents, key=lambda document: document["kind"] not in LONGEST):
            yield from rule_problems(one)
        yield from reference_problems(documents, outside)


def outside(config: RunConfig, options: Options) -> frozenset[Name]:
    """What a manifest of these options relies on without holding it."""
    names: set[Name] = set()
    if options.service_account:
        names.add(("ServiceAccount", options.service_account))
    if options.pull_secret:
        names.add(("Secret", options.pull_secret))
    if options.env_secret:
        names.add(("Secret", options.env_secret))
    if options.priority_class:
        names.add(("PriorityClass", options.priority_class))
    if options.has("gcs-ft"):
        names.add(("Secret", pods.redis_secret(sizes(config, options, "job"))))
    return frozenset(names)
