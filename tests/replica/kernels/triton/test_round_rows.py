"""8-bit activations: as accurate as 8 bits allow, with the layout of scales that products need."""

import pytest
import torch

from ..layouts import DTYPES_BESIDE_8_BITS, OF_8_BITS


@pytest.mark.parametrize("implementation", OF_8_BITS)
@pytest.mark.parametrize("dtype", DTYPES_BESIDE_8_BITS, ids=str)
@pytest.mark.parametrize(("rows", "width", "features"), [(1, 48, 48), (4, 256, 128), (5, 200, 128), (6, 144, 144)])
def test_each_group_of_features_uses_all_of_the_range(implementation, dtype, rows, width, features, device):
    """Each scale maps its largest feature to 448; padding to a multiple of four rows is zero; scales lie by column."""
    x = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(2)).to(device, dtype)[:, :width]
    x[0, : min(width, 128)] *= 1e4
    x[-1] = 0

    rounded, scales = implementation().round_rows(x, features)

    groups = -(-width // features)
    assert rounded.shape == (-(-rows // 4) * 4, width)
    assert scales.shape == (len(rounded), groups)
    assert rounded.is_contiguous()
    assert scales.t().is_contiguous()
    assert not rounded[rows:].float().any()
    factors = scales.repeat_interleave(features, 1)[:rows, :width].double()
    wrong = (rounded[:rows].double() * factors - x.double()).abs()
    # At most half the distance to the next number: 1/16 of a normal number. Normal numbers begin at 2^-6.
    assert bool((wrong <= torch.maximum(x.double().abs() / 16, factors * 2**-10) * 1.001).all())
    for group in range(groups):
        part = slice(group * features, min((group + 1) * features, width))
        tops = rounded[: rows - 1, part].float().abs().amax(1)
        assert bool((tops == 448).all())


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("implementation", OF_8_BITS)
def test_what_is_no_number_stays_none_in_its_row_alone(implementation, device):
    """The request of that row must fail, and no other."""
    x = torch.ones(3, 32, device=device)
    x[1, 3] = float("nan")

    rounded, scales = implementation().round_rows(x, 32)

    found = rounded[:3].float() * scales[:3]
    assert found[1].isnan().any()
    torch.testing.assert_close(found[[0, 2]], x[[0, 2]])
