"""Models and their versions: replicas of a version hash blocks alike; each version has its own queue."""

import asyncio
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from homing.events.follow.subscription import FeedStatus
from homing.events.wire.messages import EventEndpoints
from homing.kvcache.config import KvCacheSettings
from homing.kvcache.hashing import HASH_BYTES
from homing.replica.demo import demo_model_path
from homing.replica.messages import ModelLimits, Parity, ReplicaDescription
from homing.router.backend import AbsentReplica, ClusterView, ReplicaView, RouterCounters
from homing.router.config import RouterSettings
from homing.router.control import (
    Answer,
    AnyQuestion,
    CountInFlight,
    Demand,
    MeasureDemand,
    Member,
    SetMembership,
    SetMissing,
    WarmUp,
    WarmUpEnded,
    WeighCaches,
)
from homing.router.errors import InvalidRequest, ModelNotFound, NoReplica, RouterError, Superseded
from homing.router.replicas.membership import text_digests, text_source
from homing.router.replicas.model_versions import OFF_RETRY_S, ModelVersions
from homing.router.replicas.service import RouterService
from homing.router.routing.replica_load import UnavailableReason
from homing.router.server import RouterServer

from ..fakes import CACHE, SEED, Reading, SocketReplica, parity_of, request_of, until

VIEW = ClusterView(
    router_id="me", policy="p", waiting=0, in_flight=0, models=[], replicas=[], refused=[], counters=RouterCounters()
)


class FakeService:
    """Records the calls that it gets."""

    def __init__(self, first: Member, counters: RouterCounters) -> None:
        self.name = first.description.model.name
        self.version = first.version
        self.counters = counters
        self.members: list[str] = []
        self.unavailable: Mapping[str, UnavailableReason] = {}
        self.closed = False
        self.held = 0
        self.offered: frozenset[str] = frozenset()
        self.warmed: list[tuple[str, float]] = []
        self.refusal: Callable[[], RouterError] | None = None

    def adapters(self) -> frozenset[str]:
        return self.offered

    def turn_away(self, refusal: Callable[[], RouterError] | None) -> None:
        self.refusal = refusal

    async def until_joined(self, replica_id: str) -> str:
        return "of another size" if replica_id == "odd" else ""

    async def warm_up(self, replica_id: str, share: float) -> bool:
        self.warmed.append((replica_id, share))
        return not self.held

    def supersede(self) -> None:
        self.closed = True

    @property
    def waiting(self) -> int:
        return self.held

    @property
    def waiting_tokens(self) -> int:
        return 10 * self.held

    def apply_membership(
        self, replicas: Sequence[ReplicaDescription], cluster_seed: int, unavailable: Mapping[str, UnavailableReason]
    ) -> None:
        self.members, self.unavailable = [replica.replica_id for replica in replicas], unavailable

    def model(self) -> ModelLimits:
        return ModelLimits(name=self.name, path="", vocab_size=1, max_model_len=1, eos_token_ids=())

    def in_flight(self, replica_id: str) -> int:
        return 3 if replica_id in self.members else 0

    def unique_blocks(self) -> dict[str, int]:
        return dict.fromkeys(self.members, 2)

    def view(self) -> ClusterView:
        replicas = [shown(name, self.name) for name in self.members]
        return msgspec.structs.replace(VIEW, waiting=1, in_flight=2, replicas=replicas)


def shown(name: str, model: str) -> ReplicaView:
    """Return a serving replica with one running and one waiting request."""
    return ReplicaView(
        replica_id=name,
        epoch=1,
        node="",
        state="serving",
        feed=FeedStatus.LIVE,
        model=model,
        num_blocks=1,
        running=1,
        waiting=1,
        queued_prefill_tokens=100,
        prefill_tokens_per_s=50.0,
        decode_step_s=1.0,
        pinned_blocks=4,
    )


def member(
    name: str, version: int = 1, block_size: int = 16, unavailable: UnavailableReason | None = None, model: str = "fox"
) -> Member:
    parity = Parity(
        tokenizer_digest="",
        template_digest="",
        block_size=block_size,
        hash_algorithm="",
        model_root=b"",
        canary=b"",
    )
    description = ReplicaDescription(
        replica_id=name,
        epoch=1,
        request_endpoint="",
        event_endpoints=EventEndpoints(events="", replay="", state="", snapshot=""),
        parity=parity,
        model=ModelLimits(name=model, path="", vocab_size=1, max_model_len=1, eos_token_ids=()),
        num_blocks=1,
        max_running_requests=8,
        max_batched_tokens=1,
        tensor_parallel_size=1,
        prefill_tokens_per_s=1,
        decode_step_s=1,
    )
    return Member(description, KvCacheSettings(block_size=block_size), "m", version, unavailable)


def service(first: Member, counters: RouterCounters) -> RouterService:
    settings, folder = RouterSettings(replica_silence_s=30.0), Path(first.model_dir or "")
    return RouterService(settings, first.cache, router_id="me", model_dir=folder, counters=counters, rng=Random(1))


def membership(members: Sequence[Member], models: Sequence[str], number: int = 1) -> SetMembership:
    return SetMembership(tuple(models), tuple(members), SEED, number)


class World:
    """Model versions over fake services."""

    def __init__(self, *names: str) -> None:
        self.services: list[FakeService] = []
        self.names = names or ("fox",)
        self.models = ModelVersions(self._make, self.names, router_id="me", policy="p", rng=Random(1))
        self.loop = asyncio.new_event_loop()

    def _make(self, first: Member, counters: RouterCounters) -> Any:
        self.services.append(FakeService(first, counters))
        return self.services[-1]

    def ask(self, question: AnyQuestion) -> Answer:
        return self.loop.run_until_complete(self.models.answer(question))

    def publish(self, *members: Member, serve: Sequence[str] = (), number: int = 1) -> None:
        self.names = tuple(serve) or self.names
        assert self.ask(membership(members, self.names, number)) is None

    def turn_off(self, *models: str) -> None:
        assert self.ask(SetMissing((), frozenset(models))) is None

    def in_flight(self, replica_id: str) -> int:
        answer = self.ask(CountInFlight(replica_id))
        assert isinstance(answer, int)
        return answer

    def chosen(self, requests: int, model: str | None = None) -> Counter[int]:
        taken = (self.models.choose(model) for _ in range(requests))
        return Counter(service.version for service in taken)  # type: ignore[attr-defined]


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.loop.close()


@pytest.fixture
def two() -> Iterator[World]:
    """A world with two models."""
    made = World("fox", "owl")
    yield made
    made.loop.close()


def test_before_the_first_replica_there_is_nobody_to_ask(world: World) -> None:
    """The error is a 503, as with a single service."""
    assert world.models.models() == []
    assert not world.models.exact()
    with pytest.raises(NoReplica):
        world.models.choose(None)


def test_versions_that_name_blocks_alike_share_an_index(world: World) -> None:
    """Most updates keep block hashes: hits continue, and requests of an old replica continue on a new one."""
    world.publish(member("r0"), member("r1", version=2))

    assert [service.members for service in world.services] == [["r0", "r1"]]


def test_replicas_that_name_blocks_otherwise_are_kept_apart(world: World) -> None:
    """A router that mixed them would compute every prompt again, or refuse the new replicas."""
    world.publish(member("r0"), member("r1"), member("r2", version=2, block_size=32, unavailable="warming"))

    assert [service.members for service in world.services] == [["r0", "r1"], ["r2"]]
    assert world.services[1].unavailable == {"r2": "warming"}
    assert world.chosen(20) == {1: 20}
    worths = world.ask(WeighCaches())
    assert isinstance(worths, list)
    assert {each.replica_id: each.unique_tokens for each in worths} == {"r0": 32, "r1": 32, "r2": 64}
    assert {(each.pinned_blocks, each.prefill_tokens_per_s) for each in worths} == {(4, 50.0)}
    assert world.in_flight("r2") == 3
    view = world.models.view()
    assert (view.waiting, view.in_flight) == (2, 4)


def test_new_requests_are_dealt_out_by_how_many_take_them(world: World) -> None:
    """The first new replica must get neither all requests nor none."""
    world.publish(*(member(f"r{n}") for n in range(3)), member("r3", version=2, block_size=32))

    assert 200 < world.chosen(1000)[2] < 300


def test_a_generation_ends_with_its_last_replica_but_for_the_newest(world: World) -> None:
    """The newest version holds requests until replicas join: a cluster may have been scaled to zero."""
    world.publish(member("r0"), member("r1", version=2, block_size=32))
    world.publish(member("r1", version=2, block_size=32))
    assert [service.closed for service in world.services] == [True, False]

    world.publish()

    assert [service.closed for service in world.services] == [True, False]
    assert world.chosen(3) == {2: 3}
    world.publish(member("r0", version=2, block_size=32))
    assert len(world.services) == 2


def test_who_drains_still_gets_what_its_generation_holds(world: World) -> None:
    """Requests tokenized for these replicas cannot go elsewhere; otherwise they would wait for the drain, then fail."""
    world.publish(
        member("r0", unavailable="draining"),
        member("r1"),
        member("r2", version=2, block_size=32, unavailable="warming"),
    )
    assert [service.unavailable for service in world.services] == [{"r0": "draining"}, {"r2": "warming"}]
    world.services[0].held = 5
    assert world.in_flight("r0") == 3

    world.publish(member("r0", unavailable="draining"), member("r2", version=2, block_size=32))

    assert [service.unavailable for service in world.services] == [{}, {}]
    assert world.in_flight("r0") == 8
    assert world.chosen(20) == {2: 20}


def test_a_replica_is_filled_by_its_own_generation(world: World) -> None:
    """Token ids of one model mean nothing to another."""
    world.publish(member("r0"), member("r1", version=2, block_size=32, unavailable="warming"))

    assert world.ask(WarmUp("r1", 0.25, 10.0)) == WarmUpEnded()
    assert world.ask(WarmUp("nobody", 0.25, 10.0)) == WarmUpEnded()
    world.services[1].held = 1
    assert world.ask(WarmUp("r1", 0.5, 10.0)) == WarmUpEnded(pressed=True)

    assert [service.warmed for service in world.services] == [[], [("r1", 0.25), ("r1", 0.5)]]


def test_a_replica_that_is_missing_is_shown_until_it_is_there(world: World) -> None:
    """During a rebuild, the view must not omit a wanted replica, nor list one as both present and missing."""
    absent = [
        AbsentReplica(replica_id=name, model="fox", state="rebuilding", reason="the process died", since=5.0)
        for name in ("r0", "r9")
    ]
    world.publish(member("r0"))

    world.ask(SetMissing(tuple(absent)))

    assert world.models.view().absent == absent[1:]


def test_what_is_held_waits_for_new_replicas_where_nobody_else_takes_any(world: World) -> None:
    """A cluster scaled to zero holds its requests; draining replicas that received them would never stop."""
    world.publish(member("r0", unavailable="draining"))
    world.services[0].held = 5

    assert world.services[0].unavailable == {"r0": "draining"}
    assert world.in_flight("r0") == 3


async def test_a_replaced_generation_ends_with_nothing_held(tmp_path: Path) -> None:
    """Over real sockets: one slow replica with more requests than it accepts, then another model."""
    models = ModelVersions(service, ["fake"], router_id="me", policy="p", rng=Random(1))
    parity = parity_of(text_digests(tmp_path))
    old, new = SocketReplica("r0", step_s=0.01), SocketReplica("r1")
    old.description = msgspec.structs.replace(old.description, parity=parity, max_running_requests=1)
    new.description = msgspec.structs.replace(
        new.description, parity=msgspec.structs.replace(parity, model_root=b"x" * HASH_BYTES)
    )
    first = Member(old.description, CACHE, str(tmp_path), 1)
    second = Member(new.description, CACHE, str(tmp_path), 2)
    try:
        old.start()
        new.start()
        await models.answer(membership([first], ["fake"]))
        await until(lambda: [replica.state for replica in models.view().replicas] == ["serving"])
        early = [Reading(models.choose(None).generate(request_of([seed] * 50, seed=seed))) for seed in range(12)]
        await until(lambda: models.view().replicas[0].waiting >= 4)
        late = [Reading(models.choose(None).generate(request_of([seed] * 50, seed=seed))) for seed in range(12, 24)]
        await models.answer(membership([replace(first, unavailable="draining"), second], ["fake"]))
        assert models.view().replicas[0].state == "draining"
        while await models.answer(CountInFlight("r0")) != 0:  # noqa: ASYNC110 - as the controller does
            await asyncio.sleep(0.005)
        await models.answer(membership([second], ["fake"]))

        assert [sum([len(delta.token_ids) async for delta in each]) for each in early + late] == [8] * 24
    finally:
        models.close()
        await old.stop()
        await new.stop()


async def test_what_is_held_where_no_replica_is_left_may_begin_anew_at_the_next_model(tmp_path: Path) -> None:
    """An update without surge stops the last old replica before the first new one joins."""
    models = ModelVersions(service, ["fox"], router_id="me", policy="p", rng=Random(1))
    parity = parity_of(text_digests(tmp_path))
    new = msgspec.structs.replace(
        member("r1").description, parity=msgspec.structs.replace(parity, model_root=b"x" * HASH_BYTES)
    )
    old = SocketReplica("r0")
    limits = msgspec.structs.replace(old.description.model, name="fox")
    old.description = msgspec.structs.replace(old.description, parity=parity, model=limits)
    first = Member(old.description, CACHE, str(tmp_path), 1)
    try:
        await models.answer(membership([replace(first, unavailable="draining")], ["fox"]))
        chosen = models.choose("fox")
        held = Reading(chosen.generate(request_of([1] * 50)))
        await models.answer(membership([], ["fox"]))
        assert models.view().waiting == 1

        await models.answer(membership([Member(new, CACHE, str(tmp_path), 2)], ["fox"]))

        with pytest.raises(Superseded):
            [delta async for delta in held]
        with pytest.raises(Superseded):
            chosen.generate(request_of([1] * 50))
        assert models.choose("fox") is not chosen
        assert models.view().counters.failed == 0
    finally:
        models.close()
        await old.stop()


def enrolled(replica: SocketReplica, version: int, folder: Path) -> Member:
    """Return a replica of the model in this folder, served as `fox`."""
    limits = ModelLimits(name="fox", path=str(folder), vocab_size=4096, max_model_len=512, eos_token_ids=(4,))
    parity = parity_of(text_digests(folder))
    description = msgspec.structs.replace(replica.description, parity=parity, model=limits)
    return Member(description, CACHE, str(folder), version)


async def test_a_held_request_is_tokenized_anew_for_the_model_that_takes_the_place(tmp_path: Path) -> None:
    """From the client's socket to the replicas': the last old replica leaves before the first new one joins.

    The old model's tokenizer and template are unloaded with it.
    """
    other = Path(shutil.copytree(demo_model_path(), tmp_path / "other"))
    with (other / "tokenizer.json").open("a") as file:
        file.write("\n")  # changes the tokenizer's digest
    models = ModelVersions(service, ["fox"], router_id="me", policy="p", rng=Random(1))
    server = RouterServer(RouterSettings(access_log=""), models)
    old, new = SocketReplica("r0"), SocketReplica("r1")
    before, after = enrolled(old, 1, demo_model_path()), enrolled(new, 2, other)
    try:
        old.start()
        new.start()
        port = await server.start("127.0.0.1", 0)
        await models.answer(membership([replace(before, unavailable="draining")], ["fox"]))
        await server.front.load_texts()
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            url, body = f"http://127.0.0.1:{port}/v1/completions", {"prompt": "A fox", "max_tokens": 3}
            asking = [
                asyncio.ensure_future(client.post(url, json=body | {"stream": stream})) for stream in (False, True)
            ]
            await until(lambda: models.view().waiting == 2 or any(each.done() for each in asking))
            await models.answer(membership([], ["fox"]))
            await models.answer(membership([after], ["fox"]))
            await server.front.load_texts()
            answers = await asyncio.gather(*asking)

        assert [answer.status_code for answer in answers] == [200, 200]
        assert answers[0].headers["x-homing-replica"] == "r1"
        assert answers[0].json()["usage"]["completion_tokens"] == 3
        assert not old.core.highest
        assert models.view().counters.failed == 0
        assert server.front.texts.loaded(text_source(other))
        assert not server.front.texts.loaded(text_source(demo_model_path()))
    finally:
        await server.stop()
        models.close()
        await old.stop()
        await new.stop()


def test_a_replica_of_a_known_version_is_judged_by_that_version(world: World) -> None:
    """A node with another tokenizer must be refused by its version, not get a version of its own."""
    world.publish(member("r0"), member("r1", block_size=32))

    assert [service.members for service in world.services] == [["r0", "r1"]]


def test_a_model_that_was_turned_off_refuses_and_others_do_not(two: World) -> None:
    """The operator scaled it to zero: holding a request until its deadline would not help."""
    two.publish(member("r0", unavailable="draining"), member("r1", version=2, model="owl"))

    two.turn_off("fox")

    with pytest.raises(NoReplica, match=r"'fox' is scaled to zero replicas; .* homing scale") as refused:
        two.models.choose("fox")
    assert refused.value.retry_after_s == OFF_RETRY_S
    assert two.services[0].refusal is not None
    assert two.services[1].refusal is None
    assert two.chosen(3, "owl") == {2: 3}
    two.publish(member("r0"), member("r1", version=2, model="owl"))
    assert two.chosen(3, "fox") == {1: 3}
    two.turn_off()
    assert two.services[0].refusal is None


def test_a_model_that_was_never_started_and_is_off_says_so(world: World) -> None:
    """The error must not promise a first replica."""
    world.turn_off("fox")

    with pytest.raises(NoReplica, match="is scaled to zero replicas"):
        world.models.choose(None)


def test_a_model_that_is_added_is_known_before_its_first_replica_comes(world: World) -> None:
    """The error is a 503 to be retried, not a 404."""
    with pytest.raises(ModelNotFound):
        world.models.choose("owl")

    world.publish(serve=["fox", "owl"])

    with pytest.raises(NoReplica):
        world.models.choose("owl")
    world.publish(member("r0"), member("r1", version=2, model="owl"))
    assert world.chosen(3, "owl") == {2: 3}


def test_a_model_that_leaves_refuses_what_comes_and_what_waits_and_ends_with_its_last_replica(two: World) -> None:
    """Its running requests finish normally; the other model is served as before, also to requests without a name."""
    both = [member("r0"), member("r1", version=2, model="owl")]
    two.publish(*both)

    two.publish(both[0], replace(both[1], unavailable="draining"), serve=["fox"])

    with pytest.raises(ModelNotFound, match="'owl' does not exist; served models: 'fox'"):
        two.models.choose("owl")
    assert [limits.name for limits in two.models.models()] == ["fox"]
    assert two.chosen(3) == {1: 3}
    refusal = two.services[1].refusal
    assert refusal is not None
    assert isinstance(refusal(), ModelNotFound)
    assert not two.services[1].closed
    two.publish(both[0])
    assert two.services[1].closed
    assert [model.name for model in two.models.view().models] == ["fox"]


def test_a_model_that_comes_back_is_served_again(two: World) -> None:
    """Its totals continue: counters that fell would be taken for a restart."""
    two.publish(member("r0"), member("r1", version=2, model="owl"))
    two.services[1].counters.requests = 5
    two.publish(member("r0"), serve=["fox"])

    two.publish(member("r0"), member("r1", version=3, model="owl"), serve=["fox", "owl"])

    assert two.chosen(3, "owl") == {3: 3}
    assert two.services[2].counters.requests == 5
    assert two.models.view().counters.requests == 5


def test_a_router_that_starts_meets_the_last_replicas_of_a_model_that_leaves(world: World) -> None:
    """It must start all the same, and send them no requests."""
    world.publish(member("r0"), member("r1", version=2, model="owl", unavailable="draining"))

    with pytest.raises(ModelNotFound):
        world.models.choose("owl")
    assert world.chosen(3) == {1: 3}


def test_models_never_share_a_generation(two: World) -> None:
    """Two models may hash blocks alike (the same weights twice); their replicas still serve only one model."""
    two.publish(member("r0"), member("r1", version=2, model="owl"))

    assert [(service.name, service.members) for service in two.services] == [("fox", ["r0"]), ("owl", ["r1"])]
    assert (two.chosen(5, "fox"), two.chosen(5, "owl")) == ({1: 5}, {2: 5})
    assert [limits.name for limits in two.models.models()] == ["fox", "owl"]


def test_a_model_is_asked_for_by_its_name(two: World) -> None:
    """For an unknown name, the error lists the served models; with several models, it also does for no name."""
    two.publish(member("r0"))

    with pytest.raises(ModelNotFound, match="model 'ox' does not exist; served models: 'fox', 'owl'"):
        two.models.choose("ox")
    with pytest.raises(InvalidRequest, match=r"field .model.: several .* .fox., .owl."):
        two.models.choose(None)


def test_an_adapter_is_asked_for_by_its_name(two: World) -> None:
    """It is served by the model whose engines offer it; a model's own name goes before another's adapter."""
    two.publish(member("r0"))
    (service,) = two.services
    service.offered = frozenset({"red", "fox"})

    assert two.models.choose("red") is two.models.choose("fox") is service
    with pytest.raises(ModelNotFound, match=r"served models: .*'red'"):
        two.models.choose("ox")


def test_one_models_outage_is_not_anothers(two: World) -> None:
    """A model without replicas returns 503 or holds its requests; the other's queue, index and end are separate."""
    two.publish(member("r0"))

    with pytest.raises(NoReplica):
        two.models.choose("owl")
    two.publish(member("r1", version=2, model="owl"))

    assert [service.closed for service in two.services] == [False, False]
    assert two.chosen(3, "fox") == {1: 3}
    seen = {model.name: (model.waiting, model.in_flight) for model in two.models.view().models}
    assert seen == {"fox": (1, 2), "owl": (1, 2)}


def test_a_model_that_is_replaced_keeps_its_requests_from_the_others(two: World) -> None:
    """Draining replicas still get their own model's held requests, whatever other models have."""
    two.publish(member("r0", unavailable="draining"), member("r1", version=2, model="owl"))

    assert two.services[0].unavailable == {"r0": "draining"}


def test_a_membership_that_comes_late_is_ignored(world: World) -> None:
    """Ray may run two calls of one caller in either order; the router would use a replica that is gone."""
    world.publish(member("r1"), number=7)

    world.publish(member("r0"), member("r1"), number=6)

    assert world.services[0].members == ["r1"]


def test_a_replica_that_its_version_refuses_is_not_warmed_up(world: World) -> None:
    """The controller gets the reason and replaces the replica."""
    world.publish(member("odd"))

    assert world.ask(WarmUp("odd", 0.5, 10.0)) == WarmUpEnded(refusal="the router refused it: of another size")
    assert world.services[0].warmed == []


def test_demand_is_measured_by_model_over_the_replicas_that_serve(two: World) -> None:
    """A draining replica of an old version takes no new requests; a model without replicas needs a first one."""
    two.publish(member("r0", unavailable="draining"), member("r1", version=2, block_size=32), member("r2", 3, 32))
    two.services[0].held = 3

    demands = two.ask(MeasureDemand())

    assert isinstance(demands, dict)
    fox = Demand(
        held_requests=2,
        held_tokens=30,
        queued_tokens=200,
        running=4,
        slots=16,
        prefill_tokens_per_s=100.0,
        serving=2,
    )
    assert demands["fox"] == fox
    owl = demands["owl"]
    assert (owl.held_requests, owl.serving, owl.slots) == (1, 0, 0)
