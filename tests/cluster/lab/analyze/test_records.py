"""Log lines in the formats that people have, and the errors for unreadable lines."""

import pytest

from homing.cluster.errors import LogUnreadable
from homing.cluster.lab.analyze.records import LogReader, TextRequest, detect_format
from homing.cluster.lab.recorded_trace import TraceRequest

CHAT = b'{"messages": [{"role": "user", "content": "hi"}], "model": "m"}'
PROMPT = b'{"prompt": "hi"}'
TRACE = b'{"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [4, 5]}'
BATCH = b'{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": ' + CHAT + b"}"


def read(*lines: bytes, skip_malformed: bool = False) -> list[TraceRequest | TextRequest]:
    return list(LogReader(skip_malformed=skip_malformed).read(lines))


def timed(field: bytes) -> float | None:
    (request,) = read(b'{"prompt": "hi", ' + field + b"}")
    return request.arrival_s


@pytest.mark.parametrize(
    ("line", "expected"), [(CHAT, "openai"), (PROMPT, "openai"), (BATCH, "openai"), (TRACE, "mooncake")]
)
def test_the_first_line_shows_the_format(line: bytes, expected: str):
    """Users need not state a format that can be detected."""
    assert detect_format(line) == expected


def test_a_batch_line_is_its_body():
    """OpenAI's batch files wrap each request."""
    assert read(BATCH) == read(CHAT)


def test_a_chat_is_what_the_template_is_given():
    """Content parts are joined and tool call arguments become objects, as in the HTTP API."""
    line = (
        b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],'
        b' "extra": 1}], "tools": [{"type": "function", "function": {"name": "f"}}], "temperature": 0.5,'
        b' "no_such_field": [1]}'
    )

    (request,) = read(line)

    assert request.prompt.messages == [{"role": "user", "content": "ab"}]
    assert request.prompt.tools == [{"type": "function", "function": {"name": "f"}}]


def test_a_list_of_prompts_is_several_requests():
    """The server computes each prompt as its own request."""
    line = b'{"prompt": ["one", "two"], "cache_salt": "s"}'

    assert [(request.prompt, request.salt) for request in read(line)] == [("one", "s"), ("two", "s")]
    assert [request.prompt for request in read(b'{"prompt": [1, 2, 3]}')] == [[1, 2, 3]]


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        (b'"timestamp": 1790000000', 1_790_000_000),
        (b'"timestamp": 1790000000.25', 1_790_000_000.25),
        (b'"created": 1790000000250', 1_790_000_000.25),
        (b'"time": 1790000000250000', 1_790_000_000.25),
        (b'"created_at": 1790000000250000000', 1_790_000_000.25),
        (b'"time": "2026-09-21T14:13:20Z"', 1_790_000_000),
        (b'"time": "2026-09-21T16:13:20.250+02:00"', 1_790_000_000.25),
        (b'"timestamp": 12.5', 12.5),
        (b'"timestamp": null', None),
        (b'"user": "u"', None),
    ],
)
def test_times_are_read_in_the_forms_that_logs_have(field: bytes, expected: float | None):
    """Numbers are seconds, milliseconds and so on, depending on their size; strings are ISO 8601."""
    assert timed(field) == (None if expected is None else pytest.approx(expected, abs=1e-3))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "line 2: "),
        (b"\xff\xfe", "line 2: "),
        (b"[]", "line 2: "),
        (b"{}", "line 2: neither field 'messages' nor field 'prompt'"),
        (b'{"messages": 7}', r"line 2: .*messages"),
        (b'{"messages": [{"content": "hi"}]}', r"line 2: field 'messages\[0\]'.*role"),
        (b'{"messages": [{"role": "king", "content": "hi"}]}', r"line 2: field 'messages\[0\]'.*role"),
        (b'{"messages": [{"role": "user", "content": [{"type": 7}]}]}', r"messages\[0\]\.content\[0\]\.type"),
        (b'{"prompt": []}', "line 2: field 'prompt'"),
        (b'{"prompt": [-1]}', "line 2: field 'prompt'"),
        (b'{"prompt": "hi", "time": "noon"}', "line 2: field 'time': 'noon'"),
    ],
)
def test_a_malformed_line_is_named_or_counted(line: bytes, said: str):
    """A log of a million lines cannot be searched by eye; users who accept losses may skip bad lines."""
    with pytest.raises(LogUnreadable, match=said):
        read(PROMPT, line, PROMPT)

    reader = LogReader(skip_malformed=True)
    assert len(list(reader.read([PROMPT, line, b"", PROMPT]))) == 2
    assert reader.skipped_lines == 1


def test_a_malformed_trace_line_is_named():
    """Trace lines get the same errors."""
    with pytest.raises(LogUnreadable, match=r"line 2: .*hash_ids"):
        read(TRACE, TRACE.replace(b"[4, 5]", b'"45"'))


@pytest.mark.parametrize(("line", "said"), [(b"GET /", "not a JSON object"), (b'{"question": 1}', "but question")])
def test_a_log_of_another_kind_is_refused(line: bytes, said: str):
    """The error names the fields found and the option that sets the format."""
    with pytest.raises(LogUnreadable, match=said):
        read(line)


def test_a_malformed_first_line_is_counted_like_any_other() -> None:
    """A log may start in the middle of a line: the format is detected from the first readable line."""
    reader = LogReader(skip_malformed=True)

    requests = list(reader.read([b'"age": 3}', b'{"prompt": "a"}']))

    assert len(requests) == reader.skipped_lines == 1
    with pytest.raises(LogUnreadable, match="line 1: not a JSON object"):
        read(b'"age": 3}')
