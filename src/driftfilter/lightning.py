"""Lightning: a callback that adapts a network of a LightningModule while it is tested or predicts.
Needs the extra ``driftfilter[lightning]``.
"""

from typing import Any, final

from lightning.pytorch import Callback, LightningModule, Trainer

from driftfilter.adapter.adapter import Adapter, adapt
from driftfilter.base.checks import require
from driftfilter.recipe import Recipe


@final
class Adapt(Callback):
    """Puts an adapter in the place of ``network`` for the time of ``trainer.test`` or ``predict``.

    ``network`` is the name of the classifier in the LightningModule, such as "model"; without it
    the one child that has parameters. ``test_step`` and ``predict_step`` get log-probabilities,
    which are valid logits, and the module is as it was when they have ended or failed. Each test or
    prediction begins at the source; ``adapter`` is that of the last one. ``recipe`` and options
    are those of ``driftfilter.adapt``.
    """

    def __init__(
        self, network: str | None = None, recipe: str | Recipe = "driftfilter", **options: Any
    ) -> None:
        self.network, self.recipe, self.options = network, recipe, options
        self.adapter: Adapter | None = None  # before the first batch of a test or prediction
        self._lent: tuple[str, Any] | None = None  # where the adapter stands, and for what

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._lend(pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._lend(pl_module)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._give_back(pl_module)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._give_back(pl_module)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._give_back(pl_module)

    def _lend(self, module: LightningModule) -> None:
        name = _find_network(module) if self.network is None else self.network
        children = dict(module.named_children())
        require(name in children, "Adapt: network", name, f"one of {sorted(children)}")
        self.adapter = adapt(children[name], self.recipe, **self.options)
        self._lent = name, children[name]
        setattr(module, name, self.adapter)

    def _give_back(self, module: LightningModule) -> None:
        if self._lent is not None:
            setattr(module, *self._lent)
            self._lent = None


def _find_network(module: LightningModule) -> str:
    found = [
        name for name, child in module.named_children() if any(True for _ in child.parameters())
    ]
    allowed = f"one of {found}, for Adapt to know which to adapt"
    require(len(found) == 1, "Adapt: network", None, allowed)
    return found[0]
