"""How many KV blocks fit into memory. Pure arithmetic: asks no device and knows no model but by its numbers."""

from dataclasses import dataclass

from .errors import PoolTooSmall


@dataclass(slots=True, frozen=True)
class MemoryReading:
    """One rank's device memory after it ran its largest steps, in bytes."""

    total_bytes: int
    free_bytes: int  #: unused now; this rank's allocator has returned what it kept for reuse
    held_bytes: int  #: by this rank for good: weights, tables, graphs
    peak_bytes: int  #: that the largest step took on top of it, for as long as it ran

    def share_bytes(self, utilization: float) -> int:
        """What this rank's KV may take of the memory that it was given; negative when that is too little."""
        return int(self.total_bytes * utilization) - self.held_bytes - self.peak_bytes


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


def kv_budget_bytes(reading: MemoryReading, utilization: float) -> int:
    """Bytes of one rank's memory that are left for KV; never negative.

    No more than its share of the device leaves, so that ranks that start side by side on one device cannot take what is
    another's, and no more than is free.
    """
    return max(0, min(reading.share_bytes(utilization), reading.free_bytes - reading.peak_bytes))


def host_kv_bytes(free_bytes: int, utilization: float) -> int:
    """Bytes of a machine's memory for the KV of one rank: at most `utilization` of what is free.

    Rounded down to three significant bits, so that replicas have equal pools although they look at different moments.
    """
    share = int(free_bytes * utilization)
    step = 1 << max(0, share.bit_length() - 3)
    return share // step * step


def blocks_that_fit(kv_bytes: int, block_bytes: int) -> int:
    """Blocks in `kv_bytes` of one rank, the null block included. All ranks of a replica use the smallest of theirs.

    Raises PoolTooSmall when not even one block besides the null block fits.
    """
    blocks = kv_bytes // block_bytes
    if blocks < 2:
        raise PoolTooSmall(
            f"{kv_bytes} bytes of KV memory hold {blocks} blocks of {block_bytes} bytes, at least 2 are needed: "
            "raise kv_cache_bytes, free memory or lower block_size"
        )
    return blocks
