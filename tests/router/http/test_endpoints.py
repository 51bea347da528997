"""What each row of the table promises: who may call it, what it costs, and the types in the OpenAPI document."""

import asyncio
import importlib
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator
from functools import cache
from hashlib import sha256
from http.client import HTTPConnection
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from homing.router.backend import TokenDelta
from homing.router.config import RouterSettings
from homing.router.http import endpoints
from homing.router.http.app import OTHER_PATH
from homing.router.http.endpoints import table
from homing.router.http.endpoints.endpoint import Endpoint
from homing.router.http.endpoints.openapi import openapi_document
from homing.router.http.endpoints.table import ENDPOINTS, find
from homing.router.http.front import Front
from homing.router.http.protocol.exchange import Request
from homing.router.metrics import RouterMetrics
from homing.router.server import RouterServer
from homing.router.tenants.api_keys import tenants_of
from homing.router.text.tokenizer import TextModel

from .conftest import LoadedText, serving
from .fakes import FakeBackend, reply

ROOT = Path(__file__).parents[3]

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


#: A request for each charged row, as its body; a new charged row needs one.
CHAT = [{"role": "user", "content": "hi"}]
CHARGED = {
    "POST /v1/completions": {"prompt": [5, 6], "max_tokens": 2},
    "POST /v1/chat/completions": {"messages": CHAT},
    "POST /v1/responses": {"input": "hi"},
    "POST /v1/responses/input_tokens": {"input": "hi"},
    "POST /v1/responses/compact": {"input": "hi"},
    "GET /v1/responses/{id}": None,
    "POST /v1/responses/{id}/cancel": {},
    "GET /v1/responses/{id}/input_items": None,
    "POST /v1/chat/completions/render": {"messages": CHAT},
    "POST /v1/completions/render": {"prompt": "hi"},
    "POST /v1/responses/render": {"input": "hi"},
    "POST /v1/messages/render": {"messages": CHAT, "max_tokens": 2},
    "POST /inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}},
    "POST /v1/messages": {"messages": CHAT, "max_tokens": 2},
    "POST /v1/messages/count_tokens": {"messages": CHAT},
    "POST /v1/embeddings": {"input": "hi"},
    "POST /tokenize": {"prompt": "hi"},
    "POST /detokenize": {"tokens": [5]},
    "POST /explain": {"prompt": "hi"},
    "POST /explain/diff": {"a": {"prompt": "hi"}, "b": {"prompt": "ho"}},
}
#: The requests per minute of the tenant of these tests.
PER_MINUTE = 3


@pytest.fixture
def keyed_front(backend: FakeBackend, text_model: TextModel, tmp_path: Path) -> Front:
    """A front with a keys file and a response store: `ann` has limits, `root` is an admin."""
    keys = [{"key_sha256": sha256(name.encode()).hexdigest(), "tenant": name} for name in ("ann", "root")]
    keys[1]["admin"] = True
    tenants = tenants_of({"keys": keys, "tenants": {"ann": {"requests_per_minute": PER_MINUTE}}})
    settings = RouterSettings(max_choices=8, default_max_tokens=8, response_store=str(tmp_path / "store"))
    return Front(settings, backend, RouterMetrics(), texts=LoadedText(text_model), tenants=tenants)


@pytest.fixture
async def keyed(keyed_front: Front) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(keyed_front) as http:
        yield http


async def call(client: httpx.AsyncClient, row: Endpoint, key: str = "", body: Any = None, name: str = "x") -> Any:
    """Send a request for a row. `name`: what the path names."""
    path = re.sub(r"{\w+}", name, row.path)
    content = b"{" if body is None and row.bodies else json.dumps(body).encode() if body is not None else None
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    return await client.request(row.method, path, content=content, headers=headers)


@pytest.mark.parametrize("row", ENDPOINTS, ids=lambda row: f"{row.method} {row.path}")
async def test_a_row_admits_whom_it_says(keyed: httpx.AsyncClient, keyed_front: Front, row: Endpoint):
    """A refusal comes before the body is read, so that strangers and tenants over their limits cause no work."""
    access = row.handler.access
    if access == "public":
        assert (await call(keyed, row)).status_code not in (401, 403)
        return
    missing, unknown = [await call(keyed, row, key) for key in ("", "eve")]
    assert (missing.status_code, unknown.status_code) == (401, 401)
    assert "requires an API key" in missing.json()["error"]["message"]
    assert unknown.headers["www-authenticate"] == "Bearer"
    (limiter,) = [each for each in keyed_front.limiters.values() if each.tenant == "ann"]
    for _ in range(PER_MINUTE):
        limiter.begin([], keyed_front.monotonic())
        limiter.end(0, keyed_front.monotonic())
    answer = await call(keyed, row, "ann")
    assert (answer.status_code == 429) == (access == "charged")
    assert (answer.status_code == 403) == (access == "admin")


@pytest.mark.parametrize("row", [row for row in ENDPOINTS if row.handler.access == "charged"], ids=lambda row: row.path)
async def test_a_charged_row_costs_a_request(
    keyed: httpx.AsyncClient, keyed_front: Front, backend: FakeBackend, row: Endpoint
):
    """What an endpoint does not charge itself would be free: any number of calls, whatever the tenant's limits."""
    if row.path == "/v1/embeddings":
        backend.limits = msgspec.structs.replace(backend.limits, embedding_size=2)
        vector = TokenDelta(token_ids=[], finish_reason="stop", cached_tokens=0, embedding=bytes(8))
        backend.script = lambda request: [vector] if request.embedding else reply([5])(request)
    stored = (await keyed.post("/v1/responses", json={"input": "hi"}, headers={"authorization": "Bearer ann"})).json()
    (limiter,) = [each for each in keyed_front.limiters.values() if each.tenant == "ann"]
    answer = await call(keyed, row, "ann", CHARGED[f"{row.method} {row.path}"], stored["id"])

    assert answer.status_code == (400 if row.path.endswith("/cancel") else 200), answer.text
    assert (limiter.requests, limiter.running) == (2, 0)


def test_the_pages_say_who_may_call_what() -> None:
    """SECURITY.md lists what is open; docs/api.md what needs a key, and what is charged."""
    page = (ROOT / "docs" / "api.md").read_text()
    (opened,) = re.findall(r"^- (.*) require no key\.", (ROOT / "SECURITY.md").read_text(), re.MULTILINE)
    (metered,) = re.findall(r"The limits apply to(.*?)\.\n", page, re.DOTALL)
    (locked,) = re.findall(r"Then only its keys are accepted, and (.*?) return 401", page, re.DOTALL)
    closed = {row.path for row in ENDPOINTS if row.handler.access != "public"}

    for text, access in ((opened, "public"), (metered, "charged")):
        listed = set(re.findall(r"`(/[\w./{}]*)`", text))
        assert listed == {row.path for row in ENDPOINTS if row.handler.access == access}
    starts = tuple(re.findall(r"`(/\w+)[`/]", locked))
    assert [path for path in sorted(closed) if not path.startswith(starts)] == []


@pytest.mark.parametrize("path", dict.fromkeys(row.path for row in ENDPOINTS))
async def test_other_methods_and_longer_paths_are_refused_and_counted(client: httpx.AsyncClient, path: str):
    """A 405 lists the methods of the path's rows; the metrics' label is the row's path, never what a client made up."""
    named = re.sub(r"{\w+}", "x", path)
    rows = [row.method for row in ENDPOINTS if row.path == path]
    for method in {"GET", "POST", "PUT", "DELETE", "PATCH"}.difference(rows):
        answer = await client.request(method, named, json={})
        assert answer.status_code == 405
        assert answer.headers["allow"].replace("GET, HEAD", "GET").split(", ") == rows
    missing = await client.get("/nonsense" + named)
    page = (await client.get("/metrics")).text

    assert missing.status_code == 404
    labels = set(re.findall(r'homing_http_requests_total{endpoint="([^"]*)"', page))
    assert labels == {path, OTHER_PATH}


async def test_pages_of_other_servers_get_nowhere_near_what_others_own(client: httpx.AsyncClient):
    """Deleting, and what only admins may do, asks where the request comes from."""
    for row in ENDPOINTS:
        if row.handler.access == "admin" or row.method == "DELETE":
            answer = await client.request(row.method, row.path, json={}, headers={"origin": "http://evil.test"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_origin"), row.path


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


def test_every_row_of_a_module_is_in_the_table() -> None:
    """A module that the table forgets would pass every other test here, because none of its rows is served."""
    modules = [
        importlib.import_module(f"{endpoints.__name__}.{each.name}") for each in iter_modules(endpoints.__path__)
    ]
    rows = [row for module in modules if module is not table for row in getattr(module, "ENDPOINTS", ())]

    assert len(rows) == len(ENDPOINTS) - 1  # /openapi.json describes the table itself
    assert set(rows) < set(ENDPOINTS)


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
