"""Find kernels that are compiled only while a replica serves: they would stop all of its requests. Needs no GPU.

    python tests/gpu/late_kernels.py

A launch only records its variant (compile.py), so answers are meaningless, but every step launches what it would on a
GPU. Each toy model is loaded as for a start, and then answers requests of all kinds. Prints the variants launched for
the first time after the start, and the kernels of the package that no model launched; exits with 1 if there are any.
"""

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parent))

import compile as compiler
import numpy as np
import stages
import torch
from models import RandomWeights
from msgspec import structs
from stand_in import ROOT, as_on_a_gpu, toys
from transformers import AutoConfig

from homing.replica.config import ReplicaSettings
from homing.replica.engine.engine import Engine
from homing.replica.engine.overlapped import DrawTerms, OverlappedEngine
from homing.replica.execute.cuda_graphs import EagerSteps, NotCaptured
from homing.replica.execute.gpu_runner import GpuRunner
from homing.replica.models.fp8 import ScaledWeight
from homing.replica.models.native import NativeModel
from homing.replica.structured.guide import TokenMasks

CPU = torch.device("cpu")
BLOCK, TOKENS = 16, 1024
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}
#: Labels; model type and configuration; settings; whether weights have 8 bits, and graphs can be captured.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], bool, bool]] = {
    "qwen3": ("qwen3", {"head_dim": 32}, {}, False, True),
    "windows, 8-bit KV": ("mistral", {"head_dim": 32, "sliding_window": 12}, {"kv_cache_dtype": "fp8"}, False, True),
    "8-bit weights": ("llama", {"hidden_size": 128, "intermediate_size": 128}, {}, True, True),
    "experts": ("qwen3_moe", EXPERTS, {}, False, True),
    "no graphs": ("qwen3", {"head_dim": 32}, {}, False, False),
}


class Launched(EagerSteps):
    """Graphs of which only the capture launches anything."""

    pads_mixed = True

    def capture(self, key: Any, run: Any) -> None:
        run()
        self._replays[key] = lambda: None


class Refusing(EagerSteps):
    """A device that cannot capture steps."""

    pads_mixed = True

    def capture(self, key: Any, run: Any) -> None:
        raise NotCaptured("a stand-in")


class EightBits(RandomWeights):
    def scaled(self, name: str, dim: int, index: int, parts: int) -> ScaledWeight | None:
        if "proj" not in name:
            return None
        weight = self.whole(name)
        return ScaledWeight(weight.to(torch.float8_e4m3fn), torch.ones(len(weight), 1))


def product(a: torch.Tensor, b: torch.Tensor, *_: Any, output_dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(len(a), b.shape[1], dtype=output_dtype)


def runner_of(case: str) -> GpuRunner:
    """A runner as at a replica's start."""
    kind, extra, settings, packed, captures = CASES[case]
    config = AutoConfig.for_model(kind, **(toys().BASE | {"max_position_embeddings": 4096} | extra))
    weights = (EightBits if packed else RandomWeights)(config, torch.bfloat16, CPU)
    chosen = ReplicaSettings(
        dtype="bfloat16", device="cpu", max_running_requests=8, max_batched_tokens=TOKENS, **settings
    )
    with torch.inference_mode():
        scaled = product if packed else None
        model = NativeModel(config, weights, (), torch.bfloat16, CPU, product=scaled)  # type: ignore[arg-type]
    runner = GpuRunner(chosen, Path("none"), BLOCK, model=model, graphs=Launched() if captures else Refusing())
    runner.allocate_kv(300)
    return runner


def serve(runner: GpuRunner) -> None:
    """Steps of all kinds: long and short prompts, shared and copied prefixes, every way to draw, logprobs, masks."""
    random = Random(5)
    sampling = [*stages.SAMPLING, {"logprobs": 2, "prompt_logprobs": 1}, {"logit_bias": {7: 2.0}}, {"min_p": 0.1}]
    shared = [random.randrange(3, 200) for _ in range(40)]
    for kind in (OverlappedEngine, Engine):
        engine, hasher = stages._engine(kind, runner, 299, TOKENS, 8, cached=True, longest=4000)
        requests = [
            stages._request(
                number,
                shared[: random.randrange(40)] + [random.randrange(3, 200) for _ in range(length)],
                hasher,
                5,
                temperature=0.7,
                seed=number,
                **sampling[number % len(sampling)],
            )
            for number, length in enumerate((9, 1, 700, 30, 1, 17, 33, 2000, 5, 64, 3, 12, 1, 90))
        ]
        for request in requests:
            engine.add("check", request)
            engine.step()
        while engine.has_work:
            engine.step()
    for plan in stages._decode_plans(3, 40, BLOCK, 2, top_k=20, top_p=0.9):
        runner.launch(structs.replace(plan, held=True))
        runner.draw(DrawTerms(masks=TokenMasks(np.arange(3), np.zeros((3, 7), dtype=np.int32))))


def late(case: str) -> tuple[set[str], list[str]]:
    """All kernels that a model launches, and those of which it launches another variant after its start."""
    compiler._launches.clear()
    runner = runner_of(case)
    ready = {(name, key) for name, key, *_ in compiler._launches}
    serve(runner)
    launched = {(name, key) for name, key, *_ in compiler._launches}
    return {name for name, _ in launched}, sorted(name for name, _ in launched - ready)


def launchable() -> Iterator[str]:
    """The kernels that the package launches, from its source: every `kernel[grid](...)`."""
    for path in (ROOT / "replica" / "kernels" / "triton").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                assert isinstance(node.func.value, ast.Name), ast.dump(node)
                yield node.func.value.id


def main() -> int:
    compiler.set_up(90, compiler._record)
    as_on_a_gpu((32, 64))
    everything, problems = set[str](), 0
    for case in CASES:
        launched, missed = late(case)
        everything |= launched
        problems += len(missed)
        print(f"{case:20} {len(launched)} kernels; compiled while serving: {', '.join(missed) or 'none'}")
    unseen = sorted(set(launchable()) - everything)
    print(f"never launched: {', '.join(unseen) or 'none'}")
    return 1 if problems or unseen else 0


if __name__ == "__main__":
    sys.exit(main())
