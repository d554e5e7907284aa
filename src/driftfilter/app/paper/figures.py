"""Figures of the paper's examples, from what was computed elsewhere; needs matplotlib (the extra
``report``).
"""

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image
from torch import Tensor

import driftfilter as df
from driftfilter.app import metrics
from driftfilter.app.paper.dynamics import Prior
from driftfilter.app.paper.reproduce import Result
from driftfilter.app.paper.trial import TIMES, Example, Problem, grid

CLASSES = ("#0072B2", "#D55E00", "#009E73")  # Okabe–Ito: told apart by all readers
SOURCE_COLOR, FILTER_COLOR, OTHER_COLORS = "#7F7F7F", "#0072B2", ("#009E73", "#CC79A7")
KEPT_COLORS = (*CLASSES, SOURCE_COLOR, *OTHER_COLORS, "black", "white")
STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "svg.hashsalt": "driftfilter",  # the same figure gives the same file
}
RESOLUTION = 121  # points along each side of a map


def save(figure: Figure, stem: Path) -> None:
    """Write stem.png, small enough for a page, and stem.svg."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out once, not for every file
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=120)
        figure.savefig(stem.with_suffix(".svg"), dpi=160, metadata={"Date": None})
    _reduce(Image.open(drawn).convert("RGB")).save(stem.with_suffix(".png"), optimize=True)


def _reduce(image: Image.Image) -> Image.Image:
    """An image in 256 colours, those of classes and lines among them.

    A palette of what is most common would give a class that covers few pixels the colour of another
    one.
    """
    kept = [round(255 * part) for color in KEPT_COLORS for part in to_rgb(color)]
    others = image.quantize(256 - len(kept) // 3, method=Image.Quantize.MEDIANCUT).getpalette()
    palette = [*kept, *(others or [])[: 768 - len(kept)]]
    pixels = torch.from_numpy(np.array(image)).flatten(0, 1)  # [pixels, 3]
    colors, places = torch.unique(pixels, dim=0, return_inverse=True)
    # Pillow's own search among given colours is coarse, and turns white grey.
    nearest = torch.cdist(colors.double(), torch.tensor(palette).view(-1, 3).double()).argmin(1)
    reduced = Image.frombytes("P", image.size, nearest[places].to(torch.uint8).numpy().tobytes())
    reduced.putpalette(palette)
    return reduced


def draw_dynamics(priors: Mapping[str, Prior], shown: int = 12) -> Figure:
    """Paths and mean in the parameter plane, marginal series with ±2 sd, and the induced lines; a
    column a transition.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.5, 7.4), layout="constrained")
        axes = figure.subplots(3, len(priors))
        for column, (name, prior) in zip(axes.T, priors.items(), strict=True):
            column[0].set_title(name)
            points = _draw_plane(column[0], prior, shown)
            _draw_series(column[1], prior, shown)
            _draw_lines(column[2], prior)
        for row, label in zip(axes, ("slope", "parameter", "y"), strict=True):
            row[0].set_ylabel(label)
        axes[1, 0].legend(loc="upper left", ncols=2, handlelength=1.2)
        figure.colorbar(
            points, ax=axes.ravel().tolist(), shrink=0.4, pad=0.01, aspect=30, label="time step"
        )
    return figure


def _draw_plane(axes: Axes, prior: Prior, shown: int) -> Any:
    for path in prior.paths[:shown]:
        axes.plot(path[:, 0], path[:, 1], color="0.8", linewidth=0.4, zorder=1)
        points = axes.scatter(
            path[:, 0],
            path[:, 1],
            c=torch.arange(len(path)),
            s=2.5,
            cmap="viridis",
            linewidths=0,
            zorder=2,
        )
    axes.plot(prior.mean[:, 0], prior.mean[:, 1], color="black", linewidth=1.2, zorder=3)
    axes.plot(*prior.mean[0], marker="o", color="black", markersize=4, zorder=4)
    axes.set_xlabel("intercept")
    return points


def _draw_series(axes: Axes, prior: Prior, shown: int) -> None:
    steps = torch.arange(prior.mean.shape[0])
    for index, (name, color) in enumerate((("intercept", CLASSES[0]), ("slope", CLASSES[1]))):
        mean, sd = prior.mean[:, index], prior.covariance[:, index, index].sqrt()
        axes.fill_between(steps, mean - 2 * sd, mean + 2 * sd, color=color, alpha=0.18, linewidth=0)
        for path in prior.paths[: shown // 2]:
            axes.plot(steps, path[:, index], color=color, linewidth=0.4, alpha=0.6)
        axes.plot(steps, mean, color=color, linewidth=1.4, label=name)
    axes.set_xlabel("time step")


def _draw_lines(axes: Axes, prior: Prior, shown: int = 8) -> None:
    """Lines intercept + slope x of a few paths at five times, with the mean's of each; behind them
    all that lies within ±2 sd at one of those times.
    """
    x = torch.linspace(-2, 2, 41, dtype=prior.mean.dtype)
    design = torch.stack((torch.ones_like(x), x), -1)  # [41, 2]
    steps = [round(fraction * (len(prior.mean) - 1)) for fraction in TIMES]
    variance = torch.einsum("xi,tij,xj->tx", design, prior.covariance[steps], design)
    means, spread = prior.mean[steps] @ design.mT, 2 * variance.sqrt()  # [5, 41]
    low, high = (means - spread).amin(0), (means + spread).amax(0)
    axes.fill_between(x, low, high, color="0.92", linewidth=0)
    for step, fraction, mean in zip(steps, TIMES, means, strict=True):
        color, lines = mpl.colormaps["viridis"](fraction), prior.paths[:shown, step] @ design.mT
        axes.plot(x, lines.mT, color=color, linewidth=0.5, alpha=0.7)
        axes.plot(x, mean, color="black", linewidth=2.4, zorder=3)
        axes.plot(x, mean, color=color, linewidth=1.4, zorder=3)
    axes.set_xlabel("x")


def draw_boundaries(example: Example, problem: Problem, beliefs: Sequence[df.Belief]) -> Figure:
    """Class probabilities with the boundary (solid; the source's dashed), and predictive entropy
    below, at five times.
    """
    filt = example.filter()
    points = grid(example, RESOLUTION)
    predictions = [filt.predict(filt.init(belief), points).log_probabilities for belief in beliefs]
    (left, right), (low, high) = example.window
    with mpl.rc_context(STYLE):
        figure = Figure(
            figsize=(10.5, 2 * 1.86 * (high - low) / (right - left) + 0.75), layout="constrained"
        )
        axes = figure.subplots(2, len(TIMES), sharex=True, sharey=True)
        for position, logp in enumerate(predictions):
            top, bottom = axes[:, position]
            top.set_title(
                ("source", "25% of the stream", "50%", "75%", "end of the stream")[position]
            )
            _draw_map(top, example, _blend(logp.exp()))
            _draw_boundary(top, example, predictions[0], "--")
            _draw_boundary(top, example, logp, "-")
            _draw_samples(top, problem, position)
            picture = _draw_map(
                bottom,
                example,
                metrics.entropy(logp)[:, None],
                cmap="magma",
                vmin=0.0,
                vmax=math.log(example.classes),
            )
            _draw_boundary(bottom, example, logp, "-")
            _draw_samples(bottom, problem, position, "white")
        lines = [
            Line2D([], [], color="black", linestyle=style, linewidth=1) for style in ("-", "--")
        ]
        axes[0, -1].legend(
            lines, ["filter", "source"], loc="lower right", fontsize=6, frameon=True, framealpha=0.8
        )
        axes[0, 0].set_ylabel("class probability")
        axes[1, 0].set_ylabel("predictive entropy")
        figure.colorbar(
            picture,
            ax=axes.ravel().tolist(),
            shrink=0.48,
            pad=0.01,
            aspect=16,
            anchor=(0.0, 0.0),
            label="entropy (nats)",
        )
    return figure


def _blend(probabilities: Tensor) -> Tensor:
    """Probabilities [n, k] as colours between white (undecided) and that of each class [n, 3]."""
    k = probabilities.shape[-1]
    pale = 1 - 0.55 * (1 - probabilities.new_tensor([to_rgb(color) for color in CLASSES[:k]]))
    certainty = ((probabilities.amax(-1, keepdim=True) - 1 / k) / (1 - 1 / k)).clamp(0, 1)
    return 1 - certainty * (1 - probabilities @ pale)


def _draw_map(axes: Axes, example: Example, values: Tensor, **limits: Any) -> Any:
    """An image of values [points, 1 or 3] over the window."""
    (left, right), (low, high) = example.window
    picture = values.reshape(RESOLUTION, RESOLUTION, -1).squeeze(-1)
    return axes.imshow(picture.numpy(), extent=(left, right, low, high), origin="lower", **limits)


def _draw_boundary(axes: Axes, example: Example, scores: Tensor, style: str) -> None:
    """Where the two most likely classes are level, pair by pair, for log-probabilities [points,
    k].
    """
    (left, right), (low, high) = example.window
    x, y = (
        torch.linspace(a, b, RESOLUTION, dtype=torch.float64)
        for a, b in ((left, right), (low, high))
    )
    for first, second in itertools.combinations(range(scores.shape[-1]), 2):
        leading = scores[:, [first, second]].amax(-1) >= scores.amax(-1)
        margin = torch.where(leading, scores[:, first] - scores[:, second], math.nan).reshape(
            RESOLUTION, RESOLUTION
        )
        if margin.nan_to_num().amin() < 0 < margin.nan_to_num().amax():
            axes.contour(
                x.numpy(),
                y.numpy(),
                margin.numpy(),
                levels=[0.0],
                colors="black",
                linewidths=0.8 if style == "--" else 1.1,
                linestyles=style,
            )


def _draw_samples(axes: Axes, problem: Problem, position: int, color: str | None = None) -> None:
    """The source's labeled samples, then fresh ones from where the stream is."""
    inputs, labels = problem.source if position == 0 else problem.current[position]
    x, y = inputs[:100].T
    if color:
        axes.scatter(x, y, s=1.5, color=color, linewidths=0, alpha=0.7)
    else:
        colors = [CLASSES[label] for label in labels[:100].tolist()]
        axes.scatter(x, y, s=7, c=colors, edgecolors="white", linewidths=0.3)


def draw_over_time(
    results: Sequence[Result], source: str, filtered: str, others: Sequence[str]
) -> Figure:
    """Accuracy along the stream, and uncertainty near and far: mean and ± sd over seeds."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.5, 3.0), layout="constrained")
        accuracy, predictive, mutual = figure.subplots(1, 3)
        rows = [
            (source, SOURCE_COLOR),
            (filtered, FILTER_COLOR),
            *zip(others, OTHER_COLORS, strict=False),
        ]
        for name, color in rows:
            windows = torch.tensor(
                [result.runs[name].windows for result in results], dtype=torch.float64
            )
            middle = (torch.arange(windows.shape[1]) + 0.5) / windows.shape[1]
            _draw_band(accuracy, middle, windows, color, "-", name)
        accuracy.set_ylabel("accuracy")
        for measure, (axes, label) in enumerate(
            ((predictive, "predictive entropy (nats)"), (mutual, "mutual information (nats)"))
        ):
            for name, color in rows[:2]:
                for place, style in (("current", "-"), ("far", ":")):
                    series = [getattr(result.doubts[name], place) for result in results]
                    values = torch.tensor(series, dtype=torch.float64)[:, :, measure]
                    _draw_band(axes, torch.tensor(TIMES), values, color, style, "")
            axes.set_ylabel(label)
            axes.set_ylim(bottom=0)
        for axes in (accuracy, predictive, mutual):
            axes.set_xlabel("part of the stream")
            axes.set_xlim(0, 1)
        near, far = (
            Line2D([], [], color="black", linestyle=style, linewidth=1.4) for style in ("-", ":")
        )
        handles, labels = accuracy.get_legend_handles_labels()
        figure.legend(
            [*handles, near, far],
            [*labels, "near the data", "far from it"],
            loc="outside lower center",
            ncols=6,
        )
    return figure


def _draw_band(axes: Axes, x: Tensor, values: Tensor, color: str, style: str, label: str) -> None:
    """Mean over seeds of values [seeds, points], with ± sd."""
    mean, sd = values.mean(0), values.std(0, correction=0)
    axes.fill_between(x, mean - sd, mean + sd, color=color, alpha=0.15, linewidth=0)
    axes.plot(x, mean, color=color, linestyle=style, linewidth=1.4, label=label)


def draw_cifar(methods: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Mean accuracy of each method beside the paper's, and accuracy by corruption; means over
    seeds.
    """
    colors = (SOURCE_COLOR, OTHER_COLORS[1], CLASSES[2], CLASSES[1], CLASSES[0])
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.5, 3.0), layout="constrained")
        means, each = figure.subplots(1, 2, sharey=True, width_ratios=(1, 2))
        places = range(len(methods))
        paper = [method["paper"] for method in methods.values()]
        here = [np.mean(method["accuracy"]) for method in methods.values()]
        means.plot(places, paper, "D--", color="black", markersize=4, linewidth=0.8, label="paper")
        means.plot(places, here, "o-", color="0.5", markersize=5, linewidth=0.8, label="here")
        means.set_xticks(places, list(methods))
        means.set_ylabel("accuracy, mean over corruptions")
        means.legend(loc="lower right")
        for place, (name, method) in enumerate(methods.items()):
            shares = [np.mean(values) for values in method["corruptions"].values()]
            beside = np.arange(len(shares)) + 0.12 * (place - len(methods) // 2)
            each.plot(beside, shares, "o", color=colors[place], markersize=4, label=name)
        labels = [name.replace("_", "\n") for name in next(iter(methods.values()))["corruptions"]]
        each.set_xticks(range(len(labels)), labels, fontsize=6)
        each.set_ylabel("accuracy")
        figure.legend(*each.get_legend_handles_labels(), loc="outside right center")
    return figure
