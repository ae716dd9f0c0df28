"""Numbers and rows for a person's eyes."""

from collections.abc import Sequence


def size(nbytes: int) -> str:
    """Bytes in three digits: 98.2M, 1.31G; powers of 1000, in the letters that `sort -h` knows."""
    value, unit = float(nbytes), ""
    for unit in ("", "K", "M", "G", "T"):
        if value < 999.5 or unit == "T":
            break
        value /= 1000
    return f"{value:.3g}{unit}"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with their columns aligned, two spaces between them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
