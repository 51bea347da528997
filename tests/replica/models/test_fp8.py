"""Weights that stay in 8 bits: products by a stand-in for CUDA's `scaled_mm`, and every reason to dequantize."""

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import ScalingType, scaled_mm

from homing.replica.config import ReplicaSettings
from homing.replica.engine.step_plan import PlanRow, plan_of_rows
from homing.replica.execute.runner import ModelRunner
from homing.replica.kernels.base import TorchKernels
from homing.replica.load.quantized import BLOCK
from homing.replica.models.checkpoint import Checkpoint
from homing.replica.models.fp8 import FP8_DTYPE, ScaledLinears, ScaledWeight, joined
from homing.replica.models.loading import read_config, scaled_product
from homing.replica.models.native import NativeModel
from homing.replica.parallel.rank_group import RankGroup

from ..toys import BLOCK_SIZE, NUM_BLOCKS, make_runner
from .test_checkpoint import change_config

CPU = torch.device("cpu")
ROWS = (ScalingType.RowWise, ScalingType.RowWise)
BLOCKS = (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
#: Two blocks of inputs, and heads that do not end at block boundaries.
WIDE = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 384,
}


class Device:
    """`torch.nn.functional.scaled_mm` in float64, with the checks of its CUDA implementation for these two recipes."""

    def __init__(self) -> None:
        self.calls: list[tuple[ScalingType, ScalingType]] = []

    def __call__(self, a, b, scale_a, recipe_a, scale_b, recipe_b, *, output_dtype):
        (rows, inputs), outputs = a.shape, b.shape[1]
        assert a.dtype == b.dtype == FP8_DTYPE
        assert scale_a.dtype == scale_b.dtype == torch.float32
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        assert len(b) == inputs
        if inputs % 16 or outputs % 16:
            raise RuntimeError(f"mat2 shape ({inputs}x{outputs}) must be divisible by 16")
        if (recipe_a, recipe_b) == ROWS:
            assert scale_a.shape == (rows, 1)
            assert scale_b.shape == (1, outputs)
            assert scale_b.is_contiguous()
            factors_a, factors_b = scale_a, scale_b
        else:
            assert (recipe_a, recipe_b) == BLOCKS
            blocks = -(-inputs // BLOCK)
            assert scale_a.shape == (rows, blocks)
            assert scale_a.stride(0) == 1
            assert scale_a.stride(1) == rows
            assert rows % 4 == 0
            assert scale_b.shape == (-(-blocks // 4) * 4, -(-outputs // BLOCK))
            assert scale_b.t().is_contiguous()
            factors_a = scale_a.repeat_interleave(BLOCK, 1)[:, :inputs]
            factors_b = scale_b.repeat_interleave(BLOCK, 0)[:inputs].repeat_interleave(BLOCK, 1)[:, :outputs]
        self.calls.append((recipe_a, recipe_b))
        return ((a.double() * factors_a) @ (b.double() * factors_b)).to(output_dtype)


def weight_of(outputs: int, inputs: int, by_row: bool = True, seed: int = 1) -> ScaledWeight:
    generator = torch.Generator().manual_seed(seed)
    shape = (outputs, 1) if by_row else (-(-outputs // BLOCK), -(-inputs // BLOCK))
    numbers = torch.randn(outputs, inputs, generator=generator) * 50
    return ScaledWeight(numbers.to(FP8_DTYPE), torch.rand(shape, generator=generator) * 0.02 + 0.001)


def exact(weight: ScaledWeight) -> torch.Tensor:
    factors = weight.scales.double()
    if len(factors) != len(weight.numbers):
        factors = factors.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    rows, columns = weight.numbers.shape
    return weight.numbers.double() * factors[:rows, :columns]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("outputs", "inputs", "by_row"), [(48, 32, True), (256, 640, False), (320, 144, False)])
def test_products_are_those_of_float64_but_for_rounding_activations(outputs, inputs, by_row, dtype):
    """Scales per row and per block, with padded columns and weights that do not fill their blocks."""
    weight, device = weight_of(outputs, inputs, by_row), Device()
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(2)).to(dtype)
    linear = ScaledLinears(TorchKernels(), dtype, device).linear([weight], bias)
    assert linear is not None

    for rows in (1, 2, 7):
        x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)
        wanted = x.double() @ exact(weight).T + bias.double()
        found = linear(x)
        assert found.shape == wanted.shape
        assert found.dtype == dtype
        assert float((found.double() - wanted).norm() / wanted.norm()) < 0.04
    assert set(device.calls) == {ROWS if by_row else BLOCKS}


def test_torch_s_own_function_is_called_as_it_wants_to_be():
    """On a CPU it supports row scales and refuses block scales."""
    linears = ScaledLinears(TorchKernels(), torch.bfloat16, scaled_mm)
    weight, x = weight_of(48, 32), torch.randn(5, 32, generator=torch.Generator().manual_seed(3)).bfloat16()

    linear = linears.linear([weight], None)

    assert linear is not None
    wanted = x.double() @ exact(weight).T
    assert float((linear(x).double() - wanted).norm() / wanted.norm()) < 0.04
    assert linears.linear([weight_of(256, 256, by_row=False)], None) is None


@pytest.mark.parametrize(
    ("device", "dtype", "product"),
    [("cuda", torch.bfloat16, scaled_mm), ("cuda", torch.float32, None), ("cpu", torch.bfloat16, None)],
    ids=["used", "too inexact", "cpu"],
)
def test_weights_are_dequantized_on_a_cpu_and_for_float32(device, dtype, product):
    """On a CPU, 8-bit products would be slower; for float32, less exact than requested."""
    assert scaled_product(torch.device(device), dtype) is product


def test_a_shape_is_tried_once():
    """A model has dozens of layers but only four shapes."""
    device = Device()
    linears = ScaledLinears(TorchKernels(), torch.float32, device)

    for seed in (1, 2, 3):
        assert linears.linear([weight_of(48, 32, seed=seed)], None) is not None

    assert len(device.calls) == 3  # one trial for each of three row counts


def refuses(*_arguments, **_options):
    raise NotImplementedError("only supported\n in CUDA for SM90")


def swaps_scales(a, b, scale_a, recipe_a, scale_b, recipe_b, *, output_dtype):
    return Device()(a, b, scale_a, recipe_a, scale_b.flip(1), recipe_b, output_dtype=output_dtype)


@pytest.mark.parametrize(
    ("product", "parts", "said"),
    [
        (refuses, [weight_of(48, 32)], "NotImplementedError: only supported in CUDA for SM90 (48 x 32, scales by row)"),
        (swaps_scales, [weight_of(48, 32)], "results differ"),
        (Device(), [weight_of(40, 32)], "must be divisible by 16"),
        (Device(), [weight_of(256, 256, by_row=False), weight_of(256, 256)], "scales of rows and of blocks"),
        (Device(), [weight_of(64, 256, by_row=False)] * 2, "end within blocks"),
        (Device(), [weight_of(48, 32), None], "only some"),
        (Device(), [weight_of(48, 32), "weights of F8_E5M2"], "F8_E5M2"),
    ],
    ids=["refused", "wrong", "sizes", "mixed scales", "cut blocks", "one unscaled", "other type"],
)
def test_what_cannot_be_multiplied_is_dequantized_and_logged_once(product, parts, said, caplog):
    """Wrong products would give wrong answers, and a missing implementation would stop the replica."""
    linears = ScaledLinears(TorchKernels(), torch.float32, product)

    with caplog.at_level(logging.WARNING):
        assert [linears.linear(parts, None) for _ in range(3)] == [None] * 3

    (record,) = caplog.records
    assert said in record.getMessage()
    assert record.getMessage().endswith("dequantized'")


def test_weights_without_scales_are_no_reason_for_a_warning(caplog):
    """Checkpoints leave some linears unquantized."""
    assert ScaledLinears(TorchKernels(), torch.float32, Device()).linear([None, None], None) is None
    assert not caplog.records


def test_joined_weights_keep_their_scales():
    """q, k and v are computed as one product."""
    parts = [weight_of(128, 256, by_row=False, seed=1), weight_of(64, 256, by_row=False, seed=2)]

    whole = joined(parts)

    assert isinstance(whole, ScaledWeight)
    assert torch.equal(exact(whole), torch.cat([exact(part) for part in parts]))


def packed(folder: Path, made: Path, kind: str) -> Path:
    """A copy of the model with its linears in 8 bits."""
    made.mkdir()
    tensors = load_file(folder / "model.safetensors")
    for name in [each for each in tensors if "proj" in each and each.endswith("weight")]:
        weight = tensors[name]
        shape = {"tensor": (1, 1), "row": (len(weight), 1)}.get(kind) or tuple(
            -(-size // BLOCK) for size in weight.shape
        )
        scales = 0.5 * torch.rand(shape, generator=torch.Generator().manual_seed(len(name))).add_(0.5) / 100
        steps = [
            -(-size // count) if kind != "block" else BLOCK for size, count in zip(weight.shape, shape, strict=True)
        ]
        factors = scales.repeat_interleave(steps[0], 0).repeat_interleave(steps[1], 1)
        factors = factors[: len(weight), : weight.shape[1]]
        tensors[name] = (weight / factors).clamp(-448, 448).to(FP8_DTYPE)
        tensors[name.replace("weight", "weight_scale")] = scales if kind != "tensor" else scales.reshape(())
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    (made / "config.json").write_bytes((folder / "config.json").read_bytes())
    change_config(made, quantization_config={"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]})
    return made


def runner_of(folder: Path, product: Device, group: RankGroup | None = None) -> ModelRunner:
    checkpoint = Checkpoint(folder, torch.float32, CPU)
    model = NativeModel(read_config(folder), checkpoint, (), torch.float32, CPU, group, product=product)
    runner = ModelRunner(ReplicaSettings(dtype="float32", device="cpu"), folder, BLOCK_SIZE, model=model)
    runner.allocate_kv(NUM_BLOCKS)
    return runner


@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
def test_a_model_runs_on_its_8_bits(kind, checkpoint, tmp_path):
    """Covers all linears of all layers; logits match dequantized weights up to the rounding of activations."""
    folder = packed(checkpoint("qwen2", **WIDE), tmp_path / "packed", kind)
    plan, device = plan_of_rows(0, [PlanRow(list(range(3, 40)), 0, list(range(1, 6)))]), Device()
    wanted = make_runner(folder).forward(plan)
    runner = runner_of(folder, device)
    tried = len(device.calls)

    found = runner.forward(plan)

    assert len(device.calls) - tried == 8  # four per layer
    assert set(device.calls) == {BLOCKS if kind == "block" else ROWS}
    assert 0 < float((found - wanted).norm() / wanted.norm()) < 0.1


@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
def test_a_rank_s_share_has_its_own_scales(kind, checkpoint, tmp_path):
    """The second of two ranks has other rows, columns and blocks."""
    folder = packed(checkpoint("llama", **WIDE | {"intermediate_size": 512}), tmp_path / "packed", kind)
    weights = Checkpoint(folder, torch.float32, CPU)

    for name, dim in (("self_attn.q_proj", 0), ("self_attn.o_proj", 1), ("mlp.down_proj", 1)):
        name = f"model.layers.1.{name}.weight"
        share = weights.scaled(name, dim, 1, 2)
        assert isinstance(share, ScaledWeight)
        torch.testing.assert_close(exact(share).float(), weights.shard(name, dim, 1, 2), rtol=1e-6, atol=0)


def test_shares_that_cannot_have_scales_say_why(checkpoint, tmp_path):
    """Blocks cut by ranks, blocks of another size, another 8-bit type, and no scales at all."""
    folder = packed(checkpoint("llama", **WIDE), tmp_path / "packed", "block")
    q, down = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[down] = tensors[down].float().to(torch.float8_e5m2)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    weights = Checkpoint(folder, torch.float32, CPU)
    assert weights.scaled(q, 0, 1, 4) == "ranks cut blocks of 128 by 128"
    assert weights.scaled(down, 0, 0, 1) == "weights of F8_E5M2"
    assert weights.scaled("lm_head.weight", 0, 0, 1) is None
    change_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [256, 128]})
    tensors[f"{q}_scale"] = tensors[f"{q}_scale"][:1].clone()
    save_file(
        {name: each for name, each in tensors.items() if name in (q, f"{q}_scale")},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    assert Checkpoint(folder, torch.float32, CPU).scaled(q, 0, 0, 2) == "blocks of 256 by 128"
