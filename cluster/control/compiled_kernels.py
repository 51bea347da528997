"""Configures kernel caches, and compiles kernels ahead of a first start. Does not import torch."""

import contextlib
import os
import subprocess
import sys
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from ... import __version__
from ...replica.kernels.cpu.runtime.code_store import open_store
from ..config import Settings

#: Environment variables that torch reads when it is imported.
#:
#: Large pages: a killed process frees its memory before it closes its sockets, and routers notice its death only then.
#: With 844 MB in small pages this took 130 to 220 ms after SIGKILL on two busy cores, and 65 ms with the KV pool in
#: large pages.
#:
#: The two caches hold what oneDNN and torch compiled for each shape, 1,024 entries each by default. Row counts differ
#: from step to step, so the caches fill up: 0.55 MB per entry for a layer of 4,096 x 256; a replica of the demo model
#: grew from 0.6 to 1.3 GB in 3,300 requests. With 64 entries, 700 requests took the same CPU time (33.4 and 33.3 s);
#: 128 leaves room for models with more kinds of layers.
TORCH_ENVIRONMENT = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "128",
}


def _environment() -> dict[str, str]:
    """Default variables that torch and kernel libraries read when they are imported."""
    variables = dict(TORCH_ENVIRONMENT)
    with contextlib.suppress(RuntimeError):  # a container's user may have no home
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        variables["NUMBA_CACHE_DIR"] = str(cache / "homing" / "kernels")
        variables["TRITON_CACHE_DIR"] = str(cache / "homing" / "triton")
        variables["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] = str(cache / "homing" / "flash-attn-4")
        variables["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"
    return variables


def prepare_torch() -> None:
    """Set the variables that torch and kernel libraries read on import, unless the operator has set them."""
    for name, value in _environment().items():
        os.environ.setdefault(name, value)


def start_compilation(settings: Settings, model_dir: Path) -> subprocess.Popen[bytes] | None:
    """Start a process that compiles the kernels for ranks on this machine's CPUs; None if there is nothing to compile.

    On a first start this takes 8 CPU seconds, which overlap with the start of Ray. Ranks wait for single kernels, and
    compile those that this process leaves out or fails on. If kernels cannot be stored, none are compiled ahead.
    """
    replica, environment = settings.replica, _environment() | os.environ | {"OMP_NUM_THREADS": "1"}
    folder = environment.get("NUMBA_CACHE_DIR")
    if replica.engine != "homing" or settings.cluster.gpus_per_rank or not folder or find_spec("numba") is None:
        return None
    wanted = replica.dtype, str(settings.kvcache.block_size)
    key_fields = __version__, version("numba"), (model_dir / "config.json").read_bytes(), *wanted
    done = Path(folder) / f"{sha256(repr(key_fields).encode()).hexdigest()[:16]}.complete"
    if open_store(done.parent) is None or done.exists():
        return None
    command = [sys.executable, "-P", "-m", "homing.replica.execute.cpu_warm_up", str(model_dir), *wanted, str(done)]
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(command, env=environment, stdin=nowhere, stdout=nowhere, stderr=nowhere)
