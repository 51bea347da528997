"""Names of the tensors that the native decoder reads, and of those that it may ignore. Pure; no torch."""

from collections.abc import Collection, Iterator
from typing import Any

from ..load.weight_files import listed

#: Last name parts of tensors that are ignored without loss: tables that models compute themselves, and scales for
#: quantized activations and KV, which we do not quantize with them.
_HARMLESS = frozenset(
    ("inv_freq", "input_scale", "input_scale_ub", "output_scale", "q_scale", "k_scale", "v_scale", "prob_scale")
)
_HEAD = "lm_head.weight"


def names_problem(config: Any, names: Collection[str]) -> str | None:
    """The mismatch between a checkpoint's tensors and a native model of this (transformers) configuration, or None."""
    needed = set(needed_names(config))
    unused = needed.symmetric_difference(names) - needed
    if config.tie_word_embeddings:
        unused.discard(_HEAD)  # a copy of the embedding
    return mismatch(needed.difference(names), unused)


def mismatch(missing: Collection[str], unused: Collection[str]) -> str | None:
    """A message about tensors that the checkpoint lacks and tensors that the model does not read, or None."""
    unused = [name for name in unused if name.rpartition(".")[2] not in _HARMLESS]
    parts = [f"the checkpoint lacks {listed(missing)}"] if missing else []
    if unused:
        parts.append(f"the model does not use the checkpoint's {listed(unused)}")
    return "; ".join(parts) or None


def needed_names(config: Any) -> Iterator[str]:
    """Names of all tensors that a model of this configuration needs."""
    yield from ("model.embed_tokens.weight", "model.norm.weight")
    if not config.tie_word_embeddings:
        yield _HEAD
    kind = config.model_type
    attention_bias = getattr(config, "attention_bias", False) if kind in ("llama", "qwen3", "qwen3_moe") else False
    inputs_bias = attention_bias or kind == "qwen2" or (kind == "qwen2_moe" and config.qkv_bias)
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}."
        for name in ("q_proj", "k_proj", "v_proj"):
            yield from _linear(f"{layer}self_attn.{name}", inputs_bias)
        yield from _linear(f"{layer}self_attn.o_proj", attention_bias)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if kind in ("qwen3", "qwen3_moe"):
            norms += ["self_attn.q_norm", "self_attn.k_norm"]
        yield from (f"{layer}{name}.weight" for name in norms)
        yield from _feedforward(config, index, layer)


def _feedforward(config: Any, index: int, layer: str) -> Iterator[str]:
    kind, parts = config.model_type, ("gate_proj", "up_proj", "down_proj")
    if not is_mixture(config, index):
        for name in parts:
            yield from _linear(f"{layer}mlp.{name}", kind == "llama" and config.mlp_bias)
        return
    block, count = ("mlp.", 0) if kind != "mixtral" else ("block_sparse_moe.", config.num_local_experts)
    if kind == "mixtral":
        parts = ("w1", "w2", "w3")
    else:
        count = config.num_experts
    yield f"{layer}{block}gate.weight"
    yield from (f"{layer}{block}experts.{expert}.{name}.weight" for expert in range(count) for name in parts)
    if kind == "qwen2_moe":
        yield from (f"{layer}{block}shared_expert.{name}.weight" for name in parts)
        yield f"{layer}{block}shared_expert_gate.weight"


def _linear(name: str, biased: bool) -> tuple[str, ...]:
    return (f"{name}.weight", f"{name}.bias") if biased else (f"{name}.weight",)


def is_mixture(config: Any, layer: int) -> bool:
    """Whether a layer has experts, by the same rule as transformers' model of the family."""
    if config.model_type == "mixtral":
        return True
    if config.model_type not in ("qwen2_moe", "qwen3_moe") or layer in config.mlp_only_layers:
        return False
    return bool(config.num_experts) and (layer + 1) % config.decoder_sparse_step == 0
