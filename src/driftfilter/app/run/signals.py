"""Ending a run on a signal: SIGTERM, as a service manager sends, or Ctrl-C."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class _NowError(Exception):
    """The wait for data is over."""


class Stop:
    """SIGTERM and SIGINT end a run after the step at hand, or at once if it waits for data.

    A second one interrupts.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._waiting = False

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Hear signals for the time of a block."""
        before = {
            number: signal.signal(number, self._hear) for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, _: Any) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
        if self._waiting:
            raise _NowError

    def each(self, items: Iterator[T]) -> Iterator[T]:
        """The items, until a signal comes."""
        while True:
            item: T | None = None
            try:
                # First: a signal after the next line raises, one before it is seen there.
                self._waiting = True
                item = None if self.signal else next(items, None)
                self._waiting = False
            except _NowError:
                self._waiting = False
            if item is None:
                return
            yield item
