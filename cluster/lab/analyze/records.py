"""Parses the lines of a log into requests. Handles the formats; does not tokenize or count.

* mooncake: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`; see `cluster/lab/recorded_trace.py`.
* openai: the body of a request to /v1/chat/completions or /v1/completions on each line, or a line of OpenAI's batch
  files, which has it under `body`. The line may also have a time (`timestamp`, `created`, `created_at` or `time`).

Other fields of a line are ignored.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import msgspec

from ....router.errors import InvalidRequest
from ....router.http.dialects.chat import conversation
from ....router.http.dialects.completions import PromptField, prompts
from ....router.http.dialects.schema import MessageBody, TokenizeBody
from ....router.text.template import TemplateInput
from ...errors import LogUnreadable
from ..recorded_trace import TraceError, TraceRequest, trace_request

Format = Literal["mooncake", "openai"]
FORMATS: tuple[Format, ...] = ("mooncake", "openai")

#: Seconds since 1970 stay below the first bound until the year 5138; above it a number counts milliseconds, then
#: microseconds, then nanoseconds.
_TIME_UNITS = ((1e17, 1e-9), (1e14, 1e-6), (1e11, 1e-3))
_MESSAGE_FIELDS = frozenset(field.name for field in msgspec.structs.fields(MessageBody))


@dataclass(slots=True, frozen=True)
class TextRequest:
    """One prompt of an OpenAI log: a chat, a text, or token ids."""

    prompt: TemplateInput | str | list[int]
    model: str
    salt: str
    arrival_s: float | None
    line: int


Record = TraceRequest | TextRequest


class _Body(msgspec.Struct):
    messages: list[dict[str, Any]] | None = None
    prompt: PromptField | None = None
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _Line(_Body):
    body: _Body | None = None
    timestamp: float | str | None = None
    created: float | str | None = None
    created_at: float | str | None = None
    time: float | str | None = None


_decode_line = msgspec.json.Decoder(_Line).decode


def detect_format(line: bytes) -> Format:
    """Detect the format of a log from one line. Raises LogUnreadable, or TraceError if it is not a JSON object."""
    try:
        keys = msgspec.json.decode(line, type=dict[str, msgspec.Raw]).keys()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"not a JSON object: {error}") from error
    if "hash_ids" in keys:
        return "mooncake"
    if keys & {"messages", "prompt", "body"}:
        return "openai"
    raise LogUnreadable(
        "the first line has neither hash_ids (a trace) nor messages, prompt or body (requests), "
        f"but {', '.join(sorted(keys)) or 'nothing'}; --format {' or '.join(FORMATS)} sets the format"
    )


class LogReader:
    """Reads the requests of one log. With `skip_malformed`, unreadable lines are counted instead of refused."""

    def __init__(self, log_format: Format | None = None, *, skip_malformed: bool = False) -> None:
        self.format: Format | None = log_format  #: None until the first line has been read
        self.skipped_lines = 0
        self._skip_malformed = skip_malformed

    def read(self, lines: Iterable[bytes]) -> Iterator[Record]:
        """Yield the requests in the order of the lines; one line may contain several. Raises LogUnreadable."""
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                self.format = self.format or detect_format(line)
                if self.format == "mooncake":
                    yield trace_request(line)
                else:
                    yield from _requests(line, number)
            except TraceError as error:
                if not self._skip_malformed:
                    raise LogUnreadable(
                        f"line {number}: {error} (--skip-malformed counts such lines and continues)"
                    ) from error
                self.skipped_lines += 1


def _requests(text: bytes, number: int) -> list[TextRequest]:
    try:
        line = _decode_line(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(str(error)) from error
    body = line.body or line
    arrival = _arrival_s(line)
    model, salt = body.model or "", body.cache_salt or ""
    try:
        return [TextRequest(prompt, model, salt, arrival, number) for prompt in _prompts(body)]
    except InvalidRequest as error:
        raise TraceError(error.message) from error


def _prompts(body: _Body) -> list[TemplateInput | str | list[int]]:
    if body.messages is not None:
        messages = [_message(each, index) for index, each in enumerate(body.messages)]
        tools = None if body.tool_choice == "none" else body.tools
        options = TokenizeBody(messages=messages, tools=tools, chat_template_kwargs=body.chat_template_kwargs)
        return [conversation(options).template_input()]
    if body.prompt is None:
        raise TraceError("neither field 'messages' nor field 'prompt' is present")
    return [each if isinstance(each, str) else each.tolist() for each in prompts(body.prompt, 1 << 32, "prompt")]


def _message(given: dict[str, Any], index: int) -> MessageBody:
    known = {name: value for name, value in given.items() if name in _MESSAGE_FIELDS}
    try:
        return msgspec.convert(known, MessageBody)
    except msgspec.ValidationError as error:
        raise TraceError(f"field 'messages[{index}]': {error}") from error


def _arrival_s(line: _Line) -> float | None:
    for name in ("timestamp", "created", "created_at", "time"):
        value: float | str | None = getattr(line, name)
        if isinstance(value, str):
            try:
                return datetime.fromisoformat(value).timestamp()
            except ValueError as error:
                raise TraceError(f"field {name!r}: {value!r} is not an ISO 8601 time") from error
        if value is not None:
            return value * next((factor for bound, factor in _TIME_UNITS if abs(value) >= bound), 1.0)
    return None
