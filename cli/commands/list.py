"""tfm list: the models on this disk."""

import json

import click

from tfm.cli.options import Command, quiet_option
from tfm.cli.output import Notes, Output
from tfm.cli.units import size, table


@click.command("list", cls=Command)
@click.option("--json", "as_json", is_flag=True, help="A JSON list of objects: ref, kind, size_bytes, folder, fault.")
@quiet_option
@click.pass_obj
def command(output: Output, as_json: bool, quiet: bool) -> None:
    """List the models on this disk.

    \b
    Examples:
      tfm list
      tfm list --json | jq -r .[].ref
      tfm list | sort -k 2 -h

    A line has what -m takes, the size, where the model came from, its folder, and what is amiss with it.
    """
    from tfm.engine.store import list_models

    models = list_models()
    if as_json:
        rows = [{"ref": m.ref, "kind": m.kind, "size_bytes": m.size_bytes, "folder": str(m.folder)} for m in models]
        rows = [row | {"fault": m.fault} for row, m in zip(rows, models, strict=True)]
        output.write_line(json.dumps(rows, ensure_ascii=False))
        return
    for line in table([[m.ref, size(m.size_bytes), m.kind, str(m.folder), m.fault or ""] for m in models]):
        output.write_line(line)
    if not models:
        with Notes(quiet) as notes:
            notes.note("no models yet; tfm pull smollm2-135m fetches the default one")
