"""Signals end a run after the step at hand, or at once where it waits."""

import signal
from collections.abc import Iterator

import pytest

from driftfilter.app.run.signals import Stop

NUMBERS = [signal.SIGTERM, signal.SIGINT]


@pytest.mark.parametrize("number", NUMBERS)
def test_the_step_at_hand_is_finished(number: signal.Signals) -> None:
    stop, begun, ended, before = Stop(), [], [], signal.getsignal(number)
    with stop.listen():
        for item in stop.each(iter(range(5))):
            begun.append(item)
            if item == 2:
                signal.raise_signal(number)
            ended.append(item)
    assert begun == ended == [0, 1, 2]
    assert stop.signal == number
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", NUMBERS)
def test_a_wait_ends_at_once(number: signal.Signals) -> None:
    went_on = False

    def items() -> Iterator[int]:
        nonlocal went_on
        yield 0
        signal.raise_signal(number)
        went_on = True
        yield 1

    stop = Stop()
    with stop.listen():
        assert list(stop.each(items())) == [0]
    assert not went_on
    assert stop.signal == number


def test_a_second_signal_interrupts() -> None:
    stop = Stop()
    with stop.listen():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert stop.signal == signal.SIGTERM


def test_without_a_signal_all_come() -> None:
    stop = Stop()
    with stop.listen():
        assert list(stop.each(iter(range(3)))) == [0, 1, 2]
    assert stop.signal is None
