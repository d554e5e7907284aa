"""The Gibbs energy: its value written out, its gradient by finite differences in θ, and what is
fixed at the prior mean.
"""

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from driftfilter import (
    VARIANTS,
    Belief,
    Bong,
    Consistency,
    Diagonal,
    Filter,
    GaussianNoise,
    Hessian,
    MarginalEntropy,
    Tempered,
)
from driftfilter.base.randomness import Purpose, Randomness
from driftfilter.model.losses import (
    Custom,
    Entropy,
    GeneralizedCrossEntropy,
    InformationMaximization,
    Loss,
    PseudoLabel,
    Sum,
)
from driftfilter.model.observation import Energy, Evaluation, Gibbs, Teacher
from driftfilter.model.opinion import OpinionEntropy
from driftfilter.model.predictive import Lifted, LinearHead, PredictiveModel, Pullback, ReadOut
from driftfilter.model.some_samples import SomeSamples
from driftfilter.model.weighting import (
    Constant,
    DiversityGate,
    EntropyGate,
    Memory,
    Product,
    Reliability,
)
from small import assert_same, normal, perceptron, refuses

RANDOMNESS = Randomness(5, 3, torch.device("cpu"))
NAME = "weighting.mean_prediction"


WEIGHTING = Product((Reliability(beta=3.0), EntropyGate(fraction=0.95), DiversityGate()))


def energy_of(
    observation: Gibbs,
    model: PredictiveModel,
    theta: Tensor,
    inputs: Tensor,
    memory: Memory | None = None,
) -> Energy:
    return observation(model, theta, inputs, {} if memory is None else memory, RANDOMNESS)[0]


def value_of(evaluation: Evaluation) -> Tensor:
    """E = Σ_i a_i Σ_v ℓ_iv."""
    return evaluation.coefficients @ evaluation.expansion.value.sum(0)


def slope(function: Callable[[Tensor], Tensor], theta: Tensor, h: float = 1e-3) -> Tensor:
    """Central differences, error O(h⁴)."""
    ahead = [
        torch.stack([function(theta + step * h * unit) for unit in torch.eye(len(theta)).to(theta)])
        for step in (-2, -1, 1, 2)
    ]
    return (ahead[0] - 8 * ahead[1] + 8 * ahead[2] - ahead[3]) / (12 * h)


# ------------------------------------------------------------------ value and gradient

TABLE: list[Loss] = [cls() for cls in VARIANTS["loss"].values()]


@pytest.mark.parametrize(
    ("model", "d"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.slow if name == "perceptron" else ())
        for name, case in {
            "head": (LinearHead(3), 6),
            "logistic": (LinearHead(2, intercept=True), 3),
            "perceptron": (Lifted(perceptron), 15),
            "read-out": (ReadOut(Lifted(perceptron), normal(15, 18, seed=7) / 3), 18),
        }.items()
    ],
)
@pytest.mark.parametrize(
    "loss",
    [
        *(loss for loss in TABLE if not (loss.sees_features or loss.needs_source)),
        Consistency(GaussianNoise(0.5), "symmetric", "soft", copies=2),
        Sum(
            (PseudoLabel(threshold=0.6), MarginalEntropy(copies=2), Consistency()), (0.5, 1.0, 2.0)
        ),
        Custom(lambda f: f[:, 0].sin() * f.logsumexp(-1)),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_gradient_is_the_slope_of_the_energy(model: PredictiveModel, d: int, loss: Loss) -> None:
    """At the prior mean and elsewhere, with the weights and targets of the prior mean."""
    anchor, inputs = normal(d, seed=1), 2 * normal(5, 2, seed=2)
    energy = energy_of(Gibbs(loss, WEIGHTING), model, anchor, inputs)
    assert energy.samples.used > 1
    for theta in (anchor, anchor + 0.3 * normal(d, seed=3)):
        evaluation = energy.at(theta)
        expected = slope(lambda point: value_of(energy.at(point)), theta)
        fast = isinstance(loss, OpinionEntropy)  # directions of short logits turn fast
        rtol, atol = (2e-7, 1e-7) if fast else (1e-8, 1e-9)
        torch.testing.assert_close(evaluation.gradient(), expected, rtol=rtol, atol=atol)
        torch.testing.assert_close(evaluation.rows.sum(0), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("n", [1, 6])
@pytest.mark.parametrize("beta", [1.0, 4.0])
def test_the_energy_of_entropy_written_out(n: int, beta: float) -> None:
    theta, inputs = normal(6), normal(n, 2, seed=1)
    total = 0.0
    for x in inputs:
        p = (theta.view(3, 2) @ x).softmax(0)
        total += beta / n * float(-(p * p.log()).sum())
    energy = energy_of(Gibbs(Entropy(), Constant(beta)), LinearHead(3), theta, inputs)
    assert value_of(energy.at(theta)).item() == pytest.approx(total, rel=1e-13)


@pytest.mark.parametrize("chosen", [[1.0] * 6, [1.0, 2.0, 0.5, 3.0, 1.0, 0.0]])
def test_information_maximization_has_the_gradient_of_the_batch_loss(chosen: list[float]) -> None:
    """mean H(p_i) - H(p̄) through autograd, both means weighted, times Σ w / n."""
    theta, inputs = normal(6).requires_grad_(), normal(6, 2, seed=1)
    w = torch.tensor(chosen, dtype=torch.float64)
    p = LinearHead(3)(theta, inputs).softmax(-1)
    shares, mean = w / w.sum(), (w / w.sum()) @ p
    batch = shares @ -(p * p.log()).sum(-1) + (mean * mean.log()).sum()
    (exact,) = torch.autograd.grad(batch * w.sum() / 6, theta)

    def given(logits: Tensor, weights: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        return weights * w, memory

    energy = energy_of(
        Gibbs(InformationMaximization(), given), LinearHead(3), theta.detach(), inputs
    )
    torch.testing.assert_close(
        (energy.evaluation.gradient(), value_of(energy.evaluation)),
        (exact, (batch * w.sum() / 6).detach()),
        rtol=1e-12,
        atol=1e-13,
    )


def test_gradient_and_factor_of_other_cotangents() -> None:
    theta, inputs, loss = normal(15), normal(4, 2, seed=1), Consistency(copies=2)
    energy = energy_of(Gibbs(loss, Reliability()), Lifted(perceptron), theta, inputs)
    cotangents, roots = normal(3, 4, 3, seed=2), normal(3, 4, 3, 2, seed=3)
    gradient, metric = (
        torch.zeros(15, dtype=torch.float64),
        torch.zeros(15, 15, dtype=torch.float64),
    )
    for v, view in enumerate(energy.views):
        for i, a in enumerate(energy.samples.coefficients):
            jacobian = torch.func.jacrev(perceptron)(theta, view[i : i + 1])[0]  # [k, d]
            gradient += a * jacobian.mT @ cotangents[v, i]
            metric += a * jacobian.mT @ roots[v, i] @ roots[v, i].mT @ jacobian
    factor = energy.evaluation.factor(roots)
    torch.testing.assert_close(
        (energy.evaluation.gradient(cotangents), factor.mT @ factor),
        (gradient, metric),
        rtol=1e-11,
        atol=1e-12,
    )


# ------------------------------------------------------------------ normalisation, selection,
# memory


@pytest.mark.parametrize(("over", "divisor"), [("batch", 4), ("kept", 2)])
def test_the_sum_is_divided_by_the_batch_or_by_the_samples_kept(
    over: Literal["batch", "kept"], divisor: int
) -> None:
    inputs = torch.tensor(
        [[9.0], [0.1], [-8.0], [0.0]], dtype=torch.float64
    )  # two confident, two not
    theta = torch.tensor([1.0], dtype=torch.float64)
    energy = energy_of(Gibbs(Entropy(), EntropyGate(0.5), over), LinearHead(2), theta, inputs)
    h = -(
        torch.sigmoid(theta * inputs).log() * torch.sigmoid(theta * inputs)
        + torch.sigmoid(-theta * inputs).log() * torch.sigmoid(-theta * inputs)
    )[:, 0]
    gate = 0.5 * torch.tensor(2.0).double().log()
    weights = (gate - h).exp() * (h < gate)
    torch.testing.assert_close(
        (energy.samples.weights, energy.samples.coefficients), (weights, weights / divisor)
    )
    assert energy.samples.used == 2
    torch.testing.assert_close(value_of(energy.evaluation), (weights * h).sum() / divisor)


@pytest.mark.parametrize("over", ["batch", "kept"])
def test_a_gate_that_keeps_nothing_gives_an_energy_of_zero(over: Literal["batch", "kept"]) -> None:
    energy = energy_of(
        Gibbs(Entropy(), EntropyGate(1e-6), over),
        LinearHead(2),
        torch.ones(1, dtype=torch.float64),
        normal(3, 1),
    )
    assert (energy.samples.used, energy.samples.coefficients.tolist()) == (0, [0.0] * 3)
    assert energy.evaluation.gradient().tolist() == [0.0]


@pytest.mark.parametrize("over", ["batch", "kept"])
def test_samples_below_the_threshold_have_no_weight(over: Literal["batch", "kept"]) -> None:
    inputs = torch.tensor([[3.0], [0.1], [-2.0]], dtype=torch.float64)
    energy = energy_of(
        Gibbs(PseudoLabel(0.8), Constant(2.0), over),
        LinearHead(2),
        torch.ones(1, dtype=torch.float64),
        inputs,
    )
    assert (energy.samples.used, energy.samples.weights.tolist()) == (2, [2.0, 0.0, 2.0])
    torch.testing.assert_close(
        energy.samples.coefficients, energy.samples.weights / (3 if over == "batch" else 2)
    )


def test_the_memory_of_a_weighting_holds_only_samples_the_loss_looks_at() -> None:
    inputs = torch.tensor([[3.0], [0.1], [-4.0]], dtype=torch.float64)
    _, memory = Gibbs(PseudoLabel(0.8), DiversityGate())(
        LinearHead(2), torch.ones(1, dtype=torch.float64), inputs, {}, RANDOMNESS
    )
    up = torch.sigmoid(inputs[[0, 2], 0]).mean()
    torch.testing.assert_close(memory[NAME], torch.stack((1 - up, up)))


def test_memory_goes_through_the_weighting_unchanged_in_place() -> None:
    held = {NAME: torch.tensor([0.2, 0.8], dtype=torch.float64)}
    before = held[NAME].clone()
    inputs = torch.tensor([[-3.0], [2.0]], dtype=torch.float64)
    weights, memory = Gibbs(Entropy(), DiversityGate(0.9))(
        LinearHead(2), torch.ones(1, dtype=torch.float64), inputs, held, RANDOMNESS
    )
    assert weights.samples.weights.tolist() == [1.0, 0.0]
    down = torch.sigmoid(-inputs[0, 0])
    torch.testing.assert_close(memory[NAME], 0.9 * before + 0.1 * torch.stack((down, 1 - down)))
    assert torch.equal(held[NAME], before)


# ------------------------------------------------------------------ what is fixed at the prior mean


@pytest.mark.parametrize(
    "loss",
    [
        PseudoLabel(0.4),
        GeneralizedCrossEntropy(),
        Consistency(target="hard"),
        Consistency(target="soft"),
        Sum((PseudoLabel(), Consistency())),
    ],
    ids=repr,
)
def test_targets_and_weights_stay_those_of_the_prior_mean(loss: Loss) -> None:
    """At -θ every label would be the other one: the loss there must be that of the old labels."""
    anchor, inputs = torch.tensor([2.0, -1.0], dtype=torch.float64), normal(6, 2, seed=4)
    energy = energy_of(Gibbs(loss, Reliability(2.0)), LinearHead(2), anchor, inputs)
    evaluation = energy.at(-anchor)
    views = torch.stack([LinearHead(2)(-anchor, view) for view in energy.views])
    expected = loss.expand(
        views, loss.targets(LinearHead(2)(anchor, inputs)), energy.samples.weights
    )
    torch.testing.assert_close(
        (evaluation.expansion.value, evaluation.expansion.gradient),
        (expected.value, expected.gradient),
    )
    assert torch.equal(evaluation.coefficients, energy.evaluation.coefficients)
    moved = loss.expand(views, loss.targets(views[0]), energy.samples.weights)
    assert (moved.value - expected.value).abs().max() > 0.1


def test_views_are_drawn_once_a_step() -> None:
    inputs, loss = normal(4, 2), Consistency(GaussianNoise(1.0), copies=2)
    energy = energy_of(Gibbs(loss), LinearHead(2), normal(2), inputs)
    again = energy_of(Gibbs(loss), LinearHead(2), normal(2), inputs)
    drawn = loss.views(inputs, lambda: RANDOMNESS.generator(Purpose.VIEWS))
    for mine, same, exact in zip(energy.views, again.views, drawn, strict=True):
        assert_same((mine, same), (exact, exact))
    first, second = energy.at(normal(2, seed=8)), energy.at(normal(2, seed=8))
    assert torch.equal(first.logits, second.logits)
    assert energy.at(energy.anchor) is energy.evaluation


# ------------------------------------------------------------------ functions as losses, refusals


# ------------------------------------------------------------------ views of the samples kept


def centred(theta: Tensor, inputs: Tensor) -> Tensor:
    """Logits that depend on which samples are in the batch, as under batch statistics."""
    return (inputs - inputs.mean(0)) @ theta.view(3, -1).T


class Batchwise(PredictiveModel):
    """A function of whole batches as a model; rows are not asked for."""

    def __call__(self, theta: Tensor, inputs: Tensor) -> Tensor:
        return centred(theta, inputs)

    def pullback(self, theta: Tensor, inputs: Tensor) -> tuple[Tensor, Pullback]:
        def pull(cotangents: Tensor) -> Tensor:
            jacobian: Tensor = torch.func.jacrev(lambda point: centred(point, inputs))(theta)
            return (cotangents.unsqueeze(-1) * jacobian).sum((0, 1))

        return centred(theta, inputs), TotalOnly(pull)

    def pushforward(self, theta: Tensor, inputs: Tensor, tangents: Tensor) -> Tensor:
        return torch.stack([centred(tangent, inputs) for tangent in tangents])


class TotalOnly(Pullback):
    def __init__(self, pull: Callable[[Tensor], Tensor]) -> None:
        self.pull = pull

    def __call__(self, cotangents: Tensor) -> Tensor:
        one = torch.eye(cotangents.shape[-2]).to(cotangents).unsqueeze(-1)
        return torch.stack([self.pull(part * cotangents) for part in one])

    def total(self, cotangents: Tensor) -> Tensor:
        return self.pull(cotangents)


def test_views_of_the_samples_kept_are_seen_without_the_others() -> None:
    """Value and gradient against the energy written out: one view, of the samples with a weight."""
    model, theta, inputs = Batchwise(), 2 * normal(6), normal(9, 2, seed=1)
    noise, gate = GaussianNoise(0.3), EntropyGate(fraction=0.5)
    loss = Sum((Entropy(), Consistency(noise, "symmetric", target="moving")))
    energy = energy_of(Gibbs(loss, gate, augmented="kept"), model, theta, inputs)
    weights = energy.samples.weights
    kept = weights > 0
    assert 1 < kept.sum() < 8
    view = noise(inputs[kept], RANDOMNESS.generator(Purpose.VIEWS))
    assert torch.equal(energy.views[1], view)

    def written_out(point: Tensor) -> Tensor:
        clean, other = (
            part.log_softmax(-1) for part in (centred(point, inputs), centred(point, view))
        )
        entropies = -(clean.exp() * clean).sum(-1)
        own = clean[kept]
        agree = -(own.exp() * other + other.exp() * own).sum(-1) / 2
        return (weights @ entropies + weights[kept] @ agree) / 9

    for point in (theta, theta + 0.1 * normal(6, seed=2)):
        evaluation = energy.at(point)
        torch.testing.assert_close(value_of(evaluation), written_out(point), rtol=1e-12, atol=0)
        expected = slope(written_out, point)
        torch.testing.assert_close(evaluation.gradient(), expected, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(evaluation.rows.sum(0), expected, rtol=1e-7, atol=1e-9)
    whole = energy_of(Gibbs(loss, gate), model, theta, inputs)
    assert (whole.evaluation.gradient() - energy.evaluation.gradient()).abs().max() > 1e-3


def test_a_model_of_some_samples_has_no_derivative_at_the_others() -> None:
    model, theta, inputs = LinearHead(3), normal(6), normal(5, 2, seed=1)
    some = SomeSamples(model, torch.tensor([1, 3, 4]), 5)
    taken = some.take(inputs)
    assert torch.equal(taken, inputs[[1, 3, 4]])
    logits, pull = some.pullback(theta, taken)
    whole, all_of_it = model.pullback(theta, inputs)
    mask = torch.tensor([0.0, 1, 0, 1, 1]).double().unsqueeze(1)
    cotangents, tangents = normal(2, 5, 3, seed=2), normal(4, 6, seed=3)
    for found, expected in (
        (some(theta, taken), mask * whole),
        (logits, mask * whole),
        (pull(cotangents), all_of_it(mask * cotangents)),
        (pull.total(cotangents[0]), all_of_it.total(mask * cotangents[0])),
        (
            some.pushforward(theta, taken, tangents),
            mask * model.pushforward(theta, inputs, tangents),
        ),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("fraction", [1e-6, 1.0])
def test_where_all_or_none_are_kept_the_whole_batch_is_augmented(fraction: float) -> None:
    loss = Consistency(GaussianNoise(0.3), copies=2)
    theta, inputs = normal(6), normal(5, 2, seed=1)
    found, whole = (
        energy_of(
            Gibbs(loss, EntropyGate(fraction=fraction), augmented=augmented),
            LinearHead(3),
            theta,
            inputs,
        )
        for augmented in ("kept", "batch")
    )
    assert found.samples.used == (0 if fraction < 1 else 5)
    assert_same(list(found.views), list(whole.views))
    assert torch.equal(found.evaluation.gradient(), whole.evaluation.gradient())


def test_a_prediction_over_views_needs_views_of_all_samples() -> None:
    loss = Consistency(GaussianNoise(0.3))
    with pytest.raises(ValueError, match=r"Gibbs.augmented must be 'batch' if .*, got 'kept'"):
        Filter(
            LinearHead(3),
            observation=Gibbs(loss, augmented="kept"),
            prediction=Tempered(over_views=True),
        )


def test_bong_sees_the_samples_kept_alone() -> None:
    """A model linear in θ shares one Jacobian between draws; a plain function does not."""
    loss = Sum((Entropy(), Consistency(GaussianNoise(0.3))))
    belief = Belief(normal(6), Diagonal(torch.full((6,), 0.3).double()))
    inputs, observation = (
        normal(9, 2, seed=1),
        Gibbs(loss, EntropyGate(fraction=0.9), augmented="kept"),
    )
    steps = []
    for model in (LinearHead(3), lambda theta, x: LinearHead(3)(theta, x)):
        filt = Filter(model, observation=observation, inference=Bong(Hessian(), 4))
        state, _, info = filt.step(filt.init(belief), inputs)
        assert 0 < (info.weights > 0).sum() < 9
        steps.append((state.belief.mean, state.belief.covariance.dense()))
    torch.testing.assert_close(steps[0], steps[1], rtol=1e-10, atol=1e-12)


def test_a_plain_function_is_a_loss() -> None:
    def entropy(logits: Tensor) -> Tensor:
        return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)

    theta, inputs = normal(6), normal(5, 2, seed=1)
    for loss, same in (
        (entropy, Entropy()),
        (Sum((entropy, PseudoLabel())), Sum((Entropy(), PseudoLabel()))),  # type: ignore[arg-type]
    ):
        mine, exact = (
            energy_of(Gibbs(each), LinearHead(3), theta, inputs).evaluation for each in (loss, same)
        )
        torch.testing.assert_close(
            (value_of(mine), mine.gradient(), mine.expansion.hessian()),
            (value_of(exact), exact.gradient(), exact.expansion.hessian()),
            rtol=1e-12,
            atol=1e-13,
        )


class Broken(PredictiveModel):
    """A model whose pullback gives logits as they are told."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def pullback(self, theta: Tensor, inputs: Tensor) -> tuple[Tensor, Any]:
        return self.logits, None


test_refusals_name_field_value_and_range = refuses(
    [
        (lambda: Gibbs(over="all"), "Gibbs.over must be 'batch' or 'kept', got 'all'"),  # type: ignore[arg-type]
        (lambda: Gibbs(loss=3.0), "Gibbs.loss must be of role .loss., .*, got 3.0"),  # type: ignore[arg-type]
        (lambda: Gibbs(loss=Entropy), "Gibbs.loss must be of role .loss., .*, got <class"),  # type: ignore[arg-type]
        (lambda: Gibbs(loss=torch.zeros(3)), "Gibbs.loss must be of role .loss., .*, got tensor"),  # type: ignore[arg-type]
        (
            lambda: Gibbs(weighting=0.5),  # type: ignore[arg-type]
            "Gibbs.weighting must be of role .weighting., such as .*, got 0.5",
        ),
        (
            lambda: Gibbs(weighting=Constant),  # type: ignore[arg-type]
            "Gibbs.weighting must be of role .weighting., such as .*, got <class",
        ),
        (
            lambda: broken(normal(3)),
            r"the model's logits must be of shape \[4, k\], got shape \[3\]",
        ),
        (
            lambda: broken(normal(3, 2)),
            r"the model's logits must be of shape \[4, k\], got shape \[3, 2\]",
        ),
        (
            lambda: broken(normal(4, 2)[:, :0]),
            r"the model's logits must be of shape \[4, k\], got shape \[4, 0\]",
        ),
        (
            lambda: broken(normal(4, 2).index_fill(0, torch.tensor([2]), torch.inf)),
            r"the model's logits must be finite, got inf at index \[2, 0\] \(2 of 8 values\)",
        ),
        (
            lambda: broken(normal(4, 2) * torch.nan),
            r"the model's logits must be finite, got nan at index \[0, 0\] \(8 of 8",
        ),
        (
            lambda: Gibbs(PseudoLabel(), teacher=Teacher(augmentation=GaussianNoise()))(
                Lifted(perceptron), normal(15), normal(5, 2), {}, RANDOMNESS
            ),
            "source must be the source belief if there is a teacher, got None",
        ),
    ]
)


def broken(logits: Tensor) -> object:
    return energy_of(Gibbs(), Broken(logits), normal(2), normal(4, 2))  # type: ignore[abstract]


# ------------------------------------------------------------------ a teacher


@pytest.mark.parametrize("confidence", [0.0, 0.2, 1.0])
def test_a_teacher_gives_targets_from_its_own_parameters(confidence: float) -> None:
    """Its logits, or their mean over augmented copies where the source is unsure of the batch."""
    source = Belief(normal(15), Diagonal(torch.ones(15).double()))
    theta, slow, inputs = normal(15, seed=1), normal(15, seed=2), normal(5, 2)
    teacher = Teacher(0.9, GaussianNoise(0.3), copies=3, confidence=confidence)
    energy, _ = Gibbs(Consistency(None, "cross_entropy", "soft", copies=0), teacher=teacher)(
        Lifted(perceptron), theta, inputs, {"teacher": slow}, RANDOMNESS, source
    )
    generator = RANDOMNESS.generator(Purpose.TEACHER)
    views = [
        inputs + 0.3 * torch.randn(5, 2, generator=generator, dtype=torch.float64) for _ in range(3)
    ]
    sure = perceptron(source.mean, inputs).softmax(-1).max(-1)[0].mean() >= confidence
    assert bool(sure) is (confidence < 1)
    taught = (
        perceptron(slow, inputs)
        if sure
        else torch.stack([perceptron(slow, view) for view in views]).mean(0)
    )
    assert energy.taught is not None
    torch.testing.assert_close(energy.taught, taught, rtol=1e-12, atol=1e-14)

    def plain(point: Tensor) -> Tensor:
        return -(taught.softmax(-1) * perceptron(point, inputs).log_softmax(-1)).sum(-1).mean()

    torch.testing.assert_close(energy.evaluation.value(), plain(theta), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        energy.evaluation.gradient(), torch.func.grad(plain)(theta), rtol=1e-10, atol=1e-12
    )


def test_a_teacher_follows_slowly_from_the_source() -> None:
    source, teacher = Belief(normal(4), Diagonal(torch.ones(4).double())), Teacher(0.75)
    memory: Memory = {"other": normal(1)}
    energy, _ = Gibbs()(Lifted(perceptron), normal(15), normal(5, 2), {}, RANDOMNESS, source)
    slow = source.mean
    for seed in (1, 2, 3):
        belief = Belief(normal(4, seed=seed), source.covariance)
        kept, memory = teacher(belief, energy, memory, RANDOMNESS)
        assert kept is belief
        slow = 0.75 * slow + 0.25 * normal(4, seed=seed)
        torch.testing.assert_close(memory["teacher"], slow, rtol=1e-13, atol=1e-15)
    assert torch.equal(memory["other"], normal(1))


@pytest.mark.parametrize("over", ["batch", "kept"])
def test_a_batch_below_the_reference_tells_less(over: Any) -> None:
    theta, inputs = normal(6), normal(8, 2, seed=1)
    gate = EntropyGate(0.9)
    plain = energy_of(Gibbs(Entropy(), gate, over), LinearHead(3), theta, inputs)
    small, large = (
        energy_of(Gibbs(Entropy(), gate, over, reference=r), LinearHead(3), theta, inputs)
        for r in (2, 40)
    )
    counted = 8 if over == "batch" else plain.samples.used
    assert 2 < plain.samples.used < 8
    assert torch.equal(small.samples.coefficients, plain.samples.coefficients)
    torch.testing.assert_close(
        (large.samples.coefficients, large.evaluation.gradient()),
        (plain.samples.coefficients * counted / 40, plain.evaluation.gradient() * counted / 40),
    )


def test_a_loss_with_views_says_how_many() -> None:
    class Twice(Entropy):  # type: ignore[misc]  # final
        def views(self, inputs: Any, generator: Any) -> tuple[Any, ...]:
            return (inputs, inputs)

    with pytest.raises(ValueError, match=r"Gibbs.loss.copies must be the number of views"):
        Gibbs(Twice())


def test_a_pullback_that_is_none_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"the model's pullback must be a Pullback .*got 'NoneType'"
    ):
        broken(torch.zeros(4, 2).double())
