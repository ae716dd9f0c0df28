"""Ctrl-C ends the process within a moment, whatever it is doing, with status 130; so do SIGTERM (143) and SIGHUP (129).

Python runs a signal's handler between two of its own instructions. A long forward pass or a compilation is one
instruction, and a library may wait for its threads. So the signal's number is also written into a pipe, at once
(signal.set_wakeup_fd); a thread waits there, and when the main thread has not ended the process after GRACE_S, it does.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

GRACE_S = 1.0
STATUS = 128  # and the signal's number, as shells have it
OTHERS = (signal.SIGTERM, signal.SIGHUP)  # kill and service managers send the one, a terminal that is closed the other


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGHUP: ends what Ctrl-C ends, and also a chat, of which Ctrl-C ends only an answer."""


@dataclass
class Stop:
    """The handler of the signals that end the process; number is that of the first that came.

    It tells the thread that waits at the other end of writer: a library may have taken the wakeup descriptor for
    itself (asyncio), or swallow the exception (a bare except).
    """

    writer: int | None = None
    number: int | None = None

    @property
    def status(self) -> int:
        """The exit status of a process that was stopped."""
        return STATUS + (self.number or signal.SIGINT)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        if self.writer is not None:
            with suppress(BlockingIOError):
                os.write(self.writer, bytes([number]))
        if signal.getsignal(signal.SIGINT) is self:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C waits for nothing
        for other in OTHERS:
            if signal.getsignal(other) is self:
                signal.signal(other, signal.SIG_IGN)  # the end is near, and nothing is to be left half-done
        raise KeyboardInterrupt if number == signal.SIGINT else Stopped


def be_quiet() -> None:
    """While modules are imported Ctrl-C simply ends the process. Where it is ignored (a shell's &) it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def listen(last_words: Callable[[], None]) -> Stop:
    """From now on Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt in the main thread, and end it after GRACE_S.

    A signal that is ignored (a shell's &, nohup) stays so. last_words is done before the process is ended from the
    side; it must be quick, and runs in another thread.
    """
    reader, writer = os.pipe()
    stop = Stop(writer)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader, last_words), daemon=True).start()
    for number in (signal.SIGINT, *OTHERS):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, stop)
    sys.unraisablehook = _pass_over_stops
    return stop


def _pass_over_stops(event: "sys.UnraisableHookArgs") -> None:
    """A stop that came in a callback, of which Python can only tell, is no fault: the other thread ends the process."""
    if not issubclass(event.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(event)


@dataclass
class Wish:
    """Whether Ctrl-C was pressed since `begin`. descriptor is where a thread waits for the other signals."""

    descriptor: int = -1
    to_stop: bool = False

    def begin(self) -> None:
        """Work begins that may be wished to stop. A line editor has had the signals to itself until now."""
        self.to_stop = False
        if self.descriptor >= 0:
            signal.set_wakeup_fd(self.descriptor, warn_on_full_buffer=False)


@contextmanager
def noted() -> Iterator[Wish]:
    """Inside, Ctrl-C ends nothing and is only noted; whoever works looks for it between two steps.

    What is inside may set handlers of its own, as prompt-toolkit does while it waits for a key.
    """
    stop, wish = signal.getsignal(signal.SIGINT), Wish(signal.set_wakeup_fd(-1))
    is_heard = isinstance(stop, Stop)  # and not ignored
    if is_heard:
        signal.signal(signal.SIGINT, lambda number, frame: setattr(wish, "to_stop", True))
    wish.begin()
    try:
        yield wish
    finally:
        wish.begin()
        if is_heard:
            signal.signal(signal.SIGINT, stop)


@contextmanager
def held() -> Iterator[None]:
    """Inside, a signal that ends the process waits for the end: something is made that must not stay behind unknown."""
    stops = {number: signal.getsignal(number) for number in (signal.SIGINT, *OTHERS)}
    came: list[int] = []
    for number, stop in stops.items():
        if isinstance(stop, Stop):
            signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, stop in stops.items():
            if isinstance(stop, Stop):
                signal.signal(number, stop)
        for first in came[:1]:
            signal.raise_signal(first)


def _watch(reader: int, last_words: Callable[[], None]) -> None:
    number = 0
    while not number:
        number = next((found for found in os.read(reader, 64) if _is_to_end(found)), 0)
    time.sleep(GRACE_S)
    ending = threading.Thread(target=last_words, daemon=True)  # may find a pipe that is full and that nobody empties
    ending.start()
    ending.join(GRACE_S)
    os._exit(STATUS + number)


def _is_to_end(number: int) -> bool:
    """Whether this signal ends the process; a Ctrl-C that is only noted does not."""
    if number == signal.SIGINT:
        handler = signal.getsignal(signal.SIGINT)
        return handler is signal.SIG_DFL or isinstance(handler, Stop)
    return number in OTHERS
