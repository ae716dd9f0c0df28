"""tfm list: the models on this disk."""

import json
from typing import TYPE_CHECKING, Any

import click

from tfm.cli.options import Command, quiet_option
from tfm.cli.output import Notes, Output
from tfm.cli.units import size, table

if TYPE_CHECKING:
    from tfm.engine.store import StoredModel

TITLES = ["model", "size", "packed", "kind", "folder", "remark"]


@click.command("list", cls=Command)
@click.option("--json", "as_json", is_flag=True, help="A JSON list of objects.")
@quiet_option
@click.pass_obj
def command(output: Output, as_json: bool, quiet: bool) -> None:
    """List the models on this disk.

    \b
    Examples:
      tfm list
      tfm list --json | jq -r .[].ref
      tfm list | sort -k 2 -h

    A line has what -m takes, the size, the size of the packed weights that tfm keeps for a quick start, where the model
    came from, its folder, and what is amiss with it, or with which model it shares the packed weights. A folder of your
    own is there when tfm keeps its packed weights. A line with titles stands before them on a terminal only.
    """
    from tfm.engine.store import list_models

    models = list_models()
    if as_json:
        output.write_line(json.dumps([_as_json(model) for model in models], ensure_ascii=False))
        return
    titles = [TITLES] if models and output.is_terminal else []
    for line in table([*titles, *(_cells(model) for model in models)]):
        output.write_line(line)
    if not models:
        with Notes(quiet) as notes:
            notes.note("no models yet; tfm pull smollm2-135m fetches the default one")


def _as_json(model: "StoredModel") -> dict[str, Any]:
    return {
        "ref": model.ref,
        "kind": model.kind,
        "size_bytes": model.size_bytes,
        "packed_bytes": model.packed_bytes,
        "folder": str(model.folder),
        "fault": model.fault,
        "shared_with": list(model.shared_with),
    }


def _cells(model: "StoredModel") -> list[str]:
    sizes = [size(model.size_bytes), size(model.packed_bytes)]
    shared = f"packed weights shared with {', '.join(model.shared_with)}" if model.shared_with else None
    return [model.ref, *sizes, model.kind, str(model.folder), "; ".join(filter(None, [model.fault, shared]))]
