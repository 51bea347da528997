"""Failures of engines, over real sockets: afterwards the index is exact, or known to be stale."""

from homing.router.replicas.external.external_replica import HEALTH_INTERVAL_S

from ...fakes import request_of, until
from .fakes import answer
from .test_external_replica import BLOCKS, PROMPT, Cluster, cluster, pair, tokens

__all__ = ["cluster", "pair"]  # fixtures


async def hold(pair: Cluster) -> str:
    """Let an engine hold the prompt; return its name when all its events are applied."""
    home, _ = await pair.ask(max_tokens=1)
    await until(lambda: pair.replica(home).indexed_blocks == BLOCKS)
    return home


def held_at(pair: Cluster, name: str) -> int:
    return {row.replica_id: row.held_blocks for row in pair.service.explain(request_of(PROMPT)).replicas}[name]


async def test_an_engine_that_restarts_at_once_behind_its_address_holds_what_it_stores_anew(pair: Cluster) -> None:
    """The restart is faster than any health check: only the event stream shows it."""
    home = await hold(pair)
    engine = pair.engines[home]

    await engine.stop()
    await engine.start()
    await until(lambda: pair.replica(home).indexed_blocks == 0)
    engine.store(PROMPT[:32])
    await until(lambda: pair.replica(home).indexed_blocks == 2)
    await pair.live(home)

    assert held_at(pair, home) == 2


async def test_a_hung_engine_is_known_to_be_stale(pair: Cluster) -> None:
    """Its connections stay open; the only sign is that its publisher stops answering, noticed within a second."""
    home = await hold(pair)
    assert HEALTH_INTERVAL_S <= 1.0

    pair.engines[home].behaves.hung = True
    await until(lambda: pair.replica(home).feed == "stale")
    pair.engines[home].behaves.hung = False
    await pair.live(home)

    assert pair.replica(home).indexed_blocks == BLOCKS


async def test_a_lost_last_batch_is_noticed_without_a_later_one(pair: Cluster) -> None:
    """vLLM sends no heartbeats, so the router asks for later batches."""
    home = await hold(pair)

    pair.engines[home].publish({"type": "AllBlocksCleared"}, heard=False)

    await until(lambda: pair.replica(home).indexed_blocks == 0)


async def test_a_dead_event_port_leaves_an_engine_in_routing_without_credit(pair: Cluster) -> None:
    """Its HTTP server works, so it is not dropped, but its blocks are no longer credited."""
    home = await hold(pair)

    pair.engines[home].lose_event_ports()
    await until(lambda: pair.replica(home).feed == "stale")
    row = next(row for row in pair.service.explain(request_of(PROMPT)).replicas if row.replica_id == home)

    assert row.uncached_tokens == len(PROMPT)
    assert pair.replica(home).state == "serving"


async def test_an_engine_that_runs_out_of_memory_costs_no_answer_and_keeps_no_credit(pair: Cluster) -> None:
    """vLLM ends its streams with an error, returns 500, then exits; it comes back with an empty cache."""
    home = await hold(pair)
    engine, other = pair.engines[home], next(name for name in pair.engines if name != home)
    engine.behaves.memory_tokens = 3

    served, deltas = await pair.ask(seed=4)
    refused, answered = await pair.ask(seed=5)
    await until(lambda: pair.replica(home).state == "joining")
    await engine.stop()
    engine.behaves.memory_tokens, engine.behaves.refusal, engine.behaves.healthy = None, None, True
    await engine.start()
    await pair.live(home)

    assert (served, refused) == (other, other)
    assert (tokens(deltas), tokens(answered)) == (answer(PROMPT, 4, 8), answer(PROMPT, 5, 8))
    assert pair.engines[other].bodies[0]["prompt"] == [*PROMPT, *answer(PROMPT, 4, 3)]
    assert pair.service.view().counters.failed == 0
    assert (held_at(pair, home), held_at(pair, other)) == (0, BLOCKS)


async def test_event_ports_that_nobody_binds_are_stale_and_not_live(cluster: Cluster) -> None:
    """No event was ever received from there."""
    (engine,) = await cluster.add("b0", events=False)
    ports, engine._ports = engine._ports, (*(engine._ports or (0, 0, 0))[:1], 1, 1)
    cluster.service.apply_membership([], 7)
    cluster.tell()
    engine._ports = ports

    await until(lambda: (cluster.replica("b0").state, cluster.replica("b0").feed) == ("serving", "stale"))
    _, deltas = await cluster.ask()

    assert len(tokens(deltas)) == 8


async def test_an_engine_that_comes_back_with_another_model_is_refused(pair: Cluster) -> None:
    """It answers at the same address within a moment, but wrongly."""
    home = await hold(pair)
    engine = pair.engines[home]

    await engine.stop()
    engine.model = "another"
    await engine.start()
    await until(lambda: pair.service.view().refused)
    refused = pair.service.view().refused[0]
    other, _ = await pair.ask()
    engine.model = "fake"
    await pair.live(home)

    assert (refused.replica_id, refused.field) == (home, "model")
    assert other != home
    assert not pair.service.view().refused


async def test_an_engine_that_comes_back_with_another_tokenizer_is_refused(pair: Cluster) -> None:
    """Our token ids mean other words there."""
    home = await hold(pair)
    engine = pair.engines[home]

    await engine.stop()
    engine.canary_ids = (9, 9)
    await engine.start()
    await until(lambda: pair.service.view().refused)

    assert pair.service.view().refused[0].field == "tokenizer"
    assert pair.replica(home).state == "joining"


async def test_an_engine_that_floods_the_router_costs_its_own_requests_only(pair: Cluster) -> None:
    """What follows the error is not read: its connection is closed, so that the engine stops, too."""
    home = await hold(pair)
    engine = pair.engines[home]
    engine.behaves.floods = True

    served, deltas = await pair.ask(seed=4)
    await until(lambda: engine.hung_up == 1)

    assert served != home
    assert tokens(deltas) == answer(PROMPT, 4, 8)
    assert pair.service.view().counters.failed == 0
