"""Block count of a GPU: the memory that the largest step leaves free, found by a trial run, equal on all ranks."""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from homing.kvcache.config import KvCacheSettings
from homing.kvcache.errors import PoolTooSmall
from homing.kvcache.sizing import MemoryReading, kv_budget_bytes
from homing.replica.config import ReplicaSettings
from homing.replica.engine.scheduler import SchedulerLimits
from homing.replica.engine.step_plan import PlanRow, StepPlan, lay_out, plan_of_rows
from homing.replica.errors import StartupError
from homing.replica.execute.gpu_runner import GpuRunner
from homing.replica.execute.runner import ModelRunner
from homing.replica.load.free_memory import free_memory_bytes
from homing.replica.load.startup import TRIAL_BLOCKS, blocks_left, largest_steps, measure_rates, number_of_blocks
from homing.replica.models.spec import KvShape, ModelSpec
from homing.replica.parallel.step_broadcast import RankPlace
from homing.replica.parallel.worker import load_rank_0, start_worker

from ..toys import BLOCK_SIZE

CUDA = torch.device("cuda")  # only the name is used; CUDA is never called
CPU = torch.device("cpu")
SPEC = ModelSpec((KvShape(2, 16, 16),) * 2, 50, 300, (2,), "float32", 4)
BLOCK_BYTES = SPEC.bytes_per_block(16)


@dataclass
class TrialRun:
    """An executor without a model whose ranks report preset readings."""

    found: list[MemoryReading]
    error: Exception | None = None
    pools: list[int] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)

    def allocate_kv(self, num_blocks: int) -> None:
        self.pools.append(num_blocks)

    def forward(self, plan: StepPlan) -> torch.Tensor:
        self.plans.append(plan)
        if self.error is not None:
            raise self.error
        return torch.zeros(len(plan.logits_at), SPEC.vocab_size)

    def readings(self) -> list[MemoryReading]:
        return self.found


@dataclass
class FakeMemory:
    """A device with a fixed memory reading."""

    reading: MemoryReading
    begun: int = 0

    def begin(self) -> None:
        self.begun += 1

    def read(self) -> MemoryReading:
        return self.reading


def reading(kv_bytes: int) -> MemoryReading:
    """A reading that leaves `kv_bytes` for KV at a utilization of 0.5."""
    return MemoryReading(total_bytes=2 * (kv_bytes + 700), free_bytes=kv_bytes + 700, held_bytes=600, peak_bytes=100)


def blocks(executor: Any, device: torch.device = CUDA, cache: dict[str, Any] | None = None, **settings: Any) -> int:
    options = KvCacheSettings(gpu_memory_utilization=0.5, **cache or {})
    return number_of_blocks(options, ReplicaSettings(**settings), SPEC, executor, device)


def test_the_pool_is_what_the_rank_with_the_least_has_left():
    """All ranks hold the same number of blocks; a larger pool would exceed the smallest rank's memory."""
    executor = TrialRun([reading(9 * BLOCK_BYTES), reading(5 * BLOCK_BYTES + 3), reading(7 * BLOCK_BYTES)])

    found = blocks(executor)

    assert found == 5
    assert executor.pools == [TRIAL_BLOCKS]


@pytest.mark.parametrize(
    ("device", "cache", "expected"),
    [
        (CUDA, {"num_kv_blocks": 77}, 77),
        (CUDA, {"kv_cache_bytes": 10 * BLOCK_BYTES}, 10),
        (CPU, {"num_kv_blocks": 77}, 77),
        (CPU, {"kv_cache_bytes": 10 * BLOCK_BYTES}, 10),
    ],
)
def test_what_is_set_or_known_is_not_tried(device, cache, expected):
    """A trial takes seconds, and on a CPU the memory is shared with other processes."""
    executor = TrialRun([])

    assert blocks(executor, device, cache) == expected
    assert not executor.pools


@pytest.mark.parametrize(
    ("free_blocks", "utilization", "expected"),
    [
        (40, 0.5, 20),
        (46, 0.5, 20),  # three significant bits of 23
        (10_000_000, 0.5, 1 + 64 * -(-300 // 16)),  # the blocks of 64 requests of 300 tokens
    ],
)
def test_on_a_cpu_the_pool_is_a_share_of_the_free_memory(free_blocks, utilization, expected):
    """A fixed half gigabyte allowed a context of only 2,340 tokens on a machine with 64 GB."""
    cache = KvCacheSettings(cpu_memory_utilization=utilization)

    found = number_of_blocks(cache, ReplicaSettings(), SPEC, TrialRun([]), CPU, lambda: free_blocks * BLOCK_BYTES)

    assert found == expected


def test_on_a_cpu_without_free_memory_no_replica_starts():
    """The error names the setting that overrides the limit."""
    with pytest.raises(PoolTooSmall, match="raise kv_cache_bytes, free memory"):
        number_of_blocks(KvCacheSettings(), ReplicaSettings(), SPEC, TrialRun([]), CPU, lambda: 100)


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"memory.max": "5000", "memory.current": "3000", "memory.stat": "anon 1\ninactive_file 400"}, 2400),
        ({"memory.max": "5000", "memory.current": "6000", "memory.stat": "anon 1"}, 0),
        ({"memory.max": "max", "memory.current": "3000", "memory.stat": "anon 1"}, None),
        ({}, None),
    ],
)
def test_a_containers_limit_counts(files, left, tmp_path):
    """A process that exceeds the container's limit is killed, however much memory the machine has."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    found = free_memory_bytes(tmp_path)

    assert found == left if left is not None else found > 5000


@given(st.integers(1, 70), st.integers(1, 300), st.integers(2, 400), st.sampled_from([1, 8, 16]))
def test_trial_steps_are_the_largest_that_the_limits_allow(running, budget, longest, block_size):
    """A larger step later would run out of memory; one that no scheduler would build would waste memory."""
    limits = SchedulerLimits(running, budget, longest)

    alone, shared = largest_steps(limits, block_size)

    laid_out = [lay_out(plan, block_size) for plan in (alone, shared)]
    assert sum(alone.q_lens) == min(budget, longest - 1)
    assert laid_out[0].kv_lens == [longest - 1]
    assert len(shared.q_lens) == limits.running
    assert limits.running <= sum(shared.q_lens) <= budget
    assert shared.q_lens[0] == min(budget // limits.running, longest - 1)
    assert all(int(each.slots.max()) < TRIAL_BLOCKS * block_size for each in laid_out)


def test_logits_of_the_trial_go_through_all_that_logits_may():
    """The trial includes a filtered draw per request and a chunk of prompt logprobs: copies as large as activations."""
    executor = TrialRun([reading(9 * BLOCK_BYTES)])

    blocks(executor, max_running_requests=6, max_batched_tokens=290)

    assert [len(plan.logits_at) for plan in executor.plans] == [256, 6]


def test_too_little_is_refused_with_the_setting_the_rank_and_the_numbers():
    """The operator must learn which setting to change."""
    with pytest.raises(StartupError) as refused:
        blocks(TrialRun([reading(9 * BLOCK_BYTES), reading(BLOCK_BYTES)]))

    said = str(refused.value)
    assert "gpu_memory_utilization 0.5 leaves 8192 bytes for KV on rank 1" in said
    assert "held_bytes=600 peak_bytes=100" in said
    assert "raise it, lower max_batched_tokens or max_running_requests" in said
    assert "another process" not in said


@pytest.mark.parametrize(("length", "words"), [(1, "at least two tokens"), (301, "more than the model's 300")])
def test_lengths_that_no_request_can_have_are_refused_before_anything_is_tried(length, words):
    """Otherwise the trial would run a step without tokens, or one beyond the model's positions."""
    executor = TrialRun([reading(9 * BLOCK_BYTES)])

    with pytest.raises(StartupError, match=words):
        blocks(executor, max_model_len=length)

    assert not executor.pools


def test_a_length_of_two_is_served():
    """The minimum: one prompt token and one generated token."""
    executor = TrialRun([reading(9 * BLOCK_BYTES)])

    assert blocks(executor, max_model_len=2) == 9

    limits = SchedulerLimits(4, 32, 2)
    assert [plan.q_lens for plan in executor.plans[:1]] == [[1]]
    assert measure_rates(executor, limits, 16).decode_step_s > 0


class UnfinishedLogits:
    """Logits of a step that counts as running until one of them is read."""

    def __init__(self, executor):
        self._executor = executor

    def __getitem__(self, place):
        self._executor.now += 2.0
        return 1.0


class LaunchingExecutor:
    """Launches return at once; its clock advances when a result is read, as device work would."""

    now = 0.0

    def forward(self, plan):
        self.now += 0.001
        return UnfinishedLogits(self)


def test_rates_are_of_finished_steps():
    """On CUDA a launch returns at once; its duration would report a rate a hundred times too high to routers."""
    executor = LaunchingExecutor()

    rates = measure_rates(executor, SchedulerLimits(4, 32, 100), 16, clock=lambda: executor.now)

    assert rates.decode_step_s == pytest.approx(2.001)
    assert rates.prefill_tokens_per_s == pytest.approx(32 / 2.001)


def test_memory_that_others_hold_is_named():
    """Raising the memory share would not help in this case."""
    taken = MemoryReading(total_bytes=1 << 30, free_bytes=1000, held_bytes=1000, peak_bytes=100)

    with pytest.raises(StartupError, match="another process holds memory of this GPU"):
        blocks_left([taken], 0.9, BLOCK_BYTES)


def test_step_that_does_not_fit_is_refused_with_the_remedy():
    """The failure must occur at startup, before any request."""
    with pytest.raises(StartupError, match="lower max_batched_tokens or max_running_requests"):
        blocks(TrialRun([], torch.OutOfMemoryError("CUDA out of memory")))


def test_bytes_that_hold_no_block_are_refused_by_their_setting():
    """The operator set the value, so the error names the setting."""
    with pytest.raises(PoolTooSmall, match="kv_cache_bytes"):
        blocks(TrialRun([]), cache={"kv_cache_bytes": 100})


PROMPT = plan_of_rows(0, [PlanRow(list(range(3, 16)), 0, [1, 2])])


@pytest.mark.parametrize("kind", [ModelRunner, GpuRunner])
def test_a_runner_is_as_new_after_its_trial(kind, checkpoint):
    """The trial's pool, table and graphs are released, and its results are never read."""
    folder = checkpoint("llama")
    settings = ReplicaSettings(dtype="float32", device="cpu", max_running_requests=3, max_model_len=60)
    untried = kind(settings, folder, BLOCK_SIZE)
    untried.allocate_kv(4)
    memory = FakeMemory(reading(100_000))
    tried = kind(settings, folder, BLOCK_SIZE, memory=memory)
    cache = KvCacheSettings(block_size=BLOCK_SIZE, gpu_memory_utilization=0.5)

    found = number_of_blocks(cache, settings, tried.spec, tried, CUDA)
    tried.allocate_kv(found)

    assert found == kv_budget_bytes(memory.reading, 0.5) // tried.spec.bytes_per_block(BLOCK_SIZE)
    assert memory.begun == 2
    torch.testing.assert_close(tried.forward(PROMPT), untried.forward(PROMPT))


def test_ranks_agree_on_the_pool_of_the_one_with_the_least(checkpoint, free_port):
    """Two ranks over gloo with different free memory: rank 0 takes the minimum and both use it."""
    folder: Path = checkpoint("llama")
    settings = ReplicaSettings(
        dtype="float32", device="cpu", tensor_parallel_size=2, max_model_len=60, max_running_requests=3, cpu_threads=1
    )
    places = [RankPlace(rank=rank, size=2, host="127.0.0.1", port=free_port, secret=bytes(32)) for rank in range(2)]
    runners: dict[int, ModelRunner] = {}

    def load(settings, model_dir, block_size, group):
        memory = FakeMemory(reading(200_000 - 50_000 * group.rank))
        runners[group.rank] = ModelRunner(settings, model_dir, block_size, group, memory=memory)
        return runners[group.rank]

    def work():
        start_worker(settings, block_size=BLOCK_SIZE, model_dir=folder, place=places[1], load_runner=load).run()

    thread = threading.Thread(target=work)
    thread.start()
    _, executor, _ = load_rank_0(settings, folder, BLOCK_SIZE, places[0], load)
    cache = KvCacheSettings(block_size=BLOCK_SIZE, gpu_memory_utilization=0.5)

    found = number_of_blocks(cache, settings, runners[0].spec, executor, CUDA)
    executor.allocate_kv(found)
    logits = executor.forward(PROMPT)
    sizes = [runner.pool.num_blocks for runner in runners.values()]
    executor.close()
    thread.join(60)

    assert not thread.is_alive()
    assert found == 150_000 // runners[0].spec.bytes_per_block(BLOCK_SIZE)
    assert sizes == [found, found]
    assert logits.shape == (1, 211)
