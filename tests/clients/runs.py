"""The runs: each names a tool, its arguments, the requirements, the report and the part of the output to keep.

Arguments are small: the runs check whether a tool works against the router, not how fast anything is. `run.py` fills in
the words in braces: {url}, {model} (the demo model's folder), {out} (the run's own folder), {here} (this folder).
"""

from dataclasses import dataclass

from . import reports
from .reports import Expected, Reader

#: The number of lines in trace.jsonl.
TRACE_REQUESTS = 24


@dataclass(frozen=True, slots=True)
class Run:
    """One call of a tool."""

    name: str
    tool: str
    command: tuple[str, ...]
    report: str  #: a glob pattern within {out}
    reader: Reader
    expected: Expected
    shown_from: str  #: text of the first output line worth keeping


@dataclass(frozen=True, slots=True)
class Tool:
    """A package that runs use."""

    package: str
    with_dependencies: bool = True


TOOLS = {
    "vllm": Tool("vllm", with_dependencies=False),
    "guidellm": Tool("guidellm"),
    "aiperf": Tool("aiperf"),
    "lm-eval": Tool("lm-eval"),
}


def _vllm(name: str, requests: int, *arguments: str) -> Run:
    common = "{here}/vllm_bench.py --base-url {url} --model demo --tokenizer {model} --max-concurrency 2 --disable-tqdm"
    saved = "--save-result --result-dir {out} --result-filename report.json"
    command = ("python", *common.split(), *saved.split(), "--num-prompts", str(requests), *arguments)
    return Run(name, "vllm", command, "report.json", reports.vllm, Expected(requests), "============ Serving")


def _guidellm(name: str, requests: int, backend: str, profile: str, data: str) -> Run:
    command = (
        *("guidellm", "run", "--backend", "kind=openai_http,target={url},model=demo," + backend),
        *("--profile", profile, "--constraint", f"kind=max_requests,count={requests}", "--data", data),
        *("--tokenizer", "kind=huggingface_auto,model={model}", "--output", "kind=json,path={out}/report.json"),
        "--disable-console-interactive",
    )
    expected = Expected(requests, cached_tokens=True)
    return Run(name, "guidellm", command, "report.json", reports.guidellm, expected, "ℹ Request Token Statistics")


def _aiperf(name: str, requests: int, *arguments: str) -> Run:
    common = "profile --model demo --url {url} --tokenizer homing/demo --ui none --use-server-token-count"
    command = ("aiperf", *common.split(), "--no-gpu-telemetry", "--output-artifact-dir", "{out}", *arguments)
    expected = Expected(requests, cached_tokens=True)
    shown = "NVIDIA AIPerf | LLM Metrics: Usage"
    return Run(name, "aiperf", command, "profile_export_aiperf.json", reports.aiperf, expected, shown)


def _lm_eval(name: str, samples: int, *arguments: str) -> Run:
    common = "run --include_path {here}/tasks --output_path {out}"
    command = ("lm_eval", *common.split(), *arguments)
    return Run(name, "lm-eval", command, "**/results_*.json", reports.lm_eval, Expected(samples), "|     Tasks")


RANDOM = "--dataset-name random --random-input-len 100 --random-output-len 16 --ignore-eos".split()
TEXT = "kind=synthetic_text,prompt_tokens=64,output_tokens=16,prefix_tokens=64"
TWO_STREAMS = "kind=concurrent,streams=2"
SIZES = "--request-count 20 --concurrency 2 --isl 100 --osl 16 --extra-inputs ignore_eos:true".split()
COMPLETIONS_API = "base_url={url}/v1/completions,model=demo,tokenizer={model},num_concurrent=2"
CHAT_API = "base_url={url}/v1/chat/completions,model=demo,num_concurrent=2"

RUNS = (
    _vllm("vllm-completions", 20, *RANDOM, "--logprobs", "2"),
    _vllm("vllm-chat", 20, *RANDOM, *"--backend openai-chat --endpoint /v1/chat/completions".split()),
    _vllm(
        "vllm-trace",
        TRACE_REQUESTS,
        *"--dataset-name timed_trace --dataset-path {here}/trace.jsonl --timed-trace-chunk-hash-size 512".split(),
        *"--timed-trace-sec-multiplier 0.001 --ignore-eos".split(),
    ),
    _guidellm("guidellm-chat", 20, "request_format=/v1/chat/completions", TWO_STREAMS, TEXT),
    _guidellm("guidellm-completions", 20, "request_format=/v1/completions,stream=false", TWO_STREAMS, TEXT),
    _aiperf("aiperf-chat", 20, *SIZES, "--endpoint-type", "chat", "--streaming", "--per-chunk-usage"),
    _aiperf("aiperf-completions", 20, *SIZES, "--endpoint-type", "completions"),
    _aiperf(
        "aiperf-trace",
        TRACE_REQUESTS,
        *"--endpoint-type chat --streaming --input-file {here}/trace.jsonl".split(),
        *"--custom-dataset-type mooncake_trace --isl-block-size 512 --fixed-schedule".split(),
        *"--extra-inputs ignore_eos:true".split(),
    ),
    _lm_eval(
        "lm-eval-completions",
        20,
        *("--model", "local-completions", "--model_args", COMPLETIONS_API, "--batch_size", "4"),
        *("--tasks", "homing_generate,homing_choice"),
    ),
    _lm_eval(
        "lm-eval-chat",
        10,
        *("--model", "local-chat-completions", "--model_args", CHAT_API, "--apply_chat_template"),
        *("--tasks", "homing_generate"),
    ),
)
