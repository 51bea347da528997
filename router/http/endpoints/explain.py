"""Explains the routing of a request body, and where the prompts of two bodies differ. Generates nothing."""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from ....kvcache.hashing import salt_text, token_bytes
from ...backend import Explanation
from ..caller import Caller
from ..departures import Departure, between, common_tokens, from_longest
from ..dialects import messages
from ..dialects.bounds import costs
from ..dialects.chat import CHAT, ChatBody
from ..dialects.completions import COMPLETION, CompletionBody
from ..dialects.dialect import Dialect
from ..dialects.responses import RESPONSES, ResponsesBody
from ..front import Front
from ..generation import Job, generation_request
from ..protocol.exchange import Exchange
from .endpoint import Endpoint, charged, decoded, respond
from .generate import decoded_in
from .stored_responses import put_history


class _ToolKind(msgspec.Struct):
    """The field that distinguishes a Messages tool from a chat tool."""

    input_schema: msgspec.Raw | UnsetType = UNSET


class _Kind(msgspec.Struct):
    """The fields that identify a body's dialect. Messages without a system prompt and tools are read as a chat."""

    messages: msgspec.Raw | UnsetType = UNSET
    input: msgspec.Raw | UnsetType = UNSET
    system: msgspec.Raw | UnsetType = UNSET
    tools: list[_ToolKind] | None = None

    def dialect(self) -> Dialect[Any]:
        if self.messages is UNSET:
            return COMPLETION if self.input is UNSET else RESPONSES
        anthropic = self.system is not UNSET or any(tool.input_schema is not UNSET for tool in self.tools or ())
        return messages.MESSAGES if anthropic else CHAT


class Explained(Explanation, frozen=True, kw_only=True):
    """A decision, the session and agents that the client named, and where the prompt departs from known prefixes."""

    session: str | None = None
    agent: str | None = None  #: within the session
    parent: str | None = None  #: the agent that started it
    cache_salt: str = ""  #: what distinguishes the caller's blocks on the event stream from others of the same tokens
    #: from the longest known prefix, shared with the agent's last prompt in the session or held by a replica
    departure: Departure | None = None


class DiffBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /explain/diff: two request bodies, of any dialects."""

    a: Annotated[msgspec.Raw, costs("prompt")]
    b: Annotated[msgspec.Raw, costs("prompt")]


class Diff(msgspec.Struct, frozen=True):
    """The lengths of two prompts and of their common prefix in tokens, and where the second departs from the first."""

    tokens: tuple[int, int]
    common_tokens: int
    departure: Departure | None  #: None: one prompt is a prefix of the other


_DIFF = msgspec.json.Decoder(DiffBody)
_KIND = msgspec.json.Decoder(_Kind)


async def explain(front: Front, exchange: Exchange, caller: Caller) -> None:
    """Report the routing decision for a request of any dialect; nothing is generated."""
    job, salt = await _job(front, caller, exchange, exchange.request.body)
    caller.charge([len(prompt.token_ids) for prompt in job.prompts])
    request = generation_request(job, job.prompts[0], caller)
    found = job.served.backend.explain(request)
    before, departure = None, None
    if request.session is not None:
        before = front.session_prompts.get((salt, request.session, caller.agent))
    if found.missing is not None:
        missing = front.shown(found.missing.moved(front.clock_offset_s), admin=caller.tenant.admin)
        found = msgspec.structs.replace(found, missing=missing)
    held = max([max(each.held_blocks, each.expected_blocks) for each in found.replicas], default=0)
    if before is not None or held < found.prompt_blocks:
        new = request.token_ids, job.conversation
        departure = from_longest(before, new, held * found.block_size, job.served.text)
    respond(
        exchange,
        Explained(
            **msgspec.structs.asdict(found),
            session=request.session,
            cache_salt=salt_text(salt),
            agent=caller.agent,
            parent=caller.parent,
            departure=departure,
        ),
    )


async def explain_diff(front: Front, exchange: Exchange, caller: Caller) -> None:
    """Compare the prompts of two bodies; nothing is generated."""
    body = await decoded(front, caller, exchange, _DIFF)
    jobs = [(await _job(front, caller, exchange, bytes(each)))[0] for each in (body.a, body.b)]
    caller.charge([len(job.prompts[0].token_ids) for job in jobs])
    one, other = [(token_bytes(job.prompts[0].token_ids), job.conversation) for job in jobs]
    lengths = len(one[0]) // 4, len(other[0]) // 4
    respond(exchange, Diff(lengths, common_tokens(one[0], other[0]), between(one, other, jobs[1].served.text)))


async def _job(front: Front, caller: Caller, exchange: Exchange, data: bytes) -> tuple[Job, bytes]:
    """The job that a body of any dialect requests, and the salt of its cached blocks."""
    dialect = (await decoded(front, caller, exchange, _KIND, part=data)).dialect()
    body = await decoded_in(dialect, front, caller, exchange, data)
    if dialect is RESPONSES:
        await put_history(front, caller, body)
    sender = caller.sender(body.cache_salt)
    return await dialect.job(front, await front.served(body.model), body, sender), sender.salt


ENDPOINTS = (
    Endpoint(
        "POST",
        "/explain",
        charged(explain),
        "the routing decision for a request body",
        Explained,
        (CompletionBody, ChatBody, ResponsesBody, messages.MessagesBody),
    ),
    Endpoint(
        "POST", "/explain/diff", charged(explain_diff), "where the prompts of two bodies differ", Diff, (DiffBody,)
    ),
)
