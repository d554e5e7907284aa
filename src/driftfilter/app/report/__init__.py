"""``driftfilter report``: runs side by side on one page that needs nothing but itself."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from driftfilter.app.bench.tables import Document
from driftfilter.app.report import runs, tasks
from driftfilter.app.report.content import ReportError, StreamReport
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
    page = render(collect(folders))
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
    return [*runs.streams(found), *tasks.streams(documents)]


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
