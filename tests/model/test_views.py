"""Losses of augmented views: plain formulas differentiated by torch, and where the views come
from.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from driftfilter.base.randomness import Purpose, Randomness
from driftfilter.model.losses import Entropy, Loss, Sum
from driftfilter.model.views import (
    Augmentation,
    Consistency,
    GaussianNoise,
    ImageViews,
    MarginalEntropy,
    Mirror,
    PatchShuffle,
)
from small import assert_same, refuses


def draws(seed: int = 0) -> Callable[[], torch.Generator]:
    return lambda: Randomness(seed, 0, torch.device("cpu")).generator(Purpose.VIEWS)


def logits_of(copies: int, n: int = 5, k: int = 3, seed: int = 0) -> Tensor:
    return 2 * torch.randn(
        1 + copies, n, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def divergence(name: str, p: Tensor, t: Tensor) -> Tensor:
    """D(p, t) of one prediction and one target, written out."""
    brier = sum(((p[c] - t[c]) ** 2 for c in range(len(p))), torch.zeros(()))
    forward = sum((-t[c] * p[c].log() for c in range(len(p))), torch.zeros(()))
    backward = sum((-p[c] * t[c].clamp(min=1e-4).log() for c in range(len(p))), torch.zeros(()))
    return {"brier": brier, "cross_entropy": forward, "symmetric": (forward + backward) / 2}[name]


@pytest.mark.parametrize("name", ["brier", "cross_entropy", "symmetric"])
@pytest.mark.parametrize("target", ["hard", "soft"])
@pytest.mark.parametrize("copies", [1, 3])
def test_consistency_is_the_mean_divergence_of_the_views(
    name: Any, target: Any, copies: int
) -> None:
    loss, logits, anchor = (
        Consistency(divergence=name, target=target, copies=copies),
        logits_of(copies),
        logits_of(0, seed=1)[0],
    )
    expansion = loss.expand(logits, loss.targets(anchor), torch.ones(5))
    assert expansion.shares == (0.0, *[1 / copies] * copies)
    for i in range(5):
        p = anchor[i].softmax(-1)
        t = torch.eye(3, dtype=torch.float64)[p.argmax()] if target == "hard" else p

        def plain(views: Tensor, t: Tensor = t) -> Tensor:
            return torch.stack([divergence(name, view.softmax(-1), t) for view in views[1:]]).mean()

        views = logits[:, i].clone().requires_grad_()
        value = plain(views)
        hessian = torch.autograd.functional.hessian(plain, logits[:, i])
        torch.testing.assert_close(
            (expansion.value[:, i].sum(), expansion.gradient[:, i]),
            (value.detach(), torch.autograd.grad(value, views)[0]),
            rtol=1e-12,
            atol=1e-13,
        )
        for a in range(1 + copies):
            torch.testing.assert_close(
                expansion.hessian()[a, i], hessian[a, :, a], rtol=1e-12, atol=1e-13
            )
            for b in range(a):
                assert (
                    hessian[a, :, b].abs().max() == 0
                )  # views do not meet: the blocks are the whole Hessian


@pytest.mark.parametrize("copies", [1, 4])
def test_marginal_entropy_is_the_entropy_of_the_mean_prediction(copies: int) -> None:
    loss, logits = MarginalEntropy(copies=copies), logits_of(copies)
    expansion = loss.expand(logits, loss.targets(logits[0]), torch.ones(5))
    views = logits.clone().requires_grad_()
    mean = views[1:].softmax(-1).mean(0)
    values = -(mean * mean.log()).sum(-1)
    torch.testing.assert_close(
        (expansion.value.sum(0), expansion.gradient),
        (values.detach(), torch.autograd.grad(values.sum(), views)[0]),
        rtol=1e-12,
        atol=1e-13,
    )
    assert expansion.gradient[0].abs().max() == 0  # the clean input is no view of its own
    assert loss.is_coupled


def test_marginal_entropy_of_disagreeing_views_pulls_them_together() -> None:
    logits = torch.tensor([[[0.0, 0.0]], [[4.0, 0.0]], [[-4.0, 0.0]]], dtype=torch.float64)
    expansion = MarginalEntropy(copies=2).expand(logits, None, torch.ones(1))
    torch.testing.assert_close(expansion.value.sum(), torch.tensor(2.0, dtype=torch.float64).log())
    assert expansion.gradient.abs().max() < 1e-15  # a tie between the classes


VIEWED: list[Callable[[Augmentation, int], Loss]] = [
    lambda augmentation, copies: Consistency(augmentation, copies=copies),
    lambda augmentation, copies: MarginalEntropy(augmentation, copies=copies),
]


@pytest.mark.parametrize("make", VIEWED)
def test_views_come_from_the_augmentation_clean_inputs_first(
    make: Callable[[Augmentation, int], Loss],
) -> None:
    """Any callable will do, and it is free to change all but the number of samples."""
    inputs, seen = torch.randn(4, 3, 8), []

    def crop(x: Tensor, generator: torch.Generator) -> Tensor:
        seen.append(generator)
        start = int(torch.randint(0, 4, (), generator=generator))
        return x[..., start : start + 5]

    before, views = inputs.clone(), make(crop, 3).views(inputs, draws())
    assert views[0] is inputs
    assert torch.equal(inputs, before)
    assert [list(view.shape) for view in views[1:]] == [[4, 3, 5]] * 3
    assert len(set(map(id, seen))) == 1


@pytest.mark.parametrize("make", VIEWED)
def test_the_same_seed_gives_the_same_views(make: Callable[[Augmentation, int], Loss]) -> None:
    inputs, loss = torch.randn(6, 2), make(GaussianNoise(0.3), 3)
    first, again, other = (
        loss.views(inputs, draws(1)),
        loss.views(inputs, draws(1)),
        loss.views(inputs, draws(2)),
    )
    for a in range(1, 4):
        assert torch.equal(first[a], again[a])
        assert not torch.isclose(first[a], other[a]).any()
        for b in range(1, a):
            assert not torch.isclose(first[a], first[b]).any()  # copies differ from each other


def test_terms_of_a_sum_get_their_own_noise() -> None:
    inputs = torch.randn(6, 2)
    loss = Sum(
        (Consistency(copies=1), Entropy(), Sum((MarginalEntropy(copies=2), Consistency(copies=1))))
    )
    views, again = loss.views(inputs, draws()), loss.views(inputs, draws())
    assert (loss.copies, len(views)) == (4, 5)
    assert views[0] is inputs
    for a in range(1, 5):
        assert torch.equal(views[a], again[a])
        for b in range(a):
            assert not torch.isclose(views[a], views[b], rtol=1e-6).any()


def test_a_sum_without_views_draws_nothing() -> None:
    def refuse() -> torch.Generator:
        raise AssertionError("no generator was needed")

    inputs = torch.randn(3, 2)
    assert Sum((Entropy(), Sum((Entropy(),)))).views(inputs, refuse) == (inputs,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gaussian_noise_has_the_scale_it_says(dtype: torch.dtype) -> None:
    inputs = torch.full((200, 500), 3.0, dtype=dtype)
    noise = GaussianNoise(scale=0.7)(inputs, draws()()) - inputs
    assert noise.dtype == dtype
    assert abs(noise.mean().item()) < 5 * 0.7 / 10**2.5
    assert abs(noise.var().item() / 0.49 - 1) < 5 * (2 / 1e5) ** 0.5
    assert abs(noise.pow(4).mean().item() / (3 * 0.49**2) - 1) < 0.05
    assert torch.equal(GaussianNoise(scale=0.0)(inputs, draws()()), inputs)


test_refusals_name_field_value_and_range = refuses(
    [
        (
            lambda: GaussianNoise(scale=-0.1),
            r"GaussianNoise.scale must be a finite number in \[0, inf\), got -0.1",
        ),
        (
            lambda: Consistency(divergence="kl"),  # type: ignore[arg-type]
            r"Consistency.divergence must be one of \['brier', .*\], got 'kl'",
        ),
        (
            lambda: Consistency(target="both"),  # type: ignore[arg-type]
            r"Consistency.target must be one of .'hard', 'soft', 'moving'., got 'both'",
        ),
        (
            lambda: Consistency(copies=0),
            r"Consistency.copies must be an integer >= 1 with an augmentation, got 0",
        ),
        (
            lambda: Consistency(augmentation=0.1),  # type: ignore[arg-type]
            "Consistency.augmentation must be of role 'augmentation', .*, got 0.1",
        ),
        (
            lambda: MarginalEntropy(copies=0),
            r"MarginalEntropy.copies must be an integer >= 1, got 0",
        ),
        (
            lambda: MarginalEntropy(augmentation="flip"),  # type: ignore[arg-type]
            "MarginalEntropy.augmentation must be of role 'augmentation', .*, got 'flip'",
        ),
        (
            lambda: GaussianNoise()(torch.zeros(3, 2, dtype=torch.int64), draws()()),
            r"inputs of GaussianNoise must be floating point, and one tensor, got torch.int64",
        ),
        (
            lambda: Consistency(lambda x, generator: x[:2]).views(torch.zeros(3, 2), draws()),
            r"the augmentation must give a tensor of 3 samples, as many as the inputs, got shape "
            r"\[2, 2\]",
        ),
        (
            lambda: MarginalEntropy(lambda x, generator: None).views(torch.zeros(3, 2), draws()),
            r"the augmentation must give a tensor of 3 samples, as many as the inputs, got "
            r"NoneType",
        ),
        *(
            (
                lambda inputs=inputs: ImageViews()(inputs, draws()()),
                r"inputs of ImageViews must be floating-point images \[n, c, h, w\]",
            )
            for inputs in (torch.zeros(3, 4), torch.zeros(1, 3, 8, 8, dtype=torch.uint8))
        ),
    ]
)


# ------------------------------------------------------------------ views of images

STILL = ImageViews(
    flip=False, degrees=0.0, shift=0.0, zoom=0.0, brightness=0.0, contrast=0.0, noise=0.0
)
IMAGES = torch.rand(64, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def viewed(views: ImageViews, images: Tensor = IMAGES, seed: int = 0) -> Tensor:
    return views(images, draws(seed)())


def test_views_that_change_nothing() -> None:
    torch.testing.assert_close(viewed(STILL), IMAGES, rtol=0, atol=1e-12)


def test_flips_are_mirror_images_of_about_half() -> None:
    views = viewed(replace(STILL, flip=True))
    same, mirrored = (
        (views - other).abs().amax((1, 2, 3)) < 1e-12 for other in (IMAGES, IMAGES.flip(-1))
    )
    assert torch.equal(same, ~mirrored)
    assert 16 < same.sum() < 48


@pytest.mark.parametrize("field", ["brightness", "contrast"])
def test_brightness_and_contrast_are_factors_of_each_image(field: str) -> None:
    images = 0.4 + 0.2 * IMAGES  # no view is clipped
    change: dict[str, Any] = {field: 0.3}
    views = viewed(replace(STILL, **change), images)
    centers = (
        images.mean((1, 2, 3), keepdim=True)
        if field == "contrast"
        else torch.zeros(64, 1, 1, 1).double()
    )
    factors = (views - centers) / (images - centers)
    own = factors.mean((1, 2, 3), keepdim=True)
    torch.testing.assert_close(factors, own.expand_as(factors), rtol=1e-6, atol=0)
    assert 0.7 <= own.min() < 0.8
    assert 1.2 < own.max() <= 1.3


def test_a_shift_moves_a_ramp_by_a_number_that_is_its_own() -> None:
    """On a ramp a shift of s pixels adds s times the slope, away from the border."""
    ramp = torch.linspace(0.3, 0.6, 16, dtype=torch.float64).expand(64, 1, 16, 16).contiguous()
    moved = (viewed(replace(STILL, shift=0.1), ramp) - ramp)[..., 4:12, 4:12] / (0.3 / 15)
    own = moved.mean((1, 2, 3))
    torch.testing.assert_close(moved, own.view(-1, 1, 1, 1).expand_as(moved), rtol=0, atol=1e-6)
    assert -1.6 - 1e-6 <= own.min() < -1  # a tenth of 16 pixels
    assert 1 < own.max() <= 1.6 + 1e-6


@pytest.mark.parametrize(("field", "size"), [("degrees", 20.0), ("zoom", 0.3)])
def test_turns_and_zooms_keep_angles_and_ratios(field: str, size: float) -> None:
    """A linear image stays linear; its slope turns by up to the angle, or shrinks by up to the
    factor.
    """
    line = torch.linspace(-1, 1, 32, dtype=torch.float64)
    images = (0.5 + 0.1 * line).expand(64, 1, 32, 32).contiguous()
    change: dict[str, Any] = {field: size}
    views = viewed(replace(STILL, **change), images)[:, 0, 8:24, 8:24]
    across, down = views.diff(dim=2)[:, 8, 8], views.diff(dim=1)[:, 8, 8]
    torch.testing.assert_close(
        (views.diff(dim=2), views.diff(dim=1)),
        (across.view(-1, 1, 1).expand(64, 16, 15), down.view(-1, 1, 1).expand(64, 15, 16)),
        rtol=0,
        atol=1e-9,
    )
    unit = 0.2 / 31
    if field == "degrees":
        torch.testing.assert_close(
            across.square() + down.square(), torch.full_like(across, unit**2), rtol=1e-6, atol=0
        )
        assert 15 < torch.rad2deg(torch.atan2(down, across)).abs().max() <= 20
    else:
        assert down.abs().max() < 1e-9
        assert 0.7 <= (unit / across).min() < 0.8
        assert 1.2 < (unit / across).max() <= 1.3 + 1e-9


def test_views_have_their_noise_and_stay_where_images_are() -> None:
    noisy = viewed(replace(STILL, noise=0.1), 0.5 + 0 * IMAGES)
    assert (noisy - 0.5).std() == pytest.approx(0.1, rel=0.05)
    clipped = viewed(ImageViews(noise=0.5))
    assert (clipped.min().item(), clipped.max().item()) == (0, 1)
    normalised = viewed(ImageViews(noise=0.5), 4 * IMAGES - 2)
    assert normalised.min() < -1.5
    assert normalised.max() > 1.5


def test_the_same_seed_gives_the_same_images_and_leaves_them() -> None:
    before = IMAGES.clone()
    assert torch.equal(viewed(ImageViews()), viewed(ImageViews()))
    assert not torch.equal(viewed(ImageViews()), viewed(ImageViews(), seed=1))
    assert torch.equal(IMAGES, before)


def test_mirror_exchanges_left_and_right_and_draws_nothing() -> None:
    images = torch.arange(24.0).view(1, 2, 3, 4)
    generator = torch.Generator().manual_seed(0)
    before, mirrored = generator.get_state(), Mirror()(images, generator)
    assert_same(
        (mirrored[0, 1, 2], Mirror()(mirrored, generator), generator.get_state()),
        (torch.tensor([23.0, 22.0, 21.0, 20.0]), images, before),
    )
    with pytest.raises(
        ValueError,
        match=r"inputs of Mirror must be images \[n, c, h, w\] .*, got 'a tensor of shape \[3, 4\]",
    ):
        Mirror()(torch.zeros(3, 4), generator)


@pytest.mark.parametrize(("height", "width", "patches"), [(8, 8, 4), (8, 12, 2), (1, 2, 4)])
def test_patches_come_in_another_order(height: int, width: int, patches: int) -> None:
    """Each piece is somewhere in the shuffled image, at the place its random number says."""
    images = torch.rand(5, 3, height, width, generator=torch.Generator().manual_seed(2)).double()
    shuffled = PatchShuffle(patches)(images, draws()())
    rows, columns = min(patches, height), min(patches, width)
    h, w = height // rows, width // columns
    orders = torch.rand(5, rows * columns, generator=draws()()).argsort(1)
    for image, new, order in zip(images, shuffled, orders.tolist(), strict=True):
        for place, origin in enumerate(order):
            (top, left), (up, aside) = divmod(place, columns), divmod(origin, columns)
            piece = image[:, up * h : (up + 1) * h, aside * w : (aside + 1) * w]
            assert torch.equal(new[:, top * h : (top + 1) * h, left * w : (left + 1) * w], piece)
    assert len({tuple(order) for order in orders.tolist()}) > 1


def test_sizes_that_patches_do_not_divide_are_scaled_and_scaled_back() -> None:
    """A constant image stays; one patch is the image scaled by torch's antialiased rule."""
    images = torch.rand(2, 3, 7, 5, generator=torch.Generator().manual_seed(2)).double()
    flat = torch.full_like(images, 0.3)
    torch.testing.assert_close(PatchShuffle(2)(flat, draws()()), flat)
    assert torch.equal(PatchShuffle(1)(images, draws()()), images)
    small = torch.nn.functional.interpolate(images, [6, 4], mode="bilinear", antialias=True)
    cut = PatchShuffle(2)(small, draws()())
    expected = torch.nn.functional.interpolate(cut, [7, 5], mode="bilinear", antialias=True)
    assert torch.equal(PatchShuffle(2)(images, draws()()), expected)
    with pytest.raises(ValueError, match=r"inputs of PatchShuffle must be floating-point images"):
        PatchShuffle()(torch.zeros(3, 4), draws()())
