"""The progress that a starting process reports."""

import pytest

from homing.replica.progress import current, during, report


def test_shares_are_shown_in_steps() -> None:
    """Each change becomes a log line, so progress is rounded to tenths."""
    shown = []
    for done in range(40):
        report("reading the weights", done, 40)
        shown.append(current())

    assert [*dict.fromkeys(shown)][:3] == [
        "reading the weights",
        "reading the weights, 10 %",
        "reading the weights, 20 %",
    ]
    assert len(set(shown)) == 10


def test_an_interruption_ends_with_what_was_done_before() -> None:
    """Kernels are compiled on first use, in the middle of another phase, and compilation may fail."""
    report("measuring its speed")

    def compile_badly() -> None:
        with during("waiting"), during("compiling kernels"):
            assert current() == "compiling kernels"
            raise RuntimeError

    with pytest.raises(RuntimeError):
        compile_badly()

    assert current() == "measuring its speed"
