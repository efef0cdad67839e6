"""Kubernetes manifests of a run: rendered from its configuration, and checked before they are shown.

``options`` says what can be chosen and derives the sizes; ``pods`` and ``objects`` build the documents as plain mappings, in which
:class:`~vescale_ray.k8s.emit.Why` puts a reason beside a value; ``render`` holds them to KubeRay's fields (``fields``), to what its
operator and we demand of them (``rules``, ``values``) and to each other (``references``, ``policies``), and ``emit`` writes YAML. ``make
manifests`` writes the committed defaults (``defaults``). Knows the run's configuration; neither Ray nor torch, and it talks to no cluster.
"""

from __future__ import annotations

from vescale_ray.k8s.options import KINDS, OVERLAYS, ManifestError, Options
from vescale_ray.k8s.render import documents, render

__all__ = ["KINDS", "OVERLAYS", "ManifestError", "Options", "documents", "render"]
