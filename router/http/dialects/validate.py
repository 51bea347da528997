"""Makes a `Job` from a decoded body and its prompts; checks limits that involve two fields, the model or the settings.

Pure, except for encoding and the check of constraints. Errors name the field. Checks of one dialect are in its module.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import msgspec

from ....replica.messages import Constraint, SamplingParams
from ...config import RouterSettings
from ...errors import ContextTooLong, InvalidRequest, PromptTooLong
from ...text.constraints import FIELDS, FieldConstraint, requested_constraint, tool_calls
from ...text.conversation import CacheMark, Conversation
from ...text.encoder import TokenIds
from ...text.encoder_threads import Sender
from ...text.parsers.guided import shape_of
from ...text.parsers.parser import AnswerParser
from ...text.template import TemplateInput
from ..body_cost import MAX_COST, running_costs
from ..body_reader import UNMEASURED_BYTES
from ..caller import bounded_session
from ..front import Front, Served
from ..generation import SEED_MASK, EncodedPrompt, Job, PinRequest
from . import pins
from .answer_values import affordable_tokens
from .schema import Body, CacheControl

log = logging.getLogger(__name__)

_OUTPUT_FIELDS = [name for name in FIELDS if name != "response_format"]
_output_fields = attrgetter(*_OUTPUT_FIELDS)
_NO_OUTPUT_FIELDS = (None,) * len(_OUTPUT_FIELDS)
_TOKEN_FIELDS = (
    "prompt_logprobs allowed_token_ids bad_words logprob_token_ids skip_special_tokens include_stop_str_in_output "
    "no_stop_trim return_token_ids"
).split()
#: Fields of sampling that external engines get with token ids, if the client set them; what else it set is done here.
_ENGINE_FIELDS = (
    "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed min_tokens "
    "stop_token_ids ignore_eos logit_bias allowed_token_ids logprob_token_ids"
).split()
_token_fields = attrgetter(*_TOKEN_FIELDS)
_NO_TOKEN_FIELDS = (None,) * len(_TOKEN_FIELDS)
#: Fields that list tokens, and the most that all choices of a request list: a step reads them for each choice.
_LISTS = ("logit_bias", "allowed_token_ids", "stop_token_ids", "bad_words", "logprob_token_ids")
MAX_LISTED = 128 * 1024
_lists = attrgetter(*_LISTS)
_NO_LISTS = (None,) * len(_LISTS)
#: Tokens of a prompt's end that are searched for an opener of reasoning; the longest has fewer, with trailing space.
TAIL_TOKENS = 16
#: Tokens delivered together if the response is not streamed. When a replica dies, at most this many are lost and
#: generated again.
WHOLE_RESPONSE_TOKENS = 32


async def job(
    front: Front,
    served: Served,
    body: Body,
    sender: Sender,
    prompts: Sequence[EncodedPrompt],
    *,
    prompt_param: str,
    wanted: int | None,
    wanted_param: str = "max_tokens",
    fallback_max_tokens: int | None = None,
    best_of: int | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    constraint: Constraint | None = None,
    conversation: Conversation | None = None,
    session: str | None = None,
) -> Job:
    """The job that the body requests for these prompts.

    `wanted`: the requested output limit, from the field `wanted_param`; 0 generates a token that is not shown.
    `fallback_max_tokens`: the limit if neither body nor settings have one; None: the model's context.
    `best_of`: choices per prompt instead of `n`. `logprobs`: alternatives per token; None: no logprobs at all.
    `session`: as the body names it. Raises InvalidRequest, PromptTooLong and ContextTooLong.
    """
    settings = front.settings
    count, count_param = (body.n or 1, "n") if best_of is None else (best_of, "best_of")
    check_choices(settings, count, len(prompts), count_param)
    _check_listed(body, count * len(prompts))
    options = body.stream_options
    if options is not None and not body.stream and (options.include_usage or options.continuous_usage_stats):
        raise InvalidRequest.field("stream_options", "is only allowed with 'stream': true")
    longest, context = max([len(prompt.token_ids) for prompt in prompts]), served.limits.max_model_len
    if longest >= context:
        raise PromptTooLong(longest, context, param=prompt_param)
    if wanted is None:
        max_tokens = min(settings.default_max_tokens or fallback_max_tokens or context, context - longest)
    else:
        max_tokens = _output_limit(wanted, longest, context, wanted_param)
    stops = _stops(body)
    max_tokens = affordable_tokens(
        body,
        [len(prompt.token_ids) for prompt in prompts],
        count,
        max_tokens,
        settings.max_answer_values,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        set_by_client=wanted is not None,
    )
    made = Job(
        served=served,
        prompts=prompts,
        choices_per_prompt=count,
        sampling=_sampling(front, served, body, max_tokens, logprobs, prompt_logprobs),
        salt=sender.salt,
        stops=stops,
        priority=body.priority or 0,
        timeout_s=body.timeout,
        # Streams need each token, and a stop string must be noticed at once.
        tokens_per_delta=1 if body.stream or stops else max(1, WHOLE_RESPONSE_TOKENS // (1 + (logprobs or 0))),
        session=bounded_session(session) if session else None,
        constraint=constraint,
        conversation=conversation,
        discard=wanted == 0,
        given=_given(body) if served.backend.has_engines else {},
    )
    # One comparison for all the rare fields: a check of each alone would cost as much.
    return made if _token_fields(body) == _NO_TOKEN_FIELDS else await _with_token_fields(made, body, sender)


def _given(body: Body) -> dict[str, Any]:
    return {name: value for name in _ENGINE_FIELDS if (value := getattr(body, name)) is not None}


def _output_limit(wanted: int, prompt_tokens: int, context: int, param: str) -> int:
    """The number of tokens to generate if the body sets a limit. Raises ContextTooLong."""
    if wanted > context - prompt_tokens:
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens and the request asks for {wanted} more; "
            f"the model's context is {context} tokens",
            param=param,
        )
    return max(wanted, 1)


def _stops(body: Body) -> tuple[str, ...]:
    if not body.stop:
        return ()
    return (body.stop,) if isinstance(body.stop, str) else tuple([stop for stop in body.stop if stop])


def _sampling(
    front: Front, served: Served, body: Body, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """Sampling parameters from the body, with defaults from the model's configuration. Raises InvalidRequest."""
    defaults, top_k, min_tokens, seed = served.defaults, body.top_k, body.min_tokens or 0, body.seed
    if min_tokens > max_tokens:
        raise InvalidRequest.field("min_tokens", f"{min_tokens} exceeds the output limit of {max_tokens}")
    if body.stop_token_ids:
        check_token_ids(body.stop_token_ids, served.limits.vocab_size, "stop_token_ids")
    if body.logit_bias:
        check_token_ids(body.logit_bias, served.limits.vocab_size, "logit_bias")
    if seed is None:
        seed = front.random_bits(64)
    elif not -(2**63) <= seed < 2**64:
        raise InvalidRequest.field("seed", f"{seed} does not fit into 64 bits")
    if top_k is None:
        top_k = defaults.top_k
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed & SEED_MASK,
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        top_k=0 if top_k < 0 else top_k,
        min_p=defaults.min_p if body.min_p is None else body.min_p,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=(
            defaults.repetition_penalty if body.repetition_penalty is None else body.repetition_penalty
        ),
        min_tokens=min_tokens,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logit_bias=body.logit_bias or {},
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _check_listed(body: Body, choices: int) -> None:
    """Raise InvalidRequest if all choices together list too many tokens: each sends its lists to a replica."""
    given = _lists(body)
    if given == _NO_LISTS:
        return
    counts = [len(each or ()) for each in given]
    if sum(counts) * choices > MAX_LISTED:
        raise InvalidRequest.field(
            _LISTS[counts.index(max(counts))],
            f"{sum(counts):,} listed tokens for {choices:,} choices; the maximum is {MAX_LISTED:,} in all",
        )


def check_choices(settings: RouterSettings, count: int, prompts: int, param: str) -> None:
    """Raise InvalidRequest if `count` choices for each of `prompts` prompts are too many."""
    if count * prompts > settings.max_choices:
        raise InvalidRequest.field(param, f"at most {settings.max_choices} choices in one request")


async def _with_token_fields(job: Job, body: Body, sender: Sender) -> Job:
    """Apply the body's rare fields about single tokens to a job. Raises InvalidRequest."""
    served, sampling = job.served, job.sampling
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest.field("prompt_logprobs", "cannot be streamed")
    check_token_ids(body.allowed_token_ids or (), served.limits.vocab_size, "allowed_token_ids")
    check_token_ids(body.logprob_token_ids or (), served.limits.vocab_size, "logprob_token_ids")
    if body.logprob_token_ids and sampling.logprobs is None:
        raise InvalidRequest.field("logprob_token_ids", "requires 'logprobs'")
    return msgspec.structs.replace(
        job,
        sampling=msgspec.structs.replace(
            sampling,
            prompt_logprobs=_most(sampling.prompt_logprobs, body.prompt_logprobs),
            allowed_token_ids=tuple(body.allowed_token_ids or ()),
            bad_words=await _bad_words(served, body.bad_words, sender) if body.bad_words else (),
            logprob_token_ids=tuple(body.logprob_token_ids or ()),
        ),
        show_special=body.skip_special_tokens is False,
        show_stop=bool(body.include_stop_str_in_output or body.no_stop_trim),
        keep_tokens=bool(body.return_token_ids),
    )


async def _bad_words(served: Served, words: Sequence[str], sender: Sender) -> tuple[tuple[int, ...], ...]:
    """The token ids of each word, both at the beginning of a text and after a space."""
    spellings = [spelling for word in words for spelling in (word, f" {word.lstrip()}")]
    encoded = await served.text.encode(spellings, special_tokens=False, sender=sender.unlimited())
    return tuple(dict.fromkeys([tuple(ids) for ids in encoded if ids]))


def _most(*counts: int | None) -> int | None:
    return max([count for count in counts if count is not None], default=None)


def truncated(token_ids: TokenIds, body: Body, max_model_len: int) -> TokenIds:
    """The ids of a prompt, cut to `truncate_prompt_tokens` of them. Raises InvalidRequest."""
    wanted = body.truncate_prompt_tokens
    if wanted is None:
        return token_ids
    if wanted > max_model_len or wanted == 0:
        raise InvalidRequest.field(
            "truncate_prompt_tokens", f"{wanted} is not between 1 and the context of {max_model_len} tokens"
        )
    # Leave room for the shortest answer, which has one token.
    kept = max_model_len - 1 if wanted == -1 else wanted
    if len(token_ids) <= kept:
        return token_ids
    if body.cache_control is not None:
        raise InvalidRequest.field("truncate_prompt_tokens", "cannot be combined with 'cache_control'")
    return token_ids[:kept] if body.truncation_side == "right" else token_ids[-kept:]


async def conversation_job(
    front: Front,
    served: Served,
    body: Body,
    sender: Sender,
    make: Callable[[], Conversation],
    *,
    prompt_param: str,
    wanted: int | None,
    wanted_param: str,
    logprobs: int | None = None,
    clamp: bool = False,
    token_ids: "TokenIds | None" = None,
) -> Job:
    """The job for a body with a conversation, which `make` builds, in a thread if the body is long.

    `clamp`: lower an output limit to what the model's context leaves. `token_ids`: the prompt, if it is not rendered
    here. Raises the errors of `job`, and TemplateRefusal.
    """
    text = served.text
    if body.truncate_prompt_tokens is not None:
        sender = sender.unlimited()
    if token_ids is None:
        conversation, rendered, token_ids = await _encoded(served, body, sender, make, prompt_param)
    else:
        conversation = await text.prepare(make, sender)
        rendered, token_ids = conversation.template_input(), truncated(token_ids, body, served.limits.max_model_len)
    kept: tuple[PinRequest, ...] = ()
    if conversation.mark is not None or conversation.marks():
        kept = await pins.requested(text, conversation, rendered, token_ids, sender, front.settings)
    if clamp and wanted is not None:
        wanted = min(wanted, max(1, served.limits.max_model_len - len(token_ids)))
    reasoning, tail = served.reasoning_family, ""
    if reasoning is not None:
        tail = text.decode(token_ids[-TAIL_TOKENS:])
    opened = reasoning is not None and reasoning.leaves_open(tail)
    guided, choice = None, conversation.tool_choice
    if (
        conversation.tools
        or conversation.output
        or choice.mode == "required"
        or choice.allowed
        or _output_fields(body) != _NO_OUTPUT_FIELDS
    ):
        guided = await _requested_guidance(front.settings, served, body, conversation, sender, tail)
    found = await job(
        front,
        served,
        body,
        sender,
        [EncodedPrompt(token_ids, None, kept)],
        prompt_param=prompt_param,
        wanted=wanted,
        wanted_param=wanted_param,
        logprobs=logprobs,
        constraint=None if guided is None else await text.constraints.check(guided, sender.tenant),
        conversation=conversation,
        session=conversation.session,
    )
    parsing = _parsing(front, served, conversation, opened=opened)
    if parsing is None:
        return found
    parser, markers = parsing
    return msgspec.structs.replace(found, parser=parser, markers=markers)


async def _encoded(
    served: Served, body: Body, sender: Sender, make: Callable[[], Conversation], prompt_param: str
) -> tuple[Conversation, TemplateInput, TokenIds]:
    """The conversation, its template input, and its token ids, truncated if the body says so."""
    made: list[tuple[Conversation, TemplateInput]] = []

    def render() -> TemplateInput:
        conversation = make()
        made.append((conversation, conversation.template_input()))
        return made[0][1]

    most = served.limits.max_model_len
    context = most if body.truncate_prompt_tokens is None else None
    token_ids = await served.text.encode_chat(render, sender=sender, context=context, param=prompt_param)
    [(conversation, rendered)] = made
    return conversation, rendered, truncated(token_ids, body, most)


async def _requested_guidance(
    settings: RouterSettings, served: Served, body: Body, conversation: Conversation, sender: Sender, tail: str
) -> FieldConstraint | None:
    """The constraint on the answer from output format and tools. `tail`: the prompt's end. Raises InvalidRequest."""
    text = served.text
    asked = await requested_output(settings, served, body, sender, conversation.output, conversation.output_at)
    calls: FieldConstraint | None = None
    if _asks_for_calls(conversation):
        calls = await text.prepare(lambda: _calls(settings, served, conversation, asked), sender)
    if asked is not None and conversation.tools:
        await text.constraints.check(asked, sender.tenant)  # so that an error names its field
        if calls is None:
            calls = await _calls_besides(settings, served, conversation, asked, sender)
    return _guided(served, conversation, asked, calls, tail)


def _parsing(
    front: Front, served: Served, conversation: Conversation, *, opened: bool
) -> tuple[Callable[[], AnswerParser], Sequence[str]] | None:
    """A function that makes a choice's parser, and the special tokens that the parser needs; None: answers are text.

    `opened`: the answer begins inside reasoning.
    """
    calls, reasoning, choice = served.tool_family, served.reasoning_family, conversation.tool_choice
    shown = conversation.callable_tools() if calls is not None and conversation.tools else ()
    if reasoning is None and not shown:
        return None
    tools = {tool.name: tool.parameters for tool in shown}

    def parser() -> AnswerParser:
        base = front.random_bits(95)
        return AnswerParser(
            calls,
            reasoning,
            tools,
            lambda index: f"call_{base + index:024x}",
            starts_in_reasoning=opened,
            parallel=choice.parallel,
            unknown_names=not (front.settings.unknown_calls_as_text or choice.allowed),
        )

    return parser, (*(calls.markers if calls and tools else ()), *(reasoning.markers if reasoning else ()))


def mark(control: CacheControl | None, param: str) -> CacheMark | None:
    """The cache mark that the field `param` requests, if it is set."""
    return None if control is None else CacheMark(param, control.seconds)


def decoded_arguments(arguments: Any, param: str) -> Any:
    """Decode the arguments of an earlier call: APIs send JSON text, and some models write an object in a JSON string.

    Text that is not JSON stays text, because models write such calls, and clients return them as they are. Raises
    InvalidRequest.
    """
    for _ in range(2):
        if not isinstance(arguments, str):
            break
        data = arguments.encode()
        if len(data) > UNMEASURED_BYTES and max(cost for _, cost in running_costs(data)) > MAX_COST:
            raise InvalidRequest.field(param, "'arguments' has too many values")
        try:
            arguments = msgspec.json.decode(data or b"{}")
        except msgspec.DecodeError:
            break
        except RecursionError as error:
            raise InvalidRequest.field(param, "'arguments' is nested too deeply") from error
    return arguments


async def requested_output(
    settings: RouterSettings,
    served: Served,
    body: Body,
    sender: Sender,
    fields: Mapping[str, Any],
    at: str = "response_format",
) -> FieldConstraint | None:
    """The output format requested by the fields that all bodies share and by `fields`. Raises InvalidRequest."""
    given = _output_fields(body)
    if not fields and given == _NO_OUTPUT_FIELDS:
        return None
    asked = {**dict(zip(_OUTPUT_FIELDS, given, strict=True)), **fields}
    work = partial(requested_constraint, asked, at, open_objects=settings.open_objects)
    return await served.text.prepare(work, sender)


def _guided(
    served: Served, conversation: Conversation, asked: FieldConstraint | None, calls: FieldConstraint | None, tail: str
) -> FieldConstraint | None:
    """The constraint to apply, and where in the answer it begins. `tail`: the prompt's end, if the model reasons."""
    reasoning = served.reasoning_family
    guiding = asked if calls is None else calls
    if guiding is None or reasoning is None:
        return guiding
    wishes = conversation.reasoning.template_arguments(conversation.template_arguments)
    opener, end = reasoning.guided_from(
        tail,
        calls=calls is not None,
        may_open=conversation.add_generation_prompt and wishes.get("enable_thinking") is not False,
    )
    opening, after = (tuple(ids) for ids in served.text.encode_now([opener, end], special_tokens=False))
    return guiding._replace(constraint=msgspec.structs.replace(guiding.constraint, opener=opening, after=after))


def _asks_for_calls(conversation: Conversation) -> bool:
    """Whether the tools constrain the answer, even without an output format."""
    choice, tools = conversation.tool_choice, conversation.tools
    if choice.mode == "required" or choice.allowed:
        return True
    return any(tool.definition["function"].get("strict") is True for tool in tools)


async def _calls_besides(
    settings: RouterSettings, served: Served, conversation: Conversation, asked: FieldConstraint, sender: Sender
) -> FieldConstraint | None:
    """The constraint on an answer that either calls tools or matches `asked`; None: `asked` alone applies.

    The request does not demand valid calls, so tools whose calls cannot be guided are no reason to refuse it.
    """
    try:
        calls = await served.text.prepare(lambda: _calls(settings, served, conversation, asked), sender)
        if calls is not None:
            await served.text.constraints.check(calls, sender.tenant)
        return calls
    except InvalidRequest as error:
        log.debug("calls_not_guided reason=%r", error.message)
        return None


def _calls(
    settings: RouterSettings, served: Served, conversation: Conversation, asked: FieldConstraint | None
) -> FieldConstraint | None:
    """The constraint on the answer from tools: calls, if they are required, or else that calls match strict schemas.

    If no calls are required, an answer without any must match `asked`. None: only `asked` applies.
    """
    choice = conversation.tool_choice
    definitions = [tool.definition for tool in conversation.callable_tools()]
    if choice.mode != "required" and not definitions:
        return None
    shape = None if served.tool_family is None else shape_of(served.tool_family.shapes, served.text.templates)
    wanted = choice.mode if choice.name is None else {"function": {"name": choice.name}}
    otherwise = None if asked is None else asked.constraint
    restricted = bool(choice.allowed)
    return tool_calls(
        definitions,
        wanted,
        shape,
        parallel=choice.parallel,
        restricted=restricted,
        open_objects=settings.open_objects,
        otherwise=otherwise,
    )


def check_token_ids(token_ids: Collection[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequest if the model does not have all of these ids."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(each for each in token_ids if not 0 <= each < vocab_size)
        raise no_such_token(vocab_size, param, wrong)


def no_such_token(vocab_size: int, param: str, token_id: int | None = None) -> InvalidRequest:
    """The error for a token id that does not exist."""
    which = "" if token_id is None else f"there is no token {token_id}; "
    return InvalidRequest.field(param, f"{which}token ids must be between 0 and {vocab_size - 1}")
