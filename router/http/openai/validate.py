"""From a decoded body to what is generated: limits that take two fields, the model or the settings. Pure.

Every refusal names the field. Knows no HTTP and no streams.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ....replica.messages import ModelLimits, SamplingParams
from ...errors import ContextTooLong, InvalidRequest, PromptTooLong
from ...text.template import Chat, Message
from ...text.tokenizer import TokenIds
from .schema import Body, ChatBody, CompletionBody, MessageBody, TokenizeBody

#: Tokens that come together for an answer that is sent whole; a replica that dies takes so many along, at most, which
#: the next one makes again.
WHOLE_ANSWER_TOKENS = 32
SEED_MASK = 2**64 - 1


def check_token_ids(token_ids: Sequence[int], limits: ModelLimits, param: str) -> None:
    """Refuse ids that the model does not have."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < limits.vocab_size:
        raise _no_such_token(limits.vocab_size, param)


def _no_such_token(vocab_size: int, param: str) -> InvalidRequest:
    return InvalidRequest(f"field {param!r}: token ids go from 0 to {vocab_size - 1}", param=param)


def prompts(field: str | list[Any], vocab_size: int) -> list[str] | list[TokenIds]:
    """The separate prompts of a completion: all texts, or all ids below `vocab_size`."""
    if isinstance(field, str):
        return [field]
    if not field:
        raise InvalidRequest("field 'prompt': at least one prompt or token id is needed", param="prompt")
    if isinstance(field[0], int):
        return [_prompt_ids(field, vocab_size)]
    if all(isinstance(each, str) for each in field):
        return field
    if all(isinstance(each, list) for each in field):
        return [_prompt_ids(each, vocab_size) for each in field]
    raise _mixed()


def _prompt_ids(ids: list[Any], vocab_size: int) -> TokenIds:
    """As an array, which takes a tenth of a list's memory and checks its elements as it is made."""
    try:
        made = array("I", ids)
    except TypeError:
        raise _mixed() from None
    except OverflowError:
        raise _no_such_token(vocab_size, "prompt") from None
    if ids and max(ids) >= vocab_size:
        raise _no_such_token(vocab_size, "prompt")
    return made


def _mixed() -> InvalidRequest:
    return InvalidRequest("field 'prompt': texts and token ids cannot be mixed in one list", param="prompt")


def stop_strings(body: Body) -> tuple[str, ...]:
    """Stop strings; an empty one is no stop string."""
    if isinstance(body.stop, str):
        return (body.stop,) if body.stop else ()
    return tuple(body.stop or ())


def choices_per_prompt(body: Body, prompt_count: int, most: int) -> int:
    """What is generated for each prompt: `n`, or `best_of`; within the setting `max_choices` for all together."""
    best_of = body.best_of if isinstance(body, CompletionBody) else None
    count, param = (body.n or 1, "n") if best_of is None else (best_of, "best_of")
    if count * prompt_count > most:
        raise InvalidRequest(f"field {param!r}: at most {most} choices in one request", param=param)
    return count


def room_for_answer(
    prompt_tokens: int, wanted: int | None, limits: ModelLimits, *, param: str, limit_param: str
) -> int:
    """Tokens that may be generated at all. Raises PromptTooLong and ContextTooLong."""
    room = limits.max_model_len - prompt_tokens
    if room < 1:
        raise PromptTooLong(prompt_tokens, limits.max_model_len, param=param)
    if wanted is not None and wanted > room:
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens and {wanted} more are asked for; "
            f"this model's context is {limits.max_model_len} tokens",
            param=limit_param,
        )
    return room


def sampling(body: Body, limits: ModelLimits, *, max_tokens: int, seed: int, logprobs: int | None) -> SamplingParams:
    """The parameters that all choices share, except the seed."""
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"field 'min_tokens': {min_tokens} exceeds the output limit of {max_tokens}", param="min_tokens"
        )
    if body.stop_token_ids:
        check_token_ids(body.stop_token_ids, limits, "stop_token_ids")
    if body.logit_bias:
        check_token_ids(list(body.logit_bias), limits, "logit_bias")
    temperature, top_p, top_k, repetition = body.temperature, body.top_p, body.top_k, body.repetition_penalty
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed & SEED_MASK,
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=0 if top_k is None or top_k < 0 else top_k,
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if repetition is None else repetition,
        min_tokens=min_tokens,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logit_bias=body.logit_bias or {},
        logprobs=logprobs,
    )


def tokens_per_delta(body: Body) -> int:
    """Tokens that may come together: not those of a stream, nor those in which a stop string is looked for."""
    return 1 if body.stream or body.stop else WHOLE_ANSWER_TOKENS


def choice_seed(shared: SamplingParams, index: int) -> SamplingParams:
    """The parameters of choice `index`: it draws with seed + index."""
    return msgspec.structs.replace(shared, seed=(shared.seed + index) & SEED_MASK) if index else shared


def check_completion(body: CompletionBody) -> None:
    """Refuse what completions do not do here."""
    _check_best_of(body)
    if body.suffix:
        raise InvalidRequest("field 'suffix': insertion is not supported", param="suffix")
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("field 'max_tokens': 0 makes sense only with 'echo'", param="max_tokens")
    if body.echo and body.stream and body.logprobs is not None:
        raise InvalidRequest("field 'echo': with 'logprobs' it cannot be streamed", param="echo")


def _check_best_of(body: CompletionBody) -> None:
    kept = body.n or 1
    if body.best_of is None or body.best_of == kept:
        return
    if body.best_of < kept:
        raise InvalidRequest(f"field 'best_of': expected at least n, which is {kept}", param="best_of")
    if body.stream:
        raise InvalidRequest(
            "field 'best_of': which answers are best is known at the end only: not streamed", param="best_of"
        )


def check_chat(body: ChatBody) -> None:
    """Refuse what chats do not do here."""
    if body.max_tokens == 0:
        raise InvalidRequest("field 'max_tokens': expected int >= 1", param="max_tokens")
    if body.response_format and body.response_format.type != "text":
        raise InvalidRequest(
            "field 'response_format': only {'type': 'text'} is supported, structured output is not yet",
            param="response_format",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("field 'top_logprobs': needs 'logprobs': true", param="top_logprobs")
    if body.tool_choice not in (None, "auto", "none"):
        raise InvalidRequest("field 'tool_choice': only 'auto' and 'none' are supported", param="tool_choice")


def chat(body: ChatBody | TokenizeBody) -> Chat:
    """What the chat template is given. `tool_choice: none` hides the tools from it."""
    messages = [template_message(each, index) for index, each in enumerate(body.messages or ())]
    hidden = isinstance(body, ChatBody) and body.tool_choice == "none"
    continues = bool(body.continue_final_message)
    wants_prompt = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if continues and wants_prompt:
        raise InvalidRequest(
            "field 'continue_final_message': excludes 'add_generation_prompt'", param="continue_final_message"
        )
    return Chat(
        messages,
        tools=None if hidden else body.tools,
        add_generation_prompt=wants_prompt,
        continue_final_message=continues,
        template_arguments=template_arguments(body.chat_template_kwargs or {}),
    )


#: Arguments of transformers' `apply_chat_template` that a caller must not reach through the template's.
_RESERVED = frozenset(
    "self conversation messages tools documents chat_template add_generation_prompt continue_final_message tokenize "
    "padding truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)


def template_arguments(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Extra variables of the template; those that would change what is called are refused."""
    if reserved := _RESERVED.intersection(given):
        name = f"chat_template_kwargs.{min(reserved)}"
        raise InvalidRequest(f"field {name!r} may not be set", param=name)
    return given


def template_message(message: MessageBody, index: int) -> Message:
    """A message as templates read it: content is one text, arguments of tool calls are objects."""
    content = message.content
    if isinstance(content, list):
        content = text_of(content, f"messages[{index}].content")
    made: Message = {"role": message.role, "content": content}
    if message.name is not None:
        made["name"] = message.name
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        made["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        made["tool_calls"] = [_tool_call(call, f"messages[{index}].tool_calls") for call in message.tool_calls]
    return made


def text_of(content: str | list[dict[str, Any]] | None, param: str) -> str | None:
    """The text of a content; parts are joined without anything between, as templates that know parts do."""
    if content is None or isinstance(content, str):
        return content
    return "".join(_part_text(part, f"{param}[{index}]") for index, part in enumerate(content))


def _part_text(part: Mapping[str, Any], param: str) -> str:
    if part.get("type") != "text":
        raise InvalidRequest(f"field '{param}.type': only text parts are supported", param=f"{param}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"field '{param}.text': expected str", param=f"{param}.text")
    return text


def _tool_call(call: Mapping[str, Any], param: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"field {param!r}: each call needs a 'function'", param=param)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments.encode() or b"{}")
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"field {param!r}: 'arguments' is not valid JSON", param=param) from error
    return {**call, "function": {**function, "arguments": arguments}}
