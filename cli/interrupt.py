"""Ctrl-C ends the process within a moment, whatever it is doing, with status 130; so do SIGTERM (143), SIGHUP (129) and
SIGQUIT (131).

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
LAST_WORDS_S = 1.0  # for what is said and taken away then, by another thread
STATUS = 128  # and the signal's number, as shells have it
OTHERS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # by kill and service managers; a closed terminal; Ctrl-\
TAKEN_AWAY = "ignored due to race condition"  # how Python tells of a signal that came while its handler was taken away


class Stopped(KeyboardInterrupt):
    """SIGTERM and its like: ends what Ctrl-C ends, and also a chat, of which Ctrl-C ends only an answer."""


@dataclass
class Stop:
    """The handler of the signals that end the process; number is that of the first that came.

    It tells the thread that waits at the other end of writer: a library may have taken the wakeup descriptor for
    itself (asyncio), or swallow the exception (a bare except). end is called in place of raising (`Wish.handed`).
    """

    writer: int | None = None
    number: int | None = None
    end: Callable[[], None] | None = None

    @property
    def status(self) -> int:
        """The exit status of a process that was stopped."""
        return STATUS + (self.number or signal.SIGINT)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            return  # the end is near, and nothing is to be left half-done
        self.number = number
        if self.writer is not None:
            with suppress(BlockingIOError):
                os.write(self.writer, bytes([number]))
        if number == signal.SIGINT and signal.getsignal(number) is self:
            signal.signal(number, signal.SIG_DFL)  # a second Ctrl-C waits for nothing
        if self.end is not None:
            self.end()
            return
        raise KeyboardInterrupt if number == signal.SIGINT else Stopped


def listen(last_words: Callable[[], None]) -> Stop:
    """From now on these signals raise KeyboardInterrupt in the main thread, and end the process after GRACE_S.

    A signal that is ignored (a shell's &, nohup) stays so. last_words is done before the process is ended from the
    side; it must be quick, and runs in another thread.
    """
    reader, writer = os.pipe()
    stop = Stop(writer)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader, stop, last_words), daemon=True).start()
    for number in (signal.SIGINT, *OTHERS):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, stop)
    sys.unraisablehook = _pass_over_stops
    return stop


def _pass_over_stops(event: "sys.UnraisableHookArgs") -> None:
    """What Python can only tell of signals is no fault: a stop that came in a callback, where the other thread ends the
    process, and a signal that came while a library took its handler away."""
    is_race = isinstance(event.exc_value, OSError) and str(event.exc_value).endswith(TAKEN_AWAY)
    if not is_race and not issubclass(event.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(event)


@dataclass
class Wish:
    """Whether Ctrl-C was pressed since `begin`. descriptor is where a thread waits for the other signals, stop what
    handles those."""

    descriptor: int = -1
    stop: Stop | None = None
    to_stop: bool = False
    end: Callable[[], None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.to_stop = True
        if self.end is not None:
            self.end()

    def begin(self) -> None:
        """Work begins that may be wished to stop. A line editor has had the wakeup descriptor to itself until now."""
        self.to_stop = False
        if self.descriptor >= 0:
            signal.set_wakeup_fd(self.descriptor, warn_on_full_buffer=False)

    @contextmanager
    def handed(self, end: Callable[[], None]) -> Iterator[None]:
        """Inside, signals raise nothing: an event loop would be left as it is, or swallow it. Each calls `end`, which
        lets the work inside come to its end soon; and there KeyboardInterrupt or Stopped is raised, once."""
        stop = self.stop or Stop()
        self.to_stop, self.end, stop.end = False, end, end
        try:
            yield
        finally:
            self.end = stop.end = None
            if stop.number is not None:
                raise Stopped
            if self.to_stop:
                raise KeyboardInterrupt


@contextmanager
def noted() -> Iterator[Wish]:
    """Inside, Ctrl-C ends nothing and is only noted; whoever works looks for it between two steps."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *OTHERS)}
    stop = next((handler for handler in handlers.values() if isinstance(handler, Stop)), None)
    wish = Wish(signal.set_wakeup_fd(-1), stop)
    is_heard = isinstance(handlers[signal.SIGINT], Stop)  # and not ignored
    if is_heard:
        signal.signal(signal.SIGINT, wish)
    wish.begin()
    try:
        yield wish
    finally:
        wish.begin()
        if is_heard:
            signal.signal(signal.SIGINT, handlers[signal.SIGINT])


@contextmanager
def held() -> Iterator[None]:
    """Inside, a signal that ends the process waits for the end: something is made that must not stay behind unknown.

    Signals come to the main thread only; in another one there is nothing to hold.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
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


def _watch(reader: int, stop: Stop, last_words: Callable[[], None]) -> None:
    number = 0
    while not number:
        number = next((found for found in os.read(reader, 64) if _is_to_end(found)), 0)
    time.sleep(GRACE_S)
    ending = threading.Thread(target=last_words, daemon=True)  # may find a pipe that is full and that nobody empties
    ending.start()
    ending.join(LAST_WORDS_S)
    os._exit(STATUS + (stop.number or number))  # of several at once, Python may have handled another one first


def _is_to_end(number: int) -> bool:
    """Whether this signal ends the process; a Ctrl-C that is only noted does not."""
    if number == signal.SIGINT:
        handler = signal.getsignal(signal.SIGINT)
        return handler is signal.SIG_DFL or isinstance(handler, Stop)
    return number in OTHERS
