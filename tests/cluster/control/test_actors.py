"""The processes of ranks and routers, without Ray."""

import asyncio
import contextlib
import os
import resource
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayError, RayTaskError

from homing.cluster.config import Settings, load_settings
from homing.cluster.control.actors import (
    SPARE_NICENESS,
    ReplicaRank,
    RouterProcess,
    death,
    keep_going,
    step_limit_s,
    until_silent,
    within,
)
from homing.cluster.control.control_messages import (
    ClusterModel,
    Failed,
    Listening,
    Models,
    RankSpec,
    Rendezvous,
    Started,
)
from homing.replica.config import ReplicaSettings
from homing.router.control import CountInFlight, SetMembership

from ...router.fakes import description_of
from ..fakes import FakeRank, FakeRouter


class ThreadedRank(FakeRank):
    """Records the thread in which each phase of its life runs."""

    def __init__(self, spec: RankSpec) -> None:
        super().__init__(spec)
        self.threads = [threading.get_ident()]
        self.running = threading.Event()

    def run(self) -> None:
        self.threads.append(threading.get_ident())
        self.running.set()
        super().run()


class Panic(BaseException):
    """The exception that a Rust library raises when it panics."""


class PanickyRank(FakeRank):
    """A rank that panics, either at its start or while it runs."""

    def __init__(self, spec: RankSpec) -> None:
        if spec.model.settings.replica.model == "torn":
            raise Panic("index out of bounds")
        super().__init__(spec)

    def run(self) -> None:
        raise Panic("a poisoned lock")


def rank_spec(model: str) -> RankSpec:
    """Spec of rank 0 of 1 of this model."""
    settings = Settings(replica=ReplicaSettings(model=model))
    spec = ClusterModel(settings=settings, seed=7, model_dir="", run_dir=None, host="127.0.0.1")
    return RankSpec(spec, "r0", 1, 0, 1, Rendezvous("127.0.0.1", 1, b""))


def test_a_rank_waits_until_its_process_is_prepared() -> None:
    """Two threads that import transformers at once fail: a rank that took a spare process at once could not start."""
    preparing, go_on, made = threading.Event(), threading.Event(), threading.Event()

    def prepare(spec: ClusterModel) -> None:
        preparing.set()
        go_on.wait(30)
        assert not made.is_set()

    def make(spec: RankSpec) -> FakeRank:
        assert go_on.is_set(), "made while the process was being prepared"
        made.set()
        return FakeRank(spec)

    frozen: list[bool] = []
    actor, spec = ReplicaRank(make, after_loading=lambda: frozen.append(made.is_set())), rank_spec("m")
    actor.prepare(prepare, spec.model)
    assert preparing.wait(30)
    starting = threading.Thread(target=actor.start, args=(spec,))
    starting.start()
    early = made.wait(0.05)
    go_on.set()
    starting.join(30)
    actor.stop()

    assert not early
    assert isinstance(actor.started(), Started)
    assert frozen == [False, True], "the garbage collector traverses what was prepared while requests wait"


def may_raise_priority() -> bool:
    """Whether a thread of this process can be given a spare's priority, and its own back."""
    done: list[bool] = []

    def lower_and_raise() -> None:
        thread, before = threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, thread, max(before, SPARE_NICENESS))
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, before)
        done.append(before < SPARE_NICENESS and os.getpriority(os.PRIO_PROCESS, thread) == before)

    thread = threading.Thread(target=lower_and_raise)
    thread.start()
    thread.join()
    return done[0]


@pytest.mark.skipif(not may_raise_priority(), reason="needs CAP_SYS_NICE, and a low niceness")
def test_a_preparation_that_requests_wait_for_goes_on_at_normal_priority() -> None:
    """On a busy machine, it would else take longer than a start without it."""
    lowered, raised = threading.Event(), threading.Event()
    normal = os.getpriority(os.PRIO_PROCESS, 0)

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def prepare(spec: ClusterModel) -> None:
        if niceness() > normal:
            lowered.set()
        for _ in range(3000):
            if niceness() == normal:
                raised.set()
                return
            time.sleep(0.01)

    actor, spec = ReplicaRank(FakeRank), rank_spec("m")
    actor.prepare(prepare, spec.model)
    assert lowered.wait(30)
    actor.start(spec)
    actor.stop()

    assert raised.is_set()


def test_a_process_that_starts_a_rank_is_not_prepared() -> None:
    """Calls to an actor may overtake each other; the rank then loads everything itself."""
    prepared, made, go_on = threading.Event(), threading.Event(), threading.Event()

    def make(spec: RankSpec) -> FakeRank:
        made.set()
        go_on.wait(30)
        return FakeRank(spec)

    actor, spec = ReplicaRank(make), rank_spec("m")
    starting = threading.Thread(target=actor.start, args=(spec,))
    starting.start()
    assert made.wait(30)
    actor.prepare(lambda _: prepared.set(), spec.model)
    early = prepared.wait(0.05)
    go_on.set()
    starting.join(30)
    actor.stop()

    assert not early


def test_a_rank_is_made_and_run_in_one_thread() -> None:
    """A second computing thread, even if only during loading, slows every later step (replica/load/cpu_threads.py)."""
    made: list[ThreadedRank] = []

    def make(spec: RankSpec) -> ThreadedRank:
        made.append(ThreadedRank(spec))
        return made[-1]

    actor = ReplicaRank(make)
    started = actor.start(rank_spec("m"))
    made[0].running.wait(30)
    actor.stop()

    assert isinstance(started, Started)
    assert len(made[0].threads) == 2
    assert len({*made[0].threads, threading.get_ident()}) == 2


def test_a_rank_that_is_stopped_while_it_loads_serves_nothing() -> None:
    """An early stop must not be lost, because it is not repeated."""
    actors: list[ReplicaRank] = []

    def make(spec: RankSpec) -> FakeRank:
        actors[0].stop()
        return FakeRank(spec)

    actors.append(ReplicaRank(make))
    actors[0].start(rank_spec("m"))

    assert actors[0].watch() == Failed("stopped")


def test_a_rank_settles_once_when_it_has_loaded() -> None:
    """Before that, there is nothing worth excluding from collection, and a failed start exits anyway."""
    settled: list[str] = []
    good, broken = (ReplicaRank(FakeRank, "warning", lambda: settled.append("")) for _ in range(2))

    assert isinstance(good.start(rank_spec("m")), Started)
    assert isinstance(broken.start(rank_spec("broken")), Failed)
    good.stop()

    assert settled == [""]


class HungRank(FakeRank):
    """A rank whose step waits forever for a device."""

    def step_s(self) -> float:
        return 1e9


def test_a_rank_whose_step_does_not_end_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """nccl raises nothing for a hung peer, and the process still answers pings; the group must be rebuilt anyway."""
    monkeypatch.setattr("homing.cluster.control.actors.WATCH_S", 0.01)
    hung, well = ReplicaRank(HungRank), ReplicaRank(FakeRank)
    for actor in (hung, well):
        assert isinstance(actor.start(rank_spec("m")), Started)

    said = [actor.watch() for actor in (hung, well)]
    for actor in (hung, well):
        actor.stop()

    assert said[0] is not None
    assert "a step has not ended after 120 s" in said[0].message
    assert said[1] is None


def test_a_slow_replica_has_time_for_its_longest_step() -> None:
    """2,048 tokens of 8B parameters take two cores minutes; long prompts must not trigger rebuilds."""
    slow = description_of("r0", max_batched_tokens=2048, prefill_tokens_per_s=10.0)
    fast = description_of("r0", max_batched_tokens=2048, prefill_tokens_per_s=10_000.0)

    assert [step_limit_s(120.0, each) for each in (slow, fast, None)] == [2048.0, 120.0, 120.0]


def test_a_rank_that_cannot_start_says_why() -> None:
    """The reason is the rank's own message; the rank does not run."""
    actor = ReplicaRank(FakeRank)

    assert actor.start(rank_spec("broken")) == Failed("ValueError: the weights are torn")
    assert actor.started() == Failed("ValueError: the weights are torn")


def test_a_panic_at_the_start_is_told() -> None:
    """A panic is not an Exception; if it were missed, the start would run into its timeout."""
    assert ReplicaRank(PanickyRank).start(rank_spec("torn")) == Failed("Panic: index out of bounds")


def test_a_panic_while_serving_is_told() -> None:
    """It becomes the reason for the rank's loss."""
    actor = ReplicaRank(PanickyRank)
    actor.start(rank_spec("m"))

    assert actor.watch() == Failed("Panic: a poisoned lock")


def test_a_router_process_answers_the_controller_until_it_stops(tmp_path: Path) -> None:
    """A single method answers all questions on the router's own event loop; `watch` reports its death."""
    settings = load_settings({"served_model_name": "fox", "state_dir": str(tmp_path)}, {})
    spec = (ClusterModel(settings=settings, seed=7, model_dir=None, run_dir=None, host=""),)
    process = RouterProcess(FakeRouter.make)
    assert process.listening() is None

    listening = process.start(spec, Listening(0, 0), SetMembership(("fox",), (), 7, number=1), 0)

    assert process.listening() == listening == Listening(12345, 0)
    assert process.ask(CountInFlight("r0")) == 0
    process.stop()
    assert process.watch() == Failed("stopped")


def test_a_router_may_open_more_files_than_it_was_started_with() -> None:
    """Each client is a file: at the usual soft limit of 1,024, one client's idle connections lock out all others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        RouterProcess(FakeRouter.make)
        raised, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert raised == (65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536))


def test_a_spare_router_starts_with_what_it_has_prepared_or_without_it(tmp_path: Path) -> None:
    """The tokenizer takes most of a router's start. A failed preparation must not keep a router from starting."""
    settings = load_settings({"served_model_name": "fox", "state_dir": str(tmp_path)}, {})
    spec = (ClusterModel(settings=settings, seed=7, model_dir=None, run_dir=None, host=""),)
    given: list[Any] = []

    async def make(
        models: Models, wanted: Listening, membership: SetMembership, seat: int, prepared: Any
    ) -> FakeRouter:
        given.append(prepared)
        return await FakeRouter.make(models, wanted, membership, seat, prepared)

    async def prepare(models: Models) -> str:
        return models[0].name

    async def fail(models: Models) -> None:
        raise FileNotFoundError(models[0].name)

    for preparation in (prepare, fail, None):
        process = RouterProcess(make)
        if preparation is not None:
            process.prepare(preparation, spec)
        assert process.start(spec, Listening(0, 0), SetMembership(("fox",), (), 7, number=1), 0) == Listening(12345, 0)

    assert given == ["fox", None, None]


async def test_an_actor_that_does_not_answer_in_time_is_silent() -> None:
    """Its process may live, and even run."""
    settings = load_settings({"health_timeout_s": "0.001"}, {}).cluster
    actor = SimpleNamespace(ping=SimpleNamespace(remote=asyncio.Event().wait))

    assert await until_silent(actor, settings, interval_s=0.001) == "no answer for 0.001 s"


def test_a_router_that_cannot_start_says_why(tmp_path: Path) -> None:
    """The error is returned as a value: a traceback through Ray is no help to the user."""
    settings = load_settings({"served_model_name": "fox", "state_dir": str(tmp_path / "nowhere")}, {})
    spec = (ClusterModel(settings=settings, seed=7, model_dir=None, run_dir=None, host=""),)

    failed = RouterProcess(FakeRouter.make).start(spec, Listening(0, 0), SetMembership(("fox",), (), 7, number=1), 0)

    assert isinstance(failed, Failed)
    assert "FileNotFoundError" in failed.message


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ActorDiedError(), "the process died"),
        (OutOfMemoryError("Memory on the node was 30 GB / 31 GB. " * 20), "low on memory"),
    ],
)
def test_the_reason_of_a_death_names_memory_where_ray_killed_for_it(error: RayError, reason: str) -> None:
    """After a kill for memory, "the process died" would suggest a crash, and Ray's own paragraph hides the remedy."""
    assert reason in death(error)
    assert len(death(error)) < 120


@pytest.mark.parametrize(
    "error", [TimeoutError(), OutOfMemoryError("it"), RayTaskError("stop", "its traceback", ValueError("it"))]
)
async def test_a_process_that_cannot_stop_does_not_keep_the_others_from_it(error: Exception) -> None:
    """It is killed next; an error here would leave it, its group's other processes and its place behind."""

    async def stop() -> None:
        raise error

    await within(60, stop())


async def test_work_that_fails_is_begun_again() -> None:
    """An autoscaler whose loop has ended starts no replica, and requests for an idle model wait for good."""
    begun = asyncio.Semaphore(0)

    async def work() -> None:
        begun.release()
        raise ValueError("no")

    going = asyncio.create_task(keep_going(work, pause_s=0.0))
    for _ in range(3):
        await begun.acquire()
    going.cancel()
    await asyncio.gather(going, return_exceptions=True)

    assert going.cancelled()
