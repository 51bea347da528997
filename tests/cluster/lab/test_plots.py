"""Charts can be written in each file format and read without colour; impossible plots are refused early."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from homing.cluster.errors import PlotFailed
from homing.cluster.lab.plots import Line, LineChart, Page, PointChart, Table, check_plot_path, write_plot

LINES = LineChart(
    "Hit rate by size",
    "blocks",
    "found",
    [Line("one replica", [1000, 4000], [0.1, 0.4]), Line("two replicas", [1000, 4000], [0.05, 0.3], dashed=True)],
    {"working set": 2000},
    log_x=True,
    percent=True,
)
POINTS = PointChart("Waiting", "seconds", ["round-robin", "homing"], {"mean": [1, 3], "p99": [10, 200]})
PAGE = Page("A <log>", [LINES, POINTS], [Table("Sizes", ["size", "hits"], [["1 k", "<10 %"]])], ["move <date> back"])


@pytest.mark.parametrize("suffix", [".png", ".svg", ".html"])
def test_the_suffix_says_the_form(tmp_path: Path, suffix: str):
    """Users need to remember only one option."""
    path = tmp_path / f"plot{suffix}"

    write_plot(path, PAGE)

    head = {".png": b"\x89PNG", ".svg": b"<?xml", ".html": b"<!DOCTYPE html>"}[suffix]
    assert path.read_bytes().startswith(head)


def test_the_words_of_a_chart_stay_text_in_svg(tmp_path: Path):
    """Text can be searched and read aloud."""
    path = tmp_path / "plot.svg"

    write_plot(path, PAGE)

    words = " ".join(ElementTree.parse(path).getroot().itertext())
    for expected in ("Hit rate by size", "one replica", "working set", "Waiting", "homing", "p99", "1k", "40%"):
        assert expected in words


def test_a_short_log_axis_has_more_numbers_than_powers_of_ten(tmp_path: Path):
    """Times to first token span a decade or two; a single labelled tick gives no scale."""
    path = tmp_path / "plot.svg"
    points = PointChart("Waiting", "seconds", ["homing"], {"mean": [0.13], "p99": [0.7]})

    write_plot(path, Page("", [points]))

    words = set(" ".join(ElementTree.parse(path).getroot().itertext()).split())
    assert {"0.2", "0.5"} <= words


def test_the_page_needs_nothing_else_and_escapes_what_it_is_given(tmp_path: Path):
    """Pages are sent by mail: no scripts, no links to other files; text from a log must not become markup."""
    path = tmp_path / "plot.html"

    write_plot(path, PAGE)

    page = path.read_text()
    assert page.count("<svg") == 2
    assert "A &lt;log&gt;" in page
    assert "&lt;10 %" in page
    assert "move &lt;date&gt; back" in page
    assert not any(word in page for word in ("<script", "src=", "<link", "<?xml"))


def test_the_same_page_gives_the_same_bytes(tmp_path: Path):
    """A plot under version control changes only with its data."""
    first, second = tmp_path / "a.html", tmp_path / "b.html"

    write_plot(first, PAGE)
    write_plot(second, PAGE)

    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(("name", "expected"), [("plot.gif", r"\.png, \.svg, \.html"), ("no/plot.png", "no folder")])
def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path, name: str, expected: str):
    """Refused at once, not after an hour of simulation."""
    with pytest.raises(PlotFailed, match=expected):
        check_plot_path(tmp_path / name)


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path):
    """matplotlib is an extra, because most installations never draw."""
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from pathlib import Path; from homing.cluster.lab.plots import check_plot_path, PlotFailed\n"
        "try: check_plot_path(Path(sys.argv[1]))\n"
        "except PlotFailed as error: print(error)"
    )

    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "plot.png")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert "pip install 'matplotlib>=3.9'" in done.stdout
