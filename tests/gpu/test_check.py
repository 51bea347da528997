"""The GPU check also runs without a GPU, on toy shapes: GPU minutes are too scarce to spend on finding typos."""

import argparse
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterable
from importlib.metadata import distributions, packages_distributions
from importlib.util import find_spec
from pathlib import Path
from random import Random

import psutil
import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # a script that imports its neighbours, so that it runs from a checkout without setup

import check  # noqa: E402
import stages  # noqa: E402

TINY = stages.Setup(torch.device("cpu"), tiny=True)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["ceilings", "reference", "steps", "decode", "prefill", "mixed", "workload"])
def test_stage_runs_on_cpu(stage):
    """Run all of the stage's code; the figures mean nothing here, but its requirements must be met."""
    figures = list(stages.STAGES[stage](TINY))

    assert figures
    assert all((figure.value > 0 or figure.goal == 0) and figure.met is not False for figure in figures)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="the kernels need Triton")
def test_kernels_are_tested_by_their_own_tests():
    """Runs without the project's own pytest settings, whose plugins a GPU machine may lack."""
    (figure,) = stages.kernels(TINY)

    assert figure.met


@pytest.mark.slow
@pytest.mark.cluster
def test_two_replicas_are_served_and_asked():
    """Runs `homing serve`, with half a GPU per replica if there is one."""
    figures = stages.replicas(TINY)

    assert [figure.met for figure in figures] == [None, True, True]


@pytest.mark.slow
@pytest.mark.cluster
def test_two_ranks_are_served_and_asked():
    """Runs `homing serve`, with one GPU per rank if there are two."""
    assert [figure.met for figure in stages.ranks(TINY)] == [True]


@pytest.mark.parametrize("gib", [39, 78, 139])
def test_every_point_fits_the_device(gib):
    """At 78 GiB, points chosen for 139 GiB ran out of memory and lost the figures of the whole stage."""
    memory = gib * 2**30

    for name, points, _ in stages.decode_points(tiny=False, memory_bytes=memory):
        about = stages.sizes(name)
        kv = max((rows * (context + 64) // 64 + 600) * 64 for rows, context in points) * about.kv_bytes_per_token
        assert kv + about.weight_bytes < 0.9 * memory
        assert max(rows for rows, _ in points) >= 64


def test_a_stage_keeps_the_figures_before_it_broke(tmp_path, monkeypatch):
    """Otherwise the GPU minutes already spent would be wasted."""

    def half(setup):
        yield stages.Figure("first", 1.0, "s")
        raise RuntimeError("out of memory")

    monkeypatch.setitem(stages.STAGES, "half", half)
    out = tmp_path / "found.json"

    check.run_stage(argparse.Namespace(run="half", device="cpu", tiny=True, out=out))

    found = json.loads(out.read_text())
    assert [figure["name"] for figure in found["figures"]] == ["first"]
    assert "out of memory" in found["error"]


def test_every_wheel_that_is_missing_is_named_before_anything_runs(monkeypatch, capsys):
    """A machine without a package index cannot fetch them later."""
    monkeypatch.setattr(check, "NEEDED", {"torch": "torch", "no_such_module": "some-wheel"})
    monkeypatch.setattr(sys, "argv", ["check.py", "--device", "cpu", "--tiny"])

    assert check.main() == 2
    assert "not installed: some-wheel" in capsys.readouterr().out


#: Hides modules from a Python process as if they were not installed; not the copies that Ray brings of some of them.
HIDES = """import importlib.machinery as machinery
real, hidden = machinery.PathFinder.find_spec, {hidden}
def find_spec(cls, name, path=None, target=None):
    found = real(name, path, target)
    if found is None or name.partition(".")[0] not in hidden:
        return found
    places = [found.origin or "", *(found.submodule_search_locations or ())]
    return found if any("/ray/" in place for place in places) else None
machinery.PathFinder.find_spec = classmethod(find_spec)  # bound, as pytest keeps it as an attribute
"""


def required(wheels: Iterable[str]) -> set[str]:
    """These distributions and all their dependencies that are installed."""
    found: set[str] = set()
    left = list(wheels)
    while left:
        name = canonicalize_name(left.pop())
        if name not in found and name in INSTALLED:
            found.add(name)
            needs = map(Requirement, INSTALLED[name].requires or ())
            left += [each.name for each in needs if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


INSTALLED = {canonicalize_name(each.name): each for each in distributions()}


@pytest.mark.slow
@pytest.mark.every_commit
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("further", [[], list(check.FURTHER)], ids=["stages of NEEDED", "stages of FURTHER"])
def test_the_check_needs_no_package_but_those_it_names(further, tmp_path):
    """A bare machine has no package index: one import too many makes every stage fail. Together, all stages run."""
    named = [check.NEEDED, *(check.FURTHER[stage] for stage in further)]
    kept = required(wheel for wheels in named for wheel in wheels.values())
    hidden = {
        module
        for module, wheels in packages_distributions().items()
        if not kept & set(map(canonicalize_name, wheels)) and not module.startswith("_")
    } - {"homing"}
    (tmp_path / "sitecustomize.py").write_text(HIDES.format(hidden=hidden))
    command = [sys.executable, str(HERE / "check.py"), "--device", "cpu", "--tiny"]
    command += ["--stages", ",".join(further or check.NAMES)]

    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )

    assert {"numba", "xdist", "openai"} <= hidden
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert done.stdout.count("## ") == len(further or check.NAMES)
    assert done.stdout.count("skipped: ") == (0 if further else len(check.FURTHER)), done.stdout[-3000:]


def test_stage_that_breaks_costs_only_itself(tmp_path):
    """Other stages' results are kept, and the check reports failure."""
    out = tmp_path / "check.json"
    command = [sys.executable, str(HERE / "check.py"), "--device", "cpu", "--tiny", "--out", str(out)]

    done = subprocess.run([*command, "--stages", "none,ceilings"], capture_output=True, timeout=280, check=False)

    found = json.loads(out.read_text())["stages"]
    assert done.returncode == 1
    assert "KeyError" in found["none"]["error"]
    assert found["ceilings"]["figures"]


def test_the_whole_check_has_an_end():
    """The stages' limits add up to more than the total; a GPU is lent for only ten minutes."""
    assert check.TOTAL_S <= 540
    assert sum(map(check.bound_s, check.NAMES)) > check.TOTAL_S

    late = check.guarded("ceilings", argparse.Namespace(device="cpu", tiny=True), left_s=check.LEAST_S - 1)

    assert "no time left" in late["cut"]
    assert not check.is_correct("steps", late)
    assert check.is_correct("decode", late)
    assert not check.is_fast("decode", late)


@pytest.mark.parametrize(("figure", "correct", "fast"), [
    ({"met": False, "speed": True}, True, False),
    ({"met": False, "speed": False}, False, True),
    ({"met": None, "speed": False}, True, True),
])  # fmt: skip
def test_a_slow_device_is_not_a_wrong_one(figure, correct, fast):
    """Goals were those of an H200: a first check on an H100 was sure to be red, whatever its answers."""
    outcome = {"figures": [figure]}

    assert check.is_correct("decode", outcome) is correct
    assert check.is_fast("decode", outcome) is fast


def test_goals_of_speed_are_shares_of_what_the_device_reaches():
    """A bandwidth twice as high doubles what is asked for; an H200's figures give the roof of the design notes."""
    random = Random(0)
    lengths = [(random.randint(100, 1024), random.randint(100, 1024)) for _ in range(256)]

    slow, fast = (stages.workload_rate("Qwen3-0.6B", lengths, rate * 4.3e12, rate * 790e12) for rate in (1, 2))

    assert fast == pytest.approx(2 * slow)
    assert 35_000 < slow < 38_000
    single = stages.workload_rate("Qwen3-8B", [(1000, 10)], 4.3e12, 1e30)
    assert single == pytest.approx(4.3e12 / stages.sizes("Qwen3-8B").decode_bytes(1004.5), rel=0.01)


@pytest.mark.slow
@pytest.mark.cluster
def test_stage_that_is_out_of_time_stops_what_it_started(monkeypatch):
    """Replicas left over from a stopped stage would occupy the GPU of later stages."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("GPU_CHECK_MARK", mark)

    outcome = check.guarded("replicas", argparse.Namespace(device="cpu", tiny=True), left_s=check.LEAST_S)
    left = [process for process in psutil.process_iter() if process.pid != os.getpid() and carries(process, mark)]
    psutil.wait_procs(left, timeout=90)

    assert "not done" in outcome["cut"]
    assert not [process for process in left if process.is_running()]


def carries(process: psutil.Process, mark: str) -> bool:
    """Whether a process was started with this mark in its environment."""
    try:
        return mark in process.environ().values()
    except psutil.Error:
        return False
