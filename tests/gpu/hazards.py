"""Look in the code that Triton generates for what its interpreter, which has no threads, cannot show.

    python tests/gpu/hazards.py [--arch 80,90]

Prints for each kernel that updates numbers in place how many of these a thread may overwrite before all have read them.
Needs no GPU.
"""

import argparse
import re
import sys
from collections.abc import Iterator

import torch
from compile import _compile, _launches, launch_sampling, set_up

from homing.replica.kernels.triton import pointwise

#: An access to global memory: kind, whether all threads wait for each other, and the register with the address.
_STEP = re.compile(
    r"\b(?:(?P<wait>bar\.sync|barrier\.sync)|(?P<kind>ld|st|atom|red)\.global\S*[^\[;]*\[ *(?P<at>%\w+))"
)


def accesses(ptx: str) -> list[tuple[str, str]]:
    """The kinds of accesses in the order of the code, each with its address's register: ld, st, atom, red, wait."""
    return [("wait" if found["wait"] else found["kind"], found["at"] or "") for found in _STEP.finditer(ptx)]


def races(ptx: str) -> list[str]:
    """Addresses from which threads load, and to which one stores, without a wait between the two."""
    read: set[str] = set()
    found = []
    for kind, at in accesses(ptx):
        if kind == "wait":
            read.clear()
        elif kind == "ld":
            read.add(at)
        elif at in read:
            found.append(at)
    return found


def report(arch: int) -> Iterator[str]:
    set_up(arch, _compile)
    _launches.clear()
    rows = torch.zeros(64, dtype=torch.int64)
    pointwise.decode_rows(rows, rows, rows.int(), torch.zeros(65, 641, dtype=torch.int32), 16)
    launch_sampling()
    for name, _, kernel, _ in _launches:
        ptx: str = kernel.asm["ptx"]
        steps = accesses(ptx)
        stored = {at for kind, at in steps if kind == "st"} & {at for kind, at in steps if kind == "ld"}
        yield f"sm_{arch} {name}: {len(stored)} read and written, {len(races(ptx))} races"


def main() -> int:
    parser = argparse.ArgumentParser(description="Look for races in the kernels' code")
    parser.add_argument("--arch", default="80,90")
    for arch in map(int, parser.parse_args().arch.split(",")):
        for line in report(arch):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
