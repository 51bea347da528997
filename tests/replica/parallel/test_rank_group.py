"""A model split over ranks gives the same answers as the whole model; a lost rank is an error, not a hang."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil
import pytest
import torch

from homing.replica.config import ReplicaSettings
from homing.replica.engine.step_plan import PlanRow, StepPlan, plan_of_rows
from homing.replica.errors import RankLost, TensorParallelUnsupported
from homing.replica.execute.runner import ModelRunner
from homing.replica.models.layers import int8_problem
from homing.replica.parallel.rank_group import RankGroup, _until_listening

from ..toys import BLOCK_SIZE, NUM_BLOCKS, ToyScheduler, make_runner

WORKER = Path(__file__).with_name("rank_worker.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class StartedRanks:
    """Rank 0 in this process, and the other ranks in their own processes, which run the same plans."""

    def __init__(self, folder: Path, size: int, quantization: Literal["none", "int8"] = "none") -> None:
        port = free_port()
        self.workers = [
            subprocess.Popen(
                [sys.executable, WORKER, folder, quantization, *map(str, (rank, size, port, BLOCK_SIZE, NUM_BLOCKS))],
                stdin=subprocess.PIPE,
            )
            for rank in range(1, size)
        ]
        group = RankGroup.join(0, size, host="127.0.0.1", port=port, backend="gloo", timeout_s=250)
        settings = ReplicaSettings(dtype="float32", device="cpu", tensor_parallel_size=size, quantization=quantization)
        self.runner = ModelRunner(settings, folder, BLOCK_SIZE, group)
        self.runner.allocate_kv(NUM_BLOCKS)

    def send(self, plan: StepPlan) -> None:
        """Send the plan to the other ranks."""
        frame = msgspec.msgpack.encode(plan)
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.write(len(frame).to_bytes(4, "little") + frame)
            worker.stdin.flush()

    def forward(self, plan: StepPlan) -> torch.Tensor | None:
        self.send(plan)
        return self.runner.forward(plan)


@contextmanager
def rank_group(folder: Path, size: int, quantization: Literal["none", "int8"] = "none") -> Iterator[StartedRanks]:
    """A rank group whose processes are gone on exit, in every case."""
    made = StartedRanks(folder, size, quantization)
    try:
        yield made
    finally:
        for worker in made.workers:
            assert worker.stdin is not None
            worker.stdin.close()
            try:
                worker.wait(timeout=60)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()


@pytest.mark.parametrize(
    ("model_type", "overrides", "size"),
    [
        ("qwen2", {}, 2),
        pytest.param("llama", {"attention_bias": True, "mlp_bias": True}, 2, marks=pytest.mark.slow),
        pytest.param("qwen3", {"head_dim": 32, "tie_word_embeddings": True}, 2, marks=pytest.mark.slow),
        pytest.param("llama", {}, 4, marks=pytest.mark.slow),
        pytest.param("mistral", {"sliding_window": 11}, 4, marks=pytest.mark.slow),
        pytest.param("qwen3", {"head_dim": 32, "tie_word_embeddings": True}, 4, marks=pytest.mark.slow),
        pytest.param("mixtral", {"num_local_experts": 4}, 2, marks=pytest.mark.slow),
        pytest.param(
            "qwen3_moe",
            {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
            4,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "qwen2_moe",
            {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
            4,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_split_model_answers_as_the_whole(model_type, overrides, size, checkpoint, prompts, reference):
    """Two ranks split the KV heads, four share each head between two; neither divides the vocabulary of 211."""
    folder = checkpoint(model_type, **overrides)

    with rank_group(folder, size) as made:
        answers = ToyScheduler(made.forward, chunk=7).generate(prompts, 10)
        codes = [worker.poll() for worker in made.workers]

    assert answers == reference(folder, prompts, 10)
    assert made.runner.spec.kv_shapes[0].kv_heads == 1
    assert codes == [None] * (size - 1)
    assert [worker.returncode for worker in made.workers] == [0] * (size - 1)


@pytest.mark.slow
@pytest.mark.skipif(int8_problem() is not None, reason="no 8-bit linears on this processor")
@pytest.mark.parametrize("size", [2, 4])
def test_eight_bits_on_ranks_are_as_near_as_on_one(size, checkpoint):
    """Each rank scales its own part of a linear's input, so logits differ, but the error is no larger."""
    folder = checkpoint("llama")
    plan = plan_of_rows(0, [PlanRow(list(range(3, 40)), 0, [1, 2, 3, 4, 5])], logits_at=range(37))
    exact, alone = (make_runner(folder, quantization=kind).forward(plan) for kind in ("none", "int8"))

    with rank_group(folder, size, "int8") as made:
        split = made.forward(plan)

    assert 0 < (split - exact).norm() < 0.05 * exact.norm()
    assert (split - exact).norm() < 1.5 * (alone - exact).norm()


def test_hidden_states_of_ranks_are_those_of_the_whole(checkpoint):
    """Every rank has them after its all-reduce: rank 0 reads its own, next to the logits that all ranks compute.

    A step of only prefill chunks gathers nothing on any rank; the next step must still be in sync.
    """
    folder = checkpoint("qwen2")
    plan = plan_of_rows(0, [PlanRow([5, 6, 7], 0, [1]), PlanRow([9, 8], 0, [2])])
    whole, hidden = make_runner(folder).forward_hidden(plan, range(5))

    with rank_group(folder, 2) as made:
        made.send(plan)
        split, split_hidden = made.runner.forward_hidden(plan, range(5))
        made.send(no_logits := plan_of_rows(1, [PlanRow([9, 8], 0, [3])], logits_at=[]))
        nothing, last = made.runner.forward_hidden(no_logits, [1])
        after = made.forward(plan_of_rows(2, [PlanRow([4], 2, [3])]))
        chunk = made.forward(plan_of_rows(3, [PlanRow([5, 6, 7], 0, [4])], logits_at=[]))
        next_chunk = made.forward(plan_of_rows(4, [PlanRow([8], 3, [4])]))

    torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(split_hidden, hidden, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last, hidden[4:], rtol=1e-4, atol=1e-4)
    assert (nothing.shape, after.shape) == ((0, 211), (1, 211))
    assert (chunk.shape, next_chunk.shape) == ((0, 211), (1, 211))


def test_killed_rank_is_an_error_at_the_next_step(checkpoint):
    """The supervisor rebuilds the group; a step that hangs would hide the loss."""
    plan = plan_of_rows(0, [PlanRow([5, 6, 7], 0, [1])])
    with rank_group(checkpoint("qwen2"), 2) as made:
        made.forward(plan)
        made.workers[0].kill()
        made.workers[0].wait()

        with pytest.raises(RankLost):
            made.runner.forward(plan)


def test_absent_rank_is_an_error_in_time():
    """Rank 1 never joins, and rank 0 reports it."""
    with pytest.raises(RankLost, match="2 ranks"):
        RankGroup.join(0, 2, host="127.0.0.1", port=free_port(), backend="gloo", timeout_s=1)


class Alone:
    """A placeholder process group for splits that are refused before any collective."""


@pytest.mark.parametrize(
    ("provider", "size", "reason"), [("native", 3, "4 attention heads"), ("transformers", 2, "tensor_parallel_size: 1")]
)
def test_impossible_split_is_refused_by_name(provider, size, reason, checkpoint):
    """The refusal precedes reading weights and names what to change."""
    settings = ReplicaSettings(device="cpu", model_provider=provider, tensor_parallel_size=size)

    with pytest.raises(TensorParallelUnsupported, match=reason):
        ModelRunner(settings, checkpoint("llama"), BLOCK_SIZE, RankGroup(0, size, Alone()))


def test_ranks_meet_on_their_own_address_alone() -> None:
    """Torch's listener binds to every interface, which a replica on loopback must avoid."""
    port = free_port()
    group = RankGroup.join(0, 1, host="127.0.0.1", port=port, backend="gloo", timeout_s=60)
    listening = [each.laddr for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]

    assert group.size == 1
    assert port in {address.port for address in listening}
    assert {address.ip for address in listening} == {"127.0.0.1"}


@pytest.mark.parametrize("reason", [ConnectionRefusedError, OSError(113, "No route to host"), TimeoutError])
def test_a_rank_waits_for_the_first_one_whatever_the_network_says(monkeypatch, reason) -> None:
    """Its host may have started a moment ago."""
    refusals = [reason, reason]

    def connect(*_: object) -> nullcontext[None]:
        if refusals:
            raise refusals.pop()
        return nullcontext()

    monkeypatch.setattr(socket, "create_connection", connect)

    _until_listening("10.0.0.1", 1, timedelta(seconds=60))

    assert not refusals


class StreamGroup:
    """A process group like nccl's: synchronous collectives return no work object."""

    def __init__(self) -> None:
        self.asynchronous: list[bool] = []

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        self.asynchronous.append(options.asyncOp)

    def gather(self, parts: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: Any) -> None:
        self.asynchronous.append(options.asyncOp)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> None:
        self.asynchronous.append(options.asyncOp)


def test_collectives_run_on_the_stream_that_computes() -> None:
    """Asynchronous ones switch to nccl's stream and back: two more events each, 72 times a step of an 8B model."""
    inner = StreamGroup()
    group = RankGroup(0, 2, inner)
    x = torch.ones(3)

    group.all_reduce(x)
    group.gather(x)
    group.broadcast(x)

    assert inner.asynchronous == [False, False, False]
