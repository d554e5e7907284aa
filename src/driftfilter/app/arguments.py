"""From the options of a command, a dataclass, to its command line.

A field declares an option: its type, its default and, by ``option``, what argparse is told of it.
Torch is not imported here, so that help and mistakes are immediate.
"""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import (
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    TypeAlias,
    get_args,
    get_origin,
    get_type_hints,
)

from driftfilter import __version__
from driftfilter.app.terminal import Output
from driftfilter.base.suggest import nearest

# Exit status, and what was found as data; None if the error says it all.
Found: TypeAlias = tuple[int, Any]

# How a network is named (``app.networks.load_model``).
MODEL_HELP = (
    "NAME[=WEIGHTS][,OPTION=VALUE]: a shipped network, package.module:factory (called without "
    "arguments), timm:NAME, torchvision:NAME (both with WEIGHTS) or hf:FOLDER; options resize, "
    "crop, mean, deviation, interpolation of images, as in resize=256,crop=224,mean=imagenet"
)

HELP = (
    "COMMAND --help lists its options; exit status: 0 done, 1 failed, 2 wrong usage, "
    "130 ended by Ctrl-C"
)


class Command(NamedTuple):
    """What stands behind a word after ``driftfilter``."""

    run: Callable[[Any, Output, Sequence[str]], Found]  # options, output, the words of the command
    options: type  # a dataclass whose fields are made by ``option``, ``count_option``, ``argument``
    help: str
    epilog: str = ""
    # Makes the options from those that are given; None: the dataclass with its defaults.
    read: Callable[..., Any] | None = None


class Request(NamedTuple):
    """What was asked for."""

    command: Command | None  # None: no command
    options: Any
    output: Output


# Fields of the options of a command


def option(help: str, default: Any = None, **details: Any) -> Any:
    """Field that is ``--name`` on the command line; ``{default}`` in its help stands for it.

    A default of False makes it a switch, a Literal type gives its choices; ``details`` are further
    arguments of argparse.
    """
    return field(default=default, metadata={"help": help, **details})


def count_option(help: str, default: int | None) -> Any:
    """Field that is ``--name N`` with an integer of at least 1."""
    return option(help, default, type=count, metavar="N")


def argument(metavar: str, help: str, **details: Any) -> Any:
    """Field without a default that is given by its place on the command line."""
    return field(metadata={"help": help, "metavar": metavar, "positional": True, **details})


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    """Add the fields of a dataclass; one that is not given is left out of what is parsed."""
    hints = get_type_hints(options)
    for item in fields(options):
        details = dict(item.metadata)
        name = item.name if details.pop("positional", False) else f"--{item.name.replace('_', '-')}"
        details["help"] = details["help"].replace("{default}", str(item.default))
        parts = (hints[item.name], *get_args(hints[item.name]))
        chosen = next((get_args(part) for part in parts if get_origin(part) is Literal), None)
        if item.default is False:
            details["action"] = "store_true"
        elif chosen is not None:
            details["choices"] = chosen
        parser.add_argument(name, default=argparse.SUPPRESS, **details)


# Types of options


def count(text: str) -> int:
    """An integer of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return int(text)


def whole(text: str) -> int:
    """An integer of at least 0."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be an integer >= 0, got {text!r}")
    return int(text)


def fraction(text: str) -> float:
    """A number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1, got {text!r}")
    return value


def shape(text: str) -> tuple[int, ...]:
    """Sizes separated by commas."""
    parts = text.split(",")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"must be sizes such as 3,32,32, got {text!r}")
    return tuple(map(int, parts))


def file(text: str) -> Path:
    """A path that is no folder."""
    if Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"must be a file, got the folder {text!r}")
    return Path(text)


def folder(text: str) -> Path:
    """A path at which a folder is or can be made."""
    path = Path(text)
    there = next(each for each in (path, *path.parents, Path()) if each.exists())
    if not there.is_dir():
        raise argparse.ArgumentTypeError(
            f"must be a folder, or where one can be made, got the file {str(there)!r}"
        )
    return path


# Parsing


class Parser(argparse.ArgumentParser):
    """A parser whose errors name what is nearest to a wrong command, option or choice."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # No option begins so: --range -1,1 has a value.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but refuse what is unknown here: the command's options are known.

        Argparse itself would refuse it later, with the options of no command at hand.
        """
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            wrong = next((each for each in unknown if each.startswith("-")), None)
            near = "" if wrong is None else nearest(wrong.partition("=")[0], options)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Print the mistake itself, not thirty options before it."""
        self.exit(
            2, f"{self.prog}: error: {message}\n{self.prog} --help says what it can be told\n"
        )

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            raise argparse.ArgumentError(
                action,
                f"invalid choice: {value!r} (choose from {', '.join(known)})"
                f"{nearest(str(value), known)}",
            )


def build_parser(commands: Mapping[str, Command]) -> Parser:
    """Parser of all commands."""
    whole = Parser(
        prog="driftfilter",
        description="Online test-time adaptation as Gaussian filtering.",
        epilog=HELP,
    )
    whole.add_argument(
        "--version",
        action="version",
        version=f"driftfilter {__version__}",
        help="print the version and exit",
    )
    below = whole.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in commands.items():
        own = below.add_parser(name, help=command.help, epilog=command.epilog or None)
        add_options(own, command.options)
        either = own.add_mutually_exclusive_group()
        either.add_argument(
            "--json", action="store_true", help="one JSON document on stdout, nothing else there"
        )
        either.add_argument(
            "--quiet", action="store_true", help="print nothing but warnings and errors"
        )
    return whole


def parse(arguments: Sequence[str], commands: Mapping[str, Command]) -> Request:
    """What the arguments ask for."""
    parsed = vars(build_parser(commands).parse_args(arguments))
    if parsed["command"] is None:
        return Request(None, None, Output())
    command = commands[parsed["command"]]
    names = {item.name for item in fields(command.options)}
    given = {name: value for name, value in parsed.items() if name in names}
    return Request(
        command, (command.read or command.options)(**given), Output(parsed["quiet"], parsed["json"])
    )
