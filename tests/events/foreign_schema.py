"""Typed readers of other engines: the fields, types and order of vLLM 0.33's and SGLang 0.5.23's structs.

`make compat` checks vLLM's structs here against the real ones.
"""

from collections.abc import Iterable
from typing import Any

import msgspec


class _Event(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class BlockStored(_Event):
    """vLLM's `BlockStored`."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(_Event):
    """vLLM's `BlockRemoved`."""

    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(_Event):
    """`AllBlocksCleared`, the same in all engines."""


class VllmBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """vLLM's `KVEventBatch`."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class SglangStored(_Event, tag="BlockStored"):
    """SGLang's `BlockStored`: hashes are ints, and trailing fields are optional."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class SglangRemoved(_Event, tag="BlockRemoved"):
    """SGLang's `BlockRemoved`."""

    block_hashes: list[int]
    medium: str | None = None


class SglangBatch(msgspec.Struct, array_like=True):
    """SGLang's `KVEventBatch`."""

    ts: float
    events: list[SglangStored | SglangRemoved | AllBlocksCleared]
    attn_dp_rank: int | None = None


def fields(event: msgspec.Struct, wanted: Iterable[str]) -> dict[str, Any]:
    """The wanted fields of an event; `type` is its tag."""
    tag = event.__struct_config__.tag
    return {name: tag if name == "type" else getattr(event, name) for name in wanted}
