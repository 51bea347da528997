"""Block hashes, block pool, prefix cache. Without torch, zmq or ray, so that the router shares the hashing."""

from .adapter import adapter_digest
from .config import KvCacheSettings
from .errors import AdapterUnreadable, KvCacheError, PoolTooSmall, StaleMatch
from .eviction import EvictionName, EvictionPolicy, Lru, eviction_policy
from .hashing import (
    HASH_BYTES,
    TOKEN_BYTES,
    BlockHash,
    BlockHasher,
    CacheIdentity,
    HashAlgorithm,
    canonical,
    join_hashes,
    model_root,
    split_hashes,
    tenant_root,
    token_array,
    token_bytes,
    wire_hash,
    wire_hashes,
)
from .media import MediaItem, block_extras
from .partial_match import PartialHit
from .pins import PinBook, PinLimits, PinStats
from .pool import TRANSITIONS, Block, BlockId, BlockState, Transition
from .prefix_cache import CachedBlock, CacheListener, CacheStats, PrefixCache, PrefixMatch
from .sizing import MemoryReading, blocks_that_fit, bytes_per_block, kv_budget_bytes, kv_heads_per_rank

__all__ = [
    "HASH_BYTES",
    "TOKEN_BYTES",
    "TRANSITIONS",
    "AdapterUnreadable",
    "Block",
    "BlockHash",
    "BlockHasher",
    "BlockId",
    "BlockState",
    "CacheIdentity",
    "CacheListener",
    "CacheStats",
    "CachedBlock",
    "EvictionName",
    "EvictionPolicy",
    "HashAlgorithm",
    "KvCacheError",
    "KvCacheSettings",
    "Lru",
    "MediaItem",
    "MemoryReading",
    "PartialHit",
    "PinBook",
    "PinLimits",
    "PinStats",
    "PoolTooSmall",
    "PrefixCache",
    "PrefixMatch",
    "StaleMatch",
    "Transition",
    "adapter_digest",
    "block_extras",
    "blocks_that_fit",
    "bytes_per_block",
    "canonical",
    "eviction_policy",
    "join_hashes",
    "kv_budget_bytes",
    "kv_heads_per_rank",
    "model_root",
    "split_hashes",
    "tenant_root",
    "token_array",
    "token_bytes",
    "wire_hash",
    "wire_hashes",
]
