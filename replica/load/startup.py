"""What a replica works out before it serves: how many blocks, how long a request may be, how fast it is."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Protocol

import torch

from ...events.wire.messages import PrefillWork
from ...kvcache.config import KvCacheSettings
from ...kvcache.sizing import MemoryReading, blocks_that_fit, kv_budget_bytes
from ..config import ReplicaSettings
from ..engine.engine import Executor
from ..engine.sampler import SamplingRow, prompt_logprobs, sample
from ..engine.scheduler import PROMPT_LOGPROBS_CHUNK, Limits
from ..engine.step_plan import PlanRow, StepPlan, plan_of_rows
from ..engine.throughput import Rates
from ..errors import StartupError
from ..messages import SamplingParams
from ..models.spec import ModelSpec

log = logging.getLogger(__name__)

CPU_KV_BYTES = 512 * 1024 * 1024
#: Enough for steps whose results nobody reads: the null block, and one for all tokens of all requests.
TRIAL_BLOCKS = 2
#: With so many prompt tokens a step on a CPU is nearly as fast a token as with any more. Tuned on two cores, 125 M
#: parameters: of 8 prompts of 64 tokens that came at once the first tokens came after 223 ms instead of 417, at as many
#: tokens a second (256: 288 ms); 16 prompts of 256 took 3 to 9 % longer to answer.
CPU_PREFILL_STEP_TOKENS = 128
#: Long enough that a step's fixed cost hardly shows, short enough not to delay a start.
WARM_UP_TOKENS = 256
WARM_UP_REPEATS = 3
REMEDY = "lower max_batched_tokens or max_running_requests, or share the weights (tensor_parallel_size)"


class TrialExecutor(Executor, Protocol):
    """An executor whose ranks can also say how much memory they have left."""

    def allocate(self, num_blocks: int) -> None:
        """A KV pool on all ranks, in place of the one before."""
        ...

    def readings(self) -> list[MemoryReading]:
        """Of all ranks, since `allocate`."""
        ...


def number_of_blocks(
    cache: KvCacheSettings,
    settings: ReplicaSettings,
    spec: ModelSpec,
    executor: TrialExecutor,
    device: torch.device,
) -> int:
    """KV blocks of every rank, the null block included. Raises PoolTooSmall, StartupError."""
    if cache.num_kv_blocks:
        return cache.num_kv_blocks
    block_bytes = spec.bytes_per_block(cache.block_size)
    if cache.kv_cache_bytes or device.type == "cpu":
        return blocks_that_fit(cache.kv_cache_bytes or CPU_KV_BYTES, block_bytes)
    limits = Limits(settings.max_running_requests, settings.max_batched_tokens, _longest(settings, spec))
    return blocks_left(trial(executor, limits, cache.block_size), cache.gpu_memory_utilization, block_bytes)


def trial(executor: TrialExecutor, limits: Limits, block_size: int) -> list[MemoryReading]:
    """Run the largest steps that the limits allow; what all ranks' memory looked like. Raises StartupError."""
    try:
        executor.allocate(TRIAL_BLOCKS)
        for plan in largest_steps(limits, block_size):
            _draw(executor.execute(plan), limits.running)
    except torch.OutOfMemoryError as error:
        raise StartupError(f"the largest step does not fit beside the weights: {REMEDY} ({error})") from error
    return executor.readings()


def largest_steps(limits: Limits, block_size: int) -> list[StepPlan]:
    """A whole step for the end of one longest prompt, all logits of a chunk wanted; and one that all requests share."""
    last = limits.max_model_len - 1
    alone = min(limits.max_batched_tokens, last)
    prompt = PlanRow([0] * alone, last - alone, [1] * -(-last // block_size))
    share = min(limits.max_batched_tokens // limits.running, last)
    shared = [PlanRow([0] * share, 0, [1] * -(-share // block_size))] * limits.running
    return [
        plan_of_rows(0, [prompt], range(max(0, alone - PROMPT_LOGPROBS_CHUNK), alone)),
        plan_of_rows(1, shared),
    ]


def _draw(logits: torch.Tensor, running: int) -> None:
    """All that a step's logits may have to go through."""
    filtered = SamplingParams(max_tokens=1, top_p=0.5, logit_bias={0: 1.0})
    prompt_logprobs(logits, [0] * len(logits), 1)
    sample(logits[:running], [SamplingRow(filtered, 0, (), ())] * min(running, len(logits)))


def blocks_left(readings: Sequence[MemoryReading], utilization: float, block_bytes: int) -> int:
    """Blocks for which every rank has room: those of the one with the least. Raises StartupError."""
    budgets = [kv_budget_bytes(reading, utilization) for reading in readings]
    for rank, (reading, budget) in enumerate(zip(readings, budgets, strict=True)):
        log.info("kv_memory_measured rank=%d kv_bytes=%d %s", rank, budget, _told(reading))
    rank = budgets.index(min(budgets))
    if budgets[rank] < 2 * block_bytes:
        short = readings[rank].free_bytes < readings[rank].share_bytes(utilization)
        others = "; another process holds memory of this GPU" if short else ""
        raise StartupError(
            f"gpu_memory_utilization {utilization:g} leaves {budgets[rank]} bytes for KV on rank {rank}, two blocks "
            f"take {2 * block_bytes} ({_told(readings[rank])}){others}: raise it, {REMEDY}"
        )
    return blocks_that_fit(budgets[rank], block_bytes)


def _told(reading: MemoryReading) -> str:
    return " ".join(f"{name}={value}" for name, value in asdict(reading).items())


def resolve_limits(
    settings: ReplicaSettings, spec: ModelSpec, device: torch.device, *, num_blocks: int, block_size: int
) -> Limits:
    """How long a request may be: what is asked for, the model allows and the pool holds. Raises StartupError."""
    capacity = (num_blocks - 1) * block_size
    wanted = _longest(settings, spec)
    if wanted > capacity:
        log.warning("max_model_len_capped wanted=%d pool_tokens=%d", wanted, capacity)
    longest = min(wanted, capacity)
    if longest < 2:
        raise StartupError(f"the KV pool holds {capacity} tokens: raise num_kv_blocks or kv_cache_bytes")
    fills = settings.prefill_step_tokens or (CPU_PREFILL_STEP_TOKENS if device.type == "cpu" else None)
    return Limits(settings.max_running_requests, settings.max_batched_tokens, longest, prefill_step_tokens=fills)


def _longest(settings: ReplicaSettings, spec: ModelSpec) -> int:
    """Prompt and answer together, as asked for. Raises StartupError."""
    if settings.max_model_len > spec.max_positions:
        raise StartupError(
            f"max_model_len: {settings.max_model_len} is more than the model's {spec.max_positions} positions"
        )
    longest = settings.max_model_len or spec.max_positions
    if longest < 2:
        raise StartupError(f"max_model_len: {longest} holds no prompt and answer, which are two tokens at least")
    return longest


def measure_rates(
    executor: Executor, limits: Limits, block_size: int, clock: Callable[[], float] = time.perf_counter
) -> Rates:
    """Run a prefill and some decodes in blocks that nobody uses yet; the first of each only warms up."""
    tokens = max(1, min(WARM_UP_TOKENS, limits.max_batched_tokens, limits.max_model_len - 1))
    table = list(range(1, 2 + tokens // block_size))

    def seconds(row: PlanRow) -> float:
        started = clock()
        executor.execute(plan_of_rows(0, [row]))
        return max(clock() - started, 1e-9)

    def prefills(count: int) -> list[float]:
        return [seconds(PlanRow([0] * count, 0, table)) for _ in range(1 + WARM_UP_REPEATS)][1:]

    few = max(1, tokens // 8)
    short, long = prefills(few), prefills(tokens)
    decodes = [seconds(PlanRow([0], tokens, table)) for _ in range(1 + WARM_UP_REPEATS)]
    rates = Rates(prefill_tokens_per_s=tokens / median(long), decode_step_s=median(decodes[1:]))
    # Two lengths tell a prompt's fixed cost from that of its tokens.
    for count, durations in ((few, short), (tokens, long)):
        for duration in durations:
            rates.learn(PrefillWork(1, count, count * count / 2, 0.0), duration)
    return rates
