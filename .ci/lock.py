"""Write constraints.txt and hashes.txt anew: `make lock`; UPGRADE=1 for newer versions.

constraints.txt has a version for everything that a target of the Makefile installs, on any machine.
hashes.txt has those of `make setup` with the SHA-256 of the files that pip chose here, all but
torch, whose file is another one on every kind of machine.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS, HASHES = ROOT / "constraints.txt", ROOT / "hashes.txt"
BUILD = ["hatchling", "editables"]  # what an editable installation is built by
SETUP = ".[report,fast,dev]"
BESIDE = [".[docs]", "jax", "posteriors"]  # of other targets
SKIPPED = ("driftfilter", "torch")


def chosen(wanted: list[str], constraints: Path) -> list[dict[str, Any]]:
    """What pip would install on a machine that has nothing yet."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
        command += ["--ignore-installed", "--constraint", str(constraints)]
        subprocess.run([*command, "--report", str(report), *wanted], cwd=ROOT, check=True)
        found: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
    return found


def line(package: dict[str, Any], hashed: bool = False) -> str:
    """A package with its version, and the hash of its file if wanted."""
    name, version = package["metadata"]["name"], package["metadata"]["version"]
    plain = f"{name.lower().replace('_', '-')}=={version.partition('+')[0]}"
    if not hashed:
        return plain
    return f"{plain} --hash=sha256:{package['download_info']['archive_info']['hashes']['sha256']}"


def main() -> None:
    """Write both files."""
    pins = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    comments = [pin for pin in pins if pin.startswith("#")]
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "constraints.txt")
        upgrade = "--upgrade" in sys.argv
        some = [pin for pin in pins if pin.startswith("torch==") or not upgrade]
        kept.write_text("\n".join(some) + "\n", encoding="utf-8")
        setup = chosen([*BUILD, SETUP], kept)
        # Beside those of setup, with which they share an environment.
        kept.write_text("\n".join(map(line, setup)) + "\n", encoding="utf-8")
        every = chosen([*BUILD, SETUP, *BESIDE], kept)
    lines = sorted({line(each) for each in every if each["metadata"]["name"] != "driftfilter"})
    CONSTRAINTS.write_text("\n".join([*comments, *lines]) + "\n", encoding="utf-8")
    where = f"{sys.platform}, Python {sys.version_info.major}.{sys.version_info.minor}"
    head = f"# Written by `make lock` on {where}; without torch, see CONTRIBUTING.md."
    names = [each for each in setup if each["metadata"]["name"] not in SKIPPED]
    text = "\n".join([head, *sorted(line(each, hashed=True) for each in names)])
    HASHES.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
