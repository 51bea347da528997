"""vLLM's own `KVCacheManager` on a CPU: requests in, its events out. Needs vLLM 0.33, but no model and no GPU.

Also used by `tests/bench/core.py` for comparison.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from vllm.distributed.kv_events import KVEventBatch
from vllm.envs import enable_envs_cache
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

__all__ = ["KVEventBatch", "admit", "batches", "cached", "enable_envs_cache", "hasher", "life", "manager", "request"]

Hasher = Callable[[Any], list[bytes]]


def hasher(algorithm: str, block_size: int) -> Hasher:
    """vLLM's function that hashes a request's new full blocks with `sha256`, `xxhash`, …"""
    function = get_hash_fn_by_name(algorithm)
    init_none_hash(function)
    return get_request_block_hasher(block_size, function)


def manager(num_blocks: int, block_size: int, *, events: bool, max_tokens: int = 65_536) -> KVCacheManager:
    """A manager with one full-attention group."""
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return KVCacheManager(
        config,
        max_model_len=max_tokens,
        scheduler_block_size=block_size,
        hash_block_size=block_size,
        enable_caching=True,
        enable_kv_cache_events=events,
    )


def request(name: str, tokens: Sequence[int], hash_blocks: Hasher | None, salt: str | None = None) -> Request:
    """A request as the scheduler sees it; its blocks are hashed when it is created."""
    params = SamplingParams(max_tokens=10_000)
    return Request(name, list(tokens), params, None, arrival_time=0.0, block_hasher=hash_blocks, cache_salt=salt)


def admit(cache: KVCacheManager, asked: Request) -> None:
    """Look up a prompt, allocate its slots and mark it as computed, as one scheduler step does."""
    found, computed, _ = cache.get_computed_blocks(asked)
    slots = cache.allocate_slots(asked, asked.num_tokens - computed, computed, found)
    assert slots is not None, f"no free blocks for {asked.request_id}"
    asked.num_computed_tokens = asked.num_tokens


def cached(cache: KVCacheManager) -> set[int]:
    """Wire hashes of the distinct cached blocks, truncated as vLLM does."""
    hashes = (block.block_hash for block in cache.block_pool.blocks if block.block_hash is not None)
    return {int.from_bytes(key[:-4][-8:], "big") for key in hashes}  # the last four bytes are the group id


def life(cache: KVCacheManager, hash_blocks: Hasher) -> Iterator[str]:
    """Everything that can happen to cached blocks, one thing at a time; yields a name for each."""
    first, twin = (request(name, range(16), hash_blocks) for name in ("first", "twin"))
    admit(cache, first)
    yield "a prompt of four blocks"
    admit(cache, twin)
    yield "the same prompt while the first runs"
    for token in range(100, 108):
        cache.allocate_slots(first, 1)
        first.append_output_token_ids(token)
        first.num_computed_tokens = first.num_tokens
    yield "two blocks are generated"
    cache.free(first)
    cache.free(twin)
    yield "both end"
    salted = request("salted", range(16), hash_blocks, salt="tenant-a")
    admit(cache, salted)
    cache.free(salted)
    yield "the same prompt under a salt"
    large = request("large", range(1000, 1000 + 48), hash_blocks)
    admit(cache, large)
    yield "a prompt that evicts"
    cache.free(large)
    assert cache.reset_prefix_cache(), "blocks are still in use"
    yield "a reset"
    admit(cache, request("last", range(16), hash_blocks))
    yield "life after a reset"


def batches() -> Iterator[tuple[str, KVEventBatch, list[int]]]:
    """The life as named batches, each with the blocks cached after it; steps without events are left out."""
    hash_blocks = hasher("sha256", 4)
    cache = manager(16, 4, events=True)
    for number, name in enumerate(life(cache, hash_blocks)):
        events = cache.take_events()
        if events:
            yield name, KVEventBatch(ts=2000.0 + number, events=events), sorted(cached(cache))
