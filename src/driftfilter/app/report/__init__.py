"""``driftfilter report``: runs side by side on one page that needs nothing but itself."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from driftfilter.app.bench.matrix import NAME, Matrix, read
from driftfilter.app.bench.tables import Document
from driftfilter.app.report import runs, tasks
from driftfilter.app.report.content import ReportError, StreamReport, read_json
from driftfilter.app.report.matrix import pick_worst, view
from driftfilter.app.report.page import render
from driftfilter.storage.atomic import write_atomic

T = TypeVar("T")

__all__ = ["LIMIT", "ReportError", "collect", "write"]

MOST = 8  # folders on one page
LIMIT = 3_000_000  # bytes of it


def write(folders: Sequence[Path], out: Path | None = None) -> Path:
    """The report of these folders, of ``run`` or of ``bench``, at ``out``, or as report.html in the
    first of them.
    """
    path = folders[0] / "report.html" if out is None else out
    page = render(collect(folders), collect_matrices(folders))
    if len(page.encode()) > LIMIT:
        raise ReportError(
            f"the page would have {len(page.encode()) / 1e6:.1f} MB, more than {LIMIT / 1e6:g}: "
            "report fewer at once"
        )
    write_atomic(path, page)
    return path


def collect(folders: Sequence[Path]) -> list[StreamReport]:
    """What the folders hold, as streams."""
    unique = list(dict.fromkeys(folders))
    if len(unique) > MOST:
        raise ReportError(f"a report is of {MOST} folders at most, got {len(unique)}")
    found: list[runs.RunFolder] = []
    documents: list[Document] = []
    for folder in unique:
        if not folder.is_dir():
            raise ReportError(
                f"RUN must be a folder of driftfilter run or bench, got {str(folder)!r}, which "
                "is none"
            )
        if (folder / "config.json").exists():
            found.append(_require_understood(folder, runs.read_run(folder), runs.streams))
        else:
            held = tasks.read_tasks(folder)
            if not held:
                raise ReportError(
                    f"{folder} holds no run: neither config.json of driftfilter run nor a finished "
                    "task of bench"
                )
            documents += [
                _require_understood(Path(each["path"]), each, tasks.streams) for each in held
            ]
    of_tasks = tasks.streams(documents)
    shown = pick_worst(of_tasks) if collect_matrices(unique) else of_tasks
    return [*runs.streams(found), *shown]


def collect_matrices(folders: Sequence[Path]) -> list[Matrix]:
    """The matrices that folders of ``bench --matrix`` hold."""
    paths = [path for folder in dict.fromkeys(folders) if (path := folder / NAME).exists()]
    return [read(_require_understood(path, read_json(path), _view_first)) for path in paths]


def _view_first(documents: Sequence[Mapping[str, Any]]) -> object:
    return view(read(documents[0]))


def _require_understood(path: Path, held: T, use: Callable[[list[T]], object]) -> T:
    """What was read there, known to be of use."""
    try:
        use([held])
    except (KeyError, TypeError, IndexError, AttributeError, ArithmeticError) as error:
        reason = f"{type(error).__name__} {error}"
        raise ReportError(
            f"{path} is of another version of driftfilter, or damaged: {reason}"
        ) from error
    return held
