"""The controller on a real Ray, with fake ranks: what dies is noticed, told to the router, and built again."""

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from homing.cluster import local_ray
from homing.cluster.config import changed_settings, load_settings
from homing.cluster.spec import CONTROLLER, KEEPER, ClusterSpec, ClusterStatus

from . import fakes

pytestmark = pytest.mark.cluster

T = TypeVar("T")
#: Only catches hangs.
PATIENCE_S = 60.0


def until(ask: Callable[[], T | None], what: str) -> T:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if (answer := ask()) is not None:
            return answer
        time.sleep(0.02)
    raise AssertionError(f"never: {what}")


@pytest.fixture(scope="module")
def own_ray() -> Iterator[None]:
    import ray

    ray.cloudpickle.register_pickle_by_value(fakes)
    folder = local_ray.run_folder()
    before = dict(os.environ)
    try:
        local_ray.start_local(load_settings({"replicas": "2", "tensor_parallel_size": "2"}, {}), folder)
        yield
    finally:
        local_ray.leave(20)
        local_ray.remove(folder)
        # A local Ray tells its processes by the environment that it is one; later tests start Rays of other kinds.
        os.environ.clear()
        os.environ.update(before)
        ray.cloudpickle.unregister_pickle_by_value(fakes)


class Cluster:
    """A controller and what can be asked about it."""

    def __init__(self, folder: Path, flags: dict[str, str]) -> None:
        import ray

        from homing.cluster.controller import Controller
        from homing.cluster.keeper import Keeper

        self.folder = folder
        settings = load_settings({"state_dir": str(folder)} | flags, {})
        self.spec = ClusterSpec(settings=settings, seed=7, model_dir="", run_dir=None, host="127.0.0.1")
        node = ray.get_runtime_context().get_node_id()
        keeper = ray.remote(Keeper).options(name=KEEPER, num_cpus=0)
        self.keeper: Any = keeper.remote(fakes.FakeRank, fakes.FakeRouter, node)
        actor = ray.remote(Controller).options(
            name=CONTROLLER, num_cpus=0, max_concurrency=100, max_restarts=-1, max_task_retries=-1
        )
        self.controller: Any = actor.remote(self.spec)
        self.running = self.controller.run.remote()

    def ask(self, question: str, *words: object, **named: object) -> Any:
        import ray

        return ray.get(getattr(self.controller, question).remote(*words, **named), timeout=PATIENCE_S)

    def settled(self) -> ClusterStatus:
        return until(lambda: status if (status := self.status()).settled else None, "it settles")

    def status(self) -> ClusterStatus:
        import ray

        status: ClusterStatus = ray.get(self.controller.status.remote(), timeout=PATIENCE_S)
        return status

    def told(self, *names: str, but_not: int = 0) -> dict[str, tuple[int, list[int]]]:
        """The last membership, once it has exactly these replicas (and none of generation `but_not`)."""

        def ask() -> dict[str, tuple[int, list[int]]] | None:
            told = fakes.memberships(self.folder)
            last = told[-1] if told else {}
            right = set(last) == set(names) and all(epoch != but_not for epoch, _ in last.values())
            return last if right else None

        return until(ask, f"membership {names}: {fakes.memberships(self.folder)}")

    def close(self) -> None:
        import ray

        ray.get(self.controller.stop.remote(), timeout=PATIENCE_S)
        ray.kill(self.controller)
        ray.kill(self.keeper)


@pytest.fixture
def start(own_ray: None, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    clusters: list[Cluster] = []

    def begin(**flags: str) -> Cluster:
        clusters.append(Cluster(tmp_path, flags))
        return clusters[-1]

    yield begin
    for cluster in clusters:
        cluster.close()


def test_a_killed_rank_takes_its_gang_along_and_the_gang_is_rebuilt(start: Callable[..., Cluster]) -> None:
    """Ray kills no siblings: a gang with a hole would hang in its next step."""
    cluster = start(replicas="2", tensor_parallel_size="2")
    before = cluster.told("r0", "r1")
    generation, pids = before["r0"]
    sibling = psutil.Process(pids[1])

    os.kill(pids[0], signal.SIGKILL)
    after = cluster.told("r0", "r1", but_not=generation)

    assert after["r1"] == before["r1"]
    assert not set(after["r0"][1]) & set(pids)
    assert {"r1": before["r1"]} in fakes.memberships(cluster.folder)
    until(lambda: None if sibling.is_running() else True, "the sibling ends")
    rebuilding = until(lambda: next(filter(is_rebuilding, fakes.absences(cluster.folder)), None), "its absence is told")
    assert rebuilding[0][0] == "r0"
    assert "rank 0 the process died" in rebuilding[0][2]
    until(lambda: True if fakes.absences(cluster.folder)[-1] == [] else None, "nobody is missing")


def is_rebuilding(absent: list[list[str]]) -> bool:
    return any(state == "rebuilding" for _, state, _ in absent)


def test_a_killed_router_comes_back_on_its_port_and_knows_the_members(start: Callable[..., Cluster]) -> None:
    """Clients know one address; the new router must not wait for a change in membership."""
    cluster = start(replicas="1")
    members = cluster.told("r0")
    url = until(lambda: cluster.status().url, "the router listens")
    router = next(process for process in local_ray.children() if "RouterProcess" in process.name())
    lines = len(fakes.memberships(cluster.folder))

    router.kill()
    until(lambda: True if len(fakes.memberships(cluster.folder)) > lines else None, "the new router is told")

    assert fakes.memberships(cluster.folder)[-1] == members
    assert until(lambda: cluster.status().url, "the router listens again") == url


def test_several_routers_share_a_port_and_each_is_told(start: Callable[..., Cluster]) -> None:
    """Each has an address of its own besides; one that dies comes back there with the members of that time."""
    cluster = start(replicas="1", routers="3")
    members = cluster.told("r0")
    status = until(lambda: found if (found := cluster.status()).url else None, "all listen")
    assert len(status.router_urls) == 3
    routers = [process for process in local_ray.children() if "RouterProcess" in process.name()]
    lines = len(fakes.memberships(cluster.folder))

    routers[0].kill()
    until(lambda: True if len(fakes.memberships(cluster.folder)) > lines else None, "the new router is told")

    assert fakes.memberships(cluster.folder)[-1] == members
    again = until(lambda: found if (found := cluster.status()).url else None, "all listen again")
    assert (again.url, again.router_urls) == (status.url, status.router_urls)


def test_a_replica_that_cannot_start_says_so_in_its_own_words(start: Callable[..., Cluster]) -> None:
    """A traceback through three processes hides the one line that helps."""
    cluster = start(replicas="1", model="broken")

    failing = until(lambda: next((gang for gang in cluster.status().gangs if gang.failures), None), "it fails")

    assert failing.last_error == "ValueError: the weights are torn"


def test_a_gang_without_room_tells_what_it_waits_for(start: Callable[..., Cluster]) -> None:
    """A placement group that does not fit stays pending, silently."""
    cluster = start(replicas="1", gpus_per_rank="3")

    waiting = until(lambda: next((gang for gang in cluster.status().gangs if gang.reason), None), "a reason")

    assert waiting.phase == "placing"
    assert "no node has 3 GPU, the most on one is 0 GPU" in waiting.reason


def test_scaling_down_drains_the_replica_that_is_worth_least_and_up_starts_one(start: Callable[..., Cluster]) -> None:
    """The routers say what each is worth; names that became free are given again."""
    cluster = start(replicas="3")
    cluster.told("r0", "r1", "r2")

    cluster.ask("scale", 2)
    cluster.settled()
    cluster.told("r1", "r2")
    cluster.ask("scale", 3)
    cluster.settled()

    cluster.told("r0", "r1", "r2")


def test_a_drained_replica_ends_and_a_replaced_one_has_a_successor_first(start: Callable[..., Cluster]) -> None:
    """By hand: for good, or for another one."""
    cluster = start(replicas="2")
    before = cluster.told("r0", "r1")

    assert cluster.ask("drain", "r7", replace=False).message == "no replica 'r7' (there are: r0, r1)"
    cluster.ask("drain", "r0", replace=True)
    cluster.settled()
    replaced = cluster.told("r1", "r2")
    during = fakes.memberships(cluster.folder)
    cluster.ask("drain", "r1", replace=False)
    cluster.settled()
    left = cluster.told("r2")

    assert replaced["r1"] == before["r1"]
    assert left["r2"] == replaced["r2"]
    assert min(len(told) for told in during[during.index(before) :]) == 2


def test_an_update_replaces_every_replica_and_one_that_cannot_start_changes_nothing(
    start: Callable[..., Cluster],
) -> None:
    """Neither a torn model nor one that the routers refuse costs a replica."""
    cluster = start(replicas="2")
    before = cluster.told("r0", "r1")

    for flags, words in (({"model": "broken"}, "the weights are torn"), ({"block_size": "32"}, "another block size")):
        settings = changed_settings(cluster.spec.settings, flags, None)
        cluster.ask("update", dataclasses.replace(cluster.spec, settings=settings))
        status = until(lambda: found if (found := cluster.status()).abandoned else None, "it is given up")
        assert words in status.abandoned
        cluster.settled()
        assert cluster.told("r0", "r1") == before
    settings = changed_settings(cluster.spec.settings, {"max_running_requests": "3"}, None)
    cluster.ask("update", dataclasses.replace(cluster.spec, settings=settings))
    status = cluster.settled()

    assert cluster.ask("current").settings.replica.max_running_requests == 3
    assert {gang.version for gang in status.gangs} == {status.version}
    assert not {epoch for epoch, _ in before.values()} & {gang.generation for gang in status.gangs}


def test_a_killed_controller_comes_back_and_takes_over_what_runs(start: Callable[..., Cluster]) -> None:
    """Neither ranks nor routers are its own: they serve on, and afterwards it still knows what was wanted."""
    cluster = start(replicas="1", routers="2")
    cluster.told("r0")
    cluster.ask("scale", 2)
    cluster.settled()
    before = cluster.told("r0", "r1")
    url = until(lambda: cluster.status().url, "all listen")
    routers = {process.pid for process in local_ray.children() if "RouterProcess" in process.name()}

    controller = next(process for process in local_ray.children() if "Controller" in process.name())
    controller.kill()
    status = cluster.settled()
    until(lambda: True if cluster.status().url == url else None, "the routers are known again")
    cluster.ask("scale", 3)
    cluster.settled()
    after = cluster.told("r0", "r1", "r2")

    assert {name: after[name] for name in before} == before
    assert status.wanted == 2
    assert {process.pid for process in local_ray.children() if "RouterProcess" in process.name()} == routers
    os.kill(after["r2"][1][0], signal.SIGKILL)
    assert cluster.told("r0", "r1", "r2", but_not=after["r2"][0])["r0"] == before["r0"]


def test_routers_are_told_of_a_model_that_nobody_will_start(start: Callable[..., Cluster]) -> None:
    """Scaled to none by hand, a request would wait until its time is over; with an autoscaler it starts one."""
    cluster = start(replicas="1", served_model_name="fox")
    cluster.told("r0")

    cluster.ask("scale", 0)
    until(lambda: True if fakes.off(cluster.folder) == ["fox"] else None, "it is off")
    cluster.ask("scale", 1)

    until(lambda: True if fakes.off(cluster.folder) == [] else None, "it is wanted again")


def test_a_held_request_wakes_a_cluster_that_was_scaled_to_zero(start: Callable[..., Cluster]) -> None:
    """And while it waits there are as many replicas as the bounds allow, no more."""
    cluster = start(replicas="1", autoscale="0:2")
    cluster.told("r0")
    cluster.ask("scale", 0)
    cluster.told()
    assert fakes.off(cluster.folder) == []

    (cluster.folder / "held").write_text("1")
    cluster.told("r0")
    until(lambda: True if cluster.status().wanted == 1 else None, "one is wanted")

    assert cluster.settled().wanted == 1
