"""The access log: one line of fields per request.

Lines are buffered for up to `FLUSH_S`, because a system call per request costs as much as parsing it.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from .exchange import Exchange, GenerationSummary

log = logging.getLogger(__name__)

#: Maximum age and number of buffered lines.
FLUSH_S = 0.25
FLUSH_LINES = 256
#: Time on the network that is logged.
NOTABLE_S = 0.001


class Writable(Protocol):
    def write(self, lines: str, /) -> object: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class AccessLog:
    """Writes lines to `stream`, on the event loop's thread. The caller closes the stream after `flush`."""

    def __init__(self, stream: Writable, wall: Callable[[], float] = time.time) -> None:
        self._stream = stream
        self._wall = wall
        self._lines: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self.lost = 0  #: lines that could not be written

    def write(self, exchange: Exchange, duration_s: float) -> None:
        """Add the line of a request that has ended."""
        self._lines.append(line(exchange, duration_s, self._wall()))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)
        elif len(self._lines) >= FLUSH_LINES:
            self.flush()

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lines, self._lines = self._lines, []
        try:
            self._stream.write("".join(lines))
            self._stream.flush()
        except (OSError, ValueError):  # a full disk or a closed stream must not affect responses
            if not self.lost:
                log.warning("access_log_lost stream=%s lines=%d", self._stream, len(lines))
            self.lost += len(lines)


def line(exchange: Exchange, duration_s: float, now: float) -> str:
    """The line of one request: fields in a fixed order, absent ones left out."""
    request, summary = exchange.request, exchange.summary
    text = (
        f"ts={now:.3f} request={exchange.id} method={request.method or '-'} path={_safe(request.path) or '-'} "
        f"status={exchange.status} duration_ms={duration_s * 1e3:.1f}"
    )
    error = exchange.error
    if summary is None and error is None:
        return text + "\n"
    if summary is not None:
        text += _times(exchange, summary, duration_s)
    tenant, model = (exchange.tenant, exchange.model) if summary is None else (summary.tenant, summary.model)
    text += f" tenant={_safe(tenant) or '-'} model={_safe(model) or '-'}"
    if summary is not None:
        why = f" why={summary.forecast.reason}" if summary.forecast is not None else ""
        moves = f" moved={summary.moves}" if summary.moves else ""
        text += (
            f" replica={summary.replicas or '-'}{why}{moves} prompt={summary.prompt_tokens} "
            f"predicted={summary.predicted_tokens} cached={summary.cached_tokens} output={summary.output_tokens}"
            f"{_conversation(summary)}"
        )
    if error is not None:
        text += f" error={error.code or '-'}{f' limit={error.limit}' if error.limit else ''}"
    return text + "\n"


def _times(exchange: Exchange, summary: GenerationSummary, duration_s: float) -> str:
    """Where the request's time went, in milliseconds: `receive` and `blocked` are the network's, if they matter."""
    times = {"ttft": summary.ttft_s, "expected": None if summary.forecast is None else summary.forecast.ttft_s}
    times |= {name.removesuffix("_s"): seconds for name, seconds in summary.phases(duration_s).items()}
    network = {"receive": exchange.request.receive_s, "blocked": exchange.blocked_s}
    times |= {name: seconds for name, seconds in network.items() if seconds >= NOTABLE_S}
    return "".join([f" {name}_ms={seconds * 1e3:.1f}" for name, seconds in times.items() if seconds is not None])


def _conversation(summary: GenerationSummary) -> str:
    """The session and agents of a request, as far as the client named them."""
    if summary.session is summary.agent is summary.parent is None:
        return ""
    named = (("session", summary.session), ("agent", summary.agent), ("parent", summary.parent))
    return "".join([f" {name}={_safe(value)}" for name, value in named if value])


def _safe(text: str) -> str:
    """Escape a client's text, so that it cannot start another line or field."""
    return text if text.isascii() and text.isprintable() and " " not in text else ascii(text).replace(" ", "%20")
