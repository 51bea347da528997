"""Parts of transformers' models that run in our kernels."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from homing.replica.kernels.base import TorchKernels
from homing.replica.kernels.choice import compiled_problem
from homing.replica.models.hf import EXPERT_WEIGHTS, KernelExperts, KernelNorm, kernel_experts, use_our_kernels


@pytest.mark.parametrize("family", ["gemma3_text", "olmo2", "qwen3"])
def test_norms_run_in_our_kernel_wherever_linears_are_not_packed(family, checkpoint):
    """On a GPU a norm is then one launch instead of six; the products are cuBLAS's either way."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint(family), dtype=torch.float32).eval()
    ids = torch.arange(3, 20)[None]
    linears = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]

    with torch.inference_mode():
        wanted = model(ids).logits
        use_our_kernels(model, TorchKernels(), packs=False)
        found = model(ids).logits

    names = {name: type(module) for name, module in model.named_modules()}
    assert [name for name, kind in names.items() if kind is torch.nn.Linear] == linears
    assert {kind for name, kind in names.items() if name.endswith("norm")} == {KernelNorm}
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def experts_of(family):
    """A family's experts in bfloat16 with random weights and biases."""
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_local_experts": 4, "num_experts": 4}
    config = AutoConfig.for_model(family, **sizes, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    experts = next(each for each in model.modules() if hasattr(each, "gate_up_proj"))
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return experts


@pytest.mark.skipif(compiled_problem() is not None, reason="no compiled kernels here")
@pytest.mark.parametrize("family", ["gpt_oss", "olmoe"])
def test_experts_equal_those_of_transformers(family):
    """Theirs are transposed, interleaved and biased in gpt_oss, and none of that in most other families."""
    experts = experts_of(family)
    x, scores = torch.randn(20, 64).bfloat16(), torch.randn(20, 4)
    weights, chosen = scores.softmax(-1).topk(2)
    with torch.inference_mode():
        wanted = experts(x, chosen, weights.bfloat16()).float()

        ours = kernel_experts(experts)
        found = ours(x, chosen, weights.bfloat16()).float()

    assert isinstance(ours, KernelExperts)
    assert (found - wanted).norm() < 0.01 * wanted.norm()
    assert all(getattr(experts, name).is_meta for name in EXPERT_WEIGHTS)


def test_experts_that_compute_something_else_are_left_alone():
    """Such as a norm after each expert: the answers would be wrong."""
    experts = experts_of("olmoe")
    experts.forward = lambda x, chosen, weights: 1.1 * type(experts).forward(experts, x, chosen, weights)

    with torch.inference_mode():
        assert kernel_experts(experts) is None
    assert not any(weight.is_meta for weight in experts.parameters())
