"""What this process is doing while it starts, shown to users who wait for it.

It is module state, because loading, compiling and measuring are far apart in the code and share no object.
"""

from collections.abc import Iterator
from contextlib import contextmanager

#: Percentages are rounded down to a multiple of this, because logs get a line for each.
STEP_PERCENT = 10

_doing = ""


def report(doing: str, done: int = 0, of: int = 0) -> None:
    """Set the current activity. `done` of `of` units are complete; `of` 0: the total is unknown."""
    global _doing
    percent = 100 * done // of // STEP_PERCENT * STEP_PERCENT if of else 0
    _doing = f"{doing}, {percent} %" if percent else doing


def current() -> str:
    """The activity reported last; empty if there is none. Callable from any thread."""
    return _doing


@contextmanager
def during(doing: str) -> Iterator[None]:
    """Report an activity that interrupts the current one, which is shown again afterwards."""
    before = _doing
    report(doing)
    try:
        yield
    finally:
        report(before)
