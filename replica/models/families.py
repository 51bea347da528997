"""Which families the native decoder runs, and over how many ranks a model of theirs can be split. No torch."""

from typing import Protocol

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class Divisible(Protocol):
    """What of a configuration is divided among ranks."""

    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...


def split_problem(config: Divisible, ranks: int) -> str | None:
    """Why a model of this configuration cannot be split over so many ranks, or None."""
    for what, count in (("attention heads", config.num_attention_heads), ("MLP features", config.intermediate_size)):
        if count % ranks:
            return f"{count} {what} do not divide by {ranks} ranks"
    kv_heads = config.num_key_value_heads
    if kv_heads % ranks and ranks % kv_heads:
        return f"{kv_heads} KV heads neither divide by {ranks} ranks nor the other way round"
    return None
