"""Recognises quantized checkpoints by config.json and the headers of their weights. Pure: no files, no torch.

FP8 weights with scales are dequantized while they are read. MXFP4 is dequantized by transformers. Any other
quantization is refused with the reason.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .weight_files import TensorHeader, listed

#: Methods whose weights are FP8 with scales. The last two also cover other types, which are refused.
_FP8_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "modelopt")
MXFP4 = "mxfp4"
_FP8_DTYPES = ("F8_E4M3", "F8_E5M2")
#: Rows and columns of a block with its own scale: the only size that torch's `scaled_mm` supports.
BLOCK = 128
_PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
_STRATEGIES = ("tensor", "channel", "block")
#: Suffixes that turn a weight's name into that of its scales. Both kinds are factors, even the "inverse" one.
_SCALES = ("_scale", "_scale_inv")
ORIGINAL = "choose the original model, on a CPU with --quantization int8 to save memory"


@dataclass(slots=True, frozen=True)
class Scaling:
    """How a matrix of 8-bit numbers (or one per expert) is multiplied by its scales, each of which covers a block."""

    scales: str  #: name of the tensor with the scales
    block: tuple[int, int]  #: [rows, columns]

    def by_row(self, shape: Sequence[int]) -> bool:
        """Whether a matrix of this shape has one scale, or one per row."""
        return self.block[1] == shape[1] and self.block[0] in (1, shape[0])


def kept_problem(dtype: str, shape: Sequence[int], scaling: Scaling, starts: Iterable[int]) -> str | None:
    """Why a matrix cannot be multiplied in 8 bits, or None. `starts`: first rows and columns of the ranks' parts.

    `dtype`: as safetensors writes it. Whether torch multiplies it on a device is found by a trial at load.
    """
    if dtype != "F8_E4M3":
        return f"weights of {dtype}"
    if scaling.by_row(shape):
        return None
    if scaling.block != (BLOCK, BLOCK):
        return "blocks of {} by {}".format(*scaling.block)
    return f"ranks cut blocks of {BLOCK} by {BLOCK}" if any(start % BLOCK for start in starts) else None


def declared(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `quantization_config` of a config.json, at the top or in the text model of a model that accepts images."""
    text = config.get("text_config")
    found = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    return found if isinstance(found, dict) else {}


def method_problem(config: Mapping[str, Any]) -> str | None:
    """Why a model with this config.json cannot be served in its quantization; None if it can."""
    quantization = declared(config)
    if not quantization:
        return None
    method = quantization.get("quant_method") or "an unnamed method"
    if method not in (*_FP8_METHODS, MXFP4):
        return f"the weights are quantized ({method}), which homing cannot run; {ORIGINAL}"
    other = None
    if method == "modelopt" and not str(algorithm := quantization.get("quant_algo")).startswith("FP8"):
        other = f"quant_algo {algorithm}"
    if method == "compressed-tensors":
        other = _compressed_problem(quantization)
    return other and f"the weights are quantized ({method}, {other}), but homing only runs FP8; {ORIGINAL}"


def _compressed_problem(quantization: Mapping[str, Any]) -> str | None:
    sparsity = (quantization.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        return f"sparsity {sparsity}"
    if quantization.get("transform_config"):
        return "with transforms of activations"
    schemes = _weight_schemes(quantization)
    if not schemes:
        return f"format {quantization.get('format')}"
    for scheme in schemes:
        found = tuple(scheme.get(name) for name in ("type", "num_bits", "strategy"))
        if found[:2] != ("float", 8) or found[2] not in _STRATEGIES or not scheme.get("symmetric", True):
            return "weights {} {} by {}".format(*found)
    return None


def _weight_schemes(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = (quantization.get("config_groups") or {}).values()
    return [group["weights"] for group in groups if isinstance(group, dict) and group.get("weights")]


def block_sizes(config: Mapping[str, Any]) -> set[tuple[int, int]]:
    """The sizes [rows, columns] of the blocks with one scale each, as a config.json declares them."""
    quantization = declared(config)
    sizes = [quantization.get("weight_block_size"), *(s.get("block_structure") for s in _weight_schemes(quantization))]
    return {(size[0], size[1]) for size in sizes if isinstance(size, list) and len(size) == 2}


def scalings(
    tensors: Mapping[str, TensorHeader], blocks: Iterable[tuple[int, int]]
) -> tuple[dict[str, Scaling], str | None]:
    """How to dequantize each quantized weight, by name; and why some cannot be, or None."""
    found: dict[str, Scaling] = {}
    unknown: list[str] = []
    blocks = tuple(blocks)
    for name, header in tensors.items():
        if not _is_quantized(name, header):
            continue
        scaling = _scaling(name, header, tensors, blocks) if header.dtype in _FP8_DTYPES else None
        if scaling is None:
            unknown.append(f"{name} [{header.dtype}]")
        else:
            found[name] = scaling
    if not unknown:
        return found, None
    return found, f"these weights are quantized in a way that homing cannot run: {listed(unknown)}; {ORIGINAL}"


def dequantized(tensors: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """The tensors as they are held, if transformers dequantizes MXFP4: two bfloat16 numbers per byte, and no scales."""
    held: dict[str, TensorHeader] = {}
    for name, header in tensors.items():
        stem, _, kind = name.rpartition("_")
        if header.dtype != "U8" or not {f"{stem}_blocks", f"{stem}_scales"} <= tensors.keys():
            held[name] = header
        elif kind == "blocks":
            held[name] = TensorHeader(header.data_offsets, "BF16", (*header.shape, 2))
    return held


def _is_quantized(name: str, header: TensorHeader) -> bool:
    """Integer tensors count only if named like weights: other checkpoints hold masks and positions as integers."""
    if not header.dtype or header.dtype in _PLAIN_DTYPES or name.endswith(_SCALES):
        return False
    return header.dtype.startswith("F") or "weight" in name.rpartition(".")[2]


def _scaling(
    name: str, header: TensorHeader, tensors: Mapping[str, TensorHeader], blocks: tuple[tuple[int, int], ...]
) -> Scaling | None:
    scales = next((name + ending for ending in _SCALES if name + ending in tensors), None)
    if scales is None or len(header.shape) not in (2, 3):
        return None
    *experts, rows, columns = header.shape
    shape = tensors[scales].shape
    if experts and shape[:1] == tuple(experts):
        shape = shape[1:]  # the scales of one expert
    if shape in ((), (1,), (1, 1)):
        return Scaling(scales, (rows, columns))
    if shape in ((rows,), (rows, 1)):
        return Scaling(scales, (1, columns))
    if experts and shape == (1, columns):  # experts' matrices may be stored transposed
        return Scaling(scales, (rows, 1))
    fitting = [each for each in blocks if shape == (-(-rows // each[0]), -(-columns // each[1]))]
    return Scaling(scales, fitting[0]) if len(fitting) == 1 else None
