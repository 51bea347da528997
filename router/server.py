"""The HTTP server: binds the socket and runs uvicorn on the caller's event loop, around the front and a `Backend`.

Owns the socket, uvicorn and the text models. Knows no routing; who runs the process handles signals.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn

from .backend import Backend
from .config import RouterSettings
from .errors import AddressInUse, RouterError
from .http.app import build_app
from .http.front import Front, TextModels
from .metrics import RouterMetrics
from .tenants import read_tenants

log = logging.getLogger(__name__)

#: Seconds that answers under way get when the server stops; streams that last longer are cut.
GRACE_S = 10.0
BACKLOG = 2048
KEEP_ALIVE_S = 75


def listening_socket(host: str, port: int) -> socket.socket:
    """A bound TCP socket, whose accepted sockets send at once (TCP_NODELAY). Raises AddressInUse."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit it: without it a client with delayed ACKs waits 40 ms for the first event.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound.setblocking(False)
        bound.bind((host, port))
        # Listening here, not in uvicorn: two servers may bind one free port under SO_REUSEADDR, but only one listens.
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise AddressInUse(host, port, error.strerror or str(error)) from error
    return bound


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process decides what a signal means."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class RouterServer:
    """Serves `backend` over HTTP. `start` and `stop` run on the event loop that serves."""

    def __init__(
        self,
        settings: RouterSettings,
        backend: Backend,
        *,
        metrics: RouterMetrics | None = None,
        texts: TextModels | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        self.metrics = metrics or RouterMetrics()
        self.front = Front(settings, backend, self.metrics, texts=texts, tenants=read_tenants(settings.api_keys_file))
        self._grace_s = grace_s
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Serve from now on; the port that is bound (of a free one, when `port` is 0). Raises AddressInUse."""
        assert self._server is None, "the server was started before"
        bound = listening_socket(host, port)
        self._server = _Server(self._config())
        self._serving = asyncio.create_task(self._server.serve([bound]))
        while not self._server.started:
            await asyncio.sleep(0.001)
            if self._serving.done():
                self._serving.result()
                raise RouterError("the HTTP server stopped while it started")
        chosen: int = bound.getsockname()[1]
        log.info("http_listening host=%s port=%d", host, chosen)
        return chosen

    def _config(self) -> uvicorn.Config:
        return uvicorn.Config(
            build_app(self.front),
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(self._grace_s)),
        )

    async def load_text(self, path: str) -> None:
        """Load the tokenizer in this folder, so that the first request need not wait. Raises RouterError."""
        await self.front.texts.get(path)

    async def stop(self) -> None:
        """Take no more connections, let answers end within the grace, close everything. May be called twice."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
            self._server = self._serving = None
        await self.front.texts.close()
