"""Fake ranks and routers for the actors: ranks load nothing, and the router records its messages in files."""

import json
import os
import threading
from pathlib import Path
from typing import Any, assert_never

import msgspec

from homing.cluster.control.control_messages import ClusterModel, Listening, Models, RankSpec
from homing.cluster.control.planner import ROLES, Fleet, GroupPhase, RoutedReplica
from homing.events.wire.messages import EventEndpoints
from homing.replica.messages import ModelLimits, Parity, ReplicaDescription
from homing.replica.progress import report
from homing.replica.rank_server import RankServer
from homing.router.control import (
    Answer,
    AnyQuestion,
    CacheWorth,
    CountInFlight,
    Demand,
    MeasureDemand,
    SetMembership,
    SetMissing,
    WarmUp,
    WarmUpEnded,
    WeighCaches,
)


def describe_replica(replica_id: str, epoch: int, block_size: int = 16) -> ReplicaDescription:
    """A description in which only name, epoch and block size matter."""
    return ReplicaDescription(
        replica_id=replica_id,
        epoch=epoch,
        request_endpoint=f"ipc://{replica_id}-{epoch}",
        event_endpoints=EventEndpoints(events="", replay="", state="", snapshot=""),
        parity=Parity(
            tokenizer_digest="",
            template_digest="",
            block_size=block_size,
            hash_algorithm="",
            model_root=b"",
            canary=b"",
        ),
        model=ModelLimits(name="m", path="", vocab_size=1, max_model_len=1, eos_token_ids=()),
        num_blocks=1,
        max_running_requests=1,
        max_batched_tokens=1,
        tensor_parallel_size=1,
        prefill_tokens_per_s=1,
        decode_step_s=1,
    )


class FakeRank(RankServer):
    """A rank that serves nothing. The model name `broken` makes its start fail, and `endless` makes it hang."""

    def __init__(self, spec: RankSpec) -> None:
        self._stopped = threading.Event()
        settings = spec.model.settings
        if settings.replica.model == "broken":
            raise ValueError("the weights are torn")
        if settings.replica.model == "endless":
            report("reading the weights", 4, 9)
            self._stopped.wait()
        block_size = settings.kvcache.block_size
        self.description = None if spec.rank else describe_replica(spec.replica_id, spec.generation, block_size)

    def run(self) -> None:
        self._stopped.wait()

    def stop(self) -> None:
        self._stopped.set()


def prepare(spec: ClusterModel) -> None:
    """A spare rank's preparation: records the pid."""
    with (Path(spec.settings.cluster.state_dir) / "prepared").open("a") as file:
        file.write(f"{os.getpid()}\n")


async def prepare_router(models: Models) -> None:
    """A spare router's preparation: records the pid."""
    with (Path(models[0].settings.cluster.state_dir) / "prepared-routers").open("a") as file:
        file.write(f"{os.getpid()}\n")


def prepared(folder: Path, name: str = "prepared") -> list[int]:
    """The pids of the prepared ranks, or routers, oldest first."""
    file = folder / name
    return [int(pid) for pid in file.read_text().split()] if file.exists() else []


class FakeRouter:
    """A router that writes each membership it receives as a line of JSON: [[replica id, epoch, pids], ...].

    Draining and warming replicas are left out. The router refuses replicas of block size 32.
    """

    def __init__(self, models: Models, listening: Listening) -> None:
        self.listening = listening
        self._told = Path(models[0].settings.cluster.state_dir) / "told"

    @classmethod
    async def make(
        cls, models: Models, wanted: Listening, membership: SetMembership, seat: int, prepared: Any
    ) -> "FakeRouter":
        several = models[0].settings.cluster.routers > 1
        router = cls(models, Listening(wanted.port or 12345, wanted.direct_port or (54321 if several else 0)))
        await router.ask(membership)
        return router

    async def ask(self, question: AnyQuestion) -> Answer:
        match question:
            case SetMembership(models, members):
                self._models = models
                self._members = {member.description.replica_id: member.description for member in members}
                serving = [member.description for member in members if member.unavailable is None]
                with self._told.open("a") as file:
                    file.write(
                        json.dumps([[member.replica_id, member.epoch, member.pids] for member in serving]) + "\n"
                    )
                return None
            case SetMissing(missing, turned_off):
                self._told.with_name("off").write_text(json.dumps(sorted(turned_off)))
                with self._told.with_name("absent").open("a") as file:
                    file.write(json.dumps([[each.replica_id, each.state, each.reason] for each in missing]) + "\n")
                return None
            case WarmUp(replica_id):
                refused = self._members[replica_id].parity.block_size == 32
                return WarmUpEnded(refusal="another block size" if refused else "")
            case CountInFlight():
                return 0
            case WeighCaches():  # higher numbers are worth more
                numbers = {name: int(name.rpartition("r")[2]) for name in self._members}
                return [CacheWorth(name, number, 0, 1.0) for name, number in numbers.items()]
            case MeasureDemand():
                return self._demands()
            case _:
                assert_never(question)

    def _demands(self) -> dict[str, Demand]:
        """Each model holds as many requests as the file `held` says; nothing runs, so models count as idle."""
        held = self._told.with_name("held")
        count = int(held.read_text()) if held.exists() else 0
        demands = {}
        for name in self._models:
            serving = sum(member.model.name == name for member in self._members.values())
            demands[name] = Demand(
                held_requests=count,
                held_tokens=count,
                queued_tokens=0,
                running=0,
                slots=1,
                prefill_tokens_per_s=serving,
                serving=serving,
            )
            count = 0
        return demands

    async def stop(self) -> None: ...


def check_fleet(fleet: Fleet) -> None:
    """Invariants after `reconcile`."""
    for replica_id, group in fleet.groups.items():
        assert group.replica_id == replica_id
        assert (group.description is not None) == (group.phase in ROLES), f"{replica_id}: {group.phase}"
        assert 1 <= group.generation <= fleet.names.generation, f"{group.generation} of {fleet.names.generation}"
    generations = [group.generation for group in fleet.groups.values()]
    assert len(generations) == len(set(generations)), f"shared generations: {generations}"
    assert set(fleet.groups) <= fleet.names.taken, f"{set(fleet.groups)} are not all of {fleet.names.taken}"
    members = tuple(
        RoutedReplica(group.description, ROLES[group.phase], group.version)
        for group in fleet.groups.values()
        if group.description is not None
    )
    assert fleet.published == members, "the published membership is outdated"
    assert not (fleet.being_removed and fleet.wanted), f"{fleet.wanted} groups wanted for a removed model"
    staying = sum(group.phase is not GroupPhase.DRAINING for group in fleet.groups.values())
    room = fleet.wanted + (1 if fleet.settings.surge and fleet.wanted and fleet.rolling else 0)
    assert staying <= room, f"{staying} groups, room for {room}"


def memberships(folder: Path) -> list[dict[str, tuple[int, list[int]]]]:
    """The memberships that the fake router received, oldest first: replica id -> (epoch, pids)."""
    told = folder / "told"
    lines = told.read_text().splitlines() if told.exists() else []
    decoded = [msgspec.json.decode(line, type=list[tuple[str, int, list[int]]]) for line in lines]
    return [{name: (epoch, pids) for name, epoch, pids in line} for line in decoded]


def absences(folder: Path) -> list[list[list[str]]]:
    """The missing replicas that the fake router received, oldest first: a list of [replica id, state, reason] each."""
    told = folder / "absent"
    return [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []


def off(folder: Path) -> list[str]:
    """The models without wanted replicas, as in the last message."""
    told = folder / "off"
    return list(json.loads(told.read_text() or "[]")) if told.exists() else []
