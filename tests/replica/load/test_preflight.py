"""The preflight check names each problem, with a remedy, before anything is loaded, and accepts valid models."""

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from homing.kvcache.config import KvCacheSettings
from homing.kvcache.errors import KvCacheError, PoolTooSmall
from homing.replica.config import ReplicaSettings
from homing.replica.demo import demo_model_path
from homing.replica.errors import (
    StartupError,
    TensorParallelUnsupported,
    UnsupportedModel,
    WeightsDamaged,
    WeightsMissing,
)
from homing.replica.execute.runner import ModelRunner
from homing.replica.kernels.cpu.runtime.processor import may_beat_packed
from homing.replica.load.preflight import check_model, multiplies_bfloat16, weight_bytes
from homing.replica.models.spec import auto_dtype

SHAPE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards with an index, as for a large model."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    shards = {"a": "one.safetensors", "b": "two.safetensors"}
    for tensor, file in shards.items():
        save_file({tensor: torch.zeros(3, 4)}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return tmp_path


def check(folder: Path, cache: KvCacheSettings | None = None, **settings: object) -> None:
    check_model(folder, ReplicaSettings(**settings), cache or KvCacheSettings())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_whole_models_pass(folder: Path, ranks: int) -> None:
    """A check that refuses a working model is worse than no check."""
    check(folder, tensor_parallel_size=ranks)
    check(demo_model_path(), tensor_parallel_size=ranks)


def cut(folder: Path) -> None:
    path = folder / "two.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def cut_in_header(folder: Path) -> None:
    path = folder / "two.safetensors"
    path.write_bytes(path.read_bytes()[:20])


def empty(folder: Path) -> None:
    (folder / "two.safetensors").write_bytes(b"")


def scramble(folder: Path) -> None:
    path = folder / "two.safetensors"
    path.write_bytes(path.read_bytes()[:8] + b"?" * (path.stat().st_size - 8))


def lose_shard(folder: Path) -> None:
    (folder / "two.safetensors").unlink()


def swap_shard(folder: Path) -> None:
    (folder / "two.safetensors").write_bytes((folder / "one.safetensors").read_bytes())


def lose_all(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()


def break_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


@pytest.mark.parametrize(
    ("harm", "error", "told"),
    [
        (cut, WeightsDamaged, r"two\.safetensors is incomplete: it has \d+ bytes of \d+; fetch the model again"),
        (cut_in_header, WeightsDamaged, r"two\.safetensors is incomplete.*less than its header"),
        (empty, WeightsDamaged, r"two\.safetensors is incomplete"),
        (scramble, WeightsDamaged, r"two\.safetensors is damaged: its header"),
        (lose_shard, WeightsMissing, r"index\.json names two\.safetensors, which is not in the folder"),
        (swap_shard, WeightsMissing, r"lists 'b' in two\.safetensors, which does not contain it"),
        (lose_all, WeightsMissing, r"no \*\.safetensors"),
        (break_index, WeightsDamaged, r"not a weights index"),
    ],
)
def test_weights_that_are_not_whole_are_named(
    folder: Path, harm: Callable[[Path], None], error: type[StartupError], told: str
) -> None:
    """Interrupted downloads are the usual case; loading notices them after minutes, or never."""
    harm(folder)

    with pytest.raises(error, match=told):
        check(folder)
    with contextlib.suppress(StartupError):  # doctor also computes the size of such a folder
        weight_bytes(folder, ReplicaSettings())


@pytest.mark.parametrize(
    "content", ["", "[]", '{"num_attention_heads": "four"}', '{"num_attention_heads": 0, "hidden_size": 64}']
)
def test_a_configuration_that_is_none_is_named(folder: Path, content: str) -> None:
    """The message includes the file's name."""
    (folder / "config.json").write_text(content)

    with pytest.raises(UnsupportedModel, match=r"config\.json is not a model's configuration"):
        check(folder)


@pytest.mark.parametrize(
    ("settings", "cache", "error", "told"),
    [
        ({"tensor_parallel_size": 3}, {}, TensorParallelUnsupported, "tensor_parallel_size 3: 4 attention heads"),
        ({"tensor_parallel_size": 2, "model_provider": "transformers"}, {}, TensorParallelUnsupported, "one rank"),
        ({"max_model_len": 257}, {}, StartupError, "max_model_len 257 is more than the model's 256"),
        ({"max_model_len": 1}, {}, StartupError, "max_model_len 1"),
        ({}, {"block_size": 256}, StartupError, "block_size 256: no prompt of at most 256 tokens fills a block"),
        ({"max_model_len": 16}, {}, StartupError, "block_size 16"),
        ({}, {"num_kv_blocks": 4}, StartupError, "num_kv_blocks 4: .* hold 48 tokens, .* set at least 5"),
        ({"max_model_len": 40}, {"num_kv_blocks": 3}, StartupError, "a short request takes 40; set at least 4"),
        ({}, {"kv_cache_bytes": 1000}, PoolTooSmall, "kv_cache_bytes"),
    ],
)
def test_settings_that_no_replica_could_have_are_named(
    folder: Path, settings: dict[str, object], cache: dict[str, int], error: type[Exception], told: str
) -> None:
    """The error names the setting, before Ray is started."""
    with pytest.raises(error, match=told) as caught:
        check(folder, KvCacheSettings(**cache), **settings)

    assert isinstance(caught.value, StartupError | KvCacheError)


@pytest.mark.parametrize(("longest", "blocks"), [(0, 5), (40, 4), (1000, 5)])
def test_a_pool_for_one_short_request_is_enough(folder: Path, longest: int, blocks: int) -> None:
    """Tests and demonstrations use tiny pools. A request need not be longer than `max_model_len`."""
    check(folder, KvCacheSettings(num_kv_blocks=blocks), max_model_len=min(longest, 256))


def test_what_the_configuration_does_not_tell_is_left_to_the_replica(folder: Path) -> None:
    """Some transformers families use other key names."""
    (folder / "config.json").write_text('{"model_type": "gpt2", "n_head": 3}')

    check(folder, KvCacheSettings(kv_cache_bytes=1, block_size=256))


@pytest.fixture
def pickled(folder: Path) -> Path:
    """The same model in torch's older format."""
    for name in ("one", "two"):
        (folder / f"{name}.safetensors").unlink()
        (folder / f"pytorch_model-{name}.bin").write_bytes(b"1234567")
    shards = {"a": "pytorch_model-one.bin", "b": "pytorch_model-two.bin"}
    (folder / "model.safetensors.index.json").rename(folder / "pytorch_model.bin.index.json")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": shards}))
    return folder


def test_weights_without_safetensors_pass_if_all_files_exist(pickled: Path) -> None:
    """Only torch can read which tensors they contain."""
    check(pickled)
    assert weight_bytes(pickled, ReplicaSettings()) == 14

    (pickled / "pytorch_model-two.bin").unlink()
    with pytest.raises(WeightsMissing, match=r"names pytorch_model-two\.bin"):
        check(pickled)


def test_weights_without_safetensors_run_unquantized_on_one_rank(pickled: Path) -> None:
    """transformers reads them, which does not split a model; its quantized weights are refused as any others are."""
    with pytest.raises(TensorParallelUnsupported, match="models without safetensors run in transformers"):
        check(pickled, tensor_parallel_size=2)

    (pickled / "config.json").write_text(json.dumps(SHAPE | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UnsupportedModel, match="gptq"):
        check(pickled)


def test_large_blocks_do_where_nothing_is_cached(folder: Path) -> None:
    """Without prefix caching, large blocks only waste memory."""
    check(folder, KvCacheSettings(block_size=256, prefix_caching=False))


#: Bytes per weight of a bfloat16 linear layer.
IN_BFLOAT16 = 2 if may_beat_packed() else 4


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("asked", "by_linear", "by_head", "by_other"),
    [
        ({}, 4, 4, 4),
        ({"dtype": "bfloat16"}, IN_BFLOAT16, IN_BFLOAT16, 2),
        ({"dtype": "float16"}, 2, 2, 2),
        ({"dtype": "bfloat16", "quantization": "int8"}, 1, IN_BFLOAT16, 2),
    ],
    ids=str,
)
def test_weights_are_counted_as_they_are_held(checkpoint, asked, by_linear, by_head, by_other, tied):
    """bfloat16 linears count twice without CPU support for the type; a tied head counts in addition to its embedding.

    The head is never stored in 8 bits. Models run through transformers hold the same linears.
    """
    folder = checkpoint("llama", tie_word_embeddings=tied)
    tensors = load_file(folder / "model.safetensors")
    rows, features = tensors.pop("model.embed_tokens.weight").shape
    embedding = rows * features
    head = embedding if tied else tensors.pop("lm_head.weight").numel()
    linears = sum(each.numel() for each in tensors.values() if each.dim() == 2)
    others = sum(each.numel() for each in tensors.values() if each.dim() == 1)

    own = weight_bytes(folder, ReplicaSettings(**asked))
    foreign = weight_bytes(folder, ReplicaSettings(model_provider="transformers", dtype="bfloat16"))
    halved = weight_bytes(folder, ReplicaSettings(tensor_parallel_size=2, **asked))

    whole = (embedding + others) * by_other
    assert own == whole + linears * by_linear + head * by_head
    assert foreign == 2 * (embedding + others) + IN_BFLOAT16 * (linears + head)
    assert halved == whole + linears * by_linear // 2 + -(-rows // 2) * features * by_head


@pytest.mark.parametrize(
    ("stored", "cuda", "multiplies", "chosen"),
    [
        ("bfloat16", False, True, "bfloat16"),
        ("bfloat16", False, False, "float32"),
        ("float16", False, True, "float32"),
        ("float32", False, True, "float32"),
        (None, False, True, "float32"),
        ("bfloat16", True, False, "bfloat16"),
        ("float16", True, False, "float16"),
        ("float8_e4m3fn", True, False, "float32"),
    ],
)
def test_the_checkpoints_type_is_taken_where_it_is_fast(
    stored: str | None, cuda: bool, multiplies: bool, chosen: str
) -> None:
    """float32 works everywhere, but is two to three times as slow."""
    assert auto_dtype(stored, cuda=cuda, multiplies_bfloat16=multiplies) == chosen


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_weights_are_counted_and_loaded_in_the_same_type(checkpoint, tmp_path, key):
    """The configuration may call the key `dtype` or `torch_dtype`."""
    folder = shutil.copytree(checkpoint("llama"), tmp_path, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config | {key: "bfloat16"}))
    taken = "bfloat16" if multiplies_bfloat16() else "float32"

    assert ModelRunner(ReplicaSettings(device="cpu"), folder, 8).spec.dtype == taken
    assert weight_bytes(folder, ReplicaSettings()) == weight_bytes(folder, ReplicaSettings(dtype=taken))
    assert weight_bytes(demo_model_path(), ReplicaSettings()) == weight_bytes(
        demo_model_path(), ReplicaSettings(dtype="float32")
    )


@pytest.mark.parametrize("vocabulary", [{"a": 0, "b": 4095}, [["a", 0.0]] * 4096])
def test_a_tokenizer_of_another_model_is_named(tmp_path: Path, vocabulary: object) -> None:
    """Token ids beyond the embedding would fail every request that contains one."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    check(demo_model_path(), tokenizer=str(other))
    (other / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": vocabulary}, "added_tokens": [{"id": 4096, "content": "<end>"}]})
    )

    with pytest.raises(
        StartupError, match=r"tokenizer: .*other.tokenizer\.json has the token id 4,096, but .* 4,096 tokens"
    ):
        check(demo_model_path(), tokenizer=str(other))


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ({"host_kv_memory": 1000}, "host_kv_memory 1,000: it holds 0 blocks of 4,096 bytes; set at least 65,536, or 0"),
        ({"host_kv_memory": 1 << 30, "prefix_caching": False}, "host_kv_memory: .* prefix_caching is off"),
    ],
)
def test_a_host_tier_that_cannot_work_is_refused(folder: Path, cache: dict[str, object], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        check(folder, KvCacheSettings(**cache))
    check(folder, KvCacheSettings(host_kv_memory=65_536))
