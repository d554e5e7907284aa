"""Several settings abreast on one stream, weighed by what their predictions tell: ``df.Bank``."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor, nn
from typing_extensions import Self

from driftfilter.adapter.adapter import Adapter
from driftfilter.base.checks import require, require_count, require_finite, require_number
from driftfilter.base.inputs import Inputs
from driftfilter.filtering import Filter, FilterState
from driftfilter.storage.state_tensors import from_tensors, to_tensors

_NAMES = ("weights", "predicted", "entropies", "squares", "samples")
_LEAST = -100.0  # of log-probabilities, below which a class is as good as impossible
_SPREAD = 4.0  # of logits whose mutual information is compared


class BankState(NamedTuple):
    """What a bank knows of its m members; an immutable value. Sums fade over the window."""

    weights: Tensor  # [m], they sum to 1
    predicted: Tensor  # [m, k], sums of p at the common spread
    entropies: Tensor  # [m], sums of H(p)
    squares: Tensor  # [m], sums over samples of the mean square deviation of log-probabilities
    samples: Tensor  # [], how many are in the sums

    @classmethod
    def start(cls, members: int, classes: int) -> Self:
        """Equal weights, and nothing seen."""
        zeros = torch.zeros(members, classes, dtype=torch.float64)
        equal, none = zeros.new_full((members,), 1 / members), zeros.new_zeros(members)
        return cls(equal, zeros, none, none, zeros.new_zeros(()))

    @property
    def information(self) -> Tensor:
        """I = H(mean p) - mean H(p) of each member in nats [m]; 0 before the first sample."""
        samples = self.samples.clamp_min(1e-300)
        marginal = torch.special.entr(self.predicted / samples).sum(-1)
        found: Tensor = (marginal - self.entropies / samples).clamp_min(0)
        return found


def add_predictions(before: BankState, logs: Tensor, fading: float) -> BankState:
    """The sums, faded, with the log-probabilities [m, n, k] of a batch; weights stay."""
    deviations = logs.clamp_min(_LEAST) - logs.clamp_min(_LEAST).mean(-1, keepdim=True)
    n = logs.shape[1]
    squares = fading * before.squares + deviations.square().mean(-1).sum(-1)
    samples = fading * before.samples + n
    scale = _SPREAD * (squares / samples).clamp_min(1e-12).rsqrt()
    p = (scale[:, None, None] * deviations).softmax(-1)
    return before._replace(
        predicted=fading * before.predicted + p.sum(1),
        entropies=fading * before.entropies + torch.special.entr(p).sum((1, 2)),
        squares=squares,
        samples=samples,
    )


@final
class Bank(nn.Module):
    """Several adapters, or filters with their states, on the same stream; what is predicted is
    theirs, mixed by weight or of the one with the largest.

    Weights are those of a hidden Markov chain over members. After a batch of n samples

        w ∝ ((1 - e) w + e / m) · exp(rate · (n / window) · I),   e = 1 - (1 - switch)ⁿ,

    I_i = H(mean p) - mean H(p) the mutual information of member i's predictions with the inputs
    over the last ``window`` samples: sure of each sample, and of different ones. It is that of
    p = softmax(4 f / σ), f the member's log-probabilities and σ² the mean square of their
    deviations from their mean over classes, so that a temperature counts for nothing: a setting
    that says the same with less doubt is not a better one. ``switch`` is how often, by sample,
    another member may become the best. (Neither the energy of a batch nor its Gibbs evidence
    enters: both fall as accuracy rises.)

    It costs as much as its members. If one of them fails, all are as they were. ``state_dict`` and
    ``load_state_dict`` save and resume it, members included.

    >>> import torch, driftfilter as df
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8),
    ...                             torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()
    >>> bank = df.Bank([df.adapt(model, "opgd", beta=beta) for beta in (1.0, 2.0, 4.0)])
    >>> bank(torch.randn(16, 4)).shape  # log-probabilities
    torch.Size([16, 3])
    """

    def __init__(
        self,
        members: Sequence[Adapter | tuple[Filter, FilterState]],
        window: int = 1000,
        rate: float = 200.0,
        switch: float = 1e-4,
        predict: Literal["mix", "pick"] = "mix",
    ) -> None:
        super().__init__()
        require_count("Bank: window", window, 1)
        require_number("Bank: rate", rate, 0, float("inf"))
        require_number("Bank: switch", switch, 0, 1, open_high=True)
        require(predict in ("mix", "pick"), "Bank: predict", predict, "'mix' or 'pick'")
        some = isinstance(members, Iterable)
        given = list(members) if some else []
        found = given if some else type(members).__name__
        require(len(given) > 0, "Bank: members", found, "one adapter or filter, or more")
        adapters = [id(member) for member in given if isinstance(member, Adapter)]
        apart, allowed = len(set(adapters)) == len(adapters), "each there once: it would step twice"
        require(apart, "Bank: members", "the same adapter twice", allowed)
        self.members = nn.ModuleList(_as_member(member) for member in given)
        self.window, self.rate, self.switch, self.rule = window, rate, switch, predict
        self._now: BankState | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Adapt every member to a batch and predict it: log-probabilities [n, k]."""
        with self._whole():
            each = [member(*args, **kwargs) for member in self.members]
            self.note(each)
        return self._join(each, self.weights)

    def note(self, each: list[Tensor]) -> None:
        """Weigh the members by what each has predicted for a batch, log-probabilities [n, k]."""
        self._now = self._follow(each)

    def predict(self, *args: Any, **kwargs: Any) -> Tensor:
        """Log-probabilities [n, k] of a batch by the weights as they stand; changes nothing."""
        asked = [member.predict(*args, **kwargs) for member in self.members]  # type: ignore[operator]
        return self._join([prediction.log_probabilities for prediction in asked], self.weights)

    def reset(self) -> None:
        """Back to the source, all members, and to equal weights."""
        for member in self.members:
            member.reset()  # type: ignore[operator]
        self._now = None

    @property
    def weights(self) -> Tensor:
        """w [m]."""
        if self._now is None:
            return torch.full((len(self.members),), 1 / len(self.members), dtype=torch.float64)
        return self._now.weights.clone()  # users may write

    @property
    def information(self) -> Tensor:
        """I of each member over the window, in nats [m]; 0 before the first batch."""
        return torch.zeros_like(self.weights) if self._now is None else self._now.information

    @property
    def best(self) -> int:
        """The place of the member with the largest weight."""
        return int(self.weights.argmax())

    def extra_repr(self) -> str:
        return f"window={self.window}, rate={self.rate}, switch={self.switch}, {self.rule}"

    def _join(self, each: list[Tensor], weights: Tensor) -> Tensor:
        if self.rule == "pick":
            return each[int(weights.argmax())]
        logs = weights.to(each[0]).log()[:, None, None]
        return torch.logsumexp(torch.stack(each) + logs, 0)

    def _follow(self, each: list[Tensor]) -> BankState:
        """What is known after predictions [n, k] of each member."""
        shapes = {tuple(own.shape) for own in each}
        fits = len(shapes) == 1 and all(len(own) == 2 and own[0] > 0 for own in shapes)
        require(fits, "Bank: predictions", sorted(shapes), "of one shape [n, k], n >= 1")
        m, allowed = len(self.members), "as many as there are members"
        require(len(each) == m, "Bank: predictions", f"{len(each)} of them", f"{m}, {allowed}")
        logs = torch.stack([own.detach().to("cpu", torch.float64) for own in each])
        _, n, k = logs.shape
        before = self._now or BankState.start(len(each), k)
        allowed = f"of {before.predicted.shape[1]} classes, as before"
        require(before.predicted.shape[1] == k, "Bank: predictions", f"{k} classes", allowed)
        sums = add_predictions(before, logs, max(0.0, 1 - n / self.window))
        changed = 1 - (1 - self.switch) ** n
        prior = (1 - changed) * before.weights + changed / len(each)
        told = self.rate * min(1.0, n / self.window) * sums.information
        weights = (prior.log() + told).softmax(0)
        require_finite("Bank: weights", weights)
        return sums._replace(weights=weights)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """All members change, or none."""
        before = [member._now for member in self.members]
        try:
            yield
        except BaseException:
            for member, now in zip(self.members, before, strict=True):
                member._now = now
            raise

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module; if a member refuses its part, all are as they were."""
        own = self._now
        with self._whole():
            try:
                return super().load_state_dict(*args, **kwargs)
            except BaseException:
                self._now = own
                raise

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        if self._now is not None:
            for name, value in self._now._asdict().items():
                destination[f"{prefix}bank.{name}"] = value.clone()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *others: Any, **named: Any
    ) -> None:
        own: dict[str, Any] = {name: state_dict.get(f"{prefix}bank.{name}") for name in _NAMES}
        if all(value is None for value in own.values()):
            self._now = None
            return
        m, predicted = len(self.members), own["predicted"]
        k = predicted.shape[-1] if isinstance(predicted, Tensor) and predicted.dim() == 2 else 0
        for name, shape in zip(_NAMES, ((m,), (m, k), (m,), (m,), ()), strict=True):
            value = own[name]
            fits = isinstance(value, Tensor) and tuple(value.shape) == shape
            fits = fits and value.dtype == torch.float64 and bool((value >= 0).all())
            allowed = f"float64 {list(shape)} >= 0"
            require(fits and bool(value.isfinite().all()), f"state 'bank.{name}'", value, allowed)
        total = float(own["weights"].sum())
        require(abs(total - 1) < 1e-6, "state 'bank.weights'", f"a sum of {total}", "a sum of 1")
        self._now = BankState(**{name: value.clone() for name, value in own.items()})


@final
class _FilterMember(nn.Module):
    """A filter with its state, called as an adapter is."""

    def __init__(self, filt: Filter, state: FilterState) -> None:
        super().__init__()
        self.filter, self._now, self._start = filt, state, state

    def forward(self, inputs: Inputs) -> Tensor:
        """Adapt to a batch and predict it."""
        self._now, prediction, _ = self.filter.step(self._now, inputs)
        return prediction.log_probabilities

    def predict(self, inputs: Inputs) -> Any:
        """Predict a batch; changes nothing."""
        return self.filter.predict(self._now, inputs)

    def reset(self) -> None:
        """Back to the state it came with."""
        self._now = self._start

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        own = to_tensors(self._now)
        destination.update({prefix + name: value for name, value in own.items()})

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *others: Any, **named: Any
    ) -> None:
        own = {
            name.removeprefix(prefix): value
            for name, value in state_dict.items()
            if name.startswith(prefix)
        }
        self._now = from_tensors(own, self._start)


def _as_member(member: Any) -> nn.Module:
    if isinstance(member, Adapter):
        return member
    pair = isinstance(member, tuple) and len(member) == 2
    fits = pair and isinstance(member[0], Filter) and isinstance(member[1], FilterState)
    require(fits, "Bank: members", type(member).__name__, "adapters, or pairs (Filter, its state)")
    return _FilterMember(*member)
