"""Ending a run on a signal: SIGTERM, as a service manager sends, or Ctrl-C."""

import io
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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

    def wait(self, stream: io.BufferedIOBase) -> bool:
        """Wait until there is something to read, or nothing more will come; False if a signal came
        first.

        Nothing is read here, so that nothing is lost if the wait ends.
        """
        try:
            # First: a signal from here on raises, one before it is seen.
            self._waiting = True
            if self.signal is None:
                with suppress(OSError):  # a stream in memory, or a pipe of Windows
                    select.select([stream], [], [])
            self._waiting = False
        except _NowError:
            self._waiting = False
        return self.signal is None

    def each(self, items: Iterator[T]) -> Iterator[T]:
        """The items, until a signal comes."""
        while self.signal is None and (item := next(items, None)) is not None:
            yield item
