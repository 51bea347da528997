"""The access log has one line per request, and clients cannot forge its fields."""

import asyncio
import io

import msgspec
import pytest

from homing.router.backend import Forecast
from homing.router.errors import RateLimited
from homing.router.http.protocol.access import FLUSH_LINES, AccessLog, line
from homing.router.http.protocol.exchange import Exchange, GenerationSummary, Request


class Nowhere:
    """A wire that discards everything."""

    blocked_s = 0.0

    def send_head(self, exchange, headers, length) -> None: ...
    def send_body(self, pieces, length) -> None: ...
    def send_chunk(self, data) -> None: ...
    def end_stream(self, data: bytes) -> None: ...
    def exchange_over(self) -> None: ...


def answered(path: str = "/v1/completions") -> Exchange:
    exchange = Exchange(Request("POST", path, {}, b"", keep_alive=True), Nowhere(), "r-1", 0.0, lambda _: None)
    exchange.respond(b"{}")
    return exchange


def test_a_line_tells_what_became_of_a_generation():
    """The fields have a fixed order, so that simple tools can split the line."""
    exchange = answered()
    exchange.summary = GenerationSummary("team-a", "r0", 12, 7, 8, 3, 0.0204, queue_s=0.002, model="fox")

    assert line(exchange, 0.5, 1.0) == (
        "ts=1.000 request=r-1 method=POST path=/v1/completions status=200 duration_ms=500.0 ttft_ms=20.4 "
        "queue_ms=2.0 prefill_ms=18.4 decode_ms=479.6 tenant=team-a model=fox replica=r0 prompt=12 predicted=7 "
        "cached=8 output=3\n"
    )


def test_a_line_tells_of_the_network_only_if_it_took_time():
    """A slow client explains a slow answer; nearly all are fast."""
    exchange = answered()
    exchange.request = msgspec.structs.replace(exchange.request, receive_s=0.25)
    exchange.blocked_s = 0.0001
    exchange.summary = GenerationSummary("", "r0", 12, 7, 8, 3, 0.0204)

    assert " decode_ms=479.6 receive_ms=250.0 tenant=" in line(exchange, 0.5, 1.0)
    assert "blocked" not in line(exchange, 0.5, 1.0)


def test_a_line_of_a_refusal_tells_who_was_refused_and_by_what():
    """The first question about a 429 is whose it is and which limit to raise."""
    exchange = answered()
    exchange.tenant, exchange.model = "team-a", "fo\nx"
    exchange.error = RateLimited("team-a", "max_running", 2, 1.0)

    assert line(exchange, 0.001, 1.0).endswith(
        " tenant=team-a model='fo\\nx' error=rate_limit_exceeded limit=max_running\n"
    )


def test_a_line_tells_why_the_replica_was_chosen_what_was_expected_and_whether_the_request_moved():
    """An on-call engineer must see afterwards whether a holder was busy, an estimate wrong or a replica lost."""
    exchange = answered()
    exchange.summary = GenerationSummary(
        "", "r0,r1", 12, 7, 8, 3, 0.0204, forecast=Forecast(reason="load", queue_s=0.0, ttft_s=0.0189), moves=2
    )

    told = line(exchange, 0.5, 1.0)
    assert " ttft_ms=20.4 expected_ms=18.9 queue_ms=" in told
    assert " tenant=- model=- replica=r0,r1 why=load moved=2 prompt=12 " in told


def test_a_line_tells_whose_request_it_is():
    """Session, agent and parent are logged if the client sent them, quoted so that they cannot forge a field."""
    exchange = answered()
    exchange.summary = GenerationSummary("team-a", "r0", 12, 7, 8, 3, None, session="s 1", agent="a1")

    assert line(exchange, 0.5, 1.0).endswith(" output=3 session='s%201' agent=a1\n")


def test_a_request_that_generates_nothing_has_no_summary():
    """Health checks and refusals are logged without generation fields."""
    assert line(answered("/health"), 0.001, 1.0).endswith("path=/health status=200 duration_ms=1.0\n")


@pytest.mark.parametrize("path", ["/a\nts=0 request=forged", "/a b", "/ü", "/\x1b[2J"])
def test_a_strangers_path_cannot_forge_a_line(path: str):
    """A path must neither forge fields or lines nor send escape sequences to a terminal."""
    told = line(answered(path), 0.1, 1.0)

    assert told.count("\n") == 1
    assert told.count(" ") == 5
    assert told.isascii()
    assert "\x1b" not in told


async def test_lines_wait_a_moment_and_are_written_together():
    """One system call per line would cost as much as parsing the request."""
    stream = io.StringIO()
    log = AccessLog(stream, wall=lambda: 1.0)

    for _ in range(FLUSH_LINES - 1):
        log.write(answered(), 0.1)
    assert stream.getvalue() == ""
    log.write(answered(), 0.1)
    assert stream.getvalue().count("\n") == FLUSH_LINES
    log.write(answered(), 0.1)
    log.flush()

    assert stream.getvalue().count("\n") == FLUSH_LINES + 1


async def test_a_stream_that_takes_no_lines_stops_no_answer():
    """Lost lines are counted instead."""
    stream = io.StringIO()
    log = AccessLog(stream)
    log.write(answered(), 0.1)
    stream.close()

    log.flush()
    await asyncio.sleep(0)

    assert log.lost == 1
