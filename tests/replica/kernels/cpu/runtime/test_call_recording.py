"""A recorded step computes the same as the step itself from its tensors' current contents, or is refused."""

from collections.abc import Iterator

import pytest
import torch

from homing.replica.kernels.cpu.linear.product import pack, product
from homing.replica.kernels.cpu.pointwise import add_rms_norm, silu_mul
from homing.replica.kernels.cpu.runtime.call_recording import SMALLEST_PIECE, Arena, NotRecorded, record
from homing.replica.kernels.cpu.runtime.thread_team import run_calls
from homing.replica.models.layers import Linear, packing_problem

FEATURES = 256
WEIGHTS = [pack(torch.randn(2 * FEATURES, FEATURES).bfloat16() / 16) for _ in range(6)]
NORM = torch.ones(FEATURES).bfloat16()


def chain(x: torch.Tensor) -> torch.Tensor:
    """Products run on all threads; the norm and activation of a row run on one."""
    for weight in WEIGHTS:
        _, normed = add_rms_norm(x, None, NORM, 1e-6)
        x, _ = add_rms_norm(x, silu_mul(product(normed, weight)), NORM, 1e-6)
    return x


@pytest.fixture(params=[1, 2, 3])
def threads(request) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rows", [1, 5])
def test_runs_again_on_what_its_tensors_hold(rows):
    """Bit for bit. Each call needs the previous call's output, often with another number of threads."""
    x = torch.randn(rows, FEATURES).bfloat16()

    recording = record(Arena(), lambda: chain(x))

    for _ in range(20):
        x.copy_(torch.randn(rows, FEATURES))
        assert torch.equal(recording.run(), chain(x))


@pytest.mark.parametrize("threads", [3], indirect=True)
@pytest.mark.parametrize("given", [1, 2])
def test_a_team_may_be_smaller_than_calls_ask_for(threads, given):
    """OpenMP may give fewer threads than requested (OMP_THREAD_LIMIT); those must do all the work without waiting."""
    x = torch.randn(5, FEATURES).bfloat16()
    recording = record(Arena(), lambda: chain(x))
    assert recording.threads == threads

    x.copy_(torch.randn(5, FEATURES))
    (calls,) = recording.parts
    run_calls(calls, given)

    assert torch.equal(recording.result, chain(x))


def test_steps_share_their_memory():
    """Steps run one at a time: another batch size needs no more memory and must not overwrite other results."""
    arena, x = Arena(), torch.randn(8, FEATURES).bfloat16()
    largest = record(arena, lambda: chain(x))
    pieces = arena.pieces

    others = [record(arena, lambda rows=rows: chain(x[:rows])) for rows in range(1, 8)]

    assert arena.pieces == pieces
    for recording, rows in zip([*others, largest], range(1, 9), strict=True):
        assert torch.equal(recording.run(), chain(x[:rows]))


def test_what_a_step_reads_stays():
    """A recording keeps its inputs alive, even if nothing else references them."""
    x = torch.randn(1, FEATURES).bfloat16()
    wanted = chain(x)
    recording = recorded_on_a_copy(x)

    junk = [torch.full((size,), float("nan")) for size in range(16, 2048, 16)]

    assert torch.equal(recording.run(), wanted)
    assert all(each.isnan().all() for each in junk)


def recorded_on_a_copy(x):
    copied = x.clone()
    return record(Arena(), lambda: chain(copied))


@pytest.mark.parametrize(
    ("step", "named"),
    [
        (lambda x: x * 2 if x.sum() else x, r"aten\.(is_nonzero|item)"),
        (lambda x: x * float(x[0, 0]), r"aten\.item"),
        (lambda x: x * x[0].tolist()[0], r"aten\.resolve_conj"),
        (lambda x: x[0].float().numpy() and x, r"aten\.(resolve_conj|resolve_neg)"),
        (lambda x: silu_mul(torch.tensor([[float(len(x)), 1.0]])), r"aten\.lift_fresh"),
        (lambda x: x[x > 0], r"aten\.index\.Tensor"),
        (lambda x: x.nonzero(), r"aten\.nonzero"),
        (lambda x: torch.where(x > 0)[0], r"aten\.where\.default"),
        (lambda x: (x[0] > 0).long().bincount(), r"aten\.bincount"),
        (lambda x: x[0].repeat_interleave((x[0] > 0).long()), r"aten\.repeat_interleave\.self_Tensor"),
        (lambda x: x.view(-1, FEATURES), "the result was not computed"),
    ],
)
def test_what_depends_on_numbers_is_refused(step, named):
    """The log names the operation. A replay would repeat the result of the recorded values."""
    x = torch.randn(1, FEATURES).bfloat16()

    with torch.inference_mode(), pytest.raises(NotRecorded, match=named):
        record(Arena(), lambda: step(x))


def mixed(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Torch operations as models use them, before, between and after kernels: new memory, in place, views."""
    first, second = add_rms_norm(x, None, NORM, 1e-6)[1].chunk(2, -1)
    turned = torch.cat((-second, first), -1) * torch.arange(FEATURES, dtype=x.dtype).cos()
    strided = turned.view(len(x), 4, -1).transpose(1, 2).reshape(len(x), -1).unsqueeze_(0)[0]
    wide = strided.to(torch.float32)[:, : FEATURES // 2].repeat_interleave(2, -1)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    shares, chosen = wide.softmax(-1).topk(3, -1)
    total = torch.zeros_like(wide).index_add_(0, places, wide).index_copy_(1, chosen[0], shares)
    return silu_mul(product((total[places] + x).to(x.dtype), WEIGHTS[0]))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rows", [1, 5])
def test_operations_of_torch_run_again_between_kernels(rows):
    """Bit for bit: transformers' models use torch operations for which we have no kernels."""
    x, places, arena = torch.randn(rows, FEATURES).bfloat16(), torch.arange(rows), Arena()
    with torch.inference_mode():
        recording = record(arena, lambda: mixed(x, places))
        pieces = arena.pieces

        for _ in range(5):
            x.copy_(torch.randn(rows, FEATURES))
            places.copy_(torch.randperm(rows))
            assert torch.equal(recording.run(), mixed(x, places))
        record(arena, lambda: mixed(x, places))

    assert arena.pieces == pieces


@pytest.mark.skipif(packing_problem(torch.float32) is not None, reason="this build of torch packs no linears")
def test_products_of_onednn_are_repeated():
    """oneDNN's packed weights are tensors without an address."""
    x, linear = torch.randn(3, FEATURES), Linear(torch.randn(7, FEATURES))
    with torch.inference_mode():
        recording = record(Arena(), lambda: linear(x))
        x.copy_(torch.randn(3, FEATURES))

        assert torch.equal(recording.run(), linear(x))


def test_pieces_are_given_out_again_when_no_view_is_left():
    """A view keeps its tensor's memory in use."""
    arena = Arena()
    view = arena.empty((3, 5), torch.bfloat16)[1:].flatten()

    beside = arena.empty((3, 5), torch.bfloat16)
    assert beside.untyped_storage().data_ptr() != view.untyped_storage().data_ptr()
    assert arena.pieces == 2

    del view
    arena.empty((SMALLEST_PIECE,), torch.uint8)
    assert arena.pieces == 2


def test_no_numbers_are_no_error():
    """A step may need no logits."""
    assert Arena().empty((0, 7), torch.float32).shape == (0, 7)
