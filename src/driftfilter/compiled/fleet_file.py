"""The file of a fleet, read with care: kernels trust the sizes and numbers that they are given."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from driftfilter.base.checks import require, require_finite, require_positive, require_squarable
from driftfilter.compiled.fleet_opinions import SUMS, FleetOpinions
from driftfilter.compiled.scan import find_limits
from driftfilter.storage.sealed import unseal


def read(
    path: Path, filt: str, mine: Mapping[str, Tensor]
) -> tuple[list[str | int], dict[str, Tensor]]:
    """Names of streams and tensors by name, known to fit a filter, the tensors of a fleet of it
    (but for their number of rows) and each other.
    """
    header, tensors = unseal(path.read_bytes())
    require(header.get("fleet") == filt, "its filter", header.get("fleet"), filt)
    names = require_plain("its streams", header.get("streams"))
    found = {name: _find(name, tensors, len(names), like) for name, like in mine.items()}
    if SUMS in found:
        FleetOpinions.from_tensors(found)
    require_squarable("its 'mean'", found["mean"])
    require_finite("its 'low'", found["low"])
    require(bool((found["step"] >= 0).all()), "its 'step'", found["step"][:3], "numbers >= 0")
    return names, {**found, "low": torch.minimum(found["low"], _find_least(found["values"]))}


def require_plain(field: str, names: Any) -> list[str | int]:
    """Names of streams that a file can hold, each of them once."""
    plain = isinstance(names, list) and all(type(name) in (str, int) for name in names)
    require(plain, field, names, "named by texts or whole numbers")
    require(len({*names}) == len(names), field, f"{len(names)} names", "named once each")
    return names  # type: ignore[no-any-return]


def _find(name: str, tensors: Mapping[str, Tensor], rows: int, like: Tensor) -> Tensor:
    require(name in tensors, "its tensors", sorted(tensors), f"complete, with {name!r}")
    found, shape = tensors[name], [rows, *like.shape[1:]]
    require(
        list(found.shape) == shape and found.dtype == like.dtype,
        f"its {name!r}",
        f"{list(found.shape)} {found.dtype}",
        f"{shape} {like.dtype}, a row for each of the {rows} streams",
    )
    return found


def _find_least(values: Tensor) -> Tensor:
    """The least eigenvalue [S] of each covariance, [S, d, d] or variances [S, d]; refused unless
    they are symmetric, and positive but for rounding.

    Kernels would trust a lower bound that promises more.
    """
    field, bound = "its 'values'", find_limits(values.dtype)[2]
    variances = values.diagonal(dim1=-2, dim2=-1) if values.dim() == 3 else values
    require_positive(field, variances)
    require_finite(field, values)
    require(bool((variances <= bound).all()), field, "a larger variance", f"up to {bound:.3g}")
    if values.dim() == 2:
        return values.new_zeros(len(values), dtype=torch.float64)
    spectrum = torch.linalg.eigvalsh(values.double())
    least: Tensor = spectrum[:, 0]
    most = spectrum[:, -1]
    rounding = 8 * values.shape[-1] * torch.finfo(values.dtype).eps * most
    asymmetry = (values - values.mT).abs().flatten(1).amax(-1)
    require(bool((asymmetry <= rounding).all()), field, "asymmetric ones", "covariances")
    allowed = "covariances, positive in every direction"
    require(bool((least > -rounding).all()), field, f"an eigenvalue {least.min():g}", allowed)
    return least
