"""driftfilter: online test-time adaptation as Gaussian filtering of a classifier's parameters.

The public names stand in _api.py and are loaded on first use, so that ``driftfilter --help`` need
not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from driftfilter._api import *  # noqa: F403

__version__ = "0.1.0"


def _names() -> list[str]:
    return sorted(name for name in vars(import_module("driftfilter._api")) if name[0] != "_")


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return _names()
    api = import_module("driftfilter._api")
    if name.startswith("_") or not hasattr(api, name):  # or not yet, while _api is being loaded
        raise AttributeError(f"module 'driftfilter' has no attribute {name!r}")
    return getattr(api, name)


def __dir__() -> list[str]:
    return [*_names(), "__version__"]
