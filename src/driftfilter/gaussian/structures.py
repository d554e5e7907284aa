"""The one table of covariance structures by name, for ``Gaussian(structure=…)`` and ``Laplace``.

A structure of your own is usable by name as soon as it stands here: ``STRUCTURES["mine"] = Mine``.
"""

from driftfilter.gaussian.covariance import Covariance
from driftfilter.gaussian.diagonal import Diagonal
from driftfilter.gaussian.full import Full
from driftfilter.gaussian.kronecker import Kronecker
from driftfilter.gaussian.lowrank import LowRank

STRUCTURES: dict[str, type[Covariance]] = {
    "full": Full,
    "diagonal": Diagonal,
    "low_rank": LowRank,
    "kronecker": Kronecker,
}
