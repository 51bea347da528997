"""Products equal float64 for all sizes and instructions, and a copy in large pages is exact."""

from collections.abc import Iterator

import pytest
import torch

from homing.replica.kernels.cpu.linear.product import LARGE_PAGE_BYTES, in_large_pages, pack, product
from homing.replica.kernels.cpu.linear.tile import ROWS

#: Relative error of sums rounded to bfloat16 once: half a unit in the last of its eight bits.
ROUNDING = 2**-8


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("features", [2, 30, 98, 768])
@pytest.mark.parametrize("outputs", [1, 32, 333])
@pytest.mark.parametrize("biased", [True, False])
def test_equals_float64(features, outputs, biased):
    """All numbers of rows up to two blocks, and sizes not divisible by registers or threads."""
    weight = torch.randn(outputs, features).bfloat16()
    bias = torch.randn(outputs).bfloat16() if biased else None
    packed = pack(weight, bias)

    for tokens in range(2 * ROWS + 2):
        x = torch.randn(tokens, features).bfloat16()
        y = product(x, packed)
        torch.testing.assert_close(y.double(), exact(x, weight, bias), rtol=ROUNDING, atol=1e-4)
        assert y.shape == (tokens, outputs)
        assert y.stride(1) == 1


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("tokens", [1, 2, 50])
def test_several_threads_write_all_outputs(tokens):
    """Each thread computes a share of the outputs or of the rows."""
    x, weight = torch.randn(tokens, 256).bfloat16(), torch.randn(1001, 256).bfloat16()

    y = product(x, pack(weight))

    torch.testing.assert_close(y.double(), exact(x, weight, None), rtol=ROUNDING, atol=1e-4)


@pytest.mark.usefixtures("instructions")
def test_a_row_does_not_depend_on_those_beside_it():
    """A token's logits must be the same alone and in a batch."""
    x, packed = torch.randn(2 * ROWS + 3, 96).bfloat16(), pack(torch.randn(40, 96).bfloat16())

    together = product(x, packed)

    assert torch.equal(together, torch.cat([product(row[None], packed) for row in x]))


@pytest.mark.usefixtures("instructions")
def test_what_is_no_number_stays_none():
    """A broken row must be noticed, and must not affect the others."""
    x, packed = torch.randn(3, 64).bfloat16(), pack(torch.randn(40, 64).bfloat16())
    x[1, 5] = torch.nan

    y = product(x, packed)

    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]], product(x[[0, 2]], packed))


def test_slices_of_wider_tensors_are_read_by_their_rows():
    """Callers pass views, even views whose features are not contiguous."""
    wide, weight = torch.randn(3, 200).bfloat16(), torch.randn(9, 64).bfloat16()

    for x in (wide[:, 50:114], wide[:, 1:129:2]):
        torch.testing.assert_close(product(x, pack(weight)).double(), exact(x, weight, None), rtol=ROUNDING, atol=1e-4)


def test_what_the_kernel_cannot_read_is_refused():
    """Otherwise the kernel would read out of bounds."""
    weight = torch.ones(9, 64, dtype=torch.bfloat16)

    with pytest.raises(AssertionError, match="32 features, weight of 64"):
        product(weight[:1, :32], pack(weight))
    with pytest.raises(AssertionError, match="odd"):
        pack(weight[:, :63])
    with pytest.raises(AssertionError, match=r"not torch\.float32"):
        pack(weight.float())
    with pytest.raises(AssertionError, match=r"not torch\.float32"):
        product(weight[:1].float(), pack(weight))


@pytest.mark.parametrize("outputs", [3, 700, 1100])
def test_a_copy_in_large_pages_has_the_weight_s_numbers_in_its_order(outputs):
    """Also for a transposed weight, and for sizes below and above the threshold for large pages."""
    weight = torch.randn(1024, outputs).bfloat16().T

    copied = in_large_pages(weight)

    assert copied.is_contiguous()
    assert torch.equal(copied, weight)
    assert copied.data_ptr() != weight.data_ptr()
    assert weight.nbytes < LARGE_PAGE_BYTES // 2 or copied.data_ptr() % LARGE_PAGE_BYTES == 0
