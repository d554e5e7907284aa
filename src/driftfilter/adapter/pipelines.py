"""Pipelines of transformers: the same pipeline, with an adapter in the place of its model."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

from torch import Tensor, nn

from driftfilter.base.checks import require

_TASKS = ("text-classification", "image-classification")


@runtime_checkable
class Pipeline(Protocol):
    """A ``pipeline`` of transformers: what comes before its ``model``, and what comes after."""

    task: str
    model: Any

    @property
    def postprocess(self) -> Callable[..., Any]:
        """Makes what callers get of what the model returned."""


def model_of(pipeline: Pipeline) -> nn.Module:
    """The classifier of a pipeline; refused if the pipeline does not end in a softmax."""
    name, model = "adapt: model", pipeline.model
    allowed = f"a pipeline for {' or '.join(_TASKS)}"
    require(pipeline.task in _TASKS, name, f"a pipeline for {pipeline.task}", allowed)
    require(isinstance(model, nn.Module), name, type(model).__name__, "a pipeline of a module")
    assert isinstance(model, nn.Module)
    config: Any = model.config
    kind = config.problem_type or "single_label_classification"
    single = kind == "single_label_classification" and config.num_labels > 1
    found = f"a pipeline for {kind} with {config.num_labels} labels"
    require(single, name, found, "one for single_label_classification with two labels or more")
    return model


def with_classifier(pipeline: Pipeline, classify: Callable[..., Tensor]) -> Any:
    """A shallow copy of a pipeline whose logits come from ``classify``."""
    found = copy.copy(pipeline)
    found.model = _Stand(pipeline.model, classify)
    return found


@final
@dataclass(frozen=True)
class _Stand:
    """What a pipeline takes for its model: all of it but the logits."""

    model: nn.Module
    classify: Callable[..., Tensor]

    def __call__(self, **inputs: Any) -> dict[str, Tensor]:
        return {"logits": self.classify(**inputs)}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copies and pickles ask before there is a model
            raise AttributeError(name)
        return getattr(self.model, name)
