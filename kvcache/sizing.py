"""How many KV blocks fit into memory. Pure arithmetic: queries no device and takes a model's dimensions as numbers."""

from dataclasses import dataclass

from .errors import PoolTooSmall


@dataclass(slots=True, frozen=True)
class MemoryReading:
    """One rank's device memory after it ran its largest steps, in bytes."""

    total_bytes: int
    free_bytes: int  #: unused now, after this rank's allocator returned its cached memory
    held_bytes: int  #: held permanently by this rank: weights, tables, graphs
    peak_bytes: int  #: additional temporary memory of the largest step

    def share_bytes(self, utilization: float) -> int:
        """Return the bytes of this rank's share that are left for KV; negative when the share is too small."""
        return int(self.total_bytes * utilization) - self.held_bytes - self.peak_bytes


def kv_heads_per_rank(kv_heads: int, tensor_parallel_size: int) -> int:
    """Return the number of KV heads per rank. With more ranks than heads, several ranks hold the same head.

    Raises ValueError when neither number is a multiple of the other.
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
    """Return the bytes of one block on one rank: keys and values of `block_size` tokens in all layers."""
    heads = kv_heads_per_rank(kv_heads, tensor_parallel_size)
    return 2 * block_size * heads * head_dim * dtype_bytes * layers


def kv_budget_bytes(reading: MemoryReading, utilization: float) -> int:
    """Return the bytes of one rank's memory that are available for KV; never negative.

    At most what remains of the rank's share, so that ranks that start together on one device cannot take each other's
    memory, and at most what is free.
    """
    return max(0, min(reading.share_bytes(utilization), reading.free_bytes - reading.peak_bytes))


def host_kv_bytes(free_bytes: int, utilization: float) -> int:
    """Return the bytes of a machine's memory for the KV of one rank: at most `utilization` of what is free.

    Rounded down to three significant bits, so that replicas that measure at different times get pools of equal size.
    """
    share = int(free_bytes * utilization)
    step = 1 << max(0, share.bit_length() - 3)
    return share // step * step


def blocks_that_fit(kv_bytes: int, block_bytes: int) -> int:
    """Return how many blocks (null block included) fit into one rank's `kv_bytes`. Replicas use their ranks' minimum.

    Raises PoolTooSmall when not even one block besides the null block fits.
    """
    blocks = kv_bytes // block_bytes
    if blocks < 2:
        raise PoolTooSmall(
            f"{kv_bytes} bytes of KV memory hold {blocks} blocks of {block_bytes} bytes, but at least 2 are needed: "
            "raise kv_cache_bytes, free memory or lower block_size"
        )
    return blocks
