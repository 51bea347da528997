"""Run the exactness suite for homing or for a router started by a command. Prints a row for each fault.

python -m tests.exactness.run
python -m tests.exactness.run --command 'ROUTER {urls} --port {port}' --each '--events {url}={events}'
"""

import argparse
import asyncio
import logging
import sys

from ..router.replicas.external.fakes import FakeEngine
from .drivers import CommandDriver, Driver, OurDriver
from .faults import FAULTS, Engine, Fault

#: Routers from PyPI, as command and `each` for `CommandDriver`. Only vllm-router follows KV events here: sglang-router
#: and smg follow no events of HTTP engines.
PEERS = {
    "vllm-router": (
        "vllm-router --worker-urls {urls} --port {port} --policy kv_aware --kv-event-model fake "
        "--prometheus-port 39556 --worker-startup-check-interval 1",
        "--kv-event-source {url}={events} --kv-event-replay-source {url}={replay}",
    ),
    "sglang-router": (
        "sglang-router launch --worker-urls {urls} --port {port} --policy cache_aware --prometheus-port 39557",
        "",
    ),
    "smg": ("smg launch --worker-urls {urls} --port {port} --policy cache_aware --prometheus-port 39558", ""),
}


async def choice(fault: Fault, driver: Driver) -> str:
    """Play the fault's story to a router; return the engine that it chooses."""
    a, b = (Engine(name, FakeEngine()) for name in "ab")
    for engine in (a, b):
        engine.fake.behaves.stores = False
        await engine.fake.start()
    try:
        if fault.joins_late:
            await fault.story(a, b)
        await driver.start([a, b])
        try:
            if not fault.joins_late:
                await fault.story(a, b)
            return await driver.chosen()
        finally:
            await driver.stop()
    finally:
        for engine in (a, b):
            await engine.fake.stop()


async def report(command: str, each: str) -> int:
    """The number of faults after which the router chooses the wrong engine."""
    wrong = 0
    for fault in FAULTS:
        try:
            got = await choice(fault, CommandDriver(command, each) if command else OurDriver())
        except (TimeoutError, AssertionError, OSError) as error:
            got = f"no choice: {type(error).__name__} {error}"
        wrong += got != fault.winner
        print(f"{'right' if got == fault.winner else 'WRONG'}  {fault.name:<42} chose {got}", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", default="", help="environment with routers from PyPI: run those, too")
    parser.add_argument("--command", default="", help="command that starts another router (default: homing here)")
    parser.add_argument("--each", default="", help="flags added to the command for each engine")
    arguments = parser.parse_args()
    logging.getLogger("homing").setLevel(logging.ERROR)  # the faults cause warnings
    wrong = asyncio.run(report(arguments.command, arguments.each))
    print(f"wrong in {wrong} of {len(FAULTS)} faults")
    for name, (command, each) in PEERS.items() if arguments.peers else ():
        print(f"\n{name}", flush=True)
        print(f"wrong in {asyncio.run(report(f'{arguments.peers}/bin/{command}', each))} of {len(FAULTS)} faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
