"""The group of commands: one a module of tfm.cli.commands, found by its file and imported when it is wanted."""

import importlib
import os
import pkgutil
import re

import click

from tfm.cli import commands
from tfm.cli.options import takes_text, version_option

SHOWN_CHARACTERS = 40
WORD = re.compile(r"-[^\W\d_]{3,}")  # after a dash: more than options of one letter are
HELP = ["-h", "--help"]
SETTINGS = {"help_option_names": HELP, "max_content_width": 100}


class Commands(click.Group):
    """A group whose commands are the modules of tfm.cli.commands; each has its click command in `command`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:  # as other programs have it
            args = [*args[1:], "--help"]
        ctx.meta["tfm.arguments"] = list(args)
        return super().parse_args(ctx, args)

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
        if not name.startswith("-") and self.get_command(ctx, name) is None and not ctx.resilient_parsing:
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
      tfm generate "Summarise this:" < notes.txt
      tfm chat -s "Answer in one sentence."
      tfm batch questions.jsonl -o answers.jsonl

    tfm COMMAND --help, or tfm help COMMAND, tells more about a command, with examples of its own.
    """


def explain(error: click.UsageError) -> str:
    """Wrong usage, in words for a person: what is wrong, what was perhaps meant, where to read on."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return error.format_message()
    name = error.ctx.command_path if error.ctx else "tfm"
    message, hint = error.format_message(), _hint_for_text(error)
    if isinstance(error, click.NoSuchOption) and error.ctx:
        message = _whole_word(error, error.ctx) or error.message
        hint = hint if " " in error.option_name else _hint_for_option(error, error.ctx, hint)
    sentences = [text if text.endswith((".", "?", '"')) else f"{text}." for text in (message, hint) if text]
    return f"{name}: {' '.join(sentences)}\n{name} --help tells what there is."


def _whole_word(error: click.NoSuchOption, context: click.Context) -> str:
    """A word in which an option of one letter was looked for, and not found; empty where the option stands alone."""
    name, given = error.option_name, _arguments(context)
    if name.startswith("--") or name in given:
        return ""
    words = (word for word in given if word[:1] == "-" and word[:2] != "--" and name[1:] in word[1:])
    word = next(words, None)
    if word is None:
        return ""
    shown = repr(word if len(word) <= SHOWN_CHARACTERS else f"{word[:SHOWN_CHARACTERS]}...")
    return f"{shown} is read as options of one letter each, and there is no {name!r}."


def _hint_for_option(error: click.NoSuchOption, context: click.Context, hint_for_text: str) -> str:
    """For an option that does not exist: the commands that have it, the one that was perhaps meant, or what there is.

    A long option is hardly a text; letters behind one dash are, before they are another command's options.
    """
    name = error.option_name
    meant, owners = _option_meant(error, context), _commands_with(name, context)
    if name.startswith("--"):
        return owners or meant or hint_for_text
    known = ", ".join(option for option in _options(context.command) if option[:2] != "--")
    return meant or hint_for_text or f"{owners} Options of one letter: {known}.".strip()


def _option_meant(error: click.NoSuchOption, context: click.Context) -> str:
    """A proposal for an option that does not exist; also for a long one that has only one dash."""
    known = [option for option in _options(context.command) if option.startswith("--")]
    one_dash = [word for word in _arguments(context) if f"-{word.partition('=')[0]}" in known]
    return _proposal(f"-{one_dash[0].partition('=')[0]}" if one_dash else error.option_name, known)


def _commands_with(option: str, context: click.Context) -> str:
    """Which commands have an option that this one has not."""
    root = context.find_root()
    commands = {name: app.get_command(root, name) for name in app.list_commands(root)}
    names = [name for name, command in commands.items() if command and option in _options(command)]
    if not names:
        return ""
    if context is root:
        likely = "generate" if "generate" in names else names[0]
        return f"Options of a command stand behind its name: tfm {likely} {option}."
    listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    return f"{option} is an option of tfm {listed}."


def _options(command: click.Command) -> list[str]:
    """All of a command's options; --help, which click adds, in its two forms at the end."""
    own = [option for parameter in command.params for option in parameter.opts if option[0] == "-"]
    return [*own, *HELP]


def _arguments(context: click.Context) -> list[str]:
    """What was given before --, where options stand."""
    given: list[str] = context.meta.get("tfm.arguments", [])
    return given[: given.index("--")] if "--" in given else given


def _hint_for_text(error: click.UsageError) -> str:
    """What probably happened to a text: the shell took it apart, or it begins with a dash and looks like options."""
    context = error.ctx
    if context is None:
        return ""
    before = _arguments(context)
    files = [word for word in before if word.startswith("-") and os.path.lexists(word)]
    if files and isinstance(error, click.NoSuchOption):
        return f"The file of that name is ./{files[0]}"
    is_extra = error.message.startswith("Got unexpected extra argument")
    if is_extra and not any(isinstance(parameter, click.Argument) for parameter in context.command.params):
        return "It takes none; a prompt is for tfm generate."
    if not takes_text(context.command) and context.command is not app:
        return ""
    if is_extra:
        after = context.meta.get("tfm.arguments", [])[len(before) + 1 :]
        if any(word.partition("=")[0] in _options(context.command) for word in after):
            return "Put options before --: what stands after it is text."
        extra = error.message.rpartition("(")[2].rstrip(")").split()
        if "-f" in _options(context.command) and (named := [word for word in extra if os.path.isfile(word)]):
            return f"With -f {named[0]} that file is read."
        return "A text of several words is put in quotes."
    is_short = isinstance(error, click.NoSuchOption) and not error.option_name.startswith("--")
    if any(word.startswith("-") and (" " in word or (is_short and WORD.fullmatch(word))) for word in before):
        path = "tfm generate" if context.command is app else context.command_path
        return f'A text that begins with a dash is put after --, like this: {path} -- "- a text"'
    return ""


def complete_in_shell(instruction: str) -> int:
    """Shell completion, as click has it: _TFM_COMPLETE=bash_source tfm prints the code for bash."""
    from click.shell_completion import shell_complete

    from tfm.cli.completion import complete_values, fault_of, has_text
    from tfm.cli.output import say

    fault = fault_of(instruction)
    if fault is not None:
        say(f"tfm: {fault}")
        return 1
    if not has_text(instruction):
        return 0
    context = click.Context(app)
    for name in app.list_commands(context):
        if command := app.get_command(context, name):
            complete_values(command)
    return shell_complete(app, {}, "tfm", "_TFM_COMPLETE", instruction)
