"""Makes a CPU take the code of a GPU: Triton's kernels, plain products, joined experts, graphs of mixed steps.

For scripts that run in their own process: nothing is undone. Kernels are interpreted if TRITON_INTERPRET is set before
Triton is imported; otherwise a script replaces their launches.
"""

import math
import sys
from pathlib import Path
from typing import Any

import torch

from homing.replica.attention import choice as attention_choice
from homing.replica.attention.paged import PagedAttention
from homing.replica.execute import mixed_step, runner
from homing.replica.kernels.triton.triton_kernels import TritonKernels
from homing.replica.models import hf, layers, loading, native

ROOT = Path(__file__).resolve().parents[2]


def as_on_a_gpu(mixed_sizes: tuple[int, ...], scaled_product: Any = None) -> None:
    """`mixed_sizes`: replaces the numbers of tokens to capture; `scaled_product`: multiplies FP8 weights."""
    torch.set_num_threads(1)
    for module in (attention_choice, runner, hf, native):
        module.choose_kernels = lambda *_: TritonKernels()  # type: ignore[attr-defined]
    attention_choice._made = lambda _, pool, *__: (PagedAttention(pool, TritonKernels()), "")
    layers._products = lambda weight, bias: (math.inf, *(layers._plain(weight, bias),) * 2)
    runner.captured_steps_for = lambda *_: None
    mixed_step.SIZES = mixed_sizes  # type: ignore[assignment]
    loading.scaled_product = lambda *_: scaled_product
    read_layer = native._LayerReader.__init__

    def joining(self: Any, *arguments: Any) -> None:
        read_layer(self, *arguments)
        self._joins_experts = True

    native._LayerReader.__init__ = joining  # type: ignore[method-assign]


def toys() -> Any:
    """The module of random checkpoints (tests/replica/toys.py)."""
    sys.path.insert(0, str(ROOT / "tests" / "replica"))
    import toys

    return toys
