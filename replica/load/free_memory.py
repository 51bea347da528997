"""How much memory this process can still take from the machine and, in a container, within its limit. No torch."""

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def free_memory_bytes(cgroup: Path = _CGROUP) -> int:
    """Bytes available without swapping, capped by what the container's limit leaves."""
    free: int = psutil.virtual_memory().available
    try:
        limit = int((cgroup / "memory.max").read_text(encoding="utf-8"))
        used = int((cgroup / "memory.current").read_text(encoding="utf-8"))
        counts = dict(line.split() for line in (cgroup / "memory.stat").read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return free
    return max(0, min(free, limit - used + int(counts.get("inactive_file", 0))))  # the kernel gives up cached files
