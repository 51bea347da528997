"""The families that the native decoder runs, and the numbers of ranks that can share a model. Knows no torch."""

from typing import Protocol

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe")
#: Sizes of the MLPs that ranks share; each family's configuration has some of them.
_FEATURES = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


class Divisible(Protocol):
    """The heads in a configuration, which are divided among ranks."""

    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...


def split_problem(config: Divisible, ranks: int) -> str | None:
    """Why a model of this configuration cannot be split over `ranks` ranks, or None."""
    if config.num_attention_heads % ranks:
        return f"{config.num_attention_heads} attention heads do not divide by {ranks} ranks"
    for name in _FEATURES:
        count = getattr(config, name, None) or 0
        if count % ranks:
            return f"{count} MLP features ({name}) do not divide by {ranks} ranks"
    kv_heads = config.num_key_value_heads
    if kv_heads % ranks and ranks % kv_heads:
        return f"{kv_heads} KV heads neither divide by {ranks} ranks nor the other way round"
    return None
