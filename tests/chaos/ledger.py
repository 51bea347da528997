"""Readings of everything a cluster holds during a soak (processes, folders, pools), six times a minute, also as a CSV.

Only records the readings; judge.py evaluates them.
"""

import asyncio
import contextlib
import csv
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from ..e2e.running import shared_memory
from .log import Reading
from .shapes import Cluster

LOOK_S = 10.0
COLUMNS = ("at_s", "subject", "metric", "value")


class Ledger:
    """Takes and keeps the readings of one cluster."""

    def __init__(self, target: Cluster, path: Path | None) -> None:
        """Append every reading to `path` at once, so that an interrupted run keeps its readings."""
        self._target = target
        self._path = path
        self._began_s = time.monotonic()
        self.readings: list[Reading] = []
        if path is not None:
            path.write_text(",".join(COLUMNS) + "\n")

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Take readings regularly until the block ends."""
        looking = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    async def look(self) -> None:
        """Take all readings once."""
        at_s = time.monotonic() - self._began_s
        found = [Reading(at_s, *words) for words in (*self._processes(), *self._litter(), *await self._pools())]
        self.readings += found
        if self._path is not None:
            with self._path.open("a") as out:
                rows = ((f"{each.at_s:.0f}", each.subject, each.metric, each.value) for each in found)
                csv.writer(out, lineterminator="\n").writerows(rows)

    async def _keep(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    def _processes(self) -> Iterator[tuple[str, str, int]]:
        found = self._target.census()
        yield "all", "processes", len(self._target.serving.family())
        for each in found:
            subject = f"{each.title} {each.pid}"
            yield subject, "KiB", each.kibibytes
            yield subject, "files", each.files
            yield subject, "sockets", each.sockets
            yield subject, "threads", each.threads

    def _litter(self) -> Iterator[tuple[str, str, int]]:
        """Numbers of files that could accumulate. Ray keeps the logs of every process below the run folder."""
        serving = self._target.serving
        folder = serving.note().get("run_dir")
        yield "state folder", "files", _count(serving.state)
        if folder:
            yield "run folder", "files", _count(Path(folder) / "s")
            yield "Ray's folder", "logs", _count(Path(folder)) - _count(Path(folder) / "s")
        yield "shared memory", "files", len(shared_memory(serving.family()))

    async def _pools(self) -> list[tuple[str, str, int]]:
        with contextlib.suppress(OSError, EOFError):  # the router is down
            replicas = (await self._target.view())["replicas"]
            metrics = ("free_blocks", "cached_free_blocks", "indexed_blocks", "expected_blocks", "running", "waiting")
            return [(each["replica_id"], metric, each[metric]) for each in replicas for metric in metrics]
        return []


def _count(folder: Path) -> int:
    """Number of files and sockets below a folder; some may disappear during the walk."""
    return sum(1 for path in folder.rglob("*") if not path.is_dir())
