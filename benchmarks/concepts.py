"""The pictures of docs/concepts, worked out from formulas; none has anything measured in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

from markupsafe import Markup

from driftfilter.app.report.picture import stand_alone
from driftfilter.app.report.svg import WIDTH, Axis, Series, Style, lines, spanning, style

FIRST, SECOND, THIRD = style(0), style(1), style(2)
GRID = [step / 100 for step in range(-600, 601, 5)]
CLUSTERS = (NormalDist(-2, 0.6), NormalDist(2, 0.6))
SLOPE = 3.0  # of the classifier's logit
DOUBTS = (0.0, 4.0, 25.0)  # variances of a logit


def plain(value: float) -> str:
    return f"{value:g}"


def sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


def entropy(p: float) -> float:
    return -sum(q * math.log(q) for q in (p, 1 - p) if q > 0)


def average(of: Callable[[float], float], over: NormalDist) -> float:
    """The mean of a function under a Gaussian, by its quantiles."""
    count = 200
    places = [over.inv_cdf((place + 0.5) / count) for place in range(count)]
    return math.fsum(map(of, places)) / count


def draw_energy() -> str:
    """Mean entropy of two clusters by where the boundary runs."""

    def energy(boundary: float) -> float:
        def doubt(x: float) -> float:
            return entropy(sigmoid(SLOPE * (x - boundary)))

        return math.fsum(average(doubt, cluster) for cluster in CLUSTERS) / len(CLUSTERS)

    density = [(x, math.fsum(each.pdf(x) for each in CLUSTERS) / 4) for x in GRID]
    series = [
        Series("mean entropy", FIRST, [(x, energy(x)) for x in GRID]),
        Series("where the samples are", SECOND, density),
    ]
    return curves("Energy by place of the boundary", series, "boundary")


def draw_belief() -> str:
    """The belief about one parameter before a step, after time has passed, after a batch."""
    before, mean, variance = NormalDist(-1, 0.5), 1.5, 0.6
    prior = NormalDist(before.mean, math.sqrt(before.variance + 0.6))
    precision = 1 / prior.variance + 1 / variance
    middle = (prior.mean / prior.variance + mean / variance) / precision
    beliefs = {
        "before": (before, Style("ref", "4 3", 0)),
        "time has passed": (prior, SECOND),
        "a batch has come": (NormalDist(middle, math.sqrt(1 / precision)), FIRST),
    }
    near = [x for x in GRID if -4 <= x <= 4]
    series = [
        Series(name, mark, [(x, each.pdf(x)) for x in near])
        for name, (each, mark) in beliefs.items()
    ]
    return curves("A belief about one parameter", series, "parameter")


def draw_prediction() -> str:
    """Probability of a class by the logit of the mean, for several variances of the logit."""
    series = []
    for variance, mark in zip(DOUBTS, (FIRST, SECOND, THIRD), strict=True):
        points = [
            (f, average(sigmoid, NormalDist(f, math.sqrt(variance))) if variance else sigmoid(f))
            for f in GRID
        ]
        series.append(Series(f"variance {variance:g}", mark, points))
    return curves("Probability, averaged over the belief", series, "logit of the mean")


def curves(title: str, series: Sequence[Series], across: str) -> str:
    xs = [x for each in series for x, _ in each.points]
    up = Axis("", *spanning([y for each in series for _, y in each.points], low=0), plain)
    says = ", ".join(each.name for each in series)
    chart = lines(title, says, series, Axis(across, min(xs), max(xs), plain), up)
    return stand_alone(title, chart, [(each.style, each.name) for each in series])


def draw_state_space() -> str:
    """Hidden parameters in a row, each with the batch that tells of it."""
    title = "Parameters are hidden, batches are seen"
    places = {"t - 1": 70.0, "t": 200.0, "t + 1": 330.0}
    body = [
        Markup(
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0,0L8,4L0,8Z" class="fill ref"/></marker>'
            "</defs>"
        )
    ]
    for (step, x), after in zip(places.items(), (*list(places.values())[1:], None), strict=True):
        body += [
            Markup('<circle cx="{}" cy="52" r="27" class="fill c0" fill-opacity=".25"/>').format(x),
            Markup('<circle cx="{}" cy="52" r="27" class="line c0"/>').format(x),
            word(x, 56, f"θ {step}"),
            arrow(x, 80, x, 121),
            Markup('<rect x="{}" y="124" width="76" height="32" rx="4" class="line c1"/>').format(
                x - 38
            ),
            word(x, 144, f"batch {step}"),
        ]
        body += [arrow(x + 29, 52, after - 31, 52)] if after else []
    body += [word(135, 20, "transition"), word(200, 104, "energy", "start", 8)]
    says = "θ moves from step to step by the transition; each batch depends on the θ of its step."
    chart = Markup(
        '<svg viewBox="0 0 {:g} 166" role="img" aria-label="{}"><desc>{}</desc>{}</svg>'
    ).format(WIDTH, title, says, Markup("").join(body))
    return stand_alone(title, chart)


def word(x: float, y: float, text: str, anchor: str = "middle", aside: float = 0) -> Markup:
    return Markup('<text x="{:g}" y="{:g}" text-anchor="{}">{}</text>').format(
        x + aside, y, anchor, text
    )


def arrow(x: float, y: float, to_x: float, to_y: float) -> Markup:
    return Markup(
        '<line x1="{:g}" y1="{:g}" x2="{:g}" y2="{:g}" class="axis" marker-end="url(#tip)"/>'
    ).format(x, y, to_x, to_y)
