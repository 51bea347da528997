"""Settings of a replica's engine. `cluster/config.py` combines them with those of the other packages."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replica's model, how it runs and the limits on its batches."""

    model: Annotated[str, "Hugging Face name or local folder; demo: in the package"] = "demo"
    revision: Annotated[str, "branch, tag or commit on Hugging Face"] = ""
    tokenizer: Annotated[str, "folder with another tokenizer and chat template"] = ""
    engine: Annotated[
        Literal["homing", "vllm", "sglang"],
        "what replicas run: homing's own engine, or a server of vLLM or SGLang",
    ] = "homing"
    engine_python: Annotated[
        str,
        "Python of the environment with vllm or sglang; empty: homing's",
    ] = ""
    engine_args: Annotated[
        str,
        Meta(extra={"arguments": True}),
        "more arguments for the server of vLLM or SGLang",
    ] = ""
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        "type of weights and KV; auto: the checkpoint's, or float32 on CPUs without fast bfloat16",
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"],
        "type of KV; fp8: twice as many tokens, less precise",
    ] = "auto"
    quantization: Annotated[
        Literal["none", "int8"],
        "int8: linear layers in 8 bits, on CPU",
    ] = "none"
    device: Annotated[Literal["auto", "cpu", "cuda"], "auto: cuda if there is a GPU"] = "auto"
    model_provider: Annotated[
        Literal["auto", "native", "transformers"],
        "native: homing's decoder; transformers: the library's",
    ] = "auto"
    attention_backend: Annotated[
        Literal["auto", "flash4", "flash3", "flash2", "triton", "cpu-compiled", "cpu-scratch", "reference"],
        "auto: the first in this list that works here",
    ] = "auto"
    overlap_steps: Annotated[
        Literal["auto", "on", "off"],
        "prepare a step while the previous one runs; auto: on CUDA",
    ] = "auto"
    tensor_parallel_size: Annotated[int, Meta(ge=1, le=64), "ranks that share a replica's weights"] = 1
    max_model_len: Annotated[
        int, Meta(ge=0), "tokens of prompt and answer; 0: as the model and the KV blocks allow"
    ] = 0
    max_running_requests: Annotated[int, Meta(ge=0), "requests in one step; 0: 256 on CUDA, 64 on CPU"] = 0
    max_batched_tokens: Annotated[int, Meta(ge=0), "tokens in one step; 0: 8192 on CUDA, 2048 on CPU"] = 0
    num_speculative_tokens: Annotated[
        int,
        Meta(ge=0, le=64),
        "tokens guessed per step from earlier text; 0: none",
    ] = 0
    cpu_threads: Annotated[int, Meta(ge=0), "torch threads of a rank; 0: as many as there are idle cores"] = 0


def for_device(settings: ReplicaSettings, *, cuda: bool) -> ReplicaSettings:
    """The settings, with the device's defaults for step limits that are not set. Not measured on a GPU."""
    running, tokens = (256, 8192) if cuda else (64, 2048)
    return msgspec.structs.replace(
        settings,
        max_running_requests=settings.max_running_requests or running,
        max_batched_tokens=settings.max_batched_tokens or tokens,
    )
