"""Resources that a replica reserves on Ray, and the groups that a restarted controller takes over, without Ray."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError

from homing.cluster.config import load_settings
from homing.cluster.control.control_messages import ClusterModel
from homing.cluster.control.rank_groups import RankGroups, bundle_of, uses_spares, world_of
from homing.cluster.control.supervisor import MIN_CPUS, RankGroupRecord


def spec_of(run_dir: str | None = None, **flags: str) -> ClusterModel:
    return ClusterModel(settings=load_settings(flags, {}), seed=7, model_dir=None, run_dir=run_dir, host=None)


@pytest.mark.parametrize(
    ("engine", "processes", "cpus", "gpus"), [("homing", 4, 2.0, 1.0), ("vllm", 1, 8.0, 4.0), ("sglang", 1, 8.0, 4.0)]
)
def test_a_replica_reserves_the_same_in_as_many_processes_as_ray_starts_for_it(
    engine: str, processes: int, cpus: float, gpus: float
) -> None:
    """An external engine starts its ranks' processes itself, on the GPUs of one actor."""
    spec = spec_of(engine=engine, tensor_parallel_size="4", gpus_per_rank="1", cpus_per_rank="2")

    assert world_of(spec) == processes
    assert bundle_of(spec) == {"CPU": cpus, "GPU": gpus}


def test_an_external_engine_takes_over_no_spare_process() -> None:
    """Spares have imported our engine's packages; on one machine, CPUs limit neither kind."""
    ours, other = spec_of("/run"), spec_of("/run", engine="vllm")

    assert (uses_spares(ours), uses_spares(other)) == (True, False)
    assert bundle_of(ours) == bundle_of(other) == {"CPU": MIN_CPUS}


@pytest.mark.parametrize("error", [ActorDiedError(), OutOfMemoryError("killed by the memory monitor"), TimeoutError()])
async def test_a_group_that_died_with_the_controller_is_ended_and_not_taken_over(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's memory monitor kills controllers first, and ranks in the same moment; the cluster must survive both."""
    ended: list[int] = []
    killed: list[Any] = []

    async def started() -> None:
        raise error

    async def end_group(generation: int) -> None:
        ended.append(generation)

    def answering(name: str, answer: Any) -> Any:
        return SimpleNamespace(**{name: SimpleNamespace(remote=lambda *args: asyncio.ensure_future(answer(*args)))})

    monkeypatch.setattr("ray.kill", lambda rank, **_: killed.append(rank))
    rank = answering("started", started)
    groups = RankGroups(answering("end_group", end_group), SimpleNamespace())

    found = await groups.adopt(RankGroupRecord("r0", 7, 1, placement=None, ranks=[rank]), spec_of())

    assert (found, ended, killed, groups.get(7)) == (None, [7], [rank], None)
