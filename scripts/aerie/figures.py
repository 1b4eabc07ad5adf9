"""Plots for the report: numbers in, inline SVG out.

Each function returns one `<svg>` element without width and height, so that the page scales it. Colours are CSS
variables of the page (`--ink`, `--muted`, `--line`, `--page`, `--series-1` to `--series-8`), so that one picture serves
light, dark and paper; texts stay texts in the page's own font. Equal numbers give equal bytes: no date, no
random id, no setting taken from the reader's matplotlib configuration.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, ScalarFormatter

SIZE_INCHES = (4.6, 2.9)  # small on purpose: on a phone it is shown at about this size, so 9 pt stays readable
MOST_POINTS = 400  # of one line; more cannot be seen at this size and only make the page large
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")  # a shape besides a colour for each series

# matplotlib wants real colours: these stand for the page's variables and are replaced in `_svg`.
INK, MUTED, LINE, PAGE = "#010203", "#010204", "#010205", "#010206"
SERIES = tuple(f"#0a0b{number:02x}" for number in range(1, 9))
VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    LINE: "var(--line)",
    PAGE: "var(--page)",
    **{colour: f"var(--series-{number})" for number, colour in enumerate(SERIES, 1)},
}
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "aerie",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 1.2,
}


@dataclass(frozen=True)
class Series:
    """One line or one set of points: a name and (x, y) pairs."""

    name: str
    points: Sequence[tuple[float, float]]


def thin(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """Return at most `most` points: means of runs of neighbours of equal length, all points where they are few."""
    run = -(-len(points) // most)
    if run <= 1:
        return list(points)
    runs = [points[first : first + run] for first in range(0, len(points), run)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in runs]


def lines(
    name: str, label: str, series: Sequence[Series], x_label: str, y_label: str, mark: tuple[float, str] | None = None
) -> str:
    """Return a line per series; `mark` is an x with a word, drawn as a vertical line."""

    def draw(axes: Axes) -> None:
        for number, one in enumerate(series):
            points = thin(one.points)
            marker = MARKERS[number % len(MARKERS)] if len(points) <= 30 else ""
            axes.plot(*zip(*points, strict=True), color=SERIES[number % len(SERIES)], marker=marker, label=one.name)
        if mark:
            axes.axvline(mark[0], color=MUTED, linewidth=1, linestyle=(0, (2, 2)))
            left, right = axes.get_xlim()
            side = "right" if mark[0] > (left + right) / 2 else "left"
            axes.annotate(
                mark[1], (mark[0], 1), xycoords=("data", "axes fraction"), textcoords="offset points",
                xytext=(0, 2), ha=side, va="bottom", color=MUTED, fontsize=8.5,
            )  # fmt: skip
        axes.set(xlabel=x_label, ylabel=y_label)

    return _svg(name, label, draw, legend=len(series) > 1)


def bars(
    name: str,
    label: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    y_label: str,
    show: Callable[[float], str],
    spread: Sequence[tuple[float, float]] | None = None,
) -> str:
    """Return a bar per group and series with its value above, as `show` writes it; None leaves a gap.

    `spread` (lowest, highest) per group is drawn as a whisker; it needs a single series.
    """

    def draw(axes: Axes) -> None:
        width = 0.8 / len(series)
        for number, values in enumerate(series.values()):
            for group, value in enumerate(values):
                if value is None:
                    continue
                x = group + (number - (len(series) - 1) / 2) * width
                colour = SERIES[(group if len(series) == 1 else number) % len(SERIES)]
                axes.bar(x, value, width * 0.86, color=colour, label=list(series)[number] if group == 0 else None)
                top = spread[group][1] if spread else value
                if spread:
                    below, above = value - spread[group][0], spread[group][1] - value
                    axes.errorbar(x, value, [[below], [above]], color=INK, linewidth=1, capsize=3)
                axes.annotate(
                    show(value), (x, top), textcoords="offset points", xytext=(0, 4), ha="center", fontsize=8.5
                )
        axes.set_xticks(range(len(groups)), groups)
        axes.set_ylabel(y_label)
        axes.grid(axis="x", visible=False)
        axes.margins(y=0.15)

    return _svg(name, label, draw, legend=len(series) > 1)


def scatter(name: str, label: str, series: Sequence[Series], x_label: str, y_label: str) -> str:
    """Return points on equal scales with the line on which both figures agree."""

    def draw(axes: Axes) -> None:
        values = [value for one in series for point in one.points for value in point]
        low, high = min(values), max(values)
        room = (high - low or 1.0) * 0.06
        axes.plot([low - room, high + room], [low - room, high + room], color=MUTED, linewidth=1, linestyle=(0, (2, 2)))
        for number, one in enumerate(series):
            axes.plot(
                *zip(*one.points, strict=True),
                linestyle="",
                color=SERIES[number],
                marker=MARKERS[number],
                label=one.name,
            )
        axes.set(xlabel=x_label, ylabel=y_label, xlim=(low - room, high + room), ylim=(low - room, high + room))
        axes.set_box_aspect(1)  # the limits are equal, so this makes the scales equal

    return _svg(name, label, draw, legend=len(series) > 1)


def ranked(
    name: str, label: str, series: Mapping[str, Sequence[float]], x_label: str, y_label: str, line: float
) -> str:
    """Return each series' values in ascending order as dots, with a horizontal line at `line`."""

    def draw(axes: Axes) -> None:
        axes.axhline(line, color=MUTED, linewidth=1, linestyle=(0, (2, 2)))
        for number, (one, values) in enumerate(series.items()):
            points = list(enumerate(sorted(values), 1))
            axes.plot(
                *zip(*points, strict=True), linestyle="", marker=MARKERS[number % len(MARKERS)],
                color=SERIES[(number + 1) % len(SERIES)], label=one,
            )  # fmt: skip
        axes.set(xlabel=x_label, ylabel=y_label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    return _svg(name, label, draw, legend=len(series) > 1)


# ----------------------------------------------------------------------------------------------------
# From matplotlib's document to an element of the page


def _svg(name: str, label: str, draw: Callable[[Axes], None], legend: bool) -> str:
    """Return the element: `name` makes its ids unique on the page, `label` says what a reader cannot see."""
    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        for axis in (axes.xaxis, axes.yaxis):
            if isinstance(axis.get_major_formatter(), ScalarFormatter):  # named groups keep their names
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        if legend:
            handles, names = axes.get_legend_handles_labels()
            figure.legend(handles, names, loc="outside upper left", ncols=4)
        buffer = io.StringIO()
        figure.savefig(
            buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    return _embed(buffer.getvalue(), name, label)


def _embed(document: str, name: str, label: str) -> str:
    element = document[document.index("<svg") :]
    element = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", element, flags=re.DOTALL)
    element = re.sub(r" font-family: [^;\"]*;", "", element)  # the page's own
    for colour, variable in VARIABLES.items():
        element = element.replace(colour, variable)
    # Two pictures of one page both have an `axes_1`: keep the ids that something points to, under the picture's name.
    pointed_to = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', element))
    for identifier in sorted({one or other for one, other in pointed_to}):
        element = element.replace(f'id="{identifier}"', f'id="{name}-{identifier}"')
        element = re.sub(rf'(href="#|url\(#){re.escape(identifier)}(?=["\)])', rf"\g<1>{name}-{identifier}", element)
    element = re.sub(rf' id="(?!{re.escape(name)}-)[^"]*"', "", element)
    opening = re.search(r'<svg[^>]*?viewBox="([^"]+)"[^>]*>', element)
    assert opening, f"{name}: matplotlib wrote no viewBox"
    quoted = escape(label, {'"': "&quot;"})
    head = f'<svg viewBox="{opening[1]}" role="img" aria-label="{quoted}" xmlns:xlink="http://www.w3.org/1999/xlink">'
    element = head + element[opening.end() :]
    return re.sub(r"\n\s*", "\n", re.sub(r"\n\s*\n+", "\n", element)).strip()
