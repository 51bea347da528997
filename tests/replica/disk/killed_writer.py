"""Writes blocks into a KV file in children that are killed at seeded places, and examines the file after each.

Arguments: folder, number of children. Prints the number of children that were killed while they wrote; any other
output and status are a failure. The children are forked from this process, which has no threads, to save their start.
"""

import os
import signal
import sys
from pathlib import Path
from random import Random

from blocks import BLOCK_BYTES, BLOCK_SIZE, IDENTITY, SLOTS, entry, kv_of

from homing.replica.disk.disk_file import DiskFile, Transfers, open_file
from homing.replica.disk.file_format import PAGE_BYTES, Layout

PUTS = 8


class Killing(Transfers):
    """Kills its process in the middle of the write that passes this number of bytes."""

    def __init__(self, after: int) -> None:
        self.left = after

    def write(self, file: int, data: memoryview, offset: int) -> int:
        if len(data) > self.left:
            # What O_DIRECT writes is a multiple of its alignment.
            unit = PAGE_BYTES if len(data) >= PAGE_BYTES else 1
            if whole := self.left // unit * unit:
                super().write(file, data[:whole], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= len(data)
        return super().write(file, data, offset)


def write(path: Path, seed: int, done: int) -> None:
    """Put blocks into random slots, and report each that is complete."""
    random = Random(seed)
    layout = Layout(BLOCK_SIZE, BLOCK_BYTES, SLOTS)
    file = open_file(path, IDENTITY, 0, SLOTS, Killing(random.randrange((PUTS - 1) * layout.slot_bytes)))
    assert file is not None, "the file is locked by a dead process"
    first = 1 + max((each.generation for each in file.entries), default=0)
    for number in range(PUTS):
        put = entry(random.randrange(1, 1000), random.randrange(SLOTS), first + number)
        os.write(done, b"%d %d\n" % (put.slot, int.from_bytes(put.block_hash, "little")))
        file.put(put, memoryview(kv_of(put.block_hash)))
    os._exit(0)


def held(file: DiskFile) -> dict[int, int]:
    """The block in each slot, all of whose KV is right."""
    found = {}
    for each in file.entries:
        into = memoryview(bytearray(BLOCK_BYTES))
        file.get(each.slot, each.generation, each.block_hash, into)
        assert into == kv_of(each.block_hash), f"{each} has other KV"
        name = int.from_bytes(each.block_hash, "little")
        assert each == entry(name, each.slot, each.generation), f"{each} has other fields"
        found[each.slot] = name
    return found


def main(folder: str, children: int) -> None:
    path, killed, expected = Path(folder) / "blocks.kv", 0, {}
    for seed in range(children):
        begun, done = os.pipe()
        child = os.fork()
        if child == 0:
            write(path, seed, done)
        os.close(done)
        with os.fdopen(begun) as lines:
            puts = [tuple(map(int, line.split())) for line in lines]
        _, status = os.waitpid(child, 0)
        killed += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        complete = puts[:-1] if os.WIFSIGNALED(status) else puts
        expected |= dict(complete)
        file = open_file(path, IDENTITY, 0, SLOTS)
        assert file is not None
        now = held(file)
        if puts:
            slot, name = puts[-1]  # it had the old block, none, or the new one
            assert now.get(slot) in (expected.get(slot), None, name), f"seed {seed}: slot {slot} holds {now.get(slot)}"
            expected.pop(slot, None)
            if slot in now:
                expected[slot] = now[slot]
        assert now == expected, f"seed {seed}: {now}, expected {expected}"
        file.close()
    print(killed)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
