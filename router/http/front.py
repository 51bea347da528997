"""What every endpoint needs: settings, backend, text side, metrics, clocks. No HTTP in it."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random

import msgspec

from ...replica.messages import ModelLimits
from ..backend import Backend, ModelBackend, TextSource
from ..config import RouterSettings
from ..errors import NoReplica
from ..metrics import ModelMetrics, RouterMetrics
from ..tenants.api_keys import Tenants
from ..tenants.rate_limits import Book, Meter
from ..text.tokenizer import TextModel

log = logging.getLogger(__name__)

Loader = Callable[[Path], TextModel]
#: The books of the tenants with these digests.
Accounts = Callable[[Sequence[bytes]], Mapping[bytes, Book]]


class TextModels:
    """Loads the text side of each served model once, off the event loop; who asks meanwhile waits for it."""

    def __init__(self, load: Loader) -> None:
        self._load = load
        self._loading: dict[TextSource, asyncio.Future[TextModel]] = {}
        self._kept: frozenset[TextSource] = frozenset()

    async def get(self, source: TextSource) -> TextModel:
        """The text side that comes from there. Raises TokenizerUnavailable; the next call then tries again."""
        loading = self._loading.get(source)
        if loading is None:
            loading = self._loading[source] = asyncio.ensure_future(asyncio.to_thread(self._load, Path(source.path)))
            loading.add_done_callback(lambda done: self._settled(source, done))
        return loading.result() if loading.done() else await asyncio.shield(loading)

    def loaded(self, source: TextSource) -> bool:
        """Whether `get` would answer at once."""
        loading = self._loading.get(source)
        return loading is not None and loading.done()

    def keep(self, sources: Iterable[TextSource]) -> None:
        """From now on these are served, and those before them no longer: they are forgotten.

        Requests that use one go on, and its threads end with the last of them. What was loaded ahead of its first
        replica stays.
        """
        kept = frozenset(sources)
        for gone in self._kept - kept:
            self._loading.pop(gone, None)
            log.info("tokenizer_forgotten path=%s", gone.path)
        self._kept = kept

    def _settled(self, source: TextSource, loading: "asyncio.Future[TextModel]") -> None:
        if loading.cancelled() or loading.exception() is not None:
            self._loading.pop(source, None)
            log.error("tokenizer_unavailable path=%s error=%s", source.path, loading)
        else:
            log.info("tokenizer_loaded path=%s", source.path)

    async def close(self) -> None:
        """Wait for what is loading and let go of all threads."""
        for model in await asyncio.gather(*self._loading.values(), return_exceptions=True):
            if isinstance(model, TextModel):
                model.close()
        self._loading.clear()


class Served(msgspec.Struct, frozen=True, gc=False):
    """The model that a request is for."""

    limits: ModelLimits
    text: TextModel
    metrics: ModelMetrics
    backend: ModelBackend  #: who takes what is tokenized for it


class Front:
    """Shared by all requests of one server."""

    def __init__(
        self,
        settings: RouterSettings,
        backend: Backend,
        metrics: RouterMetrics,
        *,
        texts: TextModels | None = None,
        tenants: Tenants | None = None,
        accounts: Accounts | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        random_bits: Callable[[int], int] | None = None,
    ) -> None:
        """`accounts`: those that several routers keep together.

        `random_bits` makes ids and seeds, which are no secrets: asking the system for each costs a system call.
        """
        self.settings = settings
        self.backend = backend
        self.metrics = metrics
        self.texts = texts or TextModels(partial(TextModel.load, cache_bytes=settings.token_cache_bytes))
        self.tenants = tenants or Tenants()
        #: of the tenants that a keys file names, by digest
        self.meters = self._meters(accounts)
        metrics.watch_tenants(tuple(self.meters.values()))
        self.monotonic = monotonic
        self.wall = wall
        self.random_bits = random_bits or Random().getrandbits
        self.started_at = int(wall())
        self._served: dict[str, Served] = {}  #: by name, the last one asked for

    def _meters(self, accounts: Accounts | None) -> dict[bytes, Meter]:
        named = self.tenants.named()
        books = accounts([tenant.digest for tenant in named]) if accounts is not None else {}
        return {tenant.digest: Meter(tenant.name, tenant.limits, books.get(tenant.digest)) for tenant in named}

    async def served(self, name: str | None) -> Served:
        """The model that a client asks for by `name`. Raises ModelNotFound, NoReplica, TokenizerUnavailable."""
        backend = self.backend.choose(name)
        limits = backend.model()
        if limits is None:
            raise NoReplica("no replica has joined yet", retry_after_s=1.0)
        served = self._served.get(limits.name)
        if served is None or served.limits is not limits or served.backend is not backend:
            source = backend.text()
            assert source is not None, f"{limits.name!r} has limits and no text"
            text, metrics = await self.texts.get(source), self.metrics.of(limits.name)
            served = self._served[limits.name] = Served(limits, text, metrics, backend)
        return served

    async def load_texts(self) -> None:
        """Load what requests are tokenized with, and forget what they are no longer. Raises RouterError."""
        sources = self.backend.texts()
        self.texts.keep(sources)
        self._served.clear()
        loaded = await asyncio.gather(*map(self.texts.get, sources), return_exceptions=True)
        for failure in [each for each in loaded if isinstance(each, BaseException)]:
            raise failure
