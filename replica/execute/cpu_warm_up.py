"""Compiles and compares the kernels that a model needs on this processor, and caches the results for its ranks.

    python -m homing.replica.execute.cpu_warm_up FOLDER DTYPE BLOCK_SIZE DONE

`homing serve` runs it while Ray starts. It reads only config.json: if a model run by transformers needs kernels of
other sizes, its ranks compile them. Finally, it creates the file DONE. Spare processes call `load_kernels`.
"""

import sys
from contextlib import suppress
from pathlib import Path

import torch

from ..kernels.base import PagedRows
from ..kernels.choice import compiled_problem
from ..kernels.cpu.attention.choice import prompt_choice
from ..kernels.cpu.cpu_kernels import CompiledKernels
from ..load.preflight import ModelConfig, multiplies_bfloat16, read_config
from ..models.base import AttentionRule, Rotary
from ..models.layers import Linear
from ..models.spec import auto_dtype

#: Tokens in each warm-up step.
TOKENS = 2


def main(folder: str, dtype: str, block_size: str, done: str) -> None:
    load_kernels(Path(folder), dtype, int(block_size))
    Path(done).touch()


def load_kernels(folder: Path, dtype: str, block_size: int) -> None:
    """Load the kernels of the model in `folder` into this process, compiled now unless they are cached.

    `dtype`: the setting, also "auto".
    """
    config = read_config(folder)
    stored = config.dtype or config.torch_dtype
    name = auto_dtype(stored, cuda=False, multiplies_bfloat16=multiplies_bfloat16()) if dtype == "auto" else dtype
    if compiled_problem(getattr(torch, name)) is None:
        with suppress(Exception):  # a config with other names would fail at every start
            launch_all(config, getattr(torch, name), block_size)


def launch_all(config: ModelConfig, dtype: torch.dtype, block_size: int) -> None:
    """Launch each kernel once, the slowest to compile first: ranks start with the others."""
    heads = config.num_attention_heads or 1
    kv_heads, dim = config.num_key_value_heads or heads, config.head_dim or (config.hidden_size or 0) // heads
    kernels, places = CompiledKernels(), torch.arange(TOKENS)
    q, lengths = torch.zeros(TOKENS, heads, dim, dtype=dtype), torch.ones(TOKENS, dtype=torch.int32)
    keys, values = torch.zeros(2, TOKENS, block_size, kv_heads, dim, dtype=dtype)
    rows, rule = PagedRows(keys, values, torch.zeros(TOKENS, 1, dtype=torch.int32), lengths), AttentionRule(1.0)
    kernels.decode(q, rows, None, rule, torch.empty_like(q))
    kernels.prefill(q, rows, torch.arange(TOKENS + 1, dtype=torch.int32), rule, torch.empty_like(q))
    prompt_choice(dtype, heads, kv_heads, dim)
    x = torch.zeros(TOKENS, 2 * dim, dtype=dtype)
    Linear(torch.zeros(32, 2 * dim, dtype=dtype))(x)
    cos, sin = kernels.rotary_table(places, torch.zeros(dim // 2), dtype)
    norm = x[0, :dim] if config.model_type.startswith("qwen3") else None
    qkv = torch.zeros(TOKENS, (heads + 2 * kv_heads) * dim, dtype=dtype)
    kernels.rotate_and_store(qkv, Rotary(cos, sin, norm, norm, 1e-6), places, keys, values)
    for delta in (None, x):
        kernels.add_rms_norm(x, delta, x[0], 1e-6)
    kernels.silu_mul(x)
    kernels.take(x, places)
    kernels.mask(torch.zeros(TOKENS, 32), places, torch.zeros(TOKENS, 1, dtype=torch.int32))


if __name__ == "__main__":
    main(*sys.argv[1:])
