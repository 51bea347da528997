"""Compare both model providers and both weight types in one replica process, on bench-engine's model.

    python tests/bench/providers.py FOLDER [--threads N]

FOLDER is where `engine_model.py` wrote the model, or will. Figures are milliseconds of a decode step after 256 tokens
and of a prompt of 512 tokens; medians. The variants alternate, so that a busy machine slows all of them alike.
"""

import argparse
import time
from pathlib import Path
from statistics import median

import torch
from engine_model import make_model

from homing.replica.config import ReplicaSettings
from homing.replica.engine.step_plan import PlanRow, StepPlan, plan_of_rows
from homing.replica.execute.runner import ModelRunner

BLOCK_SIZE = 16
CONTEXT, PROMPT = 256, 512
ROUNDS = 25


def decode(rows: int) -> StepPlan:
    """A decode step whose rows have separate blocks, all zeros."""
    per_row = CONTEXT // BLOCK_SIZE + 1
    tables = ([1 + row * per_row + block for block in range(per_row)] for row in range(rows))
    return plan_of_rows(0, [PlanRow([7], CONTEXT, table) for table in tables])


STEPS = {
    "1 row": decode(1),
    "8 rows": decode(8),
    "prompt": plan_of_rows(0, [PlanRow(list(range(3, 3 + PROMPT)), 0, list(range(1, 2 + PROMPT // BLOCK_SIZE)))]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = make_model(options.folder)
    runners = {}
    for provider in ("native", "transformers"):
        for dtype in ("bfloat16", "float32"):
            runner = ModelRunner(
                ReplicaSettings(model_provider=provider, dtype=dtype, device="cpu"), folder, BLOCK_SIZE
            )
            runner.allocate_kv(200)
            runners[provider, dtype] = runner
    print("| provider | dtype | " + " | ".join(f"{name}, ms" for name in STEPS) + " |\n|---|---|" + "---|" * len(STEPS))
    spent: dict[tuple[str, str, str], list[float]] = {}
    for name, plan in STEPS.items():
        for _ in range(ROUNDS if name != "prompt" else 7):
            for key, runner in runners.items():
                started = time.perf_counter()
                runner.forward(plan)
                spent.setdefault((*key, name), []).append((time.perf_counter() - started) * 1e3)
    for provider, dtype in runners:
        figures = " | ".join(f"{median(spent[provider, dtype, name][2:]):.1f}" for name in STEPS)
        print(f"| {provider} | {dtype} | {figures} |")


if __name__ == "__main__":
    main()
