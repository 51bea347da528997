"""Compares the names and shapes in a checkpoint's headers with config.json, before anything is loaded. No torch.

Exact for the families of the native decoder whose configuration states every size. For other families, which only
transformers can build, it compares what they have in common: the token embedding and the number of layers.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from ..models.spec import FAMILIES
from ..models.tensor_names import Shape, needed_shapes, shapes_problem

#: Names of the token embedding in the families of transformers.
_EMBEDDING = re.compile(
    r"^(?:model\.|transformer\.|gpt_neox\.|decoder\.)*(?:embed_tokens|wte|embed_in|word_embeddings)\.weight$"
)
#: Names of a decoder layer's tensors; towers for images and audio have other prefixes.
_LAYER = re.compile(r"^(?:model\.|transformer\.|gpt_neox\.|decoder\.|backbone\.)*(?:layers|h|blocks)\.(\d+)\.")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WIDTH = ("word_embed_proj_dim", "hidden_size", "n_embd", "d_model", "dim")
#: Further layers that predict tokens ahead, which are not used.
_LAYERS_AHEAD = "num_nextn_predict_layers"


class NativeSizes(msgspec.Struct, kw_only=True):
    """The sizes in config.json that determine a native model's tensors; defaults are those of all its families."""

    model_type: str
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    num_hidden_layers: int
    vocab_size: int
    tie_word_embeddings: bool = False
    head_dim: int | None = None
    intermediate_size: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    qkv_bias: bool = True
    num_local_experts: int | None = None
    num_experts: int | None = None
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int | None = None
    mlp_only_layers: tuple[int, ...] | None = None
    decoder_sparse_step: int = 1


def headers_problem(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> str | None:
    """The mismatch between config.json and the tensors with these shapes, or None if none is found."""
    if config.get("model_type") in FAMILIES and (sizes := _native_sizes(config, shapes)) is not None:
        try:
            needed = {name: shape for name, shape in needed_shapes(sizes).items() if None not in shape}
        except TypeError:  # a size that this family needs is not stated
            needed = {}
        if problem := shapes_problem(needed, shapes):
            return problem
    return _common_problem({**config, **(config.get("text_config") or {})}, shapes)


def _native_sizes(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> NativeSizes | None:
    """The sizes; None if config.json leaves one to the family's own default."""
    heads = {} if config["model_type"] != "llama" else {"num_key_value_heads": config.get("num_attention_heads")}
    given = {name: value for name, value in config.items() if value is not None}
    try:
        sizes = msgspec.convert({**heads, **given}, NativeSizes)
    except msgspec.ValidationError:
        return None
    if sizes.model_type in ("qwen3", "qwen3_moe") and sizes.head_dim is None:
        return None
    if "tie_word_embeddings" not in given:
        sizes.tie_word_embeddings = "lm_head.weight" not in shapes
    sizes.mlp_only_layers = sizes.mlp_only_layers or ()
    return sizes


def _common_problem(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> str | None:
    layers, width, vocabulary = _size(config, _LAYERS), _size(config, _WIDTH), _size(config, ("vocab_size",))
    parts = []
    held = {int(found[1]) for name in shapes if (found := _LAYER.match(name))}
    if held and layers:
        missing = sorted(set(range(layers)) - held)
        if missing:
            parts.append(f"config.json has {layers} layers, and the checkpoint lacks layer {missing[0]}")
        elif max(held) >= layers + (_size(config, (_LAYERS_AHEAD,)) or 0):
            parts.append(f"config.json has {layers} layers, and the checkpoint {max(held) + 1}")
    for name, shape in shapes.items():
        if _EMBEDDING.match(name) and len(shape) == 2 and width and vocabulary and shape != (vocabulary, width):
            parts.append(f"{name} is {list(shape)} instead of {[vocabulary, width]}")
    return "; ".join(parts) or None


def _size(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    found = next((config[name] for name in names if config.get(name) is not None), None)
    return found if isinstance(found, int) else None
