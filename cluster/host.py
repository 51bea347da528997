"""The facts about this machine that `homing doctor` examines: versions, devices, memory, disks, limits and clock.

Changes nothing and makes no judgement. None means that a fact could not be determined.
"""

import contextlib
import ctypes
import os
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from ..replica.kernels.toolchain import launcher_problem
from ..replica.load.free_memory import free_memory_bytes
from .control.compiled_kernels import prepare_torch
from .errors import ExtraMissing

#: Packages of the extra `homing[serve]`. A router in front of engines, its observers and the offline tools need none.
SERVE_PACKAGES = ("ray", "torch", "numba")
#: Packages required for serving.
PACKAGES = (*SERVE_PACKAGES, "transformers", "tokenizers", "safetensors", "pyzmq", "msgspec", "xxhash", "httptools")
#: Ray's token file, unless RAY_AUTH_TOKEN_PATH is set.
DEFAULT_TOKEN = Path.home() / ".ray" / "auth_token"
#: Larger than the kernel's `struct timex` on every platform.
TIMEX_BYTES = 512
CLOCK_UNSYNCHRONIZED = 5


@dataclass(slots=True, frozen=True)
class DiskInfo:
    use: str  #: what the folder is used for
    folder: str
    free_bytes: int


@dataclass(slots=True, frozen=True)
class MachineInfo:
    python: tuple[int, int]
    packages: Mapping[str, str | None]  #: version by name; None if not installed
    memory_bytes: int  #: available memory
    gpus_seen: int  #: GPUs of the driver that CUDA_VISIBLE_DEVICES does not hide
    gpu_bytes: tuple[int, ...]  #: memory of each of these; empty if unknown
    gpu_capability: tuple[int, int] | None  #: the highest of these; None if unknown
    gpus_usable: int  #: GPUs that torch can use
    launcher_problem: str | None  #: why Triton could not launch kernels on a GPU; None if it could
    cpu_kernels: tuple[str, ...]  #: what was measured to be fastest on this processor, and why
    disks: tuple[DiskInfo, ...]
    shared_memory_bytes: int | None  #: size of /dev/shm
    open_files: int  #: hard limit on open files; routers raise their soft limit towards it
    clock_synchronized: bool | None
    token_mode: int | None  #: permissions of Ray's token file; None if it does not exist


def check_extra(*packages: str) -> None:
    """Raise ExtraMissing unless these packages, by default those without which no replica runs, are installed."""
    # Replicas run without numba, slower on CPUs: `doctor` reports it. GPU images may not have it.
    needed = packages or [name for name in SERVE_PACKAGES if name != "numba"]
    if any(find_spec(name) is None for name in needed):
        raise ExtraMissing


def inspect_machine(disks: Mapping[str, Path]) -> MachineInfo:
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or DEFAULT_TOKEN)
    shared_memory = Path("/dev/shm")
    return MachineInfo(
        python=sys.version_info[:2],
        packages={name: _version(name) for name in PACKAGES},
        memory_bytes=free_memory_bytes(),
        gpus_seen=visible_gpus(),
        gpu_bytes=gpu_bytes(shutil.which("nvidia-smi")),
        gpu_capability=gpu_capability(shutil.which("nvidia-smi")),
        gpus_usable=_gpus_usable(),
        launcher_problem=launcher_problem(),
        cpu_kernels=_cpu_kernels(),
        disks=tuple(DiskInfo(use, str(folder), _free_bytes(folder)) for use, folder in disks.items()),
        shared_memory_bytes=shutil.disk_usage(shared_memory).total if shared_memory.is_dir() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        clock_synchronized=_clock_synchronized(),
        token_mode=stat.S_IMODE(token.stat().st_mode) if token.is_file() else None,
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def visible_gpus() -> int:
    """Return the number of the driver's GPUs, except those that CUDA_VISIBLE_DEVICES hides from this process."""
    return visible_count(gpus_seen(shutil.which("nvidia-smi"), Path("/dev")), os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible_count(gpus: int, visible: str | None) -> int:
    """Return how many of `gpus` are visible with this value of CUDA_VISIBLE_DEVICES (None: not set)."""
    if visible is None:
        return gpus
    names = [name.strip() for name in visible.split(",")]
    return min(gpus, next((at for at, name in enumerate(names) if name in ("", "-1", "NoDevFiles")), len(names)))


def gpus_seen(tool: str | None, devices: Path) -> int:
    """The number of GPUs that nvidia-smi lists; if `tool` is None or fails, the number of device files in `devices`.

    A container may lack the tool, and it fails if the driver does: neither is a reason to serve on the CPU.
    """
    listed = ""
    if tool is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False).stdout
    files = [each for each in devices.glob("nvidia*") if each.name.removeprefix("nvidia").isdigit()]
    return sum(line.startswith("GPU ") for line in listed.splitlines()) or len(files)


def gpu_bytes(tool: str | None) -> tuple[int, ...]:
    """The memory of each GPU that nvidia-smi lists, hidden or not; empty if it does not say."""
    try:
        return tuple(int(each) << 20 for each in _asked(tool, "memory.total"))
    except ValueError:  # GPUs that share the CPU's memory report none
        return ()


def gpu_capability(tool: str | None) -> tuple[int, int] | None:
    """The highest compute capability of the GPUs that nvidia-smi lists; None if it does not say."""
    found = [each.partition(".") for each in _asked(tool, "compute_cap")]
    try:
        return max(((int(major), int(minor)) for major, _, minor in found), default=None)
    except ValueError:
        return None


def _asked(tool: str | None, what: str) -> list[str]:
    """What nvidia-smi says of each GPU; empty if it fails."""
    if tool is None:
        return []
    asked = [tool, f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []


def _gpus_usable() -> int:
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _cpu_kernels() -> tuple[str, ...]:
    prepare_torch()  # for the cache of compiled kernels, else this takes seconds each time
    try:
        from ..replica.kernels.choice import measured_on_cpu
    except ImportError:  # no torch; `packages` names what is missing
        return ()
    return tuple(measured_on_cpu())


def _free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _clock_synchronized() -> bool | None:
    state: int = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))  # all zero: change nothing
    return None if state < 0 else state != CLOCK_UNSYNCHRONIZED
