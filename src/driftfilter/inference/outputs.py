"""What a filter says about a whole stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from driftfilter.inference.accuracy import Estimate
from driftfilter.inference.prediction import Prediction

if TYPE_CHECKING:
    from driftfilter.filtering import FilterState, StepInfo


@final
class Outputs(Sequence[Prediction]):
    """The predictions of a stream, one per batch; as attributes, those of all samples one after the
    other.

    ``infos``: the StepInfo of every batch. ``compiled``: how many steps ran in compiled code
    (docs/guides/small-filters.md). ``states``: the state before the first batch and after each,
    with the ``times`` between them, if ``run`` was to keep them.
    """

    def __init__(
        self,
        predictions: Sequence[Prediction],
        infos: Sequence[StepInfo],
        together: tuple[Tensor, Tensor] | None = None,
        compiled: int = 0,
        states: Sequence[FilterState] = (),
        times: Sequence[float] = (),
    ) -> None:
        self._predictions, self.infos, self.compiled = predictions, infos, compiled
        self.states, self.times = states, times
        # log-probabilities and logit variances [samples, k], if they are one tensor already
        self._together = together

    def __len__(self) -> int:
        return len(self._predictions)

    def __getitem__(self, index: Any) -> Any:
        return self._predictions[index]

    @property
    def log_probabilities(self) -> Tensor:
        """log p(y given x) of every sample [samples, k]."""
        return (
            self._together[0]
            if self._together
            else torch.cat([prediction.log_probabilities for prediction in self])
        )

    @property
    def logit_variance(self) -> Tensor:
        """Variance of the logits of every sample [samples, k]."""
        return (
            self._together[1]
            if self._together
            else torch.cat([prediction.logit_variance for prediction in self])
        )

    @property
    def probabilities(self) -> Tensor:
        """p(y given x) of every sample [samples, k]."""
        return self.log_probabilities.exp()

    @property
    def estimate(self) -> Estimate:
        """Expected accuracy over the last thousand samples (docs/knowing.md)."""
        return Estimate.of(self.log_probabilities)

    @property
    def labels(self) -> Tensor:
        """The most likely class of every sample [samples]."""
        return self.log_probabilities.argmax(-1)
