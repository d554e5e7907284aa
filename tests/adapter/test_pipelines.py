"""Pipelines of transformers: by a stand-in, and by the package itself if it is there."""

import copy
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import driftfilter as df
from small import normal, tabular


class Classifier(nn.Module):
    """A model as those of transformers: inputs by name, logits in an output, a config."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.inner = tabular(width=8)
        self.config = SimpleNamespace(**{"problem_type": None, "num_labels": 3, **config})

    def forward(self, values: Tensor) -> Any:
        return SimpleNamespace(logits=self.inner(values))


class Simple:
    """A pipeline whose samples are rows, and whose answers are probabilities."""

    def __init__(self, model: nn.Module, task: str = "text-classification") -> None:
        self.model: Any = model.eval()
        self.task = task

    def __call__(self, rows: Tensor) -> Tensor:
        assert self.model.config.num_labels == 3  # of the model, whatever stands for it
        return self.postprocess(self.model(values=rows))

    def postprocess(self, model_outputs: Any) -> Tensor:
        return torch.as_tensor(model_outputs["logits"]).softmax(-1)


def rows(number: int) -> Tensor:
    return normal(16, 4, seed=number, dtype=torch.float32)


def test_a_pipeline_adapts_as_its_model_does() -> None:
    pipeline = Simple(Classifier())
    before, model = copy.deepcopy(pipeline.model.state_dict()), pipeline.model
    adapter, alone = df.adapt(pipeline, "tent", lr=0.1), df.adapt(model, "tent", lr=0.1)
    for number in range(3):
        said = adapter.pipeline(rows(number))
        torch.testing.assert_close(said, alone(values=rows(number)).exp())
    assert pipeline.model is model  # and as it was
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not torch.equal(adapter.predict(values=rows(0)).probabilities, said)


def test_a_copy_of_an_adapter_has_a_pipeline_of_its_own() -> None:
    adapter = df.adapt(Simple(Classifier()), "tent", lr=0.1)
    adapter.pipeline(rows(0))
    other = copy.deepcopy(adapter)
    first = other.pipeline(rows(1))
    torch.testing.assert_close(first, adapter.pipeline(rows(1)))
    kept = copy.deepcopy(other.pipeline)
    torch.testing.assert_close(kept(rows(2)), adapter.pipeline(rows(2)))


@pytest.mark.parametrize(
    ("pipeline", "said"),
    [
        (Simple(Classifier(), "object-detection"), "a pipeline for object-detection"),
        (Simple(Classifier(num_labels=1)), "with 1 labels"),
        (Simple(Classifier(problem_type="regression")), "for regression with 3 labels"),
        (Simple(Classifier(problem_type="multi_label_classification")), "for multi_label"),
    ],
)
def test_pipelines_that_end_in_no_softmax_are_refused(pipeline: Simple, said: str) -> None:
    with pytest.raises(ValueError, match=f"adapt: model must be .*{said}"):
        df.adapt(pipeline)


class Named(Classifier):
    """A module with the names that a pipeline has."""

    model, task = None, "text-classification"

    def postprocess(self, model_outputs: Any) -> Any:
        return model_outputs


@pytest.mark.parametrize("kind", [Classifier, Named])
def test_a_module_has_no_pipeline(kind: type[Classifier]) -> None:
    with pytest.raises(ValueError, match=r"adapter\.pipeline must be given to adapt"):
        _ = df.adapt(kind().eval()).pipeline


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 4])
def test_transformers_itself(tmp_path: Path, size: int) -> None:
    try:
        transformers: Any = importlib.import_module("transformers")
    except Exception as error:
        pytest.skip(f"transformers cannot be imported: {error}")
    words = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "the"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=64, vocab_size=9, num_labels=3)
    pipeline = transformers.pipeline(
        "text-classification",
        model=transformers.BertForSequenceClassification(config).eval(),
        tokenizer=transformers.BertTokenizer(str(tmp_path / "vocab.txt")),
        device="cpu",
    )
    texts, given = ["good film", "the bad film", "bad", "the the the film"], pipeline.model
    before = pipeline(texts, top_k=None)
    adapter = df.adapt(pipeline, "tent", lr=0.1)
    options = {"batch_size": size, "top_k": None}
    first, second = (adapter.pipeline(texts, **options) for _ in range(2))
    assert first != second  # it adapts
    for answer in second:
        assert {each["label"] for each in answer} == {"LABEL_0", "LABEL_1", "LABEL_2"}
        assert sum(each["score"] for each in answer) == pytest.approx(1, abs=1e-5)
    assert (pipeline.model is given, pipeline(texts, top_k=None)) == (True, before)
    one_length = {"padding": "max_length", "max_length": 8, "truncation": True}
    waits = df.adapt(pipeline)  # for 16 samples, of one length
    assert len(waits.pipeline(6 * texts, **options, **one_length)) == 24
    assert waits.last_info is not None
    frozen = df.adapt(pipeline, "source").pipeline(texts, **options)
    for answer, expected in zip(frozen, before, strict=True):
        scores = {each["label"]: each["score"] for each in expected}
        assert {each["label"]: each["score"] for each in answer} == pytest.approx(scores, abs=1e-5)
