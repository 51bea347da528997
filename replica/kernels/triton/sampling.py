"""The sampler of `replica/engine/sampler.py` on the device: same random numbers per (seed, position), same tokens.

It needs no sort and no softmax over the vocabulary: it finds a filter's floor by bisection over the bits of the scaled
logits, which are at most 0, so that their bits without the sign are ordered. Sums are in float64, as in the sampler.
"""

import torch
import triton
import triton.language as tl

from ...engine.sampler import FAN_OUT, GREEDY_BELOW
from ..base import NO_TOKEN, SamplingInputs

#: Levels of the choice within one program, whose sums need no memory.
LOW_LEVELS = 3
BLOCK = FAN_OUT**LOW_LEVELS


def levels_of(vocab: int) -> int:
    """The number of steps that choose one of `vocab` tokens."""
    levels = 1
    while FAN_OUT**levels < vocab:
        levels += 1
    return levels


def sample(logits: torch.Tensor, inputs: SamplingInputs, out: torch.Tensor) -> None:
    rows, vocab = logits.shape
    if not rows:
        return
    blocks, levels = triton.cdiv(vocab, BLOCK), levels_of(vocab)
    maxima, greatest, floors = (logits.new_empty(rows, width) for width in (blocks, 1, 1))
    places = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    sums = torch.empty(rows, blocks, dtype=torch.float64, device=logits.device)
    size = {"BLOCK": BLOCK, "GREEDY": GREEDY_BELOW}
    stride = logits.stride(0)
    _block_maxima[(rows, blocks)](logits, maxima, places, vocab, stride, BLOCK=BLOCK)
    _floors[(rows,)](
        logits, maxima, places, greatest, floors, out, vocab, stride, blocks,
        inputs.temperatures, inputs.top_ks, inputs.top_ps, inputs.min_ps,
        BLOCKS_PAD=triton.next_power_of_2(blocks), NONE=NO_TOKEN, num_warps=8, **size,
    )  # fmt: skip
    _block_sums[(rows, blocks)](logits, greatest, floors, sums, vocab, stride, inputs.temperatures, **size)
    _choose[(rows,)](
        logits, greatest, floors, sums, out, vocab, stride, blocks,
        inputs.temperatures, inputs.seeds, inputs.positions,
        LOW=min(LOW_LEVELS, levels), HIGH=max(0, levels - LOW_LEVELS), FAN=FAN_OUT, GREEDY=GREEDY_BELOW,
    )  # fmt: skip


def mask(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    vocab, words = logits.shape[1], bits.shape[1]
    if not len(rows):
        return
    grid = len(rows), triton.cdiv(vocab, BLOCK)
    _mask[grid](logits, rows, bits, vocab, logits.stride(0), words, WORDS=BLOCK // 32)


@triton.jit
def _mask(logits, rows, bits, vocab, stride, words, WORDS: tl.constexpr):
    """A block of one row: it reads an eighth of a byte for each token, and writes only what is not allowed."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    held = tl.load(bits + place * words + word, mask=word < words, other=0)
    bit = tl.arange(0, 32)
    i = word[:, None] * 32 + bit[None, :]
    forbidden = ((held[:, None] >> bit[None, :]) & 1) == 0
    tl.store(logits + row * stride + i, float("-inf"), mask=forbidden & (i < vocab))


@triton.jit
def _block_maxima(logits, maxima, places, vocab, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    i = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + i, mask=i < vocab, other=-float("inf"))
    at = row * tl.num_programs(1) + block
    values = tl.where(values != values, float("inf"), values)  # a maximum would ignore NaN
    tl.store(maxima + at, tl.max(values, 0))
    tl.store(places + at, block * BLOCK + tl.argmax(values, 0))


@triton.jit
def _scaled(logits, row, i, there, stride, temperature, greatest):
    """The logits divided by the temperature, shifted so that the greatest is 0; -inf beyond the vocabulary."""
    values = tl.load(logits + row * stride + i, mask=there, other=-float("inf"))
    return tl.div_rn(values, tl.zeros_like(values) + temperature) - greatest


@triton.jit
def _held(logits, row, depth, vocab, stride, temperature, greatest, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """The number or weight of the tokens within `depth` (the bits of a scaled logit without its sign)."""
    held = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        i = start + tl.arange(0, BLOCK)
        scaled = _scaled(logits, row, i, i < vocab, stride, temperature, greatest)
        inside = (i < vocab) & (tl.abs(scaled).to(tl.int32, bitcast=True) <= depth)
        each = tl.exp(scaled).to(tl.float64) if BY_WEIGHT else 1.0
        held += tl.where(inside, each, 0.0)
    return tl.sum(held, 0)


@triton.jit
def _depth_that_holds(
    logits, row, wanted, vocab, stride, temperature, greatest, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    """The least depth that holds at least `wanted`; the greatest is that of +inf (all tokens)."""
    low = tl.full([], 0, tl.int32)
    high = tl.full([], 0x7F800000, tl.int32)
    for _ in range(31):
        middle = low + (high - low) // 2
        enough = _held(logits, row, middle, vocab, stride, temperature, greatest, BY_WEIGHT, BLOCK) >= wanted
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, tl.minimum(middle + 1, high))
    return high


@triton.jit
def _floors(
    logits, maxima, places, greatest, floors, out, vocab, stride, blocks, temperatures, top_ks, top_ps, min_ps,
    BLOCKS_PAD: tl.constexpr, BLOCK: tl.constexpr, GREEDY: tl.constexpr, NONE: tl.constexpr,
):  # fmt: skip
    """The tokens of greedy rows and of rows without a finite maximum; for the others the least kept scaled logit."""
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS_PAD)
    maximum = tl.load(maxima + row * blocks + b, mask=b < blocks, other=-float("inf"))
    highest = tl.max(maximum, 0)
    likeliest = tl.load(places + row * blocks + tl.argmax(maximum, 0)).to(tl.int64)
    if tl.abs(highest) == float("inf"):
        tl.store(greatest + row, float("inf"))
        tl.store(out + row, NONE)
        return
    temperature = tl.load(temperatures + row)
    if temperature < GREEDY:
        tl.store(out + row, likeliest)
        return
    top = tl.div_rn(highest, temperature)
    if tl.abs(top) == float("inf"):  # the likeliest is certain
        tl.store(greatest + row, float("inf"))
        tl.store(out + row, likeliest)
        return
    tl.store(greatest + row, top)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    depth = tl.full([], 0x7F800000, tl.int32)
    if (top_k > 0) & (top_k < vocab):
        depth = _depth_that_holds(logits, row, top_k.to(tl.float64), vocab, stride, temperature, top, False, BLOCK)
    if top_p < 1.0:
        kept = _held(logits, row, depth, vocab, stride, temperature, top, True, BLOCK)
        wanted = kept * top_p
        within = _depth_that_holds(logits, row, wanted, vocab, stride, temperature, top, True, BLOCK)
        depth = tl.minimum(depth, within)
    floor = -depth.to(tl.float32, bitcast=True)
    if min_p > 0.0:
        floor = tl.maximum(floor, tl.log(min_p))
    tl.store(floors + row, floor)


@triton.jit
def _weights(logits, row, i, vocab, stride, temperature, greatest, floor):
    """The weight of each token in the draw, float64; 0 for tokens that are filtered out."""
    scaled = _scaled(logits, row, i, i < vocab, stride, temperature, greatest)
    return tl.where((i < vocab) & (scaled >= floor), tl.exp(scaled), 0.0).to(tl.float64)


@triton.jit
def _block_sums(logits, greatest, floors, sums, vocab, stride, temperatures, BLOCK: tl.constexpr, GREEDY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if temperature < GREEDY:
        return
    top = tl.load(greatest + row)
    if top == float("inf"):
        return
    i = block * BLOCK + tl.arange(0, BLOCK)
    weights = _weights(logits, row, i, vocab, stride, temperature, top, tl.load(floors + row))
    tl.store(sums + row * tl.num_programs(1) + block, tl.sum(weights, 0))


@triton.jit
def _uniform(seed, position, number):
    """A float64 in [0, 1) with 53 random bits: the `number`-th of (seed, position), as `philox.uniforms`."""
    zero = tl.full([], 0, tl.uint32)
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    first, second, _, _ = tl.philox(seed, low, high, zero + number, zero)
    return ((first >> 5).to(tl.float64) * 67108864.0 + (second >> 6).to(tl.float64)) / 9007199254740992.0


@triton.jit
def _pick(weights, point):
    """The group that contains the point; the last one of positive weight if rounding puts it at the end."""
    upto = tl.cumsum(weights, 0)
    total = tl.max(upto, 0)
    found = tl.sum((upto <= total * point).to(tl.int32), 0)
    return tl.minimum(found, tl.sum((upto < total).to(tl.int32), 0))


@triton.jit
def _members(chosen, FAN: tl.constexpr, SPAN: tl.constexpr):
    """[FAN, SPAN]: the members of each of the groups in the chosen one."""
    return (chosen * FAN + tl.arange(0, FAN)[:, None]) * SPAN + tl.arange(0, SPAN)[None, :]


@triton.jit
def _choose(
    logits, greatest, floors, sums, out, vocab, stride, blocks, temperatures, seeds, positions, LOW: tl.constexpr,
    HIGH: tl.constexpr, FAN: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    """Choose from the top level down: first among blocks by their sums, then inside one block from its logits."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    if temperature < GREEDY:
        return
    top = tl.load(greatest + row)
    if top == float("inf"):
        return
    seed = tl.load(seeds + row)
    position = tl.load(positions + row)
    chosen = tl.full([], 0, tl.int32)
    for level in tl.static_range(HIGH):
        i = _members(chosen, FAN, FAN ** (HIGH - 1 - level))
        weights = tl.sum(tl.load(sums + row * blocks + i, mask=i < blocks, other=0.0), 1)
        chosen = chosen * FAN + _pick(weights, _uniform(seed, position, level))
    floor = tl.load(floors + row)
    for level in tl.static_range(LOW):
        i = _members(chosen, FAN, FAN ** (LOW - 1 - level))
        weights = tl.sum(_weights(logits, row, i, vocab, stride, temperature, top, floor), 1)
        chosen = chosen * FAN + _pick(weights, _uniform(seed, position, HIGH + level))
    tl.store(out + row, chosen.to(tl.int64))
