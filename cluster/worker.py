"""A worker process that is started again when it dies or hangs, and what it keeps over that: its port and its notes.

The parent loads everything, binds the port and forks the worker, so that a new worker starts without imports and new
connections wait for it instead of being refused. The parent runs no event loop and no thread. It hears all signals; the
worker obeys only the parent, because a terminal and systemd signal both. Independent of what the worker does.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .control.planner import STABLE_AFTER_S, restart_pause_s
from .control.stopped_process import POLL_S, StopDetector, switches_when_stopped
from .errors import StartFailed

#: A worker that is killed this many times in a row before it has written a note is given up.
MAX_FAILED_STARTS = 3
#: A worker whose event loop has run before is killed if it does not run for this long; it is asked for a sign of life
#: this often. A step of the loop takes milliseconds, and a process that shares one core with 50 others still runs.
HANG_S, BEAT_S = 20.0, 1.0
#: The exit code if the worker was killed because it did not stop at once.
KILLED = 130


@dataclass(slots=True, frozen=True)
class Worker:
    """The worker's view of its parent."""

    listener: socket.socket  #: bound; the worker listens and accepts
    restarts: int  #: how many workers of this parent have been killed before
    note: bytes | None  #: the last one that an earlier worker wrote
    _notes: int  #: descriptor of the file of notes
    _parent: int  #: readable once the worker should stop, and when the parent is dead
    _beats: int  #: the worker's signs of life

    def write_note(self, note: bytes) -> None:
        """Keep a line for the worker that follows if this one is killed; call it once this worker is ready."""
        assert b"\n" not in note, note
        os.write(self._notes, note + b"\n")

    def on_stop(self, stop: Callable[[], None]) -> None:
        """Call `stop` on this event loop once the worker should stop. From now on a loop that hangs is noticed."""
        loop = asyncio.get_running_loop()

        def beat() -> None:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):  # the parent is stopped, or dead
                os.write(self._beats, b".")
            loop.call_later(BEAT_S, beat)

        def heard() -> None:
            loop.remove_reader(self._parent)
            stop()

        loop.add_reader(self._parent, heard)
        beat()


def run_worker(work: Callable[[Worker], int], listener: socket.socket, say: Callable[[str], None]) -> int:
    """Run `work` in a child process until it returns, and again whenever it dies; returns its exit code.

    A worker dies if it is killed, or ends with an error after it was ready. One that is stopped (SIGSTOP) or hangs is
    killed. `say` receives why it is started again. SIGINT, SIGTERM and SIGHUP ask the worker to stop; the second one
    kills it. Raises StartFailed if workers are killed before they are ready: the first one, or several in a row. Also
    returns in the child, once `work` has returned. Call it while there are no
    threads, and end the process afterwards.
    """
    with tempfile.TemporaryFile() as notes:
        return _Parent(work, listener, notes.fileno(), say).run()


@dataclass(slots=True, frozen=True)
class _Died:
    reason: str
    ready: bool  #: whether it had written a note


class _HangDetector:
    """Judges a worker by its signs of life. Counts readings, so it is right even if the parent was stopped as well."""

    def __init__(self, beats: int) -> None:
        self._beats = beats
        self._begun = False
        self._silent = 0
        self.found = False

    def observe(self) -> bool:
        """Whether the loop hangs; call it every `POLL_S`."""
        with contextlib.suppress(BlockingIOError):
            if os.read(self._beats, 1 << 16):
                self._begun, self._silent = True, -1
        self._silent += self._begun
        self.found = self._silent * POLL_S >= HANG_S
        return self.found


class _Parent:
    def __init__(
        self, work: Callable[[Worker], int], listener: socket.socket, notes: int, say: Callable[[str], None]
    ) -> None:
        self._work = work
        self._listener = listener
        self._notes = notes
        self._say = say
        self._restarts = 0
        self._stopping = False
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        #: Signals that mean to stop, without those that are ignored, as under nohup.
        self._heard = {number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN}

    def run(self) -> int:
        # Blocked and waited for, so that none is lost between two calls. A new process inherits no pending signal.
        # They stay blocked in the parent: one more signal must not keep it from cleaning up.
        return self._keep_running(signal.pthread_sigmask(signal.SIG_BLOCK, {*self._heard, signal.SIGCHLD}))

    def _keep_running(self, mask: set[int | signal.Signals]) -> int:
        failures = failed_starts = 0
        while not self._stopping:
            began = time.monotonic()
            ended = self._run_once(mask)
            if isinstance(ended, int):
                return ended
            failures = 1 if time.monotonic() - began >= STABLE_AFTER_S else failures + 1
            failed_starts = 0 if ended.ready else failed_starts + 1
            if failed_starts and (not self._restarts or failed_starts >= MAX_FAILED_STARTS):
                raise StartFailed(f"the router could not start: {ended.reason}")
            self._restarts += 1
            self._say(f"{ended.reason}; starting again")
            if signal.sigtimedwait(self._heard, restart_pause_s(failures)) is not None:
                return 0
        return 0

    def _run_once(self, mask: set[int | signal.Signals]) -> int | _Died:
        """Run one worker; returns its exit code, in the worker too, or how it died."""
        written = os.fstat(self._notes).st_size
        readable, writable = os.pipe()
        beats, beating = os.pipe2(os.O_NONBLOCK)
        sys.stdout.flush()
        sys.stderr.flush()
        if (pid := os.fork()) == 0:
            os.close(writable)
            os.close(beats)
            for number in self._heard:
                signal.signal(number, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return self._work(Worker(self._listener, self._restarts, self._last_note(), self._notes, readable, beating))
        os.close(readable)
        os.close(beating)
        hung = _HangDetector(beats)
        try:
            status = self._wait(pid, writable, hung)
        finally:
            os.close(writable)
            os.close(beats)
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        if self._stopping:
            return KILLED if code is None else code
        ready = os.fstat(self._notes).st_size > written
        if code is not None:
            return _Died(f"it ended with code {code}", ready) if code and ready else code
        if hung.found:
            return _Died(f"its event loop did not run for {HANG_S:g} s", ready)
        return _Died(f"it was killed by {signal.Signals(os.WTERMSIG(status)).name}", ready)

    def _wait(self, pid: int, writable: int, hung: "_HangDetector") -> int:
        """Wait until the worker has ended, and pass signals on to it; returns its status."""
        frozen = StopDetector()
        while True:
            heard = signal.sigtimedwait({*self._heard, signal.SIGCHLD}, POLL_S)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return status
            if heard is None:
                if frozen.observe(switches_when_stopped(Path(f"/proc/{pid}/status").read_text())) or hung.observe():
                    os.kill(pid, signal.SIGKILL)
            elif heard.si_signo in self._heard:
                self._ask_to_stop(pid, writable)

    def _ask_to_stop(self, pid: int, writable: int) -> None:
        if self._stopping:
            print("killed", file=sys.stderr)
            os.kill(pid, signal.SIGKILL)
            return
        self._stopping = True
        self._listener.close()  # while the worker stops, new connections are refused
        with contextlib.suppress(BrokenPipeError):
            os.write(writable, b".")

    def _last_note(self) -> bytes | None:
        """The last complete line; a worker may have been killed while it wrote."""
        lines = os.pread(self._notes, os.fstat(self._notes).st_size, 0).split(b"\n")[:-1]
        return lines[-1] if lines else None
