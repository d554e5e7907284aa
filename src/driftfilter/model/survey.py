"""Source samples as the model sees them before the stream, for what must remember something of
them.

What is kept goes into the memory of the filter's state under names that begin with "source.": it
is saved with the state, and a reset leaves it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from driftfilter.base.checks import require
from driftfilter.base.inputs import Inputs, check_inputs, each
from driftfilter.model.predictive import PredictiveModel

SOURCE = "source."  # names in the memory that begin so are of the source


class SourceBatch(NamedTuple):
    """Source samples; ``features`` if somebody looks at them."""

    inputs: Inputs  # [n, ...]
    labels: Tensor | None  # class indices [n]
    logits: Tensor  # [n, k]
    features: Tensor | None  # [n, D]


@final
@dataclass(frozen=True, eq=False)
class SourceSamples:
    """Source data through the model at θ_S, batch after batch; may be read several times."""

    model: PredictiveModel
    theta: Tensor  # θ_S [d]
    data: Iterable[tuple[Inputs, Tensor | None]]
    features: bool

    def __iter__(self) -> Iterator[SourceBatch]:
        for given, labels in self.data:
            inputs = each(check_inputs(given), lambda part: part.to(self.theta.device))
            labels = labels if labels is None else labels.to(self.theta.device)
            if self.features:
                both = self.model.logits_and_features(self.theta, inputs)
                yield SourceBatch(inputs, labels, *both)
            else:
                yield SourceBatch(inputs, labels, self.model(self.theta, inputs), None)

    def gather(self) -> SourceBatch:
        """All of them as one batch, without their inputs."""
        batches = [batch._replace(inputs=None) for batch in self]
        require(len(batches) > 0, "source data", "no samples", "one batch or more")

        def join(parts: list[Any]) -> Tensor | None:
            return None if any(part is None for part in parts) else torch.cat(parts)

        _, labels, logits, features = (join(list(column)) for column in zip(*batches, strict=True))
        assert logits is not None
        return SourceBatch(None, labels, logits, features)


def forget(memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is left of a memory after a reset: what it has of the source."""
    return {name: value for name, value in memory.items() if name.startswith(SOURCE)}


def from_source(memory: Mapping[str, Tensor], name: str, who: object) -> Tensor:
    """What a memory has of the source under a name."""
    require(
        SOURCE + name in memory,
        "state",
        f"nothing of the source's {name}",
        f"one of Filter.init with data=…, which {type(who).__name__} needs",
    )
    return memory[SOURCE + name]
