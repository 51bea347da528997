"""Usage shared by several routers: one set of numbers, whichever router changes them or dies."""

import subprocess
import sys
from pathlib import Path

import pytest

from homing.router.errors import RateLimited
from homing.router.tenants.rate_limits import RateLimiter, TenantLimits
from homing.router.tenants.shared_usage import SharedUsage

ACME, OTHER = b"a" * 16, b"o" * 16
#: Sends far more requests than the limit from a separate process, and prints how many were admitted.
ASKER = """
import sys
from pathlib import Path
from homing.router.tenants.shared_usage import SharedUsage
from homing.router.errors import RateLimited
from homing.router.tenants.rate_limits import RateLimiter, TenantLimits

path, seat = Path(sys.argv[1]), int(sys.argv[2])
book = SharedUsage(path, seat=seat, seats=3).records([b"a" * 16])[b"a" * 16]
account = RateLimiter("acme", TenantLimits(requests_per_minute=2000, max_running=1500), book)
begun = 0
for _ in range(5000):
    try:
        account.begin([5], 0.0)
        begun += 1
    except RateLimited:
        pass
    if begun % 2 and account.running:
        account.end(0, 0.0)
print(begun, account.running)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "usage"


def account(path: Path, *, seat: int, tenant: bytes = ACME, **limits: int) -> RateLimiter:
    """Return a tenant's rate limiter as the router in this seat has it."""
    return RateLimiter("acme", TenantLimits(**limits), SharedUsage(path, seat=seat, seats=3).records([tenant])[tenant])


def test_processes_that_ask_at_the_same_time_get_the_limit_together(path: Path) -> None:
    """Not one request more: each is checked and recorded under one lock."""
    askers = [
        subprocess.Popen([sys.executable, "-c", ASKER, str(path), str(seat)], stdout=subprocess.PIPE, text=True)
        for seat in range(3)
    ]
    told = [list(map(int, asker.communicate()[0].split())) for asker in askers]
    book = SharedUsage(path, seat=0, seats=3).records([OTHER, ACME])[ACME]

    assert sum(begun for begun, _ in told) == 2000
    assert list(book.running[1:]) == [running for _, running in told[1:]]


def test_what_one_router_books_the_others_refuse(path: Path) -> None:
    """A client with one connection uses one router: it must get its whole limit there, and no more elsewhere."""
    here, there = (account(path, seat=seat, requests_per_minute=2, tokens_per_minute=100) for seat in (0, 1))
    here.begin([30], 0.0)
    there.begin([30], 0.0)

    for each in (here, there):
        with pytest.raises(RateLimited, match="requests_per_minute"):
            each.check([1], 0.0)
        assert each.status(0.0)["tokens"].remaining == 40


def test_a_router_that_dies_loses_nothing_but_its_running_requests(path: Path) -> None:
    """Its past usage remains; its running requests are over, and its successor sets their number to 0."""
    limits = {"requests_per_minute": 3, "max_running": 2}
    lost, other = (account(path, seat=seat, **limits) for seat in (0, 1))
    lost.begin([5], 0.0)
    other.begin([5], 0.0)
    with pytest.raises(RateLimited, match="max_running"):
        other.check([5], 0.0)

    successor = account(path, seat=0, **limits)

    assert (successor.running, other.running) == (0, 1)
    successor.begin([5], 0.0)
    successor.end(0, 0.0)
    with pytest.raises(RateLimited, match="requests_per_minute"):
        other.check([5], 0.0)


def test_a_router_that_lives_on_beside_its_successor_ends_its_requests(path: Path) -> None:
    """It seemed dead, because its machine hung for example. Its last requests end; the number never drops below 0."""
    old = account(path, seat=0, max_running=2)
    old.begin([5], 0.0)
    successor = account(path, seat=0, max_running=2)
    old.end(7, 0.0)

    assert (old.running, successor.running) == (0, 0)
    successor.begin([5], 0.0)
    successor.begin([5], 0.0)
    with pytest.raises(RateLimited, match="max_running"):
        successor.check([5], 0.0)


def test_the_file_goes_with_the_cluster(path: Path) -> None:
    """In a joined Ray cluster the file is among other users' files; routers that stop later ignore its absence."""
    first, second = (SharedUsage(path, seat=seat, seats=2) for seat in (0, 1))
    book = second.records([ACME])[ACME]
    first.close()
    assert not path.exists()

    RateLimiter("acme", TenantLimits(), book).begin([5], 0.0)
    second.close()


def test_tenants_that_come_with_a_later_keys_file_get_records(path: Path) -> None:
    """Routers read the file at startup; running ones do not know the new tenants, and must not lose their own."""
    first = account(path, seat=0, requests_per_minute=1)
    both = SharedUsage(path, seat=1, seats=3).records([OTHER, ACME])
    RateLimiter("other", TenantLimits(requests_per_minute=1), both[OTHER]).begin([5], 0.0)
    first.check([5], 0.0)
    RateLimiter("acme", TenantLimits(requests_per_minute=1), both[ACME]).begin([5], 0.0)

    with pytest.raises(RateLimited):
        first.check([5], 0.0)


def test_a_router_without_tenants_needs_no_records(path: Path) -> None:
    """Without a keys file there are no named tenants."""
    usage = SharedUsage(path, seat=0, seats=2)

    assert usage.records([]) == {}
    usage.close()
