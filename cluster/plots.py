"""Charts from plain data, as PNG, SVG or one HTML page that needs nothing else.

Knows no analysis and no simulation: they say what is to be drawn. Drawing is matplotlib's, which the extra `plot`
brings; without it everything but `write_plot` works. Colours are those of Okabe and Ito, which colour-blind readers
tell apart; each line has a marker and each bar a hatch of its own as well, so that a grey print can be read, too.
"""

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import PlotFailed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".html")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HATCHES = ("", "//", "..", "\\\\", "xx", "--", "++")
MARKERS_PER_LINE = 8
CHART_INCHES = (9.0, 5.0)
DOTS_PER_INCH = 120
#: Text stays text in SVG (small, searchable), and two runs over one log give the same bytes.
STYLE: Any = {
    "font.size": 11,
    "font.family": "sans-serif",
    "axes.titlesize": 13,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.8,
    "lines.linewidth": 2.0,
    "lines.markersize": 5.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "homing",
}
CSS = """body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
svg { width: 100%; height: auto; } table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid #ddd; text-align: right; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; } caption { text-align: left; font-weight: 600; }
pre { white-space: pre-wrap; background: #f6f6f6; padding: .75rem; }"""


@dataclass(slots=True, frozen=True)
class Line:
    """One line of a chart; `x` and `y` are equally long."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False
    #: lines of one family have one colour and marker and differ by their dashes; None: each is its own family
    family: int | None = None


@dataclass(slots=True, frozen=True)
class Mark:
    """A place on the x axis that has a name."""

    x: float
    label: str


@dataclass(slots=True, frozen=True)
class LineChart:
    """Lines over one axis. `percent`: the values of y are shares of one and are shown as per cent."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    marks: Sequence[Mark] = ()
    log_x: bool = False
    log_y: bool = False
    percent: bool = False


@dataclass(slots=True, frozen=True)
class Bars:
    """One bar in each group of a bar chart."""

    name: str
    values: Sequence[float]


@dataclass(slots=True, frozen=True)
class BarChart:
    """Groups of bars side by side, a group for each word of `groups`."""

    title: str
    y_label: str
    groups: Sequence[str]
    bars: Sequence[Bars]
    log_y: bool = False
    percent: bool = False


Chart = LineChart | BarChart


@dataclass(slots=True, frozen=True)
class Table:
    """A table of an HTML page; the first column holds names."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(slots=True, frozen=True)
class Page:
    """What is drawn: charts one below the other. Tables and notes appear in HTML only."""

    title: str
    charts: Sequence[Chart]
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()


def check_plot_path(path: Path) -> None:
    """Raises PlotFailed when `write_plot` could not write there; to be asked before hours of work."""
    if path.suffix.lower() not in SUFFIXES:
        raise PlotFailed(f"{path}: a plot is one of {', '.join(SUFFIXES)}, by the end of its file's name")
    if not path.absolute().parent.is_dir():
        raise PlotFailed(f"{path}: there is no folder {path.parent}")
    try:
        import matplotlib  # noqa: F401 - asked for, not used
    except ImportError as error:
        raise PlotFailed("plots need matplotlib, which is not installed: pip install 'homing[plot]'") from error


def write_plot(path: Path, page: Page) -> None:
    """Draw `page` into a file whose suffix says the form. Raises PlotFailed."""
    check_plot_path(path)
    form = path.suffix.lower().removeprefix(".")
    content = _html(page).encode() if form == "html" else _drawn(page.charts, page.title, form)
    try:
        path.write_bytes(content)
    except OSError as error:
        raise PlotFailed(f"{path} cannot be written: {error.strerror}") from error


def _drawn(charts: Sequence[Chart], title: str, form: str) -> bytes:
    """The charts as one picture."""
    # Not at the top: takes half a second, and most commands draw nothing. Without pyplot there is no global state.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    width, height = CHART_INCHES
    with rc_context(STYLE):
        figure = Figure(figsize=(width, height * len(charts)), dpi=DOTS_PER_INCH, layout="constrained")
        if title and len(charts) > 1:
            figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        for place, chart in enumerate(charts, 1):
            _draw(figure.add_subplot(len(charts), 1, place), chart)
        return _saved(figure, form)


def _saved(figure: "Figure", form: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, metadata={"Date": None} if form == "svg" else None)
    return buffer.getvalue()


def _draw(axes: "Axes", chart: Chart) -> None:
    axes.set_title(chart.title)
    axes.set_ylabel(chart.y_label)
    if isinstance(chart, LineChart):
        _draw_lines(axes, chart)
    else:
        _draw_bars(axes, chart)
    if chart.log_y:
        axes.set_yscale("log")
    if chart.percent:
        _percent(axes, [value for each in _values(chart) for value in each])
    handles, _ = axes.get_legend_handles_labels()
    if len(handles) > 1:
        # Outside: curves that rise and curves that fall leave no corner free that always is.
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _draw_lines(axes: "Axes", chart: LineChart) -> None:
    axes.set_xlabel(chart.x_label)
    if chart.log_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(_short_number)
        axes.xaxis.set_minor_formatter("")
    for place, line in enumerate(chart.lines):
        family = place if line.family is None else line.family
        axes.plot(
            line.x,
            line.y,
            label=line.name,
            color=COLOURS[family % len(COLOURS)],
            marker=MARKERS[family % len(MARKERS)],
            markevery=max(1, len(line.x) // MARKERS_PER_LINE),
            linestyle="--" if line.dashed else "-",
        )
    for mark in chart.marks:
        axes.axvline(mark.x, color="#555555", linestyle=":", linewidth=1.5)
    for place, mark in enumerate(chart.marks):
        _label_mark(axes, mark, place)


def _label_mark(axes: "Axes", mark: Mark, place: int) -> None:
    """The name stands on the side that has more room, each a line lower than the one before."""
    across = axes.transAxes.inverted().transform(axes.transData.transform((mark.x, 0.5)))[0]
    left = across > 0.5
    axes.annotate(
        mark.label,
        xy=(mark.x, 0.98 - 0.07 * place),
        xycoords=("data", "axes fraction"),
        xytext=(-5 if left else 5, 0),
        textcoords="offset points",
        va="top",
        ha="right" if left else "left",
        color="#333333",
        fontsize=10,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.0},
    )


def _draw_bars(axes: "Axes", chart: BarChart) -> None:
    width = 0.8 / max(1, len(chart.bars))
    middles = range(len(chart.groups))
    for place, bars in enumerate(chart.bars):
        left = [middle - 0.4 + width * (place + 0.5) for middle in middles]
        colour, hatch = COLOURS[place % len(COLOURS)], HATCHES[place % len(HATCHES)]
        axes.bar(left, bars.values, width, label=bars.name, color=colour, hatch=hatch, edgecolor="white")
    axes.set_xticks(list(middles), list(chart.groups))
    axes.grid(axis="x", visible=False)


def _values(chart: Chart) -> list[Sequence[float]]:
    return [line.y for line in chart.lines] if isinstance(chart, LineChart) else [bars.values for bars in chart.bars]


def _percent(axes: "Axes", values: Sequence[float]) -> None:
    """From nothing to a third above the highest, for the words of marks; never above all."""
    from matplotlib.ticker import PercentFormatter

    axes.set_ylim(0, min(1.0, 1.3 * max(values, default=0.0) or 1.0))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))


def _short_number(value: float, _: Any = None) -> str:
    """1000 as 1k: axes of blocks and tokens run to millions."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:g}{letter}"
    return f"{value:g}"


def _html(page: Page) -> str:
    pictures = [_inline(chart) for chart in page.charts]
    tables = [_table(table) for table in page.tables]
    notes = [f"<pre>{html.escape(note)}</pre>" for note in page.notes]
    title = html.escape(page.title)
    body = "\n".join([f"<h1>{title}</h1>", *pictures, *tables, *notes])
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f"<style>{CSS}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _inline(chart: Chart) -> str:
    """The chart's `svg` element, without the XML prologue that HTML does not know."""
    drawn = _drawn([chart], "", "svg").decode()
    return drawn[drawn.index("<svg") :]


def _table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    lines = [row(table.header, "th"), *(row(cells, "td") for cells in table.rows)]
    return f"<table><caption>{html.escape(table.caption)}</caption>\n" + "\n".join(lines) + "\n</table>"
