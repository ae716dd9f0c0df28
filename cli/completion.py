"""What the Tab key finds behind an option or in an argument: models and files. Options and commands click knows."""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from tfm.engine.errors import TfmError

SHELLS = ("bash", "zsh", "fish")
ASKED = tuple(f"{shell}_{what}" for what in ("source", "complete") for shell in SHELLS)
MOST_DIGITS = 9


class ModelType(click.ParamType):  # type: ignore[type-arg]
    """What -m takes: models in the caches and in this folder; where none begins so, whatever path the shell finds."""

    name = "ref"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        names = {name for name in _cached_models() if name.startswith(incomplete)}
        if not names:
            return [CompletionItem(incomplete, type="file")]
        here = {path.name for path in _models_here() if path.name.startswith(incomplete)}
        return [CompletionItem(name) for name in sorted(names | here) if shlex.quote(name) == name]


TYPES = {"REF": ModelType(), "FILE": click.Path(), "OUT": click.Path(), "FILE|TEXT": click.Path()}


def complete_values(command: click.Command) -> None:
    """Let the shell complete the values of a command whose help names them as a model or a file."""
    for parameter in command.params:
        parameter.type = TYPES.get((parameter.metavar or "").strip("[]"), parameter.type)


def fault_of(instruction: str) -> TfmError | None:
    """What is wrong with $_TFM_COMPLETE, or with what a shell's code tells beside it; click believes all of it."""
    if instruction not in ASKED:
        return TfmError("$_TFM_COMPLETE", repr(instruction), ", ".join(ASKED))
    if instruction.endswith("_source"):
        return None
    words, place = os.environ.get("COMP_WORDS"), os.environ.get("COMP_CWORD")
    if words is None:
        return TfmError("$COMP_WORDS", "nothing", "the words of the line, as a shell's code for completion has them")
    if place is None or (not instruction.startswith("fish") and not (place.isdecimal() and len(place) <= MOST_DIGITS)):
        return TfmError("$COMP_CWORD", "nothing" if place is None else repr(place), "the number of the word, from 0")
    return None


def has_text(instruction: str) -> bool:
    """Whether there is something to complete: bytes that are no UTF-8 begin nothing that tfm knows."""
    texts = [os.environ.get(name, "") for name in ("COMP_WORDS", "COMP_CWORD")]
    is_blank = instruction == "fish_complete" and texts[1] != "" and not texts[1].split()
    return not is_blank and not any("\ud800" <= letter <= "\udfff" for text in texts for letter in text)


def _cached_models() -> Iterator[str]:
    """What tfm list has but for the user's own folders, by their names alone: the hub's library takes long to load."""
    from tfm.engine.manifest import source_of
    from tfm.engine.store import DEFAULT_MODEL, models_folder

    yield DEFAULT_MODEL
    for folder in _entries(models_folder()):
        source = source_of(folder)
        if source is not None:
            yield source
    for folder in _entries(_hub_cache()):
        kind, *names = folder.name.split("--", 2)
        if kind == "models" and any(folder.glob("snapshots/*/config.json")):
            yield "/".join(names)


def _hub_cache() -> Path:
    """Where the hub's library keeps models, by the variables that it reads."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", f"{cache}/huggingface")
    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE", f"{home}/hub")))


def _models_here() -> Iterator[Path]:
    """Checkpoint folders and .gguf files in the current folder."""
    return (path for path in _entries(Path()) if path.suffix == ".gguf" or (path / "config.json").exists())


def _entries(folder: Path) -> list[Path]:
    """What is in folder; nothing where it cannot be read: a shell that completes is not told of errors."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
