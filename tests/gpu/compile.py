"""Compile Triton's kernels without a GPU, as the launchers launch them, and report what the interpreter cannot show.

    python tests/gpu/compile.py [--arch 80,86,89,90,100] [--quick]

A fake Triton driver names the architecture, and a launch stops after compiling. Kernels are therefore compiled with the
launchers' own constants and options, and with Triton's specialisation of integers and pointers. Prints one line per
kernel; exits with 1 if a kernel does not compile, spills more than 64 bytes, needs more shared memory than the
architecture has, or has fewer programs resident on a multiprocessor than its grid assumes.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction, compute_cache_key

from homing.replica.kernels.base import PagedRows, SamplingInputs
from homing.replica.kernels.triton import decode, experts, pointwise, prefill, sampling
from homing.replica.models.base import AttentionRule, Rotary

PROCESSORS = 132
SPILL_LIMIT = 64
#: Shared memory of a multiprocessor in bytes, of which one program may use all but 1 KB, and its threads.
SHARED = {80: 164 * 1024, 86: 100 * 1024, 89: 100 * 1024, 90: 228 * 1024, 100: 228 * 1024}
THREADS = {80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048}
REGISTERS = 65536
ARCHES = tuple(SHARED)
#: The first architecture with 8-bit floating-point numbers.
FP8_ARCH = 89
PLAIN = AttentionRule(0.1)


class Driver:
    """The parts of Triton's driver that compilation calls."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return int(self._target.arch)  # one device number per architecture: Triton caches compiled kernels by device

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cuda


@dataclass(slots=True, frozen=True)
class Compiled:
    arch: int
    label: str
    kernel: str
    registers: int
    spilled: int
    shared: int
    warps: int
    expected: int  #: minimum programs per multiprocessor
    seconds: float

    @property
    def resident(self) -> int:
        """Programs that fit on a multiprocessor."""
        of_warp = -(-self.registers * 32 // 256) * 256
        return min(
            REGISTERS // (of_warp * self.warps),
            SHARED[self.arch] // (self.shared + 1024),
            THREADS[self.arch] // (32 * self.warps),
        )

    @property
    def fits(self) -> bool:
        return self.spilled <= SPILL_LIMIT and self.resident >= self.expected

    def __str__(self) -> str:
        return (
            f"sm_{self.arch:<3} {self.label:34} {self.kernel:18} registers {self.registers:3} "
            f"spilled {self.spilled:5} shared {self.shared:6} resident {self.resident:2} of {self.expected} "
            f"compiled in {self.seconds:.1f} s{'' if self.fits else '  DOES NOT FIT'}"
        )


_real_run = JITFunction.run
_launches: list[tuple[str, Any, Any, float]] = []


def _record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Replaces `JITFunction.run`: record the kernel's name and the key of the variant that would be compiled."""
    _, keys, _, _, binder = self.device_caches[driver.active.get_current_device()]
    _, specialization, chosen = binder(*args, **options, debug=False, instrumentation_mode="")
    _launches.append((self.__name__, compute_cache_key(keys, specialization, chosen), None, 0.0))


def _compile(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Replaces `JITFunction.run`: compile without launching."""
    started = time.perf_counter()
    kernel = _real_run(self, *args, grid=grid, warmup=True, **options)
    _launches.append((self.__name__, kernel.hash, kernel, time.perf_counter() - started))


def set_up(arch: int, run: Callable[..., None]) -> None:
    torch.set_num_threads(1)
    driver.set_active(Driver(arch))
    stand_in: Any = run
    JITFunction.run = stand_in
    decode.programs_of = lambda device, tiles: tiles.programs * PROCESSORS
    decode.upcasts = prefill.upcasts = experts.upcasts = lambda x: False


# --- cases ---


def paged_rows(kv_heads: int, dim: int, page: int, dtype: torch.dtype, rows: int, width: int) -> PagedRows:
    pages = torch.empty(8, page, kv_heads, dim, dtype=dtype)
    lengths = torch.full((rows,), 100, dtype=torch.int32)
    return PagedRows(pages, pages.clone(), torch.zeros(rows, width, dtype=torch.int32), lengths)


def launch_decode(
    heads: int,
    kv_heads: int,
    dim: int,
    page: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    rule: AttentionRule = PLAIN,
) -> None:
    paged = paged_rows(kv_heads, dim, page, kv_dtype or dtype, 64, 641)
    q = torch.empty(64, heads, dim, dtype=dtype)
    decode.decode(q, paged, decode.plan_decode(paged, heads, None), rule, torch.empty_like(q))


def launch_prefill(
    heads: int,
    kv_heads: int,
    dim: int,
    page: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    rule: AttentionRule = PLAIN,
) -> None:
    paged = paged_rows(kv_heads, dim, page, kv_dtype or dtype, 3, 641)
    q = torch.empty(256, heads, dim, dtype=dtype)
    prefill.prefill(q, paged, torch.zeros(4, dtype=torch.int32), rule, torch.empty_like(q))


def launch_store(heads: int, kv_heads: int, dim: int, page: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    tokens = 64
    pages, wave = torch.empty(8, page, kv_heads, dim, dtype=kv_dtype), torch.empty(tokens, dim // 2, dtype=dtype)
    qkv, slots = torch.empty(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype), torch.zeros(tokens, dtype=torch.int64)
    pointwise.rotate_and_store(qkv, Rotary(wave, wave, None, None, 1e-6), slots, pages, pages.clone())
    for features in (128, heads * dim):
        pointwise.round_rows(torch.empty(tokens, heads * dim, dtype=dtype), features)


def launch_pointwise(heads: int, kv_heads: int, dim: int, page: int, dtype: torch.dtype) -> None:
    tokens, features = 64, 4096
    pages = torch.empty(8, page, kv_heads, dim, dtype=dtype)
    x = torch.empty(tokens, features, dtype=dtype)
    pointwise.add_rms_norm(x, x.clone(), x[0], 1e-6)
    pointwise.add_rms_norm(x, None, x[0], 1e-6)
    pointwise.silu_mul(torch.empty(tokens, 2 * 12_288, dtype=dtype))
    wave, weight = torch.empty(tokens, dim // 2, dtype=dtype), torch.empty(dim, dtype=dtype)
    qkv = torch.empty(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    slots = torch.zeros(tokens, dtype=torch.int64)
    pointwise.rotate_and_store(qkv, Rotary(wave, wave, weight, weight, 1e-6), slots, pages, pages.clone())
    pointwise.write_slots(torch.empty(36, 80, 1024, dtype=dtype), slots[:4], torch.empty(36, 4, 1024, dtype=dtype))
    pointwise.embed(x, slots, slots, torch.empty(dim // 2))
    pointwise.decode_rows(slots, slots, slots.int(), torch.zeros(65, 641, dtype=torch.int32), page)
    pointwise.rotate_and_store(qkv, Rotary(wave, wave, None, None, 1e-6), slots, pages, pages.clone())


def launch_experts(heads: int, kv_heads: int, dim: int, page: int, dtype: torch.dtype) -> None:
    weights, firsts = torch.empty(128, 96, 160, dtype=dtype), torch.zeros(129, dtype=torch.int32)
    for tokens in (64, 16_384):
        rows = torch.zeros(tokens, dtype=torch.int64)
        experts.expert_products(torch.empty(8, 160, dtype=dtype), weights, firsts, rows)
        experts.expert_products(torch.empty(tokens, 160, dtype=dtype), weights, firsts)


def launch_sampling() -> None:
    rows, vocab = 64, 151_936
    column, places = torch.zeros(rows), torch.arange(rows)
    kinds = column, column.int(), column.double(), column
    inputs = SamplingInputs(places, *kinds, places, places, column.int(), column.long())
    sampling.sample(torch.empty(rows, vocab), inputs, column.long())
    sampling.mask(torch.empty(rows, vocab), column.long(), torch.zeros(rows, -(-vocab // 32), dtype=torch.int32))


Case = tuple[str, Callable[..., None], tuple[Any, ...]]


def cases(quick: bool, arch: int) -> Iterator[Case]:
    """Labels, launchers and their arguments: heads, KV heads, head dim, page, dtype, dtype of 8-bit KV, rule."""
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32} | ({} if quick else {"fp16": torch.float16})
    for name, dtype in dtypes.items():
        for dim in (64, 256) if quick else (64, 96, 128, 256, *([512] if dtype != torch.float32 else [])):
            groups = (4,) if quick or dim != 128 else (1, 2, 4, 7, 8)
            for group in groups:
                shape = (8 * group, 8, dim, 16, dtype)
                yield f"{name} dim {dim} queries per KV head {group}", launch_decode, shape
                if group in (7, groups[-1]):  # a prefill uses the group only as a divisor
                    yield f"{name} dim {dim} queries per KV head {group}", launch_prefill, shape
            if not quick:
                rule = AttentionRule(0.1, softcap=30.0, sinks=torch.empty(64, dtype=dtype))
                for launch in (launch_decode, launch_prefill):
                    yield f"{name} dim {dim} softcap and sinks", launch, (64, 8, dim, 16, dtype, None, rule)
        yield name, launch_pointwise, (32, 8, 128, 16, dtype)
        yield name, launch_experts, (32, 8, 128, 16, dtype)
    yield "vocabulary of 151,936", launch_sampling, ()
    for name, dtype in {"bf16": torch.bfloat16, "fp16": torch.float16}.items() if arch >= FP8_ARCH else ():
        for dim, launch in product((64, 96, 128, 256), (launch_decode, launch_prefill, launch_store)):
            yield f"{name} dim {dim} 8 bits", launch, (32, 8, dim, 16, dtype, torch.float8_e4m3fn)


def compile_case(arch: int, case: Case) -> list[Compiled | str]:
    """Compile one case's kernels in this process; a string is the compiler's error."""
    label, launch, arguments = case
    set_up(arch, _compile)
    _launches.clear()
    try:
        launch(*arguments)
    except Exception as error:
        return [f"sm_{arch} {label} {launch.__name__}: {error!r}"[:600]]
    found: list[Compiled | str] = []
    for name, _, kernel, seconds in _launches:
        registers, spilled = resources(kernel.asm["ptx"], arch)
        expected = 1
        if name == "_decode":
            _, _, dim, _, dtype, *_ = arguments
            expected = decode.resident(decode.tiles_for(dtype, dim), SHARED[arch])
        shared, warps = kernel.metadata.shared, kernel.metadata.num_warps
        found.append(Compiled(arch, label, name, registers, spilled, shared, warps, expected, seconds))
    return found


def resources(ptx: str, arch: int) -> tuple[int, int]:
    """Registers per thread and bytes spilled, as the assembler reports them."""
    name = "ptxas" if arch < 100 else "ptxas-blackwell"
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        target = f"-arch=sm_{arch}{'a' if arch >= 90 else ''}"
        command = [str(ptxas), target, "-v", file.name, "-o", "/dev/null"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", printed), re.search(r"(\d+) bytes spill stores", printed)
    assert registers is not None, printed
    return int(registers[1]), int(spilled[1]) if spilled else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the kernels for GPUs that this machine lacks")
    parser.add_argument("--arch", default=",".join(map(str, ARCHES)))
    parser.add_argument("--quick", action="store_true", help="the smallest and the largest shapes only")
    parser.add_argument("--only", default="", help="only cases whose name contains this, such as 'fp16' or '8 bits'")
    options = parser.parse_args()
    print(f"triton {triton.__version__}")
    failed = 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        jobs = [
            pool.submit(compile_case, arch, case)
            for arch in map(int, options.arch.split(","))
            for case in cases(options.quick, arch)
            if options.only in case[0]
        ]
        for job in jobs:
            for each in job.result():
                print(each, flush=True)
                failed += isinstance(each, str) or not each.fits
    print(f"{failed} kernels do not fit")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
