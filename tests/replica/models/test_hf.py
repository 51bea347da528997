"""Parts of transformers' models that run in our kernels."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from homing.replica.kernels.base import TorchKernels
from homing.replica.models.hf import KernelNorm, use_our_kernels


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
