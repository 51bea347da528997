"""What a replica works out before it serves: how many blocks, how long a request may be, how fast it is."""

import logging
import time
from collections.abc import Callable
from statistics import median

import torch

from ..events.messages import PrefillWork
from ..kvcache.config import KvCacheSettings
from ..kvcache.sizing import blocks_that_fit
from .config import ReplicaSettings
from .engine import Executor
from .errors import StartupError
from .models.spec import ModelSpec
from .plan import PlanRow, plan_of_rows
from .rates import Rates
from .scheduler import Limits

log = logging.getLogger(__name__)

CPU_KV_BYTES = 512 * 1024 * 1024
#: Share of the free device memory that KV gets; the rest is for activations. Not tuned: no GPU run was made yet.
CUDA_KV_SHARE = 0.85
#: Long enough that a step's fixed cost hardly shows, short enough not to delay a start.
WARM_UP_TOKENS = 256
WARM_UP_REPEATS = 3


def number_of_blocks(settings: KvCacheSettings, spec: ModelSpec, device: torch.device) -> int:
    """KV blocks of this rank, the null block included. Raises PoolTooSmall."""
    if settings.num_kv_blocks:
        return settings.num_kv_blocks
    return blocks_that_fit(
        settings.kv_cache_bytes or _default_kv_bytes(device), spec.bytes_per_block(settings.block_size)
    )


def resolve_limits(settings: ReplicaSettings, spec: ModelSpec, *, num_blocks: int, block_size: int) -> Limits:
    """How long a request may be: what is asked for, the model allows and the pool holds. Raises StartupError."""
    capacity = (num_blocks - 1) * block_size
    if settings.max_model_len > spec.max_positions:
        raise StartupError(
            f"max_model_len: {settings.max_model_len} is more than the model's {spec.max_positions} positions"
        )
    wanted = settings.max_model_len or spec.max_positions
    if wanted > capacity:
        log.warning("max_model_len_capped wanted=%d pool_tokens=%d", wanted, capacity)
    longest = min(wanted, capacity)
    if longest < 2:
        raise StartupError(f"the KV pool holds {capacity} tokens: raise num_kv_blocks or kv_cache_bytes")
    return Limits(settings.max_running_requests, settings.max_batched_tokens, longest)


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


def _default_kv_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return CPU_KV_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * CUDA_KV_SHARE)
