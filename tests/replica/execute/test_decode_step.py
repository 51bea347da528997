"""A decode step can be captured: it reads nothing back, and its launches do not depend on tensor values."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from homing.replica.attention.paged import KvPool, PagedAttention
from homing.replica.config import ReplicaSettings
from homing.replica.execute.gpu_runner import DecodeStep
from homing.replica.execute.request_table import RequestTable
from homing.replica.kernels.base import SamplingInputs, TorchKernels
from homing.replica.models.base import Model
from homing.replica.models.loading import load_model
from homing.replica.parallel.rank_group import RankGroup

CPU = torch.device("cpu")
SIZE, PAGES, ROWS = 8, 4, 3
aten = torch.ops.aten
#: Operations that wait for the device or whose output shape depends on values.
READS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.bincount.default,
    aten._unique2.default,
    aten.equal.default,
}


class Launches(TorchDispatchMode):
    """Records every launch with its shapes; raises for an operation that a graph cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        masks = [each for each in _flat(args[1:]) if isinstance(each, torch.Tensor) and each.dtype == torch.bool]
        if func in READS or (func is aten.index.Tensor and masks):
            raise RuntimeError(f"{func} cannot be captured")
        self.seen.append(f"{func} {[tuple(each.shape) for each in tensors]}")
        return func(*args, **(kwargs or {}))


def _flat(values: Any) -> list[Any]:
    return [each for value in values for each in (value if isinstance(value, list | tuple) else [value])]


class Likeliest(TorchKernels):
    """TorchKernels whose sampler stays on the device, as Triton's does; it always draws the likeliest token."""

    def sample(self, logits: torch.Tensor, inputs: SamplingInputs, out: torch.Tensor) -> None:
        out.copy_(logits.argmax(-1))


class Alone:
    """A group of one rank that counts its broadcasts."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.told: list[torch.Tensor] = []

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        self.told.append(x)
        return x


def step_of(model: Model, group: RankGroup | None = None) -> tuple[DecodeStep, RequestTable]:
    table = RequestTable(ROWS, PAGES, CPU)
    pool = KvPool(model.spec, ROWS * PAGES + 1, SIZE, torch.float32, CPU)
    kernels = Likeliest()
    attention = PagedAttention(pool, kernels)
    step = DecodeStep(model, attention, kernels, table, max_rows=ROWS, block_size=SIZE, group=group)
    table.block_tables[1:] = torch.arange(1, ROWS * PAGES + 1).view(ROWS, PAGES)
    return step, table


def model_of(checkpoint: Any, kind: str, provider: str) -> Model:
    extra = {"num_local_experts": 4} if kind == "mixtral" else {"head_dim": 32} if kind == "qwen3" else {}
    settings = ReplicaSettings(dtype="float32", device="cpu", model_provider=provider)
    return load_model(settings, checkpoint(kind, **extra), None, device=CPU)


@pytest.mark.parametrize("provider", ["native", "transformers"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_launches_do_not_depend_on_what_the_tensors_hold(checkpoint, kind, provider):
    """Long rows, short rows and padding: a graph replays the launches of the step it was captured with."""
    step, table = step_of(model_of(checkpoint, kind, provider))
    found = []
    for rows, lengths in (([1, 2, 3], [0, 30, 7]), ([3, 0, 0], [15, 16, 17])):
        step.rows.copy_(torch.tensor(rows))
        table.seq_lens[1:] = torch.tensor(lengths, dtype=torch.int32)
        with torch.inference_mode(), Launches() as launches:
            step.run(ROWS)
        found.append(launches.seen)

    assert found[0] == found[1]
    assert len(found[0]) > 50


def test_a_mixture_says_that_it_cannot_be_captured(checkpoint):
    """The model's own statement, on which the runner relies, must be true."""
    model = model_of(checkpoint, "mixtral", "native")
    step, _ = step_of(model)

    with torch.inference_mode(), Launches(), pytest.raises(RuntimeError, match="cannot be captured"):
        step.run(ROWS)

    assert model.capture_problem


def test_ranks_hear_within_the_step_what_rank_0_drew(checkpoint):
    """The other ranks' tables continue from the drawn token, without a host between two steps."""
    group = Alone()
    step, table = step_of(model_of(checkpoint, "llama", "native"), group)  # type: ignore[arg-type]
    step.rows.copy_(torch.tensor([2, 1, 0]))

    with torch.inference_mode():
        step.run(ROWS)

    assert [each.tolist() for each in group.told] == [step.tokens.tolist()]
    assert table.last_tokens[[2, 1]].tolist() == step.tokens[:2].tolist()
    assert table.seq_lens.tolist() == [0, 1, 1, 0]
