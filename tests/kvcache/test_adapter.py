"""An adapter's digest: what it is made of decides, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from homing.kvcache import AdapterUnreadable, BlockHash, adapter_digest, tenant_root

CONFIG = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "base_model_name_or_path": "/models/base"}
TENSORS = {"a.lora_A": ("F32", [2], b"\1" * 8), "a.lora_B": ("F32", [1, 2], b"\2" * 8)}


def adapter(folder: Path, tensors: dict[str, Any] = TENSORS, *, files: int = 1, **config: Any) -> Path:
    """An adapter in `files` files, written with nothing but the format's description."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    names = list(tensors)
    for number in range(files):
        part = {name: tensors[name] for name in names[number::files]}
        (folder / f"adapter_model-{number}.safetensors").write_bytes(safetensors(part))
    return folder


def safetensors(tensors: dict[str, Any]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def test_the_same_name_with_other_weights_is_another_root(tmp_path: Path):
    """An adapter that was trained on keeps its name; its KV must not be taken for the old one's."""
    old = adapter(tmp_path / "v1")
    new = adapter(tmp_path / "v2", TENSORS | {"a.lora_B": ("F32", [1, 2], b"\3" * 8)})
    model = BlockHash(b"model-root-of-16")
    roots = {tenant_root(model, lora_digest=adapter_digest(folder)) for folder in (old, new)}

    assert len(roots | {tenant_root(model)}) == 3


def test_names_folders_order_and_sharding_do_not_matter(tmp_path: Path):
    """The same weights under another name hit: what counts is what they compute."""
    turned = dict(reversed(TENSORS.items()))
    one = adapter(tmp_path / "one")
    others = [
        adapter(tmp_path / "other"),
        adapter(tmp_path / "turned", turned),
        adapter(tmp_path / "sharded", files=2),
        adapter(tmp_path / "moved", base_model_name_or_path="/mnt/base", revision="main"),
    ]

    assert {adapter_digest(folder) for folder in others} == {adapter_digest(one)}


@pytest.mark.parametrize(
    "change",
    [
        {"config": {"lora_alpha": 32}},
        {"tensors": {"a.lora_A": ("F16", [4], b"\1" * 8)}},
        {"tensors": {"a.lora_A": ("F32", [2, 1], b"\1" * 8)}},
        {"tensors": {"b.lora_A": ("F32", [2], b"\1" * 8)}},
    ],
)
def test_whatever_changes_what_it_computes_changes_the_digest(tmp_path: Path, change: dict[str, Any]):
    """Scale, type, shape, or one tensor more: each gives other KV."""
    before = adapter(tmp_path / "before")
    after = adapter(tmp_path / "after", TENSORS | change.get("tensors", {}), **change.get("config", {}))

    assert adapter_digest(before) != adapter_digest(after)


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "header of 0 bytes"), (b"\5\0\0\0\0\0\0\0{tru", "cannot be read"), (safetensors(TENSORS)[:-3], "3 bytes")],
)
def test_what_is_no_adapter_is_named(tmp_path: Path, content: bytes, said: str):
    """A digest of half a file would match the next half file."""
    folder = adapter(tmp_path / "torn")
    (folder / "adapter_model-0.safetensors").write_bytes(content)

    with pytest.raises(AdapterUnreadable, match=rf"adapter_model-0.*{said}"):
        adapter_digest(folder)


def test_a_folder_without_safetensors_or_configuration_is_named(tmp_path: Path):
    """Pickled weights would have to be run to be read."""
    with pytest.raises(AdapterUnreadable, match=r"no \*\.safetensors"):
        adapter_digest(tmp_path)
    folder = adapter(tmp_path / "bare")
    (folder / "adapter_config.json").unlink()
    with pytest.raises(AdapterUnreadable, match=r"adapter_config\.json"):
        adapter_digest(folder)


def test_files_of_the_library_are_read(tmp_path: Path):
    """The format as its own library writes it."""
    numpy, library = pytest.importorskip("numpy"), pytest.importorskip("safetensors.numpy")
    ours, theirs = adapter(tmp_path / "ours"), adapter(tmp_path / "theirs")
    arrays = {name: numpy.frombuffer(data, "float32").reshape(shape) for name, (_, shape, data) in TENSORS.items()}
    library.save_file(arrays, theirs / "adapter_model-0.safetensors", metadata={"by": "the library"})

    assert adapter_digest(theirs) == adapter_digest(ours)
