"""tfm chat: a conversation, on a terminal or line by line."""

import os
import sys
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from tfm.cli import options
from tfm.cli.constraint import ConstraintOptions, constraint_options
from tfm.cli.output import Notes, Output
from tfm.cli.prompt_cache import PromptCacheOptions, prompt_cache_options
from tfm.cli.values import TEXT
from tfm.engine.errors import TfmError

if TYPE_CHECKING:
    from tfm.cli.chat.turns import Turns
    from tfm.engine.cache import Sequence
    from tfm.engine.conversation import Conversation
    from tfm.engine.model import Model


@dataclass(frozen=True)
class ChatOptions:
    """What the model is told, and how much it may answer."""

    system: str | None
    max_tokens: int
    stop: tuple[str, ...]
    speculate: int
    verbose: bool

    def given(self) -> list[str]:
        """Which settings of an answer the command line has."""
        return [*(["max_tokens"] if options.has_own_length() else []), *(["stop"] if self.stop else [])]


chat_options = options.group("chat", ChatOptions, [
    click.option("-s", "--system", type=TEXT, help="What the model is told before the conversation."),
    *options.length_options("an answer", least=1),
    options.speculate_option(options.SPECULATE_ALONE),
    click.option("-v", "--verbose", is_flag=True, help="Tokens and speed of each turn on stderr."),
])  # fmt: skip


@click.command("chat", cls=options.Command)
@chat_options
@constraint_options
@options.sampling_options
@prompt_cache_options
@options.model_options
@options.quiet_option
@click.pass_obj
def command(
    output: Output,
    chat: ChatOptions,
    constraint: ConstraintOptions,
    sampling: options.SamplingOptions,
    cache: PromptCacheOptions,
    model: options.ModelOptions,
    quiet: bool,
) -> None:
    """Talk with a model, which remembers what was said.

    \b
    Examples:
      echo "Name three colours." | tfm chat
      tfm chat -s "Answer in one sentence." < notes.txt
      tfm chat --temperature 0.8 --seed 1 < notes.txt | tee answers.txt

    Without a pipe, tfm chat asks for messages: Enter sends, /help tells what else there is, Ctrl-C stops an answer,
    Ctrl-D leaves. In a pipe each line of stdin is a message, whatever it begins with, and each answer is printed with a
    newline behind it.
    """
    constraint.check()
    kept = {*sampling.given(), *chat.given()}
    cache.check()
    with Notes(quiet) as notes:
        _need_template(model.ref)
        grammar = constraint.grammar(notes)
        with closing(model.load(notes)) as loaded, cache.sequence(loaded) as sequence:
            from tfm.cli.chat.turns import Turns
            from tfm.engine.conversation import AnswerSettings

            params = sampling.params(loaded, notes)
            settings = AnswerSettings(chat.max_tokens, params, chat.stop, chat.speculate, grammar)
            conversation = _begin(loaded, chat.system, sequence)
            if grammar is not None:
                conversation.check_grammar(grammar)  # what is wrong with it is told now, not at the first answer
            _converse(Turns(conversation, settings, output, notes, constraint, cache, chat.verbose), kept)


def _need_template(ref: str) -> None:
    """Refuse a folder without a chat template before anything is loaded from it."""
    from tfm.engine.conversation import require_template
    from tfm.engine.files import expanded

    path = expanded(ref)
    if path.is_dir():
        require_template(path)


def _begin(model: "Model", system: str | None, sequence: "Sequence") -> "Conversation":
    from tfm.engine.conversation import Conversation

    try:
        return Conversation(model, system, sequence)
    except TfmError as error:
        raise error if system is None else TfmError(f"--system: {error}") from error


def _converse(turns: "Turns", kept: set[str]) -> None:
    """On a terminal, or line by line."""
    stdin_is_terminal = sys.stdin is not None and os.isatty(0)
    if stdin_is_terminal and turns.output.is_terminal:
        from tfm.cli.chat.session import Session

        Session(turns, kept).run()
        return
    from tfm.cli.chat.lines import answer_lines

    if stdin_is_terminal:
        turns.notes.note("stdout is no terminal: each line is a message, and Ctrl-D ends the conversation")
    answer_lines(turns)
