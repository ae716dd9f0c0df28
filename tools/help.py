"""Write docs/cli.md from every command's help: to be run when a command, an option or a help text has changed."""

import inspect
from pathlib import Path

import click

from tfm.cli.app import app

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"
EXAMPLES = "\b\nExamples:\n"
HEAD = """\
# The commands

Made by `python tools/help.py` from what `tfm COMMAND --help` (or `-h`) shows: change the help, not this page.

[What all commands have in common](manners.md): exit statuses, stdout and stderr, `--json`, memory, the cache.
"""


def page() -> str:
    """The whole page, in Markdown."""
    top = click.Context(app, info_name="tfm", terminal_width=100)
    commands = {name: app.get_command(top, name) for name in app.list_commands(top)}
    contents = [f"- [`tfm {name}`](#tfm-{name}): {_first_line(command)}" for name, command in commands.items()]
    parts = [HEAD, "\n".join(contents) + "\n", _section(app, top)]
    parts += [_section(command, click.Context(command, top, info_name=name)) for name, command in commands.items()]
    return "\n".join(parts)


def _first_line(command: click.Command) -> str:
    return inspect.cleandoc(command.help).splitlines()[0]


def _section(command: click.Command, context: click.Context) -> str:
    """A command: what it does, how it is called, examples, what else there is to say, and its options."""
    summary, _, rest = inspect.cleandoc(command.help).partition(EXAMPLES)
    examples, _, description = rest.partition("\n\n")
    usage = command.get_usage(context).removeprefix("Usage: ")
    parts = [f"## {context.command_path}", summary.strip(), _block(usage), _block(examples), _paragraphs(description)]
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    rows = [record for option in options if (record := option.get_help_record(context))]
    table = [f"| `{_cell(name)}` | {_cell(text)} |" for name, text in rows]
    return "\n\n".join([*filter(None, parts), "\n".join(["| option | what it does |", "|---|---|", *table])]) + "\n"


def _block(text: str) -> str:
    """Lines as they are. Not marked as shell, for not all of them can be run anywhere."""
    lines = "\n".join(line.strip() for line in text.strip().splitlines())
    return f"```\n{lines}\n```"


def _paragraphs(text: str) -> str:
    """Each on one line, whatever the help's source has."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip())


def _cell(text: str) -> str:
    """Text for a table, where a bar would begin the next cell."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
