"""Products of few tokens equal float64, whatever the sizes; a copy in large pages is a copy."""

from collections.abc import Iterator

import pytest
import torch

from homing.replica.kernels.cpu.product import LARGE_PAGE_BYTES, in_large_pages, product

#: Of sums that are rounded to bfloat16 once: half a unit in the last of its eight bits.
ROUNDING = 2**-8


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("features", [2, 30, 64, 98, 768, 1234])
@pytest.mark.parametrize("outputs", [1, 7, 64, 333])
@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("biased", [True, False])
def test_equals_float64(features, outputs, tokens, biased):
    """Sizes that no register and no thread's share divides; the poisoned result shows what is not written."""
    x, weight = torch.randn(tokens, features).bfloat16(), torch.randn(outputs, features).bfloat16()
    bias = torch.randn(outputs).bfloat16() if biased else None

    y = product(x, weight, bias)

    torch.testing.assert_close(y.double(), exact(x, weight, bias), rtol=ROUNDING, atol=1e-4)


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_several_threads_write_all_outputs():
    """Each its share, with halves of the tokens of its own."""
    x, weight = torch.randn(2, 256).bfloat16(), torch.randn(1001, 256).bfloat16()

    y = product(x, weight, None)

    torch.testing.assert_close(y.double(), exact(x, weight, None), rtol=ROUNDING, atol=1e-4)


def test_slices_of_wider_tensors_are_read_by_their_rows():
    """Callers pass views."""
    wide, weight = torch.randn(3, 200).bfloat16(), torch.randn(9, 64).bfloat16()

    y = product(wide[:, 50:114], weight, None)

    torch.testing.assert_close(y.double(), exact(wide[:, 50:114], weight, None), rtol=ROUNDING, atol=1e-4)


def test_no_tokens_are_no_error():
    """An expert may get none."""
    weight = torch.ones(9, 64, dtype=torch.bfloat16)

    assert product(weight[:0], weight, None).shape == (0, 9)


def test_what_the_kernel_cannot_read_is_refused():
    """It would read beside the tensors."""
    weight = torch.ones(9, 64, dtype=torch.bfloat16)

    with pytest.raises(AssertionError, match="32 features, weight of 64"):
        product(weight[:1, :32], weight, None)
    with pytest.raises(AssertionError, match="odd"):
        product(weight[:1, :63], weight[:, :63].contiguous(), None)
    with pytest.raises(AssertionError, match="different dtypes"):
        product(weight[:1], weight.float(), None)
    with pytest.raises(AssertionError, match="bfloat16 only"):
        product(weight[:1].float(), weight.float(), None)


@pytest.mark.parametrize("outputs", [3, 700, 1100])
def test_a_copy_in_large_pages_has_the_weight_s_numbers_in_its_order(outputs):
    """Also of a weight that lies transposed, and on both sides of the size from which pages are large."""
    weight = torch.randn(1024, outputs).bfloat16().T

    copied = in_large_pages(weight)

    assert copied.is_contiguous()
    assert torch.equal(copied, weight)
    assert copied.data_ptr() != weight.data_ptr()
    assert weight.nbytes < LARGE_PAGE_BYTES // 2 or copied.data_ptr() % LARGE_PAGE_BYTES == 0
