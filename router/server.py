"""The HTTP server of a router, built from settings and a `Backend`.

Owns the listening sockets, the text models and the access log. Independent of routing and signals.
"""

import asyncio
import gc
import logging
import socket
import ssl
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from .backend import Backend
from .config import RouterSettings
from .errors import TlsUnusable
from .http.app import App
from .http.endpoints.requests import answer_sibling
from .http.front import Front, TextModels
from .http.live.trends import EVERY_S
from .http.protocol.access import AccessLog, Writable
from .http.protocol.server import HttpServer
from .http.siblings import Siblings
from .http.tracing import RequestSpans
from .metrics import RouterMetrics
from .replicas.membership import text_source
from .tenants.api_keys import read_tenants
from .tenants.shared_usage import SharedUsage

log = logging.getLogger(__name__)

#: Seconds that running responses have to finish when the server stops; then they end with an error. Less than the 5 s
#: that the controller waits for a router.
GRACE_S = 4.0
#: Young objects that trigger a garbage collection. The hot path creates no cycles, so collections only cost time.
GC_YOUNG = 50_000


def tls_context(settings: RouterSettings) -> ssl.SSLContext | None:
    """The TLS context from the settings; None: plain HTTP. Raises TlsUnusable."""
    if not settings.tls_cert_file:
        if settings.tls_key_file:
            raise TlsUnusable("tls_key_file is set without tls_cert_file")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.tls_cert_file, settings.tls_key_file or None)
    except (OSError, ssl.SSLError) as error:
        raise TlsUnusable(f"tls_cert_file {settings.tls_cert_file!r} cannot be used: {error}") from error
    context.set_alpn_protocols(["http/1.1"])
    return context


def settle() -> None:
    """Exclude everything loaded so far from garbage collection and make collections rare. Call after loading."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_YOUNG, 20, 20)


async def load_text(texts: TextModels, folder: Path, model_dir: Path | None = None) -> None:
    """Load the tokenizer in this folder before it is needed. Raises RouterError.

    `model_dir`: the model's folder, if different.
    """
    await texts.get(await asyncio.to_thread(text_source, folder, model_dir))


class RouterServer:
    """Serves `backend` over HTTP. `start` and `stop` run on the event loop that serves."""

    def __init__(
        self,
        settings: RouterSettings,
        backend: Backend,
        *,
        metrics: RouterMetrics | None = None,
        texts: TextModels | None = None,
        usage: SharedUsage | None = None,
        siblings: Siblings | None = None,
        access: Writable | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        """`usage`: the tenants' usage, if shared with other routers; closed with the server.

        `siblings`: the cluster's other router processes; closed with the server.
        `access`: receives the access log instead of standard error; closed with the server.
        """
        self.metrics = metrics or RouterMetrics()
        self.front = Front(
            settings,
            backend,
            self.metrics,
            texts=texts,
            tenants=read_tenants(settings.api_keys_file, settings.api_key),
            usage=usage.records if usage is not None else None,
        )
        self._settings = settings
        self.front.siblings = siblings
        self._siblings_started = False
        self._grace_s = grace_s
        self._open = ExitStack()
        if self.front.responses is not None:
            self._open.callback(self.front.responses.close)
        if self.front.history is not None:
            self._open.callback(self.front.history.close)
        if usage is not None:
            self._open.callback(usage.close)
        requests: AccessLog | None = None
        if access is not None:
            self._open.callback(access.close)
        if where := settings.access_log:
            stream: Writable = access or sys.stderr
            if where != "-":
                stream = self._open.enter_context(Path(where).open("a", encoding="utf-8"))  # noqa: SIM115 - closed by `_open`
            requests = AccessLog(stream)
            self._open.callback(requests.flush)
        spans: RequestSpans | None = None
        if settings.otlp_endpoint:
            spans = RequestSpans(settings.otlp_endpoint)
            self._open.callback(spans.close)
        self._app = App(self.front, requests, spans)
        self._http: list[HttpServer] = []
        self._sampling: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int, *, shared: bool = False, bound: socket.socket | None = None) -> int:
        """Start serving at this address, in addition to earlier ones. Returns the bound port; 0 binds any free one.

        `shared`: other processes may listen on the same port. `bound`: a socket that is bound to the address already.
        Raises AddressInUse.
        """
        tls = tls_context(self._settings)
        http = HttpServer(self._app, self._settings, clock=self.front.monotonic, tls=tls)
        chosen = await http.start(host, port, shared=shared, bound=bound)
        self._http.append(http)
        if self.front.siblings is not None and not self._siblings_started:
            self._siblings_started = True
            await self.front.siblings.start(partial(answer_sibling, self.front))
        if self._sampling is None:
            self._sample()
        return chosen

    def _sample(self) -> None:
        """Add to the trends of the live page, now and every EVERY_S."""
        self._sampling = asyncio.get_running_loop().call_later(EVERY_S, self._sample)
        self.front.trends.add(self.front.sample())

    async def load_text(self, folder: Path, model_dir: Path | None = None) -> None:
        """Load the tokenizer in this folder ahead of the first replica. Raises RouterError."""
        await load_text(self.front.texts, folder, model_dir)

    async def stop(self) -> None:
        """Stop accepting connections, let responses finish within the grace period, close everything. Idempotent."""
        if self._sampling is not None:
            self._sampling.cancel()
        self.front.live.close()
        await asyncio.gather(*(http.stop(self._grace_s, self.front.backend.end_requests) for http in self._http))
        if self.front.siblings is not None:
            await self.front.siblings.close()
        self._open.close()
        await self.front.texts.close()
