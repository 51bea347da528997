"""Memory of large requests."""

import contextlib
import ctypes


def trim_heap() -> None:
    """Return the memory of large bodies to the system; glibc may keep it. Takes milliseconds, without the GIL."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
