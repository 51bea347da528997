"""Computes what a replica needs before it serves: the number of KV blocks, request limits, measured speed."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median

import torch

from ...events.wire.messages import PrefillWork
from ...kvcache.config import KvCacheSettings
from ...kvcache.sizing import MemoryReading, blocks_that_fit, host_kv_bytes, kv_budget_bytes
from ..config import ReplicaSettings, for_device
from ..engine.engine import Executor
from ..engine.logit_edits import SamplingRow
from ..engine.logprobs import prompt_logprobs
from ..engine.sampler import sample
from ..engine.scheduler import PROMPT_LOGPROBS_CHUNK, SchedulerLimits
from ..engine.step_plan import Load, PlanRow, Save, StepPlan, plan_of_rows
from ..engine.throughput import SmoothedRates
from ..errors import StartupError
from ..messages import SamplingParams
from ..models.spec import ModelSpec
from ..progress import report
from .free_memory import free_memory_bytes
from .preflight import least_tokens, longest_request

log = logging.getLogger(__name__)

#: Enough for trial steps, whose results are not used: the null block, and one block for all tokens of all requests.
TRIAL_BLOCKS = 2
#: From this many prompt tokens on, a CPU step hardly gets faster per token. Tuned on two cores with 125 M parameters:
#: for 8 prompts of 64 tokens sent at once, the first tokens came after 223 ms instead of 417 at the same throughput
#: (with 256: 288 ms); 16 prompts of 256 tokens took 3 to 9 % longer to answer.
CPU_PREFILL_STEP_TOKENS = 128
#: Long enough that a step's fixed cost hardly matters, short enough not to delay the start.
WARM_UP_TOKENS = 256
WARM_UP_REPEATS = 3
#: Blocks saved and loaded in one measured move. Not tuned.
MOVED_AT_ONCE = 4
REMEDY = "lower max_batched_tokens or max_running_requests, or share the weights (tensor_parallel_size)"


def number_of_blocks(
    cache: KvCacheSettings,
    settings: ReplicaSettings,
    spec: ModelSpec,
    executor: Executor,
    device: torch.device,
    free_memory: Callable[[], int] = free_memory_bytes,
) -> int:
    """Number of KV blocks on each rank, including the null block. Raises PoolTooSmall, StartupError."""
    if cache.num_kv_blocks:
        return cache.num_kv_blocks
    block_bytes = spec.bytes_per_block(cache.block_size)
    if cache.kv_cache_bytes:
        return blocks_that_fit(cache.kv_cache_bytes, block_bytes)
    settings = for_device(settings, cuda=device.type == "cuda")
    limits = SchedulerLimits(
        settings.max_running_requests,
        settings.max_batched_tokens,
        longest_request(settings.max_model_len, spec.max_positions),
    )
    if device.type == "cpu":
        useful = 1 + limits.running * -(-limits.max_model_len // cache.block_size)
        return min(useful, blocks_that_fit(host_kv_bytes(free_memory(), cache.cpu_memory_utilization), block_bytes))
    report("measuring the memory that steps take")
    # Run the largest steps that the limits allow, and everything that may be done with their logits.
    filtered = SamplingRow(SamplingParams(max_tokens=1, top_p=0.5, logit_bias={0: 1.0}), 0, (), ())
    try:
        executor.allocate_kv(TRIAL_BLOCKS)
        for plan in largest_steps(limits, cache.block_size):
            logits = executor.forward(plan)
            assert logits is not None, "rank 0 has the logits"
            prompt_logprobs(logits, [0] * len(logits), 1)
            sample(logits[: limits.running], [filtered] * min(limits.running, len(logits)))
    except torch.OutOfMemoryError as error:
        raise StartupError(f"the largest step does not fit into memory with the weights: {REMEDY} ({error})") from error
    return blocks_left(executor.readings(), cache.gpu_memory_utilization, block_bytes)


def largest_steps(limits: SchedulerLimits, block_size: int) -> list[StepPlan]:
    """Two steps: the end of one longest prompt, with a chunk of prompt logprobs; and one shared by all requests."""
    last = limits.max_model_len - 1
    alone = min(limits.max_batched_tokens, last)
    prompt = PlanRow([0] * alone, last - alone, [1] * -(-last // block_size))
    share = min(limits.max_batched_tokens // limits.running, last)
    shared = [PlanRow([0] * share, 0, [1] * -(-share // block_size))] * limits.running
    return [
        plan_of_rows(0, [prompt], range(max(0, alone - PROMPT_LOGPROBS_CHUNK), alone)),
        plan_of_rows(1, shared),
    ]


def blocks_left(readings: Sequence[MemoryReading], utilization: float, block_bytes: int) -> int:
    """Number of blocks that fit on the rank with the least memory for KV. Raises StartupError."""

    def text(reading: MemoryReading) -> str:
        return " ".join(f"{name}={value}" for name, value in asdict(reading).items())

    budgets = [kv_budget_bytes(reading, utilization) for reading in readings]
    for rank, (reading, budget) in enumerate(zip(readings, budgets, strict=True)):
        log.info("kv_memory_measured rank=%d kv_bytes=%d %s", rank, budget, text(reading))
    rank = budgets.index(min(budgets))
    if budgets[rank] < 2 * block_bytes:
        short = readings[rank].free_bytes < readings[rank].share_bytes(utilization)
        others = "; another process holds memory of this GPU" if short else ""
        raise StartupError(
            f"gpu_memory_utilization {utilization:g} leaves {budgets[rank]} bytes for KV on rank {rank}, but two "
            f"blocks take {2 * block_bytes} ({text(readings[rank])}){others}: raise it, {REMEDY}"
        )
    return blocks_that_fit(budgets[rank], block_bytes)


def resolve_limits(
    settings: ReplicaSettings, spec: ModelSpec, device: torch.device, *, num_blocks: int, block_size: int
) -> SchedulerLimits:
    """The scheduler's limits, with the longest request that settings, model and pool allow. Raises StartupError."""
    settings = for_device(settings, cuda=device.type == "cuda")
    capacity = (num_blocks - 1) * block_size
    wanted = longest_request(settings.max_model_len, spec.max_positions)
    if wanted > capacity:
        log.warning("max_model_len_capped wanted=%d pool_tokens=%d", wanted, capacity)
    longest = min(wanted, capacity)
    if longest < least_tokens(wanted):
        raise StartupError(
            f"the KV pool only holds {capacity} tokens, but a short request takes {least_tokens(wanted)}: "
            "raise num_kv_blocks or kv_cache_bytes, or lower max_model_len"
        )
    fills = CPU_PREFILL_STEP_TOKENS if device.type == "cpu" else None
    return SchedulerLimits(
        settings.max_running_requests, settings.max_batched_tokens, longest, prefill_step_tokens=fills
    )


def measure_move(executor: Executor, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds to move one block between the pool and host memory, the fastest of some attempts."""
    saves, loads = [Save(1, 0, 1)] * MOVED_AT_ONCE, [Load(0, 1, 1)] * MOVED_AT_ONCE
    seconds = []
    for _ in range(1 + WARM_UP_REPEATS):
        began = clock()
        failed = executor.move(saves, loads)
        seconds.append((clock() - began) / (len(saves) + len(loads)))
        assert not any(failed), f"a load of the measurement failed: {failed}"
    return min(seconds)


def measure_rates(
    executor: Executor, limits: SchedulerLimits, block_size: int, clock: Callable[[], float] = time.perf_counter
) -> SmoothedRates:
    """Measure speed by running prefills and decodes in unused blocks. The first run of each kind only warms up."""
    report("measuring its speed")
    tokens = max(1, min(WARM_UP_TOKENS, limits.max_batched_tokens, limits.max_model_len - 1))
    table = list(range(1, 2 + tokens // block_size))

    def seconds(row: PlanRow) -> list[float]:
        durations: list[float] = []
        for _ in range(1 + WARM_UP_REPEATS):
            started = clock()
            logits = executor.forward(plan_of_rows(0, [row]))
            assert logits is not None, "rank 0 has the logits"
            float(logits[-1, -1])  # waits for the step: otherwise, CUDA's time would cover only the launches
            durations.append(max(clock() - started, 1e-9))
        return durations[1:]

    few = max(1, tokens // 8)
    short, long = seconds(PlanRow([0] * few, 0, table)), seconds(PlanRow([0] * tokens, 0, table))
    decodes = seconds(PlanRow([0], tokens, table))
    rates = SmoothedRates(prefill_tokens_per_s=tokens / median(long), decode_step_s=median(decodes))
    # Two lengths separate a prompt's fixed cost from that of its tokens.
    for count, durations in ((few, short), (tokens, long)):
        for duration in durations:
            rates.learn(PrefillWork(1, count, count * count / 2, 0.0), duration)
    return rates
