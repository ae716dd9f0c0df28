"""tfm bench: how fast a model runs here, and how far that is from what the machine can do."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfm.cli.options import KV_TYPES, Command, group, model_option, quiet_option
from tfm.cli.output import Notes, Output
from tfm.cli.records import SHAPES, Records
from tfm.cli.units import size
from tfm.cli.values import wrong_value

if TYPE_CHECKING:
    from tfm.engine.bench import Result, Subject, Test
    from tfm.engine.bench_kernels import KernelResult
    from tfm.engine.roofline import Machine

WEIGHTS = ("q4", "q8", "f32", "f16", "bf16")
TITLES = ("model", "size", "params", "backend", "threads", "test", "t/s", "of limit", "limit")
KERNEL_TITLES = ("op", "case", "verified", "GB/s", "GFLOP/s", "time", "NumPy GB/s", "NumPy GFLOP/s", "NumPy time")
START_TITLES = ("command", "first byte", "exit")

MACHINE = "measuring the limits of this machine"


class CountsType(click.ParamType):  # type: ignore[type-arg]
    """Whole numbers with commas between, none below `least`."""

    name = "n,n"

    def __init__(self, least: int) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            counts = tuple(map(int, value.split(",")))
        except ValueError:  # also of a number with thousands of digits
            counts = ()
        if not counts or min(counts) < self.least:
            allowed = f"whole numbers from {self.least} with commas between, such as 128,512"
            raise wrong_value(param, ctx, value, allowed)
        return counts


def counts(*names: str, least: int, default: str | None, text: str) -> Callable[[Any], Any]:
    """An option that takes a comma list of counts."""
    kind = CountsType(least)
    has_default = default is not None
    return click.option(*names, type=kind, metavar="N,...", default=default, show_default=has_default, help=text)


@dataclass(frozen=True)
class TestOptions:
    """What is measured: every combination."""

    n_prompt: tuple[int, ...]
    n_gen: tuple[int, ...]
    batch: tuple[int, ...]
    depth: tuple[int, ...]
    threads: tuple[int, ...] | None
    repetitions: tuple[int, ...]
    kv_type: str

    def tests(self) -> "list[Test]":
        """In the field's order: prompts, then decoding, for each batch, for each depth."""
        from tfm.engine.bench import Test

        kinds = [("pp", count) for count in self.n_prompt if count] + [("tg", count) for count in self.n_gen if count]
        each = product(self.depth, self.batch, kinds, self.repetitions)
        return [Test(kind, count, batch, depth, runs) for depth, batch, (kind, count), runs in each]


test_options = group("what", TestOptions, [
    counts("-p", "--n-prompt", least=0, default="512", text="Tokens of a prompt read at once (pp); 0: none."),
    counts("-n", "--n-gen", least=0, default="128", text="Tokens decoded one by one (tg); 0: none."),
    counts("-b", "--batch", least=1, default="1", text="Sequences side by side."),
    counts("-d", "--depth", least=0, default="0", text="Tokens that a sequence has before."),
    counts("--threads", least=1, default=None, text="Processors to use; default: all."),
    counts("-r", "--repetitions", least=1, default="5", text="Runs of each test, after one that is not counted."),
    click.option("--kv-type", type=click.Choice(KV_TYPES), default="f16", show_default=True, help="Keys and values."),
])  # fmt: skip


@dataclass(frozen=True)
class SubjectOptions:
    """Which model, or what else is measured."""

    config: Path | None
    weights: str | None
    kernels: str | None
    startup: bool
    cold: bool

    def check(self, ctx: click.Context) -> None:
        """Raises UsageError for options that contradict each other."""
        if self.kernels == "":
            raise click.UsageError("--kernels is empty; a variable of the shell may not be set.")
        if sum(map(bool, (self.config, self.kernels, self.startup))) > 1:
            raise click.UsageError("--config, --kernels and --startup are three things to measure; choose one.")
        if self.weights and not self.config:
            raise click.UsageError("--weights needs --config; a checkpoint has weights of its own.")
        if self.cold and not self.startup:
            raise click.UsageError("--cold needs --startup.")
        self._check_idle(ctx)
        if ctx.get_parameter_source("ref") is click.core.ParameterSource.COMMANDLINE and (self.config or self.kernels):
            raise click.UsageError("-m is a model with weights; --config and --kernels have none.")

    def _check_idle(self, ctx: click.Context) -> None:
        """Raises UsageError for options that say how a model is run, where none is."""
        subject = "--startup" if self.startup else "--kernels" if self.kernels is not None else None
        if subject is None:
            return
        used = {"repetitions"} if self.startup else set()
        for parameter in ctx.command.params:
            name = parameter.name or ""
            is_given = ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
            if name in {field.name for field in fields(TestOptions)} - used and is_given:
                raise click.UsageError(f"{parameter.opts[0]} says how a model is run; {subject} has no use for it.")


subject_options = group("subject", SubjectOptions, [
    click.option(
        "--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
        help="A model of the shape that this config.json tells, with random weights.",
    ),
    click.option("--weights", type=click.Choice(WEIGHTS), help="The format of random weights; default: q4."),
    click.option(
        "--kernels", is_flag=False, flag_value="all", metavar="[OP]",
        help="Each kernel, or one, at its cases: verified, then timed beside NumPy.",
    ),
    click.option("--startup", is_flag=True, help="Whole processes, from exec to the first byte and to the exit."),
    click.option("--cold", is_flag=True, help="With --startup: also once with an empty cache."),
])  # fmt: skip


@click.command("bench", cls=Command)
@test_options
@subject_options
@click.option(
    "-o", "--output", "shape", type=click.Choice(SHAPES), default="md", show_default=True, help="Shape of the result."
)
@model_option
@quiet_option
@click.pass_context
def command(ctx: click.Context, what: TestOptions, subject: SubjectOptions, shape: str, ref: str, quiet: bool) -> None:
    """Measure how fast a model runs, and the machine's limit.

    \b
    Examples:
      tfm bench
      tfm bench -p 0 -n 16 -b 1,4 -d 0,256 -r 2
      tfm bench --kernels norm

    pp512 is a prompt of 512 tokens read at once, tg128 are 128 tokens decoded one by one; @ d256 says that 256 tokens
    stand before, b4 that four sequences run side by side. Each option of them takes a list with commas, and every
    combination is measured. The limit is what memory or the multipliers of this machine allow, measured as well.
    """
    subject.check(ctx)
    output: Output = ctx.obj
    with Notes(quiet) as notes:
        if subject.kernels:
            _bench_kernels(output, shape, subject.kernels, notes)
        elif subject.startup:
            _bench_starts(output, shape, ref, what.repetitions, subject.cold, notes)
        else:
            tests = what.tests()
            if not tests:
                raise click.UsageError("Nothing to measure: -p and -n are both 0.")
            _bench_model(output, shape, what, subject, ref, notes)


# ------------------------------------------------------------------------------------------------ a model


def _bench_model(
    output: Output, shape: str, what: TestOptions, options: SubjectOptions, ref: str, notes: Notes
) -> None:
    from tfm.engine import roofline
    from tfm.engine.bench import check, measure, open_checkpoint, open_shape, usable_threads, with_threads

    progress, tests = notes.asked_for, what.tests()
    threads = usable_threads(what.threads or ())
    roofline.prepare(progress)
    if options.config:
        format: Any = options.weights or "q4"
        first = open_shape(options.config, format, threads[0], what.kv_type, notes.progress)
    else:
        first = open_checkpoint(ref, threads[0], what.kv_type, notes.progress)
    check(tests, first.model)
    with Records(output, shape, TITLES, ("size", "params", "threads", "t/s", "of limit")) as records:
        for count in threads:
            subject = with_threads(first, count)
            progress(MACHINE, 0, None)
            machine = roofline.measure_machine(count)
            progress(MACHINE, 1, 1)
            for result in measure(subject, tests, machine, progress):
                records.add(_as_record(result, shape), _cells(result))
            records.footer.append(_limits(machine))
            _tell_of_busy_machine(subject, records, notes, shape)


def _as_record(result: "Result", shape: str) -> dict[str, object]:
    """JSON's keys; a CSV has the limit's name too, as the table has."""
    record = result.as_json()
    return {**record, "limit": result.limit} if shape == "csv" else record


def _cells(result: "Result") -> list[str]:
    return [
        result.model,
        f"{size(result.size_bytes)}B",
        size(result.params),
        result.backend,
        str(result.threads),
        result.test.name,
        f"{result.avg_ts:.2f} ± {result.stddev_ts:.2f}",
        f"{result.limit_share:.0%}",
        result.limit,
    ]


def _limits(machine: "Machine") -> str:
    from tfm.engine.machine import cpu_name

    plural = "s" * (machine.threads > 1)
    peaks = ", ".join(f"{name} {machine.macs_s[name] / 1e9:.0f}G" for name in ("f32", "q8", "q4"))
    memory = f"memory {machine.bytes_s / 1e9:.1f} GB/s"
    return f"{cpu_name()}, {machine.threads} thread{plural}: {memory}; multiply-adds a second: {peaks}"


def _tell_of_busy_machine(subject: "Subject", records: Records, notes: Notes, shape: str) -> None:
    """Threads that came late, because others keep the processors busy, were done without for a while."""
    alone = subject.model.steps_alone
    if not alone:
        return
    steps = f"{alone} step{'s' * (alone != 1)}"
    text = f"The machine was busy: {steps} ran on one of {subject.model.threads} threads"
    if shape == "md":
        records.footer.append(text)
    else:
        notes.note(text)


# ------------------------------------------------------------------------------------------------ kernels, processes


def _bench_kernels(output: Output, shape: str, name: str, notes: Notes) -> None:
    """Raises TfmError when a kernel is not as exact as it must be, after all have been measured."""
    from tfm.engine.bench_kernels import choose_ops, measure_kernels, prepare
    from tfm.engine.errors import TfmError

    try:
        ops = choose_ops(name)
    except TfmError as error:
        raise click.UsageError(str(error)) from error
    failed: list[str] = []
    prepare(ops, notes.asked_for)
    with Records(output, shape, KERNEL_TITLES, KERNEL_TITLES[3:]) as records:
        for result in measure_kernels(ops, notes.asked_for):
            records.add(result.as_json(), list(_kernel_cells(result)))
            if not result.passed:
                failed.append(f"{result.op} {result.case}")
    if failed:
        raise TfmError(f"kernels: {len(failed)} cases are wrong", failed[0], do="please report it with this table")


def _kernel_cells(result: "KernelResult") -> "Iterator[str]":
    yield from (result.op, result.case, "yes" if result.passed else f"NO: {result.error:.2g} > {result.allowed:.2g}")
    for seconds in (result.seconds, result.numpy_s):
        yield f"{result.bytes_ / seconds / 1e9:.2f}"
        yield f"{result.operations / seconds / 1e9:.2f}"
        yield f"{seconds * 1e6:.1f} µs"


def _bench_starts(output: Output, shape: str, ref: str, repetitions: Sequence[int], cold: bool, notes: Notes) -> None:
    from tfm.cli.startup import measure_starts
    from tfm.engine.hub import resolve

    folder = resolve(ref, notes.progress)
    with Records(output, shape, START_TITLES, START_TITLES[1:]) as records:
        for start in measure_starts(str(folder), repetitions, cold, notes.asked_for):
            records.add(start.as_json(), [start.command, f"{start.first_byte_s:.3f} s", f"{start.exit_s:.3f} s"])
