"""Batches in their forms: one tensor, several by place, several by name."""

from typing import Any

import pytest
import torch
from torch import Tensor

from driftfilter.base.inputs import (
    arguments,
    batch_size,
    check_inputs,
    doubt,
    each,
    join_batches,
    pick_logits,
    require_logits,
    samples,
    split_batch,
)
from small import refuses

X, Y = torch.arange(12.0).view(6, 2), torch.arange(6)
MASK = torch.eye(4)  # does not go sample by sample
FORMS: dict[str, Any] = {
    "tensor": X,
    "tuple": (X, Y, MASK, 2.0),
    "list": [X, Y, MASK, None],
    "dict": {"x": X, "y": Y, "mask": MASK, "flag": True},
}
forms = pytest.mark.parametrize("form", FORMS)


def parts(inputs: Any) -> list[Any]:
    return (
        [inputs]
        if isinstance(inputs, Tensor)
        else list(inputs.values() if isinstance(inputs, dict) else inputs)
    )


def assert_same(one: Any, other: Any) -> None:
    assert isinstance(one, dict) == isinstance(other, dict)
    if isinstance(one, dict):
        assert list(one) == list(other)
    for found, expected in zip(parts(one), parts(other), strict=True):
        assert torch.equal(found, expected) if isinstance(expected, Tensor) else found == expected


@forms
@pytest.mark.parametrize("size", [1, 2, 4, 6, 9])
def test_pieces_joined_again_are_the_batch(form: str, size: int) -> None:
    pieces = split_batch(FORMS[form], size)
    assert [batch_size(piece) for piece in pieces] == [
        min(size, 6 - start) for start in range(0, 6, size)
    ]
    assert_same(join_batches(pieces), FORMS[form])


@forms
def test_samples_are_cut_and_the_rest_stays(form: str) -> None:
    found = parts(samples(FORMS[form], 2, 5))
    assert torch.equal(found[0], X[2:5])
    if form != "tensor":
        assert torch.equal(found[1], Y[2:5])
        assert found[2] is MASK
        assert found[3] == parts(FORMS[form])[3]


def test_what_is_not_of_samples_is_that_of_the_last_batch() -> None:
    found = join_batches([{"x": X, "mask": MASK, "t": 1}, {"x": X + 1, "mask": MASK + 1, "t": 2}])
    assert_same(found, {"x": torch.cat((X, X + 1)), "mask": MASK + 1, "t": 2})


@forms
def test_each_changes_tensors_only(form: str) -> None:
    for found, before in zip(
        parts(each(FORMS[form], lambda part: part * 2)), parts(FORMS[form]), strict=True
    ):
        assert torch.equal(found, before * 2) if isinstance(before, Tensor) else found == before


@forms
def test_arguments(form: str) -> None:
    args, kwargs = arguments(FORMS[form])
    assert bool(args) != bool(kwargs)
    assert_same(
        kwargs or args, FORMS[form] if form in ("dict", "tuple") else tuple(parts(FORMS[form]))
    )


@forms
def test_good_inputs_pass_as_they_are(form: str) -> None:
    assert check_inputs(FORMS[form]) is FORMS[form]
    with torch.inference_mode():
        made = each(FORMS[form], torch.clone)
    ready = check_inputs(made)
    assert_same(ready, FORMS[form] if form != "list" else tuple(FORMS[form]))
    assert not any(part.is_inference() for part in parts(ready) if isinstance(part, Tensor))


def test_masks_may_hold_infinities_and_images_may_not() -> None:
    mask = torch.full((6, 6), -torch.inf)
    assert check_inputs((X, mask))[1] is mask
    with pytest.raises(
        ValueError, match=r"inputs must be finite, got -inf at index \[0, 0\] \(36 of 36 values\)"
    ):
        check_inputs(mask)


BAD: dict[str, tuple[Any, str]] = {
    "text": ("x", r"inputs must be a tensor \[n, ...\], or a tuple or dict of them, got str"),
    "nothing": (None, "got NoneType$"),
    "array": (X.numpy(), r"got ndarray \(torch.as_tensor makes one of it\)"),
    "no tensors": ((1, 2), "got a tuple"),
    "empty": ({}, "got a dict"),
    "no samples": (
        {"x": X[:0]},
        r"inputs\['x'\] must be a batch \[n, ...\] with n >= 1, got shape \[0, 2\]",
    ),
    "scalar": (
        (torch.tensor(1.0), X),
        r"inputs\[0\] must be a batch \[n, ...\] with n >= 1, got shape \[\]",
    ),
    "NaN": (
        (Y, X * torch.nan),
        r"inputs\[1\] must be finite, got nan at index \[0, 0\] \(12 of 12 values\)",
    ),
}


test_refusals = refuses(BAD.values(), check_inputs)


test_samples_of_different_shapes_do_not_join = refuses(
    [
        (
            [{"x": X}, {"x": torch.zeros(1, 3)}],
            r"inputs\['x'\] must be of one shape .*window, update_every\), got 'samples of shapes "
            r"\[\(2,\), \(3,\)\]'",
        )
    ],
    join_batches,
)


def test_integers_do_not_join_floating_numbers() -> None:
    """Torch would make them floating, and a model would take what it refuses alone; precisions may
    differ.
    """
    message = (
        r"inputs must be all floating or all of one dtype, .*, got \"samples of dtypes "
        r"\['floating', 'torch.int64'\]\""
    )
    with pytest.raises(ValueError, match=message):
        join_batches([X, X.long()])
    assert torch.equal(join_batches([X, X.double()]), torch.cat((X, X)).double())


def test_logits_are_found_or_asked_for() -> None:
    logits = torch.zeros(6, 3)
    for result in (logits, (logits,), [logits], {"logits": logits, "other": X}):
        assert pick_logits(result) is logits
    with pytest.raises(
        ValueError,
        match=r"got a tuple of 2; give an output function that picks them \(output=...\)",
    ):
        pick_logits((logits, X))
    require_logits(logits, 6)
    wrongs: list[tuple[Any, str]] = [
        (logits[0], r"shape \[3\]"),
        (logits[:2], r"shape \[2, 3\]"),
        (None, "NoneType"),
    ]
    for wrong, got in wrongs:
        with pytest.raises(
            ValueError, match=rf"the model's logits must be of shape \[6, k\], got {got}"
        ):
            require_logits(wrong, 6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_probabilities_are_no_logits(dtype: torch.dtype) -> None:
    logits = 5 * torch.randn(200, 10, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert doubt(logits) == doubt(logits.log_softmax(-1)) == ""
    assert "returns probabilities" in doubt(logits.softmax(-1))
    assert "returns probabilities" in doubt(torch.eye(10, dtype=dtype))
    mixed = logits.softmax(-1)
    mixed[7] *= 1.5  # one sample is enough to show that they are none
    assert doubt(mixed) == ""


def test_one_logit_is_doubted() -> None:
    assert "returns one logit" in doubt(torch.randn(4, 1))
