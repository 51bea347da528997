"""The sampler of `replica/engine/sampler.py` on the device: same random numbers per (seed, position), same tokens.

Three launches with one program per row and vocabulary block; each reads the logits once and none sorts. They compute
the blocks' maxima, a histogram of the scaled logits, and the draw. In the draw, each program sums the weights of its
block that are certain to be kept, and collects the logits in the buckets that may contain the floor of top-k or top-p.
The row's last program to finish that finds the floor among them and draws. Sums are in float64, as in the sampler.

Scaled logits are at most 0, so their bits without the sign, called `depth`, are ordered. A token more than
`BUCKETS / PER_NAT` below the greatest has less than 1e-13 of its weight. Top-k and top-p that reach that far keep all
tokens, but no block is chosen because of such tokens.
Rows with more than ENTRIES different logits in those buckets find the floor by bisecting the bits of the depth.
"""

import torch
import triton
import triton.language as tl

from ...engine.sampler import FAN_OUT, GREEDY_BELOW
from ..base import NO_TOKEN, SamplingInputs

#: Levels of the draw within one block, which need no sums in memory.
LOW_LEVELS = 3
BLOCK = FAN_OUT**LOW_LEVELS
#: Buckets of the histogram, and buckets per difference of 1 between scaled logits.
BUCKETS, PER_NAT = 2048, 64
#: Most entries per row. An entry is one distinct logit of one block and its number of tokens.
ENTRIES = 1024


def levels_of(vocab: int) -> int:
    """The number of `FAN_OUT`-way choices that select one of `vocab` tokens."""
    levels = 1
    while FAN_OUT**levels < vocab:
        levels += 1
    return levels


def sample(logits: torch.Tensor, inputs: SamplingInputs, out: torch.Tensor) -> None:
    rows, vocab = logits.shape
    if not rows:
        return
    blocks, levels = triton.cdiv(vocab, BLOCK), levels_of(vocab)
    device, stride, grid = logits.device, logits.stride(0), (rows, blocks)
    maxima, greatest = (logits.new_empty(rows, width) for width in (blocks, 1))
    places = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    counts = torch.empty(rows, BUCKETS, dtype=torch.int32, device=device)
    weights = torch.empty(rows, BUCKETS, dtype=torch.float64, device=device)
    #: By entry: depth, number of tokens, block.
    entries = torch.empty(rows, 3, ENTRIES, dtype=torch.int32, device=device)
    #: By row: number of entries collected, number of programs that have finished collecting.
    arrived = torch.empty(rows, 2, dtype=torch.int32, device=device)
    sums = torch.empty(rows, blocks, dtype=torch.float64, device=device)
    filters = inputs.rows, inputs.temperatures, inputs.top_ks, inputs.top_ps
    buckets = {"BUCKETS": BUCKETS, "PER_NAT": PER_NAT, "BLOCK": BLOCK}
    _maxima[grid](logits, maxima, places, counts, weights, arrived, vocab, stride, BUCKETS=BUCKETS, BLOCK=BLOCK)
    _histogram[grid](
        logits, maxima, places, greatest, counts, weights, out, inputs.last_tokens, vocab, stride, blocks, *filters,
        BLOCKS_PAD=triton.next_power_of_2(blocks), GREEDY=GREEDY_BELOW, NONE=NO_TOKEN, num_warps=8, **buckets,
    )  # fmt: skip
    _draw[grid](
        logits, greatest, counts, weights, entries, sums, arrived, out, inputs.last_tokens, vocab, stride, *filters,
        inputs.min_ps, inputs.seeds, inputs.prompts, inputs.lengths, ENTRIES=ENTRIES, LOW=min(LOW_LEVELS, levels),
        HIGH=max(0, levels - LOW_LEVELS), FAN=FAN_OUT, num_warps=8, **buckets,
    )  # fmt: skip


def mask(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    vocab, words = logits.shape[1], bits.shape[1]
    if not len(rows):
        return
    grid = len(rows), triton.cdiv(vocab, BLOCK)
    _mask[grid](logits, rows, bits, vocab, logits.stride(0), words, WORDS=BLOCK // 32)


@triton.jit
def _mask(logits, rows, bits, vocab, stride, words, WORDS: tl.constexpr) -> None:
    """A block of one row. Reads one bit per token and writes only the logits of forbidden tokens."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    held = tl.load(bits + place * words + word, mask=word < words, other=0)
    bit = tl.arange(0, 32)
    i = word[:, None] * 32 + bit[None, :]
    forbidden = ((held[:, None] >> bit[None, :]) & 1) == 0
    tl.store(logits + row * stride + i, float("-inf"), mask=forbidden & (i < vocab))


@triton.jit
def _maxima(
    logits, maxima, places, counts, weights, arrived, vocab, stride, BUCKETS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Find each block's greatest logit and token. A row's first program also clears the totals of later launches."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    i = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + i, mask=i < vocab, other=-float("inf"))
    at = row * tl.num_programs(1) + block
    values = tl.where(values != values, float("inf"), values)  # `max` would ignore NaN
    tl.store(maxima + at, tl.max(values, 0))
    tl.store(places + at, block * BLOCK + tl.argmax(values, 0))
    if block == 0:
        bucket = row * BUCKETS + tl.arange(0, BUCKETS)
        tl.store(counts + bucket, tl.zeros([BUCKETS], tl.int32))
        tl.store(weights + bucket, tl.zeros([BUCKETS], tl.float64))
        tl.store(arrived + row * 2 + tl.arange(0, 2), tl.zeros([2], tl.int32))


@triton.jit
def _scaled(logits, row, i, there, stride, temperature, greatest) -> tl.tensor:
    """The logits divided by the temperature, shifted so that the greatest is 0; -inf beyond the vocabulary."""
    values = tl.load(logits + row * stride + i, mask=there, other=-float("inf"))
    return tl.div_rn(values, tl.zeros_like(values) + temperature) - greatest


@triton.jit
def _mass_up_to(
    logits, row, depth, vocab, stride, temperature, greatest, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """The number of tokens with at most this depth (scaled logit bits without the sign), or their total weight."""
    held = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        i = start + tl.arange(0, BLOCK)
        scaled = _scaled(logits, row, i, i < vocab, stride, temperature, greatest)
        inside = (i < vocab) & (tl.abs(scaled).to(tl.int32, bitcast=True) <= depth)
        each = tl.exp(scaled).to(tl.float64) if BY_WEIGHT else 1.0
        held += tl.where(inside, each, 0.0)
    return tl.sum(held, 0)


@triton.jit
def _least_depth(
    logits, row, wanted, vocab, stride, temperature, greatest, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """The least depth for which `_mass_up_to` is at least `wanted`; at most the bits of +inf (all tokens)."""
    low = tl.full([], 0, tl.int32)
    high = tl.full([], 0x7F800000, tl.int32)
    for _ in range(31):
        middle = low + (high - low) // 2
        enough = _mass_up_to(logits, row, middle, vocab, stride, temperature, greatest, BY_WEIGHT, BLOCK) >= wanted
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, tl.minimum(middle + 1, high))
    return high


@triton.jit
def _bucket(scaled, BUCKETS: tl.constexpr, PER_NAT: tl.constexpr) -> tl.tensor:
    return tl.minimum(-scaled * PER_NAT, BUCKETS - 1).to(tl.int32)


@triton.jit
def _limits(top_k, vocab) -> tl.tensor:
    return (top_k > 0) & (top_k < vocab)


@triton.jit
def _filters(top_k, top_p, vocab) -> tl.tensor:
    return _limits(top_k, vocab) | (top_p < 1.0)


@triton.jit
def _last_bucket(
    maxima, blocks, top_k, top_p, vocab, temperature, top, BUCKETS: tl.constexpr, PER_NAT: tl.constexpr
) -> tl.tensor:
    """A bucket in which, or before which, the floors are certain to be; all but the last bucket at most.

    The atomics of deeper tokens, often of nearly all, are not needed. At least top_k tokens are as likely as the block
    maximum of that rank. Without top-k, all tokens with less than (1 - top_p) / vocab of the greatest weight are
    together less than 1 - top_p of the total, and cannot contain the floor.
    """
    limits = _limits(top_k, vocab)
    rank = tl.sum((maxima[None, :] > maxima[:, None]).to(tl.int32), 1)
    highest = tl.min(tl.where(rank < tl.maximum(top_k, 1), maxima, float("inf")), 0)
    of_k = _bucket(tl.div_rn(highest, temperature) - top, BUCKETS, PER_NAT)
    nats = tl.log((vocab / tl.maximum(1.0 - top_p, 1e-30)).to(tl.float32)) + 1.0  # 1 allows for rounding
    of_p = tl.minimum(nats * PER_NAT, BUCKETS - 2).to(tl.int32)
    chosen = tl.where(limits & (top_k <= blocks), of_k, tl.where(limits, BUCKETS - 2, of_p))
    return tl.minimum(chosen, BUCKETS - 2)


@triton.jit
def _histogram(
    logits, maxima, places, greatest, counts, weights, out, last_tokens, vocab, stride, blocks, slots, temperatures,
    top_ks, top_ps, BLOCKS_PAD: tl.constexpr, GREEDY: tl.constexpr, NONE: tl.constexpr, BUCKETS: tl.constexpr,
    PER_NAT: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write the tokens of rows that need no draw; for top-k or top-p rows, count and weigh each bucket's tokens."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    block = tl.program_id(1)
    b = tl.arange(0, BLOCKS_PAD)
    maximum = tl.load(maxima + row * blocks + b, mask=b < blocks, other=-float("inf"))
    highest = tl.max(maximum, 0)
    temperature = tl.load(temperatures + slot)
    greedy = temperature < GREEDY
    top = tl.div_rn(highest, tl.where(greedy, 1.0, temperature))
    odd = tl.abs(highest) == float("inf")
    certain = odd | greedy | (tl.abs(top) == float("inf"))
    if block == 0:
        likeliest = tl.load(places + row * blocks + tl.argmax(maximum, 0)).to(tl.int64)
        token = tl.where(odd, NONE, likeliest)
        tl.store(out + row, token, mask=certain)
        tl.store(last_tokens + slot, token, mask=certain)
        tl.store(greatest + row, tl.where(certain, float("inf"), top))
    if certain:
        return
    top_k = tl.load(top_ks + slot)
    top_p = tl.load(top_ps + slot)
    if not _filters(top_k, top_p, vocab):
        return
    last = _last_bucket(maximum, blocks, top_k, top_p, vocab, temperature, top, BUCKETS, PER_NAT)
    i = block * BLOCK + tl.arange(0, BLOCK)
    scaled = _scaled(logits, row, i, i < vocab, stride, temperature, top)
    weight = tl.exp(scaled).to(tl.float64)
    bucket = _bucket(scaled, BUCKETS, PER_NAT)
    near = bucket <= last
    at = row * BUCKETS + bucket
    tl.atomic_add(counts + at, tl.full([BLOCK], 1, tl.int32), mask=near, sem="relaxed")
    tl.atomic_add(weights + at, weight, mask=near, sem="relaxed")
    far = tl.sum(tl.where(near, 0.0, weight), 0)  # one atomic for all
    tl.atomic_add(weights + row * BUCKETS + BUCKETS - 1, far, sem="relaxed")


@triton.jit
def _near(counts, weights, row, top_k, top_p, vocab, BUCKETS: tl.constexpr) -> tuple[tl.tensor, ...]:
    """The buckets that may contain the floors of top-k and top-p, and the totals of the buckets before them.

    Returns for top-k: whether it has a floor, its bucket, tokens and weight before it, and the weight up to and with
    it; for top-p: whether it has a floor, its first and last possible bucket, and the weight before the first.
    """
    last = BUCKETS - 1
    bucket = tl.arange(0, BUCKETS)
    count = tl.load(counts + row * BUCKETS + bucket)
    weight = tl.load(weights + row * BUCKETS + bucket)
    k_bucket = tl.where(_limits(top_k, vocab), tl.sum((tl.cumsum(count, 0) < top_k).to(tl.int32), 0), last)
    has_k = k_bucket < last
    shallower = tl.sum(tl.where(bucket < k_bucket, count, 0), 0)
    before = tl.sum(tl.where(bucket < k_bucket, weight, 0.0), 0)
    within = tl.where(has_k, before + tl.sum(tl.where(bucket == k_bucket, weight, 0.0), 0), tl.sum(weight, 0))
    # A range of buckets for top-p: top-k keeps a weight between `before` and `within`. 1e-12 allows for rounding.
    upto = tl.cumsum(weight, 0)
    p_first = tl.sum((upto < top_p * tl.where(has_k, before, within) * (1 - 1e-12)).to(tl.int32), 0)
    p_last = tl.minimum(tl.sum((upto < top_p * within * (1 + 1e-12)).to(tl.int32), 0), last - 1)
    nearer = tl.sum(tl.where(bucket < p_first, weight, 0.0), 0)
    return has_k, k_bucket, shallower, before, within, (p_first < last) & (top_p < 1.0), p_first, p_last, nearer


@triton.jit
def _collect(scaled, weight, near, entries, sums, collected, block, ENTRIES: tl.constexpr, BUCKETS: tl.constexpr,
             PER_NAT: tl.constexpr) -> None:  # fmt: skip
    """Sum the block's weights before all buckets that may contain a floor; add their distinct logits as entries."""
    has_k, k_bucket, _, _, _, has_p, p_first, p_last, _ = near
    mine = _bucket(scaled, BUCKETS, PER_NAT)
    before = tl.minimum(tl.where(has_k, k_bucket, BUCKETS - 1), tl.where(has_p, p_first, BUCKETS - 1))
    tl.store(sums + block, tl.sum(tl.where(mine < before, weight, 0.0), 0))
    wanted = (has_k & (mine == k_bucket)) | (has_p & (mine >= p_first) & (mine <= p_last))
    none = tl.full([], 0x7FFFFFFF, tl.int32)
    left = tl.where(wanted, tl.abs(scaled).to(tl.int32, bitcast=True), none)
    least = tl.min(left, 0)
    place = tl.full([], 0, tl.int32)
    while (least < none) & (place < ENTRIES):  # one iteration per distinct logit: bfloat16 has few
        place = tl.atomic_add(collected, 1, sem="relaxed")
        tl.store(entries + place, least, mask=place < ENTRIES)
        tl.store(entries + ENTRIES + place, tl.sum((left == least).to(tl.int32), 0), mask=place < ENTRIES)
        tl.store(entries + 2 * ENTRIES + place, block, mask=place < ENTRIES)
        left = tl.where(left == least, none, left)
        least = tl.min(left, 0)


@triton.jit
def _depth_of_entries(entries, count, near, top_k, top_p, ENTRIES: tl.constexpr, BUCKETS: tl.constexpr,
                      PER_NAT: tl.constexpr) -> tl.tensor:  # fmt: skip
    """The depth of the last token that top-k and top-p keep; the bits of +inf if they keep all."""
    has_k, k_bucket, shallower, before, within, has_p, p_first, p_last, nearer = near
    depth = tl.full([], 0x7F800000, tl.int32)
    entry, number, minus = _entries(entries, count, ENTRIES)
    bucket = _bucket(minus, BUCKETS, PER_NAT)
    weight = number * tl.exp(minus).to(tl.float64)
    if has_k:
        of_k = bucket == k_bucket
        depth = _least_entry(entry, tl.where(of_k, number, 0).to(tl.float64), (top_k - shallower).to(tl.float64))
        within = before + tl.sum(tl.where(of_k & (entry <= depth), weight, 0.0), 0)
    if has_p:
        of_p = (bucket >= p_first) & (bucket <= p_last)
        depth = tl.minimum(depth, _least_entry(entry, tl.where(of_p, weight, 0.0), top_p * within - nearer))
    return depth


@triton.jit
def _entries(entries, count, ENTRIES: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Depths, token counts (0 beyond the last entry) and scaled logits. Loads use `.cg`: other programs wrote them."""
    e = tl.arange(0, ENTRIES)
    entry = tl.load(entries + e, mask=e < count, other=0x7FFFFFFF, cache_modifier=".cg")
    number = tl.load(entries + ENTRIES + e, mask=e < count, other=0, cache_modifier=".cg")
    return entry, number, tl.where(e < count, -entry.to(tl.float32, bitcast=True), 0.0)


@triton.jit
def _depth_by_bits(logits, row, top_k, top_p, vocab, stride, temperature, greatest, BLOCK: tl.constexpr) -> tl.tensor:
    """Like `_depth_of_entries`, but for rows with too many entries: reads the logits again."""
    depth = tl.full([], 0x7F800000, tl.int32)
    if _limits(top_k, vocab):
        depth = _least_depth(logits, row, top_k.to(tl.float64), vocab, stride, temperature, greatest, False, BLOCK)
    if top_p < 1.0:
        kept = _mass_up_to(logits, row, depth, vocab, stride, temperature, greatest, True, BLOCK)
        held = _least_depth(logits, row, kept * top_p, vocab, stride, temperature, greatest, True, BLOCK)
        depth = tl.minimum(depth, held)
    return depth


@triton.jit
def _resolve_floor(
    logits, row, near, entries, sums, collected, top_k, top_p, floor, vocab, stride, temperature, greatest,
    ENTRIES: tl.constexpr, BUCKETS: tl.constexpr, PER_NAT: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The floor of all filters, given the one of min-p as `floor`; completes the blocks' sums."""
    if collected > ENTRIES:
        depth = _depth_by_bits(logits, row, top_k, top_p, vocab, stride, temperature, greatest, BLOCK)
        floor = tl.maximum(floor, -depth.to(tl.float32, bitcast=True))
        for block in range(tl.num_programs(1)):
            i = block * BLOCK + tl.arange(0, BLOCK)
            scaled = _scaled(logits, row, i, i < vocab, stride, temperature, greatest)
            tl.store(sums + block, tl.sum(_weights(scaled, i, vocab, floor), 0))
    else:
        depth = _depth_of_entries(entries, collected, near, top_k, top_p, ENTRIES, BUCKETS, PER_NAT)
        floor = tl.maximum(floor, -depth.to(tl.float32, bitcast=True))
        e = tl.arange(0, ENTRIES)
        _, number, minus = _entries(entries, collected, ENTRIES)
        its_block = tl.load(entries + 2 * ENTRIES + e, mask=e < collected, other=0, cache_modifier=".cg")
        weight = number * tl.exp(minus).to(tl.float64)
        tl.atomic_add(sums + its_block, weight, mask=(e < collected) & (minus >= floor), sem="relaxed")
    return floor


@triton.jit
def _least_entry(entries, values, wanted) -> tl.tensor:
    """The least depth up to which entries' values sum to at least `wanted`; the bits of +inf if there is none."""
    low = tl.full([], 0, tl.int32)
    high = tl.full([], 0x7F800000, tl.int32)
    for _ in range(31):
        middle = low + (high - low) // 2
        enough = tl.sum(tl.where(entries <= middle, values, 0.0), 0) >= wanted
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, tl.minimum(middle + 1, high))
    return high


@triton.jit
def _weights(scaled, i, vocab, floor) -> tl.tensor:
    """The weight of each token in the draw, float64; 0 for filtered tokens."""
    return tl.where((i < vocab) & (scaled >= floor), tl.exp(scaled), 0.0).to(tl.float64)


@triton.jit
def _uniform(seed, position, number) -> tl.tensor:
    """A float64 in [0, 1) with 53 random bits: number `number` of (seed, position), as in `philox.uniforms`."""
    zero = tl.full([], 0, tl.uint32)
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    first, second, _, _ = tl.philox(seed, low, high, zero + number, zero)
    return ((first >> 5).to(tl.float64) * 67108864.0 + (second >> 6).to(tl.float64)) / 9007199254740992.0


@triton.jit
def _pick(weights, point) -> tl.tensor:
    """The index whose share of the total contains `point`; the last positive one if rounding moves it to the end."""
    upto = tl.cumsum(weights, 0)
    total = tl.max(upto, 0)
    found = tl.sum((upto <= total * point).to(tl.int32), 0)
    return tl.minimum(found, tl.sum((upto < total).to(tl.int32), 0))


@triton.jit
def _members(chosen, FAN: tl.constexpr, SPAN: tl.constexpr) -> tl.tensor:
    """Indices [FAN, SPAN] of the members of each group within the chosen one."""
    return (chosen * FAN + tl.arange(0, FAN)[:, None]) * SPAN + tl.arange(0, SPAN)[None, :]


@triton.jit
def _draw(
    logits, greatest, counts, weights, entries, sums, arrived, out, last_tokens, vocab, stride, slots, temperatures,
    top_ks, top_ps, min_ps, seeds, prompts, lengths, ENTRIES: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    FAN: tl.constexpr, BUCKETS: tl.constexpr, PER_NAT: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Sum the block's weights and collect floor candidates; the row's last program finds the floor and draws."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    block = tl.program_id(1)
    blocks = tl.num_programs(1)
    top = tl.load(greatest + row)
    if top == float("inf"):
        return
    temperature = tl.load(temperatures + slot)
    top_k = tl.load(top_ks + slot)
    top_p = tl.load(top_ps + slot)
    min_p = tl.load(min_ps + slot)
    floor = tl.where(min_p > 0.0, tl.log(tl.where(min_p > 0.0, min_p, 1.0)), -float("inf"))
    entries += row * 3 * ENTRIES
    sums += row * blocks
    arrived += row * 2
    i = block * BLOCK + tl.arange(0, BLOCK)
    scaled = _scaled(logits, row, i, i < vocab, stride, temperature, top)
    weight = _weights(scaled, i, vocab, floor)
    if _filters(top_k, top_p, vocab):
        near = _near(counts, weights, row, top_k, top_p, vocab, BUCKETS)
        _collect(scaled, weight, near, entries, sums, arrived, block, ENTRIES, BUCKETS, PER_NAT)
    else:
        tl.store(sums + block, tl.sum(weight, 0))
    tl.debug_barrier()  # all threads must have written before one reports it
    if tl.atomic_add(arrived + 1, 1) < blocks - 1:
        return
    if _filters(top_k, top_p, vocab):
        near = _near(counts, weights, row, top_k, top_p, vocab, BUCKETS)
        floor = _resolve_floor(
            logits, row, near, entries, sums, tl.atomic_add(arrived, 0), top_k, top_p, floor, vocab, stride,
            temperature, top, ENTRIES, BUCKETS, PER_NAT, BLOCK,
        )  # fmt: skip
        tl.debug_barrier()
    seed = tl.load(seeds + slot)
    position = tl.maximum(tl.load(lengths + slot).to(tl.int64) - tl.load(prompts + slot), 0)
    chosen = tl.full([], 0, tl.int32)
    for level in tl.static_range(HIGH):
        i = _members(chosen, FAN, FAN ** (HIGH - 1 - level))
        each = tl.load(sums + i, mask=i < blocks, other=0.0, cache_modifier=".cg")
        chosen = chosen * FAN + _pick(tl.sum(each, 1), _uniform(seed, position, level))
    for level in tl.static_range(LOW):
        i = _members(chosen, FAN, FAN ** (LOW - 1 - level))
        weight = _weights(_scaled(logits, row, i, i < vocab, stride, temperature, top), i, vocab, floor)
        chosen = chosen * FAN + _pick(tl.sum(weight, 1), _uniform(seed, position, HIGH + level))
    tl.store(out + row, chosen.to(tl.int64))
    tl.store(last_tokens + slot, chosen.to(tl.int64))
