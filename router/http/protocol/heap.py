"""Returns the memory of large bodies to the system: glibc may keep freed memory forever."""

import ctypes


def trim() -> None:
    """Return free memory to the system. Takes milliseconds, without the GIL. Does nothing without glibc."""
    try:
        release = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return
    release(0)
