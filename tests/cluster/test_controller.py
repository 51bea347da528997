"""The controller on a real Ray, with fake ranks: what dies is noticed, told to the router, and built again."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from homing.cluster import local_ray
from homing.cluster.config import load_settings
from homing.cluster.spec import ClusterSpec, ClusterStatus

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

        self.folder = folder
        settings = load_settings({"state_dir": str(folder)} | flags, {})
        spec = ClusterSpec(settings=settings, seed=7, model_dir="", run_dir=None, host="127.0.0.1")
        node = ray.get_runtime_context().get_node_id()
        actor = ray.remote(Controller).options(num_cpus=0, max_concurrency=100)
        self.controller: Any = actor.remote(spec, fakes.FakeRank, fakes.FakeRouter, node)
        self.running = self.controller.run.remote()

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
    assert "3 GPU" in waiting.reason
    assert "0 GPU" in waiting.reason
