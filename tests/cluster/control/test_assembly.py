"""Preparation of replica processes, and a router's handling of control messages."""

import os
import subprocess
import sys
import threading

import pytest

from homing.cluster.config import ClusterSettings, load_settings
from homing.cluster.control.assembly import (
    agents_of,
    make_router,
    on_process_exit,
    share_of_gpu,
    share_of_memory,
)
from homing.cluster.control.autoscale import max_ranks
from homing.cluster.control.compiled_kernels import TORCH_ENVIRONMENT, prepare_torch
from homing.cluster.control.control_messages import ClusterModel, Listening
from homing.kvcache.config import KvCacheSettings
from homing.router.control import CountInFlight, MeasureDemand, SetMembership

NEEDS_PIDFD = pytest.mark.skipif(sys.platform != "linux", reason="needs pidfd_open")
PATIENCE_S = 120
#: Runs a packed layer over 400 row counts, as steps do, and prints the process's growth in MB.
PREPARED = "import os; from homing.cluster.control.compiled_kernels import prepare_torch as p; p(); "

GROWTH = """
import sys
if sys.argv[1] == "prepared":
    from homing.cluster.control.compiled_kernels import prepare_torch
    prepare_torch()
import psutil, torch
from homing.replica.models.layers import Linear
torch.set_num_threads(1)
layer, x, process = Linear(torch.randn(1024, 256)), torch.zeros(401, 256), psutil.Process()
with torch.inference_mode():
    layer(x)
    before = process.memory_info().rss
    for rows in range(400, 0, -1):  # shrinking: holes that answers leave do not count
        layer(x[:rows])
print((process.memory_info().rss - before) >> 20)
"""


async def test_a_router_answers_the_controller_from_its_start_to_its_stop() -> None:
    """Covers the whole router, including the HTTP server that it listens with."""
    settings = load_settings({"served_model_name": "fox", "host": "127.0.0.1"}, {})
    fox = ClusterModel(settings=settings, seed=7, model_dir=None, run_dir=None, host="")
    router = await make_router((fox,), Listening(0, 0), SetMembership(("fox",), (), 7, number=5), 0)
    try:
        assert router.listening.port
        assert await router.ask(SetMembership(("fox", "owl"), (), 7, number=7)) is None
        assert await router.ask(SetMembership(("fox",), (), 7, number=6)) is None

        demands = await router.ask(MeasureDemand())

        assert isinstance(demands, dict)
        assert set(demands) == {"fox", "owl"}
        assert await router.ask(CountInFlight("nobody")) == 0
    finally:
        await router.stop()


def grown_mb(how: str) -> int:
    """The growth of a process in MB."""
    done = subprocess.run([sys.executable, "-c", GROWTH, how], capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout)


@pytest.mark.cluster
def test_a_replica_does_not_keep_what_was_compiled_for_every_batch_size():
    """oneDNN caches each row count as its own shape; thousands of them would take most of the memory."""
    kept, prepared = grown_mb("as torch has it"), grown_mb("prepared")

    assert prepared < 0.6 * kept, f"{prepared} MB with bounded caches, {kept} MB without"


@pytest.mark.cluster
def test_memory_of_a_replica_may_lie_in_large_pages():
    """Without large pages, SIGKILL takes 130 to 220 ms to release the memory, and streams stall for as long."""
    code = PREPARED + "print(os.environ['THP_MEM_ALLOC_ENABLE'])"
    plain = {name: value for name, value in os.environ.items() if name not in TORCH_ENVIRONMENT}

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=plain
    )

    assert done.stdout.strip() == "1"


@pytest.mark.cluster
def test_an_operators_own_value_stands():
    """An operator who tunes oneDNN for a machine knows better."""
    code = PREPARED + "print(os.environ['LRU_CACHE_CAPACITY'])"
    own = os.environ | dict.fromkeys(TORCH_ENVIRONMENT, "7")

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=own)

    assert done.stdout.strip() == "7"


def test_compiled_kernels_are_kept_in_the_users_cache(tmp_path, monkeypatch):
    """flash-attn-4 keeps none by default, and if enabled, runs code that it finds in a folder in /tmp."""
    monkeypatch.setattr(os, "environ", {"XDG_CACHE_HOME": str(tmp_path)})

    prepare_torch()

    kept = {name: value for name, value in os.environ.items() if name.endswith("_CACHE_DIR")}
    assert set(kept) == {"NUMBA_CACHE_DIR", "TRITON_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"}
    assert all(value.startswith(str(tmp_path / "homing")) for value in kept.values())
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"


@pytest.mark.parametrize(("gpus", "share"), [(0.0, 0.8), (1.0, 0.8), (2.0, 0.8), (0.5, 0.4), (0.25, 0.2)])
def test_rank_with_a_part_of_a_gpu_takes_that_part_of_its_memory(gpus, share):
    """Otherwise the first of two replicas on one GPU would leave no memory for the second."""
    cache = KvCacheSettings(gpu_memory_utilization=0.8)

    assert share_of_gpu(cache, gpus).gpu_memory_utilization == pytest.approx(share)


@pytest.mark.parametrize(
    ("cluster", "ranks", "parts"),
    [
        ({}, 3, 3),
        ({"ray_address": "auto"}, 8, 4),
        ({"ray_address": "auto", "cpus_per_rank": 0.0}, 8, 8),
        ({"ray_address": "auto", "cpus_per_rank": 9.0}, 8, 1),
    ],
)
def test_ranks_divide_the_memory_of_their_machine(cluster, ranks, parts):
    """In a joined cluster, assume as many ranks as fit on a machine of four cores."""
    cache = KvCacheSettings(cpu_memory_utilization=0.6)

    shared = share_of_memory(cache, ClusterSettings(**cluster), ranks, cores=4)

    assert shared.cpu_memory_utilization == pytest.approx(0.6 / parts)


def test_ranks_of_replicas_that_may_come_are_counted():
    """The first replica takes its memory before the last one starts."""
    settings = load_settings({"replicas": "2", "tensor_parallel_size": "3"}, {})
    growing = load_settings({"replicas": "2", "autoscale": "1:5"}, {})

    assert (max_ranks(settings), max_ranks(growing)) == (6, 5)


@NEEDS_PIDFD
def test_the_end_of_a_killed_process_is_reported() -> None:
    """Ray notices replicas of a dead raylet only later; the report must not wait for that."""
    told = threading.Event()
    with subprocess.Popen(["sleep", "600"]) as process:
        on_process_exit(process.pid, told.set)
        too_early = told.is_set()

        process.kill()

        assert told.wait(PATIENCE_S)
    assert not too_early


@pytest.mark.parametrize("agent", ["ray::DashboardAgent", "ray::RuntimeEnvAgent"])
def test_a_raylets_agents_are_known_by_their_titles(agent: str) -> None:
    """Its other children are workers, and the raylet survives their deaths."""
    other = subprocess.Popen(["sleep", "600"])
    named = subprocess.Popen([agent, "600"], executable="/bin/sleep")
    try:
        assert agents_of(os.getpid()) == [named.pid]
    finally:
        for process in (other, named):
            process.kill()
            process.wait()


@NEEDS_PIDFD
def test_a_process_that_has_already_ended_is_reported_at_once() -> None:
    """It may exit between reading its pid and starting the watch."""
    told = threading.Event()
    with subprocess.Popen(["true"]) as process:
        process.wait(PATIENCE_S)

    on_process_exit(process.pid, told.set)

    assert told.is_set()
