"""Stands in for the Python of an environment with vLLM: `PROGRAM -m MODULE serve MODEL FLAGS...`.

Serves and publishes like vLLM at the addresses in its flags, using the fake engine of the router's tests. Further
flags, passed by `--engine-args`, make it misbehave. `engine_python` writes the file to pass as `--engine-python`.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]


def engine_python(folder: Path) -> Path:
    """Write an executable to this folder that runs this module; return its path."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -P {Path(__file__).resolve()} "$@"\n')
    program.chmod(0o755)
    return program


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False)
    made.add_argument("-m", dest="module")
    made.add_argument("command")
    made.add_argument("model")
    for flag in ("--served-model-name", "--host", "--kv-events-config"):
        made.add_argument(flag, default="")
    for flag in ("--port", "--block-size"):
        made.add_argument(flag, type=int)
    made.add_argument("--fake-fault", choices=["exit", "never-ready", "other-blocks"])
    made.add_argument("--fake-child", action="store_true", help="also start a process that ignores SIGTERM")
    made.add_argument("--fake-gate", type=Path, help="while this file exists, answers stop before their 2nd token")
    made.add_argument("--fake-token-s", type=float, default=0.0)
    return made


async def serve(flags: argparse.Namespace) -> None:
    import zmq

    from tests.router.replicas.external.fakes import FakeEngine, demo_engine

    ends = json.loads(flags.kv_events_config or "{}")
    endpoints = [ends.get("endpoint", ""), ends.get("replay_endpoint", "")]

    class Engine(FakeEngine):
        def _bind(self, sock: "zmq.Socket[bytes]", port: int) -> int:
            sock.linger = 0
            if endpoint := endpoints.pop(0):
                sock.bind(endpoint)
            return 0

    class Gate(asyncio.Event):
        async def wait(self) -> Literal[True]:
            while flags.fake_gate is not None and flags.fake_gate.exists():  # noqa: ASYNC110 - a file sets no event
                await asyncio.sleep(0.02)
            return True

    like = demo_engine()
    size = flags.block_size * 2 if flags.fake_fault == "other-blocks" else flags.block_size
    engine = Engine(block_size=size, model=flags.served_model_name, canary_ids=like.canary_ids)
    engine.max_model_len = like.max_model_len
    engine.behaves.tells_block_size = flags.fake_fault != "other-blocks"
    engine.behaves.healthy = flags.fake_fault != "never-ready"
    engine.behaves.token_s = flags.fake_token_s
    engine.behaves.gate = Gate()
    engine.serve_at(flags.port)
    await engine.start()
    print("INFO the fake engine listens", flush=True)
    await asyncio.Event().wait()


def main() -> int:
    flags, _ = parser().parse_known_args()
    if flags.fake_child:
        ignoring = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
        subprocess.Popen([sys.executable, "-c", ignoring], start_new_session=True)
    if flags.fake_fault == "exit":
        print("ValueError: no such attention\nRuntimeError: the engine core failed", flush=True)
        return 3
    sys.path.insert(0, str(ROOT))
    asyncio.run(serve(flags))
    return 0


if __name__ == "__main__":
    sys.exit(main())
