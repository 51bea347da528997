"""A short run of `make chaos` with a few faults on one real cluster, and (slow) a soak of ten minutes.

Times are printed, not asserted, because they depend on the machine.
"""

import pytest

from . import report
from .plan import Strike, strikes
from .run import SOAK, Findings, one_cluster, soak

pytestmark = pytest.mark.cluster

SOAK_MINUTES = 10.0


def check(found: Findings) -> None:
    print(report.table(found.rows), report.courses(found.courses), sep="\n")
    assert report.violations(found.rows) == ""
    assert found.left == []


@pytest.mark.slow
@pytest.mark.every_commit
@pytest.mark.timeout(900)
def test_faults_under_load_cost_no_answer_and_leave_nothing_behind() -> None:
    """SIGKILL, a flushed cache, a full disk and ten times the load: every answer is right or a clear error."""
    wanted = [Strike(name, 1.0, 0.5) for name in ("flush", "full-disk", "overload", "kill-rank-0")]

    check(one_cluster("pair", 1, wanted))


@pytest.mark.slow
@pytest.mark.timeout(60 * SOAK_MINUTES + 600)
def test_nothing_leaks_in_ten_minutes_of_faults() -> None:
    """A shorter form of the one-hour soak, `make chaos ARGS="--soak-minutes 60"`."""
    check(soak(1, SOAK_MINUTES, strikes(1, SOAK)))
