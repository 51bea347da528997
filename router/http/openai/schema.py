"""Bodies of requests, as types. Unknown fields and wrong types are refused by name; explicit nulls count as absent.

Ranges that concern one field alone stand here; what takes two fields, the model or the settings is `validate.py`'s.
Fields that OpenAI's clients send and that change nothing here are listed as ignored; docs/api.md names them.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

NonNegative = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
StopString = Annotated[str, Meta(min_length=1)]
#: Numbers that go to replicas as they are: larger ones than 64 bits have no place in their messages.
Number = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]

#: A prompt as text or token ids, or several of them; `validate.prompts` tells which (one array type per union is
#: what msgspec can decode).
PromptField = str | list[str | int | list[int]]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream tells beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  #: ignored


class CacheControl(msgspec.Struct, forbid_unknown_fields=True):
    """Keep the prompt up to here; `ttl` in seconds, or in Anthropic's words."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | Annotated[float, Meta(gt=0)] | None = None


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that completions and chats share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Positive | None = None
    max_tokens: NonNegative | None = None
    min_tokens: NonNegative | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Fraction | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[StopString], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[NonNegative], Meta(max_length=256)] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[int, Bias] | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    cache_control: CacheControl | None = None
    priority: Number | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None
    # Ignored: they concern billing, storage or models of other kinds.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None


class CompletionBody(Body, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: PromptField
    best_of: Positive | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    suffix: str | None = None


class MessageBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One message; content is text, or a list of text parts."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    cache_control: CacheControl | None = None
    # Ignored: parts of OpenAI's answers that clients send back.
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None


class ResponseFormat(msgspec.Struct):
    """Only plain text is generated."""

    type: str


class ChatBody(Body, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[MessageBody], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # Ignored.
    parallel_tool_calls: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize, in vLLM's shape: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[MessageBody], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize, in vLLM's shape."""

    model: str | None = None
    tokens: list[NonNegative]


class ResetBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /reset_prefix_cache: of which model; without one, of all."""

    model: str | None = None


_NOT_YET = {
    "structured output": "structured_outputs guided_json guided_regex guided_choice guided_grammar "
    "guided_decoding_backend guided_whitespace_pattern json_schema regex ebnf grammar structural_tag",
    "calling functions": "functions function_call",
    "a LoRA adapter": "lora lora_name lora_path lora_request adapter adapter_id",
    "speculative decoding": "prediction speculative_config speculative_model num_speculative_tokens",
    "anything but text": "modalities audio images image_data multi_modal_data mm_processor_kwargs",
    "prompts as embeddings": "prompt_embeds",
    "searching the web": "web_search_options",
    "beam search": "use_beam_search",
}
#: What is wanted by fields that other servers know and this one does not yet.
NOT_YET = {name: what for what, names in _NOT_YET.items() for name in names.split()}

#: What fields take whose decoder names no choices, by the end of their path.
EXPECTED = {
    "cache_control.ttl": "give seconds above 0, or one of '5m' and '1h'",
    "cache_control.type": "the only one is 'ephemeral'",
    "role": "one of system, developer, user, assistant, tool and function",
}

COMPLETION = msgspec.json.Decoder(CompletionBody)
CHAT = msgspec.json.Decoder(ChatBody)
TOKENIZE = msgspec.json.Decoder(TokenizeBody)
DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)
RESET = msgspec.json.Decoder(ResetBody)
