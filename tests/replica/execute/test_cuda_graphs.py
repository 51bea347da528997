"""Batches are padded to a few sizes, and the stand-in for CUDA graphs replays by calling the function."""

import gc
from contextlib import contextmanager, nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from homing.replica.config import ReplicaSettings
from homing.replica.engine.step_plan import PlanRow, SlotStart, plan_of_rows
from homing.replica.execute.cuda_graphs import CudaGraphs, EagerSteps, NotCaptured, graph_sizes, padded_size
from homing.replica.execute.gpu_runner import GpuRunner
from homing.replica.execute.mixed_step import sizes_for


@given(st.integers(1, 600), st.data())
def test_every_batch_has_a_size_that_is_not_much_larger(most, data):
    """A padding row costs as much as a real one; a batch without a graph costs one launch per kernel."""
    sizes = graph_sizes(most)
    rows = data.draw(st.integers(1, most))

    size = padded_size(rows, sizes)

    assert size is not None
    assert rows <= size <= most
    assert size - rows < 16
    assert size <= 2 * rows


def test_larger_batches_have_none():
    """The caller must not replay a graph that is too small."""
    assert padded_size(9, [1, 2, 4, 8]) is None


def test_eager_replays_run_the_function_of_their_size():
    """The stand-in has a graph's effect on its tensors by calling the function again."""
    calls: list[str] = []
    graphs = EagerSteps()
    graphs.capture(1, lambda: calls.append("one"))
    graphs.capture(2, lambda: calls.append("two"))

    graphs.replay(2)
    graphs.replay(1)

    assert calls == ["two", "one"]


class FakeStream:
    def wait_stream(self, other):
        pass


class FakeGraph:
    def pool(self):
        return "pool"

    def replay(self):
        pass


class FakeCuda:
    """The part of torch.cuda that capturing uses; records the stream and pool of each capture."""

    CUDAGraph, Stream = FakeGraph, FakeStream

    def __init__(self):
        self.captures = []
        self.current = self.default = FakeStream()

    def current_stream(self):
        return self.current

    def set_stream(self, stream):
        self.current = stream

    def stream(self, stream):
        return nullcontext()

    def synchronize(self):
        pass

    @contextmanager
    def graph(self, graph, *, pool, stream, capture_error_mode):
        self.captures.append((stream, pool))
        self.current = stream
        yield
        self.current = self.default


def test_all_captures_share_one_stream_and_one_pool():
    """torch reuses a pool's memory only on one stream: else 0.35 GB more at 64 rows of an 8B model, by calculation."""
    cuda = FakeCuda()
    graphs = CudaGraphs(cuda)

    for key in range(3):
        graphs.capture(key, lambda: None)

    assert len({stream for stream, _ in cuda.captures}) == 1
    assert [pool for _, pool in cuda.captures] == [None, "pool", "pool"]


def test_a_failed_capture_leaves_the_stream_as_it_was():
    """Otherwise, all later work would be launched on the capture stream."""
    cuda = FakeCuda()
    calls = []

    def run():
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(NotCaptured, match="not permitted"):
        CudaGraphs(cuda).capture(0, run)

    assert cuda.current is cuda.default


def test_all_graphs_are_captured_after_one_garbage_collection(checkpoint):
    """One per graph would take 10 to 30 s of a replica's start; one during a capture would break it."""
    settings = ReplicaSettings(dtype="float32", device="cpu", max_running_requests=40, max_model_len=64)
    cuda, collections = FakeCuda(), []
    runner = GpuRunner(settings, checkpoint("qwen3"), 16, graphs=CudaGraphs(cuda))

    def note(phase, about):
        if phase == "start":
            collections.append((about["generation"], len(cuda.captures)))

    gc.callbacks.append(note)
    try:
        runner.allocate_kv(9)
    finally:
        gc.callbacks.remove(note)

    assert len(cuda.captures) > 20
    assert (2, 0) in collections
    assert not [count for _, count in collections if 0 < count < len(cuda.captures)]
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("hidden", "layers", "largest"), [(1024, 28, 2048), (2048, 28, 512), (4096, 36, 512), (0, 36, 512)]
)
def test_steps_are_captured_as_long_as_launching_them_takes_longer(hidden, layers, largest):
    """A 0.6B model computes 2,000 tokens faster than the host launches its kernels; an 8B model does not."""
    assert sizes_for(hidden, layers)[-1] == largest


class Replayed(EagerSteps):
    """Counts the replays of steps with prompts."""

    pads_mixed = True

    def __init__(self):
        super().__init__()
        self.sizes = []

    def replay(self, key):
        if key[0] == "mixed":
            self.sizes.append(key[1])
        super().replay(key)


@pytest.mark.parametrize(("prompts", "tokens", "size"), [(1, 7, 32), (40, 5, 256), (3, 200, 768), (64, 16, 1024)])
def test_bursts_of_chats_and_long_chunks_are_replayed(checkpoint, prompts, tokens, size):
    """Launched kernel by kernel, a step takes milliseconds of the host, whatever it computes."""
    graphs, pages = Replayed(), -(-tokens // 16)
    settings = ReplicaSettings(dtype="float32", device="cpu", max_running_requests=64, max_model_len=256)
    runner = GpuRunner(settings, checkpoint("qwen3"), 16, graphs=graphs)
    runner.allocate_kv(prompts * pages + 1)
    rows = [PlanRow([5] * tokens, 0, range(1 + at * pages, 1 + (at + 1) * pages)) for at in range(prompts)]
    slots = [*range(1, prompts + 1)]
    started = [SlotStart(slot, tokens, 1, 0.0, 0, 1.0, 0.0) for slot in slots]
    plan = structs.replace(plan_of_rows(0, rows), slots=slots, drawn=slots, started=started)

    drawn = runner.launch(plan)

    assert drawn is not None
    assert len(set(drawn.tokens())) == 1, "equal prompts have different answers"
    assert graphs.sizes == [size]
