"""Nothing in the package runs what a file says: no pickle, no eval, no import by name but of the
user's own model.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import driftfilter as df

ROOT = Path(df.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

NAMES = {"eval", "exec", "compile", "__import__"}
MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "yaml",
    "runpy",
    "code",
}
CALLS = {"import_module", "system", "popen", "literal_eval", "read_pickle"}
# What is allowed, and why. A pattern is ``what in file``.
ALLOWED = {
    "pickle in app/images/files.py": (
        "CIFAR-10's python version is a pickle; the unpickler there admits numpy arrays and "
        "nothing else"
    ),
    "pickle in app/networks/load_model.py": (
        "the name of an error that torch.load(weights_only=True) raises"
    ),
    "import_module in __init__.py": "the package's own _api",
    "import_module in app/networks/load_model.py": "the user's package.module:factory",
    "import_module in app/networks/libraries.py": (
        "timm, torchvision or transformers, by these names alone"
    ),
    "import_module in app/bench/peers.py": "the checkout that the user names by --peers",
    "literal_eval in app/bench/prepare.py": (
        "numbers and lists in name:option=value; evaluates nothing"
    ),
}


def findings(text: str) -> Iterator[str]:
    """Everything in a source that could run what it reads."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [each.name for each in node.names]
            )
            yield from (
                name.partition(".")[0] for name in names if name.partition(".")[0] in MODULES
            )
        if isinstance(node, ast.Call):
            yield from called(node)


def called(node: ast.Call) -> Iterator[str]:
    of = node.func
    name = of.id if isinstance(of, ast.Name) else of.attr if isinstance(of, ast.Attribute) else ""
    owner = of.value.id if isinstance(of, ast.Attribute) and isinstance(of.value, ast.Name) else ""
    given = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
    if (isinstance(of, ast.Name) and name in NAMES) or name in CALLS:
        yield name
    if owner == "torch" and name == "load" and given.get("weights_only") is not True:
        yield "torch.load"
    if "allow_pickle" in given or given.get("shell"):
        yield name


BAD = [
    "import pickle",
    "from pickle import loads",
    "import yaml.loader",
    "eval('1')",
    "exec(text)",
    "__import__('os')",
    "importlib.import_module(name)",
    "torch.load(path)",
    "torch.load(path, weights_only=False)",
    "np.load(path, allow_pickle=True)",
    "subprocess.run(text, shell=True)",
    "os.system(text)",
]


@pytest.mark.parametrize("text", BAD)
def test_the_search_finds(text: str) -> None:
    assert list(findings(text))


def test_the_search_passes_what_is_safe() -> None:
    for text in (
        "torch.load(path, weights_only=True)",
        "np.load(path)",
        "model.eval()",
        "re.compile('a')",
        "json.loads(text)",
    ):
        assert not list(findings(text))


@pytest.mark.slow
def test_nothing_runs_what_it_reads() -> None:
    found = {
        f"{what} in {path.relative_to(ROOT).as_posix()}"
        for path in FILES
        for what in findings(path.read_text())
    }
    assert found == set(ALLOWED)


def test_toml_names_variants_only(tmp_path: Path) -> None:
    """A class outside the table is not looked for, however it is spelled."""
    marker = tmp_path / "ran"
    for kind in (
        "os.system",
        "builtins.eval",
        "driftfilter.recipe.Recipe",
        "__import__",
        "posix:system",
    ):
        for text in (
            f'kind = "{kind}"\ncommand = "touch {marker}"\n',
            f'kind = "Recipe"\ninference = {{ kind = "{kind}" }}\n',
        ):
            with pytest.raises(ValueError, match="kind must be the name of a variant"):
                df.from_toml(text)
    assert not marker.exists()
