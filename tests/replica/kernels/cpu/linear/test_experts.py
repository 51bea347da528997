"""Grouped choices, the products of each choice, and each token's sum equal what they are defined as, in float64."""

from collections.abc import Iterator

import pytest
import torch

from homing.replica.kernels.cpu.linear.experts import combine, group, products
from homing.replica.kernels.cpu.linear.product import pack, product
from homing.replica.kernels.cpu.linear.tile import ROWS

from .test_product import ROUNDING

EXPERTS = 5


def choices(tokens: int, per_token: int) -> torch.Tensor:
    """Distinct experts per token; expert 3 is never chosen."""
    scores = torch.randn(tokens, EXPERTS)
    scores[:, 3] = -9
    return scores.topk(per_token).indices


@pytest.mark.parametrize("per_token", [1, 3])
@pytest.mark.parametrize("tokens", [0, 1, 7, 90])
def test_choices_are_ordered_by_expert_then_by_token(tokens, per_token):
    """Sums must not depend on which thread is first."""
    chosen = choices(tokens, per_token)

    grouped = group(chosen, EXPERTS)

    ordered, order = chosen.flatten().sort(stable=True)
    assert torch.equal(grouped.firsts, torch.searchsorted(ordered, torch.arange(EXPERTS + 1)))
    assert torch.equal(grouped.tokens, order // per_token)
    assert torch.equal(grouped.places.flatten(), order.argsort())


@pytest.fixture(params=[1, 3])
def threads(request) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("instructions", "threads")
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("tokens", [1, ROWS, 8 * ROWS + 3])
def test_products_equal_those_of_each_expert_alone(tokens, transposed):
    """Experts without tokens, and with several tiles; sizes that fill no block; a token's result is the same in any
    batch.
    """
    weights = torch.randn(EXPERTS, 98, 333).bfloat16().mT if transposed else torch.randn(EXPERTS, 333, 98).bfloat16()
    bias, x = torch.randn(EXPERTS, 333).bfloat16(), torch.randn(2 * tokens, 98).bfloat16()
    chosen = choices(tokens, 2)
    grouped = group(chosen, EXPERTS)

    found = products(x, pack(weights, bias), grouped.firsts)

    for expert in range(EXPERTS):
        mine = slice(*grouped.firsts[expert : expert + 2])
        assert torch.equal(found[mine], product(x[mine], pack(weights[expert], bias[expert])))


@pytest.mark.parametrize("of_weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_s_sum_is_that_of_its_own_results(dtype, of_weights):
    """Results are rows of a wider tensor if the outputs fill no block."""
    found, places = torch.randn(18, 64).to(dtype)[:, :50], torch.randperm(18).view(6, 3)
    weights = torch.rand(6, 3).to(of_weights)

    out = combine(found, places, weights)

    wanted = torch.einsum("tkf,tk->tf", found[places].double(), weights.double())
    torch.testing.assert_close(out.double(), wanted, rtol=ROUNDING if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_choices_and_inputs_that_the_kernels_cannot_read_are_refused():
    """Otherwise they would read out of bounds."""
    packed, grouped = pack(torch.ones(EXPERTS, 9, 64, dtype=torch.bfloat16)), group(choices(2, 1), EXPERTS)

    with pytest.raises(AssertionError, match="32 features, weights of 64"):
        products(torch.ones(2, 32).bfloat16(), packed, grouped.firsts)
    with pytest.raises(AssertionError, match="int64"):
        group(choices(2, 1).int(), EXPERTS)
