"""Settings of the block pool and the prefix cache. `cluster/config.py` joins them with the other packages' settings."""

from typing import Annotated

import msgspec
from msgspec import Meta

from .hashing import HashAlgorithm


class KvCacheSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How KV memory is divided and shared."""

    block_size: Annotated[int, Meta(ge=1, le=256), "tokens per KV block"] = 16
    hash_algorithm: Annotated[HashAlgorithm, "block hash; hits are always verified"] = "xxh3_128"
    prefix_caching: Annotated[bool, "keep finished requests' blocks for reuse"] = True
    partial_block_reuse: Annotated[
        bool, "also reuse the matching leading tokens of a cached block whose later tokens differ"
    ] = True
    kv_cache_bytes: Annotated[
        int, Meta(ge=0), "KV memory of one rank in bytes; 0: derived from cpu_ or gpu_memory_utilization"
    ] = 0
    cpu_memory_utilization: Annotated[
        float,
        Meta(gt=0, le=1),
        "share of the memory free after the weights are loaded that the KV of all ranks on the machine may take",
    ] = 0.4
    gpu_memory_utilization: Annotated[
        float,
        Meta(gt=0, le=1),
        "share of a rank's GPU, or of its part of one (gpus_per_rank below 1), for weights, graphs, KV and "
        "the largest step",
    ] = 0.9
    num_kv_blocks: Annotated[int, Meta(ge=0), "KV blocks; 0: as many as fit into kv_cache_bytes"] = 0
    pin_tenant_share: Annotated[
        float, Meta(ge=0, le=1), "share of the KV blocks that one tenant may pin; 0: refuse pins"
    ] = 0.1
    pin_total_share: Annotated[float, Meta(ge=0, le=1), "share of the KV blocks that all tenants together may pin"] = (
        0.5
    )
