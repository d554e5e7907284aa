"""Randomness: a pure function of (seed, step, purpose)."""

import itertools

import pytest
import torch
from torch import Tensor

from driftfilter.base.randomness import Purpose, Randomness, _mix, mix_seeds

CPU = torch.device("cpu")


def draws(
    seed: int, step: int, purpose: Purpose, device: torch.device = CPU, count: int = 2000
) -> Tensor:
    return torch.randn(
        count, generator=Randomness(seed, step, device).generator(purpose), device=device
    )


def test_mix_is_splitmix64() -> None:
    """The first outputs of the published generator for seed 1234567."""
    gamma = 0x9E3779B97F4A7C15
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [_mix(1234567 + step * gamma) for step in range(5)] == published


def test_mixed_seeds_differ_in_what_a_cpu_takes() -> None:
    """Its generator takes the last 32 bits of a seed."""
    seeds = [mix_seeds(seed, block) for seed in (0, 1, 2**40) for block in range(50)]
    drawn = [torch.rand(2, generator=torch.Generator().manual_seed(each)) for each in seeds]
    assert len({tuple(each.tolist()) for each in drawn}) == len(seeds)
    assert max(seeds) < 2**32


@pytest.mark.parametrize(
    "device", [CPU, *([torch.device("cuda")] if torch.cuda.is_available() else [])], ids=str
)
@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 - 1])
def test_same_triple_gives_the_same_numbers(seed: int, device: torch.device) -> None:
    randomness = Randomness(seed, 5, device)
    first = torch.randn(9, generator=randomness.generator(Purpose.INFERENCE), device=device)
    assert torch.equal(first, draws(seed, 5, Purpose.INFERENCE, device, 9))
    assert torch.equal(
        first, torch.randn(9, generator=randomness.generator(Purpose.INFERENCE), device=device)
    )


def test_no_two_triples_share_a_stream() -> None:
    seeds = [*range(-5, 30), 2**31, 2**32, 2**63, 2**64 - 40]
    triples = itertools.product(seeds, range(40), Purpose)
    initial = [
        Randomness(seed, step, CPU).generator(purpose).initial_seed()
        for seed, step, purpose in triples
    ]
    assert len(set(initial)) == len(initial) == len(seeds) * 40 * len(Purpose)


def test_neighbouring_streams_are_uncorrelated() -> None:
    triples = itertools.product(range(4), range(4), Purpose)
    correlation = torch.corrcoef(torch.stack([draws(*triple) for triple in triples]))
    assert (correlation - torch.eye(len(correlation))).abs().max() < 5.5 / 2000**0.5


def test_the_global_generator_is_neither_read_nor_moved() -> None:
    torch.manual_seed(1)
    before, first = torch.get_rng_state(), draws(0, 0, Purpose.VIEWS)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(draws(0, 0, Purpose.VIEWS), first)
