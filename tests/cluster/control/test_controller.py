"""The controller on a real Ray with fake ranks: deaths are detected, reported to routers and repaired."""

import contextlib
import dataclasses
import io
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from homing.cluster import local_ray
from homing.cluster.cli.control import ControllerClient
from homing.cluster.config import changed_settings, load_settings
from homing.cluster.control.control_messages import CONTROLLER, SUPERVISOR, ClusterModel, ClusterStatus
from homing.cluster.registry import wait_gone

from .. import fakes

pytestmark = pytest.mark.cluster

T = TypeVar("T")
#: Only catches hangs.
PATIENCE_S = 120.0


def until(ask: Callable[[], T | None], what: str) -> T:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if (answer := ask()) is not None:
            return answer
        time.sleep(0.02)
    raise AssertionError(f"timed out waiting for: {what}")


#: Child processes that belong to other tests: a cluster shared by several files, and actors that are still exiting.
OTHERS: set[psutil.Process] = set()


def processes(title: str = "") -> list[psutil.Process]:
    """Processes of the Ray below with `title` in their names."""
    found = []
    for process in set(local_ray.children()) - OTHERS:
        with contextlib.suppress(psutil.NoSuchProcess):
            if title in process.name() and not OTHERS.intersection(process.parents()):
                found.append(process)
    return found


@pytest.fixture(scope="module")
def own_ray() -> Iterator[None]:
    import ray

    ray.cloudpickle.register_pickle_by_value(fakes)
    folder = local_ray.run_folder()
    before = dict(os.environ)
    OTHERS.update(local_ray.children())
    try:
        local_ray.start_local(load_settings({"replicas": "2", "tensor_parallel_size": "2"}, {}), folder)
        yield
    finally:
        ours = processes()
        ray.shutdown()
        for left in wait_gone(ours, 20):
            left.kill()
        shutil.rmtree(folder, ignore_errors=True)
        # A local Ray marks its environment as such for its processes; later tests start other kinds of Ray.
        os.environ.clear()
        os.environ.update(before)
        ray.cloudpickle.unregister_pickle_by_value(fakes)


def test_only_processes_of_ray_that_homing_uses_are_started(own_ray: None) -> None:
    """The others would take a second of CPU each from starting replicas, and a crash could end the cluster."""
    commands = []
    for process in processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # just ended, from an earlier test
            commands.append(" ".join(process.cmdline()))

    assert any("raylet" in command for command in commands)
    unused = re.compile(r"monitor\.py|dashboard\.py|agent\.py|agent/main\.py|Agent")
    assert list(filter(unused.search, commands)) == []


class Cluster:
    """A controller, with helpers to query it."""

    def __init__(self, folder: Path, *models: dict[str, str], one_machine: bool = False) -> None:
        """Replicas use spare processes with `one_machine`, if their setting `spare_process` is true."""
        import ray

        from homing.cluster.control.controller import Controller
        from homing.cluster.control.supervisor import Supervisor

        self.folder = folder
        common = {"state_dir": str(folder), "served_model_name": "fox", "replicas": "2", "spare_process": "false"}
        each = [load_settings(common | flags, {}) for flags in models]
        self.models = tuple(
            ClusterModel(
                settings=settings,
                seed=7,
                model_dir="",
                run_dir=str(folder / "run") if one_machine else None,
                host="127.0.0.1",
            )
            for settings in each
        )
        node = ray.get_runtime_context().get_node_id()
        supervisor = ray.remote(Supervisor).options(name=SUPERVISOR, num_cpus=0)
        self.supervisor: Any = supervisor.remote(
            fakes.FakeRank, fakes.FakeRouter.make, node, fakes.prepare, fakes.prepare_router
        )
        actor = ray.remote(Controller).options(
            name=CONTROLLER, num_cpus=0, max_concurrency=100, max_restarts=-1, max_task_retries=-1
        )
        self.controller: Any = actor.remote(tuple(self.models))
        self.running = self.controller.run.remote()

    def ask(self, question: str, *words: object, **named: object) -> Any:
        import ray

        return ray.get(getattr(self.controller, question).remote(*words, **named), timeout=PATIENCE_S)

    def update(self, name: str, flags: dict[str, str]) -> None:
        spec = next(model for model in self.models if model.name == name)
        settings = changed_settings({name: spec.settings}, flags, None)[name]
        self.ask("update", dataclasses.replace(spec, settings=settings))

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
        ray.kill(self.supervisor)


@pytest.fixture
def start(own_ray: None, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    clusters: list[Cluster] = []
    OTHERS.update(processes("ReplicaRank"), processes("RouterProcess"), processes("Controller"))

    def begin(*models: dict[str, str], one_machine: bool = False, **flags: str) -> Cluster:
        clusters.append(Cluster(tmp_path, *(models or (flags,)), one_machine=one_machine))
        return clusters[-1]

    yield begin
    for cluster in clusters:
        cluster.close()


def test_a_killed_rank_takes_its_rank_group_along_and_the_rank_group_is_rebuilt(start: Callable[..., Cluster]) -> None:
    """Ray does not kill the siblings, and an incomplete group would hang in its next step."""
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


def test_a_prepared_process_replaces_a_killed_one_if_it_is_alive(start: Callable[..., Cluster]) -> None:
    """The spare is replaced by a new one, also if it dies unused."""
    cluster = start(replicas="1", spare_process="true", one_machine=True)
    generation, pids = cluster.told("r0")["r0"]
    [spare] = until(lambda: fakes.prepared(cluster.folder) or None, "a spare process is prepared")

    os.kill(pids[0], signal.SIGKILL)
    again, pids = cluster.told("r0", but_not=generation)["r0"]
    second = until(lambda: fakes.prepared(cluster.folder)[1:] or None, "another one is prepared")[0]
    os.kill(second, signal.SIGKILL)
    third = until(lambda: fakes.prepared(cluster.folder)[2:] or None, "the dead spare is replaced")[0]
    os.kill(pids[0], signal.SIGKILL)
    _, last = cluster.told("r0", but_not=again)["r0"]

    assert pids == [spare]
    assert last == [third]


def is_rebuilding(absent: list[list[str]]) -> bool:
    return any(state == "rebuilding" for _, state, _ in absent)


def test_a_killed_router_comes_back_on_its_port_and_knows_the_members(start: Callable[..., Cluster]) -> None:
    """Clients know one address, and the new router must not wait for the next change in membership.

    A prepared process takes its place, even if it was killed soon after the last one, and another is prepared.
    The same when an unused one dies.
    """
    cluster = start(replicas="1", spare_process="true")
    members = cluster.told("r0")
    url = until(lambda: cluster.status().url, "the router listens")
    unused = until(lambda: fakes.prepared(cluster.folder, "prepared-routers") or None, "a spare")[0]
    os.kill(unused, signal.SIGKILL)
    for number in (2, 3):
        spares = until(lambda n=number: fakes.prepared(cluster.folder, "prepared-routers")[n - 1 :] or None, "a spare")
        router = next(each for each in processes("RouterProcess") if each.pid not in spares)
        lines = len(fakes.memberships(cluster.folder))

        router.kill()
        until(lambda seen=lines: True if len(fakes.memberships(cluster.folder)) > seen else None, "the next is told")

        assert fakes.memberships(cluster.folder)[-1] == members
        assert until(lambda: cluster.status().url, "the router listens again") == url
        assert psutil.Process(spares[0]).is_running()


def test_a_stopped_rank_or_router_is_replaced_without_waiting_for_an_answer(start: Callable[..., Cluster]) -> None:
    """A stopped process keeps its memory and its connections, so it is killed; its state says what a silence does not.

    Without it, the rank would be replaced after `health_timeout_s`, which must leave time for a busy machine.
    """
    cluster = start(replicas="2", tensor_parallel_size="2", health_timeout_s="3600")
    before = cluster.told("r0", "r1")
    generation, pids = before["r0"]
    frozen = [psutil.Process(pids[1]), processes("RouterProcess")[0]]

    frozen[0].suspend()
    after = cluster.told("r0", "r1", but_not=generation)
    lines = len(fakes.memberships(cluster.folder))
    frozen[1].suspend()
    until(lambda: True if len(fakes.memberships(cluster.folder)) > lines else None, "another router is told")

    assert after["r1"] == before["r1"]
    assert fakes.memberships(cluster.folder)[-1] == after
    for process in frozen:
        until(lambda each=process: None if each.is_running() else True, "what was stopped has ended")
    said = " ".join(notice.text for notice in cluster.status().notices)
    assert "reason='rank 1 the process was stopped (SIGSTOP)'" in said
    assert "router_lost router=0 reason='the process was stopped (SIGSTOP)'" in said


def test_several_routers_share_a_port_and_each_is_told(start: Callable[..., Cluster]) -> None:
    """Each also has its own address; a restarted one returns there and gets the current members."""
    cluster = start(replicas="1", routers="3")
    members = cluster.told("r0")
    status = until(lambda: found if (found := cluster.status()).url else None, "all listen")
    assert len(status.router_urls) == 3
    routers = processes("RouterProcess")
    lines = len(fakes.memberships(cluster.folder))

    routers[0].kill()
    until(lambda: True if len(fakes.memberships(cluster.folder)) > lines else None, "the new router is told")

    assert fakes.memberships(cluster.folder)[-1] == members
    again = until(lambda: found if (found := cluster.status()).url else None, "all listen again")
    assert (again.url, again.router_urls) == (status.url, status.router_urls)


def test_a_replica_that_does_not_serve_says_why(start: Callable[..., Cluster]) -> None:
    """A traceback through three processes would hide the one line that helps. A large model takes minutes: users want
    to know why they wait, and a timeout's message names the phase. A placement group that does not fit stays pending.
    """
    torn, slow = ({"served_model_name": name, "model": name, "replicas": "1"} for name in ("broken", "endless"))
    cluster = start(torn, slow, {"served_model_name": "large", "gpus_per_rank": "3", "replicas": "1"})
    wanted = {
        "broken": "ValueError: the weights are torn",
        "endless": "reading the weights, 40 %",
        "large": "no node has 3 GPU, the largest has 0 GPU",
    }

    def told() -> bool | None:
        said = {group.model: group.last_error or group.reason for group in cluster.status().replicas}
        return True if all(words in said.get(name, "") for name, words in wanted.items()) else None

    until(told, f"{wanted}")
    assert [group.phase for group in cluster.status().replicas if group.model == "large"] == ["placing"]


def test_a_rank_group_that_ends_while_it_is_being_placed_leaves_no_place_behind(start: Callable[..., Cluster]) -> None:
    """Ray would keep the reservation, or request a machine, as long as the cluster runs."""
    cluster = start(replicas="1")
    cluster.told("r0")

    for _ in range(3):
        cluster.ask("scale", "fox", 4)
        cluster.ask("scale", "fox", 1)
    cluster.settled()

    until(lambda: True if places() == 1 else None, "one place is left")


def places() -> int:
    """The number of placement groups that Ray reserves or tries to place."""
    from ray.util import placement_group_table

    return sum(place["state"] != "REMOVED" for place in placement_group_table().values())


def test_scaling_down_drains_the_replica_that_is_worth_least_and_up_starts_one(start: Callable[..., Cluster]) -> None:
    """The routers report each cache's worth; names that became free are reused."""
    cluster = start(replicas="3")
    cluster.told("r0", "r1", "r2")

    cluster.ask("scale", "fox", 2)
    cluster.settled()
    cluster.told("r1", "r2")
    cluster.ask("scale", "fox", 3)
    cluster.settled()

    cluster.told("r0", "r1", "r2")


def test_a_drained_replica_ends_and_a_replaced_one_has_a_successor_first(start: Callable[..., Cluster]) -> None:
    """A manual drain either removes the replica for good or replaces it."""
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
    """Neither a damaged model nor one that the routers refuse costs a replica."""
    cluster = start(replicas="2")
    before = cluster.told("r0", "r1")

    for flags, words in (({"model": "broken"}, "the weights are torn"), ({"block_size": "32"}, "another block size")):
        cluster.update("fox", flags)
        given_up = until(lambda: cluster.status().models[0].abandoned or None, "it is given up")
        assert words in given_up
        cluster.settled()
        assert cluster.told("r0", "r1") == before
        # The next command succeeds, because the failed update belonged to another command.
        assert ControllerClient(io.StringIO()).follow(["fox"], wait=True, done="as it was") == 0
    cluster.update("fox", {"max_running_requests": "3"})
    status = cluster.settled()

    (current,) = cluster.ask("current")
    assert current.settings.replica.max_running_requests == 3
    assert {group.version for group in status.replicas} == {status.models[0].version}
    assert not {epoch for epoch, _ in before.values()} & {group.generation for group in status.replicas}


TWO = (
    {"served_model_name": "fox", "cpus_per_rank": "0"},
    {"served_model_name": "org/owl", "replicas": "1", "tensor_parallel_size": "2", "cpus_per_rank": "0"},
)


def test_each_model_has_replicas_of_its_own(start: Callable[..., Cluster]) -> None:
    """A dead rank, a scale and a failed update affect one model; routers get all replicas in one membership."""
    cluster = start(*TWO)
    before = cluster.told("fox-r0", "fox-r1", "org-owl-r0")
    assert len(before["org-owl-r0"][1]) == 2

    os.kill(before["org-owl-r0"][1][1], signal.SIGKILL)
    rebuilt = cluster.told("fox-r0", "fox-r1", "org-owl-r0", but_not=before["org-owl-r0"][0])
    cluster.ask("scale", "fox", 1)
    cluster.told("fox-r1", "org-owl-r0")
    cluster.update("org/owl", {"model": "broken"})
    until(lambda: cluster.status().models[1].abandoned or None, "the update is given up")

    status = cluster.settled()
    assert [(model.name, model.wanted, bool(model.abandoned)) for model in status.models] == [
        ("fox", 1, False),
        ("org/owl", 1, True),
    ]
    assert cluster.told("fox-r1", "org-owl-r0") == {
        "fox-r1": before["fox-r1"],
        "org-owl-r0": rebuilt["org-owl-r0"],
    }


def test_a_killed_controller_comes_back_and_takes_over_all_that_runs(start: Callable[..., Cluster]) -> None:
    """Ranks and routers keep serving without the controller. The new one knows each model's wanted count and settings,
    gives replicas that it starts other names, and rebuilds those of either controller.
    """
    fox, owl = TWO
    cluster = start(fox | {"routers": "2"}, owl)
    cluster.told("fox-r0", "fox-r1", "org-owl-r0")
    cluster.ask("scale", "org/owl", 2)
    cluster.update("fox", {"max_running_requests": "3"})
    versions = {group.model: group.version for group in cluster.settled().replicas}
    before = fakes.memberships(cluster.folder)[-1]
    url = until(lambda: cluster.status().url, "all listen")
    routers = set(processes("RouterProcess"))

    controller = processes("Controller")[0]
    controller.kill()
    status = cluster.settled()
    until(lambda: True if cluster.status().url == url else None, "the routers are known again")
    cluster.ask("scale", "org/owl", 3)
    cluster.settled()

    assert [(model.name, model.wanted) for model in status.models] == [("fox", 2), ("org/owl", 2)]
    assert {(group.model, group.version) for group in status.replicas} == set(versions.items())
    after = cluster.told(*before, "org-owl-r2")
    assert {name: after[name] for name in before} == before
    assert [model.settings.replica.max_running_requests for model in cluster.ask("current")] == [3, 0]
    assert set(processes("RouterProcess")) == routers
    epoch, pids = after["org-owl-r2"]
    os.kill(pids[0], signal.SIGKILL)
    rebuilt = cluster.told(*after, but_not=epoch)
    assert {name: rebuilt[name] for name in before} == before


def test_models_come_and_go_and_a_killed_controller_knows_which(start: Callable[..., Cluster]) -> None:
    """Each has its own replicas and bounds; the other models' replicas are unaffected."""
    cluster = start(*TWO)
    before = cluster.told("fox-r0", "fox-r1", "org-owl-r0")
    flags = {"state_dir": str(cluster.folder), "served_model_name": "ox", "replicas": "1", "autoscale": "0:2"}
    ox = dataclasses.replace(cluster.models[0], settings=load_settings(flags, {}))

    assert cluster.ask("add", ox) is None
    cluster.settled()
    with_ox = cluster.told("fox-r0", "fox-r1", "org-owl-r0", "ox-r0")
    assert cluster.ask("add", ox).message == "model 'ox' is served already"
    assert cluster.ask("remove", "org/owl") is None
    cluster.settled()
    cluster.told("fox-r0", "fox-r1", "ox-r0")
    assert "no model 'org/owl' is served here (served: fox, ox)" in cluster.ask("scale", "org/owl", 2).message
    controller = processes("Controller")[0]
    controller.kill()
    status = cluster.settled()
    until(lambda: cluster.status().url, "the routers are known again")

    assert [(model.name, model.wanted) for model in status.models] == [("fox", 2), ("ox", 1)]
    assert cluster.told("fox-r0", "fox-r1", "ox-r0") == {
        "fox-r0": before["fox-r0"],
        "fox-r1": before["fox-r1"],
        "ox-r0": with_ox["ox-r0"],
    }
    assert cluster.ask("remove", "fox") is None
    assert "'ox' is the only model" in cluster.ask("remove", "ox").message
    cluster.ask("scale", "ox", 0)
    cluster.told()
    (cluster.folder / "held").write_text("1")
    cluster.told("ox-r0")


def test_a_model_at_rest_is_woken_by_its_own_requests_alone(start: Callable[..., Cluster]) -> None:
    """Bounds belong to one model, which gets as many replicas as they allow. A model without bounds that was scaled to
    zero is off: its requests would wait until they time out, so routers are told.
    """
    cluster = start({"replicas": "1", "autoscale": "0:2"}, {"served_model_name": "owl", "replicas": "1"})
    cluster.told("fox-r0", "owl-r0")
    cluster.ask("scale", "fox", 0)
    cluster.told("owl-r0")
    assert fakes.off(cluster.folder) == []
    cluster.ask("scale", "owl", 0)
    until(lambda: True if fakes.off(cluster.folder) == ["owl"] else None, "it is off")

    (cluster.folder / "held").write_text("1")

    cluster.told("fox-r0")
    until(lambda: True if cluster.status().models[0].wanted == 1 else None, "one is wanted")
    assert [model.wanted for model in cluster.settled().models] == [1, 0]
    cluster.ask("scale", "owl", 1)
    until(lambda: True if fakes.off(cluster.folder) == [] else None, "it is wanted again")
    cluster.told("fox-r0", "owl-r0")
