"""``driftfilter run --tenants COLUMN``: a log of many tenants, each with a posterior of its own.

The samples of a tenant are taken in their order, in batches of its own, over one network. A tenant
that is done is a checkpoint in ``--out``, laid out as the store of ``driftfilter serve``, which
goes on from there; ``--resume`` passes over it.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import driftfilter as df
from driftfilter.app.arguments import Found
from driftfilter.app.bench.locks import claim, describe_holder
from driftfilter.app.images.arrays import open_arrays
from driftfilter.app.run.consumed import sum_samples
from driftfilter.app.run.predictions import columns
from driftfilter.app.run.prepare import PreparedRun
from driftfilter.app.run.reader import StoredFeed
from driftfilter.app.serve.store import key_of, path_of
from driftfilter.app.terminal import Output, show_progress
from driftfilter.base.checks import require
from driftfilter.storage.atomic import atomic_file

_REFUSED = ("checkpoint_every", "stdin_continues", "baseline", "live")


class Summary(NamedTuple):
    """How a run over tenants ended."""

    tenants: int
    resumed: int  # tenants that were done before
    samples: int
    accuracy: float | None
    predictions: str


def run_tenants(made: PreparedRun, follow: Callable[[int, int], None]) -> Summary:
    """Adapt to one tenant after the other; ``follow`` is told how many of how many are done."""
    options, feed = made.options, made.feed
    for name in _REFUSED:
        given = getattr(options, name)
        require(not given, f"--{name.replace('_', '-')}", given, "left out with --tenants")
    assert options.tenants is not None
    require(isinstance(feed, StoredFeed), "--tenants", options.data, "given for an .npz file")
    assert isinstance(feed, StoredFeed)
    column = _open_column(Path(options.data), options.tenants, feed.count)
    names, owners = np.unique(column, return_inverse=True)
    is_new = not (options.out / "tenants").exists()
    allowed = "a folder without tenants (or give --resume, to go on with those)"
    require(is_new or options.resume, "--out", str(options.out), allowed)
    options.out.mkdir(parents=True, exist_ok=True)
    with claim(options.out / "state") as mine:
        if mine is None:
            holder = describe_holder(options.out / "state")
            raise ValueError(f"--out {options.out} is in use: {holder}")
        fresh, resumed = made.adapter.snapshot(), 0
        for place, name in enumerate(mine.each(names.tolist())):
            rows = np.flatnonzero(owners == place)
            made.adapter.restore(fresh)
            if options.resume and _is_done(made, feed, str(name), rows):
                resumed += 1
            else:
                _adapt(made, feed, str(name), rows)
            follow(place + 1, len(names))
        return _conclude(made, [str(name) for name in names.tolist()], owners, resumed)


def _open_column(path: Path, name: str, count: int) -> NDArray[Any]:
    """Whose each sample is [n]."""
    require(path.suffix == ".npz", "--tenants", str(path), f"an .npz file that has {name!r}")
    arrays = open_arrays(path)
    require(name in arrays, "--tenants", name, f"one of the arrays {sorted(arrays)}")
    column = arrays[name]
    fits = column.shape == (count,) and column.dtype.kind in "iuUS"
    found = f"{column.dtype} {list(column.shape)}"
    require(fits, f"--tenants {name}", found, f"texts or integers [{count}]")
    return column.astype(str)


def _batches(rows: NDArray[Any], size: int) -> Iterator[NDArray[Any]]:
    yield from (rows[start : start + size] for start in range(0, len(rows), size))


def _read(feed: StoredFeed, batch: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([feed.take(int(row), int(row) + 1) for row in batch])


def _adapt(made: PreparedRun, feed: StoredFeed, name: str, rows: NDArray[Any]) -> None:
    """Adapt to the samples of a tenant; write what is predicted for them, then its state."""
    said, sums = list[NDArray[Any]](), list[str]()
    for number, batch in enumerate(_batches(rows, made.options.batch)):
        raw = _read(feed, batch)
        sums.append(_sum(made, raw))
        try:
            said.append(made.adapter(made.form(raw)).cpu().numpy())
        except (ValueError, TypeError, RuntimeError) as error:
            where = f"tenant {name!r}, batch {number} (samples {batch[0]} to {batch[-1]})"
            raise ValueError(f"{where}: {error}") from error
    path = _rows_path(made.options.out, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        np.savez(file, rows=rows, logs=np.concatenate(said), sums=np.array(sums))
    state = path_of(made.options.out, key_of(name))
    state.parent.mkdir(parents=True, exist_ok=True)
    notes = {"tenant": name, "sequence": len(said), "answer": None, "digest": ""}
    df.save(made.adapter, state, notes=notes)


def _rows_path(out: Path, name: str) -> Path:
    return out / "rows" / f"{key_of(name)}.npz"


def _sum(made: PreparedRun, raw: NDArray[Any]) -> str:
    return sum_samples(raw, str(made.form.dtype).removeprefix("torch."))


def _is_done(made: PreparedRun, feed: StoredFeed, name: str, rows: NDArray[Any]) -> bool:
    """Whether a tenant was finished, with just these samples, model and recipe."""
    path, state = _rows_path(made.options.out, name), path_of(made.options.out, key_of(name))
    if not path.is_file() or not state.is_file():
        return False
    known = open_arrays(path)
    same = np.array_equal(known["rows"], rows)
    if same and "sums" in known:  # files of before have none
        batches = _batches(rows, made.options.batch)
        same = known["sums"].tolist() == [_sum(made, _read(feed, batch)) for batch in batches]
    require(same, str(path), "other samples", "those of DATA in batches as before")
    df.load(made.adapter, state)
    return True


def _conclude(made: PreparedRun, names: list[str], owners: NDArray[Any], resumed: int) -> Summary:
    """Put the predictions of all tenants into the order of the data."""
    logs: NDArray[Any] | None = None
    for name in names:
        found = open_arrays(_rows_path(made.options.out, name))
        if logs is None:
            logs = np.full((len(owners), found["logs"].shape[1]), np.nan, found["logs"].dtype)
        logs[found["rows"]] = found["logs"]
    assert logs is not None
    path = made.options.out / "predictions.npz"
    with atomic_file(path) as file:
        np.savez(file, **columns(logs)._asdict())
    accuracy = None
    if made.labels is not None:
        accuracy = float(np.mean(logs.argmax(1) == np.asarray(made.labels)))
    return Summary(len(names), resumed, len(owners), accuracy, str(path))


def follow_tenants(made: PreparedRun, output: Output) -> Found:
    """Adapt to each tenant of a log, with a bar; the exit status, and how it ended as data."""
    with show_progress(output.quiet) as display:
        watch, end = display("tenants")

        def follow(done: int, total: int) -> None:
            if watch is not None:
                watch(done, total, lambda: "")

        try:
            found = run_tenants(made, follow)
        except (ValueError, OSError, RuntimeError) as error:
            print(f"driftfilter run: error: {error}", file=sys.stderr)
            return 1, None
        end(f"{found.samples} samples of {found.tenants} tenants; wrote {found.predictions}")
    return 0, found._asdict()
