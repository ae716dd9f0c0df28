"""Records on stdout as a Markdown table, CSV, JSON or JSON lines."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from tfm.cli.output import Output

SHAPES = ("md", "csv", "json", "jsonl")


class Records:
    """Use it in `with`: csv and jsonl come line by line, md and json at the end, also when the work breaks off.

    titles are the columns of the Markdown table; those in `numbers` are aligned to the right.
    """

    def __init__(self, output: Output, shape: str, titles: Sequence[str], numbers: Sequence[str]) -> None:
        self._output, self._shape = output, shape
        self._titles, self._numbers = titles, numbers
        self._records: list[Mapping[str, Any]] = []
        self._cells: list[Sequence[str]] = []
        self.footer: list[str] = []  # lines under the Markdown table

    def add(self, record: Mapping[str, Any], cells: Sequence[str]) -> None:
        """A record, and what the Markdown table shows of it."""
        self._records.append(record)
        self._cells.append(cells)
        if self._shape == "jsonl":
            self._output.write_line(json.dumps(record, ensure_ascii=False))
        elif self._shape == "csv":
            if len(self._records) == 1:
                self._output.write_line(_csv_line(record))
            self._output.write_line(_csv_line(map(_csv_cell, record.values())))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._records:
            return
        if self._shape == "json":
            self._output.write_line(json.dumps(self._records, ensure_ascii=False, indent=2))
        elif self._shape == "md":
            for line in [*self._table(), *([""] if self.footer else []), *self.footer]:
                self._output.write_line(line)

    def _table(self) -> list[str]:
        right = [title in self._numbers for title in self._titles]
        widths = [max(map(len, column)) for column in zip(self._titles, *self._cells, strict=True)]
        columns = list(zip(widths, right, strict=True))
        rule = [f"{'-' * (width - 1)}:" if is_right else "-" * width for width, is_right in columns]
        lines = [self._titles, rule, *self._cells]
        return [f"| {' | '.join(map(_aligned, line, widths, right))} |" for line in lines]


def _aligned(cell: str, width: int, is_right: bool) -> str:
    return cell.rjust(width) if is_right else cell.ljust(width)


def _csv_cell(value: Any) -> Any:
    """A list as its values with spaces between."""
    return " ".join(map(str, value)) if isinstance(value, list) else value


def _csv_line(values: Any) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(values)
    return line.getvalue()
