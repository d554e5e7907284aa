"""The linear example as a moving picture: an SVG of ten seconds that needs no script."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from driftfilter.app.paper.linear import Linear

SECONDS = 10
FRAMES = 50  # at which boundaries and shares are given; a viewer moves between them
RECENT = 100  # samples of which shares of right predictions are taken
POINTS = 400  # samples that are drawn
LOW, HIGH = -4.0, 7.0  # of both coordinates that are shown
COLORS = ("#0072B2", "#D55E00")  # of the classes
FROZEN, FILTER = "#7F7F7F", "#009E73"
PLOT, MARGIN, BAR = 400, 20, 160  # pixels: across the window, around it, of a share of 1
WIDTH, HEIGHT = PLOT + 2 * MARGIN, PLOT + 2 * MARGIN + 65
STYLE = (
    "<style>.paper { fill: #fff; } .rule { fill: none; stroke: #bbb; } .ink { fill: #222; } "
    ".empty { fill: #eee; } @media (prefers-color-scheme: dark) { .paper { fill: #14171a; } "
    ".rule { stroke: #565d66; } .ink { fill: #eceff2; } .empty { fill: #343a41; } }</style>"
)


class Way(NamedTuple):
    """What is drawn of one stream."""

    inputs: Tensor  # [steps, 2]
    labels: Tensor  # [steps]
    means: Tensor  # [steps + 1, 3], of the belief: bias and two weights; the first is the source's
    right: Tensor  # [2, steps], of the frozen source and of the filter


def follow(example: Linear, seed: int) -> Way:
    """The filter along one stream, beside its source."""
    problem, filt = example.problem(seed), example.filter()
    state = frozen = filt.init(example.source(problem.source), seed)
    inputs, labels = (each.flatten(0, 1) for each in problem.stream)
    means, right = [state.belief.mean], []
    for batch in problem.stream.inputs:
        state, prediction, _ = filt.step(state, batch)
        means.append(state.belief.mean)
        right.append(prediction.log_probabilities.argmax(-1))
    before = filt.predict(frozen, inputs).log_probabilities.argmax(-1)
    return Way(
        inputs, labels, torch.stack(means), torch.stack((before, torch.cat(right))) == labels
    )


def animate(example: Linear, seed: int) -> str:
    """Samples as they come and fade, the boundary of the frozen source and that of the filter, and
    how many of the last samples each has right.
    """
    way = follow(example, seed)
    marks = torch.linspace(0, len(way.labels), FRAMES + 1).round().long().tolist()
    ends = [_cut(mean) for mean in way.means[marks]]
    parts = [
        *_draw_points(way),
        _line(ends[:1], FROZEN, 'stroke-dasharray="6 5"'),
        _line(ends, FILTER),
        *_draw_bar(0, "frozen classifier", FROZEN, _share(way.right[0], marks)),
        *_draw_bar(1, "driftfilter", FILTER, _share(way.right[1], marks)),
    ]
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    title = "Two classes drift; the boundary of driftfilter follows them, the frozen one stays"
    window = f'<rect x="{MARGIN}" y="{MARGIN}" width="{PLOT}" height="{PLOT}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="sans-serif"'
            ' font-size="13">',
            f"<title>{title}</title>",
            STYLE,
            f'<defs><clipPath id="plot">{window}/></clipPath></defs>',
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" class="paper"/>',
            f'{window} class="rule"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def _cut(mean: Tensor) -> tuple[float, float]:
    """Where the boundary b + w₁ x + w₂ y = 0 is at the bottom and at the top of the window."""
    bias, first, second = mean.tolist()
    bottom, top = (-(bias + second * y) / first for y in (LOW, HIGH))
    return bottom, top


def _place(x: float) -> float:
    """Pixels from the left, or from the bottom, of a coordinate of the window."""
    return PLOT * (x - LOW) / (HIGH - LOW)


def _draw_points(way: Way) -> Iterable[str]:
    steps = len(way.labels)
    for at in torch.linspace(0, steps - 1, POINTS).round().long().tolist():
        across, up = (_place(each) for each in way.inputs[at].tolist())
        x, y = MARGIN + across, MARGIN + PLOT - up
        begun = at / steps
        times = [0, begun, min(begun + 0.002, 1), min(begun + 0.15, 1), 1]
        moves = _animate("opacity", ["0", "0", "0.9", "0", "0"], times)
        color = COLORS[int(way.labels[at])]
        where = f'cx="{x:.0f}" cy="{y:.0f}" r="3.5"'
        yield f'<circle {where} fill="{color}" opacity="0">{moves}</circle>'


def _line(ends: Sequence[tuple[float, float]], color: str, more: str = "") -> str:
    """A boundary from the bottom to the top of the window, moving if there are several."""
    bottom, top = ([f"{MARGIN + _place(each[side]):.0f}" for each in ends] for side in (0, 1))
    moves = _animate("x1", bottom) + _animate("x2", top) if len(ends) > 1 else ""
    return (
        f'<line clip-path="url(#plot)" x1="{bottom[-1]}" x2="{top[-1]}" y1="{MARGIN + PLOT}" '
        f'y2="{MARGIN}" stroke="{color}" stroke-width="3" {more}>{moves}</line>'
    )


def _share(right: Tensor, marks: Sequence[int]) -> list[float]:
    """Shares of right predictions among the last samples, at each mark."""
    return [
        right[max(0, min(mark, len(right)) - RECENT) : max(mark, 1)].double().mean().item()
        for mark in marks
    ]


def _draw_bar(row: int, name: str, color: str, shares: Sequence[float]) -> Iterable[str]:
    y, left = PLOT + 2 * MARGIN + 26 * row, MARGIN + 120
    widths = [f"{BAR * share:.0f}" for share in shares]
    yield f'<text x="{MARGIN}" y="{y + 12}" class="ink">{name}</text>'
    yield f'<rect x="{left}" y="{y}" width="{BAR}" height="15" class="empty"/>'
    yield (
        f'<rect x="{left}" y="{y}" width="{widths[-1]}" height="15" fill="{color}">'
        f"{_animate('width', widths)}</rect>"
    )
    end = f"{100 * shares[-1]:.0f} % at the end"
    yield f'<text x="{left + BAR + 8}" y="{y + 12}" class="ink">{end}</text>'


def _animate(name: str, values: Sequence[str], times: Sequence[float] | None = None) -> str:
    at = "" if times is None else f' keyTimes="{";".join(f"{time:.3f}" for time in times)}"'
    return (
        f'<animate attributeName="{name}" dur="{SECONDS}s" repeatCount="indefinite" '
        f'values="{";".join(values)}"{at}/>'
    )
