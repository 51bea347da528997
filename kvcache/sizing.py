"""How many KV blocks fit into memory. Pure arithmetic: asks no device and knows no model but by its numbers."""

from .errors import PoolTooSmall


def kv_heads_per_rank(kv_heads: int, tensor_parallel_size: int) -> int:
    """KV heads that one rank holds; with more ranks than heads, each head is held by several ranks.

    Raises ValueError when heads and ranks do not divide.
    """
    larger, smaller = max(kv_heads, tensor_parallel_size), min(kv_heads, tensor_parallel_size)
    if smaller < 1 or larger % smaller:
        raise ValueError(f"{kv_heads} KV heads cannot be split over {tensor_parallel_size} tensor-parallel ranks")
    return max(1, kv_heads // tensor_parallel_size)


def bytes_per_block(
    *,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    dtype_bytes: int,
    layers: int,
    tensor_parallel_size: int = 1,
) -> int:
    """Bytes that one block takes on one rank: keys and values of `block_size` tokens in all layers."""
    heads = kv_heads_per_rank(kv_heads, tensor_parallel_size)
    return 2 * block_size * heads * head_dim * dtype_bytes * layers


def kv_budget_bytes(*, memory_bytes: int, utilization: float, weights_bytes: int, activation_bytes: int) -> int:
    """Bytes of one rank's memory that are left for KV; never negative."""
    return max(0, int(memory_bytes * utilization) - weights_bytes - activation_bytes)


def blocks_that_fit(kv_bytes: int, block_bytes: int) -> int:
    """Blocks in `kv_bytes` of one rank, the null block included. All ranks of a replica use the smallest of theirs.

    Raises PoolTooSmall when not even one block besides the null block fits.
    """
    blocks = kv_bytes // block_bytes
    if blocks < 2:
        raise PoolTooSmall(
            f"{kv_bytes} bytes of KV memory hold {blocks} blocks of {block_bytes} bytes, at least 2 are needed: "
            "raise kv_cache_bytes or lower block_size"
        )
    return blocks
