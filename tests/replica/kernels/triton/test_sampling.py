"""The device's sampler draws the same tokens as `sampler.sample`."""

import math
from bisect import bisect_right
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from homing.replica.engine.logit_edits import SamplingRow
from homing.replica.engine.sampler import sample, uniforms
from homing.replica.kernels.base import NO_TOKEN, SamplingInputs
from homing.replica.kernels.triton.sampling import levels_of
from homing.replica.kernels.triton.triton_kernels import TritonKernels
from homing.replica.messages import SamplingParams

from ..layouts import IMPLEMENTATIONS

KINDS = {
    "greedy": {"temperature": 0.0},
    "all": {"temperature": 1.0},
    "hot": {"temperature": 3.0},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-k of one": {"temperature": 1.0, "top_k": 1},
    "top-p": {"temperature": 1.0, "top_p": 0.7},
    "tiny top-p": {"temperature": 1.0, "top_p": 1e-6},
    "min-p": {"temperature": 1.5, "min_p": 0.1},
    "everything": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "top-k beyond the vocabulary": {"temperature": 1.0, "top_k": 1 << 20},
}

MIXED = ("greedy", "hot", "min-p", "everything")


def inputs_of(rows: list[SamplingRow], device) -> SamplingInputs:
    def column(values, dtype):
        return torch.tensor(list(values), dtype=dtype, device=device)

    params = [row.params for row in rows]
    return SamplingInputs(
        rows=torch.arange(len(rows), device=device),
        temperatures=column((each.temperature for each in params), torch.float32),
        top_ks=column((each.top_k for each in params), torch.int32),
        top_ps=column((each.top_p for each in params), torch.float64),
        min_ps=column((each.min_p for each in params), torch.float32),
        seeds=column((each.seed - (each.seed >> 63 << 64) for each in params), torch.int64),
        prompts=column((7 for _ in rows), torch.int64),
        lengths=column((7 + row.position for row in rows), torch.int64),
        last_tokens=column((-7 for _ in rows), torch.int64),
    )


def rows_of(params: list[dict], seed: int = 0) -> list[SamplingRow]:
    return [
        SamplingRow(SamplingParams(seed=(seed + 977 * index) % (1 << 64), max_tokens=1, **each), 3 * index, (), ())
        for index, each in enumerate(params)
    ]


def both(logits, rows, device):
    out = torch.empty(len(rows), dtype=torch.int64, device=device)
    TritonKernels().sample(logits.to(device), inputs_of(rows, device), out)
    return out.tolist(), [drawn.token_id for drawn in sample(logits, rows)]


@pytest.mark.parametrize(("vocab", "kinds"), [(5, KINDS), (211, KINDS), (4096, MIXED), (5000, MIXED), (70_000, MIXED)])
def test_draws_what_the_cpu_draws(vocab, kinds, device):
    """Vocabularies with one to five levels of choice; rows of several kinds in one batch."""
    logits = 3 * torch.randn(len(kinds), vocab, generator=torch.Generator().manual_seed(vocab))

    got, wanted = both(logits, rows_of([KINDS[kind] for kind in kinds], seed=vocab), device)

    assert got == wanted


@settings(max_examples=6, deadline=None)
@given(
    st.integers(0, (1 << 64) - 1),
    st.integers(0, 1 << 40),
    st.floats(0.1, 3.0),
    st.integers(0, 12),
    st.floats(0.01, 1.0),
)
def test_draws_what_the_cpu_draws_for_any_numbers(seed, position, temperature, top_k, top_p):
    """Seeds use all 64 bits and positions more than 32. Another replica must continue with the same tokens."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logits = 2 * torch.randn(1, 97, generator=torch.Generator().manual_seed(seed % 1000))
    params = SamplingParams(seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=1)

    got, wanted = both(logits, [SamplingRow(params, position, (), ())], device)

    assert got == wanted


def drawn_in_float64(logits: torch.Tensor, row: SamplingRow) -> int:
    """The definition: filters on a sorted list, then one of at most 16 groups at each level, in float64."""
    params = row.params
    scaled = logits.double() / params.temperature
    weights = (scaled - scaled.max()).exp()
    order = weights.argsort(descending=True)
    kept = order[: params.top_k] if params.top_k else order
    held = weights[kept].cumsum(0)
    kept = kept[: int((held < params.top_p * held[-1]).sum()) + 1] if params.top_p < 1 else kept
    weights = weights.where(torch.isin(torch.arange(len(weights)), kept), 0)
    weights = weights.where(weights >= params.min_p, 0)
    levels = levels_of(len(weights))
    points = uniforms([params.seed], [row.position], levels)[0]
    chosen = 0
    for level, point in enumerate(points):
        width = 16 ** (levels - 1 - level)
        groups = [float(weights[(chosen * 16 + i) * width :][:width].sum()) for i in range(16)]
        upto = list(accumulate(groups))
        chosen = chosen * 16 + bisect_right(upto, point * upto[-1])
    return chosen


@pytest.mark.parametrize("vocab", [5, 211, 4100])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_draws_what_the_definition_draws_in_float64(implementation, vocab, device):
    """The same random numbers with sorting and sums in double precision; greedy rows are mixed in."""
    kinds = [kind for kind in KINDS if vocab < 4000 or kind in MIXED]
    logits = 3 * torch.randn(len(kinds), vocab, generator=torch.Generator().manual_seed(vocab))
    rows = rows_of([KINDS[kind] for kind in kinds], seed=1)
    out = torch.empty(len(rows), dtype=torch.int64, device=device)
    inputs = inputs_of(rows, device)

    implementation().sample(logits.to(device), inputs, out)

    wanted = [
        int(line.argmax()) if row.params.temperature == 0 else drawn_in_float64(line, row)
        for line, row in zip(logits, rows, strict=True)
    ]
    assert out.tolist() == wanted
    assert inputs.last_tokens.tolist() == wanted


@pytest.mark.parametrize("vocab", [211, 4100])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_logits_that_are_no_numbers_give_no_token(implementation, vocab, device):
    """Greedy or sampled, anywhere in the row; other rows are not affected."""
    kinds = ["greedy", "hot", "everything"] * 3
    logits = 3 * torch.randn(len(kinds), vocab, generator=torch.Generator().manual_seed(1))
    rows = rows_of([KINDS[kind] for kind in kinds])
    wanted = [drawn.token_id for drawn in sample(logits, rows)]
    for number, value in {1: math.nan, 3: math.inf, 5: math.nan, 6: math.nan, 7: math.inf, 8: -math.inf}.items():
        logits[number, slice(None) if number in (5, 8) else vocab - 1] = value
        wanted[number] = NO_TOKEN
    out = torch.empty(len(rows), dtype=torch.int64, device=device)

    implementation().sample(logits.to(device), inputs_of(rows, device), out)

    assert out.tolist() == wanted


@pytest.mark.filterwarnings("ignore:overflow encountered in divide")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_logit_beyond_all_range_over_its_temperature_is_certain(implementation, device):
    """The model's logit was finite, so its token is a valid answer."""
    logits = torch.zeros(2, 211)
    logits[0, 9], logits[1, 7] = 3.3e38, 3.3e38
    rows = rows_of([KINDS["everything"], KINDS["top-k"] | {"temperature": 1e-3}])
    out = torch.empty(2, dtype=torch.int64, device=device)

    implementation().sample(logits.to(device), inputs_of(rows, device), out)

    assert out.tolist() == [9, 7]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_rows_are_no_error(implementation, device):
    """A step that contains only chunks draws nothing."""
    out = torch.empty(0, dtype=torch.int64, device=device)

    implementation().sample(torch.empty(0, 50, device=device), inputs_of([], device), out)

    assert out.tolist() == []


def test_ties_are_kept_together(device):
    """The set must not depend on the order of ties: with top-k 1, every token that ties with the best can be drawn."""
    logits = torch.zeros(10, 8)
    logits[:, [2, 5]] = 4.0
    rows = rows_of([{"temperature": 1.0, "top_k": 1}] * 10)

    got, wanted = both(logits, rows, device)

    assert got == wanted
    assert set(got) == {2, 5}


BOTH = {"top_k": 300, "top_p": 0.9}


@pytest.mark.parametrize(
    ("shape", "kind"),
    [(shape, BOTH) for shape in ("equal", "rounded", "far", "near", "steep")]
    + [("rounded", {"top_p": 0.99}), ("far", {"top_k": 4400})],
    ids=str,
)
def test_a_floor_is_found_wherever_it_lies(shape, kind, device):
    """Covers hundreds of tied logits (as in bfloat16), logits far below the largest, and more than fit."""
    logits = 2 * torch.randn(1, 4500, generator=torch.Generator().manual_seed(7))
    match shape:
        case "equal":
            logits = torch.ones_like(logits)
        case "rounded":
            logits = (2 * logits).bfloat16().float()
        case "far":
            logits = 200 * logits
        case "near":
            logits = logits * 1e-4
        case "steep":
            logits[:, :50] += 60
    rows = rows_of([{"temperature": 1.0} | kind], seed=3)

    got, wanted = both(logits, rows, device)

    assert got == wanted


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter does")
@pytest.mark.parametrize(("kind", "most"), [({"top_k": 4, "top_p": 0.9}, 300), ({"top_p": 0.9}, 2500)], ids=str)
def test_only_tokens_near_the_floor_take_part_in_atomics(kind, most, device, monkeypatch):
    """Chats use top-k and top-p by default: two atomics per token of the vocabulary took 4 to 10 % of a step (paper).

    Logits as of a trained model: most tokens are 15 to 30 below the likeliest.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    counted, real = [], InterpreterBuilder.create_atomic_rmw

    def create_atomic_rmw(self, op, ptr, val, mask, sem, scope):
        counted.append(int(mask.data.sum()))
        return real(self, op, ptr, val, mask, sem, scope)

    monkeypatch.setattr(InterpreterBuilder, "create_atomic_rmw", create_atomic_rmw)
    logits = 3 * torch.randn(1, 20_000, generator=torch.Generator().manual_seed(2))
    logits[0, ::1000] += 15

    got, wanted = both(logits, rows_of([{"temperature": 0.7} | kind], seed=3), device)

    assert got == wanted
    assert sum(counted) < most


def test_greedy_takes_the_first_of_equals(device):
    """The same as argmax on the CPU."""
    logits = torch.zeros(2, 9000)
    logits[0, [10, 8000]] = 1.0
    logits[1, [5000, 8999]] = 1.0

    got, _ = both(logits, rows_of([{"temperature": 0.0}] * 2), device)

    assert got == [10, 5000]


@pytest.mark.parametrize(("vocab", "levels"), [(1, 1), (16, 1), (17, 2), (256, 2), (4096, 3), (151_936, 5)])
def test_levels_are_those_of_the_cpu_sampler(vocab, levels):
    """Each level uses its own random number, so a different number of levels would give different tokens."""
    assert levels_of(vocab) == levels
