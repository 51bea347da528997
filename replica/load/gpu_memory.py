"""Checks before anything is loaded whether the weights of each rank fit on a GPU. Reads only headers; no torch.

Without this check, replicas would load for minutes and then all run out of memory.
"""

from collections.abc import Sequence
from math import prod
from pathlib import Path

from ..config import ReplicaSettings
from ..errors import StartupError
from ..models.spec import auto_dtype
from .preflight import DTYPE_BYTES, rank_problem, read_config
from .quantized import dequantized
from .weight_files import TensorHeader, are_pickled, tensors_in

_GIB = 1 << 30
#: Parts of multimodal checkpoints that no text model loads.
_NOT_TEXT = ("vision", "visual", "audio")


def check_gpu_memory(
    folder: Path,
    settings: ReplicaSettings,
    gpu_bytes: Sequence[int],
    *,
    gpus_per_rank: float = 1.0,
    utilization: float = 1.0,
) -> None:
    """Raise StartupError if the weights cannot fit; names the smallest number of ranks with which they would.

    `gpu_bytes`: the memory of each GPU of this machine; if they differ, the largest counts. `utilization`: the share of
    it that a rank may use (gpu_memory_utilization).
    """
    if not gpu_bytes:
        return
    share = int(max(gpu_bytes) * min(1.0, gpus_per_rank) * utilization)
    needed = least_weight_bytes(folder, settings, settings.tensor_parallel_size)
    if needed <= share:
        return
    config, pickled = read_config(folder), are_pickled(folder)
    ranks = next(
        (
            ranks
            for ranks in range(settings.tensor_parallel_size + 1, len(gpu_bytes) + 1)
            if rank_problem(config, settings, ranks, pickled=pickled) is None
            and least_weight_bytes(folder, settings, ranks) <= share
        ),
        None,
    )
    remedy = f"set tensor_parallel_size: {ranks}" if ranks else "choose a smaller model, or one with FP8 weights"
    raise StartupError(
        f"tensor_parallel_size {settings.tensor_parallel_size}: each rank's weights take at least "
        f"{needed / _GIB:.1f} GiB, but a rank may use {share / _GIB:.1f} GiB of a GPU "
        f"(gpu_memory_utilization {utilization:g}); {remedy}"
    )


def least_weight_bytes(folder: Path, settings: ReplicaSettings, ranks: int) -> int:
    """The least bytes of one of `ranks` ranks' weights on a GPU: 8-bit weights may be kept or dequantized.

    Ranks share all tensors but the embedding, which each holds; a tied head shares its memory. Raises UnsupportedModel,
    WeightsMissing, WeightsDamaged.
    """
    config = read_config(folder)
    if are_pickled(folder):
        return sum(path.stat().st_size for path in folder.glob("pytorch_model*.bin"))
    dtype: str = settings.dtype
    if dtype == "auto":
        dtype = auto_dtype(config.dtype or config.torch_dtype, cuda=True, multiplies_bfloat16=True)
    embedding = others = 0
    for name, tensor in dequantized(tensors_in(folder)).items():
        if name.endswith("embed_tokens.weight"):
            embedding += _bytes(tensor, dtype)
        elif not any(part in name for part in _NOT_TEXT):
            others += _bytes(tensor, dtype)
    return embedding + others // ranks


def _bytes(tensor: TensorHeader, dtype: str) -> int:
    """Bytes of a tensor on the device: in `dtype`, unless the file stores it quantized."""
    stored = tensor.data_offsets[1] - tensor.data_offsets[0]
    return prod(tensor.shape) * DTYPE_BYTES[dtype] if tensor.dtype in ("F32", "BF16", "F16") else stored
