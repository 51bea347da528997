"""Weights that cannot fit on a GPU are refused from their headers alone, with the number of ranks that would fit."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from homing.replica.config import ReplicaSettings
from homing.replica.errors import StartupError
from homing.replica.load.gpu_memory import check_gpu_memory, least_weight_bytes

GIB = 1 << 30
#: The shape of Llama-3.1-70B: 141 GB in bfloat16.
CONFIG = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "dtype": "bfloat16",
}
LAYER = {"q_proj": (8192, 8192), "kv_proj": (2048, 8192), "o_proj": (8192, 8192), "mlp": (3 * 28_672, 8192)}
PARAMETERS = 80 * sum(rows * columns for rows, columns in LAYER.values())
EMBEDDING = 128_256 * 8192


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path, "BF16", 2)


def save(folder: Path, dtype: str, size: int, **config: Any) -> Path:
    """A model of which only the headers exist: the file is sparse."""
    shapes = {f"model.layers.{layer}.{name}.weight": shape for layer in range(80) for name, shape in LAYER.items()}
    kinds = dict.fromkeys(shapes, (dtype, size))
    for name in ("model.embed_tokens.weight", "lm_head.weight", "vision_tower.weight"):
        shapes[name], kinds[name] = (128_256, 8192), ("BF16", 2)
    at, header = 0, {}
    for name, (rows, columns) in shapes.items():
        stop = at + rows * columns * kinds[name][1]
        header[name] = {"dtype": kinds[name][0], "shape": (rows, columns), "data_offsets": (at, stop)}
        at = stop
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return folder


def test_weights_that_do_not_fit_name_the_ranks_that_would(folder: Path) -> None:
    """Eight replicas would otherwise load for minutes, and all run out of memory without a hint."""
    eight = [80 * GIB] * 8

    with pytest.raises(StartupError, match=r"weights take at least 131\.4 GiB, .* 72\.0 GiB .* set .*size: 2$"):
        check_gpu_memory(folder, ReplicaSettings(), eight, utilization=0.9)
    with pytest.raises(StartupError, match=r"size: 4$"):
        check_gpu_memory(folder, ReplicaSettings(tensor_parallel_size=2), [48 * GIB] * 8, utilization=0.9)

    check_gpu_memory(folder, ReplicaSettings(tensor_parallel_size=2), eight, utilization=0.9)
    check_gpu_memory(folder, ReplicaSettings(), [40 * GIB, 192 * GIB], utilization=0.9)
    check_gpu_memory(folder, ReplicaSettings(), [])  # nothing is known about the GPUs


def test_without_enough_gpus_no_number_of_ranks_is_named(folder: Path) -> None:
    """The remedy must work on this machine; a part of a GPU counts as a part of its memory."""
    with pytest.raises(StartupError, match="choose a smaller model"):
        check_gpu_memory(folder, ReplicaSettings(), [24 * GIB] * 2)
    with pytest.raises(StartupError, match="choose a smaller model"):
        check_gpu_memory(folder, ReplicaSettings(tensor_parallel_size=2), [80 * GIB] * 2, gpus_per_rank=0.5)
    with pytest.raises(StartupError, match="choose a smaller model"):
        check_gpu_memory(folder, ReplicaSettings(model_provider="transformers"), [80 * GIB] * 8)


def test_numbers_count_in_the_type_in_which_they_are_held(tmp_path: Path) -> None:
    """A model that could run must never be refused; towers for images are not loaded."""
    for stored, size in (("F64", 8), ("F32", 4), ("BF16", 2)):
        folder = save(tmp_path, stored, size)
        assert least_weight_bytes(folder, ReplicaSettings(), 1) == 2 * (PARAMETERS + 2 * EMBEDDING)
        assert least_weight_bytes(folder, ReplicaSettings(dtype="float32"), 1) == 4 * (PARAMETERS + 2 * EMBEDDING)


def test_pickled_weights_count_in_the_type_in_which_they_are_held(tmp_path: Path) -> None:
    """Their headers are unknown, but a file has at most four bytes per number."""
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(4000))
    for stored, dtype, found in (("bfloat16", "auto", 4000), ("float32", "auto", 4000), ("float32", "bfloat16", 2000)):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"dtype": stored}))
        assert least_weight_bytes(tmp_path, ReplicaSettings(dtype=dtype), 1) == found


def headers(folder: Path, config: dict[str, Any], **tensors: tuple[str, tuple[int, ...], int]) -> Path:
    """A model of which only headers exist, from each tensor's dtype, shape and bytes per number."""
    at, header = 0, {}
    for name, (dtype, shape, size) in tensors.items():
        stop = at + math.prod(shape) * size
        header[name.replace("__", ".")] = {"dtype": dtype, "shape": shape, "data_offsets": (at, stop)}
        at = stop
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return folder


EXPERTS = "model__layers__0__mlp__experts__gate_up_proj"


def test_mxfp4_is_counted_as_it_is_held(tmp_path: Path) -> None:
    """transformers dequantizes it: a byte becomes two numbers of two bytes, and the scales are not kept."""
    folder = headers(
        tmp_path / "m",
        {"model_type": "gpt_oss"},
        **{f"{EXPERTS}_blocks": ("U8", (128, 5760, 90, 16), 1), f"{EXPERTS}_scales": ("U8", (128, 5760, 90), 1)},
    )

    assert least_weight_bytes(folder, ReplicaSettings(), 1) == 128 * 5760 * 2880 * 2
    with pytest.raises(StartupError, match="choose a smaller model"):  # transformers runs on one rank
        check_gpu_memory(folder, ReplicaSettings(), [3 * GIB] * 8)


def test_a_byte_tensor_of_another_kind_is_counted_as_stored(tmp_path: Path) -> None:
    folder = headers(tmp_path / "m", {}, model__mask_blocks=("U8", (64, 64), 1))

    assert least_weight_bytes(folder, ReplicaSettings(), 1) == 64 * 64


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "own head"])
def test_experts_are_shared_among_ranks_and_a_tied_head_is_held_once(tied: bool, tmp_path: Path) -> None:
    """Each rank holds the whole embedding; a head of its own is divided like all other tensors."""
    sizes = {"num_experts": 128, "moe_intermediate_size": 768, "max_position_embeddings": 1 << 20}
    head = {} if tied else {"lm_head__weight": ("BF16", (151_936, 2048), 2)}
    folder = headers(
        tmp_path / "m",
        {"model_type": "qwen3_moe", "hidden_size": 2048, "vocab_size": 151_936} | sizes,
        model__embed_tokens__weight=("BF16", (151_936, 2048), 2),
        **{f"{EXPERTS}__weight": ("BF16", (128, 1536, 2048), 2)} | head,
    )
    embedding, experts = 151_936 * 2048 * 2, 128 * 1536 * 2048 * 2

    for ranks in (1, 4):
        shared = experts + (0 if tied else embedding)
        assert least_weight_bytes(folder, ReplicaSettings(), ranks) == embedding + shared // ranks
    with pytest.raises(StartupError, match=r"size: \d$"):
        check_gpu_memory(folder, ReplicaSettings(), [embedding + experts // 2] * 8)


def one_layer(folder: Path, kept: str = "F8_E4M3", *, block: bool = False, sizes: dict[str, Any] | None = None) -> Path:
    """A layer with FP8 attention and MLP, 8 KV heads of 64, and one FP8 expert: 512 features, 1,024 in the MLP."""
    shapes = {f"self_attn__{name}": (512, 512) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    shapes |= {"mlp__gate_proj": (1024, 512), "mlp__up_proj": (1024, 512), "mlp__down_proj": (512, 1024)}
    shapes["mlp__experts__0__gate_proj"] = (1024, 512)
    tensors: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for name, (rows, columns) in shapes.items():
        of_scales = (rows // 128, columns // 128) if block else (rows, 1)
        tensors[f"model__layers__0__{name}__weight"] = (kept, (rows, columns), 1)
        tensors[f"model__layers__0__{name}__weight_scale"] = ("F32", of_scales, 4)
    about = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 1}
    if block:
        about["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return headers(folder, about | (sizes or {}), **tensors)


ATTENTION, MLP, EXPERT = 4 * 512 * 512, 3 * 1024 * 512, 1024 * 512
KEPT = ATTENTION + MLP + 2 * EXPERT
DEQUANTIZED = 2 * (ATTENTION + MLP + EXPERT)


@pytest.mark.parametrize(
    ("kind", "block", "asked", "capability", "needed"),
    [
        ("F8_E4M3", False, {}, None, KEPT),
        ("F8_E4M3", False, {}, (8, 9), KEPT),
        ("F8_E4M3", False, {}, (8, 0), DEQUANTIZED),
        ("F8_E4M3", True, {}, (9, 0), KEPT),
        ("F8_E4M3", True, {}, (8, 9), DEQUANTIZED),
        ("F8_E5M2", False, {}, None, DEQUANTIZED),
        ("F8_E4M3", False, {"dtype": "float32"}, None, 2 * DEQUANTIZED),
        ("F8_E4M3", False, {"model_provider": "transformers"}, None, DEQUANTIZED),
    ],
)
def test_8_bit_weights_count_twice_where_they_are_dequantized(kind, block, asked, capability, needed, tmp_path):
    """Counted as stored, such a model would pass, and run out of memory after minutes. Experts always are."""
    folder = one_layer(tmp_path / "m", kind, block=block)

    assert least_weight_bytes(folder, ReplicaSettings(**asked), 1, capability=capability) == needed


def test_fused_linears_count_as_dequantized_if_one_of_them_is(tmp_path: Path) -> None:
    """q, k and v are one product; a rank whose part begins within a block cannot use the block's scale."""
    folder = one_layer(tmp_path / "m", block=True)
    # Eight ranks have 64 rows of each of q, k and v, and 64 columns of o; their parts of the MLP are whole blocks.
    assert least_weight_bytes(folder, ReplicaSettings(), 8) == (2 * ATTENTION + MLP + 2 * EXPERT) // 8

    for name in ("q_proj", "o_proj"):
        path = folder / "model.safetensors"
        content = path.read_bytes()
        stored, row = (f'"model.layers.0.self_attn.{name}.weight": {{"dtype": "{kind}"'.encode() for kind in DTYPES)
        path.write_bytes(content.replace(stored, row))
    assert least_weight_bytes(folder, ReplicaSettings(), 1) == 2 * ATTENTION + MLP + 2 * EXPERT


DTYPES = ("F8_E4M3", "F8_E5M2")


def test_ranks_that_share_a_kv_head_each_hold_it(tmp_path: Path) -> None:
    """With fewer KV heads than ranks, more ranks do not make the keys' and values' weights smaller."""
    attention = {"q_proj": 1024, "k_proj": 128, "v_proj": 128}
    tensors = {f"model__layers__0__self_attn__{n}__weight": ("BF16", (r, 1024), 2) for n, r in attention.items()}
    tensors |= {f"model__layers__0__self_attn__{n}__bias": ("BF16", (r,), 2) for n, r in attention.items()}
    whole = {"input_layernorm": (1024,), "mlp__gate": (64, 1024)}
    tensors |= {f"model__layers__0__{name}__weight": ("BF16", shape, 2) for name, shape in whole.items()}
    sizes = {"num_attention_heads": 16, "num_key_value_heads": 2, "hidden_size": 1024}
    folder = headers(tmp_path / "m", sizes, **tensors)

    for ranks, kv in ((1, 1), (2, 2), (4, 2), (8, 2)):
        needed = 2 * (1024 + 64 * 1024 + 1024 * 1025 // ranks + 2 * 128 * 1025 // kv)
        assert least_weight_bytes(folder, ReplicaSettings(), ranks) == needed


@pytest.mark.parametrize(
    "name",
    [
        "model__layers__1__mlp__up_proj__weight",
        "model__layers__1__embed_tokens__weight",
        "mtp__layers__0__mlp__up_proj__weight",
        "model__mtp_layers__0__mlp__up_proj__weight",
        "model__visual__blocks__0__weight",
        "multi_modal_projector__weight",
        "lm_head__weight",
    ],
)
def test_what_no_text_model_loads_does_not_count(name: str, tmp_path: Path) -> None:
    """Layers that predict tokens ahead, towers, and the copy of a tied embedding are in files, but not on a GPU."""
    layer = {"model__layers__0__mlp__up_proj__weight": ("BF16", (64, 64), 2)}
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 1, "tie_word_embeddings": True}
    folder = headers(tmp_path / "m", config, **layer, **{name: ("BF16", (64, 64), 2)})

    assert least_weight_bytes(folder, ReplicaSettings(), 1) == 64 * 64 * 2
