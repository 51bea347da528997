"""External engines behind the router service, over real sockets: requests go out over HTTP, events come in."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from random import Random

import msgspec
import pytest
import zmq

from homing.events.wire.messages import LoadReport
from homing.kvcache.hashing import tenant_root
from homing.replica.messages import Constraint, EmbeddingParams, Pin, ReplicaDescription
from homing.router.backend import ReplicaView, TokenDelta
from homing.router.config import RouterSettings
from homing.router.errors import InvalidGeneration, ModelNotFound, ReplicaLost, RequestFailed, RouterError
from homing.router.flow.request_state import RequestState
from homing.router.replicas.external import external_replica
from homing.router.replicas.external.block_keys import cache_salt
from homing.router.replicas.external.probe import EngineRequirements
from homing.router.replicas.membership import text_digests
from homing.router.replicas.service import RouterService
from homing.router.routing.replica_load import UnavailableReason

from ...fakes import BLOCK, CACHE, LIMITS, ROOT, SEED, Reading, description_of, parity_of, request_of, until
from .fakes import FakeEngine, answer

PROMPT = list(range(200))
BLOCKS = len(PROMPT) // BLOCK
TERMS = EngineRequirements(
    model_names=("fake",), max_model_len=4096, block_size=BLOCK, canary_ids=(1, 2, 3), max_running_requests=8
)


class Watcher:
    """Records the service's calls to its observer."""

    def __init__(self) -> None:
        self.finished: list[RequestState] = []
        self.reports: list[LoadReport] = []
        self.gaps = 0

    def request_finished(self, request: RequestState) -> None:
        self.finished.append(request)

    def load_reported(self, replica_id: str, report: LoadReport) -> None:
        self.reports.append(report)

    def events_gap(self, replica_id: str) -> None:
        self.gaps += 1


class Cluster:
    """A service with fake engines behind it."""

    def __init__(
        self,
        folder,
        external: EngineRequirements | None = TERMS,
        settings: RouterSettings = RouterSettings(replica_silence_s=30.0),  # noqa: B008 - it is immutable
    ) -> None:
        self.watcher = Watcher()
        self.service = RouterService(
            settings,
            CACHE,
            router_id="me",
            model_dir=folder,
            observer=self.watcher,
            heartbeat_interval_s=0.05,
            external=external,
            rng=Random(1),
        )
        self._parity = parity_of(text_digests(folder))
        self.engines: dict[str, FakeEngine] = {}

    async def add(self, *names: str, events: bool = True, **fields: object) -> list[FakeEngine]:
        for name in names:
            self.engines[name] = FakeEngine(**fields)
            await self.engines[name].start()
        self.tell(events=events)
        return [self.engines[name] for name in names]

    def tell(self, *, events: bool = True, **unavailable: UnavailableReason) -> None:
        members = [self._description(name, engine, events) for name, engine in self.engines.items()]
        self.service.apply_membership(members, SEED, unavailable)

    def _description(self, name: str, engine: FakeEngine, events: bool) -> ReplicaDescription:
        fields = {"event_endpoints": engine.endpoints} if events else {}
        return description_of(
            name, request_endpoint=engine.url, external=True, parity=self._parity, model=LIMITS, **fields
        )

    def replica(self, name: str) -> ReplicaView:
        return next(view for view in self.service.view().replicas if view.replica_id == name)

    async def live(self, *names: str) -> None:
        await until(lambda: all((self.replica(n).state, self.replica(n).feed) == ("serving", "live") for n in names))

    async def ask(self, tokens: list[int] = PROMPT, **fields: object) -> tuple[str, list[TokenDelta]]:
        stream = self.service.generate(request_of(tokens, **fields))
        deltas = [delta async for delta in Reading(stream)]
        return stream.replica_id or "", deltas

    async def close(self) -> None:
        self.service.close()
        for engine in self.engines.values():
            await engine.stop()
        await asyncio.sleep(0)


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@pytest.fixture
async def cluster(tmp_path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    """Engines whose health is asked ten times as often as elsewhere: most of these tests wait for a check."""
    monkeypatch.setattr(external_replica, "HEALTH_INTERVAL_S", 0.1)
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.service.check()
    await cluster.close()


@pytest.fixture
async def pair(cluster: Cluster) -> Cluster:
    await cluster.add("b0", "b1")
    await cluster.live("b0", "b1")
    return cluster


async def test_a_request_ends_with_the_engines_tokens_and_its_word_on_cached_ones(pair: Cluster) -> None:
    """The request flow works with token ids; the number of cached tokens is known only at the stream's end."""
    await pair.ask()
    home, deltas = await pair.ask(seed=5)

    assert tokens(deltas) == answer(PROMPT, 5, 8)
    assert deltas[-1].finish_reason == "length"
    assert [delta.cached_tokens for delta in deltas] == [*[None] * 7, BLOCKS * BLOCK]
    assert pair.watcher.finished[-1].cached_tokens == BLOCKS * BLOCK
    assert pair.replica(home).url == pair.engines[home].url


async def test_the_holder_is_chosen_once_its_events_arrived(pair: Cluster) -> None:
    """The purpose of translated events: engine hashes differ from ours, but the blocks' content is known."""
    home, _ = await pair.ask()
    await until(lambda: pair.replica(home).indexed_blocks >= BLOCKS)

    table = pair.service.explain(request_of([*PROMPT, 7, 7, 7]))
    homes = {(await pair.ask([*PROMPT, number], seed=number))[0] for number in range(5)}

    assert homes == {home}
    assert table.chosen == home
    assert {row.replica_id: row.held_blocks for row in table.replicas}[home] == BLOCKS


async def test_removals_and_clears_are_followed(pair: Cluster) -> None:
    """A block that was removed must not be credited."""
    home, _ = await pair.ask(max_tokens=1)
    engine = pair.engines[home]
    await until(lambda: pair.replica(home).indexed_blocks == BLOCKS)

    engine.evict(PROMPT, blocks=5)
    await until(lambda: pair.replica(home).indexed_blocks == BLOCKS - 5)
    engine.clear()
    await until(lambda: pair.replica(home).indexed_blocks == 0)


async def test_a_lost_batch_is_replayed(pair: Cluster) -> None:
    """vLLM keeps its last batches for replay."""
    home, _ = await pair.ask(max_tokens=1)
    engine = pair.engines[home]
    await until(lambda: pair.replica(home).indexed_blocks == BLOCKS)

    engine.publish({"type": "AllBlocksCleared"}, heard=False)
    engine.publish()
    await until(lambda: pair.replica(home).indexed_blocks == 0)
    await until(lambda: pair.watcher.gaps)
    await until(lambda: pair.replica(home).feed == "live")


async def test_blocks_without_a_known_beginning_are_shown_and_not_credited(pair: Cluster) -> None:
    """Only blocks whose prompt is known are credited; dropped ones are counted where an operator sees them."""
    orphan = {"block_hashes": [1, 2], "parent_block_hash": 77, "token_ids": list(range(32)), "block_size": 16}

    pair.engines["b0"].publish({"type": "BlockStored", "lora_id": None, "medium": "GPU", "lora_name": None, **orphan})
    await until(lambda: pair.replica("b0").unplaced_blocks == 2)

    assert pair.replica("b0").indexed_blocks == 0


async def test_tenants_are_kept_apart_in_the_engine_and_in_the_index(pair: Cluster) -> None:
    """The tenant's root is sent as `cache_salt` and returned in the events."""
    salt = b"tenant a"
    home, _ = await pair.ask(salt=salt, max_tokens=1)
    await until(lambda: pair.replica(home).indexed_blocks == BLOCKS)

    held = {
        name: {row.replica_id: row.held_blocks for row in pair.service.explain(request_of(PROMPT, salt=name)).replicas}
        for name in (salt, b"tenant b", b"")
    }

    assert pair.engines[home].bodies[-1]["cache_salt"] == cache_salt(tenant_root(ROOT, salt=salt))
    assert [held[salt][home], held[b"tenant b"][home], held[b""][home]] == [BLOCKS, 0, 0]


async def test_an_adapter_is_asked_where_it_is_and_its_blocks_are_its_own(cluster: Cluster) -> None:
    """Equal tokens under an adapter have other KV; an engine without the adapter would answer 404."""
    engines = await cluster.add("b0", "b1", "b2", "b3", "b4")
    engines[3].adapters = ["poet"]
    await cluster.live(*cluster.engines)
    await until(lambda: cluster.service.adapters() == {"poet"})

    homes = {(await cluster.ask(adapter="poet", max_tokens=1, salt=salt))[0] for salt in (b"", b"", b"ann")}
    await until(lambda: cluster.replica("b3").indexed_blocks == 2 * BLOCKS)
    held = {
        (adapter, salt): {
            row.replica_id: row.held_blocks
            for row in cluster.service.explain(request_of(PROMPT, adapter=adapter, salt=salt)).replicas
        }["b3"]
        for adapter in ("poet", "")
        for salt in (b"", b"ann")
    }

    assert homes == {"b3"}
    assert [body["model"] for body in engines[3].bodies] == ["poet"] * 3
    assert "cache_salt" not in engines[3].bodies[0]
    assert held == {("poet", b""): BLOCKS, ("poet", b"ann"): BLOCKS, ("", b""): 0, ("", b"ann"): 0}
    assert cluster.service.choose("poet") is cluster.service
    with pytest.raises(ModelNotFound):
        cluster.service.choose("painter")

    engines[3].adapters = []
    await until(lambda: not cluster.service.adapters())


async def test_an_engine_killed_in_mid_stream_is_survived(pair: Cluster) -> None:
    """The client's stream continues on the other engine, from the very next token."""
    for engine in pair.engines.values():
        engine.behaves.gate.clear()
    stream = pair.service.generate(request_of(PROMPT, seed=9))
    reading = Reading(stream)
    first = await anext(reading)
    home = stream.replica_id or ""
    other = next(name for name in pair.engines if name != home)

    await pair.engines[home].stop()
    pair.engines[other].behaves.gate.set()
    deltas = [first, *[delta async for delta in reading]]

    assert stream.replica_id == other
    assert tokens(deltas) == answer(PROMPT, 9, 8)
    assert pair.engines[other].bodies[-1]["prompt"] == [*PROMPT, first.token_ids[0]]
    assert pair.engines[other].bodies[-1]["max_tokens"] == 7
    await until(lambda: pair.replica(home).state == "joining")
    await pair.engines[home].start()


async def test_a_constrained_answer_cannot_go_on_at_an_engine(pair: Cluster) -> None:
    """Its grammar would start again in the middle of the answer, so the answer would not match."""
    for engine in pair.engines.values():
        engine.behaves.gate.clear()
    constraint = Constraint(kind="regex", source="a+")
    stream = pair.service.generate(msgspec.structs.replace(request_of(PROMPT), constraint=constraint))
    reading = Reading(stream)
    await anext(reading)
    home = stream.replica_id or ""
    assert pair.engines[home].bodies[-1]["structured_outputs"] == {"regex": "a+"}

    await pair.engines[home].stop()

    with pytest.raises(RouterError, match="cannot continue a constrained answer"):
        await anext(reading)
    await pair.engines[home].start()


async def test_an_engine_is_asked_for_no_embeddings(pair: Cluster) -> None:
    """It would reply with text; one of our own replicas may take the request."""
    asked = msgspec.structs.replace(request_of(PROMPT), embedding=EmbeddingParams("last"))

    with pytest.raises(RouterError, match="does not support embeddings"):
        await anext(Reading(pair.service.generate(asked)))

    assert not any(engine.bodies for engine in pair.engines.values())


async def test_a_restarted_engine_comes_back_with_an_empty_cache(pair: Cluster) -> None:
    """The blocks of the stopped engine are gone, whatever the event numbers say."""
    home, _ = await pair.ask(max_tokens=1)
    await until(lambda: pair.replica(home).indexed_blocks == BLOCKS)

    await pair.engines[home].stop()
    await until(lambda: pair.replica(home).state == "joining")
    await pair.engines[home].start()
    await pair.live(home)

    assert pair.replica(home).indexed_blocks == 0


async def test_an_engine_that_is_there_later_joins_later(cluster: Cluster) -> None:
    """Routers and engines may start in any order."""
    (engine,) = await cluster.add("b0")
    await engine.stop()
    stream = cluster.service.generate(request_of(PROMPT))

    await engine.start()
    deltas = [delta async for delta in Reading(stream)]

    assert tokens(deltas) == answer(PROMPT, 1, 8)


async def test_a_refusal_of_the_request_itself_is_the_callers(pair: Cluster) -> None:
    """Another engine would refuse it too, and the engine's message says what to change."""
    for engine in pair.engines.values():
        engine.behaves.refusal = (400, "top_p must be in (0, 1]")

    with pytest.raises(InvalidGeneration, match="top_p must be"):
        await pair.ask()

    assert sum(len(engine.bodies) for engine in pair.engines.values()) == 1


async def test_mistakes_of_callers_are_nothing_against_an_engine(pair: Cluster) -> None:
    """A breaker that counted them would disable every engine for all callers, as sglang-router's does for a minute."""
    for engine in pair.engines.values():
        engine.behaves.refusal = (400, "top_p must be in (0, 1]")
    for seed in range(60):
        with pytest.raises(InvalidGeneration):
            await pair.ask([seed, *PROMPT], seed=seed)
    for engine in pair.engines.values():
        engine.behaves.refusal = None

    for seed in range(10):
        _, deltas = await pair.ask([seed, *PROMPT], seed=seed)
        assert tokens(deltas) == answer([seed, *PROMPT], seed, 8)
    assert {pair.replica(name).state for name in pair.engines} == {"serving"}


async def test_an_engine_in_trouble_passes_the_request_on(pair: Cluster) -> None:
    """Clients must not see one engine's 503 while another engine works."""
    pair.engines["b0"].behaves.refusal = (503, "out of service")

    for seed in range(4):
        home, deltas = await pair.ask([seed, *PROMPT], seed=seed)
        assert (home, tokens(deltas)) == ("b1", answer([seed, *PROMPT], seed, 8))


async def test_when_every_engine_fails_the_client_gets_its_words(pair: Cluster) -> None:
    """The error comes after the retries and contains the last engine's message."""
    for engine in pair.engines.values():
        engine.behaves.refusal = (500, "CUDA out of memory")

    with pytest.raises(RequestFailed, match="CUDA out of memory"):
        await pair.ask()


async def test_a_cancelled_stream_hangs_up(pair: Cluster) -> None:
    """Engines stop when their client disconnects: a disconnect is the abort."""
    for engine in pair.engines.values():
        engine.behaves.token_s = 0.01
    stream = pair.service.generate(request_of(PROMPT, max_tokens=2000))
    await anext(Reading(stream))
    home = stream.replica_id or ""

    stream.cancel()
    await until(lambda: pair.engines[home].hung_up and not pair.engines[home].running)

    assert pair.replica(home).in_flight == 0


async def test_an_engine_that_tells_no_ids_is_taken_by_its_text(cluster: Cluster) -> None:
    """Older servers stream only text: it is passed on unchanged, and counted by the engine's own usage."""
    (engine,) = await cluster.add("b0")
    engine.behaves.tells_ids = False
    await cluster.live("b0")

    _, deltas = await cluster.ask(seed=3)

    assert [delta.text for delta in deltas] == [f"<{token}>" for token in answer(PROMPT, 3, 8)]
    assert sum(delta.text_tokens for delta in deltas) == 8
    assert not tokens(deltas)


async def test_text_without_ids_cannot_go_on_elsewhere(pair: Cluster) -> None:
    """The tokens of the text are unknown; making them up would be worse than an error."""
    for engine in pair.engines.values():
        engine.behaves.tells_ids = False
        engine.behaves.break_after = 3

    with pytest.raises(RequestFailed):
        await pair.ask()

    assert sum(len(engine.bodies) for engine in pair.engines.values()) == 1


async def test_pins_are_not_promised(pair: Cluster) -> None:
    """External engines do not pin blocks; the caller is told that 0 tokens are pinned."""
    _, deltas = await pair.ask(pins=(Pin(96, 60.0, bytes(16)),))

    assert deltas[0].pinned_tokens == 0


async def test_a_busy_engine_is_avoided(pair: Cluster) -> None:
    """Other clients' requests appear in its metrics; the router knows its own."""
    pair.engines["b0"].running = 30
    await until(lambda: pair.replica("b0").running == 30)

    homes = [(await pair.ask([seed, *PROMPT], seed=seed))[0] for seed in range(4)]

    pair.engines["b0"].running = 0
    assert homes == ["b1"] * 4


async def test_rates_are_learned_from_answers(pair: Cluster) -> None:
    """Engines do not report how fast they are."""
    pair.engines["b0"].behaves.token_s = pair.engines["b1"].behaves.token_s = 0.002
    home, _ = await pair.ask()

    view = pair.replica(home)

    assert view.prefill_tokens_per_s != description_of("x").prefill_tokens_per_s
    assert 0.0005 < view.decode_step_s < 1.0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda engine: setattr(engine, "model", "another"), "model"),
        (lambda engine: setattr(engine, "canary_ids", (9, 9)), "tokenizer"),
        (lambda engine: setattr(engine, "max_model_len", 1024), "max_model_len"),
        (lambda engine: setattr(engine, "block_size", 32), "block_size"),
    ],
)
async def test_an_engine_that_differs_is_refused_by_name(
    cluster: Cluster, change: Callable[[FakeEngine], None], field: str
) -> None:
    """It would return wrong answers, or never hit."""
    engine = FakeEngine()
    change(engine)
    await engine.start()
    cluster.engines["b0"] = engine
    cluster.tell()
    await until(lambda: cluster.service.view().refused)

    (refused,) = cluster.service.view().refused

    assert (refused.replica_id, refused.field) == ("b0", field)
    assert cluster.replica("b0").state == "joining"


async def test_blocks_of_another_size_are_noticed_by_the_first_event(cluster: Cluster) -> None:
    """Not every engine reports its block size beforehand."""
    engine = FakeEngine(block_size=32)
    engine.behaves.tells_block_size = False
    await engine.start()
    cluster.engines["b0"] = engine
    cluster.tell()
    await cluster.live("b0")

    engine.store(PROMPT)
    await until(lambda: cluster.service.view().refused)

    assert cluster.service.view().refused[0].field == "block_size"
    assert cluster.replica("b0").state == "joining"


async def test_without_events_what_was_sent_is_remembered_and_marked(cluster: Cluster) -> None:
    """Engines that publish no events also work; the view marks their blocks as approximate."""
    await cluster.add("b0", "b1", events=False)
    await until(lambda: all(cluster.replica(name).state == "serving" for name in ("b0", "b1")))

    _, deltas = await cluster.ask()

    assert tokens(deltas) == answer(PROMPT, 1, 8)
    assert {cluster.replica(name).feed for name in ("b0", "b1")} == {"approximate"}
    homes = {(await cluster.ask([*PROMPT, number], seed=number))[0] for number in range(4)}
    assert len(homes) == 1
    (home,) = homes
    assert (cluster.replica(home).approximate, cluster.replica(home).indexed_blocks) == (True, BLOCKS)
    rows = cluster.service.explain(request_of(PROMPT)).replicas
    assert {row.feed for row in rows} == {"approximate"}


async def test_a_reset_reaches_the_engines(pair: Cluster) -> None:
    """vLLM offers it in development mode and announces it with its next step. SGLang uses another path."""
    pair.engines["b1"].behaves.reset_path = "/flush_cache"
    home, _ = await pair.ask(max_tokens=1)
    await until(lambda: pair.replica(home).indexed_blocks == BLOCKS)

    assert await pair.service.reset_caches() == ["b0", "b1"]
    assert pair.replica(home).indexed_blocks == 0
    pair.engines["b1"].behaves.reset_path = "/none"
    with pytest.raises(ReplicaLost, match="b1 did not say"):
        await pair.service.reset_caches()


async def test_an_engine_that_leaves_the_membership_is_left_alone(pair: Cluster) -> None:
    """Its requests continue elsewhere, and the router stops checking its health."""
    engine = pair.engines.pop("b0")
    pair.tell()

    home, _ = await pair.ask()
    await engine.stop()

    assert home == "b1"
    assert [view.replica_id for view in pair.service.view().replicas] == ["b1"]


async def test_an_engine_that_a_replica_has_started_needs_no_terms(tmp_path) -> None:
    """Its description contains the requirements; it was checked where it was started. It waits while warming up."""
    cluster = Cluster(tmp_path, external=None)
    try:
        engine = cluster.engines["r0"] = FakeEngine(model=LIMITS.name)
        await engine.start()
        cluster.tell(r0="warming")
        assert await cluster.service.until_joined("r0") == ""
        assert cluster.replica("r0").state == "warming"

        cluster.tell()
        await cluster.live("r0")
        name, deltas = await cluster.ask()

        assert (name, len(tokens(deltas)) > 0, len(engine.bodies)) == ("r0", True, 1)
    finally:
        await cluster.close()


async def test_an_engine_that_is_refused_does_not_keep_an_update_waiting(cluster: Cluster) -> None:
    """A caller that waits for it to join gets the reason why it will not."""
    await cluster.add("b0", model="another")

    assert "another" in await cluster.service.until_joined("b0")


@pytest.mark.parametrize(
    ("setting", "external", "chat_ids", "chats"),
    [
        ("auto", True, ((1, 2, 3), (1, 2, 3)), "parsed"),
        ("auto", True, ((1, 2, 3), (4,)), "all"),
        ("auto", True, (), "all"),
        ("auto", False, ((1, 2, 3),), "none"),
        ("engine", True, ((1, 2, 3),), "all"),
        ("engine", False, (), "all"),
        ("tokens", True, (), "none"),
    ],
)
async def test_plain_chats_go_as_ids_where_all_engines_render_alike(
    tmp_path, setting: str, external: bool, chat_ids: tuple[tuple[int, ...], ...], chats: str
) -> None:
    """Where one may render differently, or cannot tell, its clients keep what it renders itself."""
    terms = replace(TERMS, chat_ids=chat_ids) if external else None
    cluster = Cluster(tmp_path, terms, RouterSettings(engine_chat=setting))
    try:
        await cluster.add("b0", "b1")
        before = cluster.service.engine_chats()
        await cluster.live("b0", "b1")

        assert cluster.service.engine_chats() == chats
        assert before == ("all" if chats == "parsed" else chats)
    finally:
        await cluster.close()


async def test_the_load_that_an_engine_publishes_counts_instead_of_its_metrics(cluster: Cluster) -> None:
    """SGLang sends it with each prefill; its metrics are up to a second old, and tell nothing with a busy server."""
    context = zmq.Context()
    socket = context.socket(zmq.PUB)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    try:
        [engine] = await cluster.add("b0")
        engine.behaves.load_port = port
        await cluster.live("b0")
        reports = cluster.watcher.reports

        def told() -> bool:
            for odd in (b"no msgpack", b"\x91\x01", msgspec.msgpack.encode(["LoadStat", -1, 0, 0, 0])):
                socket.send_multipart([b"load", bytes(8), odd])
            stat = ["LoadStat", 7, 2, 250 * BLOCK, 500 * BLOCK, None]
            socket.send_multipart([b"load", bytes(8), msgspec.msgpack.encode(stat)])
            return bool(reports) and (reports[-1].running, reports[-1].free_blocks) == (9, 250)

        await until(told)
    finally:
        socket.close(0)
        context.term()


async def test_an_engine_cannot_announce_more_than_it_holds(pair: Cluster) -> None:
    """The index keeps its newest blocks: it would be filled by the oldest if the engine forgot to announce removals."""
    engine = pair.engines["b0"]
    for start in range(0, 700, 100):  # of an engine with 500 blocks
        tokens = list(range(start * 16, (start + 100) * 16))
        block = {"block_hashes": list(range(start + 1, start + 101)), "parent_block_hash": None, "token_ids": tokens}
        engine.publish(
            {"type": "BlockStored", "block_size": 16, "lora_id": None, "medium": "GPU", "lora_name": None, **block}
        )

    await until(lambda: pair.replica("b0").dropped_blocks >= 200)

    assert 500 * 15 // 16 <= pair.replica("b0").indexed_blocks <= 500
    pair.service.check()
