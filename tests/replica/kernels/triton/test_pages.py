"""A search is deep enough for any batch, and few kernels are compiled for all batch sizes together."""

from hypothesis import given
from hypothesis import strategies as st

from homing.replica.execute.cuda_graphs import graph_sizes
from homing.replica.kernels.triton.pages import depth_for


@given(st.integers(0, 5000))
def test_a_search_singles_out_one_row_of_any_number(rows):
    """Each step halves what is left."""
    assert 2 ** depth_for(rows) > rows


def test_all_graphs_of_a_large_batch_share_three_depths():
    """A kernel takes seconds to compile, and a start captures every size."""
    assert {depth_for(size) for size in graph_sizes(512)} == {4, 8, 12}
