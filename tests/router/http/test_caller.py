"""The caller of a request: its session, and its tenant's limits over HTTP."""

import asyncio
from collections.abc import AsyncIterator
from hashlib import sha256

import httpx
import pytest

from homing.replica.messages import PositionLogprobs
from homing.router.backend import TokenDelta
from homing.router.config import RouterSettings
from homing.router.errors import NoReplica
from homing.router.http.caller import AGENT_HEADERS, MAX_SESSION_CHARS, PARENT_HEADERS, first_header
from homing.router.http.front import Front
from homing.router.metrics import RouterMetrics
from homing.router.tenants.api_keys import tenants_of
from homing.router.tenants.shared_usage import SharedUsage
from homing.router.text.tokenizer import TextModel

from ..fakes import until
from .conftest import LoadedText, serving
from .fakes import PAUSE, FakeBackend

LIMITS = {
    "hasty": {"requests_per_minute": 2, "tokens_per_minute": 1000},
    "busy": {"max_running": 1},
    "brief": {"max_prompt_tokens": 3},
    "free": {},
    "first": {"global_priority": True},
}


class Clock:
    """A clock that only advances when a test sets `now`."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def front(settings: RouterSettings, backend: FakeBackend, text_model: TextModel, clock: Clock) -> Front:
    """A front with one API key per tenant; the key is the tenant's name."""
    keys = [{"key_sha256": sha256(name.encode()).hexdigest(), "tenant": name} for name in LIMITS]
    tenants = tenants_of({"keys": keys, "tenants": LIMITS})
    return Front(settings, backend, RouterMetrics(), texts=LoadedText(text_model), tenants=tenants, monotonic=clock)


@pytest.fixture
async def client(front: Front) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(front) as http:
        yield http


async def ask(client: httpx.AsyncClient, key: str, **fields: object) -> httpx.Response:
    body = {"prompt": [5, 6, 7], "max_tokens": 4} | fields
    return await client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})


async def test_a_rate_is_refused_with_the_time_to_come_back(client: httpx.AsyncClient, clock: Clock):
    """The 429 has OpenAI's format, and a retry after the given time succeeds."""
    answers = [await ask(client, "hasty") for _ in range(3)]
    wait_s = int(answers[2].headers["retry-after"])
    clock.now += wait_s
    again = await ask(client, "hasty")

    assert [answer.status_code for answer in answers] == [200, 200, 429]
    error = answers[2].json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "requests_per_minute" in error["message"]
    assert (wait_s, again.status_code) == (30, 200)


async def test_the_standing_is_told_with_answers_and_refusals(client: httpx.AsyncClient):
    """OpenAI's clients pace themselves by these headers; a tenant without rate limits gets none."""
    first, streamed, refused = [await ask(client, "hasty", stream=number == 1) for number in range(3)]

    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in (first, streamed, refused)] == [
        "1",
        "0",
        "0",
    ]
    assert first.headers["x-ratelimit-limit-tokens"] == "1000"
    assert streamed.headers["x-ratelimit-remaining-tokens"] == str(1000 - 2 * 3 - 4)
    assert refused.headers["x-ratelimit-reset-requests"] == "60.000s"
    assert not [name for name in (await ask(client, "free")).headers if name.startswith("x-ratelimit")]


@pytest.mark.parametrize("fields", [{"n": 3}, {"best_of": 3}, {"prompt": [[5, 6, 7]] * 3}])
async def test_a_prompt_is_paid_for_once_for_each_choice(client: httpx.AsyncClient, backend: FakeBackend, fields):
    """Each choice is a request to the replicas; if one of them is refused, all are paid back."""
    answer = await ask(client, "hasty", **fields)
    backend.refusal = NoReplica("none")
    refused = await ask(client, "hasty", **fields)

    assert answer.headers["x-ratelimit-remaining-tokens"] == str(1000 - 3 * 3)
    assert refused.headers["x-ratelimit-remaining-tokens"] == str(1000 - 3 * 3 - 3 * 4)


async def test_a_used_up_limit_is_told_before_the_body_is_read(client: httpx.AsyncClient, backend: FakeBackend):
    """An overloaded router must not tokenize requests that it will refuse anyway."""
    for _ in range(2):
        await ask(client, "hasty")
    refused = await ask(client, "hasty", prompt="", nonsense=1)

    assert refused.status_code == 429
    assert len(backend.requests) == 2


async def test_running_requests_are_bounded_until_they_end(client: httpx.AsyncClient, backend: FakeBackend, front):
    """A request whose client disconnected must give its slot back."""
    script, backend.script = backend.script, lambda _: [PAUSE]
    leaving = asyncio.create_task(ask(client, "busy"))
    await until(lambda: backend.streams)
    leaving.cancel()
    await backend.streams[0].cancelled.wait()
    backend.script = script
    meter = next(meter for meter in front.limiters.values() if meter.tenant == "busy")
    await until(lambda: not meter.running)

    assert [(await ask(client, "busy")).status_code for _ in range(3)] == [200, 200, 200]
    assert meter.requests == 4


async def test_only_who_may_goes_before_other_tenants(client: httpx.AsyncClient, backend: FakeBackend):
    """Every tenant may order its own requests and lower its priority; only some may raise it above others."""
    for key in ("free", "first"):
        for priority in (-3, 2):
            await ask(client, key, priority=priority)

    assert [(each.priority, each.own_order) for each in backend.requests] == [(0, -3), (2, 2), (-3, -3), (2, 2)]


async def test_a_prompt_over_the_tenants_limit_is_the_callers_fault(client: httpx.AsyncClient):
    """The status is 400 rather than 429, because waiting does not make the prompt shorter."""
    short, long = [await ask(client, "brief", prompt=[5] * tokens) for tokens in (3, 4)]

    assert (short.status_code, long.status_code) == (200, 400)
    assert long.json()["error"]["code"] == "prompt_over_limit"


async def test_what_the_backend_refuses_is_not_paid_for(client: httpx.AsyncClient, backend: FakeBackend):
    """A cluster without replicas is not the tenant's fault."""
    backend.refusal = NoReplica("none", retry_after_s=1.2)
    refused = await ask(client, "hasty")
    backend.refusal = None

    assert refused.headers["retry-after"] == "2"
    assert [(await ask(client, "hasty")).status_code for _ in range(2)] == [200, 200]


async def test_an_answer_that_cannot_be_made_is_told_and_over(client: httpx.AsyncClient, backend: FakeBackend, front):
    """On invalid replica output, the client must not wait forever, and the tenant's slot must be freed."""
    nonsense = PositionLogprobs(None, [])
    backend.script = lambda _: [TokenDelta(token_ids=[5], logprobs=[nonsense], finish_reason="stop", cached_tokens=0)]
    answers = [await ask(client, "busy", best_of=2) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [500, 500]
    assert {meter.running for meter in front.limiters.values()} == {0}


async def test_metrics_tell_tenants_apart(client: httpx.AsyncClient):
    """Usage and refusals are counted per tenant; every configured tenant is listed from the start."""
    for key in ("hasty", "hasty", "hasty", "free"):
        await ask(client, key)
    page = (await client.get("/metrics")).text

    assert 'homing_tenant_requests_total{tenant="hasty"} 2.0' in page
    assert 'homing_tenant_prompt_tokens_total{tenant="free"} 3.0' in page
    assert 'homing_tenant_completion_tokens_total{tenant="free"} 4.0' in page
    assert 'homing_tenant_refusals_total{limit="requests_per_minute",tenant="hasty"} 1.0' in page
    assert 'homing_tenant_running{tenant="busy"} 0.0' in page


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        ("/tokenize", {"prompt": "once upon a time"}, None),
        ("/detokenize", {"tokens": [5, 6, 7]}, 3),
        ("/explain", {"prompt": [5, 6, 7]}, 3),
        ("/explain", {"messages": [{"role": "user", "content": "hi"}]}, None),
    ],
)
async def test_what_generates_nothing_is_paid_for_too(client: httpx.AsyncClient, clock: Clock, path, body, tokens):
    """Rendering and tokenizing cost as much as for a completion: one request and its prompt tokens are charged."""
    key = {"authorization": "Bearer hasty"}
    answers = [await client.post(path, json=body, headers=key) for _ in range(3)]

    left = int(answers[1].headers["x-ratelimit-remaining-tokens"])
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert int(answers[2].headers["retry-after"]) == 30
    assert left == 1000 - 2 * (tokens or answers[0].json().get("count") or answers[0].json()["prompt_tokens"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "once upon a time"}),
        ("/detokenize", {"tokens": [5] * 4}),
        ("/explain", {"prompt": [5] * 4}),
    ],
)
async def test_a_prompt_limit_holds_wherever_prompts_go(client: httpx.AsyncClient, front: Front, path, body):
    """The limit also applies without generation, and a refused request must not stay counted as running."""
    refused = await client.post(path, json=body, headers={"authorization": "Bearer brief"})

    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "prompt_over_limit")
    assert {meter.running for meter in front.limiters.values()} == {0}


async def test_routers_of_one_cluster_share_limits(settings, backend: FakeBackend, text_model, tmp_path, clock: Clock):
    """Limits hold whichever router accepts a connection, and survive a router's restart."""
    tenants = tenants_of(
        {
            "keys": [{"key_sha256": sha256(b"k").hexdigest(), "tenant": "t"}],
            "tenants": {"t": {"requests_per_minute": 3}},
        }
    )

    def router(seat: int) -> Front:
        usage = SharedUsage(tmp_path / "usage", seat=seat, seats=2)
        texts = LoadedText(text_model)
        return Front(
            settings, backend, RouterMetrics(), texts=texts, tenants=tenants, usage=usage.records, monotonic=clock
        )

    told = []
    for seat in (0, 1, 0, 1):
        async with serving(router(seat)) as client:
            told.append((await ask(client, "k")).status_code)

    assert told == [200, 200, 200, 429]


@pytest.mark.parametrize("name", ["x-session-affinity", "x-correlation-id"])
def test_a_conversation_is_known_by_either_header(name: str) -> None:
    """Clients and proxies send one header or the other."""
    assert first_header({name: "chat-7"}) == "chat-7"
    assert first_header({}) is None


def test_a_long_name_of_a_conversation_is_kept_short() -> None:
    """65,536 session names are remembered; at 64 KB each, clients could fill 4 GB."""
    one, other = first_header({"x-session-affinity": "a" * 60_000}), first_header({"x-session-affinity": "a" * 60_001})

    assert one is not None
    assert len(one) <= MAX_SESSION_CHARS
    assert one == first_header({"x-session-affinity": "a" * 60_000})
    assert one != other


async def test_agents_and_their_parents_are_named_in_the_explanation(client: httpx.AsyncClient):
    """Claude Code, Codex and OpenCode use different headers for the same information."""
    for session, agent, parent in [
        ("x-claude-code-session-id", AGENT_HEADERS[0], PARENT_HEADERS[0]),
        ("session-id", AGENT_HEADERS[1], PARENT_HEADERS[1]),
        ("x-session-id", AGENT_HEADERS[2], PARENT_HEADERS[2]),
    ]:
        headers = {"authorization": "Bearer free", session: "s1", agent: "a1", parent: "a0"}
        found = (await client.post("/explain", json={"prompt": "a", "max_tokens": 1}, headers=headers)).json()

        assert (found["session"], found["agent"], found["parent"]) == ("s1", "a1", "a0")
