"""The group of commands: one a module of tfm.cli.commands, found by its file and imported when it is wanted."""

import importlib
import pkgutil
import re

import click

from tfm.cli import commands
from tfm.cli.options import takes_text, version_option

WORD = re.compile(r"-[^\W\d_]{3,}")  # after a dash: more than options of one letter are
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
    if isinstance(error, click.NoSuchOption) and error.ctx:
        message = error.message
        hint = hint if " " in error.option_name else _option_meant(error, error.ctx) or hint or _short_options(error)
    sentences = [text if text.endswith((".", "?", '"')) else f"{text}." for text in (message, hint) if text]
    return f"{name}: {' '.join(sentences)}\n{name} --help tells what there is."


def _option_meant(error: click.NoSuchOption, context: click.Context) -> str:
    """A proposal for an option that does not exist; also for a long one that has only one dash."""
    known = [option for option in _options(context) if option.startswith("--")]
    one_dash = [word for word in _arguments(context) if f"-{word.partition('=')[0]}" in known]
    return _proposal(f"-{one_dash[0].partition('=')[0]}" if one_dash else error.option_name, known)


def _short_options(error: click.NoSuchOption) -> str:
    """What there is, for an option of one letter."""
    context = error.ctx
    if context is None or error.option_name.startswith("--"):
        return ""
    return f"Options of one letter: {', '.join(option for option in _options(context) if option[:2] != '--')}."


def _options(context: click.Context) -> list[str]:
    return [
        option for parameter in context.command.get_params(context) for option in parameter.opts if option[0] == "-"
    ]


def _arguments(context: click.Context) -> list[str]:
    """What was given before --, where options stand."""
    given: list[str] = context.meta.get("tfm.arguments", [])
    return given[: given.index("--")] if "--" in given else given


def _hint_for_text(error: click.UsageError) -> str:
    """What probably happened to a text: the shell took it apart, or it begins with a dash and looks like options."""
    context = error.ctx
    if context is None or not takes_text(context.command):
        return ""
    before = _arguments(context)
    if error.message.startswith("Got unexpected extra argument"):
        after = context.meta.get("tfm.arguments", [])[len(before) + 1 :]
        if any(word.partition("=")[0] in _options(context) for word in after):
            return "Put options before --: what stands after it is text."
        return "A text of several words is put in quotes."
    is_short = isinstance(error, click.NoSuchOption) and not error.option_name.startswith("--")
    if any(word.startswith("-") and (" " in word or (is_short and WORD.fullmatch(word))) for word in before):
        return f'A text that begins with a dash is put after --, like this: {context.command_path} -- "- a text"'
    return ""


def complete_in_shell(instruction: str) -> int:
    """Shell completion, as click has it: _TFM_COMPLETE=bash_source tfm prints the code for bash."""
    from click.shell_completion import shell_complete

    return shell_complete(app, {}, "tfm", "_TFM_COMPLETE", instruction)
