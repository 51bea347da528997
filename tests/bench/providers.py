"""Compare both model providers and both weight types in one replica process, on bench-engine's model.

    python tests/bench/providers.py FOLDER [--threads N] [--families gemma3_text,phi3]

FOLDER is where `engine_model.py` wrote the model, or will. Figures are milliseconds of a decode step after 256 tokens
and of a prompt of 512 tokens; medians. The variants alternate, so that a busy machine slows all of them alike.
`--families`: models of these families of the same shape, with random weights in bfloat16, through transformers' code
instead; their figures are medians of the ratio to the native decoder's time in the same round.
"""

import argparse
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from engine_model import SHAPE, VOCABULARY, make_model
from transformers import AutoConfig, AutoModelForCausalLM

from homing.replica.config import ReplicaSettings
from homing.replica.engine.step_plan import PlanRow, StepPlan, plan_of_rows
from homing.replica.execute.runner import ModelRunner

BLOCK_SIZE = 16
CONTEXT, PROMPT = 256, 512
ROUNDS, PROMPT_ROUNDS = 25, 7


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


#: Experts of which each token uses one: with those that all tokens share, a step reads as much as the native model's.
EXPERTS = {"num_experts_per_tok": 1, "num_experts": 4, "num_local_experts": 4}
SHARED = {"n_shared_experts": 1, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
#: What a family needs besides the model's shape: without these its own model would not be of this size.
FAMILY_SHAPES: dict[str, dict[str, Any]] = {
    "gpt_oss": EXPERTS | {"sliding_window": 128},
    **dict.fromkeys(("granitemoe", "minimax_m2", "olmoe", "phimoe"), EXPERTS),
    **dict.fromkeys(("dots1", "glm4_moe"), EXPERTS | SHARED | {"moe_intermediate_size": 1024}),
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 1,
        "moe_num_shared_experts": 1,
        "moe_intermediate_size": 1024,
        "moe_layer_start_index": 0,
    },
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS | {"moe_intermediate_size": 2048, "norm_topk_prob": True},
}


def random_family(family: str, folder: Path) -> Path:
    """Write a model of a family with bench-engine's shape."""
    torch.manual_seed(0)
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = AutoConfig.for_model(
        family, vocab_size=VOCABULARY, tie_word_embeddings=False, **SHAPE | ids | FAMILY_SHAPES.get(family, {})
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def runner_of(folder: Path, provider: str, dtype: str) -> ModelRunner:
    runner = ModelRunner(ReplicaSettings(model_provider=provider, dtype=dtype, device="cpu"), folder, BLOCK_SIZE)
    runner.allocate_kv(200)
    return runner


def alternate(runners: dict[str, ModelRunner]) -> dict[str, dict[str, list[float]]]:
    """Milliseconds by step and runner, without the first rounds, which record the steps."""
    spent: dict[str, dict[str, list[float]]] = {}
    for step, plan in STEPS.items():
        times = spent[step] = {name: [] for name in runners}
        for _ in range(ROUNDS if step != "prompt" else PROMPT_ROUNDS):
            for name, runner in runners.items():
                started = time.perf_counter()
                runner.forward(plan)
                times[name].append((time.perf_counter() - started) * 1e3)
        spent[step] = {name: each[2:] for name, each in times.items()}
    return spent


def print_table(head: str, rows: dict[str, list[float]], unit: str, digits: int) -> None:
    print(f"| {head} | " + " | ".join(step + unit for step in STEPS) + " |\n|---|" + "---|" * len(STEPS))
    for name, figures in rows.items():
        print(f"| {name} | " + " | ".join(f"{figure:.{digits}f}" for figure in figures) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--families", type=lambda text: text.split(","), default=[])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = make_model(options.folder)
    if options.families:
        compare_families(folder, options.families)
        return
    pairs = [(provider, dtype) for provider in ("native", "transformers") for dtype in ("bfloat16", "float32")]
    spent = alternate({f"{provider} {dtype}": runner_of(folder, provider, dtype) for provider, dtype in pairs})
    rows = {name: [median(spent[step][name]) for step in STEPS] for name in spent["1 row"]}
    print_table("provider, dtype", rows, ", ms", 1)


def compare_families(folder: Path, families: list[str]) -> None:
    native = runner_of(folder, "native", "bfloat16")
    rows = {}
    for family in families:
        with TemporaryDirectory() as made:
            other = runner_of(random_family(family, Path(made)), "transformers", "bfloat16")
        spent = alternate({"native": native, family: other})
        rows[family] = [
            median(theirs / ours for ours, theirs in zip(times["native"], times[family], strict=True))
            for times in spent.values()
        ]
    print_table("family", rows, ", ratio", 2)


if __name__ == "__main__":
    main()
