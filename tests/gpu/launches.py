"""Count a decode step's launches and bytes without a GPU, and predict its share of the bandwidth roof.

    python tests/gpu/launches.py [--rows 64] [--context 1040]

A model of real shape runs on meta tensors with Triton's launchers. Each torch operator that computes is one launch, and
so is each kernel launch. It takes the time of its bytes at one H200's bandwidth, but at least a graph node's time. The
times are assumed, not measured, and optimistic: products and attention do not quite reach the bandwidth.
"""

import argparse
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from compile import set_up
from models import SHAPES, RandomWeights, config_of, sizes
from torch.utils._python_dispatch import TorchDispatchMode

from homing.replica.attention.paged import KvPool, PagedAttention
from homing.replica.execute.gpu_runner import DecodeStep
from homing.replica.execute.request_table import RequestTable
from homing.replica.kernels.triton.triton_kernels import TritonKernels
from homing.replica.models.native import NativeModel

META = torch.device("meta")
BYTES_PER_S = 4.3e12
NODE_S = 2e-6
#: Operators that compute nothing: views and allocations.
FREE = {"slice", "view", "_unsafe_view", "unbind", "split", "detach", "t", "transpose", "permute", "expand", "select"}
FREE |= {"empty", "new_empty", "empty_like", "unsqueeze", "squeeze", "alias", "as_strided", "lift_fresh", "reshape"}
FREE |= {"chunk", "flatten", "unflatten", "is_pinned", "empty_strided"}


@dataclass
class Launches(TorchDispatchMode):
    """Records the name and bytes of each launch while active."""

    found: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in FREE:
            self.found.append((name, _bytes((*args, out))))
        return out

    def kernel(self, jit: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """Replaces `JITFunction.run`."""
        self.found.append((jit.__name__, 0 if jit.__name__ in PARTLY_READ else _bytes(args)))


#: Kernels that read only part of their pools and tables. They count 0 bytes; `share` adds the KV that `_decode` reads.
PARTLY_READ = ("_decode", "_plan", "_decode_rows", "_rotate_and_store", "_embed")


def _bytes(values: Any) -> int:
    return sum(each.nbytes for each in values if isinstance(each, torch.Tensor))


def launches_of(name: str, rows: int) -> list[tuple[str, int]]:
    """The launches of one decode step of this shape in bfloat16."""
    config = config_of(name)
    seen = Launches()
    set_up(90, lambda jit, *args, **options: seen.kernel(jit, *args, **options))
    model = NativeModel(config, RandomWeights(config, torch.bfloat16, META), (), torch.bfloat16, META)
    kernels = model._kernels = TritonKernels()
    attention = PagedAttention(KvPool(model.spec, 100, 16, torch.bfloat16, META), kernels)
    table = RequestTable(rows, 2561, META)
    step = DecodeStep(model, attention, kernels, table, max_rows=rows, block_size=16, group=None)
    with torch.inference_mode(), seen:
        step.run(rows)
    return seen.found


def counts(found: list[tuple[str, int]], layers: int) -> tuple[int, int]:
    """Launches per layer, and those of the rest of the step."""
    by_name = Counter(name for name, _ in found)
    per_layer = sum(count // layers for count in by_name.values())
    return per_layer, len(found) - per_layer * layers


def share(found: list[tuple[str, int]], name: str, rows: int, context: int) -> float:
    """Predicted share of the roof: time to read weights and KV once, over the step's time."""
    about = sizes(name)
    kv_bytes, layers = rows * context * about.kv_bytes_per_token, SHAPES[name]["num_hidden_layers"]
    extra = {"_decode": kv_bytes / layers}
    step_s = sum(max((moved + extra.get(kernel, 0)) / BYTES_PER_S, NODE_S) for kernel, moved in found)
    return about.decode_bytes(rows * context) / BYTES_PER_S / step_s


def main() -> int:
    parser = argparse.ArgumentParser(description="Count the launches of decode steps")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=1040)
    options = parser.parse_args()
    for name in ("Qwen3-0.6B", "Qwen3-8B"):
        found = launches_of(name, options.rows)
        per_layer, rest = counts(found, SHAPES[name]["num_hidden_layers"])
        moved = sum(moved for _, moved in found)
        predicted = share(found, name, options.rows, options.context)
        print(f"{name}: {per_layer} launches per layer and {rest} more, {moved / 1e9:.2f} GB beside KV, ", end="")
        print(f"{options.rows} x {options.context}: {predicted:.0%} of the roof predicted")
        rest_of = Counter(kernel for kernel, _ in found)
        print("  " + ", ".join(f"{kernel} {count}" for kernel, count in rest_of.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
