"""Options for an answer that keeps to a JSON schema, a regex or a grammar."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from tfm.cli.options import group
from tfm.cli.text import BOM, decode, read_file
from tfm.cli.values import TEXT
from tfm.engine.errors import TfmError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tfm.cli.output import Notes
    from tfm.engine.constraint import Constraint, Grammar
    from tfm.engine.model import Model

FROM_SHELL = """for a text let the shell make one: <(printf '%s' 'start: "yes" | "no"')"""
LONGEST_BYTES = 4_000_000  # the engine allows a million characters


@dataclass(frozen=True)
class ConstraintOptions:
    """What the answer must look like; at most one of them."""

    json_schema: str | None
    regex: str | None
    grammar_file: str | None

    def check(self) -> None:
        """Raises UsageError for options that contradict each other."""
        given = [f"--{name}" for name, value in self._values().items() if value is not None]
        if len(given) > 1:
            raise click.UsageError(f"{' and '.join(given)}: an answer has one constraint; leave the others out.")
        if "" in (self.json_schema, self.grammar_file):
            raise click.UsageError(f"{given[0]} is empty; a variable of the shell may not be set.")

    def grammar(self, notes: "Notes") -> "Grammar | None":
        """What was asked for, read from its file; None for nothing. Raises TfmError for a file that cannot be read."""
        if not any(value is not None for value in self._values().values()):
            return None
        from tfm.engine.constraint import Grammar  # it brings NumPy, and most answers have none

        if self.json_schema is not None:
            return Grammar("json_schema", _schema(self.json_schema, notes), "--json-schema")
        if self.regex is not None:
            return Grammar("regex", self.regex, "--regex")
        text = _read(str(self.grammar_file), "--grammar", "a Lark grammar", notes, FROM_SHELL)
        return Grammar("grammar", text, "--grammar")

    def check_end(self, constraint: "Constraint | None", finish_reason: str | None) -> None:
        """Raises TfmError, after the answer was printed, when it broke off before it had to be complete."""
        if constraint is None or (finish_reason == "stop" and constraint.may_end):
            return
        name = next(f"--{name}" for name, value in self._values().items() if value is not None)
        if finish_reason == "stop":
            raise TfmError(f"{name}: the answer is not complete", "a text of --stop in it", do="choose another --stop")
        do = "raise --max-tokens (or --ctx), or ask for less"
        raise TfmError(f"{name}: the answer is not complete", "an end by length", do=do)

    def _values(self) -> dict[str, str | None]:
        return {"json-schema": self.json_schema, "regex": self.regex, "grammar": self.grammar_file}


def start(grammar: "Grammar | None", model: "Model", prompt: "Sequence[int]") -> "Constraint | None":
    """The constraint on one answer to prompt."""
    if grammar is None:
        return None
    from tfm.engine.constraint import Constraints

    return Constraints(model.tokenizer, model.config.vocab_size).start(grammar, prompt)


def _schema(value: str, notes: "Notes") -> str:
    start = value.strip()
    is_text = start.startswith("{") or start in ("true", "false")
    return value if is_text else _read(value, "--json-schema", "a JSON schema, or its text, which begins with {", notes)


def _read(file: str, option: str, wanted: str, notes: "Notes", do: str | None = None) -> str:
    try:
        data = read_file(file, notes, LONGEST_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        found = error.strerror if isinstance(error, OSError) else error
        raise TfmError(f"{option}: file {file}", found, f"a file with {wanted}", do) from error
    if len(data) > LONGEST_BYTES:
        raise TfmError(f"{option}: file {file}", f"more than {LONGEST_BYTES} bytes", f"a file with {wanted}")
    return decode(data, f"{option}: file {file}").removeprefix(BOM)


constraint_options = group("constraint", ConstraintOptions, [
    click.option(
        "--json-schema", type=TEXT, metavar="FILE|TEXT",
        help="The answer is JSON that matches this schema: a file, or the schema itself.",
    ),
    click.option("--regex", type=TEXT, help="The whole answer matches this regex."),
    click.option(
        "--grammar", "grammar_file", type=TEXT, metavar="FILE", help="The answer matches this Lark grammar."
    ),
])  # fmt: skip
