"""tfm check: whether this machine calculates as it should."""

import json
from typing import TYPE_CHECKING, Any

import click

from tfm.cli.options import Command, model_option, quiet_option, threads_option
from tfm.cli.output import Notes, Output

if TYPE_CHECKING:
    from tfm.engine.check import Row

HEADING = ("what", "cases", "largest error", "allowed", "result")


@click.command("check", cls=Command)
@model_option
@threads_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object, at the end.")
@quiet_option
@click.pass_obj
def command(output: Output, ref: str, threads: int | None, as_json: bool, quiet: bool) -> None:
    """Tell whether this machine calculates as it should.

    \b
    Examples:
      tfm check
      tfm check -m ./my-checkpoint --threads 1
      tfm check --json -m ./my-checkpoint | jq .passed

    Every kernel is held against NumPy, and the model against float64 on a short text. Then the model must give the same
    bits with any number of threads, however the text is cut, beside other texts, and in a cache that was used before.
    If a row fails, the exit status is 1.
    """
    from tfm.engine import load
    from tfm.engine.bench_kernels import prepare
    from tfm.engine.check import check_kernels, check_model
    from tfm.engine.errors import TfmError
    from tfm.kernels.ops import find_ops

    rows: list[Row] = []
    with Notes(quiet) as notes:
        model = load(ref, threads=threads, kv_type="f32", progress=notes.progress)
        prepare(find_ops(), notes.asked_for)
        if not as_json:
            output.write_line(_line(*HEADING))
        for some in (check_kernels(find_ops(), notes.asked_for), check_model(model, notes.asked_for)):
            for row in some:
                rows.append(row)
                if not as_json:
                    output.write_line(_line(*_cells(row)))
    failed = [row for row in rows if not row.passed]
    if as_json:
        output.write_line(json.dumps(_as_json(ref, model.threads, rows), ensure_ascii=False))
    if failed:
        first = f"{failed[0].what}: {failed[0].fault}"
        remedy = "remove its packed weights (tfm rm REF), get the model again, or report this table"
        raise TfmError(f"check: {len(failed)} of {len(rows)} rows failed", first, do=remedy)


def _line(what: str, cases: str, error: str, allowed: str, result: str) -> str:
    """Rows come as they finish, so the widths are known before."""
    return f"{what:<38}  {cases:>5}  {error:>13}  {allowed:>8}  {result}"


def _cells(row: "Row") -> tuple[str, str, str, str, str]:
    result = "ok" if row.passed else f"FAILED: {row.fault}"
    return row.what, str(row.cases), f"{row.error:.2g}", f"{row.allowed:.2g}", result


def _as_json(ref: str, threads: int, rows: "list[Row]") -> dict[str, Any]:
    from tfm.engine.machine import cpu_name

    passed = all(row.passed for row in rows)
    return {"model": ref, "cpu": cpu_name(), "threads": threads, "passed": passed, "rows": [r.as_json() for r in rows]}
