"""The router service over real sockets, with fake replicas behind them."""

import asyncio
import functools
import operator
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import msgspec
import pytest

from homing.events.wire.messages import LoadReport
from homing.kvcache.hashing import wire_hash
from homing.replica.messages import (
    MAX_NEXT_EVICTIONS,
    AskNextEvictions,
    CacheReset,
    Generate,
    NextEvictions,
    Pin,
    Refused,
    Reply,
    Request,
    ResetCache,
)
from homing.router.backend import FeedState, GenerationRequest, ReplicaView, TokenDelta
from homing.router.config import RouterSettings
from homing.router.errors import CacheInUse, DeadlineExceeded, NoReplica, PromptTooLong, ReplicaLost, RouterClosed
from homing.router.flow.input_dump import InputDumper
from homing.router.flow.request_state import RequestState
from homing.router.replicas.membership import text_digests
from homing.router.replicas.own_replica import OwnReplica
from homing.router.replicas.service import RouterService
from homing.router.routing.replica_load import UnavailableReason

from ..fakes import CACHE, LIMITS, SEED, Reading, SocketReplica, answer, parity_of, request_of, until
from ..replay import replay_flow

PROMPT = list(range(200))


class Watcher:
    """Records the service's calls to its observer."""

    def __init__(self) -> None:
        self.finished: list[RequestState] = []
        self.reports = 0

    def request_finished(self, request: RequestState) -> None:
        self.finished.append(request)

    def load_reported(self, replica_id: str, report: LoadReport) -> None:
        self.reports += 1

    def events_gap(self, replica_id: str) -> None:
        raise AssertionError(f"a gap at {replica_id}")


class Cluster:
    """A service and its replicas, each described with the digests of an empty model folder."""

    def __init__(self, folder, watcher: Watcher, silence_s: float = 30.0) -> None:
        self.folder = folder
        self.service = RouterService(
            RouterSettings(replica_silence_s=silence_s),
            CACHE,
            router_id="me",
            model_dir=folder,
            observer=watcher,
            heartbeat_interval_s=0.05,
            rng=Random(1),
        )
        self.watcher = watcher
        self.unavailable: dict[str, UnavailableReason] = {}
        self.replicas: dict[str, SocketReplica] = {}
        self.all: list[SocketReplica] = []

    def add(self, name: str, **options) -> SocketReplica:
        replica = SocketReplica(name, **options)
        replica.description = msgspec.structs.replace(replica.description, parity=parity_of(text_digests(self.folder)))
        self.replicas[name] = replica
        self.all.append(replica)
        replica.start()
        return replica

    def publish(self) -> None:
        self.service.apply_membership(
            [replica.description for replica in self.replicas.values()], SEED, self.unavailable
        )

    async def ready(self, *names: str, feed: FeedState = FeedState.LIVE) -> None:
        await until(lambda: all(self.view(name).feed == feed and self.view(name).state == "serving" for name in names))

    def view(self, name: str) -> ReplicaView:
        return next(replica for replica in self.service.view().replicas if replica.replica_id == name)

    async def ask(self, request: GenerationRequest) -> tuple[str | None, list[TokenDelta]]:
        stream = self.service.generate(request)
        deltas = [delta async for delta in Reading(stream)]
        return stream.replica_id, deltas

    async def indexed(self, name: str, blocks: int) -> None:
        await until(lambda: self.view(name).indexed_blocks >= blocks)


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@pytest.fixture
async def cluster(tmp_path) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path, Watcher())
    yield cluster
    cluster.service.check()
    cluster.service.close()
    for replica in cluster.all:
        await replica.stop()


@pytest.fixture
async def pair(cluster: Cluster) -> Cluster:
    """A cluster with two serving replicas whose feeds are live."""
    cluster.add("r0")
    cluster.add("r1")
    cluster.publish()
    await cluster.ready("r0", "r1")
    return cluster


async def test_a_request_ends_with_its_tokens_and_is_observed(pair: Cluster) -> None:
    """The whole path: out on one socket, back on it, and a record for the metrics."""
    request = request_of(PROMPT)

    replica, deltas = await pair.ask(request)

    assert tokens(deltas) == answer(request)
    assert [record.replica for record in pair.watcher.finished] == [replica]
    assert pair.watcher.reports > 0


def dumped(folder: Path) -> Path:
    (path,) = folder.glob("homing-inputs-*")
    return path


async def test_an_internal_error_leaves_a_file_from_which_it_can_be_repeated(pair: Cluster, tmp_path: Path) -> None:
    """The service passes on what its flow has kept, with the settings on which decisions depend."""
    flow = pair.service._flow
    pair.service._dumper = InputDumper(tmp_path)
    await pair.ask(request_of(PROMPT))
    with pytest.raises(AssertionError):
        flow.on_reply("r0", "not a reply", pair.service._context.clock())  # type: ignore[arg-type]

    replayed = replay_flow(dumped(tmp_path))
    assert replayed is not None
    assert (replayed[0], type(replayed[1])) == ("on_reply", AssertionError)


async def test_the_replica_is_known_with_every_delta_and_after_the_last(pair: Cluster) -> None:
    """The response head names it, and a short answer's head is written with its only delta."""
    reading = Reading(pair.service.generate(request_of(PROMPT, max_tokens=1)))
    deltas = [delta async for delta in reading]

    assert len(deltas) == 1
    assert reading.replicas == [reading.stream.replica_id]
    assert reading.stream.replica_id in pair.replicas


async def test_the_holder_is_chosen_once_its_events_arrived(pair: Cluster) -> None:
    """The router learns from the event stream alone which blocks replicas hold."""
    home, first = await pair.ask(request_of(PROMPT))
    assert home is not None
    await pair.indexed(home, 12)

    answers = [await pair.ask(request_of([*PROMPT, seed], seed=seed)) for seed in range(2, 8)]

    assert {replica for replica, _ in answers} == {home}
    assert first[0].cached_tokens == 0
    assert {deltas[0].cached_tokens for _, deltas in answers} == {192}


async def test_a_prefix_that_moved_to_host_memory_is_found_there_predicted_and_told(cluster: Cluster) -> None:
    """From the replica's events to the decision, the first token and what is shown; after a kill nothing is left."""
    for name in ("r0", "r1"):
        cluster.add(name, tiers=True)
    cluster.publish()
    await cluster.ready("r0", "r1")
    home, _ = await cluster.ask(request_of(PROMPT))
    assert home is not None
    await cluster.indexed(home, 12)

    cluster.replicas[home].demote(keep=5)
    await until(lambda: "CPU" in (tiers := cluster.view(home).tiers) and tiers["CPU"].indexed_blocks == 7)
    table = cluster.service.explain(request_of([*PROMPT, 7]))
    replica, deltas = await cluster.ask(request_of([*PROMPT, 7], seed=2))

    view, counters = cluster.view(home), cluster.service.view().counters
    xor = functools.reduce(operator.xor, map(wire_hash, cluster.replicas[home].core.chain[5:12]))
    (row,) = [each for each in table.replicas if each.replica_id == home]
    assert (row.held_blocks, row.slower_blocks) == (12, {"CPU": 7})
    assert row.loading_s == pytest.approx(7 * 0.0001)
    assert (replica, deltas[0].cached_tokens, deltas[0].loaded_tokens) == (home, 12 * 16, (("CPU", 7 * 16),))
    assert (counters.loads_exact, counters.loads_wrong, counters.predictions_exact) == (1, 0, 2)
    assert counters.predicted_loaded_tokens == counters.delivered_loaded_tokens == 7 * 16
    assert (view.tiers["CPU"].used_blocks, view.tiers["CPU"].index_digest) == (7, f"{xor:016x}")

    await cluster.replicas[home].stop()
    cluster.add(home, epoch=2, tiers=True)
    cluster.publish()
    await until(lambda: cluster.view(home).epoch == 2)
    await cluster.ready(home)
    assert cluster.view(home).tiers == {}
    assert [each.slower_blocks for each in cluster.service.explain(request_of(PROMPT)).replicas] == [{}, {}]


async def test_tenants_do_not_share(pair: Cluster) -> None:
    """Another salt gives another root, so no block matches."""
    home, _ = await pair.ask(request_of(PROMPT, salt=b"a"))
    assert home is not None
    await pair.indexed(home, 12)

    table = pair.service.explain(request_of(PROMPT, salt=b"b"))

    assert {row.held_blocks for row in table.replicas} == {0}
    assert max(row.held_blocks for row in pair.service.explain(request_of(PROMPT, salt=b"a")).replicas) == 12


async def test_without_events_routing_goes_by_load_alone(cluster: Cluster) -> None:
    """Without a stream no blocks are credited, and requests spread over the replicas."""
    for name in ("r0", "r1"):
        replica = cluster.add(name)
        silent = msgspec.structs.replace(replica.description.event_endpoints, events="tcp://127.0.0.1:1", snapshot="")
        silent = msgspec.structs.replace(silent, replay="", state="tcp://127.0.0.1:1")
        replica.description = msgspec.structs.replace(replica.description, event_endpoints=silent)
    cluster.publish()
    await until(lambda: all(replica.state == "joining" for replica in cluster.service.view().replicas))
    await until(lambda: cluster.service.counters.replicas_joined == 2)

    homes = Counter([(await cluster.ask(request_of(PROMPT, seed=seed)))[0] for seed in range(24)])

    assert set(homes) == {"r0", "r1"}
    assert {row.expected_ttft_s for row in cluster.service.explain(request_of(PROMPT)).replicas} == {0.02}


async def test_a_router_is_exact_once_it_knows_what_every_replica_holds(pair: Cluster) -> None:
    """It must not take requests earlier: a restarted router would scatter every conversation."""
    _, deltas = await pair.ask(request_of(PROMPT))
    late = Cluster(pair.folder, Watcher())
    assert tokens(deltas)
    assert not late.service.exact()

    late.service.apply_membership([replica.description for replica in pair.replicas.values()], SEED)
    await late.service.until_exact()

    assert late.view("r0").indexed_blocks == pair.view("r0").indexed_blocks
    assert late.view("r1").indexed_blocks == pair.view("r1").indexed_blocks
    late.service.close()


async def test_a_replica_killed_in_mid_stream_is_survived(pair: Cluster) -> None:
    """The client's stream continues; no token is lost or duplicated."""
    request = request_of(PROMPT, max_tokens=120)
    stream = pair.service.generate(request)
    reading = Reading(stream)
    got = [await anext(reading) for _ in range(10)]
    home = stream.replica_id
    assert home is not None

    await pair.replicas[home].stop()
    got += [delta async for delta in reading]

    assert tokens(got) == answer(request)
    assert stream.replica_id not in (None, home)
    assert pair.watcher.finished[0].moves.continuations == 1
    assert pair.view(home).state == "joining"


async def test_the_controllers_word_moves_requests_too(pair: Cluster) -> None:
    """A rank group that lost a rank still has open sockets."""
    request = request_of(PROMPT, max_tokens=60)
    stream = pair.service.generate(request)
    reading = Reading(stream)
    got = [await anext(reading)]
    home = stream.replica_id
    assert home is not None

    del pair.replicas[home]
    pair.publish()
    got += [delta async for delta in reading]

    assert tokens(got) == answer(request)
    assert [replica.replica_id for replica in pair.service.view().replicas] == list(pair.replicas)


async def test_a_rebuilt_replica_is_a_new_one(pair: Cluster) -> None:
    """It has the same name and a new epoch, and none of the old one's blocks are credited to it."""
    home, _ = await pair.ask(request_of(PROMPT))
    assert home is not None
    await pair.indexed(home, 12)
    await pair.replicas[home].stop()

    pair.add(home, epoch=2)
    pair.publish()
    await pair.ready(home)

    assert pair.view(home).indexed_blocks == 0
    assert pair.view(home).epoch == 2


async def test_a_lost_connection_is_made_again_and_the_left_over_requests_are_stopped(pair: Cluster) -> None:
    """The replica is alive and still computes requests that have moved, so it gets an abort."""
    stream = pair.service.generate(request_of(PROMPT, max_tokens=2000))
    reading = Reading(stream)
    await anext(reading)
    home = stream.replica_id
    assert home is not None

    pair.replicas[home].disconnect()
    await until(lambda: pair.service.counters.replicas_lost == 1)
    await until(lambda: pair.replicas[home].core.aborted)

    stream.cancel()
    await pair.ready("r0", "r1")


async def test_a_cancelled_stream_frees_its_replica(pair: Cluster) -> None:
    """The client left: iteration ends, and the replica stops within a step."""
    stream = pair.service.generate(request_of(PROMPT, max_tokens=2000))
    reading = Reading(stream)
    await anext(reading)
    home = stream.replica_id
    assert home is not None

    stream.cancel()
    stream.cancel()

    await until(lambda: not pair.replicas[home].core.work)
    assert pair.watcher.finished[0].outcome == "cancelled"


async def test_a_refused_request_goes_to_another_replica(pair: Cluster) -> None:
    """A draining replica refuses it; the client does not notice."""
    for replica in pair.replicas.values():
        replica.on_message = lambda message: (
            Refused(request_id=message.request_id, reason="draining", message="no", retry=True)
            if isinstance(message, Generate) and message.request_id == 1
            else None
        )

    _, deltas = await pair.ask(request_of(PROMPT))

    assert tokens(deltas) == answer(request_of(PROMPT))
    assert pair.service.counters.continued == 1


@pytest.mark.parametrize("replicas", [1, 2])
async def test_a_request_that_a_replica_drops_is_sent_again(cluster: Cluster, replicas: int) -> None:
    """No word of it would come: its client would wait until its deadline, beside idle replicas."""
    for number in range(replicas):
        replica = cluster.add(f"r{number}")
        replica.drops = lambda message: isinstance(message, Generate) and message.request_id == 1
    cluster.publish()
    await cluster.ready(*cluster.replicas)
    request = request_of(PROMPT)

    _, deltas = await cluster.ask(request)

    assert tokens(deltas) == answer(request)
    assert cluster.service.counters.stalls_lost == 1
    assert [each for replica in cluster.replicas.values() for each in replica.core.aborted] == [1]


@pytest.fixture
async def single(tmp_path) -> AsyncIterator[Cluster]:
    """A cluster with one replica, which is lost without a word within a second."""
    cluster = Cluster(tmp_path, Watcher(), silence_s=1.0)
    replica = cluster.add("r0")
    cluster.publish()
    await cluster.ready("r0")
    yield cluster
    cluster.service.check()
    cluster.service.close()
    await replica.stop()


async def test_a_request_that_a_replica_forgot_in_mid_stream_is_continued(single: Cluster) -> None:
    """A replica forgets the requests of a router that reads too slowly, and cannot tell it."""
    request = request_of(PROMPT, max_tokens=60)
    reading = Reading(single.service.generate(request))
    got = [await anext(reading) for _ in range(5)]

    single.replicas["r0"].core.work.clear()
    got += [delta async for delta in reading]

    assert tokens(got) == answer(request)
    assert single.service.counters.continued >= 1


async def test_tokens_whose_wake_up_was_lost_are_read(single: Cluster) -> None:
    """They lie in the socket while the replica is idle. Reading it is enough: nothing is computed again."""
    replica = single.service._replicas["r0"]
    assert isinstance(replica, OwnReplica)
    assert replica._link is not None
    asyncio.get_running_loop().remove_reader(replica._link._readers[0]._fd)
    request = request_of(PROMPT)

    _, deltas = await single.ask(request)

    assert tokens(deltas) == answer(request)
    assert (single.service.counters.stalls_lost, single.service.counters.continued) == (1, 0)


async def test_a_deadline_ends_the_stream_with_an_error(pair: Cluster) -> None:
    """It also frees the replica."""
    stream = pair.service.generate(request_of(PROMPT, max_tokens=3000, deadline=time.monotonic() + 0.3))
    reading = Reading(stream)

    with pytest.raises(DeadlineExceeded):
        _ = [delta async for delta in reading]

    await until(lambda: not any(replica.core.work for replica in pair.all))


async def test_a_replica_that_differs_is_refused_loudly(pair: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """The refusal appears in /cluster and in the logs, and the replica gets no requests."""
    odd = pair.add("odd")
    parity = msgspec.structs.replace(odd.description.parity, template_digest="another")
    odd.description = msgspec.structs.replace(odd.description, parity=parity)

    pair.publish()
    pair.publish()

    refused = pair.service.view().refused
    assert [(row.replica_id, row.field) for row in refused] == [("odd", "template_digest")]
    assert caplog.text.count("replica_refused replica=odd field=template_digest") == 1
    assert "odd" not in [row.replica_id for row in pair.service.view().replicas]


async def test_a_drained_replica_gets_nothing_new(pair: Cluster) -> None:
    """Its running requests continue."""
    pair.unavailable = {"r0": "draining", "unknown": "draining"}
    pair.publish()

    homes = {(await pair.ask(request_of(PROMPT, seed=seed)))[0] for seed in range(6)}

    assert homes == {"r1"}
    assert pair.view("r0").state == "draining"
    assert pair.service.in_flight("r0") == pair.service.in_flight("unknown") == 0


async def test_a_replica_that_warms_up_joins_and_is_asked_later(pair: Cluster) -> None:
    """It is connected and its events are followed before it gets its first request."""
    pair.unavailable = {"r0": "warming"}
    pair.publish()
    assert await pair.service.until_joined("r0") == ""
    assert pair.view("r0").state == "warming"
    homes = {(await pair.ask(request_of(PROMPT, seed=seed)))[0] for seed in range(3)}
    assert homes == {"r1"}

    pair.unavailable = {"r1": "draining"}
    pair.publish()

    assert (await pair.ask(request_of(PROMPT)))[0] == "r0"


async def test_a_new_replica_has_what_is_hot_before_it_serves(pair: Cluster) -> None:
    """The warm-up uses the replica's sockets, so blocks and events are the same as for clients' requests."""
    for seed in range(4):
        await pair.ask(request_of([*PROMPT, seed], seed=seed))
    new = pair.add("r2")
    pair.unavailable = {"r2": "warming"}
    pair.publish()
    await pair.service.until_joined("r2")
    finished = pair.service.counters.finished

    await pair.service.warm_up("r2", 0.5)

    await pair.indexed("r2", 8)
    assert len(new.core.resident) == 8
    assert pair.service.counters.warm_up_tokens == 128
    assert (pair.service.counters.finished, pair.service.in_flight("r2")) == (finished, 0)
    pair.unavailable = {"r0": "draining", "r1": "draining"}
    pair.publish()
    _, deltas = await pair.ask(request_of([*PROMPT, 9], seed=9))
    assert deltas[0].cached_tokens == 128


async def test_a_replica_that_is_refused_never_joins(pair: Cluster) -> None:
    """A caller that waits for it gets the reason."""
    odd = pair.add("odd")
    parity = msgspec.structs.replace(odd.description.parity, template_digest="another")
    odd.description = msgspec.structs.replace(odd.description, parity=parity)
    pair.publish()

    assert "template_digest" in await pair.service.until_joined("odd")
    assert await pair.service.until_joined("nobody") == ""


async def test_what_is_held_is_refused_while_nobody_will_come(pair: Cluster) -> None:
    """Held requests fail at once, and so do later ones; running requests finish."""
    for replica in pair.all:
        replica.paused = True
    running = Reading(pair.service.generate(request_of(PROMPT)))
    pair.unavailable = {"r0": "draining", "r1": "draining"}
    pair.publish()
    held = Reading(pair.service.generate(request_of(PROMPT, seed=2)))

    pair.service.turn_away(lambda: NoReplica("nobody will come"))
    later = Reading(pair.service.generate(request_of(PROMPT, seed=3)))

    for refused in (held, later):
        with pytest.raises(NoReplica, match="nobody will come"):
            [delta async for delta in refused]
    for replica in pair.all:
        replica.paused = False
    assert tokens([delta async for delta in running]) == answer(request_of(PROMPT))


async def test_before_the_first_replica_there_is_nothing_to_ask(cluster: Cluster) -> None:
    """Requests get a 503, and there is no model."""
    assert cluster.service.model() is None
    with pytest.raises(NoReplica):
        cluster.service.generate(request_of(PROMPT))
    with pytest.raises(NoReplica):
        cluster.service.explain(request_of(PROMPT))


async def test_a_prompt_that_is_too_long_is_counted_as_rejected(pair: Cluster) -> None:
    """It is a 400, without asking a replica."""
    assert pair.service.model() == LIMITS
    with pytest.raises(PromptTooLong):
        pair.service.generate(request_of([1] * LIMITS.max_model_len))
    assert pair.service.counters.rejected == 1


async def test_garbage_from_a_replica_is_counted_and_survived(pair: Cluster) -> None:
    """One malformed frame affects no request."""
    await pair.ask(request_of(PROMPT))
    for replica in pair.all:
        if replica.core.highest:
            replica.send_raw("me", b"\xc1garbage")

    await until(lambda: pair.service.counters.malformed_frames)

    assert tokens((await pair.ask(request_of(PROMPT, seed=5)))[1]) == answer(request_of(PROMPT, seed=5))


async def test_closing_ends_every_stream_by_name(pair: Cluster) -> None:
    """No reader may wait forever, and later requests are refused."""
    stream = pair.service.generate(request_of(PROMPT, max_tokens=3000))
    reading = Reading(stream)
    await anext(reading)

    pair.service.close()

    with pytest.raises(RouterClosed):
        _ = [delta async for delta in reading]
    with pytest.raises(RouterClosed):
        pair.service.generate(request_of(PROMPT))


async def test_a_burst_of_siblings_neither_scatters_nor_herds(
    pair: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """One hundred questions with one new system prompt, at once, over real sockets."""
    shared = list(range(960))
    requests = [request_of([*shared, *range(seed, seed + 20)], seed=seed, max_tokens=4) for seed in range(100)]

    answers = await asyncio.gather(*(pair.ask(request) for request in requests))

    homes = Counter(replica for replica, _ in answers)
    whole = sum(record.forecast.cached_tokens == 0 for record in pair.watcher.finished)
    computed = sum(replica.core.full_prefills for replica in pair.all)
    with capsys.disabled():
        print(f"\n100 siblings on 2 replicas: {dict(homes)}, {whole} sent whole, {computed} full prefills")
    assert [tokens(deltas) for _, deltas in answers] == [answer(request) for request in requests]
    assert whole <= 2
    assert computed <= 4
    assert max(homes.values()) <= 75


async def test_a_reset_empties_every_cache_and_the_index_follows(pair: Cluster) -> None:
    """Benchmarks start with it; a router that kept the blocks in its index would route to hits that are gone."""
    replica, _ = await pair.ask(request_of(PROMPT))
    assert replica is not None
    await pair.indexed(replica, 12)

    assert await pair.service.reset_caches() == ["r0", "r1"]
    await until(lambda: not any(pair.view(name).indexed_blocks for name in ("r0", "r1")))
    assert not any(fake.core.resident for fake in pair.all)


async def test_a_reset_is_refused_while_requests_run(pair: Cluster) -> None:
    """No replica is asked to reset then, so a refused reset empties no cache."""
    for replica in pair.all:
        replica.paused = True
    stream = pair.service.generate(request_of(PROMPT))

    with pytest.raises(CacheInUse, match="1 requests are running"):
        await pair.service.reset_caches()
    stream.cancel()


async def test_a_replica_that_is_used_by_another_router_keeps_its_cache_and_is_named(pair: Cluster) -> None:
    """This router does not know the other routers' requests; the replica does."""
    pair.replicas["r1"].on_message = lambda message: (
        CacheReset(ask_id=message.ask_id, done=False) if isinstance(message, ResetCache) else None
    )

    with pytest.raises(CacheInUse, match="on r1"):
        await pair.service.reset_caches()


async def test_a_replica_that_goes_while_it_is_asked_fails_the_reset(pair: Cluster) -> None:
    """The caller gets an error at once; whether that cache was emptied is unknown."""
    received: list[Request] = []

    def ignore(message: Request) -> Reply | None:
        received.append(message)
        return Refused(request_id=0, reason="internal", message="") if isinstance(message, ResetCache) else None

    pair.replicas["r1"].on_message = ignore
    asked = asyncio.create_task(pair.service.reset_caches())
    await until(lambda: any(isinstance(message, ResetCache) for message in received))
    del pair.replicas["r1"]
    pair.publish()

    with pytest.raises(ReplicaLost, match="r1"):
        await asked


async def test_a_reset_needs_a_replica(cluster: Cluster) -> None:
    """A reset without replicas must not be reported as a success."""
    with pytest.raises(NoReplica):
        await cluster.service.reset_caches()


async def test_who_watches_sees_decisions_prefixes_and_next_evictions(cluster: Cluster) -> None:
    """The replica reports its next evictions itself; too long a list is cut to what a page can show."""
    replica = cluster.add("r0")
    replica.on_message = lambda message: (
        NextEvictions(hashes=b"\1" * 16 * 1000 + b"odd") if isinstance(message, AskNextEvictions) else None
    )
    cluster.publish()
    await cluster.ready("r0")
    await cluster.ask(request_of(PROMPT))

    await until(lambda: cluster.service.activity()[0].next_evictions)
    [seen] = cluster.service.activity()

    assert seen.next_evictions == {"r0": (int.from_bytes(b"\1" * 8, "big"),) * MAX_NEXT_EVICTIONS}
    assert [(each.state, each.explanation.chosen) for each in seen.routed] == [("finished", "r0")]
    assert [node.requests for node in seen.prefixes] == [1]
    assert (seen.running, seen.failed) == ([], [])


async def test_a_request_that_fails_is_among_the_errors(cluster: Cluster) -> None:
    """The error is listed with its reason and the status that its client got."""
    replica = cluster.add("r0")
    cluster.publish()
    await cluster.ready("r0")
    replica.paused = True
    cluster.service.generate(request_of(PROMPT))
    assert [each.state for each in cluster.service.activity()[0].running] == ["sent"]

    cluster.service.end_requests()

    [failed] = cluster.service.activity()[0].failed
    assert (failed.status, failed.replica, failed.reason) == (503, "r0", "the server is shutting down")


async def test_before_the_first_replica_there_is_no_activity(cluster: Cluster) -> None:
    """The model is not known yet."""
    assert cluster.service.activity() == []


async def test_pins_reach_the_replica_and_its_word_comes_back(cluster: Cluster) -> None:
    """The router itself promises nothing: the replica that holds the blocks reports what it pinned."""
    replica = cluster.add("r0")
    heard: list[Generate] = []
    replica.on_message = lambda message: heard.append(message) if isinstance(message, Generate) else None
    replica.core.pinned_tokens = 192
    cluster.publish()
    await cluster.ready("r0")
    pins = (Pin(200, 60.0, b"t" * 16),)

    _, deltas = await cluster.ask(request_of(PROMPT, pins=pins))

    assert heard[0].pins == pins
    assert [delta.pinned_tokens for delta in deltas] == [192, *[None] * (len(deltas) - 1)]
