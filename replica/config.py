"""Settings of a replica's engine. `cluster/config.py` joins them with those of the other packages."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model of a replica, and the limits within which it serves."""

    model: Annotated[
        str, Meta(description="Hugging Face name or local folder; demo: the small model in the package")
    ] = "demo"
    revision: Annotated[str, Meta(description="branch, tag or commit of a Hugging Face model; empty: its default")] = ""
    tokenizer: Annotated[
        str,
        Meta(
            description="folder with the tokenizer and chat template to use instead of the model's; empty: the model's"
        ),
    ] = ""
    engine: Annotated[
        Literal["homing", "vllm", "sglang"],
        Meta(
            description="what runs the model: homing's own engine, or a server of vLLM or SGLang that each replica "
            "starts, watches and ends"
        ),
    ] = "homing"
    engine_python: Annotated[
        str,
        Meta(
            description="Python program of the environment, on every node, in which vllm or sglang is installed; "
            "empty: homing's own"
        ),
    ] = ""
    engine_args: Annotated[
        str,
        Meta(
            description="more arguments for the server of vllm or sglang, as a shell would split them",
            extra={"arguments": True},
        ),
    ] = ""
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(
            description="type of weights and KV; auto: the checkpoint's, on CPU only if that is bfloat16 and the "
            "processor multiplies it (`avx512_bf16`, AMX), which is two to three times as fast as float32; else float32"
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"],
        Meta(
            description="type of KV; auto: `dtype`; fp8: 8 bits (E4M3, no scales): twice as many tokens fit as in "
            "bfloat16, less exactly; on CUDA from compute capability 8.9 on, on CPU slower"
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "int8"],
        Meta(
            description="int8: the native decoder's linears on CPU in 8 bits, but for the vocabulary's head; with "
            "`avx512_bf16` prompts take 0.75 to 0.85 of the time in bfloat16, tokens of one request 1.6 times as long"
        ),
    ] = "none"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(description="auto: cuda where there is a GPU; one that torch cannot use is then an error"),
    ] = "auto"
    model_provider: Annotated[
        Literal["auto", "native", "transformers"],
        Meta(
            description="native: our decoder (Llama, Mistral, Qwen2, Qwen3 and their mixtures of experts); "
            "transformers: its modelling code"
        ),
    ] = "auto"
    attention_backend: Annotated[
        Literal["auto", "flash4", "flash3", "flash2", "triton", "cpu-compiled", "cpu-scratch", "reference"],
        Meta(description="auto: the first of these that can be used; the log says why not those before it"),
    ] = "auto"
    overlap_steps: Annotated[
        Literal["auto", "on", "off"],
        Meta(description="prepare a step while the one before runs, tokens staying on the device; auto: on CUDA"),
    ] = "auto"
    tensor_parallel_size: Annotated[int, Meta(ge=1, le=64, description="ranks that share one replica's weights")] = 1
    max_model_len: Annotated[
        int, Meta(ge=0, description="longest prompt plus answer in tokens; 0: the model's, or what the KV pool holds")
    ] = 0
    max_running_requests: Annotated[
        int, Meta(ge=0, description="requests in one step's batch; 0: 256 on CUDA, 64 on CPU")
    ] = 0
    max_batched_tokens: Annotated[
        int,
        Meta(ge=0, description="token budget of one step; longer prefills run in chunks; 0: 8192 on CUDA, 2048 on CPU"),
    ] = 0
    prefill_step_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="prompt tokens after which a step takes no further prompt, so that the first tokens of all in "
            "it come sooner; 0: 128 on CPU, max_batched_tokens on CUDA",
        ),
    ] = 0
    num_speculative_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="most tokens of an answer to guess a step, by looking up what followed the same tokens before "
            "in prompt or answer; answers stay the same, those that copy (edits, quotations) come faster; 0: none",
        ),
    ] = 0
    cpu_threads: Annotated[
        int, Meta(ge=0, description="torch threads per rank on CPU; 0: the cores that others leave idle, at least 1")
    ] = 0


def for_device(settings: ReplicaSettings, *, cuda: bool) -> ReplicaSettings:
    """The settings with the limits of a step that fit the device, where they are not set. Not measured on a GPU."""
    running, tokens = (256, 8192) if cuda else (64, 2048)
    return msgspec.structs.replace(
        settings,
        max_running_requests=settings.max_running_requests or running,
        max_batched_tokens=settings.max_batched_tokens or tokens,
    )
