"""The API as an OpenAPI 3.1 document, made of the very types that read requests and write answers.

Says nothing that those types do not: what takes two fields, the model or the settings is told by errors (validate.py).
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from .... import __version__
from ...backend import ClusterView, Explanation
from ..errors import ErrorBody
from . import answers
from .schema import ChatBody, CompletionBody, DetokenizeBody, ResetBody, TokenizeBody


class Status(msgspec.Struct):
    """The process answers."""

    status: str


class Version(msgspec.Struct):
    """The package's version."""

    version: str


class Ready(Status):
    """Requests would be answered now."""

    replicas: int
    models: dict[str, int]


class Emptied(Status):
    """Whose caches were emptied."""

    replicas: list[str]


@dataclass(slots=True, frozen=True)
class Operation:
    """One method of one path, with the types that its body may have, and that of its answer where that is JSON."""

    path: str
    method: str
    summary: str
    bodies: tuple[type, ...] = ()
    answer: type | None = None
    media: str = "application/json"
    body_required: bool = True


OPERATIONS = (
    Operation("/v1/models", "get", "the served models", answer=answers.ModelList),
    Operation("/v1/models/{model}", "get", "a served model by its name", answer=answers.ModelCard),
    Operation("/v1/completions", "post", "completion, streamed or whole", (CompletionBody,), answers.Completion),
    Operation("/v1/chat/completions", "post", "chat, streamed or whole", (ChatBody,), answers.ChatCompletion),
    Operation("/tokenize", "post", "text or chat to token ids", (TokenizeBody,), answers.Tokenized),
    Operation("/detokenize", "post", "token ids to text", (DetokenizeBody,), answers.Detokenized),
    Operation("/explain", "post", "the routing decision of a body", (CompletionBody, ChatBody), Explanation),
    Operation(
        "/reset_prefix_cache",
        "post",
        "every replica, or those of a model, forget their cached blocks",
        (ResetBody,),
        Emptied,
        body_required=False,
    ),
    Operation("/cluster", "get", "the cluster as the router sees it", answer=ClusterView),
    Operation("/health", "get", "the process answers", answer=Status),
    Operation("/ready", "get", "a request for some model would be answered now", answer=Ready),
    Operation("/metrics", "get", "for Prometheus", media="text/plain"),
    Operation("/version", "get", "the package's version", answer=Version),
    Operation("/openapi.json", "get", "this document"),
)

_REFERENCE = "#/components/schemas/{name}"
#: Endpoints whose answers come as events where the body says `"stream": true`.
_STREAMED = ("/v1/completions", "/v1/chat/completions")


@cache
def document() -> bytes:
    """The whole document as JSON."""
    bodies = [kind for each in OPERATIONS for kind in each.bodies]
    wanted = [each.answer for each in OPERATIONS if each.answer is not None]
    _, components = msgspec.json.schema_components([*bodies, *wanted, ErrorBody], ref_template=_REFERENCE)
    paths: dict[str, dict[str, Any]] = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method] = _operation(each)
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


def _operation(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media: {"schema": _reference(operation.answer) if operation.answer else {}}}
    if operation.path in _STREAMED:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    told: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "done", "content": content},
            "default": {
                "description": "an error in OpenAI's shape",
                "content": {"application/json": {"schema": _reference(ErrorBody)}},
            },
        },
    }
    if operation.bodies:
        kinds = [_reference(kind) for kind in operation.bodies]
        schema = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        told["requestBody"] = {"required": operation.body_required, "content": {"application/json": {"schema": schema}}}
    if "{model}" in operation.path:
        told["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    return told


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=kind.__name__)}
