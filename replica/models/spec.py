"""The properties of a loaded model that the engine needs. Plain values: no torch, no weights."""

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class KvShape:
    """Keys and values of one token in one layer, on one rank."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(slots=True, frozen=True)
class ModelSpec:
    """One rank's share of a model. Layers may differ in shape, as in a few of transformers' models."""

    kv_shapes: tuple[KvShape, ...]  #: one per layer, of this rank
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    dtype: str  #: float32, bfloat16 or float16; of weights and KV
    dtype_bytes: int

    @property
    def layers(self) -> int:
        return len(self.kv_shapes)

    @property
    def kv_heads(self) -> int:
        """KV heads of the first layer on this rank."""
        return self.kv_shapes[0].kv_heads

    @property
    def head_dim(self) -> int:
        """Key dimension of the first layer."""
        return self.kv_shapes[0].key_dim

    def bytes_per_block(self, block_size: int) -> int:
        """KV memory of one block over all layers, on this rank."""
        return block_size * self.dtype_bytes * sum(shape.elements for shape in self.kv_shapes)
