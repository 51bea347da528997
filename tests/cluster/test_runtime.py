"""One-time setup of a process."""

import subprocess
import sys

LOADED = """
import gc
loaded = [[] for _ in range(100_000)]
from homing.cluster.runtime import freeze_loaded_objects
freeze_loaded_objects()
print(len(gc.get_objects()), gc.get_freeze_count())
"""


def test_loaded_objects_are_excluded_from_garbage_collection() -> None:
    """A collection over all of torch and transformers takes a fifth of a second, during which no token is sent."""
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=60, check=True)
    walked, spared = map(int, done.stdout.split())

    assert spared > 100_000
    assert walked < 1_000


LEAVING = """
import contextlib, os
from homing.cluster.runtime import leave_process_group
before = os.getpgid(0)
leave_process_group()
with contextlib.suppress(ProcessLookupError):
    os.killpg(before, 9)
print(before == os.getpid(), os.getpgid(0) != before)
"""


def test_a_process_that_left_its_group_is_not_killed_with_it() -> None:
    """Also if it was the group's leader, as Ray's workers are."""
    done = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, timeout=60, process_group=0)

    assert done.stdout.split() == ["True", "True"]
