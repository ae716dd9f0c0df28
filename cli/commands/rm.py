"""tfm rm: take a model from this disk."""

import click

from tfm.cli.options import Command, quiet_option, ref_argument
from tfm.cli.output import Notes
from tfm.cli.units import size


@click.command("rm", cls=Command)
@ref_argument
@quiet_option
def command(ref: str, quiet: bool) -> None:
    """Remove the model REF from tfm's or the hub's cache.

    \b
    Examples:
      tfm rm smollm2-135m
      tfm rm HuggingFaceTB/SmolLM2-360M-Instruct
      tfm rm ./model.gguf

    REF is what tfm list shows. A folder of your own is never touched, nor is the .gguf file that was imported.
    """
    from tfm.engine.store import remove_model

    freed = remove_model(ref)
    with Notes(quiet) as notes:
        notes.note(f"{size(freed)} freed")
