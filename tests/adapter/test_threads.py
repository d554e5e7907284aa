"""Threads around one adapter: whoever asks while it learns is answered from a whole state."""

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import Tensor

import driftfilter as df
from fuzzing import batch, made, same
from small import few_copies

pytestmark = pytest.mark.slow

THREADS, UPDATES, ASKED = 8, 10, batch(5, 50)
Bits = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _often() -> Iterator[None]:
    """Threads take turns a thousand times as often as usual."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(usual / 1000)
    yield
    sys.setswitchinterval(usual)


def adapter(case: str) -> df.Adapter:
    model, preset = case.split("-")
    return df.adapt(made(model), preset, window=12, **few_copies(preset))


def prediction(adapted: df.Adapter) -> Bits:
    found = adapted.predict(ASKED)
    return {"log": found.log_probabilities, "variance": found.logit_variance}


def state(adapted: df.Adapter) -> Bits:
    return dict(adapted.state_dict())


def answers_during(learn: Callable[[int], Any], ask: Callable[[], Bits]) -> list[Bits]:
    """What eight threads are answered while one learns; it waits for some answers after every
    batch.
    """
    answered, done = threading.Semaphore(0), threading.Event()

    def asking(_: int) -> list[Bits]:
        answers = []
        while not done.is_set():
            answers.append(ask())
            answered.release()
        return answers

    def learning() -> None:
        try:
            for number in range(UPDATES):
                learn(number)
                assert answered.acquire(timeout=300)
        finally:
            done.set()

    with ThreadPoolExecutor(THREADS + 1) as pool:
        asked = [pool.submit(asking, number) for number in range(THREADS)]
        pool.submit(learning).result()
        return [answer for each in asked for answer in each.result()]


@pytest.mark.parametrize(
    "case",
    [
        "batch_norm-driftfilter",
        "batch_norm-tent",
        "batch_norm-opgd",
        "group_norm-cotta",
        "linear-t3a",
        "linear-head_ekf",
    ],
)
@pytest.mark.parametrize("ask", [prediction, state], ids=["predict", "state_dict"])
def test_eight_threads_see_whole_states(case: str, ask: Callable[[df.Adapter], Bits]) -> None:
    alone, adapted = adapter(case), adapter(case)
    known = [ask(alone)]
    for number in range(UPDATES):
        alone.update(batch(6, number))
        known.append(ask(alone))
    assert not any(
        same(one, other) for one, other in itertools.pairwise(known)
    )  # or they would tell nothing
    answers = answers_during(lambda number: adapted.update(batch(6, number)), lambda: ask(adapted))
    assert len(answers) >= UPDATES
    assert all(any(same(answer, each) for each in known) for answer in answers)
    assert same(dict(adapted.state_dict()), dict(alone.state_dict()))


def test_resets_and_loads_are_seen_whole() -> None:
    alone, adapted = adapter("batch_norm-driftfilter"), adapter("batch_norm-driftfilter")
    start = state(alone)
    alone.update(batch(6, 0))
    saved = state(alone)

    def learn(number: int) -> None:
        adapted.reset() if number % 2 else adapted.load_state_dict(saved)

    answers = answers_during(learn, lambda: state(adapted))
    assert all(same(answer, start) or same(answer, saved) for answer in answers)
