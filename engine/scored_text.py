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
    own = tokenizer.encode(text, add_special=False, parse_special=parse_special)
    whole = tokenizer.encode(text, parse_special=parse_special)
    _check_tokens(text, own)
    if own:
        begin = next((i for i in range(len(whole) - len(own) + 1) if whole[i : i + len(own)] == own), 0)
    else:
        begin = int(bool(whole) and whole[0] == tokenizer.bos_id)
    size = len(text.encode())
    if begin == 0 and own:
        size = max(0, size - len(tokenizer.token_bytes(own[0])))
    return Text([*whole[:begin], *own], begin, size)


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
