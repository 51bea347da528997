"""All Triton kernels in one class."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import ClassVar

import torch

from ...models.spec import ModelSpec
from ..base import TorchKernels
from .decode import decode, plan_decode
from .experts import expert_products
from .pointwise import add_rms_norm, decode_rows, embed, rotate_and_store, round_rows, silu_mul, write_slots
from .prefill import prefill
from .sampling import mask, sample
from .warm_up import launches

log = logging.getLogger(__name__)


class TritonKernels(TorchKernels):
    """Triton kernels, for CUDA and Triton's interpreter."""

    name: ClassVar[str] = "triton"
    compiles: ClassVar[bool] = True

    plan_decode = staticmethod(plan_decode)
    decode = staticmethod(decode)
    prefill = staticmethod(prefill)
    decode_rows = staticmethod(decode_rows)
    embed = staticmethod(embed)
    add_rms_norm = staticmethod(add_rms_norm)
    rotate_and_store = staticmethod(rotate_and_store)
    round_rows = staticmethod(round_rows)
    silu_mul = staticmethod(silu_mul)
    write_slots = staticmethod(write_slots)
    expert_products = staticmethod(expert_products)
    mask = staticmethod(mask)
    sample = staticmethod(sample)

    def warm_up(self, spec: ModelSpec, block_size: int, device: torch.device) -> None:
        """Launch each kernel once, in parallel threads: compilation mostly runs without the interpreter lock."""
        started = time.perf_counter()
        calls = launches(spec, block_size, device)
        with ThreadPoolExecutor(len(calls)) as pool:
            for number, job in enumerate(as_completed([pool.submit(call) for call in calls]), start=1):
                job.result()
                log.info("kernels_compiled done=%d of=%d s=%.1f", number, len(calls), time.perf_counter() - started)
