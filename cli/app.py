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
            names = self.list_commands(ctx)
            say = f'For a prompt say: tfm generate "{name}"' if " " in name else f"Commands: {', '.join(names)}."
            ctx.fail(f"No such command {name!r}. {_proposal(name, names) or say}")
        return super().resolve_command(ctx, args)


def _proposal(word: str, known: list[str]) -> str:
    """The known words that were probably meant: those that word is the start of, else those that look like it."""
    from difflib import get_close_matches

    word = word.replace("_", "-")
    meant = [other for other in known if other.startswith(word)] or get_close_matches(word, known)
    return f"Did you mean {' or '.join(meant)}?" if meant else ""


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
    message, hint = error.format_message(), _hint_for_text(error)
    if isinstance(error, click.NoSuchOption) and error.ctx and " " not in error.option_name:
        options = [option for parameter in error.ctx.command.get_params(error.ctx) for option in parameter.opts]
        message = error.message
        hint = _proposal(error.option_name, [option for option in options if option.startswith("--")]) or hint
    return f"{name}: {message}{hint and ' '}{hint}\n{name} --help tells what there is."


def _hint_for_text(error: click.UsageError) -> str:
    """What probably happened to a text: the shell took it apart, or it begins with a dash and looks like options."""
    context = error.ctx
    if context is None or not takes_text(context.command):
        return ""
    if error.message.startswith("Got unexpected extra argument"):
        return "A text of several words is put in quotes."
    given = context.meta.get("tfm.arguments", [])
    given = given[: given.index("--")] if "--" in given else given
    if isinstance(error, click.NoSuchOption) or any(word.startswith("-") and " " in word for word in given):
        return f'A text that begins with a dash is put after --, like this: {context.command_path} -- "- a text"'
    return ""


def complete_in_shell(instruction: str) -> int:
    """Shell completion, as click has it: _TFM_COMPLETE=bash_source tfm prints the code for bash."""
    from click.shell_completion import shell_complete

    return shell_complete(app, {}, "tfm", "_TFM_COMPLETE", instruction)


