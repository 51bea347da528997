"""Blocks, bytes and GPUs: known models, and incomplete configurations."""

import json
from pathlib import Path
from typing import Any

import pytest

from homing.cluster.errors import ModelUnavailable, SettingsError
from homing.cluster.lab.analyze.capacity import KvCapacity, block_bytes_of_config, parse_size

LLAMA_70B: dict[str, Any] = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "torch_dtype": "float16",
}


def config(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(content))
    return path


def test_llama_70b_takes_five_mebibytes_a_block_and_45_gigabytes_hold_8583(tmp_path: Path):
    """8,582 of the 8,583 are usable for requests, because one is the null block."""
    found = KvCapacity(block_bytes_of_config(config(tmp_path, LLAMA_70B), 16), parse_size("45GB", "--kv-memory"))

    assert found.block_bytes == 5_242_880
    assert found.gpu_blocks == 8_583 - 1
    assert (found.gpus(8_582), found.gpus(8_583)) == (1, 2)
    assert found.gib(1024) == 5.0


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        ({"torch_dtype": "float32"}, 2),
        ({"head_dim": 64}, 0.5),
        ({"num_key_value_heads": None}, 8),
        ({"torch_dtype": None, "dtype": "bfloat16"}, 1),
    ],
)
def test_the_configuration_decides(tmp_path: Path, change: dict[str, Any], factor: float):
    """Missing fields are derived from the others, as in transformers."""
    assert block_bytes_of_config(config(tmp_path, LLAMA_70B | change).parent, 16) == 5_242_880 * factor


def test_a_model_of_several_parts_is_sized_by_its_text_part(tmp_path: Path):
    """Multimodal configurations nest the text model's fields."""
    assert block_bytes_of_config(config(tmp_path, {"text_config": LLAMA_70B}), 16) == 5_242_880


@pytest.mark.parametrize("change", [{"num_hidden_layers": None}, {"num_attention_heads": "x"}, {"torch_dtype": "int3"}])
def test_a_configuration_that_does_not_say_enough_is_refused(tmp_path: Path, change: dict[str, Any]):
    """The error suggests giving the bytes directly."""
    with pytest.raises(ModelUnavailable, match="--bytes-per-block"):
        block_bytes_of_config(config(tmp_path, LLAMA_70B | change), 16)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        ("16k", 16_000),
        ("45GB", 45 * 10**9),
        ("40GiB", 40 * 2**30),
        ("1.5M", 1_500_000),
        ("2 tib", 2**41),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, expected: int):
    """Units are decimal by default, and binary with an i."""
    assert parse_size(text, "--x") == expected


@pytest.mark.parametrize("text", ["", "many", "1.2.3", "12 apples", "-4", "k", "9" * 400])
def test_what_is_no_size_is_refused_by_flag(text: str):
    """The error is one line that names the flag."""
    with pytest.raises(SettingsError, match="--x"):
        parse_size(text, "--x")


def test_memory_for_no_block_is_refused():
    """Otherwise a division by zero would follow."""
    with pytest.raises(SettingsError, match="--kv-memory"):
        KvCapacity(1000, 1500)
