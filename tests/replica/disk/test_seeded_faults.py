"""Whatever a disk does, in whatever order: right bytes or none, no hang, no leak."""

from collections import Counter
from pathlib import Path

import pytest

from .seeded_faults import FAULTS, run


@pytest.mark.parametrize("seeds", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_fault_of_a_disk_gives_wrong_bytes(tmp_path: Path, seeds: int) -> None:
    """Every kind of failure is counted, and only if its cause was there."""
    injected, failures = Counter[str](), Counter[str]()
    for seed in range(seeds):
        try:
            run(seed, tmp_path, injected, failures)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    print(f"injected {dict(injected)}\nnoticed {dict(failures)}")
    kinds = {kind for fault, kind in FAULTS.items() if kind and injected[fault]}
    if injected["damage"]:
        kinds |= {"disk_checksum"}
    noticed = set(failures) - {"disk_behind"}
    assert noticed <= kinds
    assert seeds < 1000 or noticed == kinds
