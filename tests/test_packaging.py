"""What packagers rely on: the origin of shipped files, and versions for all that is installed."""

import hashlib
import re
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

import driftfilter as df
from driftfilter.app.samples import open_sample

ROOT = Path(__file__).parent.parent


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    pins = (line.split()[0].split("==") for line in lines if not line.startswith("#"))
    return {normal(package): version for package, version in pins}


def test_the_origin_of_every_shipped_file_is_stated() -> None:
    assets = files("driftfilter.app") / "assets"
    stated = dict(re.findall(r"`(\S+)` \| `([0-9a-f]{64})`", (assets / "ORIGIN.md").read_text()))
    shipped = {each.name: each for each in assets.iterdir() if each.name != "ORIGIN.md"}
    assert stated == {
        name: hashlib.sha256(each.read_bytes()).hexdigest() for name, each in shipped.items()
    }


def test_the_wheel_leaves_the_samples_to_a_package_of_their_own() -> None:
    ours, samples = (
        tomllib.loads((ROOT / place / "pyproject.toml").read_text(encoding="utf-8"))
        for place in (".", "samples")
    )
    assert ours["tool"]["hatch"]["build"]["targets"]["wheel"]["exclude"] == [
        "src/driftfilter/app/assets"
    ]
    included = samples["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included == {"../src/driftfilter/app/assets": "driftfilter/app/assets"}
    assert samples["project"]["version"] == df.__version__
    assert samples["project"]["requires-python"] == ours["project"]["requires-python"]


def test_a_sample_that_is_not_installed_is_asked_for_by_its_package() -> None:
    with (
        pytest.raises(FileNotFoundError, match=r"gone\.npz comes .* install driftfilter-samples"),
        open_sample("gone.npz"),
    ):
        pass


def test_every_requirement_has_a_version_and_every_file_but_torchs_a_hash() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    wanted = {
        normal(re.split(r"[<>=;\[ ]", requirement)[0])
        for requirement in [
            *project["build-system"]["requires"],
            *project["project"]["dependencies"],
            *(each for extra in extras.values() for each in extra),
        ]
        if "python_version <" not in requirement  # the pins are of Python 3.11
    }
    constraints, hashes = pinned("constraints.txt"), pinned("hashes.txt")
    assert wanted <= set(constraints)
    assert hashes.items() <= constraints.items()
    of_docs = {normal(re.split(r"[<>=;\[ ]", each)[0]) for each in extras["docs"]}
    assert wanted - of_docs - set(hashes) == {"torch"}
    text = (ROOT / "hashes.txt").read_text(encoding="utf-8")
    assert text.count("--hash=sha256:") == len(hashes)


def test_python_3_10_has_the_same_torch() -> None:
    assert pinned(".ci/python310.txt") == {"torch": pinned("constraints.txt")["torch"]}


def test_files_of_versions_name_no_place() -> None:
    for name in ("constraints.txt", "hashes.txt"):
        assert "/" not in (ROOT / name).read_text(encoding="utf-8").replace("`make lock`", "")
