"""Unless set otherwise, every rank gets its own GPU if there are any, and as many replicas run as fit."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.cluster.config import Settings, load_settings
from homing.cluster.devices import resolve_devices
from homing.cluster.errors import SettingsError
from homing.cluster.host import gpu_bytes, gpu_capability, gpus_seen, visible_count
from homing.replica.config import ReplicaSettings, for_device


def settled(*gpus: float, **flags: str) -> Settings:
    return resolve_devices(load_settings(flags, {}), gpus)


def shape(settings: Settings) -> tuple[int, float, str]:
    return settings.cluster.replicas, settings.cluster.gpus_per_rank, settings.replica.device


@pytest.mark.parametrize(
    ("gpus", "flags", "replicas", "per_rank", "device"),
    [
        ((8.0,), {}, 8, 1.0, "cuda"),
        ((1.0,), {}, 1, 1.0, "cuda"),
        ((8.0,), {"replicas": "3"}, 3, 1.0, "cuda"),
        ((8.0,), {"tensor_parallel_size": "4"}, 2, 1.0, "cuda"),
        ((6.0, 6.0), {"tensor_parallel_size": "4"}, 2, 1.0, "cuda"),  # a replica must fit on one machine
        ((2.0,), {"tensor_parallel_size": "4"}, 1, 1.0, "cuda"),  # Ray then reports that it does not fit
        ((1.0,), {"gpus_per_rank": "0.5"}, 2, 0.5, "cuda"),
        ((1.0,), {"gpus_per_rank": "0.1"}, 10, 0.1, "cuda"),
        ((8.0,), {"autoscale": "0:4"}, 4, 1.0, "cuda"),
        ((1.0,), {"autoscale": "3:4"}, 3, 1.0, "cuda"),
        ((8.0,), {"device": "cpu"}, 2, 0.0, "cpu"),
        ((0.0,), {}, 2, 0.0, "auto"),
        ((), {"device": "cuda"}, 1, 1.0, "cuda"),  # an autoscaler may add a machine with a GPU
    ],
)
def test_replicas_and_gpus_follow_the_machines(
    gpus: tuple[float, ...], flags: dict[str, str], replicas: int, per_rank: float, device: str
) -> None:
    """Two replicas on one GPU would each claim nine tenths of its memory, and the second would fail."""
    assert shape(settled(*gpus, **flags)) == (replicas, per_rank, device)


def test_limits_follow_the_device_unless_set() -> None:
    """With only 64 concurrent requests, a GPU reaches half of its throughput."""
    cuda, cpu = settled(1.0).replica, settled().replica

    assert (cuda.max_running_requests, cuda.max_batched_tokens) == (256, 8192)
    assert (cpu.max_running_requests, cpu.max_batched_tokens) == (64, 2048)
    assert for_device(ReplicaSettings(max_running_requests=9), cuda=True).max_running_requests == 9


def test_gpus_that_the_cpu_would_keep_reserved_are_refused() -> None:
    """One of the two settings must be a mistake."""
    with pytest.raises(SettingsError, match=r"gpus_per_rank 1 reserves GPUs for device: cpu"):
        settled(8.0, device="cpu", gpus_per_rank="1")


@given(st.lists(st.integers(0, 8), max_size=3), st.lists(st.sampled_from([0, 0, 1, 2]), min_size=1, max_size=3))
def test_models_that_fit_share_the_gpus_without_overlap(gpus: list[int], wanted: list[int]) -> None:
    """Models with a set number of replicas are counted first; the others share the remaining GPUs."""
    models = tuple(load_settings({"replicas": str(count)} if count else {}, {}) for count in wanted)
    total = sum(gpus)

    found = resolve_devices(Settings(models=models), tuple(map(float, gpus))).each_model
    again = resolve_devices(Settings(models=found), tuple(map(float, gpus))).each_model

    assert all(each.cluster.replicas == count or not count for each, count in zip(found, wanted, strict=True))
    assert again == found
    least = sum(wanted) + wanted.count(0)
    if total and least <= total:
        assert sum(each.ranks * each.cluster.gpus_per_rank for each in found) <= total


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 8), ("", 0), ("-1", 0), ("3", 1), ("0,1", 2), ("0,-1,2", 1), ("GPU-a, GPU-b", 2)]
)
def test_hidden_gpus_are_not_counted(visible: str | None, count: int) -> None:
    """As CUDA reads the variable: the list ends at the first invalid entry."""
    assert visible_count(8, visible) == count


@pytest.mark.parametrize("printed", [None, "", "GPU 0: NVIDIA H100\nGPU 1: NVIDIA H100\nGPU 2: NVIDIA H100\n"])
def test_gpus_count_even_if_the_tool_that_lists_them_is_missing_or_fails(printed: str | None, tmp_path: Path) -> None:
    """Otherwise a container without nvidia-smi, or a broken driver, would mean serving on the CPU without a word."""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-modeset"):
        (tmp_path / name).touch()
    tool = tmp_path / "tool"
    tool.write_text(f"#!/bin/sh\nprintf '{printed}'\n")
    tool.chmod(0o755)

    assert gpus_seen(None if printed is None else str(tool), tmp_path) == (3 if printed else 2)


@pytest.mark.parametrize(("printed", "found"), [("81559\n40960\n", (81559 << 20, 40960 << 20)), ("[N/A]\n", ())])
def test_the_memory_of_gpus_is_known_where_the_driver_reports_it(tmp_path, printed, found):
    """Some GPUs share the CPU's memory and report none, which is no reason not to serve."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{printed}'")
    tool.chmod(0o755)

    assert gpu_bytes(str(tool)) == found
    assert gpu_bytes(None) == gpu_bytes(str(tmp_path / "missing")) == ()


@pytest.mark.parametrize(("printed", "found"), [("8.0\n9.0\n", (9, 0)), ("12.0\n8.9\n", (12, 0)), ("[N/A]\n", None)])
def test_the_highest_compute_capability_counts(tmp_path, printed, found):
    """It decides whether FP8 weights may stay in 8 bits, and a model that could run must not be refused."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{printed}'")
    tool.chmod(0o755)

    assert gpu_capability(str(tool)) == found
    assert gpu_capability(None) is gpu_capability(str(tmp_path / "missing")) is None
