"""What of a text is scored: its tokens, those that stand before them, and how many bytes it has."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tfm.engine.errors import TfmError

if TYPE_CHECKING:
    from tfm.engine.tokenizer import Tokenizer


@dataclass(frozen=True)
class Text:
    """Token ids, of which those from begin on are scored; what stands before them (BOS, a prompt) is only read.

    The first of ids has nothing before it, and so no log-probability: with begin 0 it is not counted. size_bytes is the
    length in UTF-8 of what the counted tokens stand for.
    """

    ids: Items[int]
    begin: int = 0
    size_bytes: int = 0


def plain_text(tokenizer: "Tokenizer", text: str, parse_special: bool = True) -> Text:
    """A text by itself, behind what the tokenizer puts before a text; what it puts after one is left out."""
    ids = tokenizer.encode(text, add_special=False, parse_special=parse_special)
    _check_tokens(text, ids)
    before = _before(tokenizer)
    if before and ids[: len(before)] == before:  # the text brings its own, which is not counted
        before = []
    size = len(text.encode())
    if ids and not before:
        size = max(0, size - len(tokenizer.token_bytes(ids[0])))
    return Text([*before, *ids], len(before), size)


def _before(tokenizer: "Tokenizer") -> list[int]:
    """What the tokenizer puts before every text."""
    bare, full = tokenizer.encode("a", add_special=False), tokenizer.encode("a")
    begins = (i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare)
    return full[: next(begins, 0)]


def id_text(tokenizer: "Tokenizer", ids: Items[int]) -> Text:
    """Token ids by themselves, and nothing before them."""
    return Text(ids, 0, _size_bytes(tokenizer, ids[1:]))


def answer_text(tokenizer: "Tokenizer", prompt_ids: Items[int], answer: str | Items[int]) -> Text:
    """An answer behind a prompt, as `generate` has them: no ids at all stand for BOS alone.

    No control token is seen in the text of an answer. Raises TfmError for no prompt and no BOS.
    """
    prompt = list(prompt_ids)
    if not prompt:
        if tokenizer.bos_id is None:
            raise TfmError("prompt", "no tokens", "at least one: this model has no BOS token to start from")
        prompt = [tokenizer.bos_id]
    if not isinstance(answer, str):
        return Text([*prompt, *answer], len(prompt), _size_bytes(tokenizer, answer))
    ids = _answer_ids(tokenizer, answer, continues=not tokenizer.is_special(prompt[-1]))
    _check_tokens(answer, ids)
    return Text([*prompt, *ids], len(prompt), len(answer.encode()))


def _answer_ids(tokenizer: "Tokenizer", answer: str, continues: bool) -> list[int]:
    """The ids of a text that goes on behind another, without the space that SentencePiece puts before a text."""
    ids = tokenizer.encode(answer, add_special=False, parse_special=False)
    if not continues or tokenizer.decode(ids, continues=True) != f" {answer}":
        return ids
    behind = tokenizer.encode("\n", add_special=False, parse_special=False)
    longer = tokenizer.encode(f"\n{answer}", add_special=False, parse_special=False)
    return longer[len(behind) :] if longer[: len(behind)] == behind else ids


def ended(tokenizer: "Tokenizer", text: Text) -> Text:
    """text with the token that ends it, which is scored as well and adds no bytes.

    It is the tokenizer's eos_token, else the one EOS of the other files. Raises TfmError where that is not one.
    """
    name = tokenizer.special_tokens.get("eos_token")
    named = None if name is None else tokenizer.token_id(name)
    ids = sorted(tokenizer.eos_ids) if named is None else [named]
    if len(ids) != 1:
        found = f"the ids {ids} and no eos_token" if ids else "none"
        raise TfmError("--end: the model's end-of-text token", found, "one, or an eos_token in tokenizer_config.json")
    return replace(text, ids=[*text.ids, ids[0]])


def _size_bytes(tokenizer: "Tokenizer", ids: Items[int]) -> int:
    return sum(len(tokenizer.token_bytes(id_)) for id_ in ids)


def _check_tokens(text: str, ids: Items[int]) -> None:
    if text and not ids:
        found = "a text of which this tokenizer makes no token"
        raise TfmError("text", found, "a text in the letters that its vocabulary has", "use another model")
