"""benchmarks/reviews.py on a few lines: what it says of the frozen network, counted by hand."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch

import small_models
from driftfilter.app.networks.load_model import NamedNetwork
from driftfilter.app.readers.fit import Tokens
from driftfilter.app.readers.stored import Arrays

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import reviews
import sources


def encode(texts: list[str]) -> Arrays:
    """A word is its length; all texts here have as many."""
    ids = np.array([[len(word) for word in text.split()] for text in texts])
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def test_frozen_and_adapted(tmp_path: Path) -> None:
    kinds = ("clean", *sources.KINDS[1:])
    texts = [f"{'a' * (1 + number % 5)} {'b' * (1 + number % 3)}" for number in range(8)]
    rows = [
        {"text": text, "label": number % 2, "domain": kind}
        for kind in kinds
        for number, text in enumerate(texts)
    ]
    (tmp_path / "reviews.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    network = NamedNetwork("words", small_models.tokens(), "", tokens=Tokens("words", encode))
    asked = Namespace(
        model=tmp_path, source="books", methods=["frozen", "tent"], rows=8, batch=4, seeds=1
    )
    found = list(reviews.measure(network, asked))
    with torch.no_grad():
        right = network.module(**reviews.tokenize(network, texts)).argmax(-1) == torch.arange(8) % 2
    streams = (*kinds, "continual")
    assert [(row["method"], row["stream"]) for row in found] == [
        (method, stream) for method in asked.methods for stream in streams
    ]
    frozen = [row["accuracy"] for row in found if row["method"] == "frozen"]
    assert frozen == [round(float(right.double().mean()), 4)] * len(streams)
