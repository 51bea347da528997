"""No step reads or writes what the device has not done yet: on a device that is late, tokens are the plain engine's."""

from collections.abc import Iterable
from importlib.util import find_spec

import pytest

from .own_process import run_case

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="the kernels need Triton"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
FAULTS: Iterable[str] = ()
if find_spec("triton") is not None:
    from .late_device import FAULTS


@pytest.mark.parametrize("case", ["llama", "mistral", "qwen3_moe"])
def test_a_late_device_gives_the_tokens_of_the_plain_engine(case: str) -> None:
    """And no step waits for it."""
    done = run_case("late_device", case)

    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "waited" not in done.stdout


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(fault: str) -> None:
    """Otherwise equal tokens would show nothing. An index that is not there yet may even crash the process."""
    done = run_case("late_device", "llama", "--fault", fault)

    assert done.returncode != 0, done.stdout + done.stderr[-3000:]
