"""Losses of augmented views: the same label under a change that should not matter."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias, final

import torch
from torch import Tensor
from torch.nn import functional

from driftfilter.base.checks import (
    Checked,
    Count,
    FractionBelowOne,
    Interval,
    NotNegative,
    PositiveCount,
    Role,
    register,
    require,
)
from driftfilter.base.inputs import Inputs, batch_size
from driftfilter.model.closed_forms import FLOOR
from driftfilter.model.expansion import Expansion, log_softmax, separable
from driftfilter.model.losses import Loss, Targets, one_hot

Augmentation: TypeAlias = Callable[
    [Inputs, torch.Generator], Inputs
]  # (inputs, generator) -> inputs
_Augmentation: TypeAlias = Annotated[Augmentation, Role("augmentation", "GaussianNoise(0.1)")]

_IDLE = torch.Generator()  # for those who draw nothing
_TARGET_FLOOR = math.log(1e-4)  # of log t in symmetric cross-entropy


@final
@dataclass(frozen=True)
class GaussianNoise(Checked):
    """Augmentation: inputs plus N(0, scale²) noise."""

    scale: NotNegative = 0.1

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        require(
            isinstance(inputs, Tensor) and inputs.is_floating_point(),
            "inputs of GaussianNoise",
            inputs.dtype if isinstance(inputs, Tensor) else type(inputs).__name__,
            "floating point, and one tensor",
        )
        return inputs + self.scale * torch.randn(
            inputs.shape, generator=generator, dtype=inputs.dtype, device=inputs.device
        )


@final
@dataclass(frozen=True)
class Mirror:
    """Augmentation: images [n, c, h, w] with left and right exchanged. Draws nothing."""

    draws = False

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        require(
            isinstance(inputs, Tensor) and inputs.dim() == 4,
            "inputs of Mirror",
            f"a tensor of shape {list(inputs.shape)}"
            if isinstance(inputs, Tensor)
            else type(inputs).__name__,
            "images [n, c, h, w] (give another augmentation)",
        )
        return inputs.flip(-1)


@final
@dataclass(frozen=True)
class ImageViews(Checked):
    """Augmentation of images [n, c, h, w]: each is flipped, turned, shifted, zoomed and recoloured
    a little, at random.

    Angles are uniform in ±``degrees``, shifts in ±``shift`` of the size, zooms in 1 ± ``zoom``,
    brightness and contrast factors in 1 ± ``brightness`` and 1 ± ``contrast``; then N(0, noise²).
    Images in [0, 1] stay there.
    """

    flip: bool = True
    degrees: Annotated[float, Interval(0, 180)] = 8.0
    shift: FractionBelowOne = 1 / 16
    zoom: FractionBelowOne = 0.05
    brightness: FractionBelowOne = 0.2
    contrast: FractionBelowOne = 0.15
    noise: NotNegative = 0.005

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        require(
            isinstance(inputs, Tensor) and inputs.dim() == 4 and inputs.is_floating_point(),
            "inputs of ImageViews",
            f"{inputs.dtype} of shape {list(inputs.shape)}"
            if isinstance(inputs, Tensor)
            else type(inputs).__name__,
            "floating-point images [n, c, h, w] (GaussianNoise takes any tensor)",
        )
        low, high = inputs.aminmax()
        draws = (
            torch.rand(
                8, len(inputs), generator=generator, dtype=inputs.dtype, device=inputs.device
            )
            * 2
            - 1
        )  # in ±1
        views = self._move(inputs, draws)
        brighter = views * (1 + self.brightness * draws[5]).view(-1, 1, 1, 1)
        center = brighter.mean((1, 2, 3), keepdim=True)
        views = center + (brighter - center) * (1 + self.contrast * draws[6]).view(-1, 1, 1, 1)
        views = views + self.noise * torch.randn(
            views.shape, generator=generator, dtype=views.dtype, device=views.device
        )
        return views.clamp(0, 1) if low >= 0 and high <= 1 else views

    def _move(self, inputs: Tensor, draws: Tensor) -> Tensor:
        angle, zoom = draws[0] * math.radians(self.degrees), 1 + self.zoom * draws[1]
        mirror = (
            torch.where(draws[4] < 0, -1.0, 1.0).to(inputs.dtype)
            if self.flip
            else torch.ones_like(angle)
        )
        cos, sin = angle.cos() / zoom, angle.sin() / zoom
        rows = (
            cos * mirror,
            -sin,
            2 * self.shift * draws[2],
            sin * mirror,
            cos,
            2 * self.shift * draws[3],
        )
        grid = functional.affine_grid(
            torch.stack(rows, -1).view(-1, 2, 3), list(inputs.shape), align_corners=False
        )
        return functional.grid_sample(inputs, grid, padding_mode="border", align_corners=False)


@final
@dataclass(frozen=True)
class PatchShuffle(Checked):
    """Augmentation: images [n, c, h, w] cut into ``patches`` × ``patches`` pieces in random order,
    another one for each image.

    It destroys shapes and leaves colours and textures. Sizes that cannot be cut evenly are scaled
    down to the next that can, and back.
    """

    patches: PositiveCount = 4

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        require(
            isinstance(inputs, Tensor) and inputs.dim() == 4 and inputs.is_floating_point(),
            "inputs of PatchShuffle",
            f"{inputs.dtype} of shape {list(inputs.shape)}"
            if isinstance(inputs, Tensor)
            else type(inputs).__name__,
            "floating-point images [n, c, h, w] (give another augmentation)",
        )
        n, size = len(inputs), inputs.shape[2:]
        rows, columns = (min(self.patches, length) for length in size)
        even = [size[0] // rows * rows, size[1] // columns * columns]
        cut = _resize(inputs, even).unflatten(3, (columns, -1)).unflatten(2, (rows, -1))
        pieces = cut.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)  # [n, pieces, c, h', w']
        order = torch.rand(n, rows * columns, generator=generator, device=inputs.device).argsort(-1)
        pieces = pieces[torch.arange(n, device=inputs.device)[:, None], order]
        joined = pieces.unflatten(1, (rows, columns)).permute(0, 3, 1, 4, 2, 5)
        return _resize(joined.flatten(4, 5).flatten(2, 3), list(size))


def _resize(images: Tensor, size: list[int]) -> Tensor:
    if list(images.shape[2:]) == size:
        return images
    return functional.interpolate(images, size, mode="bilinear", antialias=True)


def augment(augmentation: Augmentation, inputs: Inputs, generator: torch.Generator) -> Inputs:
    """One augmented view, checked."""
    view = augmentation(inputs.clone() if isinstance(inputs, Tensor) else inputs, generator)
    n = batch_size(inputs)
    if isinstance(inputs, Tensor) and (not isinstance(view, Tensor) or view.shape[:1] != (n,)):
        got = f"shape {list(view.shape)}" if isinstance(view, Tensor) else type(view).__name__
        raise ValueError(
            f"the augmentation must give a tensor of {n} samples, as many as the inputs, got {got}"
        )
    return view


def draw_copies(
    augmentation: Augmentation,
    inputs: Inputs,
    copies: int,
    generator: Callable[[], torch.Generator],
) -> tuple[Inputs, ...]:
    """The inputs and augmented copies of them; an augmentation that says it draws nothing (an
    attribute ``draws`` that is False) gets a generator that nobody has made for it.
    """
    own = generator() if getattr(augmentation, "draws", True) else _IDLE
    return (inputs, *(augment(augmentation, inputs, own) for _ in range(copies)))


@final
@dataclass(frozen=True)
class Consistency(Checked, Loss):
    """Augmented views should get the label of the clean input: mean over views of a divergence
    D(p_view, target).

    ``brier`` Σ (p - t)², ``cross_entropy`` -Σ t log p, ``reverse`` -Σ p log t, ``symmetric`` half
    of each of these two; the target t is the most likely class (``hard``) or the probabilities
    (``soft``) of the clean input at the prior mean, or of the observation's teacher. In
    ``symmetric`` log t is no less than log 1e-4, which stands for a hard label's log 0. With the
    target ``moving`` t is the clean prediction itself, differentiated too (symmetric only, as in
    ROID). Without an augmentation (None, and 0 copies) the clean input itself is held against the
    target.
    """

    augmentation: _Augmentation | None = field(default_factory=GaussianNoise)
    divergence: Literal["brier", "cross_entropy", "symmetric", "reverse"] = "brier"
    target: Literal["hard", "soft", "moving"] = "hard"
    copies: Count = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        moving = self.target == "moving"
        require(
            self.divergence == "symmetric" or not moving,
            "Consistency.divergence",
            self.divergence,
            "'symmetric' for a moving target",
        )
        require(
            self.divergence != "reverse" or self.target == "soft",
            "Consistency.target",
            self.target,
            "'soft' for the divergence 'reverse'",
        )
        if self.augmentation is None:
            require(
                self.copies == 0, "Consistency.copies", self.copies, "0 without an augmentation"
            )
            require(
                not moving,
                "Consistency.target",
                self.target,
                "'hard' or 'soft' without an augmentation",
            )
        else:
            require(
                self.copies >= 1,
                "Consistency.copies",
                self.copies,
                "an integer >= 1 with an augmentation",
            )

    @property
    def is_coupled(self) -> bool:
        return self.target == "moving"

    def views(self, inputs: Inputs, generator: Callable[[], torch.Generator]) -> tuple[Inputs, ...]:
        return (
            (inputs,)
            if self.augmentation is None
            else draw_copies(self.augmentation, inputs, self.copies, generator)
        )

    def targets(self, logits: Tensor) -> Targets:
        if self.target == "moving":
            return None
        return one_hot(logits) if self.target == "hard" else logits.softmax(-1)

    def expand(self, logits: Tensor, targets: Targets, weights: Tensor) -> Expansion:
        logp = log_softmax(logits)
        shares = (0.0, *[1 / self.copies] * self.copies) if self.copies else (1.0,)
        share = logits.new_full((len(shares), *[1] * (logits.dim() - 1)), shares[-1])
        if self.copies:
            share[0].zero_()
        if self.target == "moving":
            return self._expand_moving(logp, share)
        assert isinstance(targets, Tensor)
        p = logp.exp()
        t = targets.expand_as(p)
        if self.divergence == "brier":
            value, first, second = (p - t).square(), 2 * p * (p - t), 2 * p * p
        else:
            value, first, second = -t * logp, -t, t
        if self.divergence == "reverse":
            value = first = -p * t.log().clamp_min(FLOOR)
            second = torch.zeros_like(p)
        if self.divergence == "symmetric":
            reverse = -p * t.log().clamp_min(_TARGET_FLOOR)
            value, first, second = (value + reverse) / 2, (first + reverse) / 2, second / 2
        return separable((value * share).sum(-1), p, first * share, second * share, shares)

    def _expand_moving(self, logp: Tensor, share: Tensor) -> Expansion:
        """-½ Σ t log p - ½ Σ p log t in p and in t: each view sees the other's prediction as its
        target.
        """
        p, others = logp.exp(), logp[:1].expand_as(logp).clone()
        others[0].zero_()
        t = others.exp()
        first, second = share * (-t - p * others) / 2, share * t / 2
        value = (share * (-t * logp - p * others)).sum(-1) / 2
        first[0] = (share * (-p - p[:1] * logp) / 2).sum(0)
        second[0] = (share * p / 2).sum(0)
        return separable(value, p, first, second, (0.5, *[0.5 / self.copies] * self.copies))


@final
@dataclass(frozen=True)
class MarginalEntropy(Checked, Loss):
    """H(p̄_i), p̄_i the mean prediction over augmented views of input i: confident and alike under
    augmentation.

    Computed as the mean over views of -Σ p log p̄ with p̄ not differentiated: the same value and
    gradient. The Hessian is that of each view alone, p̄ moving along.
    """

    augmentation: _Augmentation = field(default_factory=GaussianNoise)
    copies: PositiveCount = 8
    is_coupled = True

    def views(self, inputs: Inputs, generator: Callable[[], torch.Generator]) -> tuple[Inputs, ...]:
        return draw_copies(self.augmentation, inputs, self.copies, generator)

    def expand(self, logits: Tensor, targets: Targets, weights: Tensor) -> Expansion:
        p = log_softmax(logits).exp()
        share = torch.full_like(p[..., :1], 1 / self.copies)
        share[0].zero_()
        mean = (share * p).sum(0, keepdim=True)
        first = -share * p * mean.log().clamp_min(FLOOR)
        second = -(share * p).square() / mean.clamp_min(torch.finfo(p.dtype).tiny)
        return separable(None, p, first, second, (0.0, *[1 / self.copies] * self.copies))


register(
    loss=(Consistency, MarginalEntropy),
    augmentation=(GaussianNoise, ImageViews, Mirror, PatchShuffle),
)
