"""Batches are padded to few sizes, and a stand-in for CUDA graphs replays by calling."""

from hypothesis import given
from hypothesis import strategies as st

from homing.replica.execute.cuda_graphs import EagerSteps, graph_sizes, padded_size


@given(st.integers(1, 600), st.data())
def test_every_batch_has_a_size_that_is_not_much_larger(most, data):
    """A padding row costs as much as a real one, and a batch without a graph costs a launch for each kernel."""
    sizes = graph_sizes(most)
    rows = data.draw(st.integers(1, most))

    size = padded_size(rows, sizes)

    assert size is not None
    assert rows <= size <= most
    assert size - rows < 16
    assert size <= 2 * rows


def test_larger_batches_have_none():
    """The caller must not replay a graph that is too small."""
    assert padded_size(9, [1, 2, 4, 8]) is None


def test_eager_replays_run_the_function_of_their_size():
    """What a graph does to its tensors, the stand-in does by calling again."""
    calls: list[str] = []
    graphs = EagerSteps()
    graphs.capture(1, lambda: calls.append("one"))
    graphs.capture(2, lambda: calls.append("two"))

    graphs.replay(2)
    graphs.replay(1)

    assert calls == ["two", "one"]
