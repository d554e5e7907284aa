"""Signals end a run after the step at hand, or at once where it waits."""

import io
import os
import signal

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
    """What is there to read is left where it is."""
    stop, before = Stop(), signal.getsignal(signal.SIGALRM)
    reading, writing = os.pipe()
    with stop.listen(), open(reading, "rb") as stream, open(writing, "wb", 0) as writer:
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(number))
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            assert not stop.wait(stream)
        finally:
            signal.signal(signal.SIGALRM, before)
        assert stop.signal == number
        writer.write(b"later")
        assert not stop.wait(stream)
        assert stream.read1(9) == b"later"


def test_a_wait_for_what_is_there_or_ended() -> None:
    stop = Stop()
    reading, writing = os.pipe()
    with stop.listen(), open(reading, "rb") as stream:
        os.write(writing, b"here")
        assert stop.wait(stream)
        assert stream.read1(9) == b"here"
        os.close(writing)
        assert stop.wait(stream)
        assert stop.wait(io.BytesIO())


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
