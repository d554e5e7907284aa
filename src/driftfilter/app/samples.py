"""Images and networks to try things with; they come with a package of their own."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path


@contextmanager
def open_sample(name: str) -> Iterator[Path]:
    """The path of a file of driftfilter-samples; an error says how to install it."""
    place = files("driftfilter.app") / "assets" / name
    if not place.is_file():
        raise FileNotFoundError(
            f"{name} comes with the package driftfilter-samples, which is not installed: pip "
            "install driftfilter-samples (in a checkout: pip install ./samples)"
        )
    with as_file(place) as path:
        yield path
