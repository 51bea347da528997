"""Compile flash-attn-4's kernels without a GPU, with the calls that our attention makes, and report errors.

    python tests/gpu/compile_flash4.py [--arch 90,100] [--quick]

Tensors are fake: the library then compiles for the architecture that its environment variables name, and launches
nothing. Prints one line per call; exits with 1 if one fails, and with 0 if flash-attn-4 is not installed.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from homing.replica.attention.flash import Flash4Attention, load_flash4
from homing.replica.attention.paged import KvPool, PagedStep
from homing.replica.kernels.base import PagedRows, TorchKernels
from homing.replica.models.base import AttentionRule
from homing.replica.models.spec import KvShape, ModelSpec

#: Multiprocessors of an H100 and a B200, which determine how finely keys are split.
PROCESSORS = {90: 132, 100: 148}
KV_HEADS, PAGE, PAGES_OF_A_ROW = 8, 16, 512
#: Names and numbers of rows: keys are split for few rows, but not for many.
DECODES = {"decode of 1 row": 1, "decode of 256 rows": 256}
#: Names and prompt lengths in tokens: `Flash4Attention.kernel_lengths` says why they differ.
PREFILLS = {"prefill of 8": 8, "prefill of 512": 512}
DIMS, GROUPS = (64, 128, 256), (1, 4, 8)
RULES = ("window", "softcap", "sinks", "window and softcap", "window and sinks")


@dataclass(slots=True, frozen=True)
class Case:
    dtype: str
    dim: int
    group: int  #: queries per KV head
    rule: str
    step: str

    def __str__(self) -> str:
        return f"{self.dtype:8} dim {self.dim:3} queries per KV head {self.group} {self.rule:17} {self.step}"

    @property
    def needs_splits(self) -> bool:
        """Whether the attention leaves this step to our kernels if the library cannot split keys."""
        return self.step in DECODES


def rule_of(name: str, heads: int, dtype: torch.dtype) -> AttentionRule:
    window, softcap = 128 if "window" in name else None, 30.0 if "softcap" in name else None
    return AttentionRule(0.1, window, softcap, torch.empty(heads, dtype=dtype) if "sinks" in name else None)


def cases(arch: int, quick: bool) -> Iterator[Case]:
    """Every head dim with every group, every rule with one group, and float16 without rules."""
    shapes = [("bfloat16", dim, group, "plain") for dim, group in product(DIMS, GROUPS)]
    shapes += [("bfloat16", dim, 8, rule) for dim, rule in product(DIMS, RULES)]
    shapes += [("float16", dim, 4, "plain") for dim in DIMS]
    for shape in [("bfloat16", 128, 4, "plain"), ("bfloat16", 64, 8, "window and sinks")] if quick else shapes:
        for step in (*DECODES, *PREFILLS):
            case = Case(*shape, step)
            if arch >= 100 or not case.needs_splits:
                yield case


def set_up(arch: int) -> None:
    """Make this process compile for a device it does not have. Must run before the library is imported."""
    os.environ.update(
        FLASH_ATTENTION_ARCH=f"sm_{arch}", CUTE_DSL_ARCH=f"sm_{arch}a", FLASH_ATTENTION_NUM_SMS=str(PROCESSORS[arch])
    )
    torch.set_num_threads(1)
    from cutlass.utils import HardwareInfo  # which queries the driver

    HardwareInfo.__init__ = lambda self, device_id=0: None
    HardwareInfo.get_device_multiprocessor_count = lambda self: PROCESSORS[arch]
    load_flash4()  # imported here so that its import is not timed as compilation


def _on_cuda(x: Any) -> Any:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") if torch.is_tensor(x) else x


class Library:
    """Calls flash-attn-4 for an attention on the CPU: torch without CUDA cannot make views of fake CUDA tensors."""

    def __init__(self) -> None:
        self._call, self.calls = load_flash4(), 0

    def __call__(self, q: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        self.calls += 1
        self._call(*map(_on_cuda, (q, *arguments)), **{name: _on_cuda(value) for name, value in options.items()})
        return torch.empty_like(q)


def compile_case(arch: int, case: Case) -> tuple[float, str]:
    """Seconds, and the library's error; empty if there was none."""
    started = time.perf_counter()
    try:
        call = Library()
        attend(arch, case, call)
        problem = "" if call.calls == 1 else f"{call.calls} calls of the library"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"[:600]
    return time.perf_counter() - started, problem


def attend(arch: int, case: Case, call: Library) -> None:
    """Run one step of one layer through the production attention."""
    dtype, heads = getattr(torch, case.dtype), KV_HEADS * case.group
    spec = ModelSpec((KvShape(KV_HEADS, case.dim, case.dim),), 32_000, 8192, (), case.dtype, 2, query_heads=heads)
    pool = KvPool(spec, 1, PAGE, dtype, torch.device("cpu"))
    with FakeTensorMode(), torch.inference_mode():
        attention = Flash4Attention(pool, TorchKernels(), call, splits=arch >= 100)
        keys, values = (torch.empty(4096, PAGE, KV_HEADS, case.dim, dtype=dtype) for _ in range(2))
        count = DECODES.get(case.step, 1)
        tables = torch.empty(count, PAGES_OF_A_ROW, dtype=torch.int32)
        rows = PagedRows(keys, values, tables, torch.empty(count, dtype=torch.int32))
        length = PREFILLS.get(case.step)
        q = torch.empty(length or count, heads, case.dim, dtype=dtype)
        rule, out = rule_of(case.rule, heads, dtype), torch.empty_like(q)
        if length is None:
            attention._decode(q, rows, rule, out)
        else:
            first, slots = torch.empty(2, dtype=torch.int32), torch.empty(length, dtype=torch.int64)
            step = PagedStep(slots, tables, rows.seq_lens, 0, first, [length], [length])
            attention._prefill(q, rows, step, rule, out)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile flash-attn-4's kernels for GPUs that this machine lacks")
    parser.add_argument("--arch", default=",".join(map(str, PROCESSORS)))
    parser.add_argument("--quick", action="store_true", help="two shapes only")
    options = parser.parse_args()
    if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
        print("flash-attn-4 is not installed, its kernels are not compiled: pip install 'homing[flash-attn]'")
        return 0
    failed = 0
    for arch in map(int, options.arch.split(",")):
        chosen = list(cases(arch, options.quick))
        # Spawned, because the library reads the architecture from its variables only once.
        with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), set_up, (arch,)) as pool:
            found = pool.map(compile_case, [arch] * len(chosen), chosen)
            for case, (seconds, problem) in zip(chosen, found, strict=True):
                print(
                    f"sm_{arch:<3} {case} compiled in {seconds:.1f} s{problem and f'  FAILED: {problem}'}", flush=True
                )
                failed += bool(problem)
    print(f"{failed} calls of flash-attn-4 failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
