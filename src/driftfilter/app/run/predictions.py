"""The predictions that a run writes as it goes on."""

from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from driftfilter.app.metrics import entropy
from driftfilter.base.checks import require
from driftfilter.storage.append_log import AppendLog
from driftfilter.storage.atomic import atomic_file


class Columns(NamedTuple):
    """Predictions of samples; -1 and NaN for one that was skipped."""

    label: NDArray[Any]  # [n], the most likely class
    probability: NDArray[Any]  # [n], of it
    entropy: NDArray[Any]  # [n], predictive, in nats
    probabilities: NDArray[Any]  # [n, k]


def columns(logs: NDArray[Any]) -> Columns:
    """Columns of log-probabilities [n, k]."""
    skipped = np.isnan(logs).any(1)
    probabilities = np.exp(logs)
    label = np.where(skipped, -1, np.where(skipped[:, None], 0, logs).argmax(1))
    return Columns(
        label,
        probabilities[np.arange(len(logs)), label],
        entropy(torch.from_numpy(logs)).numpy(),
        probabilities,
    )


def log_path(folder: Path, kind: Literal["npz", "csv"], stem: str) -> Path:
    """Path of the file that grows with every step."""
    return folder / f"{stem}.{'csv' if kind == 'csv' else 'part'}"


class Predictions:
    """The predictions of a run: ``predictions.csv``, a line a sample; or log-probabilities, in the
    end ``predictions.npz``.

    ``stem``: another name of the file. Rows of samples that are skipped before the number of
    classes is known are written once it is.
    """

    def __init__(
        self,
        folder: Path,
        kind: Literal["npz", "csv"],
        dtype: Any,
        rows: int,
        classes: int,
        size: int,
        stem: str = "predictions",
    ) -> None:
        self.classes, self._kind, self._path, self._dtype = (
            classes,
            kind,
            folder / f"{stem}.npz",
            np.dtype(dtype),
        )
        self._rows, self._waiting = (rows, 0) if classes else (0, rows)
        self.log = AppendLog(log_path(folder, kind, stem), size)

    def append(self, logs: NDArray[Any]) -> None:
        """Log-probabilities [n, k] of the next n samples."""
        if not self.classes:
            self.classes = logs.shape[1]
            if self._kind == "csv":
                names = ",".join(f"p{place}" for place in range(self.classes))
                self.log.append(f"row,label,probability,entropy,{names}\n".encode())
            self._write(self._nothing(self._waiting))
        require(
            logs.shape[1] == self.classes,
            "the model's classes",
            logs.shape[1],
            f"{self.classes}, as they were before",
        )
        self._write(logs.astype(self._dtype))

    def skip(self, rows: int) -> None:
        """Leave the next samples without a prediction."""
        if self.classes:
            self._write(self._nothing(rows))
        else:
            self._waiting += rows

    def export(self) -> Path:
        """Write the file for the user, with what is known so far."""
        if self._kind == "csv":
            return self.log.path
        with atomic_file(self._path) as file:
            np.savez(file, **columns(self.logs())._asdict())
        return self._path

    def logs(self) -> NDArray[Any]:
        """Log-probabilities [n, k] of all samples so far.

        Those of a CSV are logarithms of its probabilities, bounded by the dtype's smallest.
        """
        if not self.classes:
            return self._nothing(self._waiting)
        if self._kind == "npz":
            return np.fromfile(self.log.path, self._dtype).reshape(-1, self.classes)
        said = np.loadtxt(
            self.log.path,
            self._dtype,
            delimiter=",",
            skiprows=1,
            usecols=range(4, 4 + self.classes),
            ndmin=2,
        )
        logs: NDArray[Any] = np.log(np.maximum(said, np.finfo(self._dtype).tiny))
        return logs

    def _nothing(self, rows: int) -> NDArray[Any]:
        return np.full((rows, max(self.classes, 1)), np.nan, self._dtype)

    def _write(self, logs: NDArray[Any]) -> None:
        self.log.append(self._lines(logs) if self._kind == "csv" else logs.tobytes())
        self._rows += len(logs)

    def _lines(self, logs: NDArray[Any]) -> bytes:
        """Lines with as many digits as tell one number from the next."""
        digits, said = 9 if self._dtype == np.float32 else 17, columns(logs)
        numbers = np.column_stack((said.probability, said.entropy, said.probabilities))
        rows = zip(said.label.tolist(), numbers.tolist(), strict=True)
        return "".join(
            f"{self._rows + place},{label},"
            + ",".join(f"{number:.{digits}g}" for number in row)
            + "\n"
            for place, (label, row) in enumerate(rows)
        ).encode()
