"""Ctrl-C ends the process within a moment, whatever it is doing, with status 130.

Python runs a signal's handler between two of its own instructions. A long forward pass or a compilation is one
instruction, and a library may wait for its threads. So the signal's number is also written into a pipe, at once
(signal.set_wakeup_fd); a thread waits there, and when the main thread has not ended the process after GRACE_S, it does.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

GRACE_S = 1.0
STATUS = 130


def be_quiet() -> None:
    """While modules are imported Ctrl-C simply ends the process. Where it is ignored (a shell's &) it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def listen(last_words: Callable[[], None]) -> None:
    """From now on Ctrl-C raises KeyboardInterrupt in the main thread; a second one, or GRACE_S, ends the process.

    last_words is done before the process is ended from the side; it must be quick, and runs in another thread.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader, last_words), daemon=True).start()
    signal.signal(signal.SIGINT, _interrupt)


@dataclass
class Wish:
    """Whether Ctrl-C was pressed since somebody set it to False."""

    to_stop: bool = False


@contextmanager
def noted() -> Iterator[Wish]:
    """Inside, Ctrl-C ends nothing and is only noted; whoever works looks for it between two steps.

    What is inside may set handlers of its own, as prompt-toolkit does while it waits for a key.
    """
    wish = Wish()
    if signal.getsignal(signal.SIGINT) is not _interrupt:  # ignored
        yield wish
        return
    watched = signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, lambda number, frame: setattr(wish, "to_stop", True))
    try:
        yield wish
    finally:
        signal.set_wakeup_fd(watched, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt


def _watch(reader: int, last_words: Callable[[], None]) -> None:
    while signal.SIGINT not in os.read(reader, 64):
        continue
    time.sleep(GRACE_S)
    ending = threading.Thread(target=last_words, daemon=True)  # may find a pipe that is full and that nobody empties
    ending.start()
    ending.join(GRACE_S)
    os._exit(STATUS)
