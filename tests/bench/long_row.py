"""Compare decode attention of one long row with reading its KV once, on a CPU.

    python tests/bench/long_row.py [--threads N] [--tokens 16384] [--dtype bfloat16]

Pages are in random order in large pages of memory, as in a pool that has been in use. Reading is torch's sum over the
same bytes. Figures are milliseconds per step of 12 layers; medians of alternating rounds.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from homing.replica.kernels.base import PagedRows
from homing.replica.kernels.cpu.attention.decode import decode
from homing.replica.kernels.cpu.linear.product import in_large_pages
from homing.replica.models.base import AttentionRule

HEADS = ((8, 8), (8, 2), (32, 8), (8, 1))
LAYERS, PAGE, DIM, ROUNDS = 12, 16, 128, 9


def milliseconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


@torch.inference_mode()
def measure(heads: int, kv_heads: int, tokens: int, dtype: torch.dtype) -> tuple[float, float]:
    """Milliseconds of attention and of reading."""
    pages = tokens // PAGE
    table, lengths = torch.randperm(pages)[None].int(), torch.tensor([tokens], dtype=torch.int32)
    made = (torch.randn(2, pages, PAGE, kv_heads, DIM).to(dtype) for _ in range(LAYERS))
    layers = [PagedRows(*map(in_large_pages, each), table, lengths) for each in made]
    q, rule = torch.randn(1, heads, DIM).to(dtype), AttentionRule(DIM**-0.5)
    out = torch.empty_like(q)
    calls = (
        lambda: [decode(q, rows, rule, out) for rows in layers],
        lambda: [each.view(torch.int64).sum() for rows in layers for each in (rows.keys, rows.values)],
    )
    times = [[milliseconds(call) for call in calls] for _ in range(ROUNDS)][2:]
    attention, reading = (median(each) for each in zip(*times, strict=True))
    return attention, reading


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| heads, KV heads | attention, ms | reading, ms | ratio |\n|---|---|---|---|")
    for heads, kv_heads in HEADS:
        attention, reading = measure(heads, kv_heads, options.tokens, getattr(torch, options.dtype))
        print(f"| {heads}, {kv_heads} | {attention:.1f} | {reading:.1f} | {attention / reading:.2f} |", flush=True)


if __name__ == "__main__":
    main()
