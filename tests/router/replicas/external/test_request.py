"""One request to an engine, event by event."""

import json
from typing import Any

import pytest

from homing.kvcache.hashing import token_bytes
from homing.replica.messages import Generate, Refused, SamplingParams, TokenOutput
from homing.router.backend import TextOutput
from homing.router.replicas.external.request import ExternalRequest
from homing.router.text.parsers.deltas import Reasoning, ToolCallArguments, ToolCallStart

EOS = 2


class Desk:
    """Records a request's replies."""

    def __init__(self) -> None:
        self.outputs: list[TokenOutput | TextOutput] = []
        self.refusals: list[Refused] = []

    def on_reply(self, request: ExternalRequest, reply: TokenOutput | TextOutput | Refused) -> None:
        if isinstance(reply, Refused):
            self.refusals.append(reply)
        else:
            self.outputs.append(reply)


def request_at(desk: Desk, generated: list[int] | None = None, **sampling: Any) -> ExternalRequest:
    """Build a request with three prompt tokens to which an engine has started to respond."""
    generate = Generate(
        request_id=4,
        token_ids=token_bytes([7, 8, 9, *(generated or [])]),
        prompt_tokens=3,
        root=bytes(16),
        block_hashes=b"",
        sampling=SamplingParams(max_tokens=10, **sampling),
    )
    request = ExternalRequest(
        generate,
        desk.on_reply,
        eos_token_ids=frozenset({EOS}),
        vocab_size=4000,
        uncached_tokens=3,
        now=0.0,
    )
    request.head(200)
    return request


def event(ids: list[int] | None, finish: str | None = None, **more: Any) -> bytes:
    """Build one event of a stream."""
    choice = {"text": "x", "token_ids": ids, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 2}}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_the_last_output_waits_for_the_word_on_cached_tokens(desk: Desk) -> None:
    """That number follows the finish reason, and the router needs both in one output."""
    request = request_at(desk)

    request.body(event([5]) + event([6], "length"))
    assert desk.outputs == [TokenOutput(4, 0, [5])]
    request.body(USAGE + DONE)

    assert desk.outputs[1:] == [TokenOutput(4, 1, [6], finish_reason="length", cached_tokens=2)]
    assert request.closed


#: Recorded from SGLang 0.5.23 on a CPU, without fields of its own.
SGLANG = b"""data: {"id":"97","object":"text_completion","model":"m","choices":[{"index":0,"text":" great","logprobs":\
{"token_logprobs":[-5.1],"tokens":[" great"],"top_logprobs":[{" great":-5.1}]},"finish_reason":null,\
"matched_stop":null,"token_ids":[2851],"prompt_token_ids":[5,6,7]}],"usage":{"prompt_tokens":3,"completion_tokens":1,\
"prompt_tokens_details":null,"reasoning_tokens":0}}

data: {"id":"97","object":"text_completion","model":"m","choices":[{"index":0,"text":"Ma","logprobs":null,\
"finish_reason":"length","matched_stop":null,"token_ids":[865]}],"usage":{"prompt_tokens":3,"completion_tokens":2,\
"prompt_tokens_details":null,"reasoning_tokens":0}}

data: {"id":"97","object":"text_completion","model":"m","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,\
"prompt_tokens_details":{"cached_tokens":2},"reasoning_tokens":0}}

data: [DONE]

"""


def test_sglangs_answer_has_ids_and_cached_tokens_but_no_logprobs(desk: Desk) -> None:
    """Its logprobs name tokens by their text, which several tokens may share."""
    request_at(desk).body(SGLANG)

    assert desk.outputs == [
        TokenOutput(4, 0, [2851]),
        TokenOutput(4, 1, [865], finish_reason="length", cached_tokens=2),
    ]


def test_a_stream_that_just_ends_behind_its_finish_reason_is_whole(desk: Desk) -> None:
    """Not every server sends [DONE]."""
    request = request_at(desk)

    request.body(event([5], "length"))
    request.end("the connection was lost")

    assert desk.outputs == [TokenOutput(4, 0, [5], finish_reason="length")]
    assert not desk.refusals


def test_a_continuation_counts_from_the_beginning_of_the_answer(desk: Desk) -> None:
    """The request flow checks token positions across all engines that worked on an answer."""
    request = request_at(desk, generated=[11, 12])

    request.body(event([13]))

    assert desk.outputs == [TokenOutput(4, 2, [13])]


@pytest.mark.parametrize(
    ("ids", "sampling", "stop"),
    [
        ([5, EOS], {}, EOS),
        ([5, EOS], {"ignore_eos": True}, None),
        ([5, 9], {"stop_token_ids": (9,)}, 9),
        ([5], {}, None),
    ],
)
def test_a_token_that_ended_the_answer_is_named(
    desk: Desk, ids: list[int], sampling: dict[str, Any], stop: int | None
) -> None:
    """The stop token yields no text."""
    request = request_at(desk, **sampling)

    request.body(event(ids, "stop") + DONE)

    assert isinstance(desk.outputs[0], TokenOutput)
    assert desk.outputs[0].stop_token_id == stop


def test_text_without_ids_is_counted_by_usage_or_by_pieces(desk: Desk) -> None:
    """Nothing more exact is available."""
    request = request_at(desk)

    request.body(event(None, usage={"completion_tokens": 3}) + event(None) + event(None, "stop") + DONE)

    assert [output.num_tokens for output in desk.outputs if isinstance(output, TextOutput)] == [3, 1, 1]


@pytest.mark.parametrize(
    "data",
    [b"data: <html>\n\n", b'data: {"error": {"message": "EngineCore died"}}\n\n', DONE],
)
def test_a_broken_answer_may_go_on_elsewhere(desk: Desk, data: bytes) -> None:
    """Garbage, an engine's own error, or an end without a reason: none is the caller's fault."""
    request = request_at(desk)

    request.body(event([5]) + data)
    request.end("lost")

    assert [refusal.retry for refusal in desk.refusals] == [True]
    assert len(desk.outputs) == 1


@pytest.mark.parametrize(("status", "retry"), [(400, False), (422, False), (404, True), (429, True), (503, True)])
def test_a_status_says_whose_fault_it_is(desk: Desk, status: int, retry: bool) -> None:
    """A request that every engine would refuse goes back to the caller, with the engine's message."""
    request = request_at(desk)

    request.head(status)
    request.body(b'{"error": {"message": ')
    request.body(b'"no room"}}')
    request.end(None)

    assert [refusal.retry for refusal in desk.refusals] == [retry]
    assert "no room" in desk.refusals[0].message


def test_an_answer_that_the_engine_aborts_may_continue_elsewhere(desk: Desk) -> None:
    """The router did not ask for the abort: the engine gave up."""
    request = request_at(desk)

    request.body(event([5]) + event([6], "abort") + DONE)

    assert desk.outputs == [TokenOutput(4, 0, [5])]
    assert [(each.reason, each.retry) for each in desk.refusals] == [("internal", True)]


def test_a_chat_is_told_apart_by_the_engine(desk: Desk) -> None:
    """Each chunk is passed on as it comes: the second chunk of a tool call does not start it again."""
    request = request_at(desk)

    def chunk(delta: dict[str, Any], generated: int, finish: str | None = None) -> bytes:
        choice = {"delta": delta, "finish_reason": finish}
        return b"data: %b\n\n" % json.dumps({"choices": [choice], "usage": {"completion_tokens": generated}}).encode()

    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{"}}
    request.body(chunk({"role": "assistant", "content": ""}, 0))
    request.body(chunk({"reasoning": "hm"}, 2) + chunk({"content": "Hi"}, 3) + chunk({"tool_calls": [call]}, 5))
    request.body(chunk({"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}, 6, "tool_calls") + USAGE + DONE)

    assert [each.deltas for each in desk.outputs if isinstance(each, TextOutput)] == [
        [Reasoning("hm")],
        (),
        [ToolCallStart(0, "c", "f"), ToolCallArguments(0, "{")],
        [ToolCallArguments(0, "}")],
    ]
    assert [each.num_tokens for each in desk.outputs if isinstance(each, TextOutput)] == [2, 1, 2, 1]
    assert (desk.outputs[-1].finish_reason, desk.outputs[-1].cached_tokens) == ("stop", 2)


def chunk(choice: dict[str, Any], **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


def scored(name: str, alternatives: int = 0) -> dict[str, Any]:
    top = {f"token_id:{number}": -1.0 for number in range(alternatives)}
    return {"token_ids": [5], "logprobs": {"tokens": [name], "token_logprobs": [-1.0], "top_logprobs": [top]}}


@pytest.mark.parametrize(
    "data",
    [
        event([-1]),
        event([4000]),  # the model has 4,000 tokens
        event([1 << 40]),
        event(list(range(11))),  # 10 were asked for
        event([5] * 10) + event([5]),
        event(None, usage={"completion_tokens": -1}),
        event(None, usage={"completion_tokens": 11}),
        event(None, usage={"completion_tokens": 1 << 62}),
        event([5], usage={"prompt_tokens_details": {"cached_tokens": -1}}),
        event([5], "length") + event([6]),
        chunk(scored("token_id:x")),
        chunk(scored("token_id:" + "9" * 5000)),
        chunk(scored("token_id:5", alternatives=2000)),
        chunk({"delta": {"tool_calls": [{"index": -1, "function": {"name": "f"}}]}}),
        chunk({"delta": {"tool_calls": [{"index": 1 << 40, "function": {"name": "f"}}]}}),
        b"data: " + b"[" * 100_000 + b"\n\n",
        b'data: {"error": ' + b"[" * 100_000 + b"\n\n",
        b"data: \xff\n\n",
        b'data: {"choices": []}\n\n' * 2000,  # events without end
        b"data: " + bytes(9 << 20),  # a line without end
        b": a comment\n" * (2 << 20),
    ],
)
def test_what_no_engine_may_answer_ends_the_request_and_nothing_more(desk: Desk, data: bytes) -> None:
    """Values of engines are checked like values of clients: tokens, counts, numbers of events, lengths."""
    request = request_at(desk)

    for start in range(0, len(data), 1 << 16):
        request.body(data[start : start + (1 << 16)])
    request.body(event([5]) + DONE)
    request.end("lost")

    assert [(each.reason, each.retry) for each in desk.refusals] == [("internal", True)]
    assert "cannot be read" in desk.refusals[0].message
    tokens = [each.num_tokens if isinstance(each, TextOutput) else len(each.token_ids) for each in desk.outputs]
    assert sum(tokens) <= 10


def test_an_engine_finds_no_more_cached_than_the_prompt_has(desk: Desk) -> None:
    """The numbers are charged, compared with predictions, and shown."""
    request = request_at(desk)

    request.body(event([5], "length", usage={"prompt_tokens_details": {"cached_tokens": 1 << 20}}) + DONE)

    assert desk.outputs[-1].cached_tokens == 3


def test_an_error_answer_without_end_is_read_up_to_its_message(desk: Desk) -> None:
    """The engine may go on for hours."""
    request = request_at(desk)
    request.head(400)

    for _ in range(3):
        request.body(b"x" * 50_000)

    assert [(each.retry, len(each.message)) for each in desk.refusals] == [(False, 200)]
