"""Encodes long texts off the event loop, so that no tenant's texts delay another tenant's short ones.

One thread handles short texts and another one long texts. Each runs one job at a time, and tenants take turns: a short
text waits for the running job and for at most one job of every other tenant. Jobs of clients that left are dropped.
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
from ..heap import trim_heap

Result = TypeVar("Result")

#: After a text with more characters memory is returned and its thread replaced, because libraries keep buffers per
#: thread: 500 MB after a few texts of 8 MB.
HUGE_CHARACTERS = 1_000_000


class WaitingClient(Protocol):
    """The client that waits for a result."""

    gone: bool  #: whether it has disconnected


def _any_length(_at_least: Sequence[int]) -> None:
    pass


class Sender(msgspec.Struct, frozen=True):
    """The sender of texts to encode, and the limits of its request."""

    tenant: bytes = b""  #: tenants take turns
    salt: bytes = b""  #: senders with the same salt share cached ids
    body_bytes: int = 0  #: size of the body, an estimate of the characters in a chat's prompt
    objects: int = 0  #: upper bound of the number of objects in the body
    most_tokens: int | None = None  #: limit for each prompt; None: no limit
    #: Raises a RouterError if prompts of at least these lengths may not start now. Called on the event loop.
    check: Callable[[Sequence[int]], None] = _any_length
    client: WaitingClient | None = None
    timeout_s: float = 600.0

    def unlimited(self) -> "Sender":
        """The same sender without limits, for a prompt that is truncated after encoding."""
        return msgspec.structs.replace(self, most_tokens=None, check=_any_length)


NO_SENDER = Sender()


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
    """One thread and its queue. Must be used only on the event loop's thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool = self._new_pool()
        self._waiting: OrderedDict[bytes, deque[_Job]] = OrderedDict()  # in order of the tenants' turns
        self._busy = self._closed = False

    def put(self, job: _Job) -> None:
        self._waiting.setdefault(job.sender.tenant, deque()).append(job)
        self._begin()

    def call(self, work: Callable[[], object]) -> None:
        """Run `work` in the thread and wait for it."""
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
        """The next job; its tenant moves to the end of the order."""
        tenant, jobs = self._waiting.popitem(last=False)
        job = jobs.popleft()
        if jobs:
            self._waiting[tenant] = jobs
        return job

    def _end(self, job: _Job, done: "asyncio.Future[Any]") -> None:
        self._busy = False
        if job.characters > HUGE_CHARACTERS and not self._closed:
            self._pool.submit(trim_heap)
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
    """The two threads of one tokenizer. Must be used on one event loop."""

    def __init__(self, short_characters: int) -> None:
        """`short_characters`: texts with more characters are long."""
        self._short_characters = short_characters
        self._short, self._long = _Lane("encode-short"), _Lane("encode-long")

    def prepare(self, work: Callable[[], object]) -> None:
        """Run `work` once in every thread, because a thread's first text is slow. Blocks."""
        for lane in (self._short, self._long):
            lane.call(work)

    async def run(self, work: Callable[[], Result], characters: int, sender: Sender) -> Result:
        """The result of `work`, run in the sender's turn. Raises CancelledError if the client has left before that.

        Raises DeadlineExceeded after the sender's `timeout_s`; a job already running finishes, its result is dropped.
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
        """Stop the threads after their current jobs."""
        for lane in (self._short, self._long):
            lane.close()
