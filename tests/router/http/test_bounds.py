"""Each field of each request has a bound or a declared cost: what has neither is how one tenant delays the others."""

import json
from typing import Any

import msgspec
import pytest

from homing.router.config import RouterSettings
from homing.router.http.dialects.bounds import SMALL_BYTES
from homing.router.http.endpoints.openapi import openapi_document
from homing.router.http.endpoints.table import ENDPOINTS

from ...bench.request_fields import SIZE_KEY, Field, fields_of, with_value

DOCUMENT = json.loads(openapi_document(ENDPOINTS))
FIELDS = list(fields_of(DOCUMENT))
USER = {"role": "user", "content": "hi"}
SMALLEST: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/responses/compact": {"input": "hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/embeddings": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
}


def test_every_field_has_a_bound_or_a_cost():
    """At all depths. A new field declares one of them with its type (`dialects/bounds.py`)."""
    assert len(FIELDS) > 500
    assert not [f"{each.path} {each.name}: {each.schema}" for each in FIELDS if not each.bounded]


@pytest.mark.parametrize(
    ("schema", "covered", "bounded"),
    [
        ({"type": "integer", "minimum": 0}, False, False),
        ({"type": "integer", "minimum": 0, "maximum": 9}, False, True),
        ({"type": "string"}, False, False),
        ({"type": "string"}, True, True),
        ({"type": "array", "items": {"type": "boolean"}}, False, False),
        ({"type": "object", "additionalProperties": {"type": "boolean"}}, False, False),
        ({}, False, False),
    ],
)
def test_a_field_without_a_bound_is_found(schema: dict[str, Any], covered: bool, bounded: bool):
    """Whatever its type is."""
    assert Field("/path", "name", schema, covered).bounded == bounded


@pytest.fixture
def settings() -> RouterSettings:
    return RouterSettings(max_choices=32, strict_fields=True)


@pytest.mark.parametrize("path", SMALLEST)
async def test_a_field_above_its_bound_is_refused_by_name(client, backend, path: str):
    """In every API, with a 400, however large the value is."""
    for field in (each for each in FIELDS if each.path == path):
        if (path, field.name) == ("/v1/messages/count_tokens", "seed"):
            continue  # checked when it is read
        for value in above(field.schema):
            answer = await client.post(path, json=with_value(SMALLEST[path], field.name, value))
            error = answer.json()["error"]
            named = error.get("param") or error["message"]
            assert answer.status_code == 400, (field, answer.text[:200])
            assert field.name.partition(".")[0].partition("[")[0] in named, (field, error)
    assert not backend.requests


def above(schema: dict[str, Any]):
    """Values just above what a schema allows."""
    kind = schema.get("type")
    if kind in ("integer", "number"):
        yield from (schema[key] + 1 for key in ("maximum",) if key in schema)
        yield from (schema[key] - 1 for key in ("minimum",) if key in schema)
    elif kind == "string" and "maxLength" in schema:
        yield "a" * (schema["maxLength"] + 1)
    elif kind == "array" and "maxItems" in schema:
        item = 1 if schema["items"].get("type") == "integer" else "a"
        yield [item] * (schema["maxItems"] + 1)
    elif kind == "object" and "maxProperties" in schema:
        yield {str(number): 1 for number in range(schema["maxProperties"] + 1)}
    if SIZE_KEY in schema and kind in (None, "object"):
        yield {"a": "a" * schema[SIZE_KEY]}


@pytest.mark.parametrize("name", ["allowed_token_ids", "logit_bias"])
async def test_all_choices_together_list_a_bounded_number_of_tokens(client, backend, name: str):
    """Each choice sends its lists to a replica, whose steps read them."""
    ids = list(range(4096))
    body = {"prompt": ["a"] * 8, name: ids if name == "allowed_token_ids" else dict.fromkeys(map(str, ids), 1)}
    lists = {"bad_words": ["a"] * 128, "stop_token_ids": ids[:256]}

    accepted = await client.post("/v1/completions", json=body | {"max_tokens": 1})
    refused = await client.post("/v1/completions", json=body | lists | {"prompt": ["a"] * 30})

    assert accepted.status_code == 200, accepted.text
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("field", ["metadata", "store", "kv_transfer_params"])
async def test_what_nothing_reads_may_be_nested_deeply(client, field: str):
    """It is decoded, so looking whether it asks for anything must not fail either."""
    nested = b'{"a":' * 900 + b"null" + b"}" * 900
    body = msgspec.json.encode(SMALLEST["/v1/chat/completions"])[:-1] + b',"%b":%b}' % (field.encode(), nested)

    answer = await client.post("/v1/chat/completions", content=body)

    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("fill", [0, 1])
async def test_free_json_may_have_its_size_and_no_byte_more(client, fill: int):
    """Sizes are those that the client sent, and bodies that are larger in other fields are not affected."""
    metadata = {"a": "b" * (SMALL_BYTES - len('{"a":""}') + fill)}
    chat = {**SMALLEST["/v1/chat/completions"], "metadata": metadata, "tools": [], "temperature": 0}
    nested = {"token_ids": [5], "sampling_params": {"metadata": metadata}}

    for path, body, param in (
        ("/v1/chat/completions", chat, "metadata"),
        ("/inference/v1/generate", nested, "sampling_params.metadata"),
    ):
        answer = await client.post(path, content=msgspec.json.encode(body) + b" " * 100_000)

        assert answer.status_code == (400 if fill else 200)
        assert not fill or answer.json()["error"]["param"] == param
