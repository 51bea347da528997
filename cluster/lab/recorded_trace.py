"""Recorded traffic: the arrival time, prompt and answer lengths, and prompt blocks of each request.

Independent of pool and policy; evaluations replay the requests. The format is that of the Mooncake traces (FAST'25,
github.com/kvcache-ai/Mooncake): JSON lines with `timestamp` (ms), `input_length` and `output_length` (tokens) and
`hash_ids`, one per block of the prompt. Equal ids name equal blocks after equal prefixes; the last may be partial.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

#: Tokens per block id in a Mooncake trace.
MOONCAKE_BLOCK_TOKENS = 512


class TraceError(Exception):
    """A line of a request log cannot be read; the message names the line."""


class TraceRequest(msgspec.Struct, frozen=True):
    arrival_s: float  #: since the trace began
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]  #: one per block of the prompt; the last block may be partial

    def full_blocks(self, block_tokens: int) -> tuple[int, ...]:
        """Ids of the prompt's full blocks; only those can be cached."""
        return self.block_ids[: self.input_tokens // block_tokens]


class _Line(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Annotated[int, Meta(ge=0)]
    output_length: Annotated[int, Meta(ge=0)]
    hash_ids: tuple[int, ...]


_decode = msgspec.json.Decoder(_Line).decode


def trace_request(text: str | bytes) -> TraceRequest:
    """Decode one line. Raises TraceError, which names the field."""
    try:
        line = _decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(str(error)) from error
    return TraceRequest(line.timestamp / 1000.0, line.input_length, line.output_length, line.hash_ids)


def read_trace(lines: Iterable[str | bytes]) -> Iterator[TraceRequest]:
    """Yield the requests of a Mooncake trace one at a time, so that a trace may be larger than memory.

    Blank lines and unknown keys are ignored. Raises TraceError, which names the line and the field, also when a
    timestamp is lower than the previous one.
    """
    before = 0.0
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            request = trace_request(text)
        except TraceError as error:
            raise TraceError(f"line {number}: {error}") from error
        if request.arrival_s < before:
            raise TraceError(f"line {number}: timestamp {request.arrival_s:g} s comes after {before:g} s")
        before = request.arrival_s
        yield request
