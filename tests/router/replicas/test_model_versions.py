"""Generations: a request belongs to replicas that name blocks as it does; the others are another index and queue."""

import asyncio
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
import pytest

from homing.events.wire.messages import EventEndpoints
from homing.kvcache.config import KvCacheSettings
from homing.kvcache.hashing import HASH_BYTES
from homing.replica.demo import demo_model_path
from homing.replica.messages import ModelLimits, Parity, ReplicaDescription
from homing.router.backend import AbsentReplica, ClusterView, RouterCounters
from homing.router.config import RouterSettings
from homing.router.errors import InvalidRequest, ModelNotFound, NoReplica, RouterError, Superseded
from homing.router.replicas.membership import text_digests, text_source
from homing.router.replicas.model_versions import OFF_RETRY_S, Enrolment, Generations, Terms
from homing.router.replicas.service import RouterService
from homing.router.routing.policy.base import QUEUE_AHEAD
from homing.router.routing.replica_load import Rest
from homing.router.server import RouterServer

from ..fakes import CACHE, SEED, Reading, SocketReplica, parity_of, request_of, until

VIEW = ClusterView(
    router_id="me", policy="p", waiting=0, in_flight=0, models=[], replicas=[], refused=[], counters=RouterCounters()
)


class FakeService:
    """Notes what it is told."""

    def __init__(self, model: str, terms: Terms, counters: RouterCounters) -> None:
        self.name = model
        self.terms = terms
        self.counters = counters
        self.members: list[str] = []
        self.resting: Mapping[str, Rest] = {}
        self.closed = False
        self.held = 0
        self.warmed: list[tuple[str, float]] = []
        self.refusal: Callable[[], RouterError] | None = None

    def turn_away(self, refusal: Callable[[], RouterError] | None) -> None:
        self.refusal = refusal

    async def warm_up(self, replica_id: str, share: float) -> bool:
        self.warmed.append((replica_id, share))
        return not self.held

    def start(self, loop: object) -> None:
        pass

    def supersede(self) -> None:
        self.closed = True

    def waiting(self) -> int:
        return self.held

    def apply_membership(
        self, replicas: Sequence[ReplicaDescription], cluster_seed: int, resting: Mapping[str, Rest]
    ) -> None:
        self.members, self.resting = [replica.replica_id for replica in replicas], resting

    def model(self) -> ModelLimits:
        return ModelLimits(name=self.name, path="", vocab_size=1, max_model_len=1, eos_token_ids=())

    def in_flight(self, replica_id: str) -> int:
        return 3 if replica_id in self.members else 0

    def unique_blocks(self) -> dict[str, int]:
        return dict.fromkeys(self.members, 2)

    def view(self) -> ClusterView:
        return msgspec.structs.replace(VIEW, waiting=1, in_flight=2)


def member(
    name: str, version: int = 1, block_size: int = 16, rest: Rest | None = None, model: str = "fox"
) -> Enrolment:
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
        max_running_requests=1,
        max_batched_tokens=1,
        tensor_parallel_size=1,
        prefill_tokens_per_s=1,
        decode_step_s=1,
    )
    return Enrolment(description, Terms(version, KvCacheSettings(block_size=block_size), Path("m")), rest)


def service(model: str, terms: Terms, counters: RouterCounters, folder: Path) -> RouterService:
    settings = RouterSettings(replica_silence_s=30.0)
    return RouterService(settings, terms.cache, router_id="me", model_dir=folder, counters=counters, rng=Random(1))


class World:
    """Generations over fakes."""

    def __init__(self, *names: str) -> None:
        self.services: list[FakeService] = []
        self.generations = Generations(self._make, VIEW, names or ("fox",), Random(1))
        self.loop = asyncio.new_event_loop()
        self.generations.start(self.loop)

    def _make(self, model: str, terms: Terms, counters: RouterCounters) -> Any:
        self.services.append(FakeService(model, terms, counters))
        return self.services[-1]

    def publish(self, *members: Enrolment) -> None:
        self.generations.apply_membership(members, 7)

    def chosen(self, requests: int, model: str | None = None) -> Counter[int]:
        taken = (self.generations.choose(model) for _ in range(requests))
        return Counter(service.terms.version for service in taken)  # type: ignore[attr-defined]


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.loop.close()


@pytest.fixture
def two() -> Iterator[World]:
    """With two models."""
    made = World("fox", "owl")
    yield made
    made.loop.close()


def test_before_the_first_replica_there_is_nobody_to_ask(world: World) -> None:
    """503, as with a single service."""
    assert world.generations.models() == []
    assert not world.generations.exact()
    with pytest.raises(NoReplica):
        world.generations.choose(None)


def test_versions_that_name_blocks_alike_share_an_index(world: World) -> None:
    """Most updates change no name: hits go on, and requests of the old replica continue on the new one."""
    world.publish(member("r0"), member("r1", version=2))

    assert [service.members for service in world.services] == [["r0", "r1"]]


def test_replicas_that_name_blocks_otherwise_are_kept_apart(world: World) -> None:
    """A router that mixed them up would compute every prompt anew, or refuse the new ones."""
    world.publish(member("r0"), member("r1"), member("r2", version=2, block_size=32, rest="warming"))

    assert [service.members for service in world.services] == [["r0", "r1"], ["r2"]]
    assert world.services[1].resting == {"r2": "warming"}
    assert world.chosen(20) == {1: 20}
    assert world.generations.unique_tokens() == {"r0": 32, "r1": 32, "r2": 64}
    assert world.generations.in_flight("r2") == 3
    view = world.generations.view()
    assert (view.waiting, view.in_flight) == (2, 4)


def test_new_requests_are_dealt_out_by_how_many_take_them(world: World) -> None:
    """The first of the new ones must not get everything, nor nothing."""
    world.publish(*(member(f"r{n}") for n in range(3)), member("r3", version=2, block_size=32))

    assert 200 < world.chosen(1000)[2] < 300


def test_a_generation_ends_with_its_last_replica_but_for_the_newest(world: World) -> None:
    """The newest holds requests until replicas come: a cluster may have been scaled to none."""
    world.publish(member("r0"), member("r1", version=2, block_size=32))
    world.publish(member("r1", version=2, block_size=32))
    assert [service.closed for service in world.services] == [True, False]

    world.publish()

    assert [service.closed for service in world.services] == [True, False]
    assert world.chosen(3) == {2: 3}
    world.publish(member("r0", version=2, block_size=32))
    assert len(world.services) == 2


def test_who_drains_still_gets_what_its_generation_holds(world: World) -> None:
    """It was tokenized for these replicas and can go nowhere else: else it would wait for their end, and fail then."""
    world.publish(member("r0", rest="draining"), member("r1"), member("r2", version=2, block_size=32, rest="warming"))
    assert [service.resting for service in world.services] == [{"r0": "draining"}, {"r2": "warming"}]
    world.services[0].held = 5
    assert world.generations.in_flight("r0") == 3

    world.publish(member("r0", rest="draining"), member("r2", version=2, block_size=32))

    assert [service.resting for service in world.services] == [{}, {}]
    assert world.generations.in_flight("r0") == 8
    assert world.chosen(20) == {2: 20}


def test_a_replica_is_filled_by_its_own_generation(world: World) -> None:
    """Token ids of one model mean nothing to another."""
    world.publish(member("r0"), member("r1", version=2, block_size=32, rest="warming"))

    def warm_up(name: str, share: float) -> bool:
        return world.loop.run_until_complete(world.generations.warm_up(name, share))

    assert warm_up("r1", 0.25)
    assert warm_up("nobody", 0.25)
    world.services[1].held = 1
    assert not warm_up("r1", 0.5)

    assert [service.warmed for service in world.services] == [[], [("r1", 0.25), ("r1", 0.5)]]


def test_a_replica_that_is_missing_is_shown_until_it_is_there(world: World) -> None:
    """Whoever looks during a rebuild must not think that it was never wanted, nor that one is there and missing."""
    absent = [
        AbsentReplica(replica_id=name, model="fox", state="rebuilding", reason="the process died", since=5.0)
        for name in ("r0", "r9")
    ]
    world.publish(member("r0"))

    world.generations.tell_absent(absent, ())

    assert world.generations.view().absent == absent[1:]


def test_what_is_held_waits_for_new_replicas_where_nobody_else_takes_any(world: World) -> None:
    """A cluster that is scaled to none holds its requests; handed to those who drain, they would keep them for ever."""
    world.publish(member("r0", rest="draining"))
    world.services[0].held = 5

    assert world.services[0].resting == {"r0": "draining"}
    assert world.generations.in_flight("r0") == 3


async def test_a_replaced_generation_ends_with_nothing_held(tmp_path: Path) -> None:
    """Over real sockets: one slow replica with more requests than it takes, then another model."""
    generations = Generations(partial(service, folder=tmp_path), VIEW, ["fake"], Random(1))
    generations.start(asyncio.get_running_loop())
    parity = parity_of(text_digests(tmp_path))
    old, new = SocketReplica("r0", step_s=0.01), SocketReplica("r1")
    old.description = msgspec.structs.replace(old.description, parity=parity, max_running_requests=1)
    new.description = msgspec.structs.replace(
        new.description, parity=msgspec.structs.replace(parity, model_root=b"x" * HASH_BYTES)
    )
    first = Enrolment(old.description, Terms(1, CACHE, tmp_path))
    second = Enrolment(new.description, Terms(2, CACHE, tmp_path))
    try:
        old.start()
        new.start()
        generations.apply_membership([first], SEED)
        await until(lambda: [replica.state for replica in generations.view().replicas] == ["serving"])
        early = [Reading(generations.choose(None).generate(request_of([seed] * 50, seed=seed))) for seed in range(12)]
        await until(lambda: generations.view().replicas[0].waiting >= QUEUE_AHEAD)
        late = [
            Reading(generations.choose(None).generate(request_of([seed] * 50, seed=seed))) for seed in range(12, 24)
        ]
        held = generations.view().waiting
        generations.apply_membership([replace(first, rest="draining"), second], SEED)
        assert generations.view().replicas[0].state == "draining"
        await until(lambda: not generations.in_flight("r0"))
        generations.apply_membership([second], SEED)

        assert held > 0
        assert [sum([len(delta.token_ids) async for delta in each]) for each in early + late] == [8] * 24
    finally:
        generations.close()
        await old.stop()
        await new.stop()


async def test_what_is_held_where_no_replica_is_left_may_begin_anew_at_the_next_model(tmp_path: Path) -> None:
    """An update without room for one more ends the last replica before the first new one is there."""
    generations = Generations(
        lambda model, terms, counters: service(model, terms, counters, tmp_path), VIEW, ["fox"], Random(1)
    )
    generations.start(asyncio.get_running_loop())
    parity = parity_of(text_digests(tmp_path))
    new = msgspec.structs.replace(
        member("r1").description, parity=msgspec.structs.replace(parity, model_root=b"x" * HASH_BYTES)
    )
    old = SocketReplica("r0")
    limits = msgspec.structs.replace(old.description.model, name="fox")
    old.description = msgspec.structs.replace(old.description, parity=parity, model=limits)
    first = Enrolment(old.description, Terms(1, CACHE, tmp_path))
    try:
        generations.apply_membership([replace(first, rest="draining")], SEED)
        chosen = generations.choose("fox")
        held = Reading(chosen.generate(request_of([1] * 50)))
        generations.apply_membership([], SEED)
        assert generations.view().waiting == 1

        generations.apply_membership([Enrolment(new, Terms(2, CACHE, tmp_path))], SEED)

        with pytest.raises(Superseded):
            [delta async for delta in held]
        with pytest.raises(Superseded):
            chosen.generate(request_of([1] * 50))
        assert generations.choose("fox") is not chosen
        assert generations.view().counters.failed == 0
    finally:
        generations.close()
        await old.stop()


def enrolled(replica: SocketReplica, version: int, folder: Path) -> Enrolment:
    """A replica of the model in this folder, served as `fox`."""
    limits = ModelLimits(name="fox", path=str(folder), vocab_size=3072, max_model_len=512, eos_token_ids=(4,))
    parity = parity_of(text_digests(folder))
    return Enrolment(
        msgspec.structs.replace(replica.description, parity=parity, model=limits), Terms(version, CACHE, folder)
    )


async def test_a_held_request_is_tokenized_anew_for_the_model_that_takes_the_place(tmp_path: Path) -> None:
    """From the client's socket to the replicas': the last of the old one is gone before the first new one comes.

    The text side of the old one goes with it.
    """
    other = Path(shutil.copytree(demo_model_path(), tmp_path / "other"))
    with (other / "tokenizer.json").open("a") as file:
        file.write("\n")  # another tokenizer, as far as digests say
    generations = Generations(
        lambda model, terms, counters: service(model, terms, counters, terms.model_dir or tmp_path),
        VIEW,
        ["fox"],
        Random(1),
    )
    generations.start(asyncio.get_running_loop())
    server = RouterServer(RouterSettings(access_log=""), generations)
    old, new = SocketReplica("r0"), SocketReplica("r1")
    before, after = enrolled(old, 1, demo_model_path()), enrolled(new, 2, other)
    try:
        old.start()
        new.start()
        port = await server.start("127.0.0.1", 0)
        generations.apply_membership([replace(before, rest="draining")], SEED)
        await server.front.load_texts()
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            url, body = f"http://127.0.0.1:{port}/v1/completions", {"prompt": "A fox", "max_tokens": 3}
            asking = [
                asyncio.ensure_future(client.post(url, json=body | {"stream": stream})) for stream in (False, True)
            ]
            await until(lambda: generations.view().waiting == 2 or any(each.done() for each in asking))
            generations.apply_membership([], SEED)
            generations.apply_membership([after], SEED)
            await server.front.load_texts()
            answers = await asyncio.gather(*asking)

        assert [answer.status_code for answer in answers] == [200, 200]
        assert answers[0].headers["x-homing-replica"] == "r1"
        assert answers[0].json()["usage"]["completion_tokens"] == 3
        assert not old.core.highest
        assert generations.view().counters.failed == 0
        assert server.front.texts.loaded(text_source(other))
        assert not server.front.texts.loaded(text_source(demo_model_path()))
    finally:
        await server.stop()
        generations.close()
        await old.stop()
        await new.stop()


def test_a_replica_of_a_known_version_is_judged_by_that_version(world: World) -> None:
    """One node with another tokenizer must be refused by its generation, not get one of its own."""
    world.publish(member("r0"), member("r1", block_size=32))

    assert [service.members for service in world.services] == [["r0", "r1"]]


def test_a_model_that_was_turned_off_refuses_and_others_do_not(two: World) -> None:
    """Scaled to none by an operator: to hold a request until its time is over helps nobody."""
    two.publish(member("r0", rest="draining"), member("r1", version=2, model="owl"))

    two.generations.tell_absent((), {"fox"})

    with pytest.raises(NoReplica, match=r"'fox' was scaled to no replica; .* homing scale") as refused:
        two.generations.choose("fox")
    assert refused.value.retry_after_s == OFF_RETRY_S
    assert two.services[0].refusal is not None
    assert two.services[1].refusal is None
    assert two.chosen(3, "owl") == {2: 3}
    two.publish(member("r0"), member("r1", version=2, model="owl"))
    assert two.chosen(3, "fox") == {1: 3}
    two.generations.tell_absent((), ())
    assert two.services[0].refusal is None


def test_a_model_that_was_never_started_and_is_off_says_so(world: World) -> None:
    """Not that its first replica is about to come."""
    world.generations.tell_absent((), {"fox"})

    with pytest.raises(NoReplica, match="was scaled to no replica"):
        world.generations.choose(None)


def test_a_model_that_is_added_is_known_before_its_first_replica_comes(world: World) -> None:
    """503 and a later try, not 404."""
    with pytest.raises(ModelNotFound):
        world.generations.choose("owl")

    world.generations.serve(["fox", "owl"])

    with pytest.raises(NoReplica):
        world.generations.choose("owl")
    world.publish(member("r0"), member("r1", version=2, model="owl"))
    assert world.chosen(3, "owl") == {2: 3}


def test_a_model_that_leaves_refuses_what_comes_and_what_waits_and_ends_with_its_last_replica(two: World) -> None:
    """What runs there ends as it would have; the other model is served as before, without being named, too."""
    both = [member("r0"), member("r1", version=2, model="owl")]
    two.publish(*both)

    two.generations.serve(["fox"])
    two.publish(both[0], replace(both[1], rest="draining"))

    with pytest.raises(ModelNotFound, match="'owl' does not exist; served models: 'fox'"):
        two.generations.choose("owl")
    assert [limits.name for limits in two.generations.models()] == ["fox"]
    assert two.chosen(3) == {1: 3}
    refusal = two.services[1].refusal
    assert refusal is not None
    assert isinstance(refusal(), ModelNotFound)
    assert not two.services[1].closed
    two.publish(both[0])
    assert two.services[1].closed
    assert [model.name for model in two.generations.view().models] == ["fox"]


def test_a_model_that_comes_back_is_served_again(two: World) -> None:
    """Its totals go on: counters that fell would be taken for a restart."""
    two.publish(member("r0"), member("r1", version=2, model="owl"))
    two.services[1].counters.requests = 5
    two.generations.serve(["fox"])
    two.publish(member("r0"))

    two.generations.serve(["fox", "owl"])
    two.publish(member("r0"), member("r1", version=3, model="owl"))

    assert two.chosen(3, "owl") == {3: 3}
    assert two.services[2].counters.requests == 5
    assert two.generations.view().counters.requests == 5


def test_a_router_that_starts_meets_the_last_replicas_of_a_model_that_leaves(world: World) -> None:
    """It must start all the same, and send them nothing."""
    world.publish(member("r0"), member("r1", version=2, model="owl", rest="draining"))

    with pytest.raises(ModelNotFound):
        world.generations.choose("owl")
    assert world.chosen(3) == {1: 3}


def test_models_never_share_a_generation(two: World) -> None:
    """Two models may name blocks alike (the same weights twice); their replicas still answer for one alone."""
    two.publish(member("r0"), member("r1", version=2, model="owl"))

    assert [(service.name, service.members) for service in two.services] == [("fox", ["r0"]), ("owl", ["r1"])]
    assert (two.chosen(5, "fox"), two.chosen(5, "owl")) == ({1: 5}, {2: 5})
    assert [limits.name for limits in two.generations.models()] == ["fox", "owl"]


def test_a_model_is_asked_for_by_its_name(two: World) -> None:
    """A misspelt name is told what there is; with several, one that names none is told so, too."""
    two.publish(member("r0"))

    with pytest.raises(ModelNotFound, match="model 'ox' does not exist; served models: 'fox', 'owl'"):
        two.generations.choose("ox")
    with pytest.raises(InvalidRequest, match=r"field .model.: several .* .fox., .owl."):
        two.generations.choose(None)


def test_one_models_outage_is_not_anothers(two: World) -> None:
    """A model without replicas answers 503 or holds what it has; the other's queue, index and end are its own."""
    two.publish(member("r0"))

    with pytest.raises(NoReplica):
        two.generations.choose("owl")
    two.publish(member("r1", version=2, model="owl"))

    assert [service.closed for service in two.services] == [False, False]
    assert two.chosen(3, "fox") == {1: 3}
    seen = {model.name: (model.waiting, model.in_flight) for model in two.generations.view().models}
    assert seen == {"fox": (1, 2), "owl": (1, 2)}


def test_a_model_that_is_replaced_keeps_its_requests_from_the_others(two: World) -> None:
    """Who drains still gets what its own model holds, whatever others have."""
    two.publish(member("r0", rest="draining"), member("r1", version=2, model="owl"))

    assert two.services[0].resting == {"r0": "draining"}
