"""--prompt-cache: what a file has of a prompt is not run again, and what was run is put there for the next time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tfm.cli.options import group
from tfm.engine.errors import TfmError

if TYPE_CHECKING:
    from tfm.engine import cache
    from tfm.engine.model import Model


@dataclass(frozen=True)
class PromptCacheOptions:
    """The file, if one was given."""

    prompt_cache: str | None

    def check(self) -> None:
        """Before a model is loaded: raises UsageError or TfmError where the file cannot be written."""
        if self.prompt_cache == "":
            raise click.UsageError("--prompt-cache is empty; a variable of the shell may not be set.")
        if self.prompt_cache is not None:
            from tfm.engine.prompt_cache import check_path

            check_path(Path(self.prompt_cache))

    @contextmanager
    def sequence(self, model: "Model") -> "Iterator[cache.Sequence]":
        """An empty text, which is saved when the work inside is done, or broken off."""
        with model.sequence() as sequence:
            try:
                yield sequence
            except BaseException:
                if sequence.length:
                    with suppress(TfmError):  # what broke off the work is told, and nothing else
                        self._save(model, sequence)
                raise
            self._save(model, sequence)

    def _save(self, model: "Model", sequence: "cache.Sequence") -> None:
        if self.prompt_cache is not None:
            from tfm.engine.prompt_cache import save

            save(Path(self.prompt_cache), model, sequence)

    def restore(self, model: "Model", sequence: "cache.Sequence", ids: Sequence[int]) -> int | None:
        """Begin the empty sequence with what the file has of ids; so many of them, None without a file to look in."""
        if self.prompt_cache is None:
            return None
        from tfm.engine.prompt_cache import restore

        return restore(Path(self.prompt_cache), model, sequence, ids)


prompt_cache_options = group("cache", PromptCacheOptions, [
    click.option(
        "--prompt-cache", metavar="FILE",
        help="Keep the context in FILE when the answer is there; a prompt that begins like it is not computed again.",
    ),
])  # fmt: skip
