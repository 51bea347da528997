"""How many numbers of each tensor of a checkpoint one rank holds, and which stay in 8 bits. Pure: no files, no torch.

It follows the loaders: `models/native.py`, which splits a model among ranks, and `models/hf.py`, which runs on one.
"""

import re
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from .quantized import BLOCK, Scaling, kept_problem
from .weight_files import TensorHeader

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
#: Parts of multimodal checkpoints that no text model loads.
_NOT_TEXT = ("vision", "visual", "audio", "multi_modal_projector")
#: Layers that predict tokens ahead, which transformers' models ignore, if they are not numbered after the decoder's.
_AHEAD = re.compile(r"(?:^|\.)mtp(?:_\w+)?\.")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_KEYS = re.compile(r"\.[kv]_proj\.(?:weight|bias)$")
#: What each rank holds as a whole besides vectors: embeddings, and the weights that choose experts.
_WHOLE = re.compile(r"(?:embed_tokens|\.gate|\.shared_expert_gate)\.weight$")
#: Biases that are split with the outputs of their linear; those of other linears are added by rank 0 alone.
_SPLIT_BIAS = re.compile(r"\.(?:q|gate|up)_proj\.bias$")
#: Linears with the same input that the native decoder fuses: all of them stay in 8 bits, or none does.
_FUSED = re.compile(r"\.(?:(?P<attention>[qkv])|(?:gate|up))_proj\.weight$")


def is_expert(name: str) -> bool:
    return ".experts." in name


def tied_head(config: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """The checkpoint's copies of the embedding that are not loaded because config.json ties the head to it."""
    tied = _text(config).get("tie_word_embeddings")
    return {name for name in names if name.endswith(HEAD)} if tied else set()


def held_numbers(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], ranks: int) -> dict[str, int]:
    """Numbers of each tensor on the rank with the most, by name; tensors that no text model loads are left out.

    `config`: config.json. With fewer KV heads than ranks, some ranks hold the same head.
    """
    text = _text(config)
    layers = text.get("num_hidden_layers")
    found = {}
    for name, shape in shapes.items():
        layer = _LAYER.search(name)
        ahead = _AHEAD.search(name) or (layer and isinstance(layers, int) and int(layer[1]) >= layers)
        if ahead or any(part in name for part in _NOT_TEXT):
            continue
        parts = _parts(text, name, shape, ranks)
        found[name] = -(-shape[0] // parts) * prod(shape[1:]) if name.endswith(HEAD) else -(-prod(shape) // parts)
    return found


def kept_in_8_bits(
    config: Mapping[str, Any], tensors: Mapping[str, TensorHeader], scalings: Mapping[str, Scaling], ranks: int
) -> set[str]:
    """Names of the FP8 weights that the native decoder may keep on a GPU; it dequantizes all others for certain."""
    text = _text(config)
    found: dict[str, list[str]] = {}
    for name in tensors:
        fused = _FUSED.search(name)
        group = name if fused is None else f"{name[: fused.start()]} {'qkv' if fused['attention'] else 'gate_up'}"
        found.setdefault(group, []).append(name)
    kept: set[str] = set()
    for names in found.values():
        by_row = set()
        for name in names:
            shape, scaling = tensors[name].shape, scalings.get(name)
            if scaling is None or len(shape) != 2 or is_expert(name) or name.endswith((EMBEDDING, HEAD)):
                break
            parts = _parts(text, name, shape, ranks)
            by_columns = name.endswith(("o_proj.weight", "down_proj.weight"))
            width = shape[1 if by_columns else 0] // parts
            # The second rank's part starts at `width`. Fused parts must end with a block as well.
            start = width if parts > 1 else 0
            if kept_problem(tensors[name].dtype, shape, scaling, (start,)) is not None:
                break
            by_row.add(scaling.by_row(shape))
            if len(names) > 1 and not scaling.by_row(shape) and width % BLOCK:
                break
        else:
            kept.update(names if len(by_row) == 1 else ())
    return kept


def _parts(text: Mapping[str, Any], name: str, shape: tuple[int, ...], ranks: int) -> int:
    """The number of equal parts of a tensor of which each rank holds one."""
    if _KEYS.search(name):
        heads = text.get("num_key_value_heads") or text.get("num_attention_heads")
        return min(ranks, heads) if isinstance(heads, int) else ranks
    if _WHOLE.search(name) or (len(shape) <= 1 and not _SPLIT_BIAS.search(name)):
        return 1
    return ranks


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**config, **(config.get("text_config") or {})}
