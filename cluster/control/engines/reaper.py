"""Runs one engine and leaves none of its processes behind. A separate program, to outlive the process that starts it.

    python -I reaper.py GRACE_S COMMAND...

All of the engine's processes are killed when the engine exits, when standard input is closed (the process that started
this one has died), or GRACE_S seconds after a byte on standard input, upon which the engine is asked to terminate.
Orphaned descendants become children of this process, so that none is missed or left as a zombie. Linux only.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None)


class ReapedEngine:
    """The engine's own process, as a child of this one."""

    def __init__(self, command: list[str]) -> None:
        self._woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)

    def wait(self, timeout_s: float | None, *, watch_input: bool) -> bool:
        """Wait for the engine's exit, the timeout or standard input. Returns whether the engine has exited."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        watched = [self._woken, 0] if watch_input else [self._woken]
        while not self._reap():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select(watched, [], [], left)
            if not ready or 0 in ready:
                return self._reap()
            os.read(self._woken, 4096)
        return True

    def ask_to_end(self) -> None:
        self._process.terminate()

    def end(self) -> str:
        """Kill all remaining processes; returns how the engine exited."""
        while True:
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            if not self._reap_one(0):
                break
        code = self._process.returncode or 0
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def _reap(self) -> bool:
        """Reap all processes that have exited; returns whether the engine is among them."""
        while self._reap_one(os.WNOHANG):
            pass
        return self._process.returncode is not None

    def _reap_one(self, options: int) -> bool:
        try:
            pid, status = os.waitpid(-1, options)
        except ChildProcessError:
            return False
        if pid == self._process.pid:
            self._process.returncode = os.waitstatus_to_exitcode(status)
        return pid != 0


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main(grace_s: float, command: list[str]) -> None:
    # Ray kills the direct children of an actor that it ends. It may kill the first process, which only waits; the
    # second one does the work and then finds its standard input closed.
    if worker := os.fork():
        os.waitpid(worker, 0)
        return
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        engine = ReapedEngine(command)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error}", flush=True)
        return
    ended = engine.wait(None, watch_input=True)
    if not ended and os.read(0, 1):
        engine.ask_to_end()
        engine.wait(grace_s, watch_input=False)
    how = engine.end()
    if ended:
        print(f"the engine {how}", flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
