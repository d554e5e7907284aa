"""Streams by turns over one network are as if each had an adapter of its own, bit for bit."""

import pytest
import torch
from torch import Tensor

import driftfilter as df
from small import conv, few_copies, tabular


def _batch(form: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(8, *form, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("preset", ["driftfilter", "center", "tent", "head_ekf", "note", "t3a"])
@pytest.mark.parametrize("images", [False, True])
def test_streams_by_turns(preset: str, images: bool) -> None:
    torch.manual_seed(0)
    model, form = (conv().eval(), (3, 8, 8)) if images else (tabular().eval(), (4,))
    options = few_copies(preset)
    one = df.adapt(model, preset, **options)
    kept = [one.snapshot()] * 2
    own = [df.adapt(model, preset, **options) for _ in kept]
    for step in range(6):
        for place, snapshot in enumerate(kept):
            batch = _batch(form, 2 * step + place)
            one.restore(snapshot)
            assert torch.equal(one(batch), own[place](batch))
            kept[place] = one.snapshot()
            saved, expected = one.state_dict(), own[place].state_dict()
            assert saved.keys() == expected.keys()
            assert all(torch.equal(saved[name], value) for name, value in expected.items())


def test_what_is_loaded_shares_the_network_and_its_source() -> None:
    model = tabular().eval()
    one = df.adapt(model)
    fresh = one.snapshot()
    one(_batch((4,), 0))
    saved, bound = one.state_dict(), one.snapshot().bound
    one.restore(fresh)
    one.load_state_dict(saved)
    assert one.snapshot().bound is bound
    assert bound is not None
    assert one.state.source is bound.start.source


def test_what_is_no_snapshot_of_this_model_changes_nothing() -> None:
    one, other = df.adapt(tabular().eval(), "tent"), df.adapt(tabular(width=9).eval(), "tent")
    for adapter in (one, other):
        adapter(_batch((4,), 0))
    saved = one.state_dict()
    with pytest.raises(ValueError, match="restore: snapshot must be what snapshot"):
        one.restore(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="adapted parameters"):
        one.restore(other.snapshot())
    assert all(torch.equal(value, saved[name]) for name, value in one.state_dict().items())
    one(_batch((4,), 1))


def test_a_snapshot_of_another_recipe_is_refused() -> None:
    model = tabular().eval()
    one, other = df.adapt(model, "tent"), df.adapt(model, "tent", lr=0.5)
    other(_batch((4,), 0))
    saved = one.state_dict()
    with pytest.raises(ValueError, match="restore: snapshot must be of the adapter's own"):
        one.restore(other.snapshot())
    assert all(torch.equal(value, saved[name]) for name, value in one.state_dict().items())
    df.adapt(model, "tent", lr=0.5).restore(other.snapshot())
