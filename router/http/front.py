"""The state that all endpoints share: settings, backend, tokenizers, tenants, metrics, clocks. Independent of HTTP."""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from random import Random

import msgspec

from ... import __version__
from ...replica.messages import ModelLimits
from ..backend import NEW, Backend, ClusterView, EngineList, Missing, ModelBackend, TextSource
from ..config import RouterSettings
from ..errors import NoReplica, RouterError
from ..metrics import ModelMetrics, RouterMetrics
from ..tenants.api_keys import Tenants
from ..tenants.rate_limits import RateLimiter, UsageRecord
from ..text.parsers.families import AUTO, ReasoningFamily, ToolFamily, choose_reasoning, choose_tools
from ..text.tokenizer import SamplingDefaults, TextModel
from .body_reader import BodyReader
from .departures import SessionPrompts
from .history import RequestHistory
from .live.feed import LiveFeed
from .live.trends import Sample, Trends
from .live.view import LiveSnapshot, ModelTotals, items_of
from .protocol.exchange import Exchange
from .response_store import ResponseStore, StoreBounds
from .siblings import Siblings
from .turns import Turns

log = logging.getLogger(__name__)

#: Tenants shown of those whose blocks a replica holds.
MAX_TENANTS = 16
#: Beyond `response_store_bytes`: tiny responses must not make an endless table.
MOST_STORED_RESPONSES = 100_000
#: Seconds for which the counted blocks of tenants are shown: counting takes up to 90 ms with 512 replicas.
OWNED_FOR_S = 5.0
OTHERS = "others"
#: Begins the name of a tenant whose key is unknown.
UNKNOWN = "unknown:"

#: In the chat template of a model that may reason: more formats are in use than we parse.
_REASONING = re.compile("think|thought|reason", re.IGNORECASE)

#: Returns the usage records of the tenants with these digests, by digest.
UsageRecords = Callable[[Sequence[bytes]], Mapping[bytes, UsageRecord]]


class TextModels:
    """Loads the `TextModel` of each source once, off the event loop; concurrent callers wait for the same load."""

    def __init__(self, load: Callable[[Path], TextModel]) -> None:
        self._load = load
        self._loading: dict[TextSource, asyncio.Future[TextModel]] = {}
        self._sources: frozenset[TextSource] = frozenset()

    async def get(self, source: TextSource) -> TextModel:
        """The `TextModel` from this source. Raises TokenizerUnavailable; the next call then tries again."""
        loading = self._loading.get(source)
        if loading is None:
            loading = self._loading[source] = asyncio.ensure_future(asyncio.to_thread(self._load_source, source))
            loading.add_done_callback(lambda done: self._loaded(source, done))
        return loading.result() if loading.done() else await asyncio.shield(loading)

    def _load_source(self, source: TextSource) -> TextModel:
        model = self._load(Path(source.path))
        if source.model_path not in ("", source.path):
            model.describe(Path(source.model_path))
        return model

    def loaded(self, source: TextSource) -> bool:
        """Whether `get` would return at once."""
        loading = self._loading.get(source)
        return loading is not None and loading.done()

    def keep(self, sources: Iterable[TextSource]) -> None:
        """Forget the sources of the previous call that are not in `sources`.

        Running requests keep the `TextModel` that they use; its threads exit after the last of them. A `TextModel` that
        was loaded before its first replica joined is kept.
        """
        kept = frozenset(sources)
        for gone in self._sources - kept:
            self._loading.pop(gone, None)
            log.info("tokenizer_forgotten path=%s", gone.path)
        self._sources = kept

    def _loaded(self, source: TextSource, loading: "asyncio.Future[TextModel]") -> None:
        if loading.cancelled() or loading.exception() is not None:
            self._loading.pop(source, None)
            log.error("tokenizer_unavailable path=%s error=%s", source.path, loading)
        else:
            log.info("tokenizer_loaded path=%s", source.path)

    async def close(self) -> None:
        """Wait for running loads, and stop all tokenizer threads."""
        for model in await asyncio.gather(*self._loading.values(), return_exceptions=True):
            if isinstance(model, TextModel):
                model.close()
        self._loading.clear()


def text_models(settings: RouterSettings) -> TextModels:
    """The tokenizers of a router with these settings; none is loaded yet."""
    return TextModels(
        partial(TextModel.load, cache_bytes=settings.token_cache_bytes, chat_template=settings.chat_template)
    )


class Served(msgspec.Struct, frozen=True, gc=False):
    """The model that a request is for."""

    limits: ModelLimits
    text: TextModel
    metrics: ModelMetrics
    backend: ModelBackend  #: accepts the requests that were tokenized with `text`
    tool_family: ToolFamily | None = None  #: the format of tool calls; None: they are returned as text
    reasoning_family: ReasoningFamily | None = None  #: the markers of reasoning; None: it is returned as text
    may_reason: bool = False  #: whether an engine's parser might find reasoning in its answers
    adapter: str = ""  #: the engines' adapter that answers, which is then the name in `limits`; empty: the model itself
    defaults: SamplingDefaults = SamplingDefaults()  #: for sampling fields that a request does not set


def _by_name(owned: Mapping[bytes, int], names: Mapping[bytes, str]) -> dict[str, int]:
    """The tenants with the most blocks, by name; those without a name by their digest's first digits."""
    most = sorted(owned.items(), key=lambda each: -each[1])
    shown = {names.get(digest) or digest[:4].hex(): blocks for digest, blocks in most[:MAX_TENANTS]}
    others = sum(blocks for _, blocks in most[MAX_TENANTS:])
    return shown | ({OTHERS: others} if others else {})


class Front:
    """The state that all requests to one server share."""

    def __init__(
        self,
        settings: RouterSettings,
        backend: Backend,
        metrics: RouterMetrics,
        *,
        texts: TextModels | None = None,
        tenants: Tenants | None = None,
        usage: UsageRecords | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        random_bits: Callable[[int], int] | None = None,
    ) -> None:
        """`usage`: looks up the records that several routers share.

        `random_bits` makes ids and seeds. They are not secret, so the default saves a system call for each.
        """
        self.settings = settings
        self.backend = backend
        self.engines: EngineList | None = None  #: set only if the router is in front of external engines
        self.siblings: Siblings | None = None  #: set only if the cluster has several router processes
        self.metrics = metrics
        self.texts = texts or text_models(settings)
        self.tenants = tenants or Tenants()
        named = self.tenants.named()
        records = usage([tenant.digest for tenant in named]) if usage is not None else {}
        #: Rate limiters of the tenants in the keys file, by digest.
        self.limiters = {
            tenant.digest: RateLimiter(tenant.name, tenant.limits, records.get(tenant.digest)) for tenant in named
        }
        metrics.watch_tenants(tuple(self.limiters.values()))
        self.monotonic = monotonic
        self.body_reader = BodyReader(Turns(monotonic))
        self.wall = wall
        self.random_bits = random_bits or Random().getrandbits
        self.started_at = int(wall())
        self.was_ready = False  #: once the index was exact and the tokenizers loaded; stays True
        self.session_prompts = SessionPrompts()
        self.responses: ResponseStore | None = None
        if settings.response_store:
            bounds = StoreBounds(
                MOST_STORED_RESPONSES,
                settings.response_store_bytes,
                settings.response_store_age_s,
                settings.max_body_bytes,
            )
            self.responses = ResponseStore(settings.response_store, bounds, wall)
        self.history: RequestHistory | None = None
        if settings.request_history_bytes:
            self.history = RequestHistory(settings.request_history, settings.request_history_bytes, wall)
        self.clock_offset_s = wall() - monotonic()  #: seconds since 1970, less the monotonic clock
        self.open_exchanges: dict[Exchange, None] = {}  #: requests in progress that may generate, oldest first
        self._owned: dict[str, dict[bytes, int]] = {}
        self._owned_at = -inf
        self.trends = Trends()
        self._named_tenants = frozenset(tenant.name for tenant in named)
        self.live = LiveFeed(lambda: items_of(self.live_snapshot()), wall=wall)
        self._served: dict[str, Served] = {}  #: by model name, as of the last request
        #: The model of each alias; None: the only model.
        self.aliases: dict[str, str | None] = {
            alias.strip(): name.strip() or None
            for alias, _, name in (each.partition("=") for each in settings.model_aliases.split(","))
            if alias.strip()
        }

    def model_named(self, name: str | None) -> ModelBackend:
        """The backend of the model with this name or alias. Raises ModelNotFound and NoReplica."""
        if name in self.aliases:
            name = self.aliases[name]
        return self.backend.choose(name)

    async def served(self, name: str | None) -> Served:
        """The model with this name or alias. Raises ModelNotFound, NoReplica and TokenizerUnavailable."""
        backend = self.model_named(name)
        limits = backend.model()
        if limits is None:
            raise NoReplica("no replica has joined yet", retry_after_s=1.0)
        served = self._served.get(limits.name)
        if served is None or served.limits is not limits or served.backend is not backend:
            source = backend.text()
            assert source is not None, f"{limits.name!r} has limits but no text source"
            text, metrics = await self.texts.get(source), self.metrics.of(limits.name)
            shown = text.templates, text.model_type
            tools = choose_tools(*shown, self.settings.tool_call_parser)
            reasoning = choose_reasoning(*shown, self.settings.reasoning_parser)
            unknown = self.settings.reasoning_parser != AUTO or _REASONING.search(text.templates) is not None
            may_reason = reasoning is not None or unknown
            defaults = text.sampling_defaults if self.settings.generation_config else SamplingDefaults()
            served = Served(limits, text, metrics, backend, tools, reasoning, may_reason, "", defaults)
            self._served[limits.name] = served
        named = self.aliases.get(name, name) if name is not None else None
        if named is None or named == limits.name or named not in backend.adapters():
            return served
        return msgspec.structs.replace(served, limits=msgspec.structs.replace(limits, name=named), adapter=named)

    def shown(self, missing: Missing | None, *, admin: bool) -> Missing | None:
        """`missing` with the other tenant's name, or for others than admins without anything about other tenants."""
        if missing is None:
            return None
        if admin:
            named = next((each for each in self.tenants.named() if each.digest.hex()[:8] == missing.tenant), None)
            return msgspec.structs.replace(missing, tenant=named.name) if named is not None else missing
        if missing.reason == "other tenant":
            return Missing(token=missing.token, reason="new", why=NEW)
        return msgspec.structs.replace(missing, request=None)

    async def cluster(self) -> ClusterView:
        """The backend's view with the tenants of the replicas' blocks, by name, which may be a few seconds old."""
        return self._with_tenants(await self.backend.view_in_slices())

    def _with_tenants(self, view: ClusterView) -> ClusterView:
        now = self.monotonic()
        if now - self._owned_at >= OWNED_FOR_S:
            self._owned, self._owned_at = self.backend.tenant_blocks(), now
        owned = self._owned
        names = {tenant.digest: tenant.name for tenant in self.tenants.named()}
        replicas = [
            msgspec.structs.replace(each, tenant_blocks=_by_name(owned.get(each.replica_id, {}), names))
            for each in view.replicas
        ]
        return msgspec.structs.replace(view, replicas=replicas)

    def count_refusal(self, tenant: str, error: RouterError) -> None:
        named = tenant in self._named_tenants or tenant.startswith(UNKNOWN)
        shown = tenant.partition(":")[0] if named else OTHERS
        self.metrics.refused(shown, error.limit or error.code or str(error.http_status))

    def sample(self) -> Sample:
        """The router's totals now."""
        view = self.backend.view()
        counters = view.counters
        each = [self.metrics.of(model.name) for model in view.models]
        return Sample(
            at=round(self.wall(), 1),
            requests=counters.requests,
            failed=counters.failed,
            refused=sum(self.metrics.refusals.values()),
            prompt_tokens=sum(model.prompt_tokens for model in each),
            cached_tokens=counters.delivered_cached_tokens,
            running=view.in_flight,
            waiting=view.waiting,
            ttft=self.metrics.first_tokens(),
        )

    def live_snapshot(self) -> LiveSnapshot:
        """The state that the live page shows."""
        view = self._with_tenants(self.backend.view())
        return LiveSnapshot(
            version=__version__,
            started_at=self.started_at,
            clock_offset_s=self.clock_offset_s,
            cluster=view,
            activities=self.backend.activity(),
            totals={model.name: self._totals(self.metrics.of(model.name)) for model in view.models},
            responses=self.metrics.responses(),
            refusals=self.metrics.refusals,
            trend=[*self.trends.items()],
            streams_broken=self.metrics.streams_broken,
            tenants={tenant.digest: tenant.name for tenant in self.tenants.named()},
        )

    @staticmethod
    def _totals(model: ModelMetrics) -> ModelTotals:
        phases = {name: each.counts for name, each in model.phases.items()}
        return ModelTotals(
            model.prompt_tokens, model.completion_tokens, model.ttft.counts, phases, model.reports, model.gaps
        )

    async def load_texts(self) -> None:
        """Load the tokenizers that are needed now, and forget the others. Raises RouterError."""
        sources = self.backend.texts()
        self.texts.keep(sources)
        self._served.clear()
        loaded = await asyncio.gather(*map(self.texts.get, sources), return_exceptions=True)
        for failure in [each for each in loaded if isinstance(each, BaseException)]:
            raise failure
