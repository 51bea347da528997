"""What is captured for a GPU holds when it is replayed: recorded graphs give the plain engine's tokens."""

import os
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="the kernels need Triton")
CASES: Iterable[str] = ()
FAULTS: Iterable[str] = ()
if find_spec("triton") is not None:
    from .recorded_graphs import CASES, FAULTS
ROOT = Path(__file__).resolve().parents[2]


def recorded(case: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """In its own process, because nothing of what it replaces is undone."""
    command = [sys.executable, "-m", "tests.gpu.recorded_graphs", case, *flags]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_replays_give_the_tokens_of_the_plain_engine(case: str) -> None:
    """Every native family, heads of odd sizes, 8-bit weights and KV, guides, drafts and two ranks."""
    done = recorded(case)

    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "compute" in done.stdout, "no graph was replayed"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_capture_are_noticed(fault: str) -> None:
    """Otherwise equal tokens would show nothing."""
    done = recorded("llama", "--fault", fault)

    assert done.returncode == 1, done.stdout + done.stderr[-3000:]
