"""tfm generate: a prompt in, the model's answer out."""

import json
import time
from collections import deque
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from tfm.cli import options
from tfm.cli.answer import Answer, IdsInText
from tfm.cli.constraint import ConstraintOptions, constraint_options, start
from tfm.cli.output import Notes, Output, say
from tfm.cli.prompt import PromptOptions, prompt_options
from tfm.cli.prompt_cache import PromptCacheOptions, prompt_cache_options
from tfm.cli.reading import Reading
from tfm.cli.values import WholeType

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tfm.engine.generate import Token

NO_PROMPT = "No prompt: give PROMPT, -f FILE or text on stdin."


@dataclass(frozen=True)
class AnswerOptions:
    """How much is answered, and in which shape."""

    max_tokens: int
    stop: tuple[str, ...]
    as_json: bool
    logprobs: int | None
    no_stream: bool
    verbose: bool

    def check(self) -> None:
        """Raises UsageError for options that contradict each other."""
        if self.logprobs is not None and not self.as_json:
            raise click.UsageError("--logprobs needs --json.")


answer_options = options.group("shape", AnswerOptions, [
    *options.length_options("the answer"),
    click.option(
        "--json", "as_json", is_flag=True,
        help="One JSON object: the answer, why it ended (null: by Ctrl-C), counts, timings; with --ids also its ids.",
    ),
    click.option(
        "--logprobs", type=WholeType(0), metavar="K",
        help="With --json: each token with its log-probability, and the K likeliest in its place.",
    ),
    click.option("--no-stream", is_flag=True, help="Print the answer when it is complete, not as it comes."),
    click.option("-v", "--verbose", is_flag=True, help="Timings and memory on stderr, at the end."),
])  # fmt: skip


@click.command("generate", cls=options.Command)
@options.text_options("PROMPT")
@prompt_options
@answer_options
@constraint_options
@options.sampling_options
@prompt_cache_options
@options.speculate_option(options.SPECULATE_ALONE)
@options.model_options
@options.quiet_option
@click.pass_obj
def command(
    output: Output,
    source: options.TextOptions,
    prompt: PromptOptions,
    shape: AnswerOptions,
    constraint: ConstraintOptions,
    sampling: options.SamplingOptions,
    cache: PromptCacheOptions,
    speculate: int,
    model: options.ModelOptions,
    quiet: bool,
) -> None:
    """Print a model's answer to PROMPT.

    \b
    Examples:
      tfm generate "Once upon a time"
      tfm generate "Summarise this:" < notes.txt
      tfm generate --json --seed 1 --temperature 0.8 "Name my cat" | jq -r .text

    The prompt is PROMPT, then the files of -f, then what stands on stdin when stdin is no terminal, with a blank line
    between. A model that was made for chat gets it as a message; --raw continues the text as it is.
    """
    begun_s = time.perf_counter()
    prompt.check()
    if prompt.no_special and not prompt.raw:
        raise click.UsageError("--no-special needs --raw: in a chat, names of control tokens are only text as it is.")
    shape.check()
    constraint.check()
    sampling.given()
    cache.check()
    with Notes(quiet) as notes:
        text = source.read(notes)
        if text is None or not (text or prompt.raw):
            raise click.UsageError(NO_PROMPT)
        grammar = constraint.grammar(notes)
        with closing(model.load(notes)) as loaded, cache.sequence(loaded) as sequence:
            loaded_s = time.perf_counter()
            params = sampling.params(loaded, notes)
            ids = prompt.encode(loaded.tokenizer, text)
            reading = Reading(notes, len(ids))
            wanted = start(grammar, loaded, ids)
            made = loaded.generate(
                ids, shape.max_tokens, params, shape.stop, shape.logprobs or 0,
                progress=reading.progress, sequence=sequence, constraint=wanted, speculate=speculate,
            )  # fmt: skip
            answer = Answer(begun_s, loaded_s, len(ids), cached_tokens=cache.restore(loaded, sequence, ids))
            tokens = answer.follow(reading.follow(made))
            ids_in_text = IdsInText(loaded.tokenizer, ids[-1] if ids else None) if prompt.ids else None
            if shape.as_json:
                with_tokens = shape.logprobs is not None
                with output.owing(lambda: _json(answer.as_json(loaded, params.seed, with_tokens, ids_in_text))):
                    deque(tokens, maxlen=0)
            elif ids_in_text is not None:
                _write_ids(output, tokens, ids_in_text, shape)
            else:
                _write_text(output, tokens, shape)
            if shape.verbose:
                output.begin_stderr_line()
                for line in answer.report(loaded):
                    say(f"tfm: {line}")
            constraint.check_end(wanted, answer.finish_reason)
            reason = answer.why_short(shape.max_tokens, loaded.ctx)
            if reason is not None and not (options.has_own_length() and len(answer.tokens) == shape.max_tokens):
                output.begin_stderr_line()
                notes.note(reason)


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False)


def _write_text(output: Output, tokens: "Iterable[Token]", shape: AnswerOptions) -> None:
    """As it comes, or at the end; what there is also when the answer breaks off."""
    try:
        for token in tokens:
            (output.hold if shape.no_stream else output.write)(token.text)
    finally:
        output.release()
    output.end_line()


def _write_ids(output: Output, tokens: "Iterable[Token]", ids_in_text: IdsInText, shape: AnswerOptions) -> None:
    """One line of ids with spaces between."""
    space = ""
    try:
        for token in tokens:
            for id_ in ids_in_text.push(token):
                (output.hold if shape.no_stream else output.write)(f"{space}{id_}")
                space = " "
    finally:
        output.release()
    output.write("\n")
