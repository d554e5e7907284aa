"""Checkpoints: a stream that is killed in the middle goes on bit for bit.

Starts itself as a child process, which adapts the shipped ResNet-20 to 300 images under heavy
contrast loss and saves the state and its predictions after every batch; kills that child after its
third batch without warning (SIGKILL); starts it again; and compares with a stream that was never
killed. Prints where it was killed, whether the predictions are the same bit for bit, and accuracy
as it is, and adapted.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import driftfilter as df
from driftfilter.app import corruptions, models, streams

shipped = streams.sample_images()
images, labels = corruptions.corrupt(shipped.images[:300], "contrast", 5), shipped.labels[:300]
batches = images.split(50)


def work(folder: Path) -> None:
    """Adapt to every batch that has not been done; the checkpoint knows which those are."""
    adapter = df.adapt(models.load("resnet20"))
    state = folder / "state.safetensors"
    done = df.load(adapter, state)["batches"] if state.exists() else 0
    for position in range(done, len(batches)):
        found = adapter(batches[position])
        save_file({"log_probabilities": found}, folder / f"{position}.safetensors")
        df.save(adapter, state, notes={"batches": position + 1})
        print("batch", position, flush=True)


def predictions(folder: Path) -> torch.Tensor:
    """Log-probabilities [300, 10] that were written."""
    return torch.cat(
        [
            load_file(folder / f"{place}.safetensors")["log_probabilities"]
            for place in range(len(batches))
        ]
    )


def main() -> None:
    """The killed stream beside the unbroken one."""
    with tempfile.TemporaryDirectory() as name:
        killed, unbroken = Path(name, "killed"), Path(name, "unbroken")
        killed.mkdir()
        unbroken.mkdir()
        with subprocess.Popen(
            [sys.executable, __file__, str(killed)], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            last = [child.stdout.readline() for _ in range(3)][-1]
            child.kill()
        print("killed after", last.strip())
        for folder in (killed, unbroken):
            subprocess.run(
                [sys.executable, __file__, str(folder)], check=True, stdout=subprocess.DEVNULL
            )
        adapted = predictions(killed)
        print("the same bit for bit:", torch.equal(adapted, predictions(unbroken)))
        with torch.no_grad():
            frozen = models.load("resnet20")(images)
        for name, found in {"frozen": frozen, "adapted": adapted}.items():
            print(f"{name:8} accuracy {(found.argmax(-1) == labels).double().mean():.3f}")


if __name__ == "__main__":
    work(Path(sys.argv[1])) if len(sys.argv) > 1 else main()
