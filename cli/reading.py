"""A sign of life while a long prompt is read."""

import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tfm.cli.output import Notes

if TYPE_CHECKING:
    from tfm.engine.generate import Token

PATIENCE_S = 5.0
AGAIN_S = 10.0
MANY_TOKENS = 512  # a shorter prompt is read in one step


class Reading:
    """A bar on a terminal; elsewhere a line, when a prompt of MANY_TOKENS is not read after PATIENCE_S, and so on."""

    def __init__(self, notes: Notes, prompt_tokens: int) -> None:
        self._notes, self._total, self._read = notes, prompt_tokens, 0
        self._label = f"reading the prompt, {prompt_tokens} tokens"

    def progress(self, label: str, done: int, total: int | None) -> None:
        """The engine's Progress, of tokens that have been read."""
        self._read = done
        if self._notes.is_terminal:
            self._notes.progress(self._label, done, total)

    def follow(self, tokens: Iterable["Token"]) -> Iterator["Token"]:
        """tokens as they come; what is shown of the prompt is gone when the first is there."""
        is_read = threading.Event()
        if self._total > MANY_TOKENS and not self._notes.is_terminal:
            threading.Thread(target=self._tell, args=(is_read,), daemon=True).start()
        self.progress(self._label, 0, self._total)
        try:
            for token in tokens:
                is_read.set()
                self._notes.progress(self._label, self._total, self._total)
                yield token
        finally:
            is_read.set()
            self._notes.progress(self._label, self._total, self._total)

    def _tell(self, is_read: threading.Event) -> None:
        wait_s = PATIENCE_S
        while not is_read.wait(wait_s):
            self._notes.note(f"reading the prompt: {self._read} of {self._total} tokens so far")
            wait_s = AGAIN_S
