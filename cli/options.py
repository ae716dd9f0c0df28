"""Options that several commands share, each group with the dataclass that a command gets it as.

`model_options` on a command gives its function one argument `model`, a ModelOptions, and so on: an option is declared
here once and is a typed field everywhere else.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from tfm.cli.values import NUMBER, TEXT, BiasType, SizeType, WholeType
from tfm.engine.errors import TfmError

if TYPE_CHECKING:
    from tfm.cli.output import Notes
    from tfm.engine.model import Model
    from tfm.engine.sampling_params import SamplingParams

Function = Callable[..., Any]
Decorator = Callable[[Function], Function]

KV_TYPES = ("f32", "f16", "q8")


def takes_text(command: click.Command) -> bool:
    """Whether a command has a text as its argument: such a text may look like an option."""
    return any(isinstance(parameter, click.Argument) and parameter.type is TEXT for parameter in command.params)


class Command(click.Command):
    """A command that remembers its arguments as they were given, for a better word when they are wrong."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["tfm.arguments"] = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise


def group(name: str, kind: type[Any], options: Iterable[Decorator]) -> Decorator:
    """A decorator that adds options, and hands their values to the function as one argument: name, a `kind`."""

    def decorate(function: Function) -> Function:
        @wraps(function)
        def call(**values: Any) -> Any:
            own = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
            return function(**values, **{name: own})

        decorated: Function = call
        for option in reversed(list(options)):
            decorated = option(decorated)
        return decorated

    return decorate


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib.metadata import version

        click.echo(f"tfm {version('tfm-cli')}")
        ctx.exit()


version_option = click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Print the version."
)


def _not_empty(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if not value:
        name = "REF" if isinstance(param, click.Argument) else "-m"
        raise click.UsageError(f"{name} is empty; a variable of the shell may not be set.", ctx)
    return value


quiet_option = click.option("-q", "--quiet", is_flag=True, help="No notes and no progress on stderr, only errors.")
ref_argument = click.argument("ref", metavar="REF", callback=_not_empty)
model_option = click.option(
    "-m", "--model", "ref", metavar="REF", envvar="TFM_MODEL", default="smollm2-135m", show_default=True,
    callback=_not_empty,
    help="The model: a folder, a .gguf file, org/name[@revision] on the hub, or smollm2-135m. "
    "$TFM_MODEL changes the default.",
)  # fmt: skip
threads_option = click.option("--threads", type=WholeType(1), metavar="N", help="Processors to use; default: all.")
# Answers of 160 tokens took 0.96 to 1.2 times as many tokens a second with 8 as with 0 where they repeated nothing, 1.1
# to 2.5 times where they summarised, repeated or quoted their prompt. 7 and the token before them are a tile of rows.
SPECULATE_ALONE = 7


def speculate_option(default: int) -> Decorator:
    """--speculate, for a command whose steps have room for more rows, or have not."""
    return click.option(
        "--speculate", type=WholeType(0), default=default, show_default=True, metavar="N",
        help="Guess up to N tokens from the text so far and check them in one step: the same answer, sooner where it "
        "repeats what is there; 0: none.",
    )  # fmt: skip


def _not_without_text(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    if "" in value:
        raise click.UsageError(f"{param.opts[0]} needs at least one character.", ctx)
    return value


def has_own_length() -> bool:
    """Whether -n was given, so that a person knows where an answer may end."""
    source = click.get_current_context().get_parameter_source("max_tokens")
    return source is not click.core.ParameterSource.DEFAULT


def length_options(answer: str, least: int = 0) -> list[Decorator]:
    """-n and --stop; answer is what the help calls what they end."""
    return [
        click.option(
            "-n", "--max-tokens", type=WholeType(least), default=1024, show_default=True, metavar="N",
            help=f"Most tokens of {answer}.",
        ),
        click.option(
            "--stop", type=TEXT, multiple=True, callback=_not_without_text,
            help=f"End {answer} before this text. Repeatable.",
        ),
    ]  # fmt: skip


@dataclass(frozen=True)
class ModelOptions:
    """Which model to load, and how."""

    ref: str
    threads: int | None
    kv_type: str
    ctx: int | None
    max_ram: int | None

    def load(self, notes: "Notes") -> "Model":
        """The model, ready to run."""
        from tfm.engine import load

        return load(
            self.ref,
            threads=self.threads,
            kv_type=self.kv_type,
            ctx=self.ctx,
            max_ram=self.max_ram,
            progress=notes.progress,
        )


model_options = group("model", ModelOptions, [
    model_option,
    threads_option,
    click.option(
        "--kv-type", type=click.Choice(KV_TYPES), default="f16", show_default=True,
        help="How the context is kept in memory: exact, half the memory, or a quarter.",
    ),
    click.option(
        "--ctx", type=WholeType(1), metavar="N",
        help="Most tokens of prompt and answer; default: the model's own.",
    ),
    click.option("--max-ram", type=SizeType(), help="Most memory for weights, context and scratch, such as 2G."),
])  # fmt: skip


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen; None and () leave it to the model's generation_config.json."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repeat_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: tuple[tuple[int, float], ...]
    seed: int | None

    def given(self) -> dict[str, Any]:
        """What was asked for, as arguments of SamplingParams. Raises UsageError for a value that makes no sense."""
        from tfm.engine.sampling_params import SamplingParams

        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        twice = [id_ for id_, count in Counter(id_ for id_, _ in self.logit_bias).items() if count > 1]
        if twice:
            raise click.UsageError(f"--logit-bias: token {twice[0]} is given more than once.")
        values["logit_bias"] = dict(self.logit_bias) or None
        values = {name: value for name, value in values.items() if value is not None}
        for name, value in values.items():
            try:
                SamplingParams(**{name: value})
            except TfmError as error:
                raise click.UsageError(f"--{name.replace('_', '-')}{str(error).removeprefix(name)}") from error
        return values

    def unseeded(self, model: "Model") -> "SamplingParams":
        """The model's own settings with what was asked for. Raises TfmError for a bias on a token that is not there."""
        from tfm.engine.sampling_params import SamplingParams

        params = SamplingParams.from_folder(model.folder, **self.given())
        params.check_ids(model.config.vocab_size)
        return params

    def params(self, model: "Model", notes: "Notes") -> "SamplingParams":
        """`unseeded` with a seed; a note where what was asked for changes nothing."""
        given = self.given()
        params = self.unseeded(model).seeded()
        idle = [f"--{name.replace('_', '-')}" for name in ("top_k", "top_p", "min_p", "seed") if name in given]
        if params.temperature == 0 and idle:
            notes.note(f"{', '.join(idle)} without effect: at temperature 0 the likeliest token is taken")
        return params


_how_to_choose: list[Decorator] = [
    click.option("--temperature", type=NUMBER, metavar="X", help="0: the likeliest; default: the model's, else 0."),
    click.option("--top-k", type=WholeType(), metavar="K", help="Choose among the K likeliest tokens; 0: among all."),
    click.option("--top-p", type=NUMBER, metavar="P", help="Choose among the likeliest that have P together."),
    click.option("--min-p", type=NUMBER, metavar="P", help="Leave out tokens below P times the likeliest."),
    click.option("--repeat-penalty", type=NUMBER, metavar="X", help="Make tokens that are there less likely; 1: off."),
    click.option("--presence-penalty", type=NUMBER, metavar="X", help="Make tokens of the answer less likely; 0: off."),
    click.option("--frequency-penalty", type=NUMBER, metavar="X", help="The same for each time one is there; 0: off."),
    click.option("--logit-bias", type=BiasType(), multiple=True, help="Add X to the logit of token ID. Repeatable."),
]  # fmt: skip


def _seed(default: str) -> Decorator:
    text = f"The same seed, the same answer; default: {default}."
    return click.option("--seed", type=WholeType(), metavar="N", help=text)


sampling_options = group("sampling", SamplingOptions, [*_how_to_choose, _seed("a new one")])
row_sampling_options = group("sampling", SamplingOptions, [*_how_to_choose, _seed("the number of a row's line")])


@dataclass(frozen=True)
class TextOptions:
    """Where a command's text comes from."""

    text: str | None
    files: tuple[str, ...]
    no_stdin: bool

    def read(self, notes: "Notes") -> str | None:
        """Argument, files and stdin, in this order, with a blank line between; None when none of them is there."""
        from tfm.cli.text import gather

        if "-" in self.files:
            raise click.UsageError("-f -: stdin is read by itself; leave -f - out (a file of that name is ./-).")
        if "" in self.files:
            raise click.UsageError("-f is empty; a variable of the shell may not be set.")
        return gather(self.text, self.files, not self.no_stdin, notes)

    @property
    def has_stdin(self) -> bool:
        """Whether stdin is wanted and open, and no terminal."""
        return not self.no_stdin and sys.stdin is not None and not os.isatty(0)


def text_options(name: str) -> Decorator:
    """The argument `name` (as help shows it), -f and --no-stdin."""
    return group("source", TextOptions, [
        click.argument("text", type=TEXT, required=False, metavar=f"[{name}]"),
        click.option(
            "-f", "--file", "files", multiple=True, metavar="FILE",
            help=f"Text from a file, after {name} and before stdin. Repeatable.",
        ),
        click.option("--no-stdin", is_flag=True, help="Leave stdin alone, as a loop over lines wants it."),
    ])  # fmt: skip
