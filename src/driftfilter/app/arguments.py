"""What the command line understands; torch is not imported here, so that help and mistakes are
immediate.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from driftfilter.base.suggest import nearest

EXAMPLES = ("dynamics", "linear", "moons", "pinwheel")
FIRST_SEED = 3000  # nothing was chosen on the seeds from here on
HELP = (
    "COMMAND --help lists its options; exit status: 0 done, 1 failed, 2 wrong usage, "
    "130 ended by Ctrl-C"
)


class Parser(argparse.ArgumentParser):
    """One whose errors name what is nearest to a wrong command, option or choice."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._negative_number_matcher = re.compile(
            r"-\.?\d"
        )  # no option begins so: --range -1,1 has a value

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does it, but what is not known is an error here, where the options of the
        command are known.
        """
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            near = next(
                (
                    nearest(each.partition("=")[0], options)
                    for each in unknown
                    if each.startswith("-")
                ),
                "",
            )
            self.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """The mistake itself, not thirty options before it."""
        self.exit(
            2, f"{self.prog}: error: {message}\n{self.prog} --help says what it can be told\n"
        )

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            near = nearest(str(value), known)
            raise argparse.ArgumentError(
                action, f"invalid choice: {value!r} (choose from {', '.join(known)}){near}"
            )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What was asked for; ``command`` is None where nothing was."""
    found: argparse.Namespace = parser().parse_args(arguments)
    return found


def parser() -> Parser:
    """Of all commands."""
    whole = Parser(
        prog="driftfilter",
        description="Online test-time adaptation as Gaussian filtering.",
        epilog=HELP,
    )
    whole.add_argument("--version", action="store_true", help="print the version and exit")
    commands = whole.add_subparsers(dest="command", metavar="COMMAND")
    _add_demo(
        commands.add_parser("demo", help="the paper's linear example, and a short image stream")
    )
    _add_reproduce(
        commands.add_parser(
            "reproduce", help="the paper's examples: figures, metrics.json and a table for each"
        )
    )
    _add_bench(
        commands.add_parser(
            "bench", help="presets × protocols × models × seeds on corrupted images, as a table"
        )
    )
    _add_run(
        commands.add_parser(
            "run",
            help="adapt your own model over your own data, with checkpoints",
            epilog="exit status: 0 done, or ended by SIGTERM and saved; 1 failed; 2 wrong usage; "
            "3 done, but batches were "
            "skipped; 130 ended by Ctrl-C and saved",
        )
    )
    report = commands.add_parser(
        "report", help="runs and benchmarks side by side, as one HTML file that loads nothing"
    )
    report.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of driftfilter run or bench"
    )
    report.add_argument(
        "--out",
        type=_file,
        metavar="FILE",
        help="to write to (default: report.html in the first folder)",
    )
    data = commands.add_parser(
        "data", help="where to get CIFAR-10-C, and whether a folder holds it"
    )
    data.add_argument("folder", nargs="?", metavar="FOLDER", help="the folder to check")
    _add_inspect(
        commands.add_parser(
            "inspect", help="what adaptation would change in a model, and what it would cost"
        )
    )
    commands.add_parser("list", help="every building block and preset, with one line each")
    for command in commands.choices.values():
        _add_output(command)
    return whole


def _add_output(command: argparse.ArgumentParser) -> None:
    either = command.add_mutually_exclusive_group()
    either.add_argument(
        "--json",
        action="store_true",
        default=False,
        help="one JSON document on stdout, nothing else there",
    )
    either.add_argument(
        "--quiet", action="store_true", default=False, help="print nothing but warnings and errors"
    )


def _add_demo(demo: argparse.ArgumentParser) -> None:
    demo.add_argument(
        "--seeds", type=_count, default=20, metavar="N", help="number of seeds (default 20)"
    )
    demo.add_argument(
        "--out",
        type=_folder,
        default="runs/demo",
        metavar="DIR",
        help="where to write (default runs/demo)",
    )


def _add_reproduce(again: argparse.ArgumentParser) -> None:
    add, cores = again.add_argument, os.cpu_count() or 1
    add(
        "example",
        choices=(*EXAMPLES, "all"),
        metavar="EXAMPLE",
        help=f"{', '.join(EXAMPLES)}, or all of them",
    )
    add("--seeds", type=_count, default=20, metavar="N", help="number of seeds (default 20)")
    add(
        "--first-seed",
        type=int,
        default=FIRST_SEED,
        metavar="S",
        help=f"the first of them ({FIRST_SEED})",
    )
    add(
        "--out",
        type=_folder,
        default="runs/reproduce",
        metavar="DIR",
        help="where to write (default runs/reproduce)",
    )
    add(
        "--workers", type=_count, default=cores, metavar="N", help="processes (default: one a core)"
    )
    add("--no-figures", action="store_true", help="numbers only, without matplotlib")


def _add_bench(bench: argparse.ArgumentParser) -> None:
    """Its options; those not given are left to ``app.bench.Options``."""
    bench.argument_default = argparse.SUPPRESS
    add = bench.add_argument
    add(
        "--quick",
        action="store_true",
        help="4 corruptions of the shipped images in batches of 100: minutes on a CPU",
    )
    add(
        "--presets",
        metavar="A,B",
        help="names, with options as in cotta:copies=4,lr=0.001 (default: those of --quick)",
    )
    add(
        "--protocols",
        metavar="A,B",
        help="reset (default), continual, gradual, mixed, correlated, recurring",
    )
    add(
        "--models",
        metavar="A,B",
        help="shipped networks, or name=weights.safetensors (default resnet20)",
    )
    add(
        "--seeds",
        metavar="N",
        help="of generated corruptions, order, draws: how many, or a list: 4,7 (default 1)",
    )
    add(
        "--data",
        metavar="PATH",
        help="CIFAR-10-C folder, .npz or image folder (default: corruptions are generated)",
    )
    add(
        "--clean",
        metavar="PATH",
        help="CIFAR-10 test images, folder or .npz (default: the shipped first 2,000)",
    )
    add(
        "--source",
        metavar="PATH",
        help=".npz of source images, for presets with a source posterior (default: none)",
    )
    add(
        "--corruptions",
        metavar="A,B",
        help="all (default: the 15), extra (the 4 for tuning), or names",
    )
    add("--severity", type=_count, metavar="N", help="1 to 5 (default 5)")
    add("--batch", type=_count, metavar="N", help="samples a step (default 200)")
    add("--images", type=_count, metavar="N", help="a corruption (default: all)")
    add("--order", choices=("given", "shuffled"), help="of the corruptions (default given)")
    add(
        "--shuffled",
        action="store_true",
        help="images of a corruption in random order, by the seed",
    )
    add("--rounds", type=_count, metavar="N", help="of the protocols that have rounds")
    add(
        "--window",
        type=_count,
        metavar="N",
        help="of the adapter, for small batches: samples it looks back on (default 0)",
    )
    add("--device", metavar="NAME", help="auto (default), cpu or cuda")
    add(
        "--precision",
        choices=("float32", "tf32", "bf16"),
        help="(default: tf32 on a GPU, float32 on a CPU)",
    )
    add(
        "--before",
        action="store_true",
        help="also the accuracy before the update on the same batch",
    )
    add(
        "--probe-every",
        type=_count,
        metavar="N",
        help="steps between two looks at clean images; one more at the end (default: none)",
    )
    add(
        "--out",
        type=_folder,
        default="runs/bench",
        metavar="DIR",
        help="to write to and go on from; processes may share it (runs/bench)",
    )
    add(
        "--list",
        action="store_true",
        default=False,
        help="print the tasks and which are done; run nothing",
    )


def _add_run(run: argparse.ArgumentParser) -> None:
    """Its options; those not given are left to ``app.run.Options``."""
    run.argument_default = argparse.SUPPRESS
    add = run.add_argument
    add(
        "model",
        metavar="MODEL",
        help="package.module:factory (called without arguments), or resnet20, resnet20_gn",
    )
    add(
        "data",
        metavar="DATA",
        help=".npy [n, ...], .npz with x or images, a folder of pictures, or - for lines of JSON",
    )
    add(
        "--weights",
        metavar="FILE",
        help=".safetensors, or .pt that holds tensors only (default: as the factory makes it)",
    )
    add("--preset", metavar="NAME", help="with options as in tent:lr=0.001 (default driftfilter)")
    add("--recipe", metavar="FILE", help="TOML of a recipe, instead of a preset")
    add(
        "--set",
        action="append",
        metavar="PATH=VALUE",
        help="a field of the recipe, as in transition.dynamics.rho=0.99; repeat",
    )
    add(
        "--source",
        metavar="FILE",
        help="source samples, as DATA, for recipes with a source posterior",
    )
    add(
        "--labels",
        metavar="FILE",
        help=".npy, or .npz with labels or y: for the accuracy, never for adapting",
    )
    add("--batch", type=_count, metavar="N", help="samples a step (default 200)")
    add(
        "--window",
        type=_count,
        metavar="N",
        help="samples the adapter looks back on, for small batches (default 0)",
    )
    add("--update-every", type=_count, metavar="N", help="steps between two updates (default 1)")
    add("--seed", type=int, metavar="S", help="of all draws (default 0)")
    add("--device", metavar="NAME", help="auto (default), cpu or cuda")
    add(
        "--layout",
        choices=("auto", "first", "last"),
        help="of image channels (auto: 8-bit [n, h, w, 3] are last)",
    )
    add(
        "--scale",
        type=float,
        metavar="X",
        help="factor of all values (default: 1/255 for 8-bit images, else 1)",
    )
    add(
        "--range",
        metavar="LOW,HIGH",
        help="a batch with values outside, after scaling, is bad (default: any finite value)",
    )
    add(
        "--integers",
        metavar="A,B",
        help="parts of a JSON object that are integers, such as input_ids",
    )
    add(
        "--predictions",
        choices=("npz", "csv"),
        help="predictions.npz in the end (default), or .csv that grows",
    )
    add(
        "--checkpoint-every",
        type=_count,
        metavar="N",
        help="steps between two saves (default: only when it ends)",
    )
    add("--keep", type=_count, metavar="K", help="checkpoints to keep (default 1)")
    add(
        "--resume",
        action="store_true",
        help="go on from the checkpoint in --out; from the beginning where there is none",
    )
    add(
        "--stdin-continues",
        action="store_true",
        help="on resuming, stdin goes on where it stopped (default: it starts again)",
    )
    add(
        "--on-bad-batch",
        choices=("stop", "skip"),
        help="not finite, out of range, of another shape (default stop)",
    )
    add(
        "--baseline",
        action="store_true",
        help="also predict with the model as it is, for the report: one more forward pass",
    )
    add(
        "--classes",
        metavar="FILE",
        help="names of the classes, one a line, for the report (default: their numbers)",
    )
    add(
        "--live",
        action="store_true",
        default=False,
        help="a dashboard on the terminal: accuracy, entropy, classes, alarms",
    )
    add(
        "--out",
        type=_folder,
        default=Path("runs/run"),
        metavar="DIR",
        help="to write to (default runs/run)",
    )


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help="package.module:factory (called without arguments), or a shipped network's name",
    )
    add("--weights", type=Path, metavar="FILE", help=".safetensors, or .pt that holds tensors only")
    add(
        "--input",
        type=_shape,
        metavar="A,B",
        help="shape of a sample, as in 3,32,32: has steps timed on random inputs",
    )
    add("--batch", type=_count, default=200, metavar="N", help="samples a step (default 200)")
    add("--names", action="store_true", help="list every parameter of every subset")


def _shape(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"must be sizes such as 3,32,32, got {text!r}")
    return tuple(map(int, parts))


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return int(text)


def _file(text: str) -> Path:
    if Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"must be a file, got the folder {text!r}")
    return Path(text)


def _folder(text: str) -> Path:
    path = Path(text)
    there = next(each for each in (path, *path.parents, Path()) if each.exists())
    if not there.is_dir():
        raise argparse.ArgumentTypeError(
            f"must be a folder, or where one can be made, got the file {str(there)!r}"
        )
    return path
