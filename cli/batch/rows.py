"""A row of JSON lines, checked field by field, and what it asks the model for."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tfm.cli.json_row import SPACE, meant, read_object
from tfm.cli.prompt import PromptOptions
from tfm.engine.errors import TfmError
from tfm.engine.fields import NESTED, Fields, is_integer, shown

if TYPE_CHECKING:
    from tfm.cli.lines import Lines
    from tfm.engine.constraint import Constraint, Grammar
    from tfm.engine.generate import Request
    from tfm.engine.model import Model
    from tfm.engine.sampling_params import SamplingParams
    from tfm.engine.tokenizer import Tokenizer

    Start = Callable[[Grammar, list[int]], Constraint]

Id = str | int | float | None

PROMPTS = ("prompt", "messages", "ids")
NUMBERS = ("temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
SAMPLING = (*NUMBERS, "top_k", "logit_bias", "seed")
CONSTRAINTS = ("json_schema", "regex", "grammar")
ABOUT_TEXT = ("system", "prefill", "raw", "no_special")
FIELDS = ("id", *PROMPTS, *ABOUT_TEXT, "max_tokens", "stop", "logprobs", *SAMPLING, *CONSTRAINTS)
LONGEST_ROW_BYTES = 1 << 28
MOST_DIGITS = 18  # of a token id
OF_TEXT = "jq -Rc '{prompt: .}' makes such rows of lines of text"


@dataclass(frozen=True)
class Defaults:
    """What holds for a row that does not say otherwise: the options of the command."""

    prompt: PromptOptions
    max_tokens: int
    stop: tuple[str, ...]
    logprobs: int | None
    sampling: "SamplingParams"
    has_seed: bool  # whether all rows have the seed of sampling; else a row's line is its seed
    grammar: "Grammar | None"


@dataclass(frozen=True)
class Row:
    """A row whose fields are known and have values that may be. line counts from 1."""

    line: int
    id: Id
    fields: Fields

    def request(self, model: "Model", defaults: Defaults, start: "Start") -> "Request":
        """What the model has to do. start makes a constraint for the answer to a prompt. Raises TfmError for faults."""
        from tfm.engine.constraint import grammar_of_row
        from tfm.engine.generate import Request

        fields = self.fields
        ids = self._encode(model.tokenizer, defaults.prompt)
        wrong = next((id_ for id_ in ids if id_ >= model.config.vocab_size), None)
        if wrong is not None:
            raise TfmError("row: field ids", wrong, f"0 to {model.config.vocab_size - 1}")
        grammar = grammar_of_row({name: fields.value(name) for name in CONSTRAINTS}) or defaults.grammar
        return Request(
            ids=ids,
            max_tokens=fields.integer("max_tokens", defaults.max_tokens, least=0, most=sys.maxsize),
            sampling=self._sampling(defaults),
            stop=_stop(fields) if "stop" in fields else defaults.stop,
            logprobs=self.logprobs(defaults) or 0,
            constraint=None if grammar is None else start(grammar, ids),
        )

    def logprobs(self, defaults: Defaults) -> int | None:
        """How many likely tokens to tell with each token of the answer; None: not even that token."""
        if "logprobs" not in self.fields:
            return defaults.logprobs
        return self.fields.integer("logprobs", least=0)

    @property
    def is_of_ids(self) -> bool:
        """Whether the prompt is token ids, so that the answer's are wanted too."""
        return "ids" in self.fields

    def _sampling(self, defaults: Defaults) -> "SamplingParams":
        own: dict[str, Any] = {} if defaults.has_seed else {"seed": self.line}
        own |= {name: _sampling_value(self.fields, name) for name in SAMPLING if name in self.fields}
        try:
            return replace(defaults.sampling, **own)
        except TfmError as error:
            raise TfmError(f"{self.fields.where}: field {error}") from None

    def _encode(self, tokenizer: "Tokenizer", options: PromptOptions) -> list[int]:
        """The ids of the prompt. What the row says about its text comes before the options, if it speaks of both."""
        fields = self.fields
        if "ids" in fields:
            return _ids(fields)
        messages = _messages(fields) if "messages" in fields else None
        has_system = messages is not None and messages[0].get("role") == "system"
        own = PromptOptions(
            system=_text(fields, "system"),
            prefill=_text(fields, "prefill"),
            raw=fields.flag("raw", options.raw and messages is None),
            no_special=fields.flag("no_special", options.no_special),
            ids=False,
        )
        if has_system and own.system is not None:
            raise fields.fault("system", "none beside messages that begin with one")
        beside_raw = next((name for name in ("system", "prefill") if own.raw and name in fields), None)
        if beside_raw is not None:
            raise fields.fault(beside_raw, "none beside --raw, or raw false in the row")
        if not own.raw:
            system = None if has_system else options.system
            prefill = options.prefill if own.prefill is None else own.prefill
            own = replace(own, system=system if own.system is None else own.system, prefill=prefill)
        text = _text(fields, "prompt")
        if text == "" and not own.raw:
            raise fields.fault("prompt", "at least one character")
        try:
            if messages is None:
                return own.encode(tokenizer, text or "")
            system_message = [] if own.system is None else [{"role": "system", "content": own.system}]
            return tokenizer.chat_ids([*system_message, *messages], prefill=own.prefill)
        except RecursionError:
            raise TfmError(f"{fields.where}: field messages", NESTED) from None


def next_row(lines: "Lines") -> tuple[int, bytes] | None:
    """The next line that is not blank, without white space around it, and its number; None at the end."""
    for line in lines:
        assert line.data is not None, "lines must fit"
        row = line.data.strip(SPACE)
        if row:
            return line.number, row
    return None


def read_row(line: int, data: bytes) -> Row:
    """The row in a line. Raises TfmError for what is no JSON object with the fields of a row.

    null counts as absent. Values that only the model can judge are left to `Row.request`.
    """
    fields = Fields("row", _read_object(data))
    id_ = row_id(fields.value("id"))
    unknown = next((name for name in fields.words() if name not in FIELDS), None)
    if unknown is not None:
        raise TfmError("row: no such field", shown(unknown), do=_proposal(unknown))
    prompts = [name for name in PROMPTS if name in fields]
    if len(prompts) != 1:
        raise TfmError("row", " and ".join(prompts) or "no prompt", f"one of {', '.join(PROMPTS)}")
    for name in ABOUT_TEXT:
        is_chat = name in ("system", "prefill")
        if fields.value(name) not in (None, False) and (
            prompts == ["ids"]
            or (is_chat and fields.value("raw") is True)
            or (name == "raw" and prompts == ["messages"])
        ):
            other = "raw" if is_chat and prompts != ["ids"] else prompts[0]
            raise TfmError(f"row: field {name}", f"it beside {other}", "one of the two")
    return Row(line, id_, fields)


def row_id(value: object) -> Id:
    """The id of a row, which its answer bears as well. Raises TfmError for what cannot be one."""
    if value is None or isinstance(value, str) or is_integer(value):
        return value
    if isinstance(value, float) and abs(value) <= sys.float_info.max:
        return value
    raise TfmError("row: field id", shown(value), "a text, a number, null")


def id_in(data: bytes) -> Id:
    """The id of a row that may have faults elsewhere; None where it has none that is good for anything."""
    try:
        pairs = json.loads(data.decode(), object_pairs_hook=tuple, parse_int=_whole)
        ids = [value for name, value in pairs if name == "id"] if isinstance(pairs, tuple) else []
        id_ = row_id(ids[0]) if len(ids) == 1 else None
        str(id_).encode()
    except (TfmError, ValueError, RecursionError):
        return None
    return id_


def _whole(digits: str) -> int | None:
    """A whole number; None for one that Python does not read."""
    try:
        return int(digits)
    except ValueError:
        return None


def _read_object(data: bytes) -> dict[str, Any]:
    values = read_object(data, '{"prompt": "Hi"}', OF_TEXT)
    if b"\\u" in data:
        _refuse_half_characters(values)
    return values


def _refuse_half_characters(values: Mapping[str, object]) -> None:
    for name, value in values.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            found = f"half of a surrogate pair, U+{ord(error.object[error.start]):04X}"
            raise TfmError(f"row: field {ascii(name)[1:-1]}", found, "text that UTF-8 can hold") from None
        except RecursionError:
            raise TfmError("row: not JSON that can be read", NESTED) from None


@lru_cache(maxsize=64)  # one wrong field in all rows of a file
def _proposal(name: str) -> str:
    return meant(name, FIELDS) or f"fields: {', '.join(FIELDS)}"


def _text(fields: Fields, name: str) -> str | None:
    value = fields.value(name)
    if value is None or isinstance(value, str):
        return value
    raise fields.fault(name, "a text")


def _ids(fields: Fields) -> list[int]:
    ids = fields.value("ids")
    if not isinstance(ids, list) or not all(is_integer(id_) and 0 <= id_ < 10**MOST_DIGITS for id_ in ids):
        raise fields.fault("ids", "a list of token ids")
    return ids


def _messages(fields: Fields) -> Sequence[Mapping[str, Any]]:
    messages = fields.value("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise fields.fault("messages", "a list of objects with role and content")
    return messages


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.value("stop")
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise fields.fault("stop", "a text or a list of texts, none of them empty")
    return tuple(stops)


def _sampling_value(fields: Fields, name: str) -> object:
    """The value, if it is one that floating point can hold; its range is known to SamplingParams."""
    value = fields.value(name)
    if name in NUMBERS and not _is_number(value):
        raise fields.fault(name, "a number")
    if name != "logit_bias":
        return value
    if not isinstance(value, dict) or not all(map(_is_token_id, value)) or not all(map(_is_number, value.values())):
        raise fields.fault(name, 'an object of token ids and numbers, such as {"42": -5}')
    return {int(id_): bias for id_, bias in value.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (is_integer(value) and abs(value) <= sys.float_info.max)


def _is_token_id(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS and text == str(int(text))
