"""Runs a replica or a router alone, without Ray, from whichever version of homing `PYTHONPATH` names.

    python tests/e2e/one_part.py replica            # prints its description, in hex, then serves
    python tests/e2e/one_part.py router DESCRIPTION # prints its port once the replica serves, then serves

test_mixed_versions.py runs the two parts from two commits. Both end when their standard input is closed.
"""

import asyncio
import sys
import threading
from random import Random

import msgspec

from homing.events.config import EventsSettings
from homing.kvcache.config import KvCacheSettings
from homing.replica.config import ReplicaSettings
from homing.replica.demo import demo_model_path
from homing.replica.messages import ReplicaDescription
from homing.router.config import RouterSettings
from homing.router.replicas.service import RouterService
from homing.router.server import RouterServer

SEED = 1
KV = KvCacheSettings(num_kv_blocks=600)
PATIENCE_S = 120.0


def replica() -> None:
    from homing.replica.server import start_replica

    settings = msgspec.convert({"device": "cpu", "dtype": "float32", "cpu_threads": 1}, ReplicaSettings)
    server = start_replica(
        settings, KV, EventsSettings(), model_dir=demo_model_path(), replica_id="r0", cluster_seed=SEED
    )
    print(msgspec.msgpack.encode(server.description).hex(), flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), server.stop()), daemon=True).start()
    server.run()


async def router(description: ReplicaDescription) -> None:
    folder = demo_model_path()
    service = RouterService(
        RouterSettings(access_log=""),
        KV,
        router_id="one-part",
        model_dir=folder,
        heartbeat_interval_s=EventsSettings().heartbeat_interval_s,
        rng=Random(1),
    )
    server = RouterServer(RouterSettings(access_log=""), service, grace_s=1.0)
    service.apply_membership([description], SEED, {})
    await server.load_text(folder)
    async with asyncio.timeout(PATIENCE_S):
        while not [each for each in service.view().replicas if each.state == "serving"]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    print(await server.start("127.0.0.1", 0), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()
    service.close()


if __name__ == "__main__":
    if sys.argv[1] == "replica":
        replica()
    else:
        asyncio.run(router(msgspec.msgpack.decode(bytes.fromhex(sys.argv[2]), type=ReplicaDescription)))
