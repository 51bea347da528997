"""The OpenAPI document matches the server: generated requests, valid or not, get the documented response types."""

import asyncio
import json
import threading
from collections.abc import Iterator
from functools import cache
from http.client import HTTPConnection
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from homing.router.config import RouterSettings
from homing.router.http.endpoints.openapi import openapi_document
from homing.router.http.endpoints.table import ENDPOINTS, find
from homing.router.http.protocol.exchange import Request
from homing.router.server import RouterServer
from homing.router.text.tokenizer import TextModel

from .conftest import LoadedText
from .fakes import FakeBackend

#: All endpoints but `/live`, whose stream never ends: tests/router/http/live tests it.
LABELS = {f"{each.method} {each.path}": each for each in ENDPOINTS if each.path != "/live"}
EXAMPLES = 25
#: Prefix of a stream's last event, for endpoints whose streams do not end with OpenAI's `[DONE]`.
LAST_EVENTS = {"/v1/responses": b"event: response.", "/v1/messages": b"event: message_stop"}


@pytest.fixture
def port(text_model, backend: FakeBackend) -> Iterator[int]:
    """The port of a complete server that runs in its own thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    settings = RouterSettings(max_choices=8, default_max_tokens=8, access_log="")
    server = RouterServer(settings, backend, texts=LoadedText(text_model), grace_s=1.0)
    yield asyncio.run_coroutine_threadsafe(server.start("127.0.0.1", 0), loop).result()
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_the_document_lists_exactly_what_is_served() -> None:
    """Every operation of the document reaches its own handler, and no endpoint is left out."""
    listed = {
        (method.upper(), path)
        for path, methods in json.loads(openapi_document(ENDPOINTS))["paths"].items()
        for method in methods
    }

    assert listed == {(each.method, each.path) for each in ENDPOINTS}
    for each in ENDPOINTS:
        path = each.path.replace("{model}", "org/fox")
        assert find(Request(each.method, path, {}, b"", keep_alive=True)) is each


def test_every_reference_leads_somewhere() -> None:
    """Client generators stop at the first unresolved reference."""
    text = openapi_document(ENDPOINTS).decode()
    known = {f"#/components/schemas/{name}" for name in json.loads(text)["components"]["schemas"]}
    used = {part.split('"')[0] for part in text.split('"$ref":"')[1:]}

    assert used <= known


def schemathesis() -> Any:
    """Import schemathesis late: it takes half a second, and every test process collects this file but one runs it."""
    import schemathesis

    return schemathesis


@cache
def schema() -> Any:
    return schemathesis().openapi.from_dict(json.loads(openapi_document(ENDPOINTS)))


def encoded(body: object) -> bytes | None:
    """Encode a generated body as JSON; bytes stay as they are, and None means no body."""
    if isinstance(body, bytes) or body is None:
        return body
    return None if isinstance(body, schemathesis().core.NotSet) else json.dumps(body).encode()


@pytest.mark.parametrize("label", LABELS)
def test_whatever_is_sent_is_answered_in_the_documents_shape(
    label: str, port: int, backend: FakeBackend, scale: float
) -> None:
    """A request gets a valid response or an error with a message, never a 5xx or a broken connection."""
    operation = LABELS[label]
    (found,) = [each.ok() for each in schema().get_all_operations() if each.ok().label == label]

    def send(case: Any) -> None:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request(case.method, case.formatted_path, encoded(case.body))
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        assert answer.status < 500, data
        if answer.status >= 400:
            assert msgspec.json.decode(data, type=operation.errors).error.message
        elif answer.headers["content-type"].startswith("text/event-stream"):
            assert data.split(b"\n\n")[-2].startswith(LAST_EVENTS.get(operation.path, b"data: [DONE]"))
        elif operation.response is not None:
            msgspec.json.decode(data, type=operation.response)

    modes = schemathesis().GenerationMode
    for mode in (modes.POSITIVE, modes.NEGATIVE):
        if mode is modes.POSITIVE or operation.bodies:
            run = settings(
                max_examples=max(5, int(EXAMPLES * scale)), deadline=None, suppress_health_check=list(HealthCheck)
            )
            run(given(case=found.as_strategy(generation_mode=mode))(send))()
    backend.streams.clear()


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
async def test_a_ping_is_answered_with_nothing(client: httpx.AsyncClient, method: str):
    """SageMaker's health check requires an empty 200 response."""
    response = await client.request(method, "/ping")

    assert (response.status_code, response.content) == (200, b"")


async def test_the_load_counts_running_and_waiting_requests(client: httpx.AsyncClient, backend: FakeBackend):
    """The body has vLLM's format."""
    await client.post("/v1/completions", json={"prompt": "a"})

    assert (await client.get("/load")).json() == {"server_load": len(backend.streams)}


async def test_tokenizer_info_has_what_lm_eval_reads(client: httpx.AsyncClient, text_model: TextModel):
    """lm-eval reads the special tokens by role and the chat template."""
    info = (await client.get("/tokenizer_info")).json()

    assert info["eos_token"].encode() in map(text_model.piece, range(8))
    assert "messages" in info["chat_template"]
    assert info["model_max_length"] == 256
