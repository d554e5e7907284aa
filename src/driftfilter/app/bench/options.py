"""What ``driftfilter bench`` can be told; torch is not imported here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from driftfilter.app.arguments import MODEL_HELP, count_option, folder, option

Precision: TypeAlias = Literal["float32", "tf32", "bf16"]

# In the order of accuracy they are expected to have.
QUICK_PRESETS = "source,bn,tent,driftfilter,driftfilter_aug"
# What --quick stands for.
QUICK: dict[str, Any] = {
    "corruptions": "gaussian_noise,defocus_blur,contrast,jpeg_compression",
    "batch": 100,
}
# What --matrix stands for.
MATRIX: dict[str, Any] = {
    "presets": "source,driftfilter",
    "protocols": "clean,reset,continual",
    "models": "resnet20,resnet20_gn",
    "batches": "200,16,1",
}


@dataclass(frozen=True)
class BenchOptions:
    """Options of ``driftfilter bench``, as they are written there."""

    quick: bool = option(
        "4 corruptions of the shipped images in batches of 100: minutes on a CPU", False
    )
    matrix: bool = option(
        "also a page of accuracy and ECE against the frozen network, by network, protocol (clean, "
        "reset and continual) and batch size; below 8 samples a step, 500 images a corruption",
        False,
    )
    presets: str = option(
        "names, with options as in cotta:copies=4,lr=0.001 (default: those of --quick)",
        QUICK_PRESETS,
        metavar="A,B",
    )
    protocols: str = option(
        "in which order shifts come, as in continual,recurring:rounds=5; a wrong name is answered "
        "by the list of all (default {default})",
        "reset",
        metavar="A,B",
    )
    models: str = option(
        f"each {MODEL_HELP} (default {{default}})",
        "resnet20",
        metavar="A,B",
    )
    seeds: str = option(
        "of generated corruptions, order, draws: how many, or a list: 4,7 (default {default})",
        "1",
        metavar="N",
    )
    data: str | None = option(
        "what `driftfilter data` lists: arrays, folders of pictures, tables, texts, windows of "
        "sensors (default: corruptions are generated)",
        metavar="PATH",
    )
    columns: str | None = option(
        "of tables, texts and lists of pictures: label=y,domain=center,path=file,text=review,"
        "time=day,where=split:test,drop=id+note (default: columns of those names; the rest are "
        "numbers)",
        metavar="MEANING=COLUMN,…",
    )
    classes: str | None = option(
        "file of the names of class folders, or labels, in the order of the model's classes: lines "
        "or JSON (default: by name)",
        metavar="FILE",
    )
    subset: bool = option(
        "only the logits of classes that the data have, as ImageNet-R and -A are evaluated (200 of "
        "1,000)",
        False,
    )
    clean: str | None = option(
        "clean images, CIFAR's folder or .npz (default: the shipped first 2,000)", metavar="PATH"
    )
    source: str | None = option(
        ".npz of source images, for presets with a source posterior (default: none)",
        metavar="PATH",
    )
    keep: Path | None = option(
        "keep the corruptions made of class folders in files there, which processes may share "
        "(default: the last 2 GB of them, in memory)",
        None,
        type=folder,
        metavar="DIR",
    )
    peers: str | None = option(
        "checkout of mariodoebler/test-time-adaptation, whose own classes are then presets: "
        "peer_tent, peer_cotta:N_AUGMENTATIONS=4 (default: none)",
        metavar="DIR",
    )
    corruptions: str = option(
        "all (default: the 15), extra (the 4 for tuning), or names", "all", metavar="A,B"
    )
    severity: int = count_option("1 to 5 (default {default})", 5)
    batch: int = count_option("samples a step (default {default})", 200)
    batches: str | None = option(
        "several of them, as in 200,16,1, which --matrix has (default: --batch)", metavar="A,B"
    )
    images: int | None = count_option("a corruption (default: all)", None)
    order: Literal["given", "shuffled"] = option("of the corruptions (default {default})", "given")
    shuffled: bool = option("images of a corruption in random order, by the seed", False)
    rounds: int | None = count_option("of the protocols that have rounds", None)
    window: int = count_option(
        "of the adapter, for small batches: samples it looks back on (default {default})", 0
    )
    device: str = option("auto (default), cpu or cuda", "auto", metavar="NAME")
    precision: Precision | None = option("(default: tf32 on a GPU, float32 on a CPU)")
    before: bool = option("also the accuracy before the update on the same batch", False)
    probe_every: int = count_option(
        "steps between two looks at clean images; one more at the end (default: none)", 0
    )
    out: Path = option(
        "to write to and go on from; processes may share it ({default})",
        Path("runs/bench"),
        type=folder,
        metavar="DIR",
    )
    list: bool = option("print the tasks and which are done; run nothing", False)


def read_options(**given: Any) -> BenchOptions:
    """The options that are given; with ``quick`` and ``matrix`` those they stand for, unless given
    otherwise.
    """
    meant = {**(QUICK if given.get("quick") else {}), **(MATRIX if given.get("matrix") else {})}
    if "batch" in given:
        meant.pop("batches", None)
    return BenchOptions(**{**meant, **given})
