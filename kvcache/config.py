"""Settings of the block pool and the prefix cache. Joined with the other rooms' in `cluster/config.py`."""

from typing import Annotated

import msgspec
from msgspec import Meta

from .eviction import EvictionName
from .hashing import HashAlgorithm


class KvCacheSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How KV memory is divided and shared."""

    block_size: Annotated[int, Meta(ge=1, le=256, description="tokens per KV block")] = 16
    hash_algorithm: Annotated[HashAlgorithm, Meta(description="block hash; hits are verified with either")] = "xxh3_128"
    prefix_caching: Annotated[bool, Meta(description="keep finished requests' blocks for reuse")] = True
    partial_block_reuse: Annotated[
        bool, Meta(description="copy the leading tokens of a cached block that a prompt leaves midway")
    ] = True
    eviction: Annotated[
        EvictionName,
        Meta(description="which cached block goes first when room is needed: the longest idle, or the least promising"),
    ] = "hit-density"
    kv_cache_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="KV memory of one rank in bytes; 0: what cpu_ or gpu_memory_utilization gives",
        ),
    ] = 0
    cpu_memory_utilization: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="share of the memory that is free once a rank has loaded its weights, for the KV of all ranks "
            "of the machine on CPUs; pages are taken when they are first used",
        ),
    ] = 0.4
    gpu_memory_utilization: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="share of a rank's GPU, or of its part of one (gpus_per_rank below 1), that weights, graphs, "
            "the largest step (it is run to see) and KV take together; the rest is for the driver and NCCL",
        ),
    ] = 0.9
    num_kv_blocks: Annotated[int, Meta(ge=0, description="number of KV blocks; 0: what fits into kv_cache_bytes")] = 0
    pin_tenant_share: Annotated[
        float, Meta(ge=0, le=1, description="share of the KV blocks that one tenant may pin; 0: pins are refused")
    ] = 0.1
    pin_total_share: Annotated[
        float, Meta(ge=0, le=1, description="share of the KV blocks that all tenants together may pin")
    ] = 0.5
