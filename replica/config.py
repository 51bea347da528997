"""Settings of a replica's engine. `cluster/config.py` combines them with those of the other packages."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replica's model, how it runs and the limits on its batches."""

    model: Annotated[str, "Hugging Face name or local folder; demo: the small model in the package"] = "demo"
    revision: Annotated[str, "branch, tag or commit of a Hugging Face model; empty: its default"] = ""
    tokenizer: Annotated[
        str, "folder with a tokenizer and chat template to use instead of the model's; empty: the model's"
    ] = ""
    engine: Annotated[
        Literal["homing", "vllm", "sglang"],
        "what runs the model: homing's own engine, or a vLLM or SGLang server that each replica "
        "starts, monitors and stops",
    ] = "homing"
    engine_python: Annotated[
        str,
        "Python interpreter, on every node, of the environment in which vllm or sglang is installed; "
        "empty: the one that runs homing",
    ] = ""
    engine_args: Annotated[
        str,
        Meta(extra={"arguments": True}),
        "additional arguments for the vllm or sglang server, split like a shell command line",
    ] = ""
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        "type of weights and KV; auto: the checkpoint's; on CPU float32, unless that is bfloat16 and the "
        "processor multiplies it (`avx512_bf16`, AMX)",
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"],
        "type of KV; auto: `dtype`; fp8: E4M3 without scales, twice as many tokens, less precise; CUDA from "
        "compute capability 8.9, slower on CPU",
    ] = "auto"
    quantization: Annotated[
        Literal["none", "int8"],
        "int8: the native decoder's linear layers on CPU in 8 bits, except the output head",
    ] = "none"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], "auto: cuda if there is a GPU; it is then an error if torch cannot use the GPU"
    ] = "auto"
    model_provider: Annotated[
        Literal["auto", "native", "transformers"],
        "native: our decoder, for the model types in models.md; transformers: that library's model code",
    ] = "auto"
    attention_backend: Annotated[
        Literal["auto", "flash4", "flash3", "flash2", "triton", "cpu-compiled", "cpu-scratch", "reference"],
        "auto: the first in this list that can be used; the log says why those before it cannot",
    ] = "auto"
    overlap_steps: Annotated[
        Literal["auto", "on", "off"],
        "prepare a step while the previous one runs; tokens stay on the device; auto: on CUDA",
    ] = "auto"
    tensor_parallel_size: Annotated[int, Meta(ge=1, le=64), "ranks that one replica's weights are split over"] = 1
    max_model_len: Annotated[
        int, Meta(ge=0), "longest prompt plus answer in tokens; 0: the model's limit, capped by the KV pool"
    ] = 0
    max_running_requests: Annotated[int, Meta(ge=0), "most requests in one step's batch; 0: 256 on CUDA, 64 on CPU"] = 0
    max_batched_tokens: Annotated[
        int, Meta(ge=0), "token budget of one step; longer prefills run in chunks; 0: 8192 on CUDA, 2048 on CPU"
    ] = 0
    prefill_step_tokens: Annotated[
        int,
        Meta(ge=0),
        "prompt tokens after which a step adds no further prompt, so that requests already in it get "
        "their first tokens sooner; 0: 128 on CPU, max_batched_tokens on CUDA",
    ] = 0
    num_speculative_tokens: Annotated[
        int,
        Meta(ge=0, le=64),
        "most answer tokens to guess per step, from what followed the same text earlier; answers stay the "
        "same; 0: none",
    ] = 0
    cpu_threads: Annotated[
        int, Meta(ge=0), "torch threads per rank on CPU; 0: the cores that others leave idle, at least 1"
    ] = 0


def for_device(settings: ReplicaSettings, *, cuda: bool) -> ReplicaSettings:
    """The settings, with the device's defaults for step limits that are not set. Not measured on a GPU."""
    running, tokens = (256, 8192) if cuda else (64, 2048)
    return msgspec.structs.replace(
        settings,
        max_running_requests=settings.max_running_requests or running,
        max_batched_tokens=settings.max_batched_tokens or tokens,
    )
