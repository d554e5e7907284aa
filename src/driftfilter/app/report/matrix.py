"""The matrix of a benchmark on the page of a report: heat maps against the frozen network, and the
worst cells.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from markupsafe import Markup

from driftfilter.app.bench.matrix import (
    Cell,
    Matrix,
    describe_harm,
    draw_up,
    lay_out,
    say_excess,
    say_gain,
)
from driftfilter.app.report import svg as draw
from driftfilter.app.report.content import StreamReport, plural

Say: TypeAlias = Callable[[Cell | None], str]
DETAILED = 8  # streams of a matrix that are shown beside it


def pick_worst(streams: Sequence[StreamReport]) -> list[StreamReport]:
    """The streams in which a preset is worst against the frozen source, as many as are shown."""

    def gain(stream: StreamReport) -> float:
        frozen = None if stream.source is None else stream.source.quality["accuracy"]
        return min((entry.quality["accuracy"] or 0) - (frozen or 0) for entry in stream.entries)

    return sorted(streams, key=gain)[:DETAILED]


def view(matrix: Matrix) -> dict[str, Any]:
    """What the template is given of a matrix."""
    table, *_ = draw_up(matrix)
    cells = matrix.cells
    sizes = [
        plural(len({cell[place] for cell in cells}), what)
        for place, what in enumerate(("network", "protocol", "batch size"))
    ]
    return {
        "title": " × ".join(sizes),
        "says": f"{describe_harm(cells).capitalize()}.",
        "head": table.head,
        "rows": [[_minus(text) for text in row] for row in table.rows],
        "charts": [
            (preset, *_draw([cell for cell in cells if cell.preset == preset]))
            for preset in dict.fromkeys(cell.preset for cell in cells)
        ],
        "notes": matrix.notes,
    }


def _draw(cells: Sequence[Cell]) -> tuple[Markup, Markup]:
    """Heat maps of a preset: accuracy and ECE against the frozen network."""
    columns, rows = lay_out(cells)

    def heat(name: str, value: Callable[[Cell], float], say: Say, better: int) -> Markup:
        shown = {
            f"{network} · {protocol}": [each and (value(each), _minus(say(each))) for each in row]
            for (_, network, protocol), row in rows.items()
        }
        says = "; ".join(
            f"{label}: {', '.join('–' if each is None else each[1] for each in row)}"
            for label, row in shown.items()
        )
        return draw.heat(f"{name} of {cells[0].preset}", says, columns, shown, better)

    return (
        heat("Accuracy above the frozen network", lambda cell: cell.gain, say_gain, 1),
        heat("ECE minus the frozen network's", lambda cell: cell.excess, say_excess, -1),
    )


def _minus(text: str) -> str:
    return text.replace("-", "−") if text[:1] == "-" else text
