"""What a line asks to be scored, and the object that is printed for it."""

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import click

from tfm.cli.answer import piece_as_json
from tfm.cli.json_row import SPACE, meant, read_object
from tfm.cli.lines import Line
from tfm.cli.prompt import PromptOptions
from tfm.cli.text import decode, parse_ids
from tfm.engine.errors import TfmError
from tfm.engine.fields import shown

if TYPE_CHECKING:
    from tfm.engine.score import Score
    from tfm.engine.scored_text import Text
    from tfm.engine.tokenizer import Tokenizer

ALONE = ("text", "ids")
PROMPTS = ("prompt", "messages", "ids")
ANSWERS = ("completion", "completion_ids")
KINDS = {
    "text": str, "prompt": str, "completion": str, "system": str, "prefill": str, "messages": list,
    "raw": bool, "no_special": bool,
}  # fmt: skip
FIELDS = ("id", "ids", "completion_ids", *KINDS)
# What changes nothing beside the field that has the text or the prompt. Beside `prompt` all of them may matter.
IDLE = {
    "text": ("system", "prefill", "raw"),
    "ids": ("system", "prefill", "raw", "no_special"),
    "messages": ("system", "raw", "no_special"),
}
LIKENESS = 0.85  # of a field's name to a known one: prefil and no_specal are meant, test and prompt_id are not
KIND_NAMES = {str: "a text", list: "a list of messages", bool: "true, false"}
ALLOWED = "text or ids alone; or completion or completion_ids beside prompt, messages or ids"
SHOWN_CHARACTERS = 60
# Tokenizers have tokens of up to so many characters, such as spaces. Each token takes 200 bytes while a text is read.
LONGEST_TOKEN = 128
LONG_TEXT = 1 << 20


@dataclass(frozen=True)
class Row:
    """What came in as one line: its own id, if it has one, and what is to be scored, or why that cannot be."""

    line: int
    size_bytes: int  # of the line, with its LF
    given: "Text | TfmError"
    id: Any = None
    has_id: bool = False

    def as_json(self, result: "Score | TfmError", tokenizer: "Tokenizer | None") -> str:
        """The line to print; with a tokenizer, each token has its place in it."""
        content: dict[str, Any]
        if isinstance(result, TfmError):
            content = {"id": self.id, "line": self.line, "error": str(result)}
        else:
            content = ({"id": self.id} if self.has_id else {}) | figures(result)
            if tokenizer is not None:
                content["per_token"] = [
                    piece_as_json(token.id, tokenizer.token_bytes(token.id))
                    | {"logprob": token.logprob, "rank": token.rank}
                    for token in result.tokens
                ]
        return json_line(content)


def figures(score: "Score") -> dict[str, Any]:
    """The figures of a score, null where there is none or it is beyond what a float holds."""
    perplexity = score.perplexity
    return {
        "tokens": len(score.logprobs),
        "logprob": score.logprob,
        "perplexity": None if perplexity == math.inf else perplexity,
        "bits_per_byte": score.bits_per_byte,
    }


def json_line(content: dict[str, Any]) -> str:
    """JSON in one line; in ASCII where it holds half of a surrogate pair, which UTF-8 cannot."""
    line = json.dumps(content, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:
        return json.dumps(content)
    return line


@dataclass(frozen=True)
class RowReader:
    """How lines are read: as text, as token ids, or as JSON objects.

    raw and no_special are what holds for rows that do not say it themselves. ctx is the model's context.
    """

    tokenizer: "Tokenizer"
    ctx: int
    jsonl: bool
    ids: bool
    raw: bool
    no_special: bool
    end: bool

    def read(self, line: Line) -> Row | None:
        """The row of a line; None for a line of JSON with nothing but white space. A fault is in the row."""
        row: dict[str, Any] = {}
        try:
            if line.data is None:
                raise TfmError("line", f"{line.size_bytes} bytes", "shorter ones", "use --perplexity for a long text")
            if self.jsonl:
                if not line.data.strip(SPACE):
                    return None
                row = _read_row(line.data)
            given = self._object(row) if self.jsonl else self._line(decode(line.data, "line"))
        except TfmError as error:
            return Row(line.number, line.size_bytes + 1, error, row.get("id"), "id" in row)
        return Row(line.number, line.size_bytes + 1, given, row.get("id"), "id" in row)

    def _line(self, text: str) -> "Text":
        from tfm.engine.scored_text import id_text, plain_text

        if self.ids:
            return self._ended(id_text(self.tokenizer, parse_ids(text)))
        self._check_length(text)
        return self._ended(plain_text(self.tokenizer, text, not self.no_special))

    def _object(self, row: dict[str, Any]) -> "Text":
        from tfm.engine.scored_text import answer_text, id_text, plain_text

        _refuse_unknown(row)
        _check_kinds(row)
        for name in ("text", "prompt", "completion"):
            self._check_length(row.get(name) or "")
        there = [name for name in dict.fromkeys((*ALONE, *PROMPTS, *ANSWERS)) if row.get(name) is not None]
        answers = [name for name in there if name in ANSWERS]
        if len(answers) > 1 or len(there) - len(answers) != 1 or there[0] not in (PROMPTS if answers else ALONE):
            raise TfmError("fields", ", ".join(there) or "none", ALLOWED)
        _refuse_idle(row, IDLE.get(there[0], ()), there[0])
        if answers:
            return self._ended(answer_text(self.tokenizer, self._prompt_ids(row, there[0]), row[answers[0]]))
        if there[0] == "ids":
            return self._ended(id_text(self.tokenizer, row["ids"]))
        return self._ended(plain_text(self.tokenizer, row["text"], not _own(row, "no_special", self.no_special)))

    def _prompt_ids(self, row: dict[str, Any], name: str) -> list[int]:
        """The ids that `tfm generate` would continue."""
        if name == "ids":
            ids: list[int] = row["ids"]
            return ids
        raw, no_special = _own(row, "raw", self.raw), _own(row, "no_special", self.no_special)
        if name == "messages":
            if raw:
                raise TfmError("field messages", "it beside --raw", "prompt, or raw false in the row")
            return self.tokenizer.chat_ids(row["messages"], prefill=row.get("prefill"))
        options = PromptOptions(row.get("system"), row.get("prefill"), raw, no_special, ids=False)
        try:
            options.check()
        except click.UsageError as error:
            raise TfmError(f"fields: {error.message}") from error
        return options.encode(self.tokenizer, row["prompt"])

    def _check_length(self, text: str) -> None:
        """Refuse what is much too long before it takes time and memory to find out in how many tokens."""
        most = max(LONG_TEXT, LONGEST_TOKEN * (self.ctx + 1))
        if len(text) > most:
            allowed = f"at most {most}, with a context of {self.ctx} tokens"
            raise TfmError("text", f"{len(text)} characters", allowed, "use --perplexity for a long text")

    def _ended(self, text: "Text") -> "Text":
        from tfm.engine.scored_text import ended

        return ended(self.tokenizer, text) if self.end else text


def _read_row(data: bytes) -> dict[str, Any]:
    """A row of JSON. Raises TfmError for what is no object, and for an id that cannot be given back."""
    row = read_object(data, '{"text": "Hi"}')
    id_ = row.get("id")
    if isinstance(id_, list | dict) or (isinstance(id_, float) and not math.isfinite(id_)):
        raise TfmError("field id", repr(id_)[:SHOWN_CHARACTERS], "a text, a finite number, true, false, null")
    return row


def _refuse_unknown(row: dict[str, Any]) -> None:
    """Other fields are the user's own, but for those that are a known one, spelt otherwise."""
    for name in row:
        proposal = None if name in FIELDS else _proposal(name)
        if proposal is not None:
            raise TfmError("row: no such field", shown(name), do=proposal)


@lru_cache(maxsize=64)  # the same fields in all rows of a file
def _proposal(name: str) -> str | None:
    return meant(name, FIELDS, LIKENESS)


def _refuse_idle(row: dict[str, Any], names: Collection[str], beside: str) -> None:
    for name in names:
        if row.get(name) not in (None, False):
            raise TfmError(f"row: field {name}", f"it beside {beside}, where it changes nothing", "one of the two")


def _own(row: dict[str, Any], name: str, otherwise: bool) -> bool:
    value: bool | None = row.get(name)
    return otherwise if value is None else value


def _check_kinds(row: dict[str, Any]) -> None:
    for name, kind in KINDS.items():
        value = row.get(name)
        if value is not None and not isinstance(value, kind):
            raise TfmError(f"field {name}", json.dumps(value)[:SHOWN_CHARACTERS], KIND_NAMES[kind])
    for name in ("ids", "completion_ids"):
        value = row.get(name)
        if value is not None and not (isinstance(value, list) and all(type(id_) is int for id_ in value)):
            raise TfmError(f"field {name}", json.dumps(value)[:SHOWN_CHARACTERS], "a list of token ids")
