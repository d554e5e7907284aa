"""The pictures of the pages, each drawn from results; page.py writes them to docs/figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import concepts
from driftfilter.app.report.picture import stand_alone
from driftfilter.app.report.svg import Axis, Series, Style, bars, dots, lines, spanning, style

Results = dict[str, Any]
FROZEN, OURS, OTHER = Style(), style(0), style(1)
NATURAL = {
    "mnist": "digits,",
    "usps": "digits,",
    "elec": "prices",
    "weather": "rain",
    "har": "people,",
}
ORDERS = ("shuffled", "runs", "correlated", "sorted", "imbalanced")


def whole(value: float) -> str:
    return f"{value:g}"


def accuracy(low: float, high: float, name: str = "accuracy") -> Axis:
    return Axis(name, low, high, lambda value: f"{value:.2f}".removeprefix("0"))


def short(name: str) -> str:
    return name.replace("_", " ")


def natural_rows(results: Results) -> list[dict[str, Any]]:
    """Rows of natural.py; of streams that were run with several seeds those with deviations."""
    files = ("natural.json", "natural-seeds.json")
    rows = [row for name in files for row in results[name]["figures"]["rows"]]
    return list({(row["task"], row["stream"], row["norm"]): row for row in rows}.values())


def draw_methods(results: Results) -> str:
    """Accuracy of every method on one stream, never reset."""
    matrix = results["matrix.json"]["figures"]
    here = [
        task
        for task in matrix
        if (task["model"], task["protocol"], task["batch"]) == ("wrn28_10", "continual", 200)
        and task["preset"] in ("source", "driftfilter")
    ]
    here += [
        task
        for name in ("cifar10c-continual.json", "cifar10c-cotta.json")
        for task in results[name]["figures"]
        if task["protocol"] == "continual" and task["preset"] != "driftfilter"
    ]
    found = sorted((task["mean"]["accuracy"], task["preset"]) for task in here)
    rows = [
        (preset.partition(":")[0], value, OURS if preset.startswith("driftfilter") else FROZEN)
        for value, preset in found
    ]
    says = ", ".join(f"{name} {value:.3f}" for name, value, _ in rows)
    title = "Accuracy on 15 corruptions in one stream, WRN-28-10"
    return stand_alone(title, bars(title, says, rows, accuracy(0, 1)))


def draw_rounds(results: Results) -> str:
    """Accuracy of each of ten rounds over all corruptions."""
    series = [
        Series(task["preset"], mark, list(enumerate(task["rounds"], 1)))
        for task, mark in zip(
            results["cifar10c-rounds.json"]["figures"], (OURS, OTHER), strict=True
        )
    ]
    title = "Accuracy over ten rounds of 15 corruptions"
    return draw_lines(title, series, "round", (0, 1))


def draw_visits(results: Results) -> str:
    """Accuracy of each visit of the corruptions, with and without a memory of domains."""
    rows = [row for row in results["orders.json"]["figures"]["rows"] if row["order"] == "recurring"]
    names = {"default": ("with a memory of domains", OURS), "forgetful": ("without", OTHER)}
    series = [
        Series(names[row["method"]][0], names[row["method"]][1], list(enumerate(row["visits"], 1)))
        for row in rows
        if row["method"] in names
    ]
    return draw_lines("Accuracy when 15 corruptions return", series, "visit")


def draw_lines(
    title: str, series: Sequence[Series], across: str, ends: tuple[float, float] | None = None
) -> str:
    values = [y for each in series for _, y in each.points]
    steps = max(x for each in series for x, _ in each.points)
    says = "; ".join(
        f"{each.name} from {each.points[0][1]:.3f} to {each.points[-1][1]:.3f}" for each in series
    )
    chart = lines(
        title,
        says,
        series,
        Axis(across, 1, steps, whole),
        accuracy(*(ends or spanning(values))),
    )
    return stand_alone(title, chart, [(each.style, each.name) for each in series])


def draw_orders(results: Results) -> str:
    """Accuracy by order of the labels, frozen, without and with the chain of labels."""
    rows = results["orders.json"]["figures"]["rows"]
    kept = {
        (row["order"], row["method"]): row["accuracy"]
        for row in rows
        if (row["network"], row["batch"]) == ("resnet20", 64)
    }
    names = {
        "frozen": ("frozen", FROZEN),
        "without": ("without its chain of labels", OTHER),
        "default": ("driftfilter", OURS),
    }
    found = {
        order: [(mark, kept[order, method]) for method, (_, mark) in names.items()]
        for order in ORDERS
    }
    return draw_dots("Accuracy by order of the labels, ResNet-20", found, list(names.values()))


def draw_batches(results: Results) -> str:
    """Accuracy by network and batch size, frozen and adapted."""
    kept = {
        (task["model"], task["batch"], task["preset"]): task["mean"]["accuracy"]
        for task in results["matrix.json"]["figures"]
        if task["protocol"] == "reset"
    }
    found = {
        f"{model}, {batch}": [
            (FROZEN, kept[model, batch, "source"]),
            (OURS, value),
        ]
        for (model, batch, preset), value in sorted(kept.items(), key=lambda item: item[0][:2])
        if preset == "driftfilter"
    }
    names = [("frozen", FROZEN), ("driftfilter", OURS)]
    return draw_dots("Accuracy by network and batch size, reset", found, names)


def draw_natural(results: Results) -> str:
    """Accuracy on every natural stream, frozen, by the default and by the best preset."""
    names = {
        "frozen": ("frozen", FROZEN),
        "best": ("best preset, known afterwards", OTHER),
        "default": ("driftfilter", OURS),
    }
    found = {
        f"{NATURAL.get(row['task'], row['task'])} {row['stream']}, {row['norm']}": [
            (mark, row[method]["accuracy"]) for method, (_, mark) in names.items()
        ]
        for row in natural_rows(results)
        if row["stream"] != "clean" and row["default"] and row["best"]
    }
    return draw_dots("Accuracy under natural shift", found, list(names.values()))


def draw_estimate(results: Results) -> str:
    """Expected and true accuracy of each corruption."""
    (row,) = (
        row
        for row in results["estimate-resnet20.json"]["figures"]["rows"]
        if row["protocol"] == "continual" and not row["labelled source data"]
    )
    found = {
        short(each["domain"]): [(OTHER, each["truth"]), (OURS, each["estimate"])]
        for each in row["each"]
    }
    names = [("true accuracy", OTHER), ("estimate without labels", OURS)]
    return draw_dots("Accuracy of each corruption, and its estimate", found, names)


def draw_dots(
    title: str,
    rows: dict[str, list[tuple[Style, float]]],
    legend: Sequence[tuple[str, Style]],
) -> str:
    values = [value for row in rows.values() for _, value in row]
    says = "; ".join(
        f"{label}: " + ", ".join(f"{value:.3f}" for _, value in row) for label, row in rows.items()
    )
    chart = dots(title, says, rows, accuracy(*spanning(values)))
    return stand_alone(title, chart, [(mark, name) for name, mark in legend])


PICTURES: dict[str, Callable[[Results], str]] = {
    "methods": draw_methods,
    "rounds": draw_rounds,
    "batches": draw_batches,
    "orders": draw_orders,
    "visits": draw_visits,
    "natural": draw_natural,
    "estimate": draw_estimate,
    "state-space": lambda _: concepts.draw_state_space(),
    "energy": lambda _: concepts.draw_energy(),
    "belief": lambda _: concepts.draw_belief(),
    "prediction": lambda _: concepts.draw_prediction(),
}
