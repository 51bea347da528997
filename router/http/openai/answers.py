"""Bodies of answers in OpenAI's shapes. Types alone, encoded by msgspec.

A field that OpenAI's schema does not allow to be null is absent where there is nothing to say (`UNSET`).
"""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from ...text.logprobs import ChatLogprobs, CompletionLogprobs

FinishReason = Literal["stop", "length"]
ENCODER = msgspec.json.Encoder()


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Where the prompt's KV came from."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request; prompts count once, however many choices they have."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    """The usage object of these counts."""
    return Usage(
        prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, PromptTokensDetails(cached_tokens)
    )


class ChatMessage(msgspec.Struct, frozen=True):
    """The assistant's message."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer of a chat."""

    index: int
    message: ChatMessage
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole chat answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(msgspec.Struct, frozen=True):
    """What a chunk adds; the first one of a choice names the role."""

    content: str | UnsetType = UNSET
    role: Literal["assistant"] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """One choice's part of a chunk."""

    index: int
    delta: ChatDelta
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletionChoice(msgspec.Struct, frozen=True):
    """One answer of a completion, or a chunk's part of it (only there the finish reason may be null)."""

    index: int
    text: str
    finish_reason: FinishReason | None = None
    logprobs: CompletionLogprobs | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole completion, or one event of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One served model; `max_model_len` is vLLM's addition."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "homing"
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True):
    """GET /v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class Tokenized(msgspec.Struct, frozen=True):
    """POST /tokenize, in vLLM's shape."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True):
    """POST /detokenize, in vLLM's shape."""

    prompt: str
