"""Quantized checkpoints are recognised by their configuration or their tensors alone."""

from typing import Any

import pytest

from homing.replica.load.quantized import Scaling, block_sizes, declared, method_problem, scalings
from homing.replica.load.weight_files import TensorHeader, listed

FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 64]}


def compressed(kind: str = "float", bits: int = 8, strategy: str = "channel", **other: Any) -> dict[str, Any]:
    weights = {"type": kind, "num_bits": bits, "strategy": strategy, "symmetric": True}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights | other}}}


@pytest.mark.parametrize(
    "quantization",
    [
        {},
        {"quant_method": "mxfp4"},
        FP8_BLOCKS,
        {"quant_method": "fbgemm_fp8"},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        compressed(),
        compressed(strategy="tensor"),
        compressed(strategy="block", block_structure=[128, 128]),
    ],
    ids=str,
)
def test_what_can_be_dequantized_is_not_refused(quantization: dict[str, Any]) -> None:
    """Includes models that accept images, whose configuration nests that of their text model."""
    assert method_problem({"quantization_config": quantization}) is None
    assert method_problem({"text_config": {"quantization_config": quantization}}) is None


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "awq"}, "(awq)"),
        ({"bits": 4}, "an unnamed method"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "(modelopt, quant_algo NVFP4)"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "format pack-quantized"),
        (compressed("int", 4, "group"), "weights int 4 by group"),
        (compressed("int"), "weights int 8 by channel"),
        (compressed(symmetric=False), "weights float 8"),
        (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity sparse-24-bitmask"),
        (compressed() | {"transform_config": {"config_groups": {}}}, "transforms"),
    ],
    ids=str,
)
def test_other_methods_are_refused_by_name(quantization: dict[str, Any], named: str) -> None:
    """Loading weights with the wrong interpretation would produce nonsense answers."""
    problem = method_problem({"text_config": {"quantization_config": quantization}}) or ""

    assert named in problem
    assert "choose the original model" in problem


def test_blocks_are_taken_from_either_configuration() -> None:
    """The result is a set because different kinds of linears may have different block sizes."""
    both = compressed(strategy="block", block_structure=[128, 128])

    assert block_sizes({"quantization_config": FP8_BLOCKS}) == {(128, 64)}
    assert block_sizes({"quantization_config": both}) == {(128, 128)}
    assert block_sizes({}) == set()
    assert declared({"quantization_config": None, "text_config": None}) == {}


def tensor(dtype: str, *shape: int) -> TensorHeader:
    return TensorHeader((0, 0), dtype, shape)


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((), (300, 200)),
        ((1,), (300, 200)),
        ((300,), (1, 200)),
        ((300, 1), (1, 200)),
        ((3, 4), (128, 64)),
    ],
)
@pytest.mark.parametrize("ending", ["_scale", "_scale_inv"])
def test_scales_cover_a_matrix_a_row_or_a_block(shape: tuple[int, ...], block: tuple[int, int], ending: str) -> None:
    """Sizes need not be divisible by the block; scales may themselves be 8-bit."""
    tensors = {"a.weight": tensor("F8_E4M3", 300, 200), f"a.weight{ending}": tensor("F8_E8M0", *shape)}

    assert scalings(tensors, {(128, 64)}) == ({"a.weight": Scaling(f"a.weight{ending}", block)}, None)


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((), (300, 200)),
        ((4,), (300, 200)),
        ((4, 1, 1), (300, 200)),
        ((4, 300, 1), (1, 200)),
        ((4, 1, 200), (300, 1)),
        ((4, 3, 2), (128, 128)),
    ],
    ids=str,
)
def test_experts_in_one_tensor_have_scales_of_their_own(shape: tuple[int, ...], block: tuple[int, int]) -> None:
    """As stored by transformers: one matrix per expert, possibly transposed."""
    tensors = {
        "experts.gate_up_proj": tensor("F8_E4M3", 4, 300, 200),
        "experts.gate_up_proj_scale": tensor("F32", *shape),
    }

    found, problem = scalings(tensors, [(128, 128)])

    assert problem is None
    assert found["experts.gate_up_proj"].block == block


@pytest.mark.parametrize(
    "tensors",
    [
        {"a.weight": tensor("F8_E4M3", 300, 200)},
        {"a.weight": tensor("F8_E4M3", 300, 200), "a.weight_scale": tensor("F32", 3, 3)},
        {"a.weight": tensor("F8_E4M3", 4, 300, 200), "a.weight_scale": tensor("F32", 4, 3, 3)},
        {"a.weight": tensor("F8_E4M3", 2, 4, 300, 200), "a.weight_scale": tensor("F32", 2)},
        {"a.weight": tensor("I8", 300, 200), "a.weight_scale": tensor("F32", 300)},
        {"a.weight": tensor("U8", 300, 100), "a.weight_scale": tensor("F8_E4M3", 300, 12)},
        {"a.weight": tensor("F4", 300, 100)},
        {"a.qweight": tensor("I32", 300, 25)},
        {"a.weight_packed": tensor("I32", 300, 25)},
    ],
    ids=str,
)
def test_weights_that_are_packed_otherwise_are_listed(tensors: dict[str, TensorHeader]) -> None:
    """The configuration often says nothing about them."""
    found, problem = scalings(tensors, {(128, 64)})

    assert found == {}
    assert f"homing cannot run: {next(iter(tensors))} [" in (problem or "")


def test_masks_and_positions_are_no_weights() -> None:
    """GPT-2 stores its causal masks as tensors."""
    plain = {"h.0.attn.bias": tensor("U8", 1, 1, 8, 8), "positions": tensor("I64", 8), "a.weight": tensor("BF16", 2, 2)}

    assert scalings(plain, set()) == ({}, None)


def test_lists_name_each_kind_once() -> None:
    """A model has tensors of hundreds of layers; a terminal has fifty lines."""
    names = [f"layers.{n}.norm.weight" for n in range(28)] + ["head.weight"]
    many = [f"{letter}.weight" for letter in "abcdefghijklmnop"]

    assert listed(names) == "head.weight, layers.*.norm.weight (28)"
    assert listed(many).endswith("l.weight, and 4 other kinds")
