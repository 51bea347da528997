"""Runs one rank of a replica in its own process. Prints `ready` once it serves; exit status 3: another rank was lost.

Arguments: model folder, rank, size, port, the setting overlap_steps.
"""

import sys
from pathlib import Path

import msgspec

from homing.events.config import EventsSettings
from homing.kvcache.config import KvCacheSettings
from homing.replica.config import ReplicaSettings
from homing.replica.errors import RankLost
from homing.replica.parallel.step_broadcast import RankPlace
from homing.replica.parallel.worker import RankWorker, start_worker
from homing.replica.server import ReplicaServer, start_replica

BLOCK_SIZE = 8
SECRET = bytes(range(32))
CPU = {"dtype": "float32", "device": "cpu", "cpu_threads": 1}


def main(folder: str, rank: int, size: int, port: int, overlap: str) -> int:
    settings = msgspec.convert({"tensor_parallel_size": size, "overlap_steps": overlap, **CPU}, ReplicaSettings)
    place = RankPlace(rank=rank, size=size, host="127.0.0.1", port=port, secret=SECRET)
    server: ReplicaServer | RankWorker
    if rank:
        server = start_worker(settings, block_size=BLOCK_SIZE, model_dir=Path(folder), place=place)
    else:
        kvcache = KvCacheSettings(block_size=BLOCK_SIZE, num_kv_blocks=65)
        options = {"model_dir": Path(folder), "replica_id": "r0", "cluster_seed": 1, "place": place}
        server = start_replica(settings, kvcache, EventsSettings(), **options)
    print("ready", flush=True)
    try:
        server.run()
    except RankLost as error:
        print(error, file=sys.stderr, flush=True)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]))
