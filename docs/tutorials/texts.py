# %% [markdown]
"""
# Texts with HuggingFace

A BERT tells the topic of short texts. Then people begin to chat: four words of five say nothing
about the topic. You give the whole pipeline to `df.adapt`. Texts and network are made up here, so
nothing is downloaded. With a network of yours only the first section differs.
"""

# %%
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    pipeline,
)

import driftfilter as df

# %% [markdown]
"""
## Texts, a tokenizer, a network

Each topic uses the words with frequencies of its own.
"""

# %%
WORDS, LENGTH, TOPICS = 200, 24, 4
torch.manual_seed(0)
TOPIC = (2 * torch.randn(TOPICS, WORDS)).softmax(-1)  # how often each word comes
CHATTER = (2 * torch.randn(WORDS)).softmax(-1)


def make_texts(count: int, other: torch.Tensor, share: float) -> tuple[list[str], torch.Tensor]:
    """Texts of 6 to 24 words, a share of them not of the topic, and topics [n]."""
    topic = torch.randint(TOPICS, (count,))
    chances = (1 - share) * TOPIC[topic] + share * other
    words = torch.multinomial(chances, LENGTH, replacement=True).tolist()
    lengths = torch.randint(6, LENGTH + 1, (count,)).tolist()
    pairs = zip(words, lengths, strict=True)
    return [" ".join(f"w{word}" for word in text[:length]) for text, length in pairs], topic


vocabulary = {"[PAD]": 0, "[UNK]": 1} | {f"w{word}": word + 2 for word in range(WORDS)}
words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")

config = BertConfig(
    vocab_size=len(vocabulary),
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=LENGTH,
    num_labels=TOPICS,
)
model = BertForSequenceClassification(config)

# %%
padded = {"padding": "max_length", "max_length": LENGTH, "truncation": True}
optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
texts, topics = make_texts(10000, torch.full((WORDS,), 1 / WORDS), share=0.3)
for at in range(0, len(texts), 64):
    batch = tokenizer(texts[at : at + 64], return_tensors="pt", **padded)
    loss = model(**batch, labels=topics[at : at + 64]).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.eval()

# %% [markdown]
"""
## Give the pipeline to the adapter

`adapter.pipeline` takes and answers what the pipeline does, and adapts to what it is called with.
The pipeline itself stays as it was. Pad to one length, and give a `batch_size`: without it a
pipeline passes one text at a time.
"""

# %%
frozen = pipeline("text-classification", model=model, tokenizer=tokenizer)
adapter = df.adapt(frozen)
stream, truth = make_texts(1500, CHATTER, share=0.8)
options = {"batch_size": 32, "top_k": None, **padded}
print(adapter.pipeline(stream[:2], **options)[0][0])
adapter.reset()


# %%
def score(name: str, answers: list[list[dict[str, float]]]) -> None:
    """Accuracy and negative log-likelihood of the answers of a pipeline."""
    places = {f"LABEL_{topic}": topic for topic in range(TOPICS)}
    found = torch.zeros(len(answers), TOPICS)
    for row, answer in enumerate(answers):
        for each in answer:
            found[row, places[each["label"]]] = each["score"]
    accuracy = (found.argmax(-1) == truth).double().mean()
    nll = nn.functional.nll_loss(found.clamp_min(1e-12).log(), truth)
    print(f"{name:8} accuracy {accuracy:.3f}  NLL {nll:.3f}")


score("frozen", frozen(stream, **options))
score("adapted", adapter.pipeline(stream, **options))

# %% [markdown]
"""
## Without a pipeline

A model is wrapped as it is, and called as it was: by name.
"""

# %%
adapter = df.adapt(model)
batch = tokenizer(stream[:32], return_tensors="pt", **padded)
print(adapter(**batch).shape)

# %% [markdown]
"""
[Texts](../guides/texts.md) says what to look out for: padding, layer norm, the size of steps.
"""
