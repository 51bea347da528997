"""Shared fixtures of the events tests: a leak check, and publishers on both transports."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from homing.events.config import EventsSettings
from homing.events.publish.publisher import EventPublisher
from homing.events.security.curve_keys import ServerKeys

from .fakes import new_publisher


def _open_sockets() -> set[str]:
    """Sockets, pipes and eventfds of this process."""
    names = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue  # the descriptor of the directory listing itself
        if target.startswith(("socket:", "pipe:", "anon_inode:[eventfd]")):
            names.add(target)
    return names


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Check that a test leaves no threads and sockets behind; ZeroMQ's own threads take a moment to exit."""
    threads, sockets = set(threading.enumerate()), _open_sockets()
    yield
    deadline = time.monotonic() + 10
    while (_open_sockets() - sockets or set(threading.enumerate()) - threads) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - threads
    assert not _open_sockets() - sockets


@pytest.fixture(params=["tcp", "ipc"])
def make_publisher(
    request: pytest.FixtureRequest, tmp_path: Path, no_leaks: None
) -> Iterator[Callable[..., EventPublisher]]:
    """Makes publishers on one of both transports, and closes them at the end."""
    made: list[EventPublisher] = []

    folder = tmp_path / "sockets"
    folder.mkdir()

    def make(
        settings: EventsSettings | None = None, *, epoch: int = 7, keys: ServerKeys | None = None, **queues: int
    ) -> EventPublisher:
        ipc_dir = folder if request.param == "ipc" else None
        made.append(new_publisher(settings, epoch=epoch, ipc_dir=ipc_dir, keys=keys, **queues))
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()
    assert not list(folder.iterdir())
