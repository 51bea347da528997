"""Experts joined into three launches compute the same as separate experts, and can be captured in a graph."""

from pathlib import Path

import torch
from transformers import AutoConfig

from homing.replica.attention.paged import KvPool, PagedAttention
from homing.replica.execute.gpu_runner import DecodeStep
from homing.replica.execute.request_table import RequestTable
from homing.replica.kernels.base import TorchKernels
from homing.replica.models.layers import Linear
from homing.replica.models.native import GatedMlp, JoinedExperts, NativeModel, SeparateExperts

from ..execute.test_decode_step import Launches, Likeliest

ROOT = Path(__file__).resolve().parents[3]
META = torch.device("meta")


def test_joined_experts_are_those_that_run_one_by_one():
    """Tokens choose several experts, and one expert is never chosen."""
    generator = torch.Generator().manual_seed(2)
    gate_up, down = torch.randn(6, 32, 24, generator=generator), torch.randn(6, 24, 16, generator=generator)
    x = torch.randn(11, 24, generator=generator)
    scores = torch.randn(11, 6, generator=generator)
    scores[:, 4] = -9.0
    weights, chosen = scores.softmax(-1).topk(2)
    separate = SeparateExperts([GatedMlp(Linear(a), Linear(b)) for a, b in zip(gate_up, down, strict=True)])

    joined = JoinedExperts(gate_up, down)(x, weights, chosen, TorchKernels())

    torch.testing.assert_close(joined, separate(x, weights, chosen, TorchKernels()), rtol=1e-4, atol=1e-4)


def launches_of(experts: int, per_token: int) -> list[str]:
    """The launches of a decode step on meta tensors."""
    from models import SHAPES, RandomWeights

    sizes = SHAPES["tiny-experts"] | {"num_experts": experts, "num_experts_per_tok": per_token}
    config = AutoConfig.for_model(**sizes)
    model = NativeModel(config, RandomWeights(config, torch.bfloat16, META), (), torch.bfloat16, META)
    attention = PagedAttention(KvPool(model.spec, 20, 8, torch.bfloat16, META), Likeliest())
    step = DecodeStep(model, attention, Likeliest(), RequestTable(4, 4, META), max_rows=4, block_size=8, group=None)
    with torch.inference_mode(), Launches() as launches:
        step.compute(4)
    assert model.capture_problem is None
    return launches.seen


def test_a_step_of_experts_reads_nothing_back_and_launches_as_much_for_any_number(monkeypatch):
    """30,000 launches a step, and a wait in each layer, accounted for 200 ms per token (by calculation)."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "gpu"))

    assert len(launches_of(8, 2)) == len(launches_of(128, 8))


def test_a_tied_head_is_the_embedding_itself(monkeypatch):
    """A second copy took 0.8 GB of GPU memory at 4B parameters."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "gpu"))
    from models import SHAPES, RandomWeights

    config = AutoConfig.for_model("qwen3", **SHAPES["tiny"] | {"tie_word_embeddings": True})
    cpu = torch.device("cpu")
    heads: list[torch.Tensor] = []
    monkeypatch.setattr(
        "homing.replica.models.native.Linear", lambda weight, bias=None: heads.append(weight) or Linear(weight, bias)
    )

    model = NativeModel(config, RandomWeights(config, torch.float32, cpu), (), torch.float32, cpu)

    assert heads[-1].data_ptr() == model._embedding.data_ptr()
