"""Scalar functions of compiled kernels match libm and torch, including NaN; mixed dtypes are refused."""

import math

import numpy as np
import pytest
import torch

from homing.replica.kernels.base import PagedRows
from homing.replica.kernels.cpu.attention.decode import decode
from homing.replica.kernels.cpu.pointwise import add_rms_norm
from homing.replica.kernels.cpu.runtime.scalars import exponential, number_of, order_of, storage_of
from homing.replica.models.base import AttentionRule


def test_exponential_is_that_of_libm():
    """Accurate to a few units in the last place over the whole range of float32."""
    xs = np.linspace(-86.5, 87.5, 501, dtype=np.float32)

    found = np.array([exponential(x) for x in xs])

    np.testing.assert_allclose(found, np.exp(xs.astype(np.float64)), rtol=5e-7)


def test_exponential_saturates_and_hides_no_nan():
    """A NaN that became a number would look like a valid answer."""
    assert 0 <= exponential(np.float32(-math.inf)) < 1e-37
    assert exponential(np.float32(math.inf)) > 1e38
    assert math.isnan(exponential(np.float32(math.nan)))


def test_order_of_numbers_is_that_of_their_integers():
    """Loops take the maximum of the integers: -0.0 is below 0.0, and a NaN is beyond infinity, on its sign's side."""
    numbers = np.float32([-math.inf, -3.4e38, -1.5, -1e-40, -0.0, 0.0, 1e-40, 1.0, 1.5, 3.4e38, math.inf, math.nan])

    orders = [order_of(number) for number in numbers]

    assert orders == sorted(set(orders))
    assert order_of(np.float32(-math.nan)) < orders[0]
    np.testing.assert_array_equal([number_of(order) for order in orders], numbers)


@pytest.mark.parametrize("value", [0.0, 1.0, -1.00390625, 1.01171875, 3.3e38, math.inf, -math.inf, math.nan], ids=str)
def test_rounding_to_bfloat16_is_torch_s(value):
    """To the nearest, ties to even; values out of range become infinite."""
    storage = storage_of(torch.bfloat16)
    assert storage is not None

    bits = storage.narrow(np.float32(value))

    wanted = torch.tensor([value], dtype=torch.float32).bfloat16()
    got = torch.tensor([int(bits)], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def test_tensors_of_different_dtypes_are_refused():
    """Bytes would be misinterpreted, and twice as many read as exist."""
    pages, q = torch.zeros(2, 4, 1, 8, dtype=torch.bfloat16), torch.zeros(1, 1, 8)
    one = torch.ones(1, dtype=torch.int32)

    with pytest.raises(AssertionError, match="different dtypes"):
        decode(q, PagedRows(pages, pages, one[:, None], one), AttentionRule(1.0), torch.empty(1, 1, 8))
    with pytest.raises(AssertionError, match="different dtypes"):
        add_rms_norm(q[0], None, torch.ones(8, dtype=torch.bfloat16), 1e-6)
