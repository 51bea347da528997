"""Tests of the smaller endpoints and of the handling common to all requests."""

import asyncio
import gc
from datetime import datetime
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from openai.types import Model

from homing.router.errors import NoReplica
from homing.router.http import app
from homing.router.http.app import start
from homing.router.http.front import Front
from homing.router.http.protocol.exchange import Exchange
from homing.router.text.template import TemplateInput
from homing.router.text.tokenizer import TextModel

from .fakes import FakeBackend

MESSAGES = [{"role": "user", "content": "hi"}]


async def test_the_model_is_listed_and_found(openai_client: AsyncOpenAI, backend: FakeBackend):
    """Many clients list the models before they send anything else."""
    listed = [model async for model in openai_client.models.list()]

    assert [model.id for model in listed] == ["demo"]
    Model.model_validate(listed[0].model_dump(exclude={"max_model_len"}), strict=True)
    assert await openai_client.models.retrieve("demo") == listed[0]


async def test_an_unknown_model_is_not_found(client: httpx.AsyncClient, backend: FakeBackend):
    """Model names may contain slashes."""
    response = await client.get("/v1/models/meta-llama/Llama-3")

    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_health_is_the_process_and_ready_the_cluster(client: httpx.AsyncClient, backend: FakeBackend):
    """A router without replicas must get no traffic, but restarting it would not help."""
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/ready")).status_code == 200

    backend.state = "silent"
    assert (await client.get("/ready")).status_code == 503
    backend.limits = None
    assert (await client.get("/ready")).status_code == 503
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/v1/models")).json()["data"] == []
    assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 503


async def test_models_are_listed_as_the_client_knows_them(client: httpx.AsyncClient):
    """Anthropic's clients send the version of their API; Claude Code discovers a gateway's models this way."""
    theirs = {"anthropic-version": "2023-06-01"}
    listed = (await client.get("/v1/models?limit=1000", headers=theirs)).json()
    [ours] = (await client.get("/v1/models")).json()["data"]
    one = (await client.get(f"/v1/models/{ours['id']}", headers=theirs)).json()

    assert listed == {"data": [one], "first_id": ours["id"], "last_id": ours["id"], "has_more": False}
    assert (one["type"], one["id"], one["display_name"]) == ("model", ours["id"], ours["id"])
    assert datetime.fromisoformat(one["created_at"]).timestamp() == ours["created"]


async def test_ready_waits_for_the_tokenizer(client: httpx.AsyncClient, front: Front):
    """Loading takes seconds, during which requests sent to this router would wait."""
    front.texts.present = False

    assert (await client.get("/ready")).status_code == 503


async def test_ready_waits_for_an_exact_index(client: httpx.AsyncClient, backend: FakeBackend):
    """A restarted router without an exact index would send conversations to the wrong replicas."""
    backend.is_exact = False

    assert (await client.get("/ready")).status_code == 503


async def test_a_router_stays_ready_while_a_model_is_added(
    client: httpx.AsyncClient, backend: FakeBackend, front: Front
):
    """The new model's index and tokenizer are not ready yet, but the other models are served as before."""
    assert (await client.get("/ready")).status_code == 200
    backend.is_exact, front.texts.present = False, False

    assert (await client.get("/ready")).status_code == 200


async def test_tokenize_and_detokenize_are_inverse(
    client: httpx.AsyncClient, backend: FakeBackend, text_model: TextModel
):
    """The bodies have vLLM's format, which its benchmark probes."""
    made = (await client.post("/tokenize", json={"prompt": "a fox", "return_token_strs": True})).json()
    back = (await client.post("/detokenize", json={"tokens": made["tokens"][1:]})).json()

    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert (made["max_model_len"], back) == (256, {"prompt": "a fox"})
    chat = (await client.post("/tokenize", json={"messages": MESSAGES})).json()
    assert chat["tokens"] == list(text_model.encode_chat_now(TemplateInput(MESSAGES)))


async def test_tokenize_wants_one_of_prompt_and_messages(client: httpx.AsyncClient, backend: FakeBackend):
    """A body with neither is empty, and a body with both is ambiguous."""
    for body in ({}, {"prompt": "x", "messages": MESSAGES}):
        assert (await client.post("/tokenize", json=body)).json()["error"]["param"] == "prompt"
    response = await client.post("/detokenize", json={"tokens": [99999]})
    assert response.json()["error"]["param"] == "tokens"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "prompt": "hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        ("/v1/messages", {"messages": MESSAGES, "system": "You tell stories.", "max_completion_tokens": 9}),
        ("/v1/messages", {"messages": MESSAGES, "system": "You tell stories."}),
        ("/v1/responses", {"input": "hi", "prompt": "hi"}),
        ("/v1/responses", {"input": ["hi", "ho"]}),
        ("/v1/completions", {"prompt": "hi", "system": "You tell stories."}),
    ],
)
async def test_explain_refuses_what_the_endpoint_of_the_body_refuses(client: httpx.AsyncClient, path: str, body: Any):
    """The message must be the same: explaining a body that its own endpoint rejects would mislead."""
    refused, explained = [(await client.post(where, json=body)) for where in (path, "/explain")]

    assert (refused.status_code, explained.status_code) == (400, 400)
    assert refused.json()["error"]["message"] == explained.json()["error"]["message"]


async def test_explain_generates_nothing(client: httpx.AsyncClient, backend: FakeBackend):
    """`/explain` takes the request body of any generation API unchanged."""
    system, tool = "You tell stories.", {"name": "look", "input_schema": {"type": "object"}}
    claude = {"messages": MESSAGES, "max_tokens": 9}
    lengths = []
    for body in (
        {"prompt": "hi"},
        {"messages": MESSAGES},
        claude | {"system": system},
        claude | {"tools": [tool]},
        {"input": "hi"},
    ):
        response = await client.post("/explain", json=body)

        assert (response.status_code, response.json()["chosen"]) == (200, "r0")
        lengths.append(response.json()["prompt_tokens"])
    _, chat, with_system, with_tools, response_ = lengths
    assert with_system > chat
    assert min(chat, with_tools, response_) > 0
    assert backend.requests == []


async def test_cluster_shows_the_backends_view(client: httpx.AsyncClient, backend: FakeBackend):
    """`/cluster` serves people and dashboards."""
    view = (await client.get("/cluster")).json()

    assert [replica["replica_id"] for replica in view["replicas"]] == ["r0"]


async def test_version_is_the_packages(client: httpx.AsyncClient, backend: FakeBackend):
    """Bug reports should state the version."""
    import homing

    assert (await client.get("/version")).json() == {"version": homing.__version__}


async def test_every_answer_has_an_id(client: httpx.AsyncClient, backend: FakeBackend):
    """The client's id is kept if it is safe in a header and a log line; otherwise a new one is made."""
    for given, kept in (("abc-1", True), ("a b", False), ("x" * 300, False)):
        response = await client.get("/health", headers={"x-request-id": given})

        assert (response.headers["x-request-id"] == given) == kept
        assert response.headers["x-request-id"]


async def test_metrics_count_requests_and_tokens(client: httpx.AsyncClient, backend: FakeBackend):
    """Unknown paths share one label, so that clients cannot grow the number of time series."""
    await client.post("/v1/completions", json={"prompt": "x"})
    for path in ("/a", "/b"):
        await client.get(path)

    text = (await client.get("/metrics")).text

    assert 'homing_http_requests_total{endpoint="/v1/completions",status="200"} 1.0' in text
    assert 'homing_http_requests_total{endpoint="other",status="404"} 2.0' in text
    assert 'homing_time_to_first_token_seconds_count{model="demo"} 1.0' in text
    assert 'homing_requests_running{model="demo",replica="r0"} 2.0' in text


async def test_what_never_waits_is_done_at_once():
    """Work that never suspends needs neither a task nor an iteration of the event loop."""
    done: list[int] = []

    async def work() -> None:
        done.append(1)

    assert start(work()) is None
    assert done == [1]


async def test_what_waits_goes_on_in_a_task():
    """The task receives the results of the awaitables, over several suspensions."""
    done: list[int] = []
    first: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        done.append(await first)
        await asyncio.sleep(0)
        done.append(2)

    task = start(work())
    assert task is not None
    assert done == []
    first.set_result(1)
    await task

    assert done == [1, 2]


async def test_errors_of_what_it_waits_for_arrive_inside():
    """A failed future raises its exception inside the coroutine, as with a plain `await`."""
    caught: list[str] = []
    first: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        try:
            await first
        except ValueError as error:
            caught.append(str(error))

    task = start(work())
    assert task is not None
    first.set_exception(ValueError("no"))
    await task

    assert caught == ["no"]


async def test_a_cancellation_reaches_the_work():
    """Cancelling the task must run the coroutine's `finally` blocks."""
    cleaned: list[bool] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    task = start(work())
    assert task is not None
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert cleaned == [True]


async def test_what_raises_before_it_waits_raises_here():
    """An error before the first suspension reaches the caller of `start`, which can still send a response."""

    async def work() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        start(work())


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/chat/completions", "/engines", "/nowhere"])
async def test_a_name_that_the_server_does_not_have_reaches_nothing(client: httpx.AsyncClient, path: str):
    """A page behind DNS rebinding is of the same origin as the server, so only its Host tells."""
    answer = await client.request("GET", path, headers={"host": "evil.test"})

    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_host")


LONG_TEXT = " fox" * 3_000
REMEMBERED = [
    ("/v1/completions", {"prompt": LONG_TEXT}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG_TEXT}]}, 400),
    ("/v1/messages", {"messages": [{"role": "user", "content": LONG_TEXT}], "max_tokens": 4}, 400),
    ("/v1/responses", {"input": LONG_TEXT}, 400),
    ("/v1/completions", {"prompt": "a", "temperature": "hot", "suffix": LONG_TEXT}, 400),
    ("/v1/completions", {"prompt": "a", "model": "none", "user": LONG_TEXT}, 404),
    ("/v1/completions", {"prompt": "crash", "user": LONG_TEXT}, 500),
    ("/v1/completions", {"prompt": "refuse", "user": LONG_TEXT}, 503),
    ("/v1/completions", {"prompt": "a", "user": LONG_TEXT}, 200),
    ("/tokenize", {"prompt": LONG_TEXT, "truncate": 1}, 400),
    ("/tokenize", {"prompt": LONG_TEXT}, 200),
    ("/explain", {"prompt": LONG_TEXT}, 400),
    ("/nowhere", {"prompt": LONG_TEXT}, 404),
]


@pytest.mark.parametrize(("path", "body", "status"), REMEMBERED, ids=lambda value: str(value)[:40])
async def test_an_answered_request_is_gone_without_the_collector(
    client: httpx.AsyncClient, backend: FakeBackend, monkeypatch, path: str, body: dict[str, Any], status: int
):
    """An error's traceback refers to the body: 100 bodies of 8 MB took 800 MB until the collector's next full run."""
    answer = backend.script

    def script(request):
        if len(request.token_ids) < 20 and "crash" in body["prompt"]:
            raise ValueError("a bug")
        return [NoReplica("all are gone")] if "refuse" in body["prompt"] else answer(request)

    backend.script = script
    monkeypatch.setattr(app.log, "error", lambda *_, **__: None)  # pytest keeps what is logged
    await client.post(path, json=body)
    gc.collect(0)  # what is allocated from now on is all of the youngest generation
    gc.disable()
    try:
        assert (await client.post(path, json=body)).status_code == status
        backend.streams.clear()
        await asyncio.sleep(0)
        left = [each for each in gc.get_objects(0) if type(each) is Exchange]  # a weak proxy may be dead
    finally:
        gc.enable()

    assert not left
