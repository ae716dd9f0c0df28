"""Which tokens may come next, so that an answer keeps to a JSON schema, a regex or a Lark grammar.

llguidance knows the bytes of every token and says, after each, which tokens the grammar lets follow. Where the grammar
leaves one text only, it lets the tokens follow that the tokenizer makes of that text: those a model knows best.

V is the size of the model's vocabulary, which may be larger than the tokenizer's.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from tfm.engine.errors import TfmError
from tfm.engine.fields import reason, shortened, shown
from tfm.engine.schema import check_schema

if TYPE_CHECKING:
    import llguidance

    from tfm.engine.tokenizer import Tokenizer

Kind = Literal["json_schema", "regex", "grammar"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# What a grammar may cost before it is refused: at most about a second to read it, some 20 ms and 100 MB for a token.
LIMITS = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
}
LONGEST_SOURCE = 1_000_000
MOST_KEPT = 64
SHOWN_CHARACTERS = 200
JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # json.dumps' own
MEND = "correct it"
LOOK = re.compile(r"lookarounds not supported yet; (\w+)")
SCHEMA_WITHIN = re.compile(r"%json\s*(?=\{)")  # of a Lark grammar
# llguidance has this attribute of a rule and leaves it to its caller, that is, does nothing about it.
TEMPERATURE = re.compile(r"^\s*\w+\s*\[[^\]\n]*\btemperature\b", re.MULTILINE)


@dataclass(frozen=True)
class Grammar:
    """What an answer must look like: the text of a JSON schema, a regex (Rust's syntax) or a Lark grammar.

    where is what errors call it: an option or a row's field.
    """

    kind: Kind
    source: str
    where: str = field(default="", compare=False)

    def fault(self, found: object, do: str | None = MEND, allowed: str | None = None) -> TfmError:
        """The error that says what is wrong with it."""
        return TfmError(self.where or self.kind, found, allowed, do)

    def read(self) -> dict[str, Any]:
        """As one of llguidance's "grammars". Raises TfmError for what cannot be a grammar of its kind."""
        if len(self.source) > LONGEST_SOURCE:
            raise self.fault(f"{len(self.source)} characters", f"shorten it to {LONGEST_SOURCE} at most")
        try:
            self.source.encode()
        except UnicodeEncodeError as error:
            raise self.fault(f"half of a surrogate pair at character {error.start}") from None
        match self.kind:
            case "json_schema":
                return {"json_schema": self._schema()}
            case "regex":
                if (len(self.source) - len(self.source.rstrip("\\"))) % 2:
                    raise self.fault("a backslash at the end, after which a character must follow")
                return {"lark_grammar": f"start: /{_in_lark(self.source)}/"}
            case "grammar":
                if TEMPERATURE.search(self.source):
                    raise self.fault("the attribute temperature, which has no effect here", "use --temperature")
                for place in SCHEMA_WITHIN.finditer(self.source):
                    with suppress(ValueError, RecursionError):  # llguidance tells of it
                        self._check(json.JSONDecoder().raw_decode(self.source, place.end())[0])
                return {"lark_grammar": self.source}

    def _schema(self) -> dict[str, Any]:
        try:
            schema = json.loads(self.source, parse_constant=_refuse)
        except json.JSONDecodeError as error:
            found = f"no JSON: {reason(error)} in line {error.lineno}, column {error.colno}"
            raise self.fault(found, "give a JSON schema") from None
        except (ValueError, RecursionError) as error:
            raise self.fault(f"no JSON that can be read: {reason(error)}", "give a JSON schema") from None
        if not isinstance(schema, dict | bool):
            raise self.fault(shown(schema), "give a JSON schema, which is an object, true or false")
        if schema is False:
            raise self.fault("false, which no value matches")
        self._check(schema)
        given = {} if schema is True else schema
        return {**given, "x-guidance": {**JSON_LAYOUT, **given.get("x-guidance", {})}}

    def _check(self, schema: object) -> None:
        if (wrong := check_schema(schema)) is not None:
            raise self.fault(wrong.found, "correct or remove it" if wrong.allowed is None else None, wrong.allowed)


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _in_lark(regex: str) -> str:
    """regex as it stands between the slashes of a Lark grammar; its \\d is 0 to 9, and not a digit of any script."""
    from llguidance import regex_to_lark

    return regex_to_lark(regex, "d")


def grammar_of_row(row: Mapping[str, object]) -> Grammar | None:
    """The grammar that a row of JSONL asks for by json_schema (an object or its text), regex or grammar; null is none.

    Raises TfmError for more than one of them and for a value of another type.
    """
    given = [kind for kind in KINDS if row.get(kind) is not None]
    if not given:
        return None
    if len(given) > 1:
        raise TfmError("row", " and ".join(given), f"one of {', '.join(KINDS)}")
    kind, value = given[0], row[given[0]]
    if kind == "json_schema" and isinstance(value, dict | bool):
        try:
            value = json.dumps(value)
        except RecursionError:
            raise TfmError(f"field {kind}", shown(value), "a schema that is nested less deeply") from None
    if not isinstance(value, str):
        allowed = "a JSON schema or its text" if kind == "json_schema" else "a text"
        raise TfmError(f"field {kind}", shown(value), allowed)
    return Grammar(kind, value, f"field {kind}")


class Constraints:
    """Constraints on one model's answers. The first one takes a moment: llguidance reads the vocabulary.

    vocab_size is the model's. Raises TfmError for a tokenizer that puts spaces between its tokens by itself.
    """

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int) -> None:
        if tokenizer.joiner:
            found = "a tokenizer that has no decoder: what its tokens say depends on those before"
            raise TfmError("constraint", found, do="use another model")
        self._tokenizer = tokenizer
        self._eos_ids = np.array([id_ for id_ in tokenizer.eos_ids if id_ < vocab_size], np.intp)
        self._texts = [self._text(id_) for id_ in range(vocab_size)]
        self._is_text_V = np.array([bool(text) for text in self._texts])
        self._read: dict[tuple[Grammar, bool], llguidance.LLMatcher] = {}

    def _text(self, id_: int) -> bytes:
        """What a token adds to the text; nothing for EOS and control tokens, which therefore are never in it."""
        is_text = id_ not in self._tokenizer.eos_ids and not self._tokenizer.is_special(id_)
        return self._tokenizer.token_bytes(id_) if is_text else b""

    def start(self, grammar: Grammar, prompt: Sequence[int] | None = None) -> "Constraint":
        """A constraint for one answer, after the ids of prompt (None: within a text).

        Some tokenizers put a space before a text, which is not shown; after a control token the answer has it too.
        Raises TfmError for a grammar with a fault, one that is not supported, and one that nothing matches.
        """
        is_first = prompt is not None and (not prompt or self._tokenizer.is_special(prompt[-1]))
        leading = self._tokenizer.leading if is_first else ""
        key = (grammar, bool(leading))
        if key not in self._read:
            matcher = self._matcher(grammar, leading)
            while len(self._read) >= MOST_KEPT:
                del self._read[next(iter(self._read))]
            self._read[key] = matcher
        return Constraint(grammar, self._read[key].deep_copy(), self._is_text_V, self._eos_ids)

    def _matcher(self, grammar: Grammar, leading: str) -> "llguidance.LLMatcher":
        import llguidance

        parts: list[dict[str, Any]] = [grammar.read()]
        if leading:
            parts = [{"lark_grammar": f"start: {json.dumps(leading)} @text"}, {"name": "text", **parts[0]}]
        limits = llguidance.LLParserLimits(**LIMITS)  # type: ignore[arg-type]
        matcher = llguidance.LLMatcher(self._vocabulary, json.dumps({"grammars": parts}), log_level=0, limits=limits)
        _check(matcher, grammar)
        return matcher

    @cached_property
    def _vocabulary(self) -> "llguidance.LLTokenizer":
        import llguidance

        vocabulary: Any = _Vocabulary(self._tokenizer, self._texts)
        return llguidance.LLTokenizer(vocabulary)


class _Vocabulary:
    """What llguidance asks for: the bytes of every token, and how the tokenizer takes a text apart.

    A token of its own, with the id V, stands for the end of the text, as a model may have several of them, or none.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: "Tokenizer", texts: list[bytes]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = len(texts)
        self.special_token_ids = [self.eos_token_id]
        self.tokens = [*texts, b"<end>"]
        self._by_text = {text: id_ for id_, text in reversed([*enumerate(texts)]) if text}
        self._longest = max(map(len, texts), default=0)

    def __call__(self, text: str) -> list[int]:
        """The ids of a text in the midst of another; fewer where no tokens say the rest."""
        wanted = text.encode()
        for before in ("", "\n"):  # after a line break no tokenizer puts a space of its own before the text
            start = self._encode(before)
            ids = self._encode(before + text)
            if ids[: len(start)] == start and b"".join(self.tokens[id_] for id_ in ids[len(start) :]) == wanted:
                return ids[len(start) :]
        return self._longest_first(wanted)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False, parse_special=False) if text else []

    def _longest_first(self, text: bytes) -> list[int]:
        """For a tokenizer that changes what it reads: the longest token that fits, again and again."""
        ids: list[int] = []
        while text:
            sizes = range(min(self._longest, len(text)), 0, -1)
            size = next((size for size in sizes if text[:size] in self._by_text), 0)
            if size == 0:
                break
            ids.append(self._by_text[text[:size]])
            text = text[size:]
        return ids


class Constraint:
    """What may follow in one answer: `allows` or `allowed` before each choice, `accept` after it.

    To find all tokens that may follow takes llguidance 0.1 to 0.4 ms, to say whether one may hardly any time. So that
    is found only when it is asked for, and to know whether anything may follow where the text is complete.
    """

    def __init__(
        self,
        grammar: Grammar,
        matcher: "llguidance.LLMatcher",
        is_text_V: npt.NDArray[np.bool_],
        eos_ids: npt.NDArray[np.intp],
    ) -> None:
        self._grammar, self._matcher, self._is_text_V, self._eos_ids = grammar, matcher, is_text_V, eos_ids
        self._ends = frozenset(eos_ids.tolist())
        self._last_allowed: int | None = None
        self._came: int | None = None
        self._has_ended = False
        self._allowed_V: npt.NDArray[np.bool_] | None = None
        self._goes_on = True  # whether a token but EOS may follow, where _allowed_V is there
        self.allowed()
        if self.is_finished and len(eos_ids) == 0:
            raise grammar.fault("no text that it allows but the empty one")

    @property
    def may_end(self) -> bool:
        """Whether the text so far is complete, so that EOS is allowed."""
        return self._matcher.is_accepting()

    @property
    def is_finished(self) -> bool:
        """Whether nothing may follow."""
        if self._has_ended or not self.may_end:
            return self._has_ended
        if self._came is not None and self.allows(self._came):  # a token may often come again: then there is no end yet
            return False
        self.allowed()
        return not self._goes_on

    def allows(self, id_: int) -> bool:
        """Whether this token may come next."""
        if id_ in self._ends:
            return self.may_end
        if self._allowed_V is not None:
            return bool(self._allowed_V[id_])
        if id_ != self._last_allowed and self._is_text_V[id_] and self._matcher.validate_tokens([id_]) == 1:
            self._last_allowed = id_
        return id_ == self._last_allowed

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which tokens may come next, bool [V]; to be read only. The same until `accept`, which makes a new one.

        Raises TfmError where the grammar leads to an end that is none or becomes too costly.
        """
        if self._allowed_V is None:
            self._allowed_V = self._look()
        return self._allowed_V

    def accept(self, id_: int) -> None:
        """Go on after a token. Raises TfmError for one that is not allowed, or where the grammar becomes too costly."""
        if not 0 <= id_ < len(self._is_text_V) or not self.allows(id_):
            raise self._grammar.fault(f"token {id_}, which may not follow", "choose among those that are allowed")
        if id_ in self._ends:
            self._has_ended = True
            return
        self._matcher.consume_token(id_)
        _check(self._matcher, self._grammar)
        self._allowed_V = self._last_allowed = None
        self._came = id_

    def _look(self) -> npt.NDArray[np.bool_]:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        _check(self._matcher, self._grammar)
        size = len(self._is_text_V)
        allowed = np.unpackbits(bits, count=size + 1, bitorder="little").view(np.bool_)
        may_end, allowed_V = bool(allowed[size]), allowed[:size]
        if (allowed_V > self._is_text_V).any():
            raise self._grammar.fault("a token by its id that adds nothing to the text", "name tokens by their text")
        self._goes_on = not self._matcher.is_stopped() and bool(allowed_V.any())
        if not self._goes_on and not may_end:
            raise self._grammar.fault("a text that no token of this model can go on with")
        allowed_V[self._eos_ids] = may_end
        allowed_V.flags.writeable = False
        return allowed_V


def _check(matcher: "llguidance.LLMatcher", grammar: Grammar) -> None:
    """Raises TfmError for what llguidance could not do; KeyboardInterrupt where that came to it out of _Vocabulary."""
    if matcher.is_error():
        error = matcher.get_error()
        if error.startswith("panic") and "KeyboardInterrupt" in error:
            raise KeyboardInterrupt
        raise grammar.fault(_reason(error, grammar))


def _reason(error: str, grammar: Grammar) -> str:
    """llguidance's words for what is wrong, on one line: without its drawings and its inner state."""
    lines = error.splitlines() or ["no reason given"]
    if lines[0].startswith("NoExtension"):
        return "no text that it allows"
    if "coerce_one_of" in lines[0]:
        return "oneOf with schemas of which two may match one value; anyOf takes them"
    place = re.match(r"(?:at )?(\d+)\((\d+)\): ", lines[0])
    told = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    reason = " ".join((told or lines[0][place.end() if place else 0 :]).split())
    if look := LOOK.search(reason):
        is_word = look[1].startswith("Word")
        what = "a word boundary, such as \\b" if is_word else "^ or $ with something before or behind it, or with (?m)"
        reason = f"{what}: neither it nor any other look at what stands beside is supported"
    reason = shortened(reason, SHOWN_CHARACTERS)
    return f"in line {place[1]}, column {place[2]}: {reason}" if place and grammar.kind == "grammar" else reason
