"""Kubernetes manifests of a run, rendered from its configuration and a few options.

``options`` holds the choices and the sizes that follow from them, ``checks`` refuses what cannot work, and ``render`` fills the Jinja2
templates in ``templates/``. The package imports neither Ray nor torch and contacts no cluster.
"""

from __future__ import annotations

from vescale_ray.k8s.options import KINDS, OVERLAYS, Options, RenderError
from vescale_ray.k8s.render import documents, render

__all__ = ["KINDS", "OVERLAYS", "RenderError", "Options", "documents", "render"]
