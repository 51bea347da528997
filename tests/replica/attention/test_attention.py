"""Every backend equals attention computed from its definition, and that reference equals a dense computation."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from homing.replica.attention.paged import Batch, KvPool, PagedAttention
from homing.replica.engine.step_plan import PlanRow, lay_out, plan_of_rows
from homing.replica.kernels.base import TorchCpuKernels, TorchKernels
from homing.replica.kernels.cpu.cpu_kernels import CompiledKernels
from homing.replica.models.base import Attend, AttentionRule
from homing.replica.models.spec import KvShape, ModelSpec

from .reference import ReferenceAttention, attention, visible

torch.set_num_threads(1)
CPU = torch.device("cpu")
BLOCK = 4


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16


class Backend(Attend, Protocol):
    """The interface shared by the backends and the reference."""

    def begin(self, batch: Batch) -> None: ...


def spec(shape: Shape) -> ModelSpec:
    kv = KvShape(shape.kv_heads, shape.key_dim, shape.value_dim)
    return ModelSpec((kv, kv), 10, 64, (), "float32", 4)


def filled_pool(shape: Shape, blocks: int, seed: int) -> KvPool:
    """A pool in which every slot has data, including slots that must not be read."""
    pool = KvPool(spec(shape), blocks, BLOCK, torch.float32, CPU)
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*pool.keys, *pool.values):
        tensor.normal_(generator=generator)
    return pool


def test_copied_slots_hold_what_the_sources_held_in_every_layer():
    """Layers are stacked by shape: a copy must reach every stack, and must read all sources before it writes."""
    shapes = (KvShape(2, 8, 8), KvShape(2, 8, 6), KvShape(1, 8, 8))
    pool = KvPool(ModelSpec(shapes, 10, 64, (), "float32", 4), 4, BLOCK, torch.float32, CPU)
    tensors = [tensor.normal_().flatten(0, 1) for tensor in (*pool.keys, *pool.values)]
    before = [tensor.clone() for tensor in tensors]
    sources, targets = torch.tensor([4, 5, 8]), torch.tensor([8, 9, 12])

    pool.copy(torch.stack((sources, targets)), TorchKernels())

    kept = torch.tensor([slot for slot in range(4 * BLOCK) if slot not in targets.tolist()])
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor[targets], old[sources])
        assert torch.equal(tensor[kept], old[kept])
    assert [tuple(keys.shape[2:]) for keys in pool.keys] == [(2, 8), (2, 8), (1, 8)]


def batch_of(lengths: list[tuple[int, int]]) -> Batch:
    """Rows of (start, new tokens), each with its own blocks."""
    rows, block = [], 1
    for start, new in lengths:
        count = -(-(start + new) // BLOCK)
        rows.append(PlanRow([1] * new, start, range(block, block + count)))
        block += count
    return Batch.on_device(lay_out(plan_of_rows(0, rows), BLOCK), CPU)


def run(
    backend: Callable[[KvPool], Backend], batch: Batch, shape: Shape, rule: AttentionRule, layer: int = 1
) -> tuple[torch.Tensor, KvPool]:
    pool = filled_pool(shape, int(batch.block_tables.max()) + 1, seed=0)
    generator = torch.Generator().manual_seed(1)
    tokens = len(batch.token_ids)
    q = torch.randn(tokens, shape.heads, shape.key_dim, generator=generator)
    k = torch.randn(tokens, shape.kv_heads, shape.key_dim, generator=generator)
    v = torch.randn(tokens, shape.kv_heads, shape.value_dim, generator=generator)
    attention_backend = backend(pool)
    attention_backend.begin(batch)
    return attention_backend(layer, q, k, v, rule), pool


RULES = {
    "plain": AttentionRule(0.3),
    "window": AttentionRule(0.3, window=5),
    "window of one": AttentionRule(0.3, window=1),
    "softcap": AttentionRule(0.3, softcap=2.0),
    "sinks": AttentionRule(0.3, sinks=torch.tensor([0.1, -1.0, 2.0, 0.5])),
    "all": AttentionRule(0.3, window=6, softcap=2.0, sinks=torch.tensor([0.1, -1.0, 2.0, 0.5])),
}
SHAPES = {
    "grouped": Shape(),
    "one group": Shape(kv_heads=1),
    "no group": Shape(kv_heads=4),
    "mla": Shape(value_dim=12),
    "dims of no power of two": Shape(key_dim=10, value_dim=5),
    "three KV heads": Shape(heads=12, kv_heads=3),
    "six KV heads": Shape(heads=6, kv_heads=6),
    "eight KV heads": Shape(heads=16, kv_heads=8),
}


def fitted(rule: AttentionRule, shape: Shape) -> AttentionRule:
    """The rule with one sink per head of the shape."""
    return rule if rule.sinks is None else replace(rule, sinks=torch.linspace(-1, 2, shape.heads))


def torch_attention(pool: KvPool) -> PagedAttention:
    return PagedAttention(pool, TorchKernels())


def torch_cpu_attention(pool: KvPool) -> PagedAttention:
    return PagedAttention(pool, TorchCpuKernels())


def compiled_attention(pool: KvPool) -> PagedAttention:
    return PagedAttention(pool, CompiledKernels())


ON_CPU = (torch_cpu_attention, compiled_attention)
BACKENDS = (torch_attention, *ON_CPU)
#: numba compiles two kernels per dims and group, in two seconds each; these shapes have 1, 2 and 4 queries per KV head,
#: and values that are shorter than keys.
COMPILED = tuple(name for name in SHAPES if name != "mla")


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(
    ("shape", "backend"),
    [
        pytest.param(shape, backend, id=f"{name}-{backend.__name__}")
        for name, shape in SHAPES.items()
        for backend in BACKENDS
        if name in COMPILED or backend is not compiled_attention
    ],
)
def test_backend_equals_the_reference(shape, backend, rule):
    """One step mixes prefill from zero, chunks after a prefix and decode rows of different lengths, in any order."""
    batch = batch_of([(22, 1), (40, 1), (0, 9), (6, 5), (0, 1), (3, 1), (16, 16)])
    rule = fitted(rule, shape)

    got, pool = run(backend, batch, shape, rule)
    wanted, reference_pool = run(ReferenceAttention, batch, shape, rule)

    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(pool.keys, reference_pool.keys, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_others_left_in_pages_reaches_nobody(number, rule, backend):
    """Blocks of a request that produced NaN or infinity are reused by others, and 0 times NaN is NaN."""
    batch = batch_of([(22, 1), (40, 1), (0, 9), (6, 5), (0, 1), (3, 1), (17, 1), (16, 16)])
    rule = fitted(rule, Shape())

    def poisoned(pool: KvPool) -> Backend:
        owned = torch.zeros(pool.num_blocks * BLOCK, dtype=torch.bool)
        for row, length in enumerate(batch.kv_lens):
            at = torch.arange(length)
            owned[batch.block_tables[row].long()[at // BLOCK] * BLOCK + at % BLOCK] = True
        for tensor in (*pool.keys, *pool.values):
            tensor.flatten(0, 1)[~owned] = number
        return backend(pool)

    got, _ = run(poisoned, batch, Shape(), rule)

    wanted, _ = run(backend, batch, Shape(), rule)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_token_without_numbers_reaches_those_who_see_it_and_no_others(number, rule, backend):
    """Earlier tokens of the chunk may be a shared prefix and must stay valid; later ones must not look valid."""
    batch = batch_of([(22, 1), (40, 1), (6, 20), (0, 20), (20, 1)])
    odd_token = 2 + 10  # position 16 of the third row
    rule = fitted(rule, Shape())

    def poisoned(pool: KvPool) -> Backend:
        made = backend(pool)
        return Poisoned(made, odd_token, number)

    got, _ = run(poisoned, batch, Shape(), rule)

    wanted, _ = run(backend, batch, Shape(), rule)
    seeing = torch.zeros(len(got), dtype=torch.bool)
    seeing[odd_token : min(2 + 20, odd_token + (rule.window or 20))] = True
    torch.testing.assert_close(got[~seeing], wanted[~seeing], rtol=1e-5, atol=1e-5)
    assert not got[seeing].isfinite().any()


@dataclass
class Poisoned:
    """A backend whose input contains one non-finite value."""

    backend: Backend
    token: int
    number: float

    def begin(self, batch: Batch) -> None:
        self.backend.begin(batch)

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        v = v.clone()
        v[self.token] = self.number
        return self.backend(layer, q, k, v, rule)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), min_size=1, max_size=6),
    st.one_of(st.none(), st.integers(1, 40)),
)
def test_cpu_backends_equal_the_reference_for_any_lengths(lengths, window):
    """Includes windows that start inside the first page."""
    batch, rule = batch_of(lengths), AttentionRule(0.4, window=window)

    wanted, _ = run(ReferenceAttention, batch, Shape(), rule)

    for backend in ON_CPU:
        torch.testing.assert_close(run(backend, batch, Shape(), rule)[0], wanted, rtol=1e-5, atol=1e-5)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40)), min_size=1, max_size=8),
    st.integers(1, 12),
    st.sampled_from(list(RULES)),
    st.sampled_from(list(SHAPES)),
    st.none() | st.integers(1, 90),
)
def test_rows_that_share_a_prefix_get_what_each_would_get_alone(rows, pages, rule, shape, window):
    """Two groups of rows share pages, next to rows of any length; a window may start inside a shared page."""
    plans, block = [], 1 + 2 * pages
    for family, own in rows:
        count = own // BLOCK + 1
        prefix = range(1 + family * pages, 1 + (family + 1) * pages)
        plans.append(PlanRow([1], pages * BLOCK + own, [*prefix, *range(block, block + count)]))
        block += count
    batch = Batch.on_device(lay_out(plan_of_rows(0, plans), BLOCK), CPU)
    asked = replace(fitted(RULES[rule], SHAPES[shape]), window=window)

    wanted, _ = run(ReferenceAttention, batch, SHAPES[shape], asked)

    for backend in ON_CPU if shape in COMPILED else (torch_cpu_attention,):
        torch.testing.assert_close(run(backend, batch, SHAPES[shape], asked)[0], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [40, 41, 43, 44])
def test_window_that_begins_inside_a_shared_page_hides_the_keys_before_it(window):
    """Four rows of 41 to 44 tokens on eight shared pages; rows see different parts of the first page."""
    plans = [PlanRow([1], 40 + i, [*range(1, 9), *range(9 + 3 * i, 12 + 3 * i)]) for i in range(4)]
    batch = Batch.on_device(lay_out(plan_of_rows(0, plans), BLOCK), CPU)
    rule = AttentionRule(0.4, window=window)

    wanted, _ = run(ReferenceAttention, batch, Shape(), rule)

    for backend in ON_CPU:
        torch.testing.assert_close(run(backend, batch, Shape(), rule)[0], wanted, rtol=1e-5, atol=1e-5)


def test_reference_equals_dense_causal_attention():
    """Checks the oracle itself against torch on a prompt without a cached part."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(7, 4, 8, generator=generator) for _ in range(3))
    positions = torch.arange(7)

    got = attention(q, k, v, visible(positions, positions, None), AttentionRule(8**-0.5))

    dense = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), is_causal=True)
    torch.testing.assert_close(got, dense.transpose(0, 1))


def test_window_counts_the_token_itself():
    """As in transformers: with a window of 3, the token at position 5 sees positions 3, 4 and 5."""
    seen = visible(torch.tensor([5]), torch.arange(7), 3)

    assert seen.tolist() == [[False, False, False, True, True, True, False]]


def test_sinks_take_weight_and_give_nothing():
    """With one key and a sink of equal score, the output is half of the value."""
    q, k, v = torch.zeros(1, 1, 4), torch.zeros(1, 1, 4), torch.ones(1, 1, 4)

    out = attention(q, k, v, torch.ones(1, 1, dtype=torch.bool), AttentionRule(1.0, sinks=torch.zeros(1)))

    torch.testing.assert_close(out, torch.full((1, 1, 4), 0.5))
