"""Settings of the block pool and the prefix cache. `cluster/config.py` joins them with the other packages' settings."""

from typing import Annotated

import msgspec
from msgspec import Meta

from .hashing import HashAlgorithm


class KvCacheSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How KV memory is divided and shared."""

    block_size: Annotated[int, Meta(ge=1, le=256), "tokens per KV block"] = 16
    hash_algorithm: Annotated[HashAlgorithm, "hash of blocks"] = "xxh3_128"
    prefix_caching: Annotated[bool, "keep the blocks of finished requests"] = True
    partial_block_reuse: Annotated[bool, "reuse the first tokens of a block that matches in part"] = True
    kv_cache_bytes: Annotated[int, Meta(ge=0), "KV memory of a rank; 0: by the utilization settings"] = 0
    cpu_memory_utilization: Annotated[
        float,
        Meta(gt=0, le=1),
        "KV's share of the memory that is free after loading, all ranks together",
    ] = 0.4
    gpu_memory_utilization: Annotated[
        float,
        Meta(gt=0, le=1),
        "share of a rank's GPU for weights, KV and steps",
    ] = 0.9
    num_kv_blocks: Annotated[int, Meta(ge=0), "KV blocks of a replica; 0: by kv_cache_bytes"] = 0
    host_kv_memory: Annotated[
        int,
        Meta(ge=0),
        "host memory of a replica for evicted KV blocks, all ranks together; 0: none",
    ] = 0
    disk_kv: Annotated[str, "folder for KV blocks that survive a restart; empty: none"] = ""
    disk_kv_size: Annotated[int, Meta(ge=0), "bytes that a replica uses in that folder"] = 0
    pin_tenant_share: Annotated[float, Meta(ge=0, le=1), "share of the blocks that one tenant may pin"] = 0.1
    pin_total_share: Annotated[float, Meta(ge=0, le=1), "share of the blocks that all tenants may pin"] = 0.5
