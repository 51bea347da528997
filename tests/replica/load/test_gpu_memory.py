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


def test_only_what_a_rank_must_hold_counts(tmp_path: Path) -> None:
    """A model that could run must never be refused: 8-bit weights stay as they are, other towers are not loaded."""
    folder = save(tmp_path, "F8_E4M3", 1)

    assert least_weight_bytes(folder, ReplicaSettings(), 1) == PARAMETERS + 2 * 2 * EMBEDDING
    assert least_weight_bytes(folder, ReplicaSettings(), 4) == 2 * EMBEDDING + (PARAMETERS + 2 * EMBEDDING) // 4
    save(tmp_path, "F32", 4)
    assert least_weight_bytes(folder, ReplicaSettings(), 1) == 2 * PARAMETERS + 2 * 2 * EMBEDDING
    assert least_weight_bytes(folder, ReplicaSettings(dtype="float32"), 1) == 4 * (PARAMETERS + 2 * EMBEDDING)


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
