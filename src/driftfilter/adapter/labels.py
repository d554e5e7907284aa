"""What an adapter knows of labels: which samples have taught, and what was predicted last."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from driftfilter.base.checks import require, require_count, require_finite
from driftfilter.storage.state_tensors import read_count

TAUGHT = "taught."  # in a checkpoint
WEIGHT = 1.0  # of a label, unless one is given
KEPT = 100_000  # numbers of samples that have taught, the last ones


class Taught(NamedTuple):
    """Samples counted from 0 since the stream began, those whose labels are known, and the last
    predictions; no inputs are kept.
    """

    samples: int = 0  # that have come
    numbers: Tensor | None = None  # [m], of those whose labels were learned, the last KEPT
    last: Tensor | None = None  # [n, k], log-probabilities of the last batch

    def follow(self, samples: int, predicted: Tensor | None) -> Self:
        """After a call with so many samples, and what it predicted if somebody wanted that."""
        last = None if predicted is None else predicted.detach().to("cpu", copy=True)
        return self._replace(samples=self.samples + samples, last=last)

    def note(self, numbers: object, samples: int) -> Self:
        """With the numbers of samples that are learned now; refused if one has been before, or has
        not come.
        """
        if numbers is None:
            return self
        try:
            new = torch.as_tensor(numbers).reshape(-1)
        except (TypeError, ValueError, RuntimeError):
            require(False, "numbers", numbers, f"integers of shape [{samples}]")
            raise
        whole = not new.is_floating_point() and new.dtype != torch.bool and not new.is_complex()
        found = f"{new.dtype} of shape {list(new.shape)}"
        require(whole and len(new) == samples, "numbers", found, f"integers of shape [{samples}]")
        new = new.to("cpu", torch.int64)
        come = bool((new >= 0).all() and (new < self.samples).all())
        allowed = f"of samples that have come since the stream began, 0 to {self.samples - 1}"
        require(come, "numbers", new.tolist(), allowed)
        before = new.new_empty(0) if self.numbers is None else self.numbers
        twice = new[torch.isin(new, before)].tolist() if len(before) else []
        unique = not twice and len(new.unique()) == len(new)
        allowed = "each learned once: a label that counts twice is taken for two"
        require(unique, "numbers", twice or new.tolist(), allowed)
        return self._replace(numbers=torch.cat((before, new))[-KEPT:])

    def to_tensors(self) -> dict[str, Tensor]:
        """As named tensors, if a sample has come."""
        if self.samples == 0:
            return {}
        numbers = {} if self.numbers is None else {TAUGHT + "numbers": self.numbers}
        return {TAUGHT + "samples": torch.tensor(self.samples), **numbers}

    @classmethod
    def from_tensors(cls, own: Mapping[str, Tensor]) -> Self:
        """What named tensors describe."""
        if TAUGHT + "samples" not in own:  # of an older version
            return cls()
        samples, numbers = read_count(TAUGHT + "samples", own), own.get(TAUGHT + "numbers")
        if numbers is None:
            return cls(samples)
        fits = numbers.dtype == torch.int64 and numbers.dim() == 1 and len(numbers) <= KEPT
        fits = fits and bool((numbers >= 0).all() and (numbers < samples).all())
        found, allowed = f"{numbers.dtype} {list(numbers.shape)}", f"integers below {samples}"
        require(fits, f"state {TAUGHT + 'numbers'!r}", found, allowed)
        return cls(samples, numbers.clone())


def choose_samples(log_probabilities: Tensor, count: int) -> Tensor:
    """Which samples of a batch to ask about [count], by what is predicted for them [n, k].

    One after the other the sample of the largest H(p_i) / (1 + m), m the number of those chosen
    before that are predicted to be of the same class.
    """
    n, k = log_probabilities.shape
    require_count("ask: n", count, 1)
    require(count <= n, "ask: n", count, f"at most {n}, the samples of the last batch")
    require_finite("ask: log-probabilities", log_probabilities.exp())
    entropies = torch.special.entr(log_probabilities.double().exp()).sum(-1)
    classes, chosen = log_probabilities.argmax(-1), torch.zeros(k, dtype=torch.float64)
    picked: list[int] = []
    for _ in range(count):
        scores = entropies / (1 + chosen[classes])
        scores[picked] = -1.0
        picked.append(int(scores.argmax()))
        chosen[classes[picked[-1]]] += 1
    return torch.tensor(picked)
