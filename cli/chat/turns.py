"""One turn of a chat: the answer written as it comes, and what is said about it; on a terminal and in a pipe alike."""

import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

from tfm.cli.answer import Answer
from tfm.cli.constraint import ConstraintOptions
from tfm.cli.interrupt import Stopped
from tfm.cli.output import Notes, Output, say
from tfm.cli.prompt_cache import PromptCacheOptions
from tfm.cli.reading import Reading
from tfm.engine.errors import TfmError

if TYPE_CHECKING:
    from collections.abc import Generator

    from tfm.engine.conversation import AnswerSettings, Conversation
    from tfm.engine.generate import Token
    from tfm.engine.progress import Progress

ROOM_SHARE = 4  # a proposal to forget turns leaves this part of the context for the answer, where it can


def never() -> bool:
    """Nobody stops an answer but by ending the process."""
    return False


class Turns:
    """A conversation, and how it is answered; settings may change between turns."""

    def __init__(
        self, conversation: "Conversation", settings: "AnswerSettings", output: Output, notes: Notes,
        constraint: ConstraintOptions, cache: PromptCacheOptions, verbose: bool,
    ) -> None:  # fmt: skip
        self.conversation, self.settings = conversation, settings
        self.output, self.notes, self._verbose = output, notes, verbose
        self._constraint, self._cache, self._is_restored = constraint, cache, False
        self.has_commands = False  # that messages may tell of

    def ask(self, text: str, is_to_stop: Callable[[], bool] = never) -> Answer:
        """Send text and write the answer, of which a part is enough when is_to_stop says so.

        Raises TfmError, with the conversation as it was, for what cannot be sent.
        """
        ids = self.conversation.ids(text)
        count = len(ids)
        if count > self.conversation.model.ctx:
            raise self._too_long(text, count)
        if not self._is_restored:
            self._is_restored = True
            self._cache.restore(self.conversation.model, self.conversation.sequence, ids)
        return self._write(lambda progress: self.conversation.answer(text, self.settings, progress), count, is_to_stop)

    def ask_again(self, is_to_stop: Callable[[], bool] = never) -> Answer:
        """Another answer to the last message. Raises TfmError where there is none."""
        count = self.conversation.count("")
        return self._write(lambda progress: self.conversation.regenerate(self.settings, progress), count, is_to_stop)

    def _write(
        self, start: "Callable[[Progress], Generator[Token, None, None]]", count: int, is_to_stop: Callable[[], bool]
    ) -> Answer:
        reading = Reading(self.notes, count)

        def progress(label: str, done: int, total: int | None) -> None:
            reading.progress(label, done, total)
            if is_to_stop():
                raise KeyboardInterrupt

        begun_s = time.perf_counter()
        tokens = start(progress)
        answer = Answer(begun_s, begun_s, self.conversation.new_tokens)
        with closing(tokens):
            try:
                for token in reading.follow(answer.follow(tokens)):
                    self.output.write(token.text)
                    if is_to_stop() and token.finish_reason is None:
                        break
            except KeyboardInterrupt as stop:
                if isinstance(stop, Stopped) or not is_to_stop():
                    raise
        return answer

    def check_end(self, answer: Answer) -> None:
        """Raises TfmError for an answer that broke off before its constraint allows; it is in the conversation."""
        self._constraint.check_end(self.conversation.constraint, answer.finish_reason)

    def remark(self, answer: Answer) -> None:
        """Say how fast it went, if that is wanted, and why an answer is shorter than the model would have it."""
        model, made = self.conversation.model, len(answer.tokens)
        reason = answer.why_short(self.settings.max_tokens, model.ctx)
        if reason is not None:
            self.notes.note(reason)
        if self._verbose:
            prompt, decode = f"prompt {answer.prompt_tokens} new tokens", f"answer {made} tokens"
            if answer.prompt_tok_s is not None:
                prompt += f", {answer.prompt_tok_s:.1f} tok/s"
            if answer.decode_tok_s is not None:
                decode += f", {answer.decode_tok_s:.1f} tok/s"
            say(f"tfm: {prompt}; {decode}; {self.conversation.sequence.length} of {model.ctx} positions in use")

    def _too_long(self, text: str, count: int) -> TfmError:
        """What does not fit, and what to forget so that it would."""
        conversation, ctx = self.conversation, self.conversation.model.ctx
        allowed = f"at most {ctx}, the context"
        counts = [conversation.count(text, dropped) for dropped in range(1, conversation.turns + 1)]
        roomy = (i for i, left in enumerate(counts, 1) if left <= ctx - ctx // ROOM_SHARE)
        enough = next(roomy, None) or next((i for i, left in enumerate(counts, 1) if left <= ctx), None)
        if enough is None:
            alone = f"{counts[-1]} tokens, even without the earlier turns" if counts else f"{count} tokens"
            return TfmError("message", alone, allowed, "shorten it")
        what = "conversation with this message"
        if not self.has_commands:
            more = ", or raise --ctx" if ctx < conversation.model.config.max_position_embeddings else ""
            do = f"in a pipe nothing is forgotten: begin another conversation with this message{more}"
            return TfmError(what, f"{count} tokens", allowed, do)
        turns = f"/drop {enough} forgets the oldest {enough} of {conversation.turns} turns"
        return TfmError(
            what, f"{count} tokens", allowed,
            f"{turns} ({counts[enough - 1]} tokens are left), /reset all of them",
        )  # fmt: skip
