"""What is captured for a GPU holds when it is replayed: recorded graphs give the plain engine's tokens."""

from collections.abc import Iterable
from importlib.util import find_spec

import pytest

from .own_process import run_case

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="the kernels need Triton")
CASES: Iterable[str] = ()
FAULTS: Iterable[str] = ()
if find_spec("triton") is not None:
    from .recorded_graphs import CASES, FAULTS


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_replays_give_the_tokens_of_the_plain_engine(case: str) -> None:
    """Every native family, heads of odd sizes, 8-bit weights and KV, guides, drafts and two ranks."""
    done = run_case("recorded_graphs", case)

    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "compute" in done.stdout, "no graph was replayed"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_capture_are_noticed(fault: str) -> None:
    """Otherwise equal tokens would show nothing."""
    done = run_case("recorded_graphs", "llama", "--fault", fault)

    assert done.returncode == 1, done.stdout + done.stderr[-3000:]
