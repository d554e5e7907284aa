"""driftfilter: online test-time adaptation as Gaussian filtering of a classifier's parameters.

The public names are listed in _api.py and loaded on first use, so that ``driftfilter --help`` need
not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from driftfilter._api import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    api = import_module("driftfilter._api")
    names = getattr(api, "__all__", ())  # none while _api is still being loaded
    if name == "__all__":
        return names
    if name in names:
        return getattr(api, name)
    raise AttributeError(f"module 'driftfilter' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*import_module("driftfilter._api").__all__, "__version__"]
