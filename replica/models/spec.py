"""The properties of a loaded model that the engine needs, and the native decoder's limits. No torch, no weights."""

from dataclasses import dataclass, replace
from typing import Any

DTYPE_NAMES = ("float32", "bfloat16", "float16")
#: The dtype of FP8 KV.
FP8 = "float8_e4m3fn"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe")
#: Configuration fields with the MLP sizes that are split over ranks; each family has some of them.
_FEATURES = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


@dataclass(slots=True, frozen=True)
class KvShape:
    """Shape of one token's keys and values in one layer, on one rank."""

    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(slots=True, frozen=True)
class ModelSpec:
    """The properties of one rank's share of a model. KV shapes may differ by layer, as in a few transformers models."""

    kv_shapes: tuple[KvShape, ...]  #: one per layer, for this rank
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    dtype: str  #: float32, bfloat16 or float16: the dtype of weights, and of KV unless `kv_dtype` is set
    dtype_bytes: int  #: bytes per KV element
    hidden_size: int = 0  #: size of the last hidden states, used for embeddings; 0: the model does not expose them
    query_heads: int = 0  #: on this rank; 0: not known before a step
    kv_dtype: str = ""

    def with_kv(self, kind: str) -> "ModelSpec":
        """This spec with the KV dtype that the setting `kv_cache_dtype` selects."""
        return self if kind == "auto" else replace(self, kv_dtype=FP8, dtype_bytes=1)

    def bytes_per_block(self, block_size: int) -> int:
        """KV bytes of one block over all layers, on this rank."""
        elements = sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in self.kv_shapes)
        return block_size * self.dtype_bytes * elements


def auto_dtype(stored: str | None, *, cuda: bool, multiplies_bfloat16: bool) -> str:
    """The dtype in which a checkpoint of dtype `stored` runs if none is set: its own, or float32.

    On CPUs, float16 is always slow, and bfloat16 is slow on processors that cannot multiply it.
    """
    served = DTYPE_NAMES if cuda else ("bfloat16",) if multiplies_bfloat16 else ()
    return stored if stored is not None and stored in served else "float32"


def split_problem(config: Any, ranks: int) -> str | None:
    """The reason why a model of this (transformers) configuration cannot be split over `ranks` ranks, or None."""
    if config.num_attention_heads % ranks:
        return f"{config.num_attention_heads} attention heads do not divide by {ranks} ranks"
    for name in _FEATURES:
        count = getattr(config, name, None) or 0
        if count % ranks:
            return f"{count} MLP features ({name}) do not divide by {ranks} ranks"
    kv_heads = config.num_key_value_heads
    if kv_heads % ranks and ranks % kv_heads:
        return f"{kv_heads} KV heads are neither a multiple nor a divisor of {ranks} ranks"
    return None
