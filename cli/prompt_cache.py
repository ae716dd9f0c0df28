"""--prompt-cache: what a file has of a prompt is not run again, and what was run is put there for the next time."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tfm.cli.options import Decorator, group
from tfm.engine.errors import TfmError

if TYPE_CHECKING:
    from tfm.engine import cache
    from tfm.engine.batch import Batch
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
        with model.sequence() as sequence, self._kept(lambda: self._save(model, sequence)):
            yield sequence

    @contextmanager
    def beginning(self, model: "Model", batch: "Batch") -> Iterator[None]:
        """What the file has is a beginning for the prompts of the batch; what all of them began with is saved."""
        if self.prompt_cache is None:
            yield
            return
        self._load_beginning(model, batch)
        with self._kept(lambda: self._save_beginning(model, batch)):
            yield

    def _save(self, model: "Model", sequence: "cache.Sequence") -> None:
        if self.prompt_cache is not None:
            from tfm.engine.prompt_cache import save

            save(Path(self.prompt_cache), model, sequence)

    @contextmanager
    def _kept(self, save: Callable[[], None]) -> Iterator[None]:
        """Saves after the work inside, also when it is broken off."""
        try:
            yield
        except BaseException:
            with suppress(TfmError), warnings.catch_warnings():  # what broke off the work is told, and nothing else
                warnings.simplefilter("ignore")
                save()
            raise
        save()

    def _load_beginning(self, model: "Model", batch: "Batch") -> None:
        from tfm.engine.prompt_cache import load_blocks

        assert self.prompt_cache is not None
        ids, blocks = load_blocks(Path(self.prompt_cache), model, most=model.pool.limit)
        with model.sequence() as sequence:
            sequence.adopt(blocks, ids)
            for block in blocks:
                model.pool.give(block)
            batch.start_from(sequence)

    def _save_beginning(self, model: "Model", batch: "Batch") -> None:
        with batch.common_beginning() as sequence:
            if sequence.length:
                self._save(model, sequence)
            elif batch.read:
                why = "not all prompts begin with the same block of 64 tokens"
                warnings.warn(f"prompt cache {self.prompt_cache}: not saved, {why}", stacklevel=2)

    def restore(self, model: "Model", sequence: "cache.Sequence", ids: Sequence[int]) -> int | None:
        """Begin the empty sequence with what the file has of ids; so many of them, None without a file to look in."""
        if self.prompt_cache is None:
            return None
        from tfm.engine.prompt_cache import restore

        return restore(Path(self.prompt_cache), model, sequence, ids)


def _options(help_: str) -> Decorator:
    return group("cache", PromptCacheOptions, [click.option("--prompt-cache", metavar="FILE", help=help_)])


prompt_cache_options = _options(
    "Keep the context in FILE when the answer is there; a prompt that begins like it is not computed again: "
    "what stays the same must come first, a long text for example by -s."
)
beginning_cache_options = _options(
    "Keep what all prompts begin with in FILE; rows that begin like it, in this run or another, do not compute it."
)
