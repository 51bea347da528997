"""A scripted backend that records the requests it receives."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from homing.kvcache.hashing import token_array
from homing.replica.messages import NO_LOGPROBS, ModelLimits, PositionLogprobs, TokenLogprob, encoded_position
from homing.router.activity import ChoiceRecord, Decided, ModelActivity
from homing.router.backend import (
    ClusterView,
    EngineChats,
    Explanation,
    Forecast,
    GenerationRequest,
    ModelView,
    ReplicaView,
    RouterCounters,
    TokenDelta,
    TokenSink,
)
from homing.router.errors import ModelNotFound, RouterClosed, RouterError
from homing.router.replicas.membership import TextDigests, TextSource

#: One item of a stream: a delta, an error that ends it, or `PAUSE`, after which it sends nothing until cancelled.
Item = TokenDelta | RouterError | str
Script = Callable[[GenerationRequest], Iterable[Item]]
PAUSE = "pause"


def scored(token_id: int, others: int) -> PositionLogprobs:
    """Logprobs of `token_id` at one position, with `others` made-up alternatives."""
    top = [TokenLogprob(token_id, -0.25), *(TokenLogprob(other, -2.0 - other) for other in range(10, 10 + others))]
    return PositionLogprobs(TokenLogprob(token_id, -0.25), top[:others] if others else [])


def reply(
    ids: list[int],
    *,
    cached: int = 0,
    pinned: int | None = None,
    finish: str | None = None,
    loaded: tuple[tuple[str, int], ...] = (),
) -> Script:
    """A script of one delta per token of `ids`; like a replica, it finishes with "length" at the limit, else "stop"."""

    def script(request: GenerationRequest) -> Iterable[Item]:
        sampling = request.sampling
        shown = ids[: sampling.max_tokens]
        ending = finish or ("length" if len(shown) == sampling.max_tokens else "stop")
        prompt = token_array(request.token_ids)
        for index, token_id in enumerate(shown):
            first, last = index == 0, index == len(shown) - 1
            wanted = sampling.prompt_logprobs
            yield TokenDelta(
                token_ids=[token_id],
                logprobs=None if sampling.logprobs is None else [scored(token_id, sampling.logprobs)],
                prompt_logprobs=None
                if wanted is None or not first
                else [NO_LOGPROBS, *(encoded_position(scored(each, wanted)) for each in prompt[1:])],
                finish_reason=ending if last else None,
                cached_tokens=cached if first else None,
                loaded_tokens=loaded if first else (),
                pinned_tokens=pinned if first and request.pins else None,
            )

    return script


class FakeStream:
    """A token stream that plays a script, one item per iteration of the event loop."""

    continuations = 0

    def __init__(self, request: GenerationRequest, items: Iterable[Item], replica_id: str, known: int = 0) -> None:
        self.request = request
        self.forecast = Forecast(reason="only", queue_s=0.0, ttft_s=0.0, known_tokens=known)
        self.replica_id: str | None = replica_id
        self.cancelled = asyncio.Event()
        self._items = deque(items)
        self._sink: TokenSink | None = None

    def listen(self, sink: TokenSink) -> None:
        self._sink = sink
        asyncio.get_running_loop().call_soon(self._play, sink)

    def record(self, clock_offset_s: float) -> ChoiceRecord:
        table = FakeBackend.explanation(len(self.request.token_ids) // 4)
        decided = Decided(**msgspec.structs.asdict(table), at=1.0 + clock_offset_s)
        state = "cancelled" if self.cancelled.is_set() else "streaming"
        return ChoiceRecord(
            replica=self.replica_id, state=state, prompt_tokens=table.prompt_tokens, decisions=[decided]
        )

    def cancel(self, *, answered: bool = False) -> None:
        self.cancelled.set()
        self._sink = None

    def end(self, error: RouterError) -> None:
        """Fail the stream with `error`, unless it was cancelled or has no listener."""
        if self._sink is not None:
            self._sink.failed(error)

    def _play(self, sink: TokenSink) -> None:
        if self.cancelled.is_set() or not self._items:
            return
        item = self._items.popleft()
        if isinstance(item, RouterError):
            sink.failed(item)
        elif isinstance(item, TokenDelta):
            asyncio.get_running_loop().call_soon(self._play, sink)
            sink.delta(item)


class FakeBackend:
    """Answers every request from `script`; if `refusal` is set, `generate` raises it."""

    def __init__(self, limits: ModelLimits | None, script: Script) -> None:
        self.limits = limits
        self.script = script
        self.refusal: RouterError | None = None
        self.state = "serving"
        self.activities: list[ModelActivity] = []
        self.is_exact = True
        self.owned: dict[str, dict[bytes, int]] = {}
        self.chats: EngineChats | None = None  #: None: the replicas are our own
        self.streams: list[FakeStream] = []
        self.offered: tuple[str, ...] = ()  #: adapters
        self.known = 0  #: tokens of each prompt that some replica holds

    @property
    def requests(self) -> list[GenerationRequest]:
        """The requests received, oldest first."""
        return [stream.request for stream in self.streams]

    def choose(self, model: str | None) -> "FakeBackend":
        if model is not None and self.limits is not None and model not in (self.limits.name, *self.offered):
            raise ModelNotFound(model, [self.limits.name])
        return self

    def models(self) -> list[ModelLimits]:
        return [] if self.limits is None else [self.limits]

    def model(self) -> ModelLimits | None:
        return self.limits

    def text(self) -> TextSource | None:
        return None if self.limits is None else TextSource(self.limits.path, TextDigests("", ""))

    @property
    def has_engines(self) -> bool:
        return self.chats is not None

    def adapters(self) -> tuple[str, ...]:
        return self.offered

    def engine_chats(self) -> EngineChats:
        return self.chats or "none"

    def texts(self) -> list[TextSource]:
        source = self.text()
        return [] if source is None else [source]

    def exact(self) -> bool:
        return self.is_exact

    def generate(self, request: GenerationRequest) -> FakeStream:
        if self.refusal is not None:
            raise self.refusal
        self.streams.append(FakeStream(request, self.script(request), f"r{len(self.streams) % 2}", self.known))
        return self.streams[-1]

    def explain(self, request: GenerationRequest) -> Explanation:
        return self.explanation(len(request.token_ids) // 4)

    @staticmethod
    def explanation(tokens: int) -> Explanation:
        return Explanation(
            policy="fake",
            chosen="r0",
            reason="only",
            why="it is a fake",
            prompt_tokens=tokens,
            prompt_blocks=tokens // 16,
            block_size=16,
            replicas=[],
        )

    def view(self) -> ClusterView:
        return ClusterView(
            router_id="fake",
            policy="fake",
            waiting=0,
            in_flight=len(self.streams),
            models=[model_view(each, self.state) for each in self.models()],
            replicas=[] if self.limits is None else [replica_view("r0", self.state)],
            refused=[],
            counters=RouterCounters(requests=len(self.streams)),
        )

    async def view_in_slices(self) -> ClusterView:
        return self.view()

    def tenant_blocks(self) -> dict[str, dict[bytes, int]]:
        return self.owned

    def activity(self) -> list[ModelActivity]:
        return self.activities

    def end_requests(self) -> None:
        for stream in self.streams:
            stream.end(RouterClosed("the server is shutting down"))

    async def reset_caches(self, model: str | None = None) -> list[str]:
        self.choose(model)
        if self.refusal is not None:
            raise self.refusal
        return ["r0"]

    def check(self) -> None:
        """Assert that the front has cancelled every stream it opened."""
        still_open = [stream.request.trace_id for stream in self.streams if not stream.cancelled.is_set()]
        assert not still_open, f"streams left open: {still_open}"


def model_view(limits: ModelLimits, state: str) -> ModelView:
    """The view of a model with one replica in `state`."""
    return ModelView(
        name=limits.name,
        max_model_len=limits.max_model_len,
        serving=int(state == "serving"),
        waiting=0,
        in_flight=0,
        counters=RouterCounters(),
    )


def total_view(views: list[ClusterView]) -> ClusterView:
    """The first view, with the models and replicas of all `views`."""
    return msgspec.structs.replace(
        views[0],
        models=[model for view in views for model in view.models],
        replicas=[replica for view in views for replica in view.replicas],
    )


def replica_view(replica_id: str, state: str) -> ReplicaView:
    """The view of a lightly loaded replica in `state`."""
    return ReplicaView(
        replica_id=replica_id,
        epoch=1,
        node="",
        state=state,
        feed="live",
        model="demo",
        num_blocks=100,
        indexed_blocks=7,
        expected_blocks=0,
        in_flight=0,
        running=2,
        waiting=1,
        queued_prefill_tokens=3,
        free_blocks=75,
        cached_free_blocks=5,
        prefill_tokens_per_s=1000.0,
        decode_step_s=0.01,
        report_age_s=0.1,
    )
