"""What this process does while it starts, for those who wait for it.

Loading, compiling and measuring are far apart, and nothing else connects them; what they do is a fact of the process.
"""

from collections.abc import Iterator
from contextlib import contextmanager

#: Shares are shown in such steps: logs get a line for each.
STEP_PERCENT = 10

_doing = ""


def report(doing: str, done: int = 0, of: int = 0) -> None:
    """Say what begins; `of`: how much there is to do, where that is known."""
    global _doing
    percent = 100 * done // of // STEP_PERCENT * STEP_PERCENT if of else 0
    _doing = f"{doing}, {percent} %" if percent else doing


def present() -> str:
    """What was reported last; empty: nothing. Callable from any thread."""
    return _doing


@contextmanager
def during(doing: str) -> Iterator[None]:
    """Report something that interrupts what was reported before."""
    before = _doing
    report(doing)
    try:
        yield
    finally:
        report(before)
