"""``driftfilter report``: runs side by side on one page that needs nothing but itself."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from jinja2 import TemplateError

from driftfilter.app.bench.matrix import NAME, Matrix, read
from driftfilter.app.bench.tables import Document
from driftfilter.app.report import runs, tasks
from driftfilter.app.report.content import ReportError, StreamReport, read_json
from driftfilter.app.report.matrix import pick_worst, view
from driftfilter.app.report.page import render
from driftfilter.storage.atomic import write_atomic

__all__ = ["LIMIT", "ReportError", "collect", "write"]

MOST = 8  # folders on one page
LIMIT = 3_000_000  # bytes of it
# What a document that is none of ours may raise while it is read and drawn.
_FAILURES = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RecursionError,
    TemplateError,
)


def write(folders: Sequence[Path], out: Path | None = None, title: str | None = None) -> Path:
    """The report of these folders, of ``run`` or of ``bench``, at ``out``, or as report.html in the
    first of them; ``title``: if it is not what was run.
    """
    path = folders[0] / "report.html" if out is None else out
    page = _render(collect(folders), collect_matrices(folders), title)
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
            with _understanding(folder):
                found.append(runs.read_run(folder))
                runs.streams(found[-1:])
        else:
            held = tasks.read_tasks(folder)
            if not held:
                raise ReportError(
                    f"{folder} holds no run: neither config.json of driftfilter run nor a finished "
                    "task of bench"
                )
            for each in held:
                with _understanding(Path(each["path"])):
                    tasks.streams([each])
            documents += held
    of_tasks = tasks.streams(documents)
    shown = pick_worst(of_tasks) if collect_matrices(unique) else of_tasks
    return [*runs.streams(found), *shown]


def collect_matrices(folders: Sequence[Path]) -> list[Matrix]:
    """The matrices that folders of ``bench --matrix`` hold."""
    paths = [path for folder in dict.fromkeys(folders) if (path := folder / NAME).exists()]
    matrices = []
    for path in paths:
        with _understanding(path):
            matrices.append(read(read_json(path)))
            view(matrices[-1])
    return matrices


def _render(streams: Sequence[StreamReport], matrices: Sequence[Matrix], title: str | None) -> str:
    """The page; if it cannot be drawn, an error names the folder that it cannot be drawn of."""
    try:
        return render(streams, matrices, title)
    except _FAILURES:
        for stream in streams:
            with _understanding(Path(stream.all[0].where)):
                render([stream], [])
        raise


@contextmanager
def _understanding(path: Path) -> Iterator[None]:
    """Make one error of all that what was read there may raise if it is of no use."""
    try:
        yield
    except ReportError:
        raise
    except _FAILURES as error:
        reason = f"{type(error).__name__} {error}"
        raise ReportError(
            f"{path} is of another version of driftfilter, or damaged: {reason}"
        ) from error
