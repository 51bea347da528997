"""Names and shapes of the tensors that the native decoder reads, and names that it may ignore. Pure; no torch."""

from collections.abc import Collection, Mapping
from typing import Any

from ..load.weight_files import listed

#: Last name parts of tensors that are ignored without loss: tables that models compute themselves, and scales for
#: quantized activations and KV, which we do not quantize with them.
_HARMLESS = frozenset(
    ("inv_freq", "input_scale", "input_scale_ub", "output_scale", "q_scale", "k_scale", "v_scale", "prob_scale")
)
_HEAD = "lm_head.weight"
#: Most tensors of a wrong shape that a message lists.
_SHOWN = 3

Shape = tuple[int, ...]


def tensors_problem(config: Any, shapes: Mapping[str, Shape]) -> str | None:
    """The mismatch between a checkpoint's tensors and a native model of this (transformers) configuration, or None."""
    needed = needed_shapes(config)
    unused = shapes.keys() - needed.keys()
    if config.tie_word_embeddings:
        unused.discard(_HEAD)  # a copy of the embedding
    return shapes_problem(needed, shapes, unused)


def shapes_problem(
    needed: Mapping[str, Shape], shapes: Mapping[str, Shape], unused: Collection[str] = ()
) -> str | None:
    """The tensors that a checkpoint lacks, has in vain or has in a wrong shape, or None."""
    wrong = [
        f"{name} is {list(shapes[name])} instead of {list(shape)}"
        for name, shape in needed.items()
        if name in shapes and shapes[name] != shape
    ]
    more = [f"{len(wrong) - _SHOWN} other tensors have wrong shapes"] if len(wrong) > _SHOWN else []
    parts = [*filter(None, [mismatch(needed.keys() - shapes.keys(), unused)]), *wrong[:_SHOWN], *more]
    return "; ".join(parts) or None


def mismatch(missing: Collection[str], unused: Collection[str]) -> str | None:
    """A message about tensors that the checkpoint lacks and tensors that the model does not read, or None."""
    unused = [name for name in unused if name.rpartition(".")[2] not in _HARMLESS]
    parts = [f"the checkpoint lacks {listed(missing)}"] if missing else []
    if unused:
        parts.append(f"the model does not use the checkpoint's {listed(unused)}")
    return "; ".join(parts) or None


def needed_shapes(config: Any) -> dict[str, Shape]:
    """Names and shapes of all tensors that a model of this configuration needs."""
    hidden, kind = config.hidden_size, config.model_type
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    found: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        found[_HEAD] = (config.vocab_size, hidden)
    attention_bias = getattr(config, "attention_bias", False) if kind in ("llama", "qwen3", "qwen3_moe") else False
    inputs_bias = attention_bias or kind == "qwen2" or (kind == "qwen2_moe" and config.qkv_bias)
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}."
        for name, size in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            found |= _linear(f"{layer}self_attn.{name}", size, hidden, inputs_bias)
        found |= _linear(f"{layer}self_attn.o_proj", hidden, queries, attention_bias)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}{name}.weight"] = (hidden,)
        if kind in ("qwen3", "qwen3_moe"):
            found |= {f"{layer}self_attn.{name}.weight": (head_dim,) for name in ("q_norm", "k_norm")}
        found |= _feedforward(config, index, layer)
    return found


def _feedforward(config: Any, index: int, layer: str) -> dict[str, Shape]:
    kind, hidden = config.model_type, config.hidden_size
    if not is_mixture(config, index):
        biased = kind == "llama" and config.mlp_bias
        return _mlp(f"{layer}mlp.", ("gate_proj", "up_proj", "down_proj"), config.intermediate_size, hidden, biased)
    if kind == "mixtral":
        block, parts, count, size = (
            "block_sparse_moe.",
            ("w1", "w3", "w2"),
            config.num_local_experts,
            "intermediate_size",
        )
    else:
        block, parts, count = "mlp.", ("gate_proj", "up_proj", "down_proj"), config.num_experts
        size = "moe_intermediate_size"
    found: dict[str, Shape] = {f"{layer}{block}gate.weight": (count, hidden)}
    for expert in range(count):
        found |= _mlp(f"{layer}{block}experts.{expert}.", parts, getattr(config, size), hidden)
    if kind == "qwen2_moe":
        found |= _mlp(f"{layer}{block}shared_expert.", parts, config.shared_expert_intermediate_size, hidden)
        found[f"{layer}{block}shared_expert_gate.weight"] = (1, hidden)
    return found


def _mlp(
    prefix: str, parts: tuple[str, str, str], features: int, hidden: int, biased: bool = False
) -> dict[str, Shape]:
    """Tensors of the linears named `parts`: gate, up and down."""
    gate, up, down = (prefix + name for name in parts)
    widened = _linear(gate, features, hidden, biased) | _linear(up, features, hidden, biased)
    return widened | _linear(down, hidden, features, biased)


def _linear(name: str, outputs: int, inputs: int, biased: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (outputs, inputs)}
    return weight | {f"{name}.bias": (outputs,)} if biased else weight


def is_mixture(config: Any, layer: int) -> bool:
    """Whether a layer has experts, by the same rule as transformers' model of the family."""
    if config.model_type == "mixtral":
        return True
    if config.model_type not in ("qwen2_moe", "qwen3_moe") or layer in config.mlp_only_layers:
        return False
    return bool(config.num_experts) and (layer + 1) % config.decoder_sparse_step == 0
