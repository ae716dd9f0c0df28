"""tfm rm: take a model from this disk."""

import click

from tfm.cli.options import Command, quiet_option, ref_argument
from tfm.cli.output import Notes
from tfm.cli.units import size


@click.command("rm", cls=Command)
@ref_argument
@quiet_option
def command(ref: str, quiet: bool) -> None:
    """Remove the model REF and what tfm keeps of it.

    \b
    Examples:
      tfm rm smollm2-135m
      tfm rm HuggingFaceTB/SmolLM2-360M-Instruct
      tfm rm ./model.gguf

    REF is what tfm list shows, in tfm's cache or the hub's. The packed weights that tfm keeps for a quick start go with
    it. Of a folder of your own only these go: it is never touched, nor is the .gguf file that was imported.
    """
    from tfm.engine.store import find_model, remove_model

    model = find_model(ref)
    freed = remove_model(ref)
    with Notes(quiet) as notes:
        others = ", ".join(model.shared_with) if model else ""
        notes.note(f"{size(freed)} freed{f'; its packed weights stay, shared with {others}' if others else ''}")
