"""``driftfilter tune``: the default's few numbers, chosen on a user's own stream without labels.

Settings run abreast (``df.Bank``), and what each predicts is held to the default's, batch by batch,
by the mutual information of predictions and inputs.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

import driftfilter as df
from driftfilter.adapter.bank import BankState, add_predictions
from driftfilter.app.machine import choose_machine
from driftfilter.app.networks.load_model import open_model
from driftfilter.app.run.options import TuneOptions
from driftfilter.app.run.prepare import find_dtype
from driftfilter.app.run.reader import Form, StoredFeed, open_feed
from driftfilter.base.checks import require
from driftfilter.base.inputs import Inputs, arguments
from driftfilter.source.posterior import Gaussian

FACTORS = (1.0, 0.25, 4.0)  # of two of the default's numbers, itself first
SURE = 2.0  # standard errors by which a setting must be ahead of the default


@final
@dataclass(frozen=True)
class Setting:
    """Options of the default, and what they came to."""

    preset: str  # as run's --preset takes it
    information: float  # I of all samples in nats (see Bank)
    margin: float  # over the default, the mean of batches
    error: float  # its standard error; 0 of the default itself
    weight: float  # in the bank at the end


class Tuning(NamedTuple):
    """What a stream says of the settings, the default first."""

    settings: list[Setting]
    chosen: Setting  # the default, unless another one is surely ahead of it
    samples: int
    batches: int

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        rows = [asdict(each) for each in self.settings]
        return {**self._asdict(), "settings": rows, "chosen": asdict(self.chosen)}


def tune(options: TuneOptions, tell: Callable[[int, int], None] = lambda *done: None) -> Tuning:
    """Run the settings over a user's stream; ``tell`` hears how many samples are done, of all."""
    machine, feed = choose_machine(options.device), open_feed(options.data)
    require(isinstance(feed, StoredFeed), "DATA", options.data, "a file or folder")
    assert isinstance(feed, StoredFeed)
    weights = None if options.weights is None else Path(options.weights)
    model = machine.place(open_model(options.model, weights).module)
    form = Form(find_dtype(model), machine.device, options.layout, options.scale, None)
    total = min(options.limit or feed.count, feed.count)
    places = [(at, min(at + options.batch, total)) for at in range(0, total, options.batch)]
    batches = (form(feed.take(first, last)) for first, last in places)
    with machine.ready():
        return compare(model, batches, options.seed, lambda done: tell(done, total))


def make_bank(model: nn.Module, seed: int = 0) -> tuple[list[str], df.Bank]:
    """Nine settings around the default for a network, which is the first, and their names."""
    recipe = df.adapt(model, seed=seed).recipe
    fits = isinstance(recipe.source, Gaussian)
    require(fits, "MODEL", "nothing to tune", "a network of which some parameters adapt")
    assert isinstance(recipe.source, Gaussian)
    # Without a radius or a limit that binds, a step knows beta and variance by their product alone.
    limit = getattr(recipe.inference, "limit", 0.0)
    first, usual = ("limit", limit) if limit else ("beta", 2.0)
    products = itertools.product(FACTORS, FACTORS)
    pairs: list[dict[str, Any]] = [
        {first: a * usual, "variance": b * recipe.source.variance} for a, b in products
    ]
    names = [
        "driftfilter:" + ",".join(f"{name}={value:g}" for name, value in each.items())
        for each in pairs
    ]
    return names, df.Bank([df.adapt(model, seed=seed, **each) for each in pairs])


def compare(
    model: nn.Module, batches: Iterable[Inputs], seed: int, tell: Callable[[int], None]
) -> Tuning:
    """What the settings come to on batches."""
    names, bank = make_bank(model, seed)
    by_batch: list[Tensor] = []
    whole, done = None, 0
    for batch in batches:
        args, named = arguments(batch)
        each = [member(*args, **named) for member in bank.members]
        bank.note(each)
        logs = torch.stack(each).to("cpu", torch.float64)
        start = BankState.start(len(names), logs.shape[-1])
        by_batch.append(add_predictions(start, logs, 0.0).information)
        whole = add_predictions(whole or start, logs, 1.0)
        done += logs.shape[1]
        tell(done)
    require(len(by_batch) > 1, "DATA", f"{len(by_batch)} batches", "two batches or more")
    assert whole is not None
    found = torch.stack(by_batch)  # [batches, m]
    ahead = found - found[:, :1]
    errors = ahead.std(0) / len(found) ** 0.5
    columns = (whole.information, ahead.mean(0), errors, bank.weights)
    rows = zip(names, *(column.tolist() for column in columns), strict=True)
    settings = [Setting(*row) for row in rows]
    sure = [each for each in settings if each.margin > SURE * each.error]
    chosen = max(sure, key=lambda each: each.margin, default=settings[0])
    return Tuning(settings, chosen, done, len(found))


def describe(found: Tuning) -> list[str]:
    """Lines for people to read."""
    lines = [f"{'setting':<42} {'I (nats)':>9} {'margin':>8} {'s.e.':>7} {'weight':>7}"]
    for each in sorted(found.settings, key=lambda each: -each.margin):
        margin = f"{each.margin:+8.4f} {each.error:7.4f}"
        lines.append(f"{each.preset:<42} {each.information:9.4f} {margin} {each.weight:7.3f}")
    lines.append(f"{found.samples} samples in {found.batches} batches, without labels")
    if found.chosen is found.settings[0]:
        return [*lines, "keep the default: no setting is surely ahead of it"]
    return [*lines, f"set --preset {found.chosen.preset}"]
