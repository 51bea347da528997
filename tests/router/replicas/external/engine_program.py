"""A fake engine as a process of its own, which a marked prompt ends; ends with the program that started it.

Arguments: the marking token id, and the number of tokens generated before the end. Prints its addresses as JSON.
"""

import asyncio
import json
import sys

from fakes import FakeEngine


async def serve(mark: int, after: int) -> None:
    """Serve until the standard input ends."""
    engine = FakeEngine()
    engine.behaves.dies_of, engine.behaves.token_s = (mark, after), 0.005
    await engine.start()
    ends = engine.endpoints
    print(json.dumps([engine.url, ends.events, ends.replay]), flush=True)
    await asyncio.to_thread(sys.stdin.read)


asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2])))
