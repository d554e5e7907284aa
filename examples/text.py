"""A text classifier: inputs by name, an output object with .logits, as HuggingFace models have
them.

Makes up texts of four topics (each topic has its own word frequencies), trains a small transformer
on them, then shows it texts in which four words of five are chatter that it has never seen in such
amounts, in batches of 32 without labels. Prints accuracy and NLL as it is, and adapted. A model of
the transformers library is wrapped and called in the same way.
"""

from collections import namedtuple

import torch
from torch import nn

import driftfilter as df

WORDS, LENGTH, TOPICS = 200, 24, 4
torch.manual_seed(0)
TOPIC = (2 * torch.randn(TOPICS, WORDS)).softmax(-1)  # how often each word comes
CHATTER = (2 * torch.randn(WORDS)).softmax(-1)


def texts(
    count: int, other: torch.Tensor, share: float
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Token ids and attention mask [n, LENGTH] of texts of 6 to 24 words, a share of them not of
    the topic; topics [n].
    """
    topic = torch.randint(TOPICS, (count,))
    words = 1 + torch.multinomial(
        (1 - share) * TOPIC[topic] + share * other, LENGTH, replacement=True
    )
    mask = (torch.arange(LENGTH) < torch.randint(6, LENGTH + 1, (count, 1))).long()
    return {"input_ids": words * mask, "attention_mask": mask}, topic


Output = namedtuple(
    "Output", "logits"
)  # what models of the transformers library return, as far as we need it


class Classifier(nn.Module):
    """Word embeddings, two transformer blocks, mean over the words that are there."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS + 1, width), nn.LayerNorm(width)
        block = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.1, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, TOPICS)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Output:
        """Texts -> logits."""
        hidden = self.blocks(
            self.norm(self.words(input_ids)), src_key_padding_mask=attention_mask == 0
        )
        mask = attention_mask.unsqueeze(-1)
        return Output(self.head((hidden * mask).sum(1) / mask.sum(1)))


def batches(inputs: dict[str, torch.Tensor], size: int) -> list[dict[str, torch.Tensor]]:
    """The texts, so many at a time."""
    pieces = zip(*(tensor.split(size) for tensor in inputs.values()), strict=True)
    return [dict(zip(inputs, piece, strict=True)) for piece in pieces]


model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
inputs, topics = texts(10000, torch.full((WORDS,), 1 / WORDS), share=0.3)
for batch, truth in zip(batches(inputs, 64), topics.split(64), strict=True):
    loss = nn.functional.cross_entropy(model(**batch).logits, truth)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.eval()

stream, truth = texts(1500, CHATTER, share=0.8)
adapter = df.adapt(model)
with torch.no_grad():
    frozen = model(**stream).logits.log_softmax(-1)
adapted = torch.cat([adapter(**batch) for batch in batches(stream, 32)])
for name, found in {"frozen": frozen, "adapted": adapted}.items():
    accuracy = (found.argmax(-1) == truth).double().mean()
    print(f"{name:8} accuracy {accuracy:.3f}  NLL {nn.functional.nll_loss(found, truth):.3f}")
