"""Selects the provider and dtype for a model folder, and reads the values that both providers need."""

import contextlib
import importlib
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import torch
from torch.nn.functional import scaled_mm

from ..config import ReplicaSettings
from ..errors import TensorParallelUnsupported, UnsupportedModel, WeightsMismatch
from ..load.preflight import multiplies_bfloat16
from ..load.weight_files import are_pickled
from ..parallel.rank_group import RankGroup
from ..progress import report
from .base import Model
from .checkpoint import Checkpoint
from .fp8 import ScaledProduct
from .layers import Int8Linear, Linear, int8_problem
from .native import NativeModel, native_problem
from .spec import auto_dtype
from .tensor_names import tensors_problem

logger = logging.getLogger(__name__)

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(settings: ReplicaSettings, model_dir: Path, group: RankGroup | None, *, device: torch.device) -> Model:
    """Load with the native decoder if it can run the model, else through transformers. Raises ModelError."""
    config = read_config(model_dir)
    dtype = weights_dtype(settings, config, device)
    eos = eos_token_ids(model_dir, config)
    if settings.model_provider == "transformers":
        problem: str | None = "the settings ask for the transformers provider"
    elif are_pickled(model_dir):
        problem = "it reads only safetensors, and these weights are in pytorch_model*.bin"
    else:
        problem = native_problem(config)
    if problem is None:
        logger.info("model_provider provider=native model_type=%s dtype=%s", config.model_type, dtype)
        weights = Checkpoint(model_dir, dtype, device)
        mismatch = tensors_problem(config, weights.shapes)
        if mismatch is not None:
            raise WeightsMismatch(f"{model_dir}: {mismatch}")
        product = scaled_product(device, dtype) if weights.quantized else None
        return NativeModel(config, weights, eos, dtype, device, group, _linear(settings, device), product)
    if settings.model_provider == "native":
        raise UnsupportedModel(f"the native decoder cannot run {model_dir.name}: {problem}; use model_provider: auto")
    if settings.quantization != "none":
        raise UnsupportedModel(f"quantization: {settings.quantization} requires the native decoder ({problem})")
    if group is not None and group.size > 1:
        raise TensorParallelUnsupported(
            f"models of the transformers provider run on one rank ({problem}); set tensor_parallel_size: 1"
        )
    logger.info("model_provider provider=transformers reason=%r dtype=%s", problem, dtype)
    report("reading the weights")
    from .hf import TransformersModel  # imports modelling code that the native provider does not need

    return TransformersModel(config, model_dir, eos, dtype, device)


def read_config(model_dir: Path) -> Any:
    """The model's configuration with transformers' defaults; old spellings are converted. Raises UnsupportedModel."""
    _import_validators()
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise UnsupportedModel(f"{model_dir} has no configuration that transformers can read: {error}") from error


def _import_validators() -> None:
    """Import transformers' configuration validators without its activations, which only modelling code needs.

    The activations import `torch._dynamo`, DTensor and sympy: a third of a replica's CPU time before it serves. Without
    the table of activations the validators skip one check, which `native_problem` and the modelling code make anyway.
    """
    name = "transformers.activations"
    if name in sys.modules:
        return
    sys.modules[name] = stand_in = ModuleType(name)
    stand_in.ACT2FN = {}  # type: ignore[attr-defined]
    try:
        with contextlib.suppress(ImportError):  # this transformers version needs more: it will import everything
            importlib.import_module("transformers.utils.type_validators")
    finally:
        del sys.modules[name]


def _linear(settings: ReplicaSettings, device: torch.device) -> type[Linear | Int8Linear]:
    if settings.quantization == "none":
        return Linear
    reason = f"it is for cpu, not for {device.type}" if device.type != "cpu" else int8_problem()
    if reason is not None:
        raise UnsupportedModel(f"quantization: int8 cannot be used: {reason}; use quantization: none")
    return Int8Linear


def scaled_product(device: torch.device, dtype: torch.dtype) -> ScaledProduct | None:
    """The product for FP8 weights; None: dequantize. With float32, users do not expect rounded activations."""
    return scaled_mm if device.type == "cuda" and dtype != torch.float32 else None


def weights_dtype(settings: ReplicaSettings, config: Any, device: torch.device) -> torch.dtype:
    """The dtype from the settings, or the one that `auto` selects for this device."""
    if settings.dtype != "auto":
        return TORCH_DTYPES[settings.dtype]
    stored = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    name = str(stored).removeprefix("torch.")
    return TORCH_DTYPES[auto_dtype(name, cuda=device.type == "cuda", multiplies_bfloat16=multiplies_bfloat16())]


class GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def _generation_config(path: Path) -> GenerationConfig:
    """The file's content; none of it if it is missing or, which is logged, damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=GenerationConfig)
    except FileNotFoundError:
        pass
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("generation_config_unusable path=%s reason=%r", path, str(error))
    return GenerationConfig()


def eos_token_ids(model_dir: Path, config: Any) -> tuple[int, ...]:
    """The token ids that end an answer, from the generation configuration if set there, else from the model's.

    Ids outside the vocabulary can be neither drawn nor banned, so they are ignored.
    """
    ids = _generation_config(model_dir / "generation_config.json").eos_token_id
    if ids is None:
        ids = getattr(config, "eos_token_id", None)
    if ids is None:
        return ()
    named = (ids,) if isinstance(ids, int) else tuple(ids)
    known = tuple(token for token in named if 0 <= token < getattr(config, "vocab_size", token + 1))
    if known != named:
        logger.warning("eos_ids_ignored ids=%s reason='not in the vocabulary'", sorted(set(named) - set(known)))
    return known
