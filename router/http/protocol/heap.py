"""Gives memory back to the system that large bodies took: glibc keeps what was freed, for ever if nothing else asks."""

import ctypes


def trim() -> None:
    """Return free memory to the system. Takes milliseconds, without the GIL. Does nothing without glibc."""
    try:
        release = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return
    release(0)
