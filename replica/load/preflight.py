"""Checks before anything is loaded whether a replica could serve a model's folder with these settings.

Only reads files, and only the headers of weights; no torch, no transformers. Problems that take those to detect (such
as a family whose attention is not supported) are reported by the replica when it loads.
"""

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import msgspec

from ...kvcache.config import KvCacheSettings
from ...kvcache.sizing import blocks_that_fit, bytes_per_block
from ..config import ReplicaSettings
from ..disk.folder import check_settings as check_disk
from ..errors import StartupError, TensorParallelUnsupported, UnsupportedModel, WeightsMismatch, WeightsMissing
from ..models.spec import FAMILIES, auto_dtype, split_problem
from .quantized import Scaling, block_sizes, dequantized, method_problem, scalings
from .rank_weights import EMBEDDING, HEAD, held_numbers, is_expert
from .weight_files import FETCH_AGAIN, TensorHeader, are_pickled, tensors_in, tensors_of, weight_files, weight_map
from .weight_shapes import headers_problem

#: Bytes of a KV element in the smallest dtype: a block that does not fit in this one fits in no dtype.
_MIN_DTYPE_BYTES = 2
#: Prompt and answer of a short request. A pool with less room is refused: chat templates alone take tens of tokens.
SHORT_REQUEST_TOKENS = 64
#: A host tier of fewer blocks would evict each before it is used again.
LEAST_HOST_SLOTS = 16
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The values of config.json that limit settings; None where a family uses another name."""

    model_type: str = ""
    hidden_size: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: Annotated[int, msgspec.Meta(gt=0)] | None = None
    num_key_value_heads: int | None = None
    max_position_embeddings: int | None = None
    vocab_size: int | None = None
    dtype: str | None = None
    torch_dtype: str | None = None  #: the name of `dtype` up to transformers 4


def check_model(folder: Path, settings: ReplicaSettings, cache: KvCacheSettings) -> None:
    """Raise StartupError or PoolTooSmall if no replica could serve this; names the file or setting and the remedy."""
    config = read_config(folder)
    check_weights(folder)
    check_shapes(folder)
    if settings.tokenizer and config.vocab_size is not None:
        check_vocabulary_size(Path(settings.tokenizer).expanduser(), config.vocab_size)
    check_ranks(config, settings, pickled=are_pickled(folder))
    check_length(config, settings, cache)
    check_pool(config, settings, cache)
    check_host(config, settings, cache)
    ranks = settings.tensor_parallel_size
    check_disk(cache.disk_kv, cache.disk_kv_size, prefix_caching=cache.prefix_caching, ranks=ranks)


def read_config(folder: Path) -> ModelConfig:
    """Read config.json. Raises UnsupportedModel."""
    raw = raw_config(folder)
    try:
        return msgspec.convert(raw | (raw.get("text_config") or {}), ModelConfig)
    except (TypeError, msgspec.ValidationError) as error:
        raise _not_a_configuration(folder, error) from error


def raw_config(folder: Path) -> dict[str, Any]:
    """The object in config.json. Raises UnsupportedModel."""
    try:
        return msgspec.convert(json.loads((folder / "config.json").read_bytes()), dict[str, Any])
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise _not_a_configuration(folder, error) from error


def _not_a_configuration(folder: Path, error: Exception) -> UnsupportedModel:
    return UnsupportedModel(f"{folder / 'config.json'} is not a model's configuration: {error}; {FETCH_AGAIN}")


def check_weights(folder: Path) -> None:
    """Check by names and lengths that all weight files exist and are complete. Raises ModelError."""
    if are_pickled(folder):
        _check_pickled(folder)
        return
    held = {path.name: tensors_of(path) for path in sorted(folder.glob("*.safetensors"))}
    if not held:
        weight_files(folder)
    for path in sorted(folder.glob("*.safetensors.index.json")):
        for tensor, name in weight_map(path).items():
            if name not in held:
                raise _shard_missing(path, name)
            if tensor not in held[name]:
                raise WeightsMissing(f"{path} lists {tensor!r} in {name}, which does not contain it; {FETCH_AGAIN}")
    check_quantization(folder, tensors_in(folder))


def _check_pickled(folder: Path) -> None:
    """Check that all files named in the index exist; which tensors they contain is found when they are loaded."""
    for path in sorted(folder.glob("pytorch_model*.bin.index.json")):
        for name in weight_map(path).values():
            if not (folder / name).is_file():
                raise _shard_missing(path, name)
    check_quantization(folder, {})


def _shard_missing(index: Path, name: str) -> WeightsMissing:
    return WeightsMissing(f"{index} names {name}, which is not in the folder; {FETCH_AGAIN}")


def check_quantization(folder: Path, tensors: Mapping[str, TensorHeader]) -> dict[str, Scaling]:
    """How to dequantize each of the folder's quantized weights, by name. Raises UnsupportedModel."""
    config = raw_config(folder)
    found, unknown = scalings(tensors, block_sizes(config))
    problem = method_problem(config) or unknown
    if problem:
        raise UnsupportedModel(f"{folder}: {problem}")
    return found


def check_shapes(folder: Path) -> None:
    """Check that names and shapes of the tensors fit config.json. Raises ModelError.

    torch's older format shows them only when it is loaded.
    """
    if are_pickled(folder):
        return
    tensors = tensors_in(folder)
    scales = {each.scales for each in check_quantization(folder, tensors).values()}
    shapes = {name: header.shape for name, header in tensors.items() if name not in scales}
    if problem := headers_problem(raw_config(folder), shapes):
        raise WeightsMismatch(f"{folder}: {problem}; config.json and the weights are not of one model, {FETCH_AGAIN}")


def check_vocabulary_size(folder: Path, vocab_size: int) -> None:
    """Raise StartupError if the folder's tokenizer.json has ids that are not in a vocabulary of this size."""
    path = folder / "tokenizer.json"
    if not path.is_file():  # another format, which only transformers reads
        return
    try:
        content: Any = json.loads(path.read_bytes())
        words = content["model"]["vocab"]
        ids = words.values() if isinstance(words, dict) else range(len(words))
        highest = max([-1, *ids, *(each["id"] for each in content.get("added_tokens") or ())])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # routers report a malformed file
    if highest >= vocab_size:
        raise StartupError(
            f"tokenizer: {path} has the token id {highest:,}, but the model has only {vocab_size:,} tokens; "
            "use this model's tokenizer"
        )


def weight_bytes(folder: Path, settings: ReplicaSettings) -> int:
    """Estimated bytes of weights on a CPU, of the rank that holds most.

    Without safetensors, the size of the files. Raises UnsupportedModel, WeightsMissing, WeightsDamaged.
    """
    config = read_config(folder)
    if are_pickled(folder):
        return sum(path.stat().st_size for path in folder.glob("pytorch_model*.bin"))
    native = config.model_type in FAMILIES and settings.model_provider != "transformers"
    dtype: str = settings.dtype
    if dtype == "auto":
        dtype = auto_dtype(config.dtype or config.torch_dtype, cuda=False, multiplies_bfloat16=multiplies_bfloat16())
    size, tensors = DTYPE_BYTES[dtype], tensors_in(folder)
    scales = {each.scales for each in check_quantization(folder, tensors).values()}
    shapes = {name: each.shape for name, each in dequantized(tensors).items() if name not in scales}
    embedding = next((shape for name, shape in shapes.items() if name.endswith(EMBEDDING)), None)
    if embedding and not any(name.endswith(HEAD) for name in shapes):
        shapes[HEAD] = embedding  # even a tied head is a linear layer with its own packed weights
    by_head = 2 * size if dtype == "bfloat16" and _holds_linears_twice() else size
    by_linear = 1 if native and settings.quantization == "int8" else by_head
    total = 0
    for name, numbers in held_numbers(raw_config(folder), shapes, settings.tensor_parallel_size).items():
        if name.endswith(HEAD):
            total += numbers * by_head
        elif name.endswith(EMBEDDING) or len(shapes[name]) <= 1:
            total += numbers * size
        else:
            total += numbers * (min(by_linear, size) if is_expert(name) else by_linear)
    return total


def multiplies_bfloat16() -> bool:
    """Whether this machine has a processor and kernels for fast bfloat16 products."""
    if importlib.util.find_spec("numba") is None:
        return False
    from ..kernels.cpu.runtime import processor  # needs llvmlite, which comes with numba

    return processor.multiplies_bfloat16()


def _holds_linears_twice() -> bool:
    """Whether bfloat16 linears are packed twice: for oneDNN, and for our kernel for steps of few rows."""
    if importlib.util.find_spec("numba") is None:
        return False
    from ..kernels.cpu.runtime.processor import may_beat_packed

    return not may_beat_packed()


def check_ranks(config: ModelConfig, settings: ReplicaSettings, *, pickled: bool = False) -> None:
    """Check that the model can be split among the ranks. Raises TensorParallelUnsupported."""
    ranks = settings.tensor_parallel_size
    problem = rank_problem(config, settings, ranks, pickled=pickled)
    if problem:
        raise TensorParallelUnsupported(f"tensor_parallel_size {ranks}: {problem}")


def rank_problem(config: ModelConfig, settings: ReplicaSettings, ranks: int, *, pickled: bool) -> str | None:
    """The reason why the model cannot be split among this many ranks and the remedy, or None."""
    if ranks == 1 or not config.model_type:
        return None
    if config.model_type not in FAMILIES or settings.model_provider == "transformers" or pickled:
        which = "models without safetensors" if pickled else f"{config.model_type} models"
        return f"{which} run in transformers, on one rank; set it to 1"
    heads = config.num_attention_heads
    if heads is None or config.intermediate_size is None:
        return None
    shape: Any = SimpleNamespace(**msgspec.structs.asdict(config))
    shape.num_key_value_heads = config.num_key_value_heads or heads
    problem = split_problem(shape, ranks)
    return problem and f"{problem}; choose another"


def check_length(config: ModelConfig, settings: ReplicaSettings, cache: KvCacheSettings) -> None:
    """Check that requests can be as long as configured, and can fill at least one block. Raises StartupError."""
    positions = config.max_position_embeddings
    longest = longest_request(settings.max_model_len, sys.maxsize if positions is None else positions)
    if positions is not None and cache.prefix_caching and cache.block_size >= longest:
        raise StartupError(
            f"block_size {cache.block_size}: no prompt of at most {longest} tokens fills a block, so nothing would "
            "be cached; lower it, or set --no-prefix-caching"
        )


def longest_request(configured: int, positions: int) -> int:
    """Maximum tokens of prompt plus answer that the setting (0: unset) and the model allow. Raises StartupError."""
    if configured == 1:
        raise StartupError("max_model_len 1: a prompt and its answer need at least two tokens; 0 uses the model's")
    if configured > positions:
        raise StartupError(f"max_model_len {configured} is more than the model's {positions} positions; lower it")
    return configured or positions


def least_tokens(longest: int) -> int:
    """Tokens that a KV pool must hold if requests may have `longest` tokens (0: any number)."""
    return min(longest or SHORT_REQUEST_TOKENS, SHORT_REQUEST_TOKENS)


def check_pool(config: ModelConfig, settings: ReplicaSettings, cache: KvCacheSettings) -> None:
    """Check that the configured KV memory can hold a short request. Raises StartupError, PoolTooSmall."""
    if cache.num_kv_blocks:
        tokens = (cache.num_kv_blocks - 1) * cache.block_size
        least = least_tokens(settings.max_model_len or config.max_position_embeddings or 0)
        if tokens < least:
            raise StartupError(
                f"num_kv_blocks {cache.num_kv_blocks}: the blocks besides the null block hold {tokens} tokens, but a "
                f"short request takes {least}; set at least {1 - -least // cache.block_size}, or a lower max_model_len"
            )
        return
    if cache.kv_cache_bytes and (least := _min_block_bytes(config, settings, cache)):
        blocks_that_fit(cache.kv_cache_bytes, least)


def check_host(config: ModelConfig, settings: ReplicaSettings, cache: KvCacheSettings) -> None:
    """Check that the host tier can be used, as far as the settings and the model's size tell. Raises StartupError."""
    if not cache.host_kv_memory:
        return
    if not cache.prefix_caching:
        raise StartupError("host_kv_memory: it keeps cached prefixes, and prefix_caching is off; set one or the other")
    host_slots(cache.host_kv_memory, _min_block_bytes(config, settings, cache) * settings.tensor_parallel_size or 1)


def host_slots(memory: int, block_bytes: int, available: int | None = None) -> int:
    """How many blocks of `block_bytes`, on all ranks together, a host tier of so much memory holds.

    `available`: bytes that the machine has left. Raises StartupError, which says what to set.
    """
    slots = memory // block_bytes
    if slots < LEAST_HOST_SLOTS:
        raise StartupError(
            f"host_kv_memory {memory:,}: it holds {slots} blocks of {block_bytes:,} bytes; set at least "
            f"{LEAST_HOST_SLOTS * block_bytes:,}, or 0 for no host tier"
        )
    if available is not None and memory > available:
        raise StartupError(
            f"host_kv_memory {memory:,}: the machine has {max(0, available):,} bytes left besides weights and KV pool; "
            "lower it, cpu_memory_utilization or the number of replicas"
        )
    return slots


def _min_block_bytes(config: ModelConfig, settings: ReplicaSettings, cache: KvCacheSettings) -> int:
    """Bytes of one block on one rank in the smallest dtype; 0 if the configuration lacks the values."""
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    width = config.head_dim or (config.hidden_size or 0) // (heads or 1)
    if not heads or not layers or not width:
        return 0
    return bytes_per_block(
        block_size=cache.block_size,
        kv_heads=config.num_key_value_heads or heads,
        head_dim=width,
        dtype_bytes=1 if settings.kv_cache_dtype == "fp8" else _MIN_DTYPE_BYTES,
        layers=layers,
        tensor_parallel_size=settings.tensor_parallel_size,
    )
