"""`cache_control` over HTTP: validation, the number of tokens that a mark pins, and the report in the response."""

from typing import Any

import httpx
import pytest

from homing.kvcache.hashing import token_array
from homing.replica.messages import ModelLimits
from homing.router.backend import GenerationRequest
from homing.router.config import RouterSettings
from homing.router.errors import CacheInUse, InvalidRequest, TemplateRefusal
from homing.router.http.dialects.pins import requested
from homing.router.http.front import Front
from homing.router.metrics import RouterMetrics
from homing.router.tenants.api_keys import tenants_of
from homing.router.text.conversation import CacheMark, Conversation, Message
from homing.router.text.encoder import TokenIds
from homing.router.text.encoder_threads import NO_SENDER
from homing.router.text.template import TemplateInput
from homing.router.text.tokenizer import TextModel

from ...tenants.test_api_keys import entry
from ..conftest import LoadedText, serving
from ..fakes import FakeBackend, reply

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
SYSTEM = {"role": "system", "content": "You tell stories of animals in a forest."}
USER = {"role": "user", "content": "Tell me a story about a fox."}
KEEP: dict[str, Any] = {"type": "ephemeral"}
MARKED = Conversation(
    messages=[Message(**SYSTEM, marks=[CacheMark("messages[0].cache_control")]), Message(**USER)],
)


def pinned(request: GenerationRequest) -> list[tuple[int, float]]:
    return [(pin.num_tokens, pin.ttl_s) for pin in request.pins]


def prompt_of(request: GenerationRequest) -> list[int]:
    return token_array(request.token_ids).tolist()


async def test_a_field_beside_the_prompt_keeps_all_of_it(client: httpx.AsyncClient, backend: FakeBackend):
    """This form is the same for chats and completions; without `ttl`, the setting applies."""
    await client.post(CHAT, json={"messages": [USER], "cache_control": KEEP})
    await client.post(COMPLETION, json={"prompt": ["a fox", "an owl"], "cache_control": KEEP | {"ttl": "1h"}})

    assert pinned(backend.requests[0]) == [(len(prompt_of(backend.requests[0])), 300.0)]
    for request in backend.requests[1:]:
        assert pinned(request) == [(len(prompt_of(request)), 3600.0)]


async def test_a_marked_message_keeps_the_prompt_up_to_there(
    client: httpx.AsyncClient, backend: FakeBackend, text_model: TextModel
):
    """The pin ends with the prefix that conversations with this system prompt share, before the question."""
    await client.post(CHAT, json={"messages": [SYSTEM | {"cache_control": KEEP | {"ttl": 60}}, USER]})
    other = list(text_model.encode_chat_now(TemplateInput([SYSTEM, USER | {"content": "zebra"}])))

    [(kept, ttl_s)] = pinned(backend.requests[0])
    assert ttl_s == 60.0
    assert prompt_of(backend.requests[0])[:kept] == other[:kept]
    text = text_model.decode(other[:kept])
    assert SYSTEM["content"] in text
    assert USER["content"] not in text


async def test_parts_and_messages_may_be_marked_together(client: httpx.AsyncClient, backend: FakeBackend):
    """Anthropic's clients mark the tools, the system prompt and the last turns, each with its own lifetime."""
    parts = [
        {"type": "text", "text": "Tell me a story. ", "cache_control": KEEP | {"ttl": "1h"}},
        {"type": "text", "text": "It is about a fox and an owl."},
    ]
    messages = [SYSTEM | {"cache_control": KEEP | {"ttl": "1h"}}, USER | {"content": parts, "cache_control": KEEP}]
    await client.post(CHAT, json={"messages": messages})

    request = backend.requests[0]
    kept = [tokens for tokens, _ in pinned(request)]
    assert [ttl_s for _, ttl_s in pinned(request)] == [3600.0, 3600.0, 300.0]
    assert kept == sorted(set(kept))
    assert kept[-1] == len(prompt_of(request))


async def test_a_mark_changes_no_token_of_the_prompt(client: httpx.AsyncClient, backend: FakeBackend):
    """Otherwise a marked prompt would miss the blocks cached by an unmarked one."""
    marked = {"role": "user", "content": [{"type": "text", "text": USER["content"], "cache_control": KEEP}]}
    await client.post(CHAT, json={"messages": [SYSTEM, USER]})
    await client.post(CHAT, json={"messages": [SYSTEM | {"cache_control": KEEP}, marked]})

    assert prompt_of(backend.requests[0]) == prompt_of(backend.requests[1])


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"cache_control": {"type": "persistent"}}, "cache_control.type"),
        ({"cache_control": {}}, "cache_control.type"),
        ({"cache_control": KEEP | {"ttl": "2d"}}, "cache_control.ttl"),
        ({"cache_control": KEEP | {"ttl": 0}}, "cache_control.ttl"),
        ({"cache_control": KEEP | {"ttl": 3601}}, "cache_control.ttl"),
        ({"cache_control": KEEP | {"scope": "all"}}, "cache_control.scope"),
        ({"messages": [USER | {"cache_control": 1}]}, "messages[0].cache_control"),
        ({"messages": [USER | {"cache_control": KEEP | {"ttl": 1e9}}]}, "messages[0].cache_control.ttl"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"ttl": 1}}]}]},
            "messages[0].content[0].cache_control.type",
        ),
        ({"messages": [USER | {"cache_control": KEEP}] * 5}, "messages"),
    ],
)
async def test_a_malformed_wish_is_refused_by_field(
    client: httpx.AsyncClient, backend: FakeBackend, changes: dict[str, Any], param: str
):
    """If an invalid pin were ignored, the caller would rely on blocks that are not kept."""
    response = await client.post(CHAT, json={"messages": [USER]} | changes)

    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert backend.requests == []


@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_says_what_is_kept(
    client: httpx.AsyncClient, backend: FakeBackend, answer_ids: list[int], stream: bool
):
    """0 means that the budget is used up; without a pin in the request, the field is absent."""
    backend.script = reply(answer_ids, pinned=16)
    asked = await client.post(CHAT, json={"messages": [USER], "cache_control": KEEP, "stream": stream})
    backend.script = reply(answer_ids, pinned=0)
    refused = await client.post(CHAT, json={"messages": [USER], "cache_control": KEEP, "stream": stream})
    plain = await client.post(CHAT, json={"messages": [USER], "stream": stream})

    assert [answer.headers.get("x-homing-pinned-tokens") for answer in (asked, refused, plain)] == ["16", "0", None]


async def test_a_prompt_is_pinned_once_however_many_choices(client: httpx.AsyncClient, backend: FakeBackend):
    """Choices may run on several replicas, but the tenant pays for one pinned copy."""
    await client.post(CHAT, json={"messages": [USER], "cache_control": KEEP, "n": 3})

    assert [len(request.pins) for request in backend.requests] == [1, 0, 0]


async def test_pins_are_on_the_tenant_s_account_not_the_key_s_text(client: httpx.AsyncClient, backend: FakeBackend):
    """Budgets are per tenant, and the key itself is not passed on."""
    for key, salt in (("a", None), ("a", "x"), ("b", None)):
        headers = {"authorization": f"Bearer {key}"}
        body = {"messages": [USER], "cache_control": KEEP, "cache_salt": salt}
        await client.post(CHAT, json=body, headers=headers)

    first, narrowed, other = (request.pins[0].tenant for request in backend.requests)
    assert first == narrowed != other
    assert len(first) == 16


@pytest.mark.parametrize("ttl", ["7m", -1, 0, ["5m"]])
@pytest.mark.parametrize("marks", ["body", "message", "part"])
async def test_a_wrong_time_is_refused_with_what_it_may_be(client: httpx.AsyncClient, ttl: object, marks: str):
    """The message must list the allowed values, because callers cannot guess them."""
    control = {"cache_control": KEEP | {"ttl": ttl}}
    part = {"type": "text", "text": "x"}
    message = {"role": "user", "content": [part | control] if marks == "part" else "x"}
    body = {"messages": [message | (control if marks == "message" else {})]} | (control if marks == "body" else {})

    error = (await client.post(CHAT, json=body)).json()["error"]

    assert error["param"].endswith("cache_control.ttl")
    assert "give seconds above 0, or one of '5m' and '1h'" in error["message"]


class Picky(TextModel):
    """A text model whose template accepts only conversations that end with one of `last_roles`."""

    def __init__(self, text: TextModel, last_roles: set[str]) -> None:
        self.__dict__.update(text.__dict__)
        self.last_roles = last_roles

    async def encode_chat(self, chat: TemplateInput, **options: Any) -> TokenIds:
        if chat.messages[-1]["role"] not in self.last_roles:
            raise TemplateRefusal("no user query", param="messages")
        return await super().encode_chat(chat, **options)


async def test_a_template_that_refuses_the_cut_is_given_a_question(text_model: TextModel):
    """System prompts are the most common thing to pin, and some templates do not render one alone."""
    chat = TemplateInput([SYSTEM, USER])
    whole = text_model.encode_chat_now(chat)

    [plain] = await requested(text_model, MARKED, chat, whole, NO_SENDER, RouterSettings())
    [asked] = await requested(Picky(text_model, {"user"}), MARKED, chat, whole, NO_SENDER, RouterSettings())

    assert SYSTEM["content"] in text_model.decode(whole[: asked.num_tokens])
    assert plain.num_tokens <= asked.num_tokens < len(whole)


async def test_a_template_that_cannot_be_cut_is_said_by_field(text_model: TextModel):
    """The error names the field, so that the caller can mark a later message."""
    chat = TemplateInput([SYSTEM, USER])
    whole = text_model.encode_chat_now(chat)

    with pytest.raises(InvalidRequest, match="mark a later message") as caught:
        await requested(Picky(text_model, {"tool"}), MARKED, chat, whole, NO_SENDER, RouterSettings())
    assert caught.value.param == "messages[0].cache_control"


# --- keys and resets -----------------------------------------------------------------------------------------------


@pytest.fixture
async def guarded(settings, backend: FakeBackend, text_model: TextModel):
    """A client of a server with two API keys."""
    tenants = tenants_of({"keys": [entry("ann", "ann"), entry("root", "root", admin=True)]})
    front = Front(settings, backend, RouterMetrics(), texts=LoadedText(text_model), tenants=tenants)
    async with serving(front) as http:
        yield http


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_with_a_keys_file_probes_need_no_key(guarded: httpx.AsyncClient):
    """Load balancers, Prometheus and `homing status` have no key."""
    statuses = [(await guarded.get(path)).status_code for path in ("/health", "/ready", "/metrics", "/cluster")]

    assert statuses == [200, 200, 200, 200]


async def test_a_known_key_is_served(guarded: httpx.AsyncClient, backend: FakeBackend):
    """Its requests get the tenant's salt."""
    response = await guarded.post(CHAT, json={"messages": [USER]}, headers=bearer("ann"))

    assert response.status_code == 200
    assert len(backend.requests[0].salt) == len("tenant-") + 32


async def test_a_reset_is_an_admin_s(guarded: httpx.AsyncClient, client: httpx.AsyncClient):
    """A reset clears every tenant's cache. Without a keys file, every caller may do it."""
    refused = await guarded.post("/reset_prefix_cache", headers=bearer("ann"))
    done = await guarded.post("/reset_prefix_cache", headers=bearer("root"))

    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_allowed")
    assert (done.status_code, done.json()) == (200, {"status": "ok", "replicas": ["r0"]})
    assert (await client.post("/reset_prefix_cache")).status_code == 200


async def test_a_reset_in_use_is_a_conflict(client: httpx.AsyncClient, backend: FakeBackend, limits: ModelLimits):
    """On 409, benchmarks retry; after a 200 they would assume an empty cache."""
    backend.refusal = CacheInUse("2 requests are running: reset when they are over")
    response = await client.post("/reset_prefix_cache")

    assert (response.status_code, response.json()["error"]["code"]) == (409, "cache_in_use")
