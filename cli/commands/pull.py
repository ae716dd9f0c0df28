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
    from tfm.engine.errors import TfmError
    from tfm.engine.files import expanded
    from tfm.engine.hub import resolve
    from tfm.engine.store import find_model
    from tfm.engine.summary import summarize

    with Notes(quiet) as notes:
        folder = resolve(ref, notes.progress, refresh=True, keep=True)
        fault = summarize(folder).unsupported
    if fault is not None:
        where = "" if folder == expanded(ref) else f"it is here ({folder}), but "
        model = find_model(ref)
        has_copy = model is not None and model.kind != "packed"  # else it is the user's own, or rm does not know it
        do = "tfm rm takes it away" if has_copy else None
        raise TfmError(f"model {ref}: {where}tfm cannot run it: {fault}", do=do)
    output.write_line(str(folder))
