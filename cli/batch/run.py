"""Rows through the model: from a line of the input to a line of the output."""

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tfm.cli.answer import Answer, IdsInText, peak_memory_bytes
from tfm.cli.batch.resume import Done, Expected
from tfm.cli.batch.row_file import RowFile, RowStream
from tfm.cli.batch.row_order import Turns
from tfm.cli.batch.rows import Defaults, Row, id_in, next_row, read_row
from tfm.cli.batch.written import row_begin, row_text
from tfm.cli.json_row import is_whole
from tfm.cli.lines import Lines
from tfm.cli.output import Notes
from tfm.engine.errors import TfmError

if TYPE_CHECKING:
    from tfm.engine.batch import Batch, Finished
    from tfm.engine.constraint import Constraint, Constraints, Grammar
    from tfm.engine.generate import Request
    from tfm.engine.model import Model

KEY_DIGITS = 16
MINUTE_S, HOUR_S = 60, 3600


class Keys:
    """The key of a row: of its line, its bytes, and everything else that its answer depends on."""

    def __init__(self, model: "Model", defaults: Defaults) -> None:
        from tfm.engine.identity import kernels_digest, text_digest, weights_digest

        decides = {
            "kernels": kernels_digest(),
            "options": asdict(defaults),
            "model": model.name,
            "weights": weights_digest(model.folder),
            "text": text_digest(model.folder),
            "kv_type": model.kv_type,
            "ctx": model.ctx,
        }
        self._begin = hashlib.sha256(json.dumps(decides, sort_keys=True).encode())

    def key(self, line: int, data: bytes) -> str:
        """Of the bytes of a line."""
        digest = self._begin.copy()
        digest.update(b"%d\n" % line)
        digest.update(data)
        return digest.hexdigest()[:KEY_DIGITS]


@dataclass(frozen=True)
class _Taken:
    """A row that is being answered."""

    row: Row
    key: str
    request: "Request"


class BatchRun:
    """Answers the rows of source that `rows` does not have yet."""

    def __init__(
        self, model: "Model", defaults: Defaults, source: Lines, rows: RowFile | RowStream, in_order: bool,
        notes: Notes,
    ) -> None:  # fmt: skip
        self._model, self._defaults, self._source, self._rows, self._notes = model, defaults, source, rows, notes
        self._keys = Keys(model, defaults)
        self._turns = Turns(rows.append, rows.waiting, in_order, rows.whole)
        if defaults.grammar is not None:
            self._start(defaults.grammar, None)  # a fault in it is one of the command, not of each row
        self._begun_s = time.perf_counter()
        self._seen = self._finished = self._prompt_tokens = 0  # rows that were read; of this run: rows, tokens
        self._done = self._resume(in_order)
        self._errors, self._first_error = self._done.errors, self._done.first_error
        self._made = self._together = 0  # rows that this run made answers for; the most that were in work at once
        self._unfinished: int | None = None  # the last line, when there is only the begin of a row
        self._total = source.count() if notes.is_terminal and not notes.quiet else None

    def _resume(self, in_order: bool) -> Done:
        if not isinstance(self._rows, RowFile):
            return Done()
        done = Done()
        if self._rows.has_rows:
            self._source.make_repeatable()
            done = self._rows.resume(self._expected, in_order)
            self._source.rewind()
        waiting = len(self._rows.waiting)
        if done.count or waiting:
            more = f", {waiting} more wait for those before them" if waiting else ""
            self._notes.note(f"{self._rows.name}: {done.count} rows are there already{more}")
        return done

    def _expected(self) -> Iterator[Expected]:
        self._source.rewind()
        while found := next_row(self._source):
            line, data = found
            key = self._keys.key(line, data)
            yield Expected(line, key, lambda data=data, line=line, key=key: row_begin(id_in(data), line, key))  # type: ignore[misc]

    @property
    def answered(self) -> int:
        """Rows that have their answer, or their error, by now."""
        return self._done.count + self._finished

    def run(self, batch: "Batch") -> None:
        """All rows to the end. Raises TfmError where an answer cannot be written."""
        taken: dict[int, _Taken] = {}

        def tick() -> None:
            self._together = max(self._together, len(taken))
            self._show(batch)

        self._show(batch)
        for finished in batch.run(self._requests(taken), tick):
            self._answer(taken.pop(finished.index), finished)
            self._made += 1

    def faults(self) -> list[str]:
        """What there is to say of rows that have no answer."""
        found = []
        if self._errors:
            count = f"{self._errors} of {self.answered} rows have no answer but an error"
            found.append(f"{count}; the first: {self._first_error}")
        if self._unfinished is not None:
            what = f"{self._source.name}: line {self._unfinished}, the last one"
            do = "run the same command again when it is whole: nothing was written for it"
            found.append(str(TfmError(what, "no JSON, and no line feed at its end", "a whole row", do)))
        return found

    def release(self) -> None:
        """Write what is finished though rows before it are not, where no later run could take it over."""
        if isinstance(self._rows, RowStream):
            self._turns.release()

    def _requests(self, taken: "dict[int, _Taken]") -> "Iterator[Request | None]":
        """Rows as requests; None where a pipe has nothing for now, while others are being answered."""
        index = 0
        while True:
            if taken and not self._source.comes_within(0.0):
                yield None
                continue
            found = next_row(self._source)
            if found is None:
                return
            line, data = found
            self._seen += 1
            if line in self._done:
                continue
            if isinstance(self._rows, RowFile) and not self._source.is_ended and not is_whole(data):
                self._unfinished = line  # an error in OUT would stay there when the line is whole
                continue
            key = self._keys.key(line, data)
            is_kept, error = self._rows.waiting.take_kept(line, key)
            self._turns.begin(line)
            if is_kept:
                self._count(line, error)
                continue
            try:
                row = read_row(line, data)
                request = row.request(self._model, self._defaults, self._start)
            except TfmError as fault:
                self._finish(line, row_text(id_in(data), line, key, {"error": str(fault)}), str(fault))
                continue
            taken[index] = _Taken(row, key, request)
            index += 1
            yield request

    @cached_property
    def _constraints(self) -> "Constraints":
        from tfm.engine.constraint import Constraints

        return Constraints(self._model.tokenizer, self._model.config.vocab_size)

    def _start(self, grammar: "Grammar", ids: list[int] | None) -> "Constraint":
        return self._constraints.start(grammar, ids)

    def _answer(self, taken: _Taken, finished: "Finished") -> None:
        row, request = taken.row, taken.request
        if finished.error is not None:
            error = str(finished.error)
            self._finish(row.line, row_text(row.id, row.line, taken.key, {"error": error}), error)
            return
        assert request.sampling is not None
        ids = list(request.ids)
        answer = Answer(0.0, 0.0, len(ids), finished.tokens, is_whole=True)
        tokenizer = self._model.tokenizer
        ids_in_text = IdsInText(tokenizer, ids[-1] if ids else None) if row.is_of_ids else None
        content: dict[str, Any] = answer.facts(self._model, request.sampling.seed)
        content |= answer.details(tokenizer, row.logprobs(self._defaults) is not None, ids_in_text)
        self._prompt_tokens += len(ids)
        self._finish(row.line, row_text(row.id, row.line, taken.key, content), None)

    def _finish(self, line: int, text: str, error: str | None) -> None:
        self._turns.finish(line, text)
        self._count(line, error)

    def _count(self, line: int, error: str | None) -> None:
        self._finished += 1
        if error is not None:
            self._errors += 1
            self._first_error = self._first_error or f"line {line}: {error}"

    def _show(self, batch: "Batch") -> None:
        """The bar, on a terminal. Blank lines count as done, as total counts them too."""
        if not self._notes.is_terminal:
            return
        passed_s = time.perf_counter() - self._begun_s
        done = self.answered + self._source.number - self._seen
        detail = f"{self.answered}{'' if self._total is None else f' of {self._total}'}"
        detail += f", {batch.generated / passed_s:.0f} tok/s"
        # Those in work together end together: before as many are done, nobody knows how long one takes.
        if self._total is not None and self._made >= max(1, self._together):
            detail += f", {_duration(passed_s / self._made * max(0, self._total - done))} left"
        self._notes.asked_for("rows", done, self._total, detail)

    def report(self, batch: "Batch") -> list[str]:
        """Lines for a person."""
        passed_s = time.perf_counter() - self._begun_s
        there = f", {self._done.count} were there before" if self._done.count else ""
        run = f", {batch.read} of them run" if batch.read < self._prompt_tokens else ""
        return [
            f"rows    {self._finished} in {passed_s:.2f} s{there}, {self._errors} with an error",
            f"prompt  {self._prompt_tokens} tokens{run}",
            f"decode  {batch.generated} tokens, {batch.generated / passed_s:.1f} tok/s",
            f"memory  {peak_memory_bytes() / 1e6:.0f} MB at most",
        ]


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < MINUTE_S:
        return f"{whole} s"
    if whole < HOUR_S:
        return f"{whole // MINUTE_S} min {whole % MINUTE_S} s"
    return f"{whole // HOUR_S} h {whole % HOUR_S // MINUTE_S} min"
