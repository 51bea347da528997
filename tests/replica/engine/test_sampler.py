"""Drawn tokens follow the requested distribution and depend on nothing else in the batch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from homing.replica.engine.logit_edits import SamplingRow, banned_before, mask_logits
from homing.replica.engine.logprobs import prompt_logprobs
from homing.replica.engine.sampler import Restriction, philox, sample, uniforms
from homing.replica.messages import SamplingParams

torch.set_num_threads(1)
VOCAB = 40


def logits_of(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def row(position: int = 0, prompt=(), generated=(), banned=(), **params) -> SamplingRow:
    return SamplingRow(SamplingParams(max_tokens=99, **params), position, prompt, generated, tuple(banned))


def draw(logits: torch.Tensor, count: int, **params) -> list[int]:
    """Tokens drawn at positions 0 .. count - 1 from the same logits."""
    rows = [row(position=position, **params) for position in range(count)]
    return [sampled.token_id for sampled in sample(logits.expand(count, -1), rows)]


def kept_by_definition(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Top-k, then the smallest set of likeliest remaining tokens that reaches top_p, then min_p; ties are kept."""
    likeliest = sorted(range(len(logits)), key=lambda token: -logits[token])
    weight = {token: math.exp((logits[token] - logits[likeliest[0]]) / temperature) for token in likeliest}
    if top_k:
        least = weight[likeliest[min(top_k, len(likeliest)) - 1]]
        likeliest = [token for token in likeliest if weight[token] >= least]
    total, held, nucleus = sum(weight[token] for token in likeliest), 0.0, []
    for token in likeliest:
        if held >= top_p * total and weight[token] < weight[nucleus[-1]]:
            break
        nucleus.append(token)
        held += weight[token]
    return {token for token in nucleus if weight[token] >= min_p * weight[likeliest[0]]}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 17, VOCAB, VOCAB + 5]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    rounded=st.booleans(),
)
def test_drawn_tokens_are_those_that_the_filters_keep(seed, temperature, top_k, top_p, min_p, rounded):
    """Sweeping all of [0, 1) draws every kept token and no other; rounded logits produce many ties."""
    logits = logits_of(seed).round() if rounded else logits_of(seed)
    kept = kept_by_definition(logits[0].double().tolist(), temperature, top_k, top_p, min_p)

    drawn = set(draw(logits, 400, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))

    assert drawn <= kept
    weights = torch.full((VOCAB,), 0.0, dtype=torch.float64)
    weights[sorted(kept)] = (logits[0].double() / temperature).softmax(-1)[sorted(kept)]
    likely = (weights / weights.sum() > 0.05).nonzero()[:, 0].tolist()
    assert set(likely) <= drawn


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_frequencies_follow_the_softmax(temperature):
    """Chi-square over 20,000 draws with a fixed seed, 19 degrees of freedom, below 99.9 %."""
    logits, count = logits_of(3, vocab=20), 20_000
    expected = (logits[0].double() / temperature).softmax(-1).numpy() * count

    observed = np.bincount(draw(logits, count, temperature=temperature, seed=11), minlength=20)

    common = expected >= 5
    pairs = [(observed[common], expected[common]), (observed[~common].sum(), expected[~common].sum())]
    assert sum(((o - e) ** 2 / np.maximum(e, 1e-9)).sum() for o, e in pairs if np.sum(e) > 1) < 43.8


def test_nucleus_of_a_flat_row_is_wide():
    """3,000 nearly equal weights fall into one bucket; the set must still be cut at the right token."""
    logits = 0.001 * logits_of(5, vocab=3000)

    drawn = draw(logits, 4000, top_p=0.9)

    kept = kept_by_definition(logits[0].double().tolist(), 1.0, 0, 0.9, 0.0)
    assert set(drawn) <= kept
    assert len(set(drawn)) > 1500


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 11), min_size=1, max_size=10))
def test_token_does_not_depend_on_the_rest_of_the_batch(chosen):
    """The same seed gives the same tokens in any batch."""
    logits = logits_of(1, rows=12)
    rows = [
        row(position=3, seed=5),
        row(position=4, seed=5, temperature=0.0),
        row(position=0, seed=2**64 - 1, top_k=5),
        row(position=9, seed=6, top_p=0.7),
        row(position=9, seed=6, min_p=0.1, top_p=0.9, top_k=7),
        row(position=2, seed=7, generated=(1, 1, 2), frequency_penalty=1.5),
        row(position=2, seed=8, prompt=(3, 4), generated=(5,), repetition_penalty=1.3),
        row(position=2, seed=9, logit_bias={3: 4.0, 5: -100.0}),
        row(position=2, seed=10, banned=(0, 1, 2)),
        row(position=2, seed=11, temperature=0.2),
        row(position=2, seed=12, temperature=1.9),
        row(position=2, seed=13, temperature=0.0, presence_penalty=2.0, generated=(7,)),
    ]
    alone = [sample(logits[index : index + 1], [rows[index]])[0].token_id for index in range(12)]

    together = sample(logits[chosen], [rows[index] for index in chosen])

    assert [sampled.token_id for sampled in together] == [alone[index] for index in chosen]


def test_rounding_hardly_ever_changes_what_is_drawn():
    """Other batches, chunks and replicas round differently, and the same seed must still give the same tokens.

    A single cumulative distribution over the vocabulary would change 13 of these 1,000 draws.
    """
    logits = logits_of(9, rows=1000, vocab=4096) * (2 / 3)
    rounded = logits + 1e-4 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(10))
    rows = [row(position=position) for position in range(1000)]

    pairs = zip(sample(logits, rows), sample(rounded, rows), strict=True)

    assert sum(one.token_id != other.token_id for one, other in pairs) <= 2


def test_logits_are_left_as_they_are():
    """The engine computes logprobs from the same tensor."""
    logits = logits_of(2, rows=2)
    before = logits.clone()

    sample(logits, [row(generated=(1,), presence_penalty=1.0), row(temperature=0.0, banned=(3,))])

    assert torch.equal(logits, before)


def test_zero_temperature_takes_the_likeliest():
    """Greedy rows stay greedy in a batch with sampled rows."""
    logits = logits_of(4, rows=3)

    sampled = sample(logits, [row(temperature=0.0), row(), row(temperature=0.0)])

    assert [sampled[0].token_id, sampled[2].token_id] == logits[[0, 2]].argmax(-1).tolist()


def test_penalties_change_the_logits_as_documented():
    """Greedy choices on hand-made logits change exactly where the documented formulas say."""
    logits = torch.zeros(1, 4)
    logits[0] = torch.tensor([4.0, 3.0, -1.0, 2.0])

    def greedy(**params):
        return sample(logits, [row(temperature=0.0, **params)])[0].token_id

    assert greedy(generated=(0,), presence_penalty=0.9) == 0
    assert greedy(generated=(0,), presence_penalty=1.1) == 1
    assert greedy(generated=(0, 0), frequency_penalty=0.4) == 0
    assert greedy(generated=(0, 0), frequency_penalty=0.6) == 1
    assert greedy(prompt=(0,), presence_penalty=9.0, frequency_penalty=9.0) == 0
    assert greedy(prompt=(0,), repetition_penalty=1.3) == 0
    assert greedy(prompt=(0,), repetition_penalty=1.4) == 1
    assert greedy(prompt=(0, 1), generated=(3,), repetition_penalty=2.0) == 0
    assert greedy(logit_bias={2: 5.1}) == 2
    assert greedy(banned=(0, 1)) == 3


def test_repetition_penalty_pushes_negative_logits_down():
    """Dividing a negative logit would favour the repeated token."""
    logits = torch.tensor([[-1.0, -1.5]])

    assert sample(logits, [row(temperature=0.0, generated=(0,), repetition_penalty=2.0)])[0].token_id == 1


@given(st.integers(0, 5), st.integers(0, 5))
def test_stop_ids_are_banned_until_min_tokens(position, min_tokens):
    """At position p, p tokens have already been generated."""
    params = SamplingParams(max_tokens=9, min_tokens=min_tokens, stop_token_ids=(8,))

    assert banned_before(params, position, (2, 3)) == ((2, 3, 8) if position < min_tokens else ())


def test_banned_tokens_are_never_drawn():
    """Even if they hold nearly all of the probability."""
    logits = torch.zeros(1, 4)
    logits[0, 2] = 30.0

    assert set(draw(logits, 200, banned=(2,))) == {0, 1, 3}


FILTERS = [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.5, "top_k": 3, "min_p": 0.2}]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize(
    "odd",
    [
        {"banned": range(VOCAB)},
        {"logit_bias": {7: 3.4e38}, "temperature": 0.5},
        {"logit_bias": {7: 3.4e38, 8: 3.4e38}, "temperature": 0.5},
        {"repetition_penalty": 1e-300, "generated": (2, 7)},
        {"temperature": 1e30},
        {"temperature": 1e-5},
    ],
    ids=str,
)
def test_parameters_that_overflow_harm_nobody(odd, filters):
    """A penalty may divide by almost zero and stop ids may cover the vocabulary; other rows must be unaffected."""
    logits = logits_of(3, rows=2)
    neighbour = row(seed=4, top_p=0.8)

    strange, unharmed = sample(logits, [row(**odd, **filters), neighbour])

    assert strange.finite
    assert 0 <= strange.token_id < VOCAB
    assert unharmed == sample(logits[1:], [neighbour])[0]
    if "logit_bias" in odd:
        assert strange.token_id == 7
    if odd.get("temperature") == 1e-5:
        assert strange.token_id == int(logits[0].argmax())


ODD = {
    "one NaN": [1.0, math.nan, 2.0],
    "all NaN": [math.nan] * 3,
    "infinite": [1.0, math.inf, 2.0],
    "all impossible": [-math.inf] * 3,
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"top_p": 0.9, "top_k": 2}, {"presence_penalty": 1.0}], ids=str
)
def test_a_model_s_logits_that_are_no_numbers_are_told_of_their_row_alone(params, odd):
    """A token drawn from such logits could not be told apart from a valid one."""
    logits = logits_of(3, rows=3)
    logits[1, :3] = torch.tensor(odd)
    if math.isinf(odd[0]):
        logits[1] = odd[0]
    rows = [row(seed=number, generated=(1,), **params) for number in range(3)]

    sampled = sample(logits, rows)

    assert [each.finite for each in sampled] == [True, False, True]
    assert [sampled[0], sampled[2]] == sample(logits[[0, 2]], [rows[0], rows[2]])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_drawn(temperature):
    """A grammar allows few, mostly unlikely tokens; rows without a mask in the same batch do not change."""
    logits = torch.zeros(2, 6)
    logits[:, 2] = 30.0
    bits = torch.tensor([[0b010001]], dtype=torch.int32)

    raw, only = logits.clone(), torch.tensor([0])
    restriction = Restriction(only, lambda edited: mask_logits(edited, only, bits))

    first, second = sample(logits, [row(temperature=temperature, logprobs=1)] * 2, restriction)
    banned, _ = sample(logits, [row(temperature=temperature, banned=(0,)), row()], restriction)

    assert first.token_id in (0, 4)
    assert second.token_id == 2
    assert banned.token_id == 4
    assert torch.equal(logits, raw)
    assert first.logprobs is not None
    assert first.logprobs.top[0].token_id == 2


def test_logprobs_are_of_the_raw_model():
    """Logprobs precede temperature, penalties and bans, as the API documents; likeliest first."""
    logits = logits_of(6)
    wanted = logits.double().log_softmax(-1)[0]

    (sampled,) = sample(logits, [row(temperature=0.3, banned=(int(wanted.argmax()),), logprobs=3)])

    entry = sampled.logprobs
    assert entry is not None
    assert entry.chosen.token_id == sampled.token_id
    assert entry.chosen.logprob == pytest.approx(float(wanted[sampled.token_id]), abs=1e-5)
    assert [top.token_id for top in entry.top] == wanted.topk(3).indices.tolist()
    assert [top.logprob for top in entry.top] == pytest.approx(wanted.topk(3).values.tolist(), abs=1e-5)


def test_each_row_gets_as_many_logprobs_as_it_asked_for():
    """A row that asked for none gets none; 0 gives the chosen token only; counts are capped at the vocabulary size."""
    sampled = sample(logits_of(7, rows=4), [row(), row(logprobs=0), row(logprobs=2), row(logprobs=VOCAB + 1)])

    assert sampled[0].logprobs is None
    assert [len(s.logprobs.top) for s in sampled[1:] if s.logprobs] == [0, 2, VOCAB]


def test_prompt_logprobs_are_of_the_given_tokens():
    """Row i of the logits predicts the i-th given token."""
    logits = logits_of(8, rows=3)

    found = prompt_logprobs(logits, [5, 6, 7], 1)

    wanted = logits.log_softmax(-1)
    assert [entry.chosen.token_id for entry in found] == [5, 6, 7]
    assert [entry.chosen.logprob for entry in found] == pytest.approx([float(wanted[i, 5 + i]) for i in range(3)])
    assert [entry.top[0].token_id for entry in found] == logits.argmax(-1).tolist()


def test_empty_batch_is_nothing():
    """A step with only prefill chunks draws no tokens."""
    assert sample(torch.empty(0, VOCAB), []) == []
    assert prompt_logprobs(torch.empty(0, VOCAB), [], 2) == []


def test_only_allowed_ids_are_drawn():
    """Greedy takes the likeliest allowed id; a ban takes precedence."""
    logits = logits_of(9)

    assert set(draw(logits, 200, allowed_token_ids=(3, 7), temperature=2.0)) <= {3, 7}
    best = max((3, 7), key=lambda token: float(logits[0, token]))
    assert draw(logits, 1, allowed_token_ids=(3, 7), temperature=0) == [best]
    [sampled] = sample(logits, [row(allowed_token_ids=(3, 7), banned=(best,), temperature=0)])
    assert {sampled.token_id} == {3, 7} - {best}


@pytest.mark.parametrize(
    ("generated", "banned"),
    [((), {5}), ((1,), {5, 2}), ((1, 2), {5, 3}), ((9, 1, 2), {5, 3}), ((1, 2, 9), {5}), ((2,), {5})],
)
def test_a_bad_word_is_cut_before_its_last_token(generated: tuple[int, ...], banned: set[int]):
    """Applies to each bad word whose other tokens are already at the end of the answer."""
    logits = torch.zeros(1, VOCAB)
    words = ((5,), (1, 2), (1, 2, 3))

    drawn = {
        sample(logits, [row(position, (), generated, bad_words=words)])[0].token_id for position in range(8 * VOCAB)
    }

    assert drawn == set(range(VOCAB)) - banned


def test_logprobs_are_of_the_ids_that_are_asked_for():
    """Requested ids come best first, plus the drawn token's own; other rows get their likeliest ids."""
    logits = logits_of(10, rows=2)

    listed, plain = sample(logits, [row(logprobs=0, logprob_token_ids=(4, 9, 11)), row(logprobs=1)])

    wanted = logits.log_softmax(-1)
    assert listed.logprobs
    assert plain.logprobs
    assert sorted(each.token_id for each in listed.logprobs.top) == [4, 9, 11]
    assert [each.logprob for each in listed.logprobs.top] == pytest.approx(sorted(wanted[0, [4, 9, 11]].tolist())[::-1])
    assert listed.logprobs.chosen.token_id == listed.token_id
    assert [each.token_id for each in plain.logprobs.top] == [int(logits[1].argmax())]


# --- uniform random numbers


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers(counter, key, answer):
    """The vectors of the Random123 library for philox4x32-10."""
    words = philox(tuple(np.array([w], np.uint64) for w in counter), tuple(np.array([w], np.uint64) for w in key))

    assert [int(word[0]) for word in words] == answer


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**40)), min_size=1, max_size=8))
def test_number_depends_on_seed_and_position_alone(pairs):
    """The number is the same whether drawn in a batch or alone, so another replica can continue."""
    together = uniforms(*zip(*pairs, strict=True), 3)

    assert together.tolist() == [uniforms([seed], [position], 3)[0].tolist() for seed, position in pairs]
    assert ((together >= 0) & (together < 1)).all()


def test_numbers_are_uniform_over_positions_over_seeds_and_within_a_position():
    """Neighbouring counters and keys must look uncorrelated: 100 equal bins, chi-square below 99.9 %."""
    count = 100_000
    for numbers in (
        uniforms([7] * count, range(count), 1),
        uniforms(range(count), [0] * count, 1),
        uniforms([7], [0], count),
    ):
        observed, _ = np.histogram(numbers, bins=100, range=(0, 1))
        assert ((observed - count / 100) ** 2 / (count / 100)).sum() < 149
