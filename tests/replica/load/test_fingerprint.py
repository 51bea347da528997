"""Digests of a model folder's configuration, weights, tokenizer and template."""

import json
from pathlib import Path

import pytest

from homing.kvcache.config import KvCacheSettings
from homing.kvcache.hashing import BlockHasher
from homing.kvcache.parity import template_digest, tokenizer_digest
from homing.replica.load.fingerprint import cache_identity, model_fingerprint, parity

HEADER = json.dumps({"w": {"dtype": "F32", "shape": [4096], "data_offsets": [0, 16384]}}).encode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (tmp_path / "model.safetensors").write_bytes(len(HEADER).to_bytes(8, "little") + HEADER + bytes(16384))
    return tmp_path


def change(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("name", "position"), [("config.json", 4), ("model.safetensors", 20), ("model.safetensors", -1)]
)
def test_another_model_has_another_fingerprint(folder: Path, name: str, position: int) -> None:
    """Configuration, header and (sampled) weights all count: a base model and its fine-tune must not share KV."""
    before = model_fingerprint(folder, "float32")

    change(folder / name, position)

    assert model_fingerprint(folder, "float32") != before


def test_the_type_is_part_of_the_fingerprint(folder: Path) -> None:
    """KV computed in bfloat16 is not interchangeable with float32 KV."""
    assert model_fingerprint(folder, "float32") != model_fingerprint(folder, "bfloat16")


def test_a_fingerprint_does_not_depend_on_where_the_folder_is(folder: Path, tmp_path_factory) -> None:
    """Each node has its own copy of the model."""
    other = tmp_path_factory.mktemp("elsewhere")
    for path in folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())

    assert model_fingerprint(other, "float32") == model_fingerprint(folder, "float32")


def test_tokenizer_and_template_have_digests_of_their_own(folder: Path) -> None:
    """A refusal must be able to say which of the two differs; here the template changes."""
    tokenizer, template = tokenizer_digest(folder), template_digest(folder)

    (folder / "chat_template.jinja").write_text("{{ messages }}!")

    assert tokenizer_digest(folder) == tokenizer
    assert template_digest(folder) != template


def test_the_canary_tells_seeds_and_block_sizes_apart(folder: Path) -> None:
    """The same folder under another seed or block size gives other block hashes, which would never hit."""
    settings = KvCacheSettings(block_size=8)
    same, again, seed, size = (
        parity(folder, cache_identity(folder, "float32", settings), hasher).canary
        for hasher in (BlockHasher(8, 1), BlockHasher(8, 1), BlockHasher(8, 2), BlockHasher(4, 1))
    )

    assert same == again
    assert len({same, seed, size}) == 3
