"""Threads that compile constraints, in routers and replicas, shared by tenants: none can occupy all of them.

A thread cannot be interrupted, so a job that takes long delays only jobs of its own tenant: it has at most
`JOBS_PER_TENANT` threads, and tenants take turns for the others.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any, TypeVar

Result = TypeVar("Result")

COMPILER_THREADS = 4
JOBS_PER_TENANT = 2


class TenantThreads:
    """A pool of threads. Methods may be called from any thread."""

    def __init__(self, name: str, threads: int = COMPILER_THREADS, per_tenant: int = JOBS_PER_TENANT) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._threads, self._per_tenant = threads, per_tenant
        self._lock = Lock()
        #: Waiting jobs of each tenant; the tenant whose turn is next comes first.
        self._waiting: OrderedDict[bytes, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()
        self._running: Counter[bytes] = Counter()
        self._closed = False

    def submit(self, tenant: bytes, work: Callable[[], Result]) -> "Future[Result]":
        """Run `work` in the tenant's turn. The future can be cancelled until then; `close` cancels it, too."""
        future: Future[Result] = Future()
        with self._lock:
            if self._closed:
                future.cancel()
                return future
            self._waiting.setdefault(tenant, deque()).append((future, work))
        self._begin()
        return future

    def close(self, *, wait: bool = False) -> None:
        """Cancel what has not begun. `wait`: until running jobs have ended."""
        with self._lock:
            self._closed = True
            left = [future for jobs in self._waiting.values() for future, _ in jobs]
            self._waiting.clear()
        for future in left:
            future.cancel()
        self._pool.shutdown(wait=wait)

    def _begin(self) -> None:
        while (job := self._next()) is not None:
            tenant, future, work = job
            if not future.set_running_or_notify_cancel():
                self._ended(tenant)
                continue
            try:
                self._pool.submit(partial(self._run, tenant, future, work))
            except RuntimeError:  # closed meanwhile
                future.set_exception(RuntimeError("the threads have stopped"))

    def _next(self) -> "tuple[bytes, Future[Any], Callable[[], Any]] | None":
        with self._lock:
            if self._running.total() >= self._threads:
                return None
            tenant = next((each for each in self._waiting if self._running[each] < self._per_tenant), None)
            if tenant is None:
                return None
            jobs = self._waiting.pop(tenant)
            future, work = jobs.popleft()
            if jobs:
                self._waiting[tenant] = jobs
            self._running[tenant] += 1
        return tenant, future, work

    def _ended(self, tenant: bytes) -> None:
        with self._lock:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]

    def _run(self, tenant: bytes, future: "Future[Any]", work: Callable[[], Any]) -> None:
        try:
            result = work()
        except BaseException as error:  # it belongs to whoever waits for the future
            self._ended(tenant)
            future.set_exception(error)
        else:
            self._ended(tenant)
            future.set_result(result)
        self._begin()
