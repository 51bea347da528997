"""The API as an OpenAPI 3.1 document, generated from the table of endpoints and the types of their bodies.

Rules that involve two fields, the model or the settings are not part of it; errors state them.
"""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from .... import __version__
from ..errors import ErrorBody
from ..front import Front
from ..protocol.exchange import JSON, Exchange

#: Responds to an exchange, now or later. The caller turns what it raises into a response.
Handler = Callable[[Front, Exchange], Coroutine[Any, Any, None]]
_REFERENCE = "#/components/schemas/{name}"


@dataclass(slots=True, frozen=True)
class Endpoint:
    """One method of one path. A path ending in `/{model}` matches every longer path."""

    method: str
    path: str
    handler: Handler
    summary: str
    response: type | None = None  #: of a JSON response
    bodies: tuple[type, ...] = ()  #: a request has one of them
    body_required: bool = True
    media: str = JSON
    streams: bool = False  #: the response is a stream of events if the body has `"stream": true`


def document(endpoints: Sequence[Endpoint]) -> bytes:
    """The whole document as JSON."""
    types = [*(kind for each in endpoints for kind in each.bodies), *(each.response for each in endpoints)]
    _, components = msgspec.json.schema_components([*filter(None, types), ErrorBody], ref_template=_REFERENCE)
    paths: dict[str, dict[str, Any]] = {}
    for each in endpoints:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "homing", "version": __version__},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{}, {"key": []}],
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
                "description": "an error in OpenAI's shape",
                "content": {JSON: {"schema": _reference(ErrorBody)}},
            },
        },
    }
    if endpoint.bodies:
        kinds = [_reference(kind) for kind in endpoint.bodies]
        schema = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        operation["requestBody"] = {"required": endpoint.body_required, "content": {JSON: {"schema": schema}}}
    if "{model}" in endpoint.path:
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=kind.__name__)}
