"""Names in the memory of a filter, each declared with the shape of what stands there, so that what
a file says can be held to it.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from driftfilter.base.checks import require

# By name: whether the numbers are whole, the sizes (a number, a letter that stands for one, or such
# a term as 5k+7), and the name that must stand beside it.
_FORMS: dict[str, tuple[bool, tuple[str, ...], str]] = {}
_TERM = re.compile(r"(\d*)([A-Za-z]?)(?:\+(\d+))?")


def remembered(name: str, *sizes: str, whole: bool = False, beside: str = "") -> str:
    """A name in the memory, for a tensor of these sizes; ``whole``: of integers; ``beside``: it is
    never there without another name.

    d stands for the parameters. Another letter stands for any number, the same one in all names
    that begin alike ("loss.…").
    """
    _FORMS[name] = whole, sizes, beside
    return name


def require_forms(memory: Mapping[str, Tensor], prefix: str, d: int) -> None:
    """Raise unless every tensor is of real numbers, and of the dtype and sizes that were declared
    for its name; names that nobody has declared may have any.
    """
    known: dict[str, dict[str, int]] = {}
    for name, value in memory.items():
        found = f"{list(value.shape)} {value.dtype}"
        require(not value.is_complex(), f"state {prefix + name!r}", found, "of real numbers")
        plain = name.removeprefix("teacher.")
        if plain not in _FORMS:
            continue
        whole, sizes, beside = _FORMS[plain]
        alone = beside and name.removesuffix(plain) + beside not in memory
        require(not alone, "state", f"no {prefix + beside!r}", f"complete, as it has {name!r}")
        letters = known.setdefault(plain.partition(".")[0], {"d": d})
        dtypes = (torch.int64,) if whole else (torch.float32, torch.float64)
        fits = value.dtype in dtypes and value.dim() == len(sizes)
        fits = fits and not (whole and bool((value < 0).any()))
        fits = fits and all(_fits(*pair, letters) for pair in zip(sizes, value.shape, strict=True))
        least = " >= 0" if whole else ""
        allowed = f"{' or '.join(map(str, dtypes))} [{', '.join(sizes)}]{least}, {letters}"
        require(fits, f"state {prefix + name!r}", found, allowed)


def _fits(size: str, n: int, letters: dict[str, int]) -> bool:
    """Whether a size is n, by what letters stand for; one that stood for nothing does so now."""
    term = _TERM.fullmatch(size)
    assert term is not None, size
    factor, letter, more = int(term[1] or 1), term[2], int(term[3] or 0)
    if not letter:
        return n == factor
    rest = (n - more) // factor
    return rest >= 0 and n == factor * rest + more and letters.setdefault(letter, rest) == rest
