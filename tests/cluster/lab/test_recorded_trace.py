"""Reading recorded traffic."""

import pytest

from homing.cluster.lab.recorded_trace import TraceError, TraceRequest, read_trace

LINE = '{"timestamp": 1500, "input_length": 1030, "output_length": 7, "hash_ids": [4, 5, 6], "extra": null}'


def test_a_trace_is_read_line_by_line() -> None:
    """Blank lines and unknown keys are allowed."""
    assert list(read_trace([LINE, "\n", LINE.encode()])) == [TraceRequest(1.5, 1030, 7, (4, 5, 6))] * 2


def test_only_blocks_that_the_prompt_fills_can_be_cached() -> None:
    """The last id of a prompt may cover fewer tokens than a block."""
    request = TraceRequest(0.0, 1030, 7, (4, 5, 6))

    assert request.full_blocks(512) == (4, 5)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: "),
        (LINE.replace("1030", '"x"'), r"line 2: .*input_length"),
        (LINE.replace("1500", "-1"), r"line 2: .*timestamp"),
        (LINE.replace("1500", "3"), "line 2: timestamp 0.003 s comes after 1.5 s"),
        (b"\xff", "line 2: "),
    ],
)
def test_a_malformed_line_is_named(line: str | bytes, said: str) -> None:
    """A log of a million lines cannot be searched by eye."""
    with pytest.raises(TraceError, match=said):
        list(read_trace([LINE, line]))
