"""A chart as an SVG file of its own, with its style sheet, title and legend; light or dark as the
reader's screen is.
"""

from collections.abc import Sequence
from importlib.resources import files

from markupsafe import Markup

from driftfilter.app.report.svg import LETTER, WIDTH, Style, swatch

MARGIN, TITLE, ROW = 14.0, 30.0, 20.0
MARK = 26.0  # width of a swatch
TITLE_STYLE = ".sheet { fill: var(--paper); } svg .title { font-size: 13px; font-weight: 600; }\n"


def style_sheet() -> str:
    """What the charts of svg.py are drawn with, as CSS."""
    return (files("driftfilter.app.report") / "charts.css").read_text(encoding="utf-8")


def stand_alone(
    title: str, chart: Markup, legend: Sequence[tuple[Style, str]] = (), width: float = WIDTH
) -> str:
    """A chart of svg.py on a sheet, below its title and above its legend."""
    height = float(chart.split('viewBox="0 0 ', 1)[1].split('"', 1)[0].split()[1])
    rows = _break_rows(legend, width)
    whole = TITLE + height + ROW * len(rows) + MARGIN
    placed = str(chart).replace(
        "<svg ",
        f'<svg x="0" y="{TITLE:g}" width="{width:g}" height="{height:g}" overflow="visible" ',
        1,
    )
    body = Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="{x:g} 0 {w:g} {h:g}" width="{w:g}" '
        'height="{h:g}" role="img" aria-label="{title}"><style>\n{style}</style>'
        '<rect class="sheet" x="{x:g}" width="{w:g}" height="{h:g}" rx="8"/>'
        '<text class="title" x="0" y="20">{title}</text>{chart}{legend}</svg>\n'
    ).format(
        x=-MARGIN,
        w=width + 2 * MARGIN,
        h=whole,
        title=title,
        style=Markup(style_sheet() + TITLE_STYLE),
        chart=Markup(placed),
        legend=Markup("").join(
            _entry(x, TITLE + height + ROW * number, style, name)
            for number, row in enumerate(rows)
            for x, style, name in row
        ),
    )
    return str(body)


def _break_rows(
    legend: Sequence[tuple[Style, str]], width: float
) -> list[list[tuple[float, Style, str]]]:
    """The entries of a legend with their places, in as many rows as they need."""
    rows: list[list[tuple[float, Style, str]]] = []
    x = width
    for style, name in legend:
        room = MARK + 6 + LETTER * len(name) + 18
        if x + room > width:
            rows, x = [*rows, []], 0.0
        rows[-1].append((x, style, name))
        x += room
    return rows


def _entry(x: float, y: float, style: Style, name: str) -> Markup:
    mark = str(swatch(style)).replace(
        "<svg ", f'<svg x="{x:g}" y="{y:g}" width="{MARK:g}" height="14" ', 1
    )
    return Markup('{}<text x="{:g}" y="{:g}">{}</text>').format(
        Markup(mark), x + MARK + 6, y + 11, name
    )
