"""What users rely on, against a list taken before the folders were rearranged (surface.json)."""

import argparse
import ast
import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

import driftfilter as df
from driftfilter.app import cli, commands as module
from driftfilter.app.arguments import build_parser
from driftfilter.app.commands import COMMANDS
from driftfilter.app.run import progress
from driftfilter.presets import PRESETS

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"
LIST = Path(__file__).with_name("surface.json")


def commands() -> dict[str, Any]:
    """Every command with its options."""
    (found,) = (action for action in build_parser(COMMANDS)._actions if action.dest == "command")
    assert isinstance(found.choices, dict)
    return {name: _options(name, each) for name, each in found.choices.items()}


def _options(command: str, options: argparse.ArgumentParser) -> dict[str, Any]:
    defaults = {item.name: item.default for item in dataclasses.fields(COMMANDS[command].options)}
    return {
        action.dest: {
            "written": " ".join(action.option_strings) or "positional",
            "metavar": action.metavar,
            "choices": None if action.choices is None else ", ".join(action.choices),
            "nargs": action.nargs,
            "default": _text(action.dest, defaults.get(action.dest, action.default)),
        }
        for action in options._actions
        if action.dest != "help"
    }


def _text(name: str, default: object) -> str:
    """A default as text, whatever the machine; "None" for what must be given."""
    if name == "workers":
        return "one a core"
    return str(None if default is dataclasses.MISSING else default)


def statuses() -> list[int]:
    """The exit statuses in the code: what functions that give one return, by number or name."""
    found = {
        getattr(source, part.id, None) if isinstance(part, ast.Name) else part.value
        for source in (cli, module, progress)
        for function in ast.walk(ast.parse(inspect.getsource(source)))
        if isinstance(function, ast.FunctionDef)
        and ast.unparse(function.returns or function) in ("int", "Found")
        for returned in ast.walk(function)
        if isinstance(returned, ast.Return) and returned.value is not None
        for part in ast.walk(returned.value)
        if isinstance(part, ast.Name | ast.Constant)
    }
    return sorted(status for status in found if type(status) is int)


def variants() -> dict[str, Any]:
    """The kinds of every role, each with its fields and their defaults."""
    return {
        role: {name: _fields(kind) for name, kind in kinds.items()}
        for role, kinds in df.VARIANTS.items()
    }


def _fields(kind: Any) -> dict[str, str]:
    made = {
        item.name: item.default_factory
        for item in (dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ())
        if item.default_factory is not dataclasses.MISSING
    }

    def text(each: inspect.Parameter) -> str:
        default = made[each.name]() if each.name in made else each.default
        return "required" if default is each.empty else repr(default)

    return {each.name: text(each) for each in inspect.signature(kind).parameters.values()}


def dataclass_fields() -> dict[str, Any]:
    """Fields and defaults of every public dataclass."""
    public = {name: getattr(df, name) for name in df.__all__}
    return {
        name: _fields(each)
        for name, each in public.items()
        if isinstance(each, type) and dataclasses.is_dataclass(each)
    }


def preset_signatures() -> dict[str, dict[str, str]]:
    """The options of every preset with their defaults."""
    assert df.presets.names() == list(PRESETS)
    return {name: _fields(preset) for name, preset in PRESETS.items()}


def adapt_options() -> list[str]:
    """Names of the options that ``adapt`` takes beside those of a preset."""
    return sorted({*inspect.signature(df.adapt).parameters} - {"model", "recipe", "options"})


SURFACE = {
    "commands": commands,
    "statuses": statuses,
    "names": lambda: sorted(df.__all__),
    "variants": variants,
    "dataclasses": dataclass_fields,
    "presets": preset_signatures,
    "adapt": adapt_options,
}


@pytest.mark.parametrize("part", SURFACE)
def test_surface_is_that_of_the_list(part: str) -> None:
    before = json.loads(LIST.read_text(encoding="utf-8"))
    assert json.loads(json.dumps(SURFACE[part]())) == before[part]


def test_the_page_of_the_command_line_explains_every_status() -> None:
    rows = re.findall(r"^\| (\d+) \|", DOCS.read_text(encoding="utf-8"), re.M)
    assert [int(number) for number in rows] == statuses()


if __name__ == "__main__":  # to take the list anew, if a change of the surface is meant
    found = {part: take() for part, take in SURFACE.items()}
    LIST.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
