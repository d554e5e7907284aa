"""Reliability diagrams as plain numbers; torch is not imported here."""

from typing import NamedTuple


class ReliabilityDiagram(NamedTuple):
    """Predictions in bins of their confidence; an empty bin has means of 0."""

    samples: list[int]
    confidence: list[float]  # mean of each bin
    accuracy: list[float]  # of each bin

    def calibration_error(self) -> float:
        """Expected calibration error Σ_b (n_b/n) |accuracy_b - confidence_b|; 0 without samples."""
        gaps = (n * abs(right - sure) for n, sure, right in zip(*self, strict=True))
        return sum(gaps) / max(sum(self.samples), 1)
