"""How samples look: signatures against plain loops over the scales of an image."""

import numpy as np
import pytest
import torch
from torch import Tensor

from driftfilter.model.appearance import describe
from oracles import Array


def halve(values: Array, axis: int) -> tuple[Array, Array]:
    one, other = (np.take(values, range(at, values.shape[axis], 2), axis) for at in (0, 1))
    return (one + other) / 2, (one - other) / 2


def energies(part: Array) -> list[float]:
    """Mean squares of a part [c, …]: all of it, then its differences at three scales."""
    part = part - part.mean(tuple(range(1, part.ndim)), keepdims=True)
    found = [float((part**2).mean())]
    for _ in range(3):
        part, across = halve(part, 1)
        (part, along), (across, both) = halve(part, 2), halve(across, 2)
        found += [float((along**2).mean() + (across**2).mean()), float((both**2).mean())]
    return found


def by_loops(sample: Array) -> list[float]:
    grey = sample.mean(0, keepdims=True)
    parts = [grey] if len(sample) == 1 else [grey, sample - grey]
    shares = [energy / sample.var() + 1e-4 for part in parts for energy in energies(part)]
    means = sample.reshape(len(sample), -1).mean(1)
    means = means if len(sample) <= 4 else means.mean(keepdims=True)
    return [*means.tolist(), float(np.log(sample.var())), *np.log(shares).tolist()]


@pytest.mark.parametrize("shape", [(3, 16, 32), (1, 8, 8), (5, 16, 8)])
def test_signatures_are_those_of_plain_loops(shape: tuple[int, ...]) -> None:
    samples = torch.rand(4, *shape, generator=torch.Generator().manual_seed(0)) ** 2
    found = describe(samples)
    assert found is not None
    assert found.dtype == torch.float64
    expected = [by_loops(sample.double().numpy()) for sample in samples]
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-4)


@pytest.mark.parametrize(
    "samples",
    [
        torch.rand(4, 20),
        torch.rand(4, 3, 7, 32),
        torch.ones(4, 3, 32, 32, dtype=torch.int64),
        {"tokens": torch.ones(4, 20, dtype=torch.int64)},
        {"tokens": torch.ones(4, 20, dtype=torch.int64), "mask": torch.rand(4, 1, 20, 20)},
        (torch.ones(4, dtype=torch.int64), torch.rand(1, 20, 20)),
        torch.rand(4, 2, 20),  # signals, whose classes differ in energy
        torch.ones(4, 2, 20, dtype=torch.uint8),
    ],
    ids=["table", "low", "whole", "tokens", "masked tokens", "bias", "signals", "bytes"],
)
def test_other_samples_have_no_signatures(samples: Tensor) -> None:
    assert describe(samples) is None


def test_images_of_bytes_look_as_their_numbers_do() -> None:
    images = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
    own, other = describe(images), describe(images.double())
    assert own is not None
    assert other is not None
    torch.testing.assert_close(own, other, rtol=0, atol=0)


def test_the_first_input_of_several_numbers_is_described() -> None:
    images = torch.rand(4, 3, 16, 16)
    alone = describe(images)
    beside = describe({"numbers": torch.ones(4, dtype=torch.int64), "images": images})
    assert alone is not None
    assert beside is not None
    torch.testing.assert_close(beside, alone, rtol=0, atol=0)


def test_flat_and_huge_images_have_finite_signatures() -> None:
    images = torch.stack(
        (torch.zeros(3, 16, 16), torch.ones(3, 16, 16), 255 * torch.rand(3, 16, 16))
    )
    images = torch.cat((images, 1e30 * torch.rand(2, 3, 16, 16)))
    images[4, 0, 0, 0] = torch.finfo(torch.float32).max
    found = describe(images)
    assert found is not None
    assert bool(found.isfinite().all())
