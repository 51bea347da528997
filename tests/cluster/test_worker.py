"""The worker and its parent as real processes. A pipe says when the worker is where a test wants it."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

#: A process that a script starts in the background inherits that it ignores SIGINT.
PROGRAM = """
import asyncio, os, signal, socket, sys

for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
from homing.cluster.errors import ClusterError
from homing.cluster import worker
from homing.cluster.worker import Worker, run_worker

worker.HANG_S = 1.0

async def until_stopped(worker):
    stop = asyncio.Event()
    worker.on_stop(stop.set)
    print("running", os.getpid(), worker.restarts, (worker.note or b"").decode(), flush=True)
    await stop.wait()

async def hang(worker):
    worker.write_note(b"one")
    worker.on_stop(None)
    while True: pass

def work(worker):
{body}

try:
    code = run_worker(work, socket.create_server(("127.0.0.1", 0)), lambda text: print("again", text, flush=True))
except ClusterError as error:
    print("error", error, flush=True)
    code = 1
sys.exit(code)
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
SERVE = "worker.write_note(b'one'); asyncio.run(until_stopped(worker)); return 0"


@contextmanager
def running(body: str) -> "Iterator[subprocess.Popen[str]]":
    program = PROGRAM.format(body=textwrap.indent(body, "    "))
    words = [sys.executable, "-P", "-c", program]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as it:
        try:
            yield it
        finally:
            it.kill()


def line(process: "subprocess.Popen[str]") -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


@pytest.mark.parametrize(
    ("body", "code", "lines"),
    [
        ("return 0", 0, []),
        ("return 3", 3, []),
        ("raise ClusterError('no engine')", 1, ["error no engine"]),
        (KILL, 1, ["error the router could not start: it was killed by SIGKILL"]),
        (
            f"if not worker.restarts: worker.write_note(b'one')\n{KILL}",
            1,
            ["again it was killed by SIGKILL; starting again"] * 3
            + ["error the router could not start: it was killed by SIGKILL"],
        ),
        (
            f"if worker.restarts == 2: print(worker.note); return 0\n"
            f"worker.write_note(b'%d' % worker.restarts); os.write(worker._notes, b'torn')\n{KILL}",
            0,
            ["again it was killed by SIGKILL; starting again"] * 2 + ["b'torn1'"],
        ),
        (
            "if worker.restarts: return 0\nworker.write_note(b'one')\nraise ValueError",
            0,
            ["again it ended with code 1; starting again"],
        ),
        (
            "if worker.restarts: return 0\nasyncio.run(hang(worker))",
            0,
            ["again its event loop did not run for 1 s; starting again"],
        ),
    ],
    ids=["ends", "fails", "raises", "killed at once", "killed again and again", "notes", "error later", "hangs"],
)
def test_the_worker_is_started_again_only_when_it_dies(body: str, code: int, lines: list[str]) -> None:
    """A worker that ends before it is ready had a reason, and one that never gets ready would be killed for ever."""
    with running(body) as process:
        said, _ = process.communicate(timeout=60)

    assert (process.returncode, said.splitlines()) == (code, lines)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_parent_and_worker_stops_the_worker_once(number: signal.Signals) -> None:
    """A terminal and systemd signal both processes; a second signal would kill the worker."""
    with running(SERVE) as process:
        line(process)
        os.killpg(process.pid, number)

        assert process.wait(60) == 0


def test_the_second_signal_kills_a_worker_that_does_not_stop() -> None:
    body = "print('running', flush=True)\nwhile True: signal.pause()"
    with running(body) as process:
        line(process)
        process.terminate()
        assert process.poll() is None
        while process.poll() is None:  # two signals that are pending together count as one
            process.terminate()
            os.sched_yield()

        assert process.returncode == 130


def test_the_worker_stops_when_its_parent_is_killed() -> None:
    """Its port is free for whoever starts the next router."""
    with running(SERVE) as process:
        line(process)
        process.kill()
        assert process.stdout is not None

        assert process.stdout.read() == ""  # at the end: no process has the output open any more


def test_a_worker_killed_by_hand_is_replaced_with_its_note() -> None:
    with running(SERVE) as process:
        _, pid, _, note = (*line(process), "")[:4]
        os.kill(int(pid), signal.SIGKILL)
        again = line(process)
        started = line(process)
        process.terminate()

        assert process.wait(60) == 0
    assert note == ""
    assert again[0] == "again"
    assert started[2:] == ["1", "one"]
