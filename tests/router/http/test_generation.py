"""Properties of generations that a single response does not show: garbage, writes and replaced models."""

import asyncio
import gc
import itertools
import json
import re
from collections.abc import Iterable
from typing import Any

import httpx
import msgspec
import pytest

from homing.replica.messages import Generate
from homing.router.backend import GenerationRequest, TokenDelta
from homing.router.errors import RouterError, Superseded
from homing.router.http.body_reader import BodyReader
from homing.router.http.front import Front
from homing.router.http.generation import CHOICES_AT_ONCE
from homing.router.http.turns import Turns
from homing.router.replicas.external.wire import chat_body, completion_body
from homing.router.text.tokenizer import TextModel

from ..fakes import until
from .conftest import Live
from .fakes import PAUSE, FakeBackend, FakeStream, Item, Script, reply

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


async def ask(port: int, path: str, body: dict[str, Any]) -> bytes:
    """Post `body` and return the raw response, without creating any objects of this package."""
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


SAID = CHAT["messages"]
CALL = {"tools": [{"type": "function", "function": {"name": "f"}}]}
#: Fields that the client does not name, and without which no answer could be routed, counted and continued.
ROUTED = {"model", "stream", "stream_options"}
BY_IDS = ROUTED | {"prompt", "max_tokens", "return_token_ids"}


@pytest.mark.parametrize(
    ("chats", "path", "body", "added"),
    [
        ("none", "completions", {"prompt": "a fox"}, BY_IDS),
        ("none", "chat/completions", {"messages": SAID}, BY_IDS - {"messages"}),
        ("all", "chat/completions", {"messages": SAID}, ROUTED),
        ("all", "chat/completions", {"messages": SAID, "seed": None, "n": 1, "timeout": 9}, ROUTED),
        ("parsed", "chat/completions", {"messages": SAID, **CALL}, ROUTED),
        ("parsed", "messages", CHAT, BY_IDS),
        ("parsed", "responses", {"input": "a fox"}, BY_IDS),
    ],
)
async def test_an_engine_gets_no_field_that_the_client_did_not_set(
    client: httpx.AsyncClient, front: Front, backend: FakeBackend, chats: Any, path: str, body: Any, added: set[str]
):
    """Neither the router's defaults nor a seed of its own: each changes what the engine does, and some kill it."""
    front.settings = msgspec.structs.replace(front.settings, default_max_tokens=0)
    backend.chats = chats

    answers = [(await client.post(f"/v1/{path}", json=body | more)).status_code for more in ({}, SAMPLED)]
    plain, sampled = [sent_to_engine(request) for request in backend.requests]

    assert answers == [200, 200]
    assert plain.keys() <= added | body.keys()
    assert added <= plain.keys()
    assert sampled.keys() == plain.keys() | SAMPLED.keys()
    assert sampled.items() >= SAMPLED.items()


SAMPLED = {"temperature": 0.5, "top_p": 1.0}


def sent_to_engine(request: GenerationRequest) -> dict[str, Any]:
    """Return the body of the request for an engine."""
    generate = Generate(
        request_id=1,
        token_ids=request.token_ids,
        prompt_tokens=len(request.token_ids) // 4,
        root=b"",
        block_hashes=b"",
        sampling=request.sampling,
        chat=request.chat,
        given=request.given,
    )
    content: dict[str, Any] = json.loads((chat_body if request.chat else completion_body)("demo", generate, None))
    return content


@pytest.mark.parametrize(
    ("chats", "more", "reach", "ignored"),
    [
        ("all", {}, {"session_id", "kv_hints", "unheard_of"}, None),
        ("none", {}, {"session_id", "kv_hints"}, "unheard_of"),
        ("all", {"logprobs": True}, {"session_id", "kv_hints"}, "unheard_of"),
        (None, {}, set(), "session_id, kv_hints, unheard_of"),
    ],
)
async def test_fields_that_only_the_engine_knows_reach_it(
    client: httpx.AsyncClient, front: Front, backend: FakeBackend, chats: Any, more: Any, reach: set[str], ignored: Any
):
    """All of them where the engine reads the chat itself; what reaches it is not called ignored."""
    front.settings = msgspec.structs.replace(front.settings, strict_fields=False)
    backend.chats = chats
    fields = {"session_id": "s", "kv_hints": {"protocol_version": 1}, "unheard_of": [1, {"a": None}]}

    answer = await client.post("/v1/chat/completions", json=CHAT | fields | more)

    sent = sent_to_engine(backend.requests[0])
    assert {name: value for name, value in sent.items() if name in fields} == {name: fields[name] for name in reach}
    assert answer.headers.get("x-homing-ignored-fields") == ignored


async def test_an_engines_adapter_is_a_model(client: httpx.AsyncClient, front: Front, backend: FakeBackend):
    """Listed with its parent, and answering under its own name; the base model's requests name none."""
    backend.chats, backend.offered = "none", ("poet",)

    listed = {each["id"]: each.get("parent") for each in (await client.get("/v1/models")).json()["data"]}
    card = (await client.get("/v1/models/poet")).json()
    answers = [await client.post("/v1/chat/completions", json=CHAT | {"model": name}) for name in ("poet", "demo")]
    missing = await client.post("/v1/chat/completions", json=CHAT | {"model": "painter"})

    assert (listed["demo"], listed["poet"]) == (None, "demo")
    assert (card["id"], card["parent"]) == ("poet", "demo")
    assert [
        (each.json()["model"], request.adapter) for each, request in zip(answers, backend.requests, strict=True)
    ] == [
        ("poet", "poet"),
        ("demo", ""),
    ]
    assert missing.status_code == 404


@pytest.mark.parametrize(
    ("chats", "more", "reach"),
    [("all", {}, True), ("parsed", {}, True), ("all", {"logprobs": True}, False), (None, {}, False)],
)
async def test_an_image_reaches_engines_that_render_chats_and_is_part_of_the_routing_key(
    client: httpx.AsyncClient, backend: FakeBackend, chats: Any, more: dict[str, object], reach: bool
):
    """Only forwarding is needed there. Two images must not look alike to the router, and one must look like itself."""
    backend.chats = chats
    urls = ["data:image/png;base64,QQ==", "data:image/png;base64,Qg==", "data:image/png;base64,QQ=="]
    answers = []
    for url in urls:
        parts = [{"type": "text", "text": "See: "}, {"type": "image_url", "image_url": {"url": url}}]
        answers.append(
            await client.post(
                "/v1/chat/completions", json=CHAT | more | {"messages": [{"role": "user", "content": parts}]}
            )
        )

    prompts = [request.token_ids for request in backend.requests]
    assert prompts[0] == prompts[2]
    assert (prompts[0] != prompts[1]) == reach
    assert [(b"data:image" in request.chat) for request in backend.requests] == [reach] * 3
    assert ["x-homing-ignored-fields" in each.headers for each in answers] == [not reach] * 3


async def test_the_operators_limit_holds_for_chats_that_the_engine_renders(
    client: httpx.AsyncClient, backend: FakeBackend
):
    """`default_max_tokens` is set in these tests; a limit of the client's own replaces it."""
    backend.chats = "all"

    for more in ({}, {"max_tokens": 9}, {"max_completion_tokens": 8}):
        await client.post("/v1/chat/completions", json={"messages": SAID} | more)

    sent = [sent_to_engine(request) for request in backend.requests]
    assert [(each.get("max_tokens"), each.get("max_completion_tokens")) for each in sent] == [
        (64, None),
        (9, None),
        (None, 8),
    ]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/v1/chat/completions", CHAT | {"n": 2, "logprobs": True}),
        ("/v1/completions", {"prompt": [300, 301], "max_tokens": 5}),
        ("/v1/completions", {"prompt": ["a fox", "an owl"], "max_tokens": 5, "stream": True}),
        ("/v1/responses", {"input": "a fox", "stream": True}),
        ("/v1/messages", CHAT | {"stream": True}),
    ],
)
async def test_a_request_leaves_nothing_to_the_garbage_collector(
    live: Live, backend: FakeBackend, path: str, body: dict[str, Any]
):
    """Reference cycles would keep prompts in memory until a collection, and collections pause all streams."""
    await ask(live.port, path, body)  # creates lazily initialised objects
    backend.streams.clear()
    gc.freeze()  # ignore what exists, of which some is about to become garbage
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        answer = await ask(live.port, path, body)
        backend.streams.clear()
        gc.collect()
        left = {type(each).__name__ for each in gc.garbage if type(each).__module__.startswith("homing.")}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()

    assert answer.startswith(b"HTTP/1.1 200")
    assert not left


async def test_the_last_events_of_a_stream_leave_together(live: Live):
    """Each write costs a system call and wakes the client. A choice that ends before others is sent immediately."""
    answer = await ask(live.port, "/v1/chat/completions", CHAT | {"stream": True, "n": 2})

    chunks = answer.partition(b"\r\n\r\n")[2].split(b"\r\n")[1::2]
    first, last = [chunk.split(b"\n\n")[:-1] for chunk in chunks if b'"finish_reason":"' in chunk]
    assert len(first) == 1
    assert len(last) == 2
    assert last[1] == b"data: [DONE]"


@pytest.mark.parametrize(("path", "prompt"), [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "hi"})])
async def test_plain_text_is_streamed_like_text_that_is_searched(
    live: Live, backend: FakeBackend, text_model: TextModel, path: str, prompt: dict[str, Any]
):
    """Text without stop strings takes a shorter way to the connection. Some tokens end inside a character."""
    [ids] = text_model.encode_now(["A fox \u00e9 \u65e5\u672c \U0001f98a \n end"], special_tokens=False)
    backend.script = reply(list(ids))
    body = prompt | {"max_tokens": len(ids), "stream": True}

    plain, searched = [await ask(live.port, path, body | more) for more in ({}, {"stop": ["\u0001"]})]

    assert stream_of(plain) == stream_of(searched)
    assert stream_of(plain).count(b"data: {") > 5


def stream_of(answer: bytes) -> bytes:
    """The body of a response, as framed in chunks, without what differs between two responses."""
    return re.sub(rb'"id":"[^"]*"|"created":\d+', b"", answer.partition(b"\r\n\r\n")[2])


def once(error: RouterError, then: Script) -> Script:
    """A script that fails the first request before any token and answers later requests with `then`."""
    broken: list[GenerationRequest] = []

    def script(request: GenerationRequest) -> Iterable[Item]:
        if broken:
            return then(request)
        broken.append(request)
        return [error]

    return script


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_whose_model_is_replaced_before_it_began_is_answered_by_the_new_one(
    client: httpx.AsyncClient, backend: FakeBackend, stream: bool
) -> None:
    """Nothing was computed for the queued request, so it is tokenized again and sent to the new model."""
    backend.script = once(Superseded(), backend.script)

    answer = await client.post("/v1/chat/completions", json=CHAT | {"stream": stream})

    assert answer.status_code == 200
    assert len(backend.requests) == 2
    assert backend.requests[0].deadline == backend.requests[1].deadline


async def test_a_request_whose_model_is_replaced_while_it_is_tokenized_goes_to_the_new_one(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    """Long prompts are tokenized in a thread, so the model may be replaced before the request is sent."""
    refusals = [Superseded()]
    send = backend.generate

    def generate(request: GenerationRequest) -> FakeStream:
        if refusals:
            raise refusals.pop()
        return send(request)

    backend.generate = generate  # type: ignore[method-assign]

    answer = await client.post("/v1/completions", json={"prompt": "a fox", "max_tokens": 5})

    assert answer.status_code == 200
    assert len(backend.requests) == 1


async def test_a_request_that_began_ends_with_its_model(
    client: httpx.AsyncClient, backend: FakeBackend, answer_ids: list[int]
) -> None:
    """Another model cannot continue the answer that the old one began."""
    first = TokenDelta(token_ids=answer_ids[:1], cached_tokens=0)
    backend.script = lambda request: [first, Superseded()]

    answer = await client.post("/v1/completions", json={"prompt": "a fox", "max_tokens": 5})

    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "model_replaced"
    assert answer.headers["retry-after"] == "1"
    assert len(backend.requests) == 1


async def test_a_request_that_begins_anew_is_charged_once(
    front: Front, backend: FakeBackend, client: httpx.AsyncClient
) -> None:
    """A retry after an update must not be charged to the tenant, and metrics must not count the prompt twice."""
    backend.script = once(Superseded(), backend.script)

    answer = await client.post("/v1/completions", json={"prompt": [300, 301, 302], "max_tokens": 5})

    assert answer.status_code == 200
    assert 'homing_prompt_tokens_total{model="demo"} 3.0' in front.metrics.render().decode()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "a fox"}),
        ("chat/completions", CHAT),
        ("messages", CHAT),
        ("responses", {"input": "a fox"}),
    ],
)
async def test_proxies_are_told_not_to_collect_a_streams_events(client: httpx.AsyncClient, path: str, body: Any):
    """nginx's defaults make two reads of sixty events."""
    answer = await client.post(f"/v1/{path}", json=body | {"stream": True})

    assert answer.headers["x-accel-buffering"] == "no"


async def test_a_request_of_many_prompts_begins_in_turns(client: httpx.AsyncClient, front: Front, backend: FakeBackend):
    """Each choice takes 0.1 ms: two thousand inputs would hold up the event loop for 200 ms."""
    begun = [0]

    class Counted(Turns):
        async def next(self, tenant: bytes) -> None:
            begun.append(len(backend.streams))
            await super().next(tenant)

    front.body_reader = BodyReader(Counted())
    front.settings = msgspec.structs.replace(front.settings, max_choices=100)
    body = {"prompt": [[300 + number] for number in range(100)], "max_tokens": 1}

    answer = (await client.post("/v1/completions", json=body)).json()

    assert [choice["index"] for choice in answer["choices"]] == list(range(100))
    assert len(backend.streams) == 100
    steps = [after - before for before, after in itertools.pairwise([*begun, 100])]
    assert max(steps) <= CHOICES_AT_ONCE


async def test_a_client_that_leaves_has_its_choices_cancelled_a_few_at_a_time(live: Live, backend: FakeBackend):
    """The last ones first, as they may still wait: else each would be sent to a replica before it is cancelled."""
    backend.script = lambda _: [PAUSE]
    live.server.front.settings = msgspec.structs.replace(live.server.front.settings, max_choices=100)
    cancelled: list[list[bool]] = []

    def look() -> None:
        cancelled.append([stream.cancelled.is_set() for stream in backend.streams])
        if not all(cancelled[-1]) or len(backend.streams) < 100:
            asyncio.get_running_loop().call_soon(look)

    body = {"prompt": [[300 + number] for number in range(100)], "max_tokens": 1}
    data = json.dumps(body).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", live.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
    await until(lambda: len(backend.streams) == 100)
    look()
    writer.close()
    await until(lambda: all(stream.cancelled.is_set() for stream in backend.streams))

    assert all(each == sorted(each) for each in cancelled)
    steps = [sum(after) - sum(before) for before, after in itertools.pairwise([each for each in cancelled if each])]
    assert max(steps) <= CHOICES_AT_ONCE


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", CHAT),
    ],
)
async def test_every_usage_says_what_came_from_tiers(
    client: httpx.AsyncClient, backend: FakeBackend, path: str, body: dict[str, Any], stream: bool
):
    """Who pays for storage wants to know what it was worth. Without tiers nothing is said."""
    sent = body | {"stream": True, "stream_options": {"include_usage": True}} if stream else body
    without = await client.post(path, json=sent)
    backend.script = reply([10, 11], cached=48, loaded=(("CPU", 32), ("DISK", 16)))
    response = await client.post(path, json=sent)

    assert '"loaded_tokens":{"CPU":32,"DISK":16}' in response.text
    assert "loaded_tokens" not in without.text
