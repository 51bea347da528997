"""Runs one rank above 0 in its own process: joins the group, then runs every plan that arrives on standard input.

Arguments: folder, quantization, rank, size, port, block size, number of blocks. Frames: 4 bytes little-endian length,
then a msgpack `StepPlan`. Exits at the end of input.
"""

import sys
from pathlib import Path

import msgspec
import torch

from homing.replica.config import ReplicaSettings
from homing.replica.engine.step_plan import StepPlan
from homing.replica.execute.runner import ModelRunner
from homing.replica.parallel.rank_group import RankGroup


def main(folder: str, quantization: str, rank: int, size: int, port: int, block_size: int, num_blocks: int) -> None:
    torch.set_num_threads(1)
    group = RankGroup.join(rank, size, host="127.0.0.1", port=port, backend="gloo", timeout_s=250)
    values = {"dtype": "float32", "device": "cpu", "tensor_parallel_size": size, "quantization": quantization}
    settings = msgspec.convert(values, ReplicaSettings)
    runner = ModelRunner(settings, Path(folder), block_size, group)
    runner.allocate_kv(num_blocks)
    while header := sys.stdin.buffer.read(4):
        frame = sys.stdin.buffer.read(int.from_bytes(header, "little"))
        assert runner.forward(msgspec.msgpack.decode(frame, type=StepPlan)) is None


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
