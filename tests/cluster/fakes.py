"""Fake ranks and routers for the actors: they load nothing, and the router records its messages in files."""

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from homing.cluster.control.autoscale import Demand
from homing.cluster.control.control_messages import (
    CacheWorth,
    ClusterSpec,
    Doors,
    Failed,
    Listening,
    Membership,
    RankSpec,
)
from homing.events.wire.messages import EventEndpoints
from homing.kvcache.prefix_cache import CachedBlock
from homing.replica.messages import ModelLimits, Parity, ReplicaDescription
from homing.router.backend import AbsentReplica


def describe_replica(replica_id: str, epoch: int, block_size: int = 16) -> ReplicaDescription:
    """A description whose only meaning is its name, epoch and block size."""
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


class FakeRank:
    """A rank that serves nothing; with the model name `broken` it cannot start, with `endless` its start never ends."""

    def __init__(self, spec: RankSpec) -> None:
        self._stopped = threading.Event()
        settings = spec.model.settings
        if settings.replica.model == "broken":
            raise ValueError("the weights are torn")
        if settings.replica.model == "endless":
            self._stopped.wait()
        block_size = settings.kvcache.block_size
        self.description = None if spec.rank else describe_replica(spec.replica_id, spec.generation, block_size)

    def run(self) -> None:
        self._stopped.wait()

    def stop(self) -> None:
        self._stopped.set()

    def drain(self) -> None:
        pass

    def idle(self) -> bool:
        return True

    def residents(self) -> list[CachedBlock]:
        return []


class FakeRouter:
    """A router that writes each membership it is told as a line of JSON: [[replica id, epoch, pids], ...].

    Replicas that drain or warm up are left out. It refuses replicas of block size 32.
    """

    def __init__(self, spec: ClusterSpec) -> None:
        self._models = [model.name for model in spec.models]
        self._told = Path(spec.common.settings.cluster.state_dir) / "told"
        self._stopped = asyncio.Event()

    async def start(self, doors: Doors, told: Membership, seed: int) -> Listening:
        await self.apply_membership(told, seed)
        return Listening(doors.port or 12345, doors.direct_port or (54321 if doors.shared else 0))

    async def apply_membership(self, told: Membership, seed: int) -> None:
        self._models = [model.name for model in told.models]
        self._members = {member.description.replica_id: member.description for member in told.members}
        serving = [member.description for member in told.members if member.role == "serving"]
        with self._told.open("a") as file:
            file.write(json.dumps([[member.replica_id, member.epoch, member.pids] for member in serving]) + "\n")

    async def warm_up(self, replica_id: str) -> Failed | None:
        return Failed("another block size") if self._members[replica_id].parity.block_size == 32 else None

    async def in_flight(self, replica_id: str) -> int:
        return 0

    async def demands(self) -> dict[str, Demand]:
        """As many held requests for the first model as the file `held` says; nothing runs, so that it is found idle."""
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

    async def worths(self) -> list[CacheWorth]:
        """The higher its number, the more a replica is worth."""
        return [CacheWorth(name, int(name.rpartition("r")[2]), 0, 1.0) for name in self._members]

    def tell_absent(self, absent: Sequence[AbsentReplica], off: frozenset[str]) -> None:
        self._told.with_name("off").write_text(json.dumps(sorted(off)))
        with self._told.with_name("absent").open("a") as file:
            file.write(json.dumps([[replica.replica_id, replica.state, replica.reason] for replica in absent]) + "\n")

    async def run(self) -> None:
        await self._stopped.wait()

    async def stop(self) -> None:
        self._stopped.set()


def memberships(folder: Path) -> list[dict[str, tuple[int, list[int]]]]:
    """The memberships that the fake router received: replica id -> (epoch, pids), oldest first."""
    told = folder / "told"
    lines = told.read_text().splitlines() if told.exists() else []
    decoded = [msgspec.json.decode(line, type=list[tuple[str, int, list[int]]]) for line in lines]
    return [{name: (epoch, pids) for name, epoch, pids in line} for line in decoded]


def absences(folder: Path) -> list[list[list[str]]]:
    """The missing replicas that the fake router received, oldest first: [replica id, state, reason] of each."""
    told = folder / "absent"
    return [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []


def off(folder: Path) -> list[str]:
    """The models in the last message about models without wanted replicas."""
    told = folder / "off"
    return list(json.loads(told.read_text() or "[]")) if told.exists() else []
