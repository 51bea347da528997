"""POST /v1/chat/completions: from body to job, and from choices to OpenAI's chat shapes."""

from collections.abc import Sequence

from msgspec import UNSET

from ...text.answer import TextDelta
from ...text.logprobs import ChatLogprobs, TokenAt, chat_logprobs
from ..front import Front, Served
from . import pins, validate
from .answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    Usage,
)
from .generation import Choice, Job, Prompt
from .schema import ChatBody
from .sse import ChunkWriter


async def job(front: Front, served: Served, body: ChatBody, salt: bytes) -> Job:
    """What `body` asks for. Raises InvalidRequest and its kin, each naming the field."""
    validate.check_chat(body)
    places, chat = pins.marks(body.messages, front.settings), validate.chat(body)
    token_ids = await served.text.encode_chat(chat, tenant=salt)
    wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    limit_param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    room = validate.room_for_answer(len(token_ids), wanted, served.limits, param="messages", limit_param=limit_param)
    kept = await pins.chat_pins(served.text, chat, places, token_ids, salt) if places else ()
    if body.cache_control is not None:
        kept = (*kept, *pins.whole_prompt(body.cache_control, front.settings, token_ids))
    limit = wanted if wanted is not None else min(front.settings.default_max_tokens, room)
    return Job(
        served=served,
        prompts=[Prompt(token_ids, None, kept)],
        choices_per_prompt=validate.choices_per_prompt(body, 1, front.settings.max_choices),
        sampling=validate.sampling(
            body,
            served.limits,
            max_tokens=limit,
            seed=front.random_bits(64) if body.seed is None else body.seed,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        ),
        stops=validate.stop_strings(body),
        priority=body.priority or 0,
        timeout_s=body.timeout,
        tokens_per_delta=validate.tokens_per_delta(body),
    )


class ChatShape:
    """What all parts of one chat answer have in common."""

    def __init__(self, served: Served, body: ChatBody, answer_id: str, created: int) -> None:
        self.id = f"chatcmpl-{answer_id}"
        self.created = created
        self.model = served.limits.name
        self._piece_of = served.text.piece
        self._logprobs = bool(body.logprobs)
        self._top = body.top_logprobs or 0

    def logprobs(self, tokens: Sequence[TokenAt]) -> ChatLogprobs | None:
        """Logprobs of these tokens; None where none were asked for."""
        return chat_logprobs(tokens, self._top, self._piece_of) if self._logprobs else None

    def whole(self, choices: Sequence[Choice], counts: Usage) -> object:
        """The body of an answer that is not streamed."""
        told = [
            ChatChoice(each.index, ChatMessage(each.text), each.ending or "stop", self.logprobs(each.tokens))
            for each in choices
        ]
        return ChatCompletion(id=self.id, created=self.created, model=self.model, choices=told, usage=counts)


class ChatChunks(ChunkWriter):
    """Chunks of a streamed chat. The role stands on a choice's first chunk."""

    def __init__(self, shape: ChatShape, body: ChatBody) -> None:
        super().__init__(body.stream_options)
        self._shape = shape

    def chunk(self, choice: Choice, shown: TextDelta, counts: Usage | None, *, first: bool) -> object:
        """See `ChunkWriter.chunk`."""
        shape = self._shape
        delta = ChatDelta(shown.text if shown.text or first else UNSET, "assistant" if first else UNSET)
        told = ChatChunkChoice(choice.index, delta, shown.ending, shape.logprobs(shown.tokens))
        usage = counts if counts is not None else (None if self.include_usage else UNSET)
        return ChatChunk(id=shape.id, created=shape.created, model=shape.model, choices=[told], usage=usage)

    def last(self, counts: Usage) -> object:
        """See `ChunkWriter.last`."""
        shape = self._shape
        return ChatChunk(id=shape.id, created=shape.created, model=shape.model, choices=[], usage=counts)
