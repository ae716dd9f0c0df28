"""The group of commands: one a module of tfm.cli.commands, found by its file and imported when it is wanted."""

import importlib
import pkgutil

import click

from tfm.cli import commands
from tfm.cli.options import takes_text, version_option

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class Commands(click.Group):
    """A group whose commands are the modules of tfm.cli.commands; each has its click command in `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(module.name for module in pkgutil.iter_modules(commands.__path__))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command = importlib.import_module(f"tfm.cli.commands.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """click's own, with a proposal for a name that does not exist."""
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            ctx.fail(f"No such command {name!r}.{_proposal(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


def _proposal(name: str, names: list[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, names)
    if close:
        return f" (Did you mean {' or '.join(close)}?)"
    if " " in name:
        return f' For a prompt say: tfm generate "{name}"'
    return f" Commands: {', '.join(names)}."


@click.group(cls=Commands, context_settings=SETTINGS)
@version_option
def app() -> None:
    """Run transformer language models on this computer's processor.

    \b
    Examples:
      tfm generate "Once upon a time"
      tfm generate "Summarise this:" < notes.txt
      tfm show smollm2-135m

    tfm COMMAND --help tells more about a command.
    """


def explain(error: click.UsageError) -> str:
    """Wrong usage, in words for a person: what is wrong, what was perhaps meant, where to read on."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return error.format_message()
    name = error.ctx.command_path if error.ctx else "tfm"
    return f"{name}: {error.format_message()}{_hint(error)}\n{name} --help tells what there is."


def _hint(error: click.UsageError) -> str:
    """What probably happened to a text: the shell took it apart, or it begins with a dash and looks like options."""
    context = error.ctx
    if context is None or not takes_text(context.command):
        return ""
    given = context.meta.get("tfm.arguments", [])
    given = given[: given.index("--")] if "--" in given else given
    if error.message.startswith("Got unexpected extra argument"):
        return " A text of several words is put in quotes."
    unknown = isinstance(error, click.NoSuchOption) and not error.possibilities
    if unknown or any(argument.startswith("-") and " " in argument for argument in given):
        return f" A text that begins with a dash is put after --, like this: {context.command_path} -- \"- a text\""
    return ""


def complete_in_shell(instruction: str) -> int:
    """Shell completion, as click has it: _TFM_COMPLETE=bash_source tfm prints the code for bash."""
    from click.shell_completion import shell_complete

    return shell_complete(app, {}, "tfm", "_TFM_COMPLETE", instruction)


