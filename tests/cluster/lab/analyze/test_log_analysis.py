"""Results for small logs, which can be counted by hand."""

import pytest

from homing.cluster.lab.analyze.log_analysis import BreakRow, LogAnalysis, LoggedPrompt, LogReport


def prompt(blocks: str, *, tokens: int | None = None, at: float | None = None) -> LoggedPrompt:
    """Blocks of four tokens named by the prefixes of a word; by default one token longer than its blocks."""
    names = [blocks[: end + 1] for end in range(len(blocks))]
    return LoggedPrompt(4 * len(blocks) + 1 if tokens is None else tokens, names, at)


def analyzed(*log: LoggedPrompt) -> LogReport:
    analysis = LogAnalysis(4, replicas=(1, 2))
    for each in log:
        analysis.observe(each)
    return analysis.report()


def test_the_figures_of_a_small_log():
    """Three requests with a common prefix, one without."""
    report = analyzed(prompt("abc"), prompt("abd"), prompt("x"), prompt("abc"))

    assert (report.requests, report.prompt_tokens, report.full_blocks) == (4, 44, 10)
    assert (report.distinct_blocks, report.shared_blocks, report.sharing_requests) == (5, 3, 2)
    assert report.saved_tokens() == 20
    assert report.mean_shared_tokens == 5
    assert report.share(report.curve.endless) == pytest.approx(20 / 44)
    assert report.known_entirely == 1
    assert report.breaks == (BreakRow(0, 0, 2), BreakRow(2, 3, 1))


def test_a_prompt_of_whole_blocks_computes_its_last_block_again():
    """The first token needs the logits of the prompt's last token; the engine does the same."""
    analysis = LogAnalysis(4)
    analysis.observe(prompt("ab", tokens=8))

    assert analysis.observe(prompt("ab", tokens=8)) == 4


def test_the_recommendation_has_headroom_over_what_is_useful():
    """Four alternating prompts need a cache for all four; LRU finds nothing in a smaller one."""
    report = analyzed(*(prompt(word) for word in ("ab", "cd", "ef", "gh") * 5))

    assert report.useful_blocks == 8
    assert report.curve.hits(6) == 0
    assert report.recommended_blocks == 10


def test_the_recommendation_holds_the_largest_prompt():
    """No block is shared, yet a smaller cache could not run the request at all."""
    assert analyzed(prompt("abcdefghij")).recommended_blocks == 14


def test_windows_slide_with_the_requests():
    """The largest number of distinct blocks in any window."""
    report = analyzed(prompt("ab", at=0), prompt("cd", at=50), prompt("ab", at=70), prompt("x", at=1000))

    assert [(row.window_s, row.peak_blocks) for row in report.windows] == [(60, 4), (300, 4), (900, 4)]
    assert report.windows[0].mean_blocks == pytest.approx((2 + 4 + 4 + 1) / 4)
    assert report.span_s == 1000


def test_a_window_holds_what_came_less_than_its_length_ago():
    """A prompt exactly sixty seconds old is no longer in the window."""
    assert analyzed(prompt("ab", at=0), prompt("cd", at=60)).windows[0].peak_blocks == 2


def test_a_log_without_times_has_no_windows():
    """A single request without a time is enough, because its window would be a guess."""
    report = analyzed(prompt("ab", at=0), prompt("cd"), prompt("ef", at=1))

    assert (report.windows, report.span_s) == ((), None)


def test_times_that_run_backwards_are_counted():
    """Logs are written when answers end; the order of the lines is kept."""
    report = analyzed(prompt("ab", at=10), prompt("cd", at=5))

    assert (report.late_requests, report.span_s) == (1, 0)


def test_each_number_of_replicas_is_estimated_under_both_rules():
    """One replica needs no estimate: it is the curve itself."""
    report = analyzed(prompt("ab"), prompt("cd"), prompt("ab"))

    rows = {(row.replicas, row.rule): row.curve.endless for row in report.replicas}
    assert rows == {(2, "affine"): 2, (2, "round-robin"): 2}


def test_an_empty_log_is_no_mistake():
    """Every number is zero."""
    report = LogAnalysis(16).report()

    assert (report.requests, report.mean_shared_tokens, report.share(0), report.recommended_blocks) == (0, 0, 0, 0)
    assert report.sizes() == [1]
