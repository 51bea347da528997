"""Encoding long texts off the event loop, so that no tenant's texts delay another tenant's small ones.

One thread is for short texts and one for long ones. Each does one job at a time, and tenants take turns: a short text
waits for the running one and for at most one of every other tenant. What a client sent that has left is not begun.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from ..errors import DeadlineExceeded

Result = TypeVar("Result")

#: After a text with more characters the thread is replaced: libraries keep buffers per thread, 500 MB after a few texts
#: of 8 MB.
HUGE_CHARACTERS = 1_000_000


class Client(Protocol):
    """Who waits for the result."""

    gone: bool  #: it has left


def _any_length(_at_least: Sequence[int]) -> None:
    pass


class Sender(msgspec.Struct, frozen=True):
    """Whose texts are encoded, and what is known of them before."""

    tenant: bytes = b""  #: tenants take turns
    salt: bytes = b""  #: senders with equal ones share cached ids
    body_bytes: int = 0  #: about as many characters as a chat's prompt has
    objects: int = 0  #: at most so many objects are in the body
    most_tokens: int | None = None  #: of each prompt; None: no limit
    #: Raises a RouterError if prompts of at least so many tokens may not begin now. Called on the event loop.
    check: Callable[[Sequence[int]], None] = _any_length
    client: Client | None = None
    timeout_s: float = 600.0

    def unlimited(self) -> "Sender":
        """The same for a prompt that is cut to length after it was encoded."""
        return msgspec.structs.replace(self, most_tokens=None, check=_any_length)


NOBODY = Sender()


@dataclass(slots=True, eq=False)
class _Job:
    work: Callable[[], Any]
    characters: int
    sender: Sender
    result: "asyncio.Future[Any]"

    def expire(self) -> None:
        if not self.result.done():
            self.result.set_exception(DeadlineExceeded(f"not tokenized within {self.sender.timeout_s:g} s"))


class _Lane:
    """One thread and its queue. Used on the event loop's thread only."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool = self._new_pool()
        self._waiting: OrderedDict[bytes, deque[_Job]] = OrderedDict()  # the tenant whose turn it is comes first
        self._busy = self._closed = False

    def put(self, job: _Job) -> None:
        self._waiting.setdefault(job.sender.tenant, deque()).append(job)
        self._begin()

    def call(self, work: Callable[[], object]) -> None:
        """Do this in the thread now, and wait for it."""
        self._pool.submit(work).result()

    def close(self) -> None:
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _new_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix=self._name)

    def _begin(self) -> None:
        while self._waiting and not self._busy:
            job = self._take()
            if job.sender.client is not None and job.sender.client.gone:
                job.result.cancel()
            if job.result.done():
                continue
            self._busy = True
            done = asyncio.get_running_loop().run_in_executor(self._pool, job.work)
            done.add_done_callback(partial(self._end, job))

    def _take(self) -> _Job:
        """The next job; its tenant goes to the end."""
        tenant, jobs = self._waiting.popitem(last=False)
        job = jobs.popleft()
        if jobs:
            self._waiting[tenant] = jobs
        return job

    def _end(self, job: _Job, done: "asyncio.Future[Any]") -> None:
        self._busy = False
        if job.characters > HUGE_CHARACTERS and not self._closed:
            self._pool.shutdown(wait=False)
            self._pool = self._new_pool()
        failure = None if done.cancelled() else done.exception()
        if not job.result.done():
            if done.cancelled():
                job.result.cancel()
            elif failure is not None:
                job.result.set_exception(failure)
            else:
                job.result.set_result(done.result())
        self._begin()


class EncoderThreads:
    """The two threads of one tokenizer. Used on one event loop."""

    def __init__(self, short_characters: int) -> None:
        """Texts with more characters are long."""
        self._short_characters = short_characters
        self._short, self._long = _Lane("encode-short"), _Lane("encode-long")

    def prepare(self, work: Callable[[], object]) -> None:
        """Do `work` once in every thread: a thread's first text is slow. Blocks."""
        for lane in (self._short, self._long):
            lane.call(work)

    async def run(self, work: Callable[[], Result], characters: int, sender: Sender) -> Result:
        """What `work` returns, in the sender's turn. Is cancelled if the client has left by then.

        Raises DeadlineExceeded after the sender's time; a job that runs then ends later, for nobody.
        """
        loop = asyncio.get_running_loop()
        job = _Job(work, characters, sender, loop.create_future())
        timer = loop.call_later(sender.timeout_s, job.expire)
        lane = self._short if characters <= self._short_characters else self._long
        lane.put(job)
        try:
            result: Result = await job.result
            return result
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the threads, after what they do now."""
        for lane in (self._short, self._long):
            lane.close()
