"""Render a run's configuration as the YAML text of its manifest."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from vescale_ray import __version__
from vescale_ray.config import RunConfig
from vescale_ray.k8s.checks import problems
from vescale_ray.k8s.options import OVERLAYS, RAY_VERSION, RUNBOOKS, Options, RenderError, port_of, quantity, sizes

TEMPLATES = {"job": "run.j2", "cluster": "run.j2", "setup": "setup.j2", "monitor": "monitor.j2"}
_PLAIN = re.compile(r"[A-Za-z/][\w./:=@%+$()-]*", re.ASCII)
_WORDS = {"y", "yes", "n", "no", "on", "off", "true", "false", "null"}

_ENVIRONMENT = Environment(
    loader=PackageLoader("vescale_ray.k8s"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    autoescape=False,  # the text is YAML, whose scalars the filter `q` quotes
)


def render(config: RunConfig, options: Options, kind: str) -> str:
    """Return the manifest as YAML.

    Args:
        kind: one of ``KINDS``.

    Raises:
        RenderError: the configuration and the options do not make a manifest. The message is the first problem.
    """
    for problem in problems(config, options, kind):
        raise RenderError(problem)
    overlays = "".join(f" --overlay {one}" for one in OVERLAYS if options.has(one))
    made_by = f"vescale-ray {__version__}, vescale-ray k8s render RUN.yaml --kind {kind}{overlays}"
    values: dict[str, Any] = {"kind": kind, "o": options, "made_by": made_by}
    if kind in ("job", "cluster"):
        values |= {"c": config, "s": sizes(config, options), "ray_version": RAY_VERSION}
    elif kind == "monitor":
        shipped = files("vescale_ray.deploy")
        alerts = (shipped / "alerts.yml").read_text(encoding="utf-8").replace(f"{RUNBOOKS}#", f"{options.runbooks}#")
        values["alerts"] = alerts[alerts.index("\ngroups:") :]
        values["dashboard"] = (shipped / "grafana" / "vescale.json").read_text(encoding="utf-8")
    return _ENVIRONMENT.get_template(TEMPLATES[kind]).render(values)


def documents(config: RunConfig, options: Options, kind: str) -> list[dict[str, Any]]:
    """Return the manifest as plain mappings; arguments and errors are those of :func:`render`."""
    # If PyYAML has libyaml's loader, the dashboard loads in a tenth of the time.
    return list(yaml.load_all(render(config, options, kind), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def quoted(value: str) -> str:
    """Return a YAML scalar that every parser reads as this text.

    YAML 1.1, YAML 1.2 and Go's reader disagree on words such as ``on``, ``1e3`` and ``0x1f``, so such words are quoted.
    """
    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS and not value.endswith(":"):
        return value
    return yaml.safe_dump(value, default_style='"', width=float("inf")).removesuffix("\n")


_ENVIRONMENT.filters |= {"q": quoted, "port": port_of, "bytes": quantity}
