"""Charts from plain data, as PNG, SVG or one self-contained HTML page.

Independent of analysis and simulation, which describe the charts. Drawing needs matplotlib, which the extra `plot`
installs; without it everything but `write_plot` works. Colours are those of Okabe and Ito, which colour-blind readers
can tell apart, and four more for crowded charts; each also has its own marker, so that a grey print is readable.
Numbers that differ by orders of magnitude are points on a log axis, where bar lengths would be meaningless.
"""

import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import floor, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PlotFailed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg", ".html")
COLOURS = "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #000000 #882255 #332288 #999933 #888888".split()
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "p")
MARKERS_PER_LINE = 8
CHART_INCHES = (9.0, 5.0)
#: Height of a point chart without its rows, and height of a row.
POINTS_INCHES, ROW_INCHES = 1.6, 0.34
DOTS_PER_INCH = 120
#: Text stays text in SVG (small, searchable), and two runs over the same log give the same bytes.
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
    """One line of a chart; `x` and `y` have the same length."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False
    #: lines of a family share colour and marker and differ by their dashes; None: the line is its own family
    family: int | None = None


@dataclass(slots=True, frozen=True)
class LineChart:
    """Lines over one axis. `marks` labels positions on the x axis. `percent`: y values are fractions, shown as
    percentages."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    marks: Mapping[str, float] = field(default_factory=dict)
    log_x: bool = False
    percent: bool = False


@dataclass(slots=True, frozen=True)
class PointChart:
    """Rows of points on one log axis, the first row on top; `points` maps each name to one value per row."""

    title: str
    x_label: str
    rows: Sequence[str]
    points: Mapping[str, Sequence[float]]


Chart = LineChart | PointChart


@dataclass(slots=True, frozen=True)
class Table:
    """A table of an HTML page; the first column contains names."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(slots=True, frozen=True)
class Page:
    """Charts, drawn one below the other; tables and notes appear only in HTML."""

    title: str
    charts: Sequence[Chart]
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()


def check_plot_path(path: Path) -> None:
    """Raise PlotFailed if `write_plot` could not write to this path; call it before hours of work."""
    if path.suffix.lower() not in SUFFIXES:
        raise PlotFailed(f"{path}: a plot's name must end in one of {', '.join(SUFFIXES)}, its format")
    if not path.absolute().parent.is_dir():
        raise PlotFailed(f"{path}: there is no folder {path.parent}")
    try:
        import matplotlib  # noqa: F401 - only to check that it is installed
    except ImportError as error:
        raise PlotFailed("plots need matplotlib, which is not installed: pip install 'matplotlib>=3.9'") from error


def write_plot(path: Path, page: Page) -> None:
    """Draw `page` into a file; its suffix determines the format. Raises PlotFailed."""
    check_plot_path(path)
    form = path.suffix.lower().removeprefix(".")
    content = _html(page).encode() if form == "html" else _drawn(page.charts, form, page.title)
    try:
        path.write_bytes(content)
    except OSError as error:
        raise PlotFailed(f"{path} cannot be written: {error.strerror}") from error


def _drawn(charts: Sequence[Chart], form: str, title: str = "") -> bytes:
    # Not at the top: the import takes half a second, and most commands draw nothing. Without pyplot, no global state.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    heights = [
        CHART_INCHES[1] if isinstance(chart, LineChart) else POINTS_INCHES + ROW_INCHES * len(chart.rows)
        for chart in charts
    ]
    with rc_context(STYLE):
        figure = Figure(figsize=(CHART_INCHES[0], sum(heights)), dpi=DOTS_PER_INCH, layout="constrained")
        if title and len(charts) > 1:
            figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        grid = figure.add_gridspec(len(charts), 1, height_ratios=heights)
        for place, chart in enumerate(charts):
            _draw(figure.add_subplot(grid[place]), chart)
        buffer = io.BytesIO()
        figure.savefig(buffer, format=form, metadata={"Date": None} if form == "svg" else None)
        return buffer.getvalue()


def _draw(axes: "Axes", chart: Chart) -> None:
    axes.set_title(chart.title)
    axes.set_xlabel(chart.x_label)
    if isinstance(chart, LineChart):
        _draw_lines(axes, chart)
    else:
        _draw_points(axes, chart)
    handles, _ = axes.get_legend_handles_labels()
    if len(handles) > 1:
        # Outside the axes, because no corner is always free of both rising and falling curves.
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _draw_lines(axes: "Axes", chart: LineChart) -> None:
    axes.set_ylabel(chart.y_label)
    if chart.log_x:
        _log_x(axes)
    if chart.percent:
        from matplotlib.ticker import PercentFormatter

        # From 0 to 30 % above the highest value, which leaves room for labels of marks; at most 100 %.
        highest = max([value for line in chart.lines for value in line.y], default=0.0)
        axes.set_ylim(0, min(1.0, 1.3 * highest or 1.0))
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
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
            zorder=3 - place / len(chart.lines),  # the first line is the page's subject: others never hide it
        )
    for x in chart.marks.values():
        axes.axvline(x, color="#555555", linestyle=":", linewidth=1.5)
    for place, (label, x) in enumerate(chart.marks.items()):
        # The label goes on the side with more room, each one line below the previous.
        across = axes.transAxes.inverted().transform(axes.transData.transform((x, 0.5)))[0]
        left = across > 0.5
        axes.annotate(
            label,
            xy=(x, 0.98 - 0.07 * place),
            xycoords=("data", "axes fraction"),
            xytext=(-5 if left else 5, 0),
            textcoords="offset points",
            va="top",
            ha="right" if left else "left",
            color="#333333",
            fontsize=10,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.0},
        )


def _draw_points(axes: "Axes", chart: PointChart) -> None:
    _log_x(axes)
    rows = range(len(chart.rows))
    spans = list(zip(*chart.points.values(), strict=True))
    axes.hlines(list(rows), [min(span) for span in spans], [max(span) for span in spans], color="#bbbbbb", linewidth=2)
    for place, (name, values) in enumerate(chart.points.items()):
        colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
        axes.plot(values, list(rows), label=name, color=colour, marker=marker, linestyle="")
        for row, value in zip(rows, values, strict=True):
            axes.annotate(
                f"{value:#.2g}" if value < 10 else f"{value:.0f}",
                xy=(value, row),
                xytext=(0, 5),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=colour,
            )
    axes.set_yticks(list(rows), list(chart.rows))
    axes.set_ylim(len(chart.rows) - 0.5, -0.7)
    axes.grid(axis="y", visible=False)


def _log_x(axes: "Axes") -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(_short_number)
    axes.grid(axis="x", which="minor", linewidth=0.4)

    def between_tens(value: float, _: float) -> str:
        """Label twos and fives if powers of ten alone would be too few labels."""
        leading = round(value / 10 ** floor(log10(value)))
        first, last = axes.get_xlim()
        return _short_number(value) if leading in (2, 5) and last < 100 * first else ""

    axes.xaxis.set_minor_formatter(between_tens)


def _short_number(value: float, _: Any = None) -> str:
    """Format 1000 as 1k, because axes of blocks and tokens extend to millions."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:g}{letter}"
    return f"{value:g}"


def _html(page: Page) -> str:
    # Each chart's `svg` element, without the XML prologue, which HTML does not support.
    drawn = [_drawn([chart], "svg").decode() for chart in page.charts]
    pictures = [svg[svg.index("<svg") :] for svg in drawn]
    tables = [_table(table) for table in page.tables]
    notes = [f"<pre>{html.escape(note)}</pre>" for note in page.notes]
    title = html.escape(page.title)
    body = "\n".join([f"<h1>{title}</h1>", *pictures, *tables, *notes])
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f"<style>{CSS}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    lines = [row(table.header, "th"), *(row(cells, "td") for cells in table.rows)]
    return f"<table><caption>{html.escape(table.caption)}</caption>\n" + "\n".join(lines) + "\n</table>"
