"""The OpenAPI document, made from the table of endpoints."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from .... import __version__
from ..protocol.exchange import JSON
from .endpoint import Endpoint

_REFERENCE = "#/components/schemas/{name}"


def openapi_document(endpoints: Sequence[Endpoint]) -> bytes:
    """The endpoints as an OpenAPI 3.1 document.

    Rules that involve two fields, the model or the settings are not part of it; error messages state them.
    """
    types = [*(kind for each in endpoints for kind in each.bodies), *(each.response for each in endpoints)]
    _, components = msgspec.json.schema_components(
        [*filter(None, types), *dict.fromkeys(each.errors for each in endpoints)], ref_template=_REFERENCE
    )
    paths: dict[str, dict[str, Any]] = {}
    for each in endpoints:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "homing", "version": __version__},
            "paths": paths,
            "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
            "security": [{}, {"key": []}],  # a key is required only if the server has keys
        }
    )


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    content: dict[str, Any] = {endpoint.media: {"schema": _reference(endpoint.response) if endpoint.response else {}}}
    if endpoint.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "responses": {
            "200": {"description": "success", "content": content},
            "default": {
                "description": "an error",
                "content": {JSON: {"schema": _reference(endpoint.errors)}},
            },
        },
    }
    if endpoint.handler.access == "public":
        operation["security"] = []
    if endpoint.bodies:
        kinds = [_reference(kind) for kind in endpoint.bodies]
        schema = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        operation["requestBody"] = {"required": endpoint.body_required, "content": {JSON: {"schema": schema}}}
    if named := re.search(r"\{(\w+)\}", endpoint.path):
        operation["parameters"] = [{"name": named[1], "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=kind.__name__)}
