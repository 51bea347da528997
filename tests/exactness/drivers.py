"""Drivers ask a router which engine it would choose. Another kind of router needs one more class like these."""

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import httpx

from ..router.fakes import request_of, until
from ..router.replicas.external.test_external_replica import Cluster
from .faults import PROMPT, Engine

#: Seconds within which a router must have noticed and repaired a fault.
SETTLE_S = 2.0


class Driver(Protocol):
    """A router in front of two engines."""

    async def start(self, engines: Sequence[Engine]) -> None:
        """Start the router; return when it routes to both engines and follows their events."""

    async def chosen(self) -> str:
        """The name of the engine that gets the prompt, once the router has had time to notice everything."""

    async def stop(self) -> None: ...


class OurDriver:
    """homing's router in this process, queried through its explanation of a decision."""

    async def start(self, engines: Sequence[Engine]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._cluster = Cluster(Path(self._folder.name))
        self._engines = engines
        self._cluster.engines = {engine.name: engine.fake for engine in engines}
        self._cluster.tell()
        await self._cluster.live(*(engine.name for engine in engines))

    async def chosen(self) -> str:
        await until(self._settled)
        return str(self._cluster.service.explain(request_of(PROMPT)).chosen)

    def _settled(self) -> bool:
        """Whether every message that the engines sent has been applied and the feeds are live again."""
        replicas = self._cluster.service._replicas
        for engine in self._engines:
            feed = replicas[engine.name]._feed
            if feed is None or feed.subscription.cursor.expected != engine.sent:
                return False
            if engine.sent and feed.subscription.last_ts < engine.restarted_s:
                return False  # as many messages as before the restart, none of them applied yet
            if self._cluster.replica(engine.name).feed != "live":
                return False
        return True

    async def stop(self) -> None:
        self._cluster.service.close()
        self._folder.cleanup()


class CommandDriver:
    """A router started by a command; its choice is the engine that receives the prompt.

    `{urls}` and `{port}` in the command are filled in; `each` is appended for every engine, with `{url}`, `{events}`
    and `{replay}` filled in. The prompt is sent as text, which the engines tokenize: each number is a token.
    """

    def __init__(self, command: str, each: str = "") -> None:
        self._command = command
        self._each = each

    async def start(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        words = shlex.split(self._command.format(urls=" ".join(engine.fake.url for engine in engines), port=port))
        for engine in engines:
            ends = engine.fake.endpoints
            words += shlex.split(self._each.format(url=engine.fake.url, events=ends.events, replay=ends.replay))
        quiet = asyncio.subprocess.DEVNULL
        self._process = await asyncio.create_subprocess_exec(*words, stdout=quiet, stderr=quiet, start_new_session=True)
        self._url = f"http://127.0.0.1:{port}"
        await until(self._answers)
        await asyncio.sleep(SETTLE_S)

    def _answers(self) -> bool:
        assert self._process.returncode is None, f"the router exited with {self._process.returncode}"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", int(self._url.rpartition(":")[2]))) == 0

    async def chosen(self) -> str:
        await asyncio.sleep(SETTLE_S)
        before = {engine.name: len(engine.fake.bodies) for engine in self._engines}
        body = {"model": "fake", "prompt": " ".join(map(str, PROMPT)), "max_tokens": 1, "seed": 1, "stream": True}
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            await client.post(f"{self._url}/v1/completions", json=body)
        asked = [engine.name for engine in self._engines if len(engine.fake.bodies) > before[engine.name]]
        return asked[0] if asked else "none"

    async def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # some routers start another process
        await self._process.wait()
