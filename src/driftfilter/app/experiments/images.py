"""A short image stream: the shipped images under noise, through the shipped ResNet-20, preset by preset."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

import torch

import driftfilter as df
from driftfilter.app import metrics, models, streams


@final
@dataclass(frozen=True)
class ImageStream:
    """CIFAR-10 test images plus N(0, noise²), clipped to [0, 1], in batches; every preset starts from the source."""

    presets: tuple[str, ...] = ("source", "bn", "tent", "opgd_diag")
    images: int = 1000
    batch: int = 100
    noise: float = 0.1
    seed: int = 0

    def run(self, folder: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> str:
        """Write metrics.json and table.txt; the table."""
        clean, labels = (part[: self.images] for part in streams.sample_images())
        noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(self.seed))
        noisy, model = (clean + self.noise * noise).clamp(0, 1), models.load("resnet20")
        measured: dict[str, dict[str, float]] = {}
        for done, preset in enumerate(self.presets, 1):
            adapter = df.adapt(model, preset, seed=self.seed)
            start = time.perf_counter()
            logp = torch.cat([adapter(batch) for batch in noisy.split(self.batch)])
            measured[preset] = {
                "accuracy": metrics.accuracy(logp, labels),
                "NLL": metrics.negative_log_likelihood(logp, labels),
                "ECE": metrics.calibration_error(logp, labels),
                "seconds": time.perf_counter() - start,
            }
            progress(done, len(self.presets))
        lines = [f"{'preset':<12}{'accuracy':>10}{'NLL':>8}{'ECE':>8}{'seconds':>9}"]
        for preset, values in measured.items():
            cells = (values["accuracy"], values["NLL"], values["ECE"], values["seconds"])
            lines.append(f"{preset:<12}{cells[0]:>10.3f}{cells[1]:>8.3f}{cells[2]:>8.3f}{cells[3]:>9.1f}")
        table = "\n".join(lines)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.json").write_text(json.dumps({"settings": asdict(self), "presets": measured}, indent=1) + "\n")
        (folder / "table.txt").write_text(table + "\n")
        return table
