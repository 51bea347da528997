"""Compiling kernels ahead covers everything that a model's steps need."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from homing.replica.execute import cpu_warm_up

#: Runs a model's steps after its kernels were compiled ahead; any further compilation is an error.
STEPS = """
import sys
from pathlib import Path

from homing.replica.config import ReplicaSettings
from homing.replica.engine.step_plan import PlanRow, plan_of_rows
from homing.replica.execute.runner import ModelRunner
from homing.replica.kernels.cpu.runtime import compilation
from homing.replica.execute.cpu_warm_up import main

folder, done = sys.argv[1:]
main(folder, "bfloat16", "8", done)
made, make = [], compilation.load_or_compile
compilation.load_or_compile = lambda function, *rest: made.append(function.__name__) or make(function, *rest)
runner = ModelRunner(ReplicaSettings(dtype="bfloat16", device="cpu"), Path(folder), 8)
runner.allocate_kv(20)
for step in range(3):
    runner.forward(plan_of_rows(step, [PlanRow([4] * 20, 0, [1, 2, 3]), PlanRow([5], 9, [4, 5])]))
    runner.forward(plan_of_rows(step, [PlanRow([5], 20, [1, 2, 3])]))
print("made late:", *made)
"""


def test_no_step_of_a_model_compiles_what_was_compiled_ahead(checkpoint, tmp_path: Path) -> None:
    """Covers prompts and decodes, captured or not, with norms of queries and keys."""
    done = tmp_path / "done"

    ran = subprocess.run(
        [sys.executable, "-c", STEPS, str(checkpoint("qwen3")), str(done)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "made late:"
    assert done.exists()


def test_what_cannot_be_compiled_ahead_is_not_tried_at_each_start(
    checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2's config.json names its sizes differently; trying costs nine CPU seconds and ends in a oneDNN error."""

    def fail(*_arguments: object) -> None:
        raise RuntimeError("could not create a primitive descriptor")

    monkeypatch.setattr(cpu_warm_up, "launch_all", fail)
    cpu_warm_up.main(str(checkpoint("llama")), "float32", "16", str(tmp_path / "done"))

    assert (tmp_path / "done").exists()
