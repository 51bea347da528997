"""Checks before anything is loaded whether the weights of each rank fit on a GPU. Reads only headers; no torch.

Without this check, replicas would load for minutes and then all run out of memory.
"""

from collections.abc import Sequence
from functools import partial
from math import prod
from pathlib import Path

from ..config import ReplicaSettings
from ..errors import StartupError
from ..models.spec import FAMILIES, auto_dtype
from .preflight import DTYPE_BYTES, check_quantization, rank_problem, raw_config, read_config
from .quantized import Scaling, dequantized
from .rank_weights import held_numbers, kept_in_8_bits, tied_head
from .weight_files import TensorHeader, are_pickled, tensors_in

_GIB = 1 << 30
#: Safetensors' names of the dtypes that are converted to the model's when they are loaded.
_FLOATS = ("F64", "F32", "F16", "BF16")
#: The lowest compute capabilities with products of FP8: with one scale per row, and with one per block.
BY_ROW, BY_BLOCK = (8, 9), (9, 0)

Capability = tuple[int, int]


def check_gpu_memory(
    folder: Path,
    settings: ReplicaSettings,
    gpu_bytes: Sequence[int],
    *,
    capability: Capability | None = None,
    gpus_per_rank: float = 1.0,
    utilization: float = 1.0,
) -> None:
    """Raise StartupError if the weights cannot fit; names the smallest number of ranks with which they would.

    `gpu_bytes`: the memory of each GPU of this machine; if they differ, the largest counts. `capability`: the highest
    compute capability of these; None: unknown. `utilization`: the share of the memory that a rank may use
    (gpu_memory_utilization).
    """
    if not gpu_bytes:
        return
    share = int(max(gpu_bytes) * min(1.0, gpus_per_rank) * utilization)
    least = partial(least_weight_bytes, folder, settings, capability=capability)
    needed = least(settings.tensor_parallel_size)
    if needed <= share:
        return
    config, pickled = read_config(folder), are_pickled(folder)
    ranks = next(
        (
            ranks
            for ranks in range(settings.tensor_parallel_size + 1, len(gpu_bytes) + 1)
            if rank_problem(config, settings, ranks, pickled=pickled) is None and least(ranks) <= share
        ),
        None,
    )
    remedy = f"set tensor_parallel_size: {ranks}" if ranks else "choose a smaller model, or one with FP8 weights"
    raise StartupError(
        f"tensor_parallel_size {settings.tensor_parallel_size}: each rank's weights take at least "
        f"{needed / _GIB:.1f} GiB, but a rank may use {share / _GIB:.1f} GiB of a GPU "
        f"(gpu_memory_utilization {utilization:g}); {remedy}"
    )


def least_weight_bytes(
    folder: Path, settings: ReplicaSettings, ranks: int, *, capability: Capability | None = None
) -> int:
    """The least bytes of weights on a GPU, of the one of `ranks` ranks that holds most.

    FP8 weights count one byte if they may be kept: the trial at load that decides needs the GPU. What is dequantized
    for certain counts as such, and a tied head shares the embedding's memory. Raises UnsupportedModel, WeightsMissing,
    WeightsDamaged.
    """
    config = read_config(folder)
    stored = config.dtype or config.torch_dtype
    dtype: str = settings.dtype
    if dtype == "auto":
        dtype = auto_dtype(stored, cuda=True, multiplies_bfloat16=True)
    size = DTYPE_BYTES[dtype]
    if are_pickled(folder):  # only transformers knows what is in these: numbers of at most four bytes
        files = sum(path.stat().st_size for path in folder.glob("pytorch_model*.bin"))
        return files if stored == dtype else files * size // DTYPE_BYTES["float32"]
    raw, tensors = raw_config(folder), tensors_in(folder)
    scalings = check_quantization(folder, tensors)
    kept: set[str] = set()
    if config.model_type in FAMILIES and settings.model_provider != "transformers" and dtype != "float32":
        usable = {name: each for name, each in scalings.items() if _multiplies(capability, each, tensors[name])}
        kept = kept_in_8_bits(raw, tensors, usable, ranks)
    unused = {each.scales for each in scalings.values()} | tied_head(raw, tensors)
    held = {name: each for name, each in dequantized(tensors).items() if name not in unused}
    numbers = held_numbers(raw, {name: each.shape for name, each in held.items()}, ranks)
    converted = {name for name, each in held.items() if each.dtype in _FLOATS} | (scalings.keys() - kept)
    return sum(count * (size if name in converted else _stored_bytes(held[name])) for name, count in numbers.items())


def _multiplies(capability: Capability | None, scaling: Scaling, tensor: TensorHeader) -> bool:
    least = BY_ROW if scaling.by_row(tensor.shape) else BY_BLOCK
    return capability is None or capability >= least


def _stored_bytes(tensor: TensorHeader) -> int:
    """Bytes of one of a tensor's numbers in the file."""
    return (tensor.data_offsets[1] - tensor.data_offsets[0]) // max(1, prod(tensor.shape))
