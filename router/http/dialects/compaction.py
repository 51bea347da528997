"""The dialect of POST /v1/responses/compact: a conversation in, its user's messages and a summary of the rest out.

The model writes the summary, as the answer to one more message: so everything before that message may be cached. A
compaction item carries the summary in `encrypted_content`, in Base64 and not encrypted, because the server keeps no
state and the client may read its own conversation. `responses.py` reads the item when it comes back.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec

from ...errors import RequestFailed
from ..front import Served
from ..generation import RunningChoice
from ..protocol.exchange import GenerationSummary
from .bounds import SMALL_BYTES, Name, Rendered, Tools, Unread, at_most
from .dialect import Dialect
from .long_json import Steps, pieces_of
from .responses import (
    ReasoningOptions,
    ResponsesBody,
    ResponsesBuilder,
    ResponseUsage,
    compaction_item,
    items_of,
    job,
    shown_item,
    unknown,
    unused,
)
from .schema import PositiveCount, Unused

#: The message that asks for the summary.
ASK = (
    "Summarize this conversation for somebody who will continue it without having seen it: what is to be done, what "
    "has been done and found out, which files, names and values matter, and what comes next. Write only the summary."
)


class CompactBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The request body. With the tools and the reasoning of the conversation, most of its prompt is cached."""

    model: Name | None = None
    input: Rendered[str | list[dict[str, Any]]] | None = None
    instructions: Rendered[str] | None = None
    previous_response_id: Name | None = None
    tools: Tools | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Annotated[ReasoningOptions | None, at_most(SMALL_BYTES)] = None
    max_output_tokens: PositiveCount | None = None
    prompt_cache_key: Unread = None
    prompt_cache_options: Unread = None
    prompt_cache_retention: Unread = None
    service_tier: Unread = None
    image: Unread = None

    UNUSED = Unused("image parallel_tool_calls")

    def as_response(self) -> ResponsesBody:
        """The conversation as the body of a response, not yet asked for a summary."""
        return ResponsesBody(
            model=self.model,
            input=[] if self.input is None else self.input,
            instructions=self.instructions,
            previous_response_id=self.previous_response_id,
            tools=self.tools,
            reasoning=self.reasoning,
            max_output_tokens=self.max_output_tokens,
            prompt_cache_key=self.prompt_cache_key,
            prompt_cache_options=self.prompt_cache_options,
            prompt_cache_retention=self.prompt_cache_retention,
            service_tier=self.service_tier,
        )


class CompactedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A compacted conversation: all messages of the user, followed by a compaction item."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[dict[str, Any]]
    usage: ResponseUsage | None


def unknown_in(body: CompactBody) -> Iterator[tuple[str, str]]:
    """Unknown keys of input items and tools."""
    return unknown(body.as_response())


def unused_in(body: CompactBody) -> Iterator[str]:
    """What is set although nothing reads it."""
    yield from body.UNUSED.set_in(body)
    yield from unused(body.as_response())


def user_messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """The messages of the user in a conversation."""
    return [each for each in items_of(body) if each.get("role") == "user" and each.get("type", "message") == "message"]


class CompactionBuilder(ResponsesBuilder):
    """Builds the body of a compacted conversation; there is no stream."""

    def __init__(self, served: Served, body: ResponsesBody, response_id: str, created: int) -> None:
        super().__init__(served, body, response_id, created)
        self._users = user_messages(body)[:-1]  # the last one asks for the summary

    def whole(self, choices: Sequence[RunningChoice], summary: GenerationSummary) -> Steps[list[bytes]]:
        yield from super().whole(choices, summary)
        written = "".join([block.text for block in self._blocks if block.kind == "text"]).strip()
        if not written:
            raise RequestFailed("the model wrote no summary of the conversation")
        made = self._finished(choices[0], summary)
        shown = [shown_item(item, f"{self._id}{index:04x}") for index, item in enumerate(self._users)]
        return pieces_of(
            CompactedResponse(
                id=made.id,
                created_at=made.created_at,
                output=[*shown, compaction_item(f"cmp_{self._id}", written)],
                usage=made.usage,
            )
        )


DECODER = msgspec.json.Decoder(CompactBody)
COMPACTION = Dialect(msgspec.json.Decoder(ResponsesBody), job, CompactionBuilder)
