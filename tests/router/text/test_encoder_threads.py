"""The encoder threads: tenants alternate, short texts bypass long ones, and work for absent clients is skipped."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from homing.router.errors import DeadlineExceeded
from homing.router.text.encoder_threads import HUGE_CHARACTERS, EncoderThreads, Sender

SHORT = 10


@dataclass
class FakeClient:
    gone: bool = False


class Jobs:
    """Starts jobs and records which ran; long jobs block until the test releases them."""

    def __init__(self, threads: EncoderThreads) -> None:
        self.threads = threads
        self.ran: list[str] = []
        self.may_end = threading.Event()
        self.begun = threading.Event()

    def short(self, name: str, **sender: object) -> "asyncio.Task[str]":
        return self._start(name, lambda: None, SHORT, **sender)

    def long(self, name: str, **sender: object) -> "asyncio.Task[str]":
        def wait() -> None:
            self.begun.set()
            assert self.may_end.wait(30)

        return self._start(name, wait, SHORT + 1, **sender)

    def _start(self, name: str, work: object, characters: int, **sender: object) -> "asyncio.Task[str]":
        def job() -> str:
            work()
            self.ran.append(name)
            return name

        by = Sender(tenant=name[:1].encode(), **sender)
        return asyncio.get_running_loop().create_task(self.threads.run(job, characters, by))

    async def until_one_runs(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, 30)


@pytest.fixture
async def jobs() -> AsyncIterator[Jobs]:
    made = Jobs(EncoderThreads(SHORT))
    yield made
    made.may_end.set()
    await asyncio.to_thread(made.threads.close)


async def test_short_texts_do_not_wait_for_long_ones(jobs: Jobs):
    """Regression: a tenant with three 8 MB texts kept all others waiting for 30 s."""
    long = [jobs.long(f"a{each}") for each in range(3)]
    await jobs.until_one_runs()

    assert await asyncio.wait_for(jobs.short("b"), 30) == "b"
    assert not any(each.done() for each in long)

    jobs.may_end.set()
    assert await asyncio.gather(*long) == ["a0", "a1", "a2"]


async def test_tenants_take_turns(jobs: Jobs):
    """A tenant with many long texts delays another tenant by at most one of them."""
    tasks = [jobs.long(name) for name in ("a0", "a1", "a2", "a3", "b0", "b1", "c0")]
    await jobs.until_one_runs()
    jobs.may_end.set()
    await asyncio.gather(*tasks)

    assert jobs.ran == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]


async def test_what_a_client_sent_that_has_left_is_not_begun(jobs: Jobs):
    """A waiting job of a disconnected client is cancelled; the other jobs run."""
    client = FakeClient()
    running, waiting, other = jobs.long("a0"), jobs.long("a1", client=client), jobs.long("b0")
    await jobs.until_one_runs()
    client.gone = True
    jobs.may_end.set()

    assert await running == "a0"
    assert await other == "b0"
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert jobs.ran == ["a0", "b0"]


async def test_a_cancelled_job_is_not_begun(jobs: Jobs):
    """Jobs are cancelled when the server stops, for example."""
    running, waiting = jobs.long("a0"), jobs.long("a1")
    await jobs.until_one_runs()
    waiting.cancel()
    jobs.may_end.set()

    assert await running == "a0"
    assert await jobs.short("a2") == "a2"
    assert jobs.ran == ["a0", "a2"]


async def test_a_job_that_waits_too_long_fails(jobs: Jobs):
    """Its client gets an error although the thread is busy, and later jobs still run."""
    running, late = jobs.long("a0"), jobs.long("b0", timeout_s=0.01)
    await jobs.until_one_runs()

    with pytest.raises(DeadlineExceeded, match="not tokenized within"):
        await late
    jobs.may_end.set()

    assert await running == "a0"
    assert await jobs.long("c0") == "c0"
    assert jobs.ran == ["a0", "c0"]


@pytest.mark.parametrize(("characters", "kept"), [(SHORT, True), (SHORT + 1, True), (HUGE_CHARACTERS + 1, False)])
async def test_a_huge_text_takes_its_thread_with_it(jobs: Jobs, characters, kept):
    """Ending the thread frees the libraries' buffers for it: 500 MB after a few texts of 8 MB."""
    first, second = [await jobs.threads.run(threading.current_thread, characters, Sender()) for _ in range(2)]

    assert (first is second) == kept


async def test_what_a_job_raises_reaches_its_caller(jobs: Jobs):
    """The thread survives and runs further jobs."""

    def fail() -> None:
        raise ValueError("of this job")

    with pytest.raises(ValueError, match="of this job"):
        await jobs.threads.run(fail, SHORT, Sender())
    assert await jobs.short("a") == "a"
