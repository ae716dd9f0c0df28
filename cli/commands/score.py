"""tfm score: how likely a model finds texts that are given."""

import os
import shlex
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from tfm.cli.options import Command, ModelOptions, group, model_options, quiet_option
from tfm.cli.output import Notes, Output
from tfm.cli.values import WholeType
from tfm.engine.errors import TfmError

if TYPE_CHECKING:
    from tfm.cli.lines import Lines
    from tfm.cli.score_rows import Row, RowReader
    from tfm.engine.perplexity import Window
    from tfm.engine.score import Score
    from tfm.engine.scored_text import Text

LEAST_WINDOW = 2  # a first token with nothing before it is not counted


@dataclass(frozen=True)
class ScoreOptions:
    """What is scored, and what is told of it."""

    jsonl: bool
    ids: bool
    raw: bool
    no_special: bool
    end: bool
    per_token: bool
    perplexity: str | None
    stride: int | None
    as_json: bool

    def check(self, file: str | None, ctx: int | None) -> None:
        """Raises UsageError for options that contradict each other; ctx is that of --ctx."""
        rows = self.jsonl or (file is not None and file.endswith(".jsonl"))
        if self.perplexity is None and self.stride is not None:
            raise click.UsageError("--stride is for --perplexity.")
        if self.perplexity is not None:
            if ctx is not None and ctx < LEAST_WINDOW:
                raise click.UsageError(f"--ctx: found {ctx}; allowed: a window of {LEAST_WINDOW} tokens or more.")
            if ctx is not None and self.stride is not None and self.stride >= ctx:
                raise click.UsageError(f"--stride: found {self.stride}; allowed: less than --ctx, {ctx}.")
            if file is not None:
                raise click.UsageError("FILE is scored by lines, and --perplexity has a file of its own; choose one.")
            for name in ("jsonl", "end", "per_token"):
                if getattr(self, name):
                    raise click.UsageError(f"--{name.replace('_', '-')} is for lines, and --perplexity takes a text.")
        if self.ids and self.no_special:
            raise click.UsageError("--no-special is for text, and --ids takes token ids.")
        if self.ids and rows:
            raise click.UsageError("--ids is for lines of token ids; JSON lines have the field ids.")
        if self.raw and not rows:
            raise click.UsageError("--raw is for the prompts of JSON lines; other text is scored as it is.")


score_options = group("what", ScoreOptions, [
    click.option("--jsonl", is_flag=True, help="Lines are JSON objects. Set for a FILE that ends in .jsonl."),
    click.option("--ids", is_flag=True, help="Lines, or the text of --perplexity, are token ids."),
    click.option("--raw", is_flag=True, help="With --jsonl: prompts as they are, without the model's chat template."),
    click.option("--no-special", is_flag=True, help="Names of control tokens in texts and raw prompts are only text."),
    click.option("--end", is_flag=True, help="Score the end-of-text token behind each text as well."),
    click.option("--per-token", is_flag=True, help="Add each token's log-probability and rank (1: the likeliest)."),
    click.option(
        "--perplexity", metavar="FILE",
        help="Score all of a text of any length (- is stdin), through a window of --ctx tokens.",
    ),
    click.option(
        "--stride", type=WholeType(1), metavar="N", help="How far that window moves; default: half of its length."
    ),
    click.option("--json", "as_json", is_flag=True, help="With --perplexity: one JSON object. Lines always give JSON."),
])  # fmt: skip


@click.command("score", cls=Command)
@click.argument("file", required=False, metavar="[FILE]")
@score_options
@model_options
@quiet_option
@click.pass_obj
def command(output: Output, file: str | None, what: ScoreOptions, model: ModelOptions, quiet: bool) -> None:
    """Print how likely a model finds each line of FILE or stdin.

    \b
    Examples:
      tfm score notes.txt
      tfm score --perplexity notes.txt
      echo '{"prompt": "Is ice cold?", "completion": "Yes."}' | tfm score --jsonl

    Each line gives a line of JSON, in order: tokens, logprob (natural, the sum over these tokens), perplexity,
    bits_per_byte. A first token with nothing before it is not counted: models that put BOS before a text have none. A
    line that cannot be scored gives id, line and error, and then the exit status is 1.

    Lines of text end at LF, and all else in them is text, a blank line an empty one. A line of --jsonl has text or ids
    alone, or completion or completion_ids beside a prompt, messages or ids, and perhaps an id. Of these only the
    completion is scored, behind what tfm generate makes of the prompt.
    """
    what.check(file, model.ctx)
    with Notes(quiet) as notes:
        if what.perplexity is None:
            _score_lines(output, notes, file, what, model)
        else:
            _score_text(output, notes, what.perplexity, what, model)


def _score_lines(output: Output, notes: Notes, file: str | None, what: ScoreOptions, options: ModelOptions) -> None:
    from tfm.cli.lines import Lines
    from tfm.cli.score_rows import RowReader
    from tfm.engine.score import score

    _refuse_text(file)
    failed = count = done_bytes = 0
    with Lines(file, notes) as lines, closing(options.load(notes)) as model:
        jsonl = what.jsonl or (file is not None and file.endswith(".jsonl"))
        reader = RowReader(model.tokenizer, model.ctx, jsonl, what.ids, what.raw, what.no_special, what.end)
        rows: deque[Row] = deque()
        for result in score(model, _texts(lines, reader, rows)):
            row = rows.popleft()
            output.write_line(row.as_json(result, model.tokenizer if what.per_token else None))
            count += 1
            failed += isinstance(result, TfmError)
            done_bytes += row.size_bytes
            if not output.is_terminal:  # there the lines themselves tell how far it is
                notes.asked_for("scoring", done_bytes, lines.size_bytes)
    if failed:
        raise TfmError(f"score: {failed} of {count} lines could not be scored", do="their rows say why")


def _refuse_text(file: str | None) -> None:
    """Raises TfmError for a text in the place of FILE: spaces in it, and no file of that name."""
    if file is not None and " " in file and not os.path.lexists(file):
        raise TfmError(f"file {file}", "nothing there", do=f"to score this text: echo {shlex.quote(file)} | tfm score")


def _texts(lines: "Lines", reader: "RowReader", rows: "deque[Row]") -> "Iterator[Text | TfmError | None]":
    """What is to be scored, as it comes; each one's row is put at the end of rows."""
    while True:
        if not lines.comes_within(0):
            yield None
        line = next(lines, None)
        if line is None:
            return
        row = reader.read(line)
        if row is not None:
            rows.append(row)
            yield row.given


def _score_text(output: Output, notes: Notes, file: str, what: ScoreOptions, options: ModelOptions) -> None:
    from tfm.cli.score_rows import json_line
    from tfm.cli.text import gather, parse_ids
    from tfm.engine.perplexity import Window, perplexity
    from tfm.engine.scored_text import id_text, plain_text

    if file == "-" and (sys.stdin is None or os.isatty(0)):
        raise click.UsageError("--perplexity -: no text on stdin.")
    content = gather(None, () if file == "-" else (file,), file == "-", notes) or ""
    with closing(options.load(notes)) as model:
        if what.ids:
            text = id_text(model.tokenizer, parse_ids(content))
        else:
            text = plain_text(model.tokenizer, content, not what.no_special)
        window = Window.of(text.ids[: text.begin], model.ctx, stride=what.stride)
        found = perplexity(model, text, window, notes.asked_for)
    if not found.logprobs:
        least = "one token" if window.before else "two tokens: the first has nothing before it"
        raise TfmError(f"--perplexity {file}", f"{len(text.ids) - text.begin} tokens", f"at least {least}")
    output.write_line(json_line(_as_json(found, window)) if what.as_json else _in_words(found))


def _as_json(found: "Score", window: "Window") -> dict[str, object]:
    from tfm.cli.score_rows import figures

    values = figures(found)
    del values["logprob"]
    is_finite = values["perplexity"] is not None
    return {
        "tokens": values["tokens"],
        "perplexity": values["perplexity"],
        "stderr": found.standard_error if is_finite else None,
        "bits_per_byte": values["bits_per_byte"],
        "ctx": window.ctx,
        "stride": window.stride,
    }


def _in_words(found: "Score") -> str:
    """Perplexity +/- its standard error, which a single token has not, and of how many tokens."""
    error = "" if found.standard_error is None else f" +/- {found.standard_error:.4f}"
    count = len(found.logprobs)
    return f"{found.perplexity:.4f}{error} (perplexity of {count} token{'' if count == 1 else 's'})"
