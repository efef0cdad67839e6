"""Kubernetes' own schemas, strict: a field that it does not know is a mistake."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

import jsonschema
from referencing import Registry, Resource

FOLDER = files("kubernetes_validate") / "kubernetes-json-schema" / "v1.37.0-local-strict"


@functools.cache
def _definitions() -> Resource[Any]:
    return Resource.from_contents(json.loads((FOLDER / "_definitions.json").read_text()))


@functools.cache
def _validator(name: str) -> jsonschema.protocols.Validator:
    schema = json.loads((FOLDER / f"{name}.json").read_text())
    registry: Registry[Any] = _definitions() @ (Resource.from_contents(schema) @ Registry())
    return jsonschema.Draft202012Validator(schema, registry=registry)


def schema_of(document: Mapping[str, Any]) -> str | None:
    """The schema's name; None where Kubernetes has none: a custom resource."""
    group, _, version = str(document.get("apiVersion")).rpartition("/")
    name = f"{str(document.get('kind')).lower()}-{group.split('.')[0] + '-' if group else ''}{version}"
    return name if (FOLDER / f"{name}.json").is_file() else None


def core_problems(schema: str, value: Any, path: str) -> Iterator[str]:
    """What a part of a custom resource breaks of the Kubernetes type that it is of."""
    name = {"labelselector": "labelselector-meta-v1"}.get(schema, f"{schema}-v1")
    for error in _validator(name).iter_errors(value):
        yield f"{path}.{'.'.join(map(str, error.path))}: {error.message}"


def document_problems(document: Mapping[str, Any]) -> Iterator[str]:
    """What a document of Kubernetes' own kinds breaks."""
    name = schema_of(document)
    if name is not None:
        for error in _validator(name).iter_errors(document):
            yield f"{document['kind']} {'.'.join(map(str, error.path))}: {error.message}"
