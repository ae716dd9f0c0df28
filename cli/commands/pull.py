"""tfm pull: have a model on this disk."""

import click

from tfm.cli.options import Command, quiet_option, ref_argument
from tfm.cli.output import Notes, Output


@click.command("pull", cls=Command)
@ref_argument
@quiet_option
@click.pass_obj
def command(output: Output, ref: str, quiet: bool) -> None:
    """Download or import the model REF, and print its folder.

    \b
    Examples:
      tfm pull smollm2-135m
      tfm pull HuggingFaceTB/SmolLM2-360M-Instruct
      tfm pull ./model.gguf

    A model of the hub goes into the hub's own cache; a branch, tag or commit is named as org/name@revision. What is
    there already is not fetched again; of a branch that has moved on, what is new is.
    """
    from tfm.engine.config import read_config
    from tfm.engine.errors import TfmError
    from tfm.engine.hub import resolve

    with Notes(quiet) as notes:
        folder = resolve(ref, notes.progress, refresh=True)
        try:
            read_config(folder)
        except TfmError as error:
            notes.note(f"it is here, but tfm cannot run it: {error}")
    output.write_line(str(folder))
