"""Describes a request for the history: what has become of an exchange so far, or of one that is over."""

import re

import msgspec

from ..activity import Refusal, RequestRecord, Times
from ..errors import RouterError, UnknownKey
from .dialects.long_json import Steps
from .front import UNKNOWN, Front
from .history import RequestQuery, State
from .protocol.exchange import Exchange, GenerationSummary

#: Requests described in one step; each takes up to 0.3 ms.
RECORDS_PER_STEP = 8
MAX_MESSAGE = 300
MAX_NAME = 64
#: Bodies up to this size are decoded to find the model that a refused request named; longer ones are only searched.
DECODED_BYTES = 16 * 1024
SEARCHED_BYTES = 2048
#: Fields of a record that have the summary's values.
_OF_SUMMARY = (
    *("model", "session", "agent", "parent", "ttft_s"),
    *("prompt_tokens", "predicted_tokens", "cached_tokens", "output_tokens"),
)
_MODEL = re.compile(rb'"model"\s*:\s*"([^"\\]{1,128})"')


def record_of(front: Front, exchange: Exchange) -> RequestRecord:
    """What has become of an exchange up to now, or of one that is over."""
    now, error, generation = front.monotonic(), exchange.error, exchange.generation
    total_s = now - exchange.started_at
    summary: GenerationSummary | None = exchange.summary or (generation.summary() if generation is not None else None)
    choices, hidden = (summary.choices, summary.hidden) if summary is not None else ((), 0)
    if not exchange.over and generation is not None:
        choices, hidden = generation.records()
    blocked_s = exchange.blocked_s if exchange.over else exchange.wire.blocked_s
    record = RequestRecord(
        id=exchange.id,
        at=round(exchange.started_at + front.clock_offset_s, 3),
        method=exchange.request.method or "-",
        path=exchange.request.path[:MAX_NAME],
        state=_state(exchange, summary),
        status=exchange.status,
        error=None if error is None else Refusal(error.code, error.message[:MAX_MESSAGE], error.limit),
        tenant=exchange.tenant,
        model=exchange.model,
        times=_times(exchange, summary, total_s, blocked_s),
    )
    if summary is None:
        return record
    copied = {name: getattr(summary, name) for name in _OF_SUMMARY}
    expected_ttft_s = None if summary.forecast is None else summary.forecast.ttft_s
    return msgspec.structs.replace(
        record,
        departure=exchange.departure,
        choices=list(choices),
        hidden=hidden,
        expected_ttft_s=expected_ttft_s,
        **copied,
    )


def running(front: Front, query: RequestQuery) -> Steps[list[RequestRecord]]:
    """The requests in progress that fit, oldest first."""
    found: list[RequestRecord] = []
    for number, exchange in enumerate(list(front.open_exchanges)):
        if len(found) == query.most:
            break
        if number and not number % RECORDS_PER_STEP:
            yield
        if exchange not in front.open_exchanges:  # it ended between two steps
            continue
        record = record_of(front, exchange)
        if query.fits(record):
            found.append(record)
    return found


def _times(exchange: Exchange, summary: GenerationSummary | None, total_s: float, blocked_s: float) -> Times:
    spent = summary.phases(total_s) if summary is not None else {}
    return Times(receive_s=exchange.request.receive_s, blocked_s=blocked_s, total_s=total_s, **spent)


def _state(exchange: Exchange, summary: GenerationSummary | None) -> State:
    if not exchange.over:
        return "running"
    if exchange.gone:
        return "gone"
    if exchange.error is None:
        return "finished"
    # A 503 before anything was sent, as when no replica serves, refuses like a limit does.
    return "refused" if summary is None and exchange.error.http_status in (*range(400, 500), 503) else "failed"


def is_kept(exchange: Exchange, for_tenants: bool) -> bool:
    """Whether the history records an exchange: it generated something, or was refused as one that would have.

    `for_tenants`: its path works for tenants. The live page without a key, or a command without an admin's, does not.
    """
    if exchange.summary is not None or exchange.error is None or not for_tenants:
        return exchange.summary is not None
    status = exchange.error.http_status
    return status in (401, 403, 429) or (exchange.request.method == "POST" and status not in (404, 405))


def name_refused(exchange: Exchange, error: RouterError) -> None:
    """Name the tenant and the model of a request that was refused before they were known."""
    if isinstance(error, UnknownKey):
        exchange.tenant = f"{UNKNOWN}{error.key_sha256[:8]}"
    if not exchange.model:
        exchange.model = _named_model(exchange.request.body)[:MAX_NAME]


class _Named(msgspec.Struct):
    model: str | None = None


_NAMED = msgspec.json.Decoder(_Named)


def _named_model(body: bytes) -> str:
    """The model that a body names; empty if it names none."""
    if len(body) > DECODED_BYTES:
        found = _MODEL.search(body[:SEARCHED_BYTES]) or _MODEL.search(body[-SEARCHED_BYTES:])
        return found[1].decode(errors="replace") if found else ""
    try:
        return _NAMED.decode(body).model or ""
    except (ValueError, RecursionError):
        return ""
