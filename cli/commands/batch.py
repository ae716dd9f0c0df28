"""tfm batch: rows of JSON in, rows of JSON out."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import click

from tfm.cli import options
from tfm.cli.batch.rows import LONGEST_ROW_BYTES
from tfm.cli.constraint import ConstraintOptions, constraint_options
from tfm.cli.lines import Lines
from tfm.cli.output import Notes, Output, say
from tfm.cli.prompt import PromptOptions, chat_options
from tfm.cli.prompt_cache import PromptCacheOptions, beginning_cache_options
from tfm.cli.values import WholeType
from tfm.engine.errors import TfmError

if TYPE_CHECKING:
    from tfm.cli.batch.row_file import RowFile, RowStream
    from tfm.cli.batch.rows import Defaults
    from tfm.cli.batch.run import BatchRun
    from tfm.engine.batch import Batch
    from tfm.engine.constraint import Grammar
    from tfm.engine.model import Model


# The default model took these seconds of one processor for 100 rows (prompts of 16 to 300 tokens, answers of up to 64),
# 32 together, with 0 and with 7: greedy 18.2 and 18.9, at temperature 0.8 18.4 and 18.8 (the better of two runs).
SPECULATE_TOGETHER = 0


@dataclass(frozen=True)
class RowOptions:
    """What holds for rows that do not say otherwise."""

    max_tokens: int
    stop: tuple[str, ...]
    logprobs: int | None
    system: str | None
    prefill: str | None
    raw: bool
    no_special: bool

    @property
    def prompt(self) -> PromptOptions:
        return PromptOptions(self.system, self.prefill, self.raw, self.no_special, ids=False)

    def check(self) -> None:
        """Raises UsageError for options that contradict each other."""
        self.prompt.check()

    def defaults(self, model: "Model", sampling: options.SamplingOptions, grammar: "Grammar | None") -> "Defaults":
        from tfm.cli.batch.rows import Defaults

        has_seed = sampling.seed is not None
        params = sampling.unseeded(model)
        return Defaults(self.prompt, self.max_tokens, self.stop, self.logprobs, params, has_seed, grammar)


row_options = options.group("shape", RowOptions, [
    *chat_options,
    *options.length_options("an answer"),
    click.option(
        "--logprobs", type=WholeType(0), metavar="K",
        help="Each token with its log-probability, and the K likeliest in its place.",
    ),
])  # fmt: skip


@dataclass(frozen=True)
class RunOptions:
    """How the rows are run; none of it changes an answer."""

    out: str | None
    slots: int | None
    unordered: bool
    no_prefix_sharing: bool
    speculate: int
    verbose: bool

    def check(self, cache: PromptCacheOptions) -> None:
        """Raises UsageError for options that make no sense, or contradict each other."""
        if self.out == "":
            raise click.UsageError("-o is empty; a variable of the shell may not be set.")
        if self.slots is not None:
            from tfm.engine.model import MAX_ROWS

            if self.slots > MAX_ROWS:
                raise click.UsageError(f"--slots: found {self.slots}; allowed: a whole number from 1 to {MAX_ROWS}.")
        if self.no_prefix_sharing and cache.prompt_cache is not None:
            raise click.UsageError("--prompt-cache keeps what rows share: not with --no-prefix-sharing.")

    def batch(self, model: "Model") -> "Batch":
        from tfm.engine.batch import SLOTS, Batch

        slots = SLOTS if self.slots is None else self.slots
        return Batch(model, slots, share_prefixes=not self.no_prefix_sharing, speculate=self.speculate)


run_options = options.group("how", RunOptions, [
    click.option(
        "-o", "--output", "out", metavar="OUT",
        help="Append the answers to this file; run again, what is there is skipped. Default: stdout.",
    ),
    click.option("--unordered", is_flag=True, help="Write answers as they finish, not in the order of their rows."),
    click.option("--slots", type=WholeType(1), metavar="N", help="Rows that are decoded together; default: 32."),
    click.option("--no-prefix-sharing", is_flag=True, help="Compute what prompts begin with anew for each row."),
    options.speculate_option(SPECULATE_TOGETHER),
    click.option("-v", "--verbose", is_flag=True, help="Timings and memory on stderr, at the end."),
])  # fmt: skip


@click.command("batch", cls=options.Command)
@click.argument("file", required=False, metavar="[FILE]")
@run_options
@beginning_cache_options
@row_options
@options.row_sampling_options
@constraint_options
@options.model_options
@options.quiet_option
@click.pass_obj
def command(
    output: Output,
    file: str | None,
    how: RunOptions,
    cache: PromptCacheOptions,
    shape: RowOptions,
    sampling: options.SamplingOptions,
    constraint: ConstraintOptions,
    model: options.ModelOptions,
    quiet: bool,
) -> None:
    """Answer every row of FILE, or of stdin, many at once.

    \b
    Examples:
      printf '{"prompt": "A fruit?"}\\n{"prompt": "A city?"}\\n' | tfm batch -n 8
      jq -Rc '{prompt: .}' notes.txt | tfm batch -s "One word." -n 4 | jq -r .text
      jq -Rc '{prompt: .}' notes.txt | tfm batch -n 4 -o a.jsonl; tail -n1 a.jsonl

    A row is a line with a JSON object: {"prompt": ...}, {"messages": [...]} or {"ids": [...]}, with "id" and any of
    the options below about answers, by their names with underscores; they come before those of the command. Each row
    gives one row, the object of tfm generate --json without timings, or {"id", "line", "key", "error"}.

    With -o the same command goes on after a break where it ended, whatever ended it.
    """
    begun_s = time.perf_counter()
    how.check(cache)
    shape.check()
    sampling.given()
    constraint.check()
    cache.check()
    with Notes(quiet) as notes, Lines(file, notes, "rows", LONGEST_ROW_BYTES, must_fit=True) as source:
        from tfm.cli.batch.row_file import open_rows
        from tfm.cli.batch.run import BatchRun

        grammar = constraint.grammar(notes)
        with ExitStack() as stack:
            rows = open_rows(how.out, output, source, stack)
            stack.enter_context(output.stopping(rows.abandon))
            ending = stack.enter_context(_Ending(rows, notes).at_stop(output))
            loaded = stack.enter_context(closing(model.load(notes)))
            loaded_s = time.perf_counter()
            defaults = shape.defaults(loaded, sampling, grammar)
            run = ending.run = BatchRun(loaded, defaults, source, rows, not how.unordered, notes)
            with closing(how.batch(loaded)) as batch, cache.beginning(loaded, batch):
                with ending.at_stop(output):
                    run.run(batch)
                if how.verbose:
                    say(f"tfm: load    {loaded_s - begun_s:.2f} s, {loaded.threads} threads")
                    for line in run.report(batch):
                        say(f"tfm: {line}")
    faults = run.faults()
    if faults:
        raise TfmError("; ".join(faults))


class _Ending:
    """What is done and said, once, when Ctrl-C or another signal ends the run; another thread may call it."""

    def __init__(self, rows: "RowFile | RowStream", notes: Notes) -> None:
        self._rows, self._notes, self._first = rows, notes, threading.Lock()
        self.run: BatchRun | None = None  # when there is one

    @contextmanager
    def at_stop(self, output: Output) -> Iterator[Self]:
        with output.stopping(self):
            try:
                yield self
            except KeyboardInterrupt:
                self()
                raise

    def __call__(self) -> None:
        from tfm.cli.batch.row_file import RowFile

        if not self._first.acquire(blocking=False):
            return
        if self.run is not None:
            self.run.release()
        if not isinstance(self._rows, RowFile):
            return
        kept = self._rows.kept
        if kept == 0:
            self._notes.note("stopped, no row is answered yet; run the same command again to begin anew")
        else:
            count = "" if kept is None else f", {kept} rows are answered"
            self._notes.note(f"stopped{count}; run the same command again to go on")
