"""Compile every Triton kernel for Hopper without a GPU, and say what it takes: what the interpreter cannot show.

Launchers are called with tensors of a real model's shapes and dtype; a recorder stands in for the kernels and keeps
what they would be launched with. Prints one line per kernel: registers, bytes spilled, shared memory, seconds.
"""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from homing.replica.kernels.base import PagedRows, SamplingInputs
from homing.replica.kernels.triton import decode, pointwise, prefill, sampling
from homing.replica.models.base import Rotary

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass
class Recorder:
    """Stands in for a kernel: keeps the arguments of its launches."""

    kernel: Any
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: self.launches.append((self.kernel, args, kwargs))


@dataclass
class Compiled:
    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    seconds: float


@contextmanager
def recorded(*modules: ModuleType) -> Iterator[list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    """The launches of these modules' kernels while the context is open."""
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    kept = [(module, name, value) for module in modules for name, value in vars(module).items()]
    kernels = [(module, name, value) for module, name, value in kept if isinstance(value, JITFunction)]
    for module, name, value in kernels:
        setattr(module, name, Recorder(value, launches))
    try:
        yield launches
    finally:
        for module, name, value in kernels:
            setattr(module, name, value)


def launch_all(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, page: int) -> None:
    """Call every launcher once with the shapes of a decode and of a prefill step."""
    torch.set_default_device("meta")  # shapes without memory; the CPU's would be taken for the interpreter's
    rows, tokens, features, vocab = 64, 256, 4096, 151_936
    pages = torch.empty(40, page, kv_heads, dim, dtype=dtype)
    lengths = torch.full((rows,), 100, dtype=torch.int32)
    paged = PagedRows(pages, pages.clone(), torch.zeros(rows, 8, dtype=torch.int32), lengths)
    q = torch.empty(rows, heads, dim, dtype=dtype)
    plan = decode.plan_decode(lengths, kv_heads, None)
    decode.decode(q, paged, plan, 0.1, torch.empty_like(q))
    many = torch.empty(tokens, heads, dim, dtype=dtype)
    prefill.prefill(many, paged, torch.zeros(rows + 1, dtype=torch.int32), 0.1, None, torch.empty_like(many))
    x = torch.empty(tokens, features, dtype=dtype)
    pointwise.add_rms_norm(x, x.clone(), x[0], 1e-6)
    pointwise.silu_mul(torch.empty(tokens, 2 * 12288, dtype=dtype))
    wave = torch.empty(tokens, dim // 2, dtype=dtype)
    weight = torch.empty(dim, dtype=dtype)
    qkv = torch.empty(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    slots = torch.zeros(tokens, dtype=torch.int64)
    pointwise.rotate_and_store(qkv, Rotary(wave, wave, weight, weight, 1e-6), slots, pages, pages.clone())
    column = torch.zeros(rows)
    inputs = SamplingInputs(column, column.int(), column.double(), column, column.long(), column.long())
    sampling.sample(torch.empty(rows, vocab), inputs, column.long())
    sampling.mask(torch.empty(rows, vocab), column.long(), torch.zeros(rows, -(-vocab // 32), dtype=torch.int32))


def compile_launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compiled:
    """Compile one launch for the target, as the launcher would."""
    options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages") if name in kwargs}
    bound = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(kernel.params):
        value = bound[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[index,] = value
            continue
        signature[parameter.name] = type_of(value)
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[index,] = [["tt.divisibility", 16]]
    started = time.perf_counter()
    done = triton.compile(ASTSource(kernel, signature, constants, attributes), target=TARGET, options=options)
    registers, spilled = resources(done.asm["ptx"])
    seconds = time.perf_counter() - started
    return Compiled(kernel.__name__, registers, spilled, done.metadata.shared, seconds)


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def resources(ptx: str) -> tuple[int, int]:
    """Registers per thread and bytes spilled, as the assembler says."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(tools / "ptxas"), "-arch=sm_90a", "-v", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    assert registers is not None, said
    return int(registers[1]), int(spilled[1]) if spilled else 0


def main() -> int:
    torch.set_num_threads(1)
    modules = (decode, pointwise, prefill, sampling)
    print(f"triton {triton.__version__} for sm_{TARGET.arch}")
    for dim, page in ((128, 64), (64, 16)):
        with recorded(*modules) as launches:
            launch_all(torch.bfloat16, heads=32, kv_heads=8, dim=dim, page=page)
        for launch in launches:
            found = compile_launch(*launch)
            print(
                f"{found.name:20} dim {dim} page {page:3} registers {found.registers:3} "
                f"spilled {found.spilled_bytes:4} shared {found.shared_bytes:6} compiled in {found.seconds:.1f} s",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
