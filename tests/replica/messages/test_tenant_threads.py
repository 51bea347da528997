"""Threads that tenants share: jobs of one tenant never occupy all of them."""

from collections.abc import Iterator
from concurrent.futures import CancelledError, wait
from threading import Event

import pytest

from homing.replica.messages.tenant_threads import TenantThreads

HANG_S = 60


@pytest.fixture
def threads() -> Iterator[TenantThreads]:
    made = TenantThreads("test", threads=3, per_tenant=2)
    yield made
    made.close(wait=True)


def test_another_tenants_job_does_not_wait_for_those_of_a_greedy_one(threads: TenantThreads):
    """Whatever the greedy tenant has queued, and however long its running jobs take."""
    release = Event()
    greedy = [threads.submit(b"greedy", lambda: release.wait(HANG_S)) for _ in range(20)]

    assert threads.submit(b"other", lambda: 7).result(HANG_S) == 7
    assert sum(each.running() for each in greedy) == 2
    release.set()
    assert all(each.result(HANG_S) for each in greedy)


def test_tenants_take_turns():
    """A tenant with many waiting jobs gets no more turns than one with few."""
    threads, release, order = TenantThreads("test", threads=1, per_tenant=1), Event(), []
    threads.submit(b"x", lambda: release.wait(HANG_S))
    jobs = [threads.submit(tenant, lambda tenant=tenant: order.append(tenant)) for tenant in (b"a", b"a", b"a", b"b")]

    release.set()
    wait(jobs, HANG_S)
    threads.close(wait=True)

    assert order == [b"a", b"b", b"a", b"a"]


def test_a_failed_job_frees_its_thread(threads: TenantThreads):
    """Its error belongs to whoever asked for it."""

    def fail() -> None:
        raise ValueError("no")

    failed = [threads.submit(b"a", fail) for _ in range(10)]

    assert [str(each.exception(HANG_S)) for each in failed] == ["no"] * 10
    assert threads.submit(b"a", lambda: 1).result(HANG_S) == 1


def test_what_has_not_begun_can_be_cancelled_and_is_when_the_threads_close(threads: TenantThreads):
    """What has begun ends first."""
    release = Event()
    running = [threads.submit(b"a", lambda: release.wait(HANG_S)) for _ in range(2)]
    cancelled, waiting = [threads.submit(b"a", lambda: 1) for _ in range(2)]

    assert cancelled.cancel()
    threads.close()
    late = threads.submit(b"a", lambda: 1)
    release.set()

    assert [each.result(HANG_S) for each in running] == [True, True]
    for each in (cancelled, waiting, late):
        with pytest.raises(CancelledError):
            each.result(HANG_S)
