"""Every loss of the table against a plain formula in NumPy, its derivatives against finite
differences of that formula.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from driftfilter import VARIANTS, Consistency, MarginalEntropy
from driftfilter.model.expansion import Expansion
from driftfilter.model.losses import (
    ConjugatePseudoLabel,
    Custom,
    Entropy,
    GeneralizedCrossEntropy,
    InformationMaximization,
    Loss,
    MarginalLikelihood,
    PseudoLabel,
    RunningInformation,
    Softened,
    SoftLikelihoodRatio,
    Sum,
)
from driftfilter.model.weighting import Memory
from small import refuses

Array: TypeAlias = npt.NDArray[np.float64]

# ------------------------------------------------------------------ plain formulas: logits [v, ...,
# n, k] -> [..., n]


class Fixed(NamedTuple):
    anchor: Array  # [n, k], clean logits at the prior mean, where targets come from
    weights: Array  # [n]
    means: Array  # like the logits: where mean predictions are taken


def logsumexp(x: Array) -> Array:
    top = x.max(-1, keepdims=True)
    return np.asarray(top + np.log(np.exp(x - top).sum(-1, keepdims=True)))


def log_p(x: Array) -> Array:
    return x - logsumexp(x)


def entropy(x: Array) -> Array:
    return -np.asarray((np.exp(log_p(x)) * log_p(x)).sum(-1))


def soft_likelihood_ratio(loss: SoftLikelihoodRatio, x: Array) -> Array:
    """log p / (1 - p) = f_c - log Σ_{j≠c} exp f_j; below a ceiling as ROID's code has it."""
    if loss.ceiling < 1:
        p = np.minimum(np.exp(log_p(x)), loss.ceiling)
        return -np.asarray((p * np.log(p / (1 - p) + 1e-5)).sum(-1))
    others = [logsumexp(np.delete(x, c, -1))[..., 0] for c in range(x.shape[-1])]
    return -np.asarray((np.exp(log_p(x)) * (x - np.stack(others, -1))).sum(-1))


def cross_entropy(x: Array, anchor: Array) -> Array:
    return -np.asarray((hard(anchor) * log_p(x)).sum(-1))


def hard(anchor: Array) -> Array:
    return np.asarray(np.eye(anchor.shape[-1])[anchor.argmax(-1)])


def information_maximization(x: Array, fixed: Fixed) -> Array:
    """H(p_i) + Σ p_i log p̄, p̄ the weighted mean prediction."""
    shares = (fixed.weights / fixed.weights.sum())[:, None]
    mean = (shares * np.exp(log_p(fixed.means[0]))).sum(-2, keepdims=True)
    return np.asarray(entropy(x[0]) + (np.exp(log_p(x[0])) * np.log(mean)).sum(-1))


def spread_of(x: Array) -> float:
    """Mean square of the deviations from the mean over classes."""
    return float(((x - x.mean(-1, keepdims=True)) ** 2).mean())


def sharpness(loss: RunningInformation, square: float) -> float:
    sharp = loss.spread / max(square, 1e-300) ** 0.5
    return min(8.0, max(loss.least, sharp)) if loss.spread else 1.0


def running_information(loss: RunningInformation, x: Array, fixed: Fixed) -> Array:
    """-KL(softmax(s f) ‖ m), m and s of a first batch: the anchor, and uniform before it."""
    s, share = sharpness(loss, spread_of(fixed.anchor)), min(1.0, len(fixed.anchor) / loss.window)
    mean = (1 - share) / x.shape[-1] + share * np.exp(log_p(s * fixed.anchor)).mean(0)
    logp = log_p(s * x[0])
    return np.asarray((np.exp(logp) * (np.log(mean) - logp)).sum(-1))


def conjugate(loss: ConjugatePseudoLabel, x: Array) -> Array:
    p = np.exp(log_p(x))
    softmax_metric = p[..., None] * (np.eye(p.shape[-1]) - p[..., None, :])
    y = np.linalg.solve(np.eye(p.shape[-1]) + loss.epsilon * softmax_metric, p[..., None])[..., 0]
    return np.asarray((y * (loss.epsilon * (1 - p) - log_p(x))).sum(-1))  # Σy = 1


def consistency(loss: Consistency, x: Array, fixed: Fixed) -> Array:
    t = hard(fixed.anchor) if loss.target == "hard" else np.exp(log_p(fixed.anchor))
    logp, logt = log_p(x[1:] if loss.copies else x), np.log(np.maximum(t, 1e-4))
    if loss.divergence == "reverse":
        logt = log_p(fixed.anchor)
    if loss.target == "moving":
        logt, t = log_p(x[0]), np.exp(log_p(x[0]))
    p = np.exp(logp)
    forward, backward = -(t * logp).sum(-1), -(p * logt).sum(-1)
    values = {
        "brier": ((p - t) ** 2).sum(-1),
        "cross_entropy": forward,
        "symmetric": (forward + backward) / 2,
        "reverse": backward,
    }
    return np.asarray(values[loss.divergence].mean(0))


def marginal_entropy(x: Array, fixed: Fixed) -> Array:
    return -np.asarray(
        (np.exp(log_p(x[1:])).mean(0) * np.log(np.exp(log_p(fixed.means[1:])).mean(0))).sum(-1)
    )


def opinion_entropy(x: Array, anchor: Array) -> Array:
    """Shares of the classes and of not knowing, in the direction of x at the length of the
    anchor.
    """
    length = np.linalg.norm(x, axis=-1, keepdims=True)
    f = np.linalg.norm(anchor, axis=-1, keepdims=True) * x / np.where(length > 0, length, 1.0)
    total = np.exp(f).sum(-1, keepdims=True) + f.shape[-1]
    shares = np.concatenate((np.exp(f), np.full_like(total, f.shape[-1])), -1) / total + 1e-7
    return -np.asarray((shares * np.log(shares)).sum(-1))


def weighted_sum(loss: Sum, x: Array, fixed: Fixed) -> Array:
    total, start = np.zeros(x.shape[1:-1]), 1
    for term, coefficient in zip(loss.terms, loss.coefficients, strict=True):
        seen = [[0, *range(start, start + term.copies)]]
        start += term.copies
        if loss.each_view and term.copies == 0:
            seen = [[view] for view in range(len(x))]
        for views in seen:
            formula = FORMULAS[type(term).__name__](
                term, x[views], fixed._replace(means=fixed.means[views])
            )
            total += coefficient / len(seen) * formula
    return total


FORMULAS: dict[str, Callable[[Any, Array, Fixed], Array]] = {
    "Entropy": lambda loss, x, fixed: entropy(x[0]),
    "SoftLikelihoodRatio": lambda loss, x, fixed: soft_likelihood_ratio(loss, x[0]),
    "PseudoLabel": lambda loss, x, fixed: (
        cross_entropy(x[0], fixed.anchor) * (np.exp(log_p(fixed.anchor)).max(-1) >= loss.threshold)
    ),
    "GeneralizedCrossEntropy": lambda loss, x, fixed: (
        (1 - np.exp(-cross_entropy(x[0], fixed.anchor)) ** loss.q) / loss.q
    ),
    "InformationMaximization": lambda loss, x, fixed: information_maximization(x, fixed),
    "RunningInformation": running_information,
    "ConjugatePseudoLabel": lambda loss, x, fixed: conjugate(loss, x[0]),
    "OpinionEntropy": lambda loss, x, fixed: opinion_entropy(x[0], fixed.anchor),
    "MarginalLikelihood": lambda loss, x, fixed: -logsumexp(x[0])[..., 0],
    "Consistency": consistency,
    "MarginalEntropy": lambda loss, x, fixed: marginal_entropy(x, fixed),
    "Sum": weighted_sum,
    "Softened": lambda loss, x, fixed: FORMULAS[type(loss.loss).__name__](
        loss.loss,
        x / loss.temperature,
        Fixed(fixed.anchor / loss.temperature, fixed.weights, fixed.means / loss.temperature),
    ),
}
OTHERS: list[Loss] = [
    Softened(PseudoLabel(), 3.0),
    Softened(Sum((SoftLikelihoodRatio(ceiling=0.9), InformationMaximization()), (1.0, 0.5))),
    Softened(ConjugatePseudoLabel(), 0.5),
    RunningInformation(window=4, spread=0.0),
    RunningInformation(window=1, spread=1.5),
    RunningInformation(window=4, spread=0.4, least=0.25),
    Sum((RunningInformation(), Entropy()), (0.5, 2.0)),
    PseudoLabel(threshold=0.6),
    GeneralizedCrossEntropy(q=1.0),
    GeneralizedCrossEntropy(q=0.1),
    ConjugatePseudoLabel(epsilon=0.0),
    ConjugatePseudoLabel(epsilon=8.0),
    *[Consistency(divergence="symmetric", target=target, copies=2) for target in ("hard", "soft")],
    SoftLikelihoodRatio(ceiling=0.7),
    *[Consistency(divergence="symmetric", target="moving", copies=copies) for copies in (1, 3)],
    Consistency(None, "cross_entropy", "soft", copies=0),
    Consistency(None, "reverse", "soft", copies=0),
    Consistency(divergence="reverse", target="soft", copies=2),
    Consistency(None, "symmetric", "hard", copies=0),
    Sum((SoftLikelihoodRatio(ceiling=0.9), Consistency(divergence="symmetric", target="moving"))),
    Sum(
        (Entropy(), InformationMaximization(), Consistency(copies=2)),
        (0.5, 2.0, 1.5),
        each_view=True,
    ),
    Sum(
        (
            Sum((SoftLikelihoodRatio(), Entropy())),
            Consistency(divergence="symmetric", target="moving"),
        ),
        each_view=True,
    ),
    MarginalEntropy(copies=3),
    Sum((Consistency(copies=2), Entropy(), MarginalEntropy(copies=2)), (0.5, 2.0, 1.5)),
    Sum(
        (
            Sum((Entropy(), Consistency()), (0.3, 0.7)),
            Sum((PseudoLabel(), MarginalLikelihood())),
            InformationMaximization(),
        )
    ),
]
# Of features or source data: test_batch_losses.py.
ELSEWHERE = ("MomentAlignment", "Contrast", "CentroidLabel", "SourceReplay")
TABLE = [cls() for name, cls in VARIANTS["loss"].items() if name not in ELSEWHERE]
every_loss = pytest.mark.parametrize("loss", [*TABLE, *OTHERS], ids=repr)


def test_every_loss_of_the_table_has_a_plain_formula() -> None:
    assert set(FORMULAS) == set(VARIANTS["loss"]) - set(ELSEWHERE)


# ------------------------------------------------------------------ logits to look at


class Case:
    """Logits [v, n, k] of every view, the clean logits at the prior mean, and weights."""

    def __init__(self, loss: Loss, kind: str, n: int, k: int) -> None:
        rng = np.random.default_rng(1000 * n + k)
        self.loss, self.weights = loss, rng.uniform(0.5, 2.0, n)
        shape = (1 + loss.copies, n, k)
        self.logits: Array = rng.normal(0, 2, shape)
        self.anchor: Array = self.logits[0] + rng.normal(
            0, 2, (n, k)
        )  # targets may differ from the predictions
        if kind == "saturated":
            self.logits = 50.0 * rng.choice([-1.0, 1.0], shape) + rng.normal(0, 1, shape)
        if kind == "confident":
            self.logits *= 6.0
        if kind == "tied":
            self.logits = np.round(rng.uniform(-1, 1, shape))
            self.logits[:, 0] = 0.0
            self.anchor = self.logits[0]

    def expand(self, dtype: torch.dtype = torch.float64) -> Expansion:
        targets = self.loss.targets(torch.tensor(self.anchor, dtype=dtype))
        return self.loss.expand(
            torch.tensor(self.logits, dtype=dtype), targets, torch.tensor(self.weights, dtype=dtype)
        )

    def plain(self, logits: Array) -> Array:
        """The formula at other logits, a mean prediction moving along."""
        fixed = Fixed(self.anchor, self.weights, logits)
        return FORMULAS[type(self.loss).__name__](self.loss, logits, fixed)


KINDS = ("random", "confident", "saturated", "tied")
cases = pytest.mark.parametrize(
    ("kind", "n", "k"), [(kind, n, k) for kind in KINDS for n, k in ((6, 2), (1, 3), (2, 10))]
)


def derivatives(expansion: Expansion) -> tuple[Tensor, Tensor, Tensor]:
    return expansion.value, expansion.gradient, expansion.hessian()


STEPS = np.array([-2.0, -1.0, 1.0, 2.0])
SLOPE = np.array([1 / 12, -2 / 3, 2 / 3, -1 / 12])  # central first differences, error O(h⁴)
BEND = np.array(
    [-1 / 12, 4 / 3, 4 / 3, -1 / 12]
)  # central second differences, less the middle point


@every_loss
@cases
def test_value_is_the_plain_formula(loss: Loss, kind: str, n: int, k: int) -> None:
    case = Case(loss, kind, n, k)
    value = case.expand().value
    assert value.shape == (1 + loss.copies, n)
    np.testing.assert_allclose(
        value.sum(0).numpy(), case.plain(case.logits), rtol=1e-11, atol=1e-11
    )


@every_loss
@cases
def test_gradient_is_that_of_the_batch_loss(loss: Loss, kind: str, n: int, k: int) -> None:
    """Also where samples or views are coupled through a mean prediction, which moves here: the
    surrogates are exact.
    """
    case, h = Case(loss, kind, n, k), 1e-3
    # [v, moves, n, k].
    units = np.eye(case.logits.size).reshape(-1, *case.logits.shape).swapaxes(0, 1)
    moved = case.logits[:, None, None] + h * STEPS[:, None, None] * units[:, :, None]
    expected = (case.plain(moved) @ case.weights @ SLOPE / h).reshape(case.logits.shape)
    gradient = case.weights[:, None] * case.expand().gradient.numpy()
    np.testing.assert_allclose(gradient, expected, rtol=1e-9, atol=1e-9)


@every_loss
@cases
def test_hessian_is_the_block_of_each_sample(loss: Loss, kind: str, n: int, k: int) -> None:
    """The block of the batch loss's Hessian for one view of one sample, a mean prediction moving
    along.
    """
    case = Case(loss, kind, n, k)
    # RunningInformation multiplies logits that hardly differ, by up to 8; directions of short
    # logits turn fast.
    fast = kind == "tied" and "RunningInformation" in repr(loss)
    h = 1e-3 if fast or "OpinionEntropy" in repr(loss) else 4e-3
    hessian, units = case.expand().hessian().numpy(), np.eye(k)
    assert hessian.shape == (*case.logits.shape, k)
    directions = np.stack((units[:, None] + units, units[:, None] - units))[
        :, :, :, None
    ]  # e_i ± e_j
    for view, sample in np.ndindex(*hessian.shape[:2]):
        moved = np.tile(case.logits[:, None, None, None, None], (1, 2, k, k, 5, 1, 1))
        moved[view, :, :, :, :4, sample] += h * STEPS[:, None] * directions
        # [±, i, j, moves and the middle].
        batch = case.plain(moved) @ case.weights / case.weights[sample]
        plus, minus = ((batch[..., :4] - batch[..., 4:]) @ BEND) / h**2
        np.testing.assert_allclose(hessian[view, sample], (plus - minus) / 4, rtol=1e-7, atol=2e-8)


@every_loss
@cases
def test_root_squared_is_the_positive_part_of_the_hessian(
    loss: Loss, kind: str, n: int, k: int
) -> None:
    expansion = Case(loss, kind, n, k).expand()
    values, vectors = np.linalg.eigh(expansion.hessian().numpy())
    positive = np.einsum("...ij,...j,...kj->...ik", vectors, np.maximum(values, 0), vectors)
    root = expansion.root().numpy()
    np.testing.assert_allclose(root @ root.swapaxes(-1, -2), positive, rtol=1e-10, atol=1e-13)


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [50.0, 200.0, 1e5, 1e30])
def test_finite_and_blind_to_a_shift_at_any_logits(
    loss: Loss, dtype: torch.dtype, size: float
) -> None:
    unit = torch.eye(5, dtype=dtype)[0]
    patterns = [
        0 * unit,
        unit,
        -unit,
        unit - unit.roll(1),
        unit + unit.roll(1),
        0 * unit + 1,
        0 * unit - 1,
    ]
    logits = size * torch.stack(patterns)
    views = torch.stack([logits.roll(view, 0) for view in range(1 + loss.copies)])
    expansion = loss.expand(views, loss.targets(logits.roll(2, 0)), logits.new_ones(len(logits)))
    for values in (expansion.value, expansion.gradient, expansion.hessian(), expansion.root()):
        assert values.dtype == dtype
        assert values.isfinite().all()
    if not any(name in repr(loss) for name in ("MarginalLikelihood", "OpinionEntropy")):
        limit = 1e-5 if dtype == torch.float32 else 1e-12
        for values in (expansion.gradient, expansion.hessian()):
            assert values.sum(-1).abs().max() < limit * max(1.0, values.abs().max().item())


@every_loss
@pytest.mark.parametrize("kind", KINDS)
def test_float32_agrees_with_float64(loss: Loss, kind: str) -> None:
    case = Case(loss, kind, 4, 3)
    single, double = case.expand(torch.float32), case.expand()
    torch.testing.assert_close(
        derivatives(single), derivatives(double), rtol=2e-5, atol=2e-5, check_dtype=False
    )


@every_loss
@pytest.mark.parametrize("k", [2, 3])
def test_leading_dimensions_are_a_loop(loss: Loss, k: int) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(
        1 + loss.copies, 5, 4, k, generator=generator, dtype=torch.float64
    )  # [v, m, n, k]
    targets, weights = (
        loss.targets(torch.randn(4, k, generator=generator, dtype=torch.float64)),
        torch.rand(4).double(),
    )
    together = loss.expand(logits, targets, weights)
    squared = together.root() @ together.root().mT
    for m in range(5):
        alone = loss.expand(logits[:, m], targets, weights)
        torch.testing.assert_close(
            tuple(part[:, m] for part in (*derivatives(together), squared)),
            (*derivatives(alone), alone.root() @ alone.root().mT),
        )


# ------------------------------------------------------------------ closed forms of single losses


def binary(loss: Loss, f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ℓ, ℓ' and ℓ'' in f = f_1 - f_0."""
    logits = torch.stack((torch.zeros_like(f), f), -1)
    expansion = loss.expand(logits[None], loss.targets(logits), torch.ones_like(f))
    return expansion.value[0], expansion.gradient[0, :, 1], expansion.hessian()[0, :, 1, 1]


def test_binary_entropy() -> None:
    f = torch.linspace(-60, 60, 2000, dtype=torch.float64)
    p = f.sigmoid()
    s = p * (-f).sigmoid()
    value, first, second = binary(Entropy(), f)
    torch.testing.assert_close(
        value, torch.nn.functional.softplus(f, threshold=1e9) - f * p, rtol=1e-12, atol=1e-13
    )
    torch.testing.assert_close(first, -f * s, rtol=1e-9, atol=1e-30)
    torch.testing.assert_close(second, -s * (1 + f * (1 - 2 * p)), rtol=1e-12, atol=1e-15)
    negative = torch.tensor([0.0, 1.5434, -1.5434], dtype=torch.float64)
    assert (binary(Entropy(), negative)[2] < 0).all()
    assert (
        binary(Entropy(), torch.tensor([1.5435, -1.5435, 5.0], dtype=torch.float64))[2] > 0
    ).all()


def test_binary_soft_likelihood_ratio() -> None:
    f = torch.linspace(-300, 300, 2001, dtype=torch.float64)
    p = f.sigmoid()
    s = p * (-f).sigmoid()
    value, first, second = binary(SoftLikelihoodRatio(), f)
    torch.testing.assert_close(
        (value, first), (-f * torch.tanh(f / 2), -(2 * p - 1) - 2 * f * s), rtol=1e-12, atol=1e-13
    )
    torch.testing.assert_close(second, -2 * s * (2 + f * (1 - 2 * p)), rtol=1e-12, atol=1e-14)


def test_conjugate_of_cross_entropy_is_the_entropy() -> None:
    case = Case(ConjugatePseudoLabel(epsilon=0.0), "confident", 5, 4)
    conjugated, plain = case.expand(), Case(Entropy(), "confident", 5, 4).expand()
    torch.testing.assert_close(derivatives(conjugated), derivatives(plain), rtol=1e-12, atol=1e-14)


def test_conjugate_at_a_large_epsilon_keeps_its_digits() -> None:
    """ε -> ∞ at fixed p: y -> 1/k for every class, so that the gradient tends to ε times that of
    mean(1 - p).
    """
    logits = torch.tensor([[[0.3, -1.0, 0.4]]], dtype=torch.float64)
    value = ConjugatePseudoLabel(epsilon=1e12).expand(logits, None, torch.ones(1)).value
    torch.testing.assert_close(
        value / 1e12, torch.tensor([[2 / 3]], dtype=torch.float64), rtol=1e-11, atol=0
    )


@pytest.mark.parametrize("q", [1e-3, 1e-6, 1e-12])
def test_generalized_cross_entropy_tends_to_cross_entropy(q: float) -> None:
    limit, general = (
        Case(PseudoLabel(), "random", 5, 4).expand(),
        Case(GeneralizedCrossEntropy(q=q), "random", 5, 4).expand(),
    )
    torch.testing.assert_close(
        derivatives(general), derivatives(limit), rtol=20 * q, atol=20 * q + 1e-14
    )


def test_information_maximization_is_minus_the_mutual_information_and_constant_alone() -> None:
    logits = torch.tensor([[[30.0, 0.0], [0.0, 30.0]]], dtype=torch.float64)
    expansion = InformationMaximization().expand(logits, None, torch.ones(2))
    torch.testing.assert_close(
        expansion.value.mean(), -torch.tensor(2.0, dtype=torch.float64).log(), rtol=1e-9, atol=0
    )
    alone = InformationMaximization().expand(
        torch.randn(1, 1, 4, dtype=torch.float64), None, torch.ones(1)
    )
    assert torch.cat((alone.value, alone.gradient[0]), 1).abs().max() < 1e-15
    assert InformationMaximization().minimum == 2


def test_samples_without_a_weight_do_not_enter_the_mean_prediction() -> None:
    logits = torch.randn(1, 6, 3, dtype=torch.float64)
    weights = torch.tensor([1.0, 0.0, 2.0, 0.0, 1.0, 3.0], dtype=torch.float64)
    kept = weights > 0
    whole, part = (
        InformationMaximization().expand(x, None, w)
        for x, w in ((logits, weights), (logits[:, kept], weights[kept]))
    )
    torch.testing.assert_close(whole.gradient[:, kept], part.gradient)
    assert InformationMaximization().expand(logits, None, 0 * weights).gradient.isfinite().all()


# ------------------------------------------------------------------ information of a stream


def logits_of(n: int, k: int = 4, seed: int = 0, scale: float = 2.0) -> Tensor:
    return scale * torch.tensor(np.random.default_rng(seed).normal(size=(n, k)))


def recalled(loss: Loss, logits: Tensor, memory: Memory) -> tuple[Expansion, Memory]:
    """A loss with its memory at the logits of a batch, as a filter has it."""
    loss, memory = loss.recall(logits, memory)
    ones = logits.new_ones(len(logits))
    return loss.expand(logits[None], loss.targets(logits), ones), memory


@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_running_information_over_a_stream(spread: float) -> None:
    """Batches of any size, one larger than the window: m and σ² as a loop has them, and the
    gradient of -KL(p ‖ m) by autograd with both fixed.
    """
    loss, memory = RunningInformation(window=20, spread=spread), dict[str, Tensor]()
    mean, square = np.full(4, 0.25), None
    for step, n in enumerate((1, 6, 1, 25, 3)):
        logits = logits_of(n, seed=step)
        own, share = spread_of(logits.numpy()), min(1.0, n / 20)
        square = own if square is None else (1 - share) * square + share * own
        s = sharpness(loss, square)
        p = np.exp(log_p(s * logits.numpy()))
        mean = (1 - share) * mean + share * p.mean(0)
        expansion, kept = recalled(loss, logits, memory)
        memory = dict(kept)
        np.testing.assert_allclose(memory["loss.information"], [*mean, square], rtol=1e-12)

        def plain(f: Tensor, s: float = s, mean: Array = mean) -> Tensor:
            logp = (s * f).log_softmax(-1)
            return (logp.exp() * (torch.tensor(mean).log() - logp)).sum(-1)

        leaf = logits.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(plain(leaf).sum(), leaf)
        hessian = torch.func.vmap(torch.func.hessian(plain))(logits)
        torch.testing.assert_close(
            (expansion.value[0], expansion.gradient[0], expansion.hessian()[0]),
            (plain(logits), gradient, hessian),
            rtol=1e-10,
            atol=1e-12,
        )
        assert expansion.gradient.abs().max() > 1e-3  # nor constant for a batch of one


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_running_information_does_not_see_a_factor_of_small_logits(factor: float) -> None:
    """Whose spread stays between a half and four: s is from 1 to 8."""
    memory, scaled = dict[str, Tensor](), dict[str, Tensor]()
    for step, n in enumerate((5, 9, 1)):
        logits = logits_of(n, seed=step, scale=1.8)
        own, kept = recalled(RunningInformation(), logits, memory)
        other, kept_scaled = recalled(RunningInformation(), factor * logits, scaled)
        memory, scaled = dict(kept), dict(kept_scaled)
        torch.testing.assert_close(
            (other.value, factor * other.gradient, factor**2 * other.hessian()),
            (own.value, own.gradient, own.hessian()),
        )


@pytest.mark.parametrize(("spread", "softest"), [(2.0, 0.25), (0.8, 0.8)])
def test_running_information_softens_large_logits(spread: float, softest: float) -> None:
    """To the spread that is asked for, but not below the least s."""
    loss = RunningInformation(spread=spread, least=softest)
    for size in (2.0, 20.0):
        logits = logits_of(9, scale=size)
        own = spread / spread_of(logits.numpy()) ** 0.5
        scale = loss.targets(logits)[1]
        assert scale.unique().item() == pytest.approx(max(softest, own), rel=1e-12)
    assert own < softest < 1  # the larger logits met the bound


def test_logits_that_hardly_differ_are_not_blown_up() -> None:
    """s is at most 8: what is left of logits all alike is rounding."""
    logits = 1e-3 * logits_of(6)
    mean, scale = RunningInformation().targets(logits)
    assert (scale == 8).all()
    torch.testing.assert_close(mean, torch.full_like(mean, 0.25), rtol=0.01, atol=0)


def test_a_batch_of_a_window_is_information_maximization() -> None:
    """Its gradient; the Hessian differs, for there p̄ moves along."""
    logits = logits_of(12)
    running, _ = recalled(RunningInformation(window=12, spread=0.0), logits, {})
    batch = InformationMaximization().expand(logits[None], None, torch.ones(12).double())
    torch.testing.assert_close((running.value, running.gradient), (batch.value, batch.gradient))
    longer, _ = recalled(RunningInformation(window=24, spread=0.0), logits, {})
    assert (longer.gradient - batch.gradient).abs().max() > 1e-3


def test_a_sum_remembers_what_its_terms_do() -> None:
    loss, plain = Sum((Entropy(), RunningInformation(window=9)), (0.5, 2.0)), Sum()
    memory, alone = dict[str, Tensor](), dict[str, Tensor]()
    for step in range(3):
        logits = logits_of(4, seed=step)
        together, kept = recalled(loss, logits, memory)
        own, kept_alone = recalled(RunningInformation(window=9), logits, alone)
        memory, alone = dict(kept), dict(kept_alone)
        rest = Entropy().expand(logits[None], None, torch.ones(4))
        torch.testing.assert_close(together.gradient, 0.5 * rest.gradient + 2.0 * own.gradient)
        assert torch.equal(memory["loss.information"], alone["loss.information"])
    assert plain.recall(logits, memory) == (plain, memory)
    assert loss == Sum((Entropy(), RunningInformation(window=9)), (0.5, 2.0))  # nothing left in it


# ------------------------------------------------------------------ selection, sums, functions,
# refusals


def test_a_pseudo_label_below_the_threshold_is_left_out() -> None:
    logits = torch.tensor([[0.6, 0.4], [0.3, 0.7], [0.5, 0.5]], dtype=torch.float64).log()
    loss = PseudoLabel(threshold=0.65)
    targets = loss.targets(logits)
    assert loss.selected(targets).tolist() == [0.0, 1.0, 0.0]  # type: ignore[union-attr]
    expansion = loss.expand(logits[None], targets, torch.ones(3))
    assert not any(part[0, [0, 2]].any() for part in derivatives(expansion))
    torch.testing.assert_close(
        expansion.gradient[0, 1], torch.tensor([0.3, -0.3], dtype=torch.float64)
    )
    assert (
        PseudoLabel(threshold=0.6).targets(logits)[0].sum() == 1
    )  # as confident as the threshold is enough
    assert PseudoLabel().selected(PseudoLabel().targets(logits)) is None


def test_a_sum_looks_at_what_any_term_looks_at() -> None:
    logits = torch.tensor([[0.6, 0.4], [0.3, 0.7], [0.05, 0.95]]).log()
    strict, loose = PseudoLabel(threshold=0.9), PseudoLabel(threshold=0.65)
    both, mixed = Sum((strict, loose)), Sum((strict, Entropy()))
    assert both.selected(both.targets(logits)).tolist() == [0.0, 1.0, 1.0]  # type: ignore[union-attr]
    assert mixed.selected(mixed.targets(logits)) is None
    assert (Sum((InformationMaximization(),)).minimum, Sum().minimum) == (2, 1)
    assert (both.is_coupled, Sum().is_coupled) == (False, True)


def test_shares_of_the_views_in_a_sum() -> None:
    loss = Sum((Entropy(), Consistency(copies=2), Sum((Consistency(),), (3.0,))), (2.0, 4.0, 0.5))
    logits = torch.randn(1 + loss.copies, 3, 2)
    assert loss.expand(logits, loss.targets(logits[0]), torch.ones(3)).shares == (
        2.0,
        2.0,
        2.0,
        1.5,
    )


def test_a_function_of_the_logits_is_a_loss() -> None:
    case = Case(Custom(lambda f: f.logsumexp(-1) ** 2 + f[:, 0].sin()), "random", 5, 3)
    expansion, f = case.expand(), torch.tensor(case.logits[0])
    p, mass = f.softmax(-1), f.logsumexp(-1)
    first = torch.eye(3, dtype=torch.float64)[0]
    bend = 2 * p[:, :, None] * p[:, None, :] + 2 * mass[:, None, None] * (
        torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    )
    torch.testing.assert_close(
        (expansion.value[0], expansion.gradient[0]),
        (mass**2 + f[:, 0].sin(), 2 * mass[:, None] * p + f[:, :1].cos() * first),
    )
    torch.testing.assert_close(
        expansion.hessian()[0], bend - f[:, 0].sin()[:, None, None] * torch.outer(first, first)
    )


test_a_function_must_give_one_value_a_sample = refuses(
    [
        (function, r"the loss function must give one value a sample, shape \[n\], got")
        for function in (lambda f: f.logsumexp(-1).mean(), lambda f: f.softmax(-1), lambda f: 1.0)
    ],
    lambda function: Custom(function).expand(torch.zeros(1, 4, 3), None, torch.ones(4)),
)


test_refusals_name_field_value_and_range = refuses(
    [
        (
            lambda: PseudoLabel(threshold=1.0),
            r"PseudoLabel.threshold must be a finite number in \[0, 1\), got 1.0",
        ),
        (
            lambda: GeneralizedCrossEntropy(q=0.0),
            r"GeneralizedCrossEntropy.q must be a finite number in \(0, 1\], got 0.0",
        ),
        (
            lambda: ConjugatePseudoLabel(epsilon=-1.0),
            r"ConjugatePseudoLabel.epsilon must be .* in \[0, inf\), got -1.0",
        ),
        (
            lambda: RunningInformation(window=0),
            r"RunningInformation.window must be an integer >= 1, got 0",
        ),
        (
            lambda: RunningInformation(least=0.0),
            r"RunningInformation.least must be .* in \(0, 1\], got 0.0",
        ),
        (
            lambda: RunningInformation(spread=-1.0),
            r"RunningInformation.spread must be .* in \[0, inf\), got -1.0",
        ),
        (lambda: Sum(()), r"Sum.terms must be one loss or more, got \(\)"),
        (
            lambda: Sum((Entropy(),), (1.0, 2.0)),
            r"Sum.coefficients must be one for each of the 1 terms, got \(1.0, 2.0\)",
        ),
        (
            lambda: Sum((Entropy(),), (-1.0,)),
            r"Sum.coefficients must be a finite number in \[0, inf\), got -1.0",
        ),
        (lambda: Sum((Entropy,)), r"Sum.terms must be of role .loss., .*, got <class"),  # type: ignore[arg-type]
        (
            lambda: SoftLikelihoodRatio().expand(torch.zeros(1, 2, 1), None, torch.ones(2)),
            r"SoftLikelihoodRatio: logits must be of 2 classes or more, got '1 class'",
        ),
    ]
)


def test_a_custom_loss_that_couples_samples_is_refused() -> None:
    """Its derivatives are taken sample by sample, where such a loss is another one."""

    def infomax(f: Tensor) -> Tensor:
        p = f.softmax(-1)
        return (p * (p.mean(0).log() - p.log())).sum(-1)

    logits = torch.randn(1, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with pytest.raises(ValueError, match="the loss function must be one of each sample alone"):
        Custom(infomax).expand(logits, None, torch.ones(4, dtype=torch.float64))
    assert (
        Custom(infomax).expand(logits[:, :1], None, torch.ones(1, dtype=torch.float64)).value.item()
        == 0
    )


def test_a_term_that_leaves_a_sample_out_has_no_share_in_it() -> None:
    loss = Sum((Entropy(), PseudoLabel(0.9)), (1.0, 2.0))
    logits = torch.tensor([[[9.0, 0.0], [0.1, 0.0]]])
    (share,) = loss.expand(logits, loss.targets(logits[0]), torch.ones(2)).shares
    assert torch.as_tensor(share).tolist() == [3.0, 1.0]


def test_only_a_loss_of_the_clean_logits_is_softened() -> None:
    with pytest.raises(ValueError, match=r"Softened.loss must be a loss of the clean logits alone"):
        Softened(Consistency())


def test_a_softened_loss_remembers_what_its_loss_does() -> None:
    soft, plain = Softened(RunningInformation(window=9)), RunningInformation(window=9)
    memory: Memory = {}
    other: Memory = {}
    for seed in range(3):
        logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        recalled, memory = soft.recall(logits, memory)
        expected, other = plain.recall(logits / 2, other)
        found = recalled.expand(logits[None], recalled.targets(logits), torch.ones(5))
        wanted = expected.expand(logits[None] / 2, expected.targets(logits / 2), torch.ones(5))
        torch.testing.assert_close(found.value, wanted.value)
        torch.testing.assert_close(found.gradient, wanted.gradient / 2)
