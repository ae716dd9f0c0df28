"""Which rows of the input have their answer already, and whether a file holds such answers and nothing else."""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tfm.cli.batch.written import OTHER, Written, shown_bytes
from tfm.engine.errors import TfmError

MADE_ANEW = "give another -o, or take out this line and those after it: they are made anew"
RESTORE = f"restore that; or {MADE_ANEW}"
OTHER_ORDER = f"add --unordered, if that wrote them; or {MADE_ANEW}"
EACH_ONCE = "answers to rows of the input, each once"


@dataclass(frozen=True)
class Expected:
    """A row of the input: its line, the key of its answer, and what the bytes of its answer begin with."""

    line: int
    key: str
    begin: Callable[[], bytes]

    def may_be_cut_to(self, data: bytes) -> bool:
        begin = self.begin()
        return data[: len(begin)] == begin[: len(data)]


@dataclass
class Done:
    """What an earlier run has answered: lines up to last_line, and `lines`, sorted, after it.

    count is how many, errors how many of them could not be answered, first_error the first of these. cut is an answer
    that was cut off, and is to be taken out.
    """

    last_line: int = 0
    lines: "array[int]" = field(default_factory=lambda: array("q"))
    count: int = 0
    errors: int = 0
    first_error: str = ""
    cut: Written | None = None

    def note(self, written: Written) -> None:
        self.count += 1
        if written.error is not None:
            self.errors += 1
            self.first_error = self.first_error or f"line {written.line}: {written.error}"

    def __contains__(self, line: int) -> bool:
        place = bisect_left(self.lines, line)
        return line <= self.last_line or (place < len(self.lines) and self.lines[place] == line)


def match_in_order(name: str, written: Iterator[Written], expected: Callable[[], Iterator[Expected]]) -> Done:
    """Answers that must be those of the first rows, in their order. Raises TfmError that names the first that is not.

    name is how a message calls the file.
    """
    rows, done = expected(), Done()
    for found in written:
        row = next(rows, None)
        if row is None:
            raise _other(name, found, "no more answers than there are rows")
        if found.begin is not None:
            if not row.may_be_cut_to(found.begin):
                raise _other(name, found, f"the answer to line {row.line}")
            done.cut = found
            break
        if found.line != row.line:
            raise _other(name, found, f"the answer to line {row.line}", OTHER_ORDER)
        if found.key != row.key:
            raise _changed(name, found)
        done.note(found)
        done.last_line = row.line
    return done


def match(name: str, written: Iterator[Written], expected: Callable[[], Iterator[Expected]]) -> Done:
    """The same for answers in any order. Takes 24 bytes of memory for each."""
    import numpy as np

    lines, keys, done = array("q"), array("Q"), Done()
    for found in written:
        if found.begin is not None:
            done.cut = found
            break
        lines.append(found.line)
        keys.append(int(found.key, 16))
        done.note(found)
    rows = expected()
    row = next(rows, None)
    has_cut = done.cut is None  # or a row was found that it may be the begin of
    for place in map(int, np.argsort(np.frombuffer(lines, np.int64), kind="stable") if lines else ()):
        while row is not None and row.line < lines[place]:
            has_cut = has_cut or (done.cut is not None and row.may_be_cut_to(done.cut.begin or b""))
            row = next(rows, None)
        key = f"{keys[place]:016x}"
        if row is None or (row.line, row.key) != (lines[place], key):
            found = Written(place + 1, lines[place], key, None, 0)
            is_changed = row is not None and row.line == found.line
            raise _changed(name, found) if is_changed else _other(name, found, EACH_ONCE)
        done.lines.append(row.line)
        row = next(rows, None)
    while not has_cut and done.cut is not None:
        if row is None:
            raise _other(name, done.cut, EACH_ONCE)
        has_cut = row.may_be_cut_to(done.cut.begin or b"")
        row = next(rows, None)
    return done


def _other(name: str, found: Written, allowed: str, do: str = MADE_ANEW) -> TfmError:
    what = f"{name}: line {found.place}"
    if found.begin is not None:
        return TfmError(what, shown_bytes(found.begin), allowed, OTHER)
    return TfmError(what, f"the answer to line {found.line}", allowed, do)


def _changed(name: str, found: Written) -> TfmError:
    """For an answer to a line that the input has, but with another key."""
    why = f"FILE was changed at line {found.line}, or the options or the model are others"
    return TfmError(f"{name}: line {found.place}", f"an answer from before {why}", do=RESTORE)
