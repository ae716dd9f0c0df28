"""Conversations: messages to token ids through the model's chat template.

What a person wrote must stay text, though the template writes control tokens around it and both end up in one string.
So each message is marked before it is rendered: characters of control tokens' names are replaced by twins from
Unicode's private use, which a template handles like any letter. Afterwards a control token's name without a twin was
written by the template; twins are turned back, and the tokenizer is told which is which.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfm.engine.errors import TfmError
from tfm.engine.fields import SHOWN_CHARACTERS, shown
from tfm.engine.files import is_there, read_text_bytes

if TYPE_CHECKING:
    from tfm.engine.template import Template
    from tfm.engine.tokenizer import Message, Tokenizer

PROBE = "a text to see whether it is written"
SURROGATE = re.compile("[\ud800-\udfff]")
PRIVATE = re.compile("[\U00100000-\U0010ffff]")


class ChatTemplate:
    """A model's chat template. variables are the special tokens that templates know by name (bos_token and so on)."""

    def __init__(self, source: str, name: str, variables: Mapping[str, str]) -> None:
        self.source, self.name = source, name
        self._variables = {"bos_token": "", "eos_token": "", **variables}
        self._template: Template | None = None
        self._takes_parts: bool | None = None

    def render(self, messages: Sequence["Message"], add_generation_prompt: bool = True) -> str:
        """The conversation as the model's authors write it. Raises TfmError when the template does not take it."""
        if self._takes_parts is None:
            self._takes_parts = self._find_takes_parts()
        if self._takes_parts:
            messages = [
                {**m, "content": _as_parts(m["content"])} if isinstance(m.get("content"), str) else m for m in messages
            ]
        return self._render(messages, add_generation_prompt)

    def _render(self, messages: Sequence["Message"], add_generation_prompt: bool) -> str:
        from tfm.engine.template import Template

        if self._template is None:
            self._template = Template(self.source, self.name)
        variables: dict[str, object] = {**self._variables, "messages": list(messages), "tools": None, "documents": None}
        text = self._template.render({**variables, "add_generation_prompt": add_generation_prompt})
        half = SURROGATE.search(text)
        if half is not None and not any(map(SURROGATE.search, _texts(list(messages)))):
            found = f"half of a surrogate pair, U+{ord(half[0]):04X}, in what it writes"
            raise TfmError(f"{self.name}: chat template", found, do="or use --raw")
        return text

    def _find_takes_parts(self) -> bool:
        """Whether content must be a list of parts: some templates leave out a content that is plain text."""
        if "text" not in self.source:
            return False
        taken = []
        for content in (PROBE, _as_parts(PROBE)):
            try:
                taken.append(PROBE in self._render([{"role": "user", "content": content}], True))
            except TfmError:
                taken.append(False)
        return taken == [False, True]


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def read_chat_template(folder: Path, config: Mapping[str, object], variables: Mapping[str, str]) -> ChatTemplate | None:
    """chat_template.jinja, else chat_template of tokenizer_config.json (config): a text, or several with names."""
    path = folder / "chat_template.jinja"
    if is_there(path):
        try:
            return ChatTemplate(read_text_bytes(path).decode(), str(path), variables)
        except UnicodeDecodeError as error:
            wrong = f"a byte that is not UTF-8 at {error.start}"
            raise TfmError(f"file {path}: cannot be read", wrong, do="download the file again") from error
    where = f"{folder / 'tokenizer_config.json'}: field chat_template"
    found = config.get("chat_template")
    if found is None or isinstance(found, str):
        return ChatTemplate(found, where, variables) if found is not None else None
    named: dict[object, object] = {}
    if isinstance(found, dict):
        named = dict(found)
    elif isinstance(found, list) and all(isinstance(entry, dict) for entry in found):
        named = {entry.get("name"): entry.get("template") for entry in found}
    source = next(iter(named.values())) if len(named) == 1 else named.get("default")
    if not isinstance(source, str):
        raise TfmError(where, shown(found), "a text, or a list of objects with name and template, one named default")
    return ChatTemplate(source, where, variables)


def chat_ids(
    tokenizer: "Tokenizer", messages: Sequence["Message"], prefill: str | None, add_generation_prompt: bool
) -> list[int]:
    """The ids of a conversation, ready for the model to answer; prefill is the start of the answer.

    One BOS stands first, whoever writes it. Raises TfmError for a model without a template and for a malformed message.
    """
    template = tokenizer.chat_template
    if template is None:
        raise TfmError(f"{tokenizer.folder}: chat template", "none", do="use --raw, or a model made for chat")
    plain = [_checked(message, i) for i, message in enumerate(messages)]
    pieces = _Marks(tokenizer.hidden, tokenizer.control, plain, prefill or "").pieces(template, add_generation_prompt)
    ids = tokenizer.encode_pieces(pieces)
    if tokenizer.chat_starts_with_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    return ids


def _checked(message: "Message", index: int) -> dict[str, Any]:
    """A message with its content as one text: parts of text are put together."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TfmError(where, repr(message)[:SHOWN_CHARACTERS], "an object with role and content")
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                found = repr(part)[:SHOWN_CHARACTERS]
                raise TfmError(f"{where}: content", found, 'parts {"type": "text", "text": ...}')
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise TfmError(f"{where}: content", repr(content)[:SHOWN_CHARACTERS], "a text or a list of parts")
    return {**message, "content": content} if "content" in message else dict(message)


class _Marks:
    """Messages marked with twins, and rendered text taken apart again.

    hidden and control are names -> ids. What is written in the assistant's name may hold marks that are control tokens
    for others only (such as the start and end of its thoughts): the model itself writes them.
    """

    def __init__(
        self, hidden: Mapping[str, int], control: Mapping[str, int], messages: Sequence[dict[str, Any]], prefill: str
    ) -> None:
        self._messages, self._prefill, self._ids = messages, prefill, control
        self._names, self._hidden = _any_of(control), _any_of(hidden)
        self._own_marks = _any_of(control.keys() - hidden.keys())
        self._twins = _Twins({edge for name in control for edge in (name[0], name[-1])}, [*_texts(messages), prefill])

    def pieces(self, template: ChatTemplate, add_generation_prompt: bool) -> list[str | int]:
        """The rendered conversation in pieces for Tokenizer.encode_pieces.

        Twins stand wherever an edge of a name may be, so that not even a template that cuts and joins can make a
        name of what people wrote. A template that looks at such letters itself would write something else for
        it; then only the edges of whole names get twins. If it does even then, the text without twins will do
        when no name in it is one too many.
        """
        plain = marked = template.render(self._messages, add_generation_prompt)
        for everywhere in (True, False):
            messages = [self._mark_message(message, everywhere) for message in self._messages]
            if messages != self._messages:
                marked = template.render(messages, add_generation_prompt)
            if self._twins.back(marked) == plain:
                break
        else:
            if self._names.findall(plain) == self._names.findall(marked):
                marked = plain
        return self._take_apart(marked + self._mark(self._prefill, "assistant", everywhere=True))

    def _mark_message(self, message: dict[str, Any], everywhere: bool) -> dict[str, Any]:
        """Templates compare the role with words of their own: it stays when it is a word."""
        role = message["role"]
        marked = {key: self._mark(value, role, everywhere) for key, value in message.items()}
        return {**marked, "role": role} if role.isidentifier() else marked

    def _mark(self, value: Any, role: str, everywhere: bool) -> Any:
        if isinstance(value, list):
            return [self._mark(item, role, everywhere) for item in value]
        if isinstance(value, dict):
            return {key: self._mark(item, role, everywhere) for key, item in value.items()}
        if not isinstance(value, str):
            return value
        names = self._hidden if role == "assistant" else self._names
        if not everywhere:
            return names.sub(lambda match: self._twins.there(match[0]), value)
        if role != "assistant":
            return self._twins.there(value)
        end, parts = 0, []
        for match in self._own_marks.finditer(value):
            parts += [self._twins.there(value[end : match.start()]), match[0]]
            end = match.end()
        return "".join([*parts, self._twins.there(value[end:])])

    def _take_apart(self, marked: str) -> list[str | int]:
        pieces: list[str | int] = []
        end = 0
        for match in self._names.finditer(marked):
            pieces += [self._twins.back(marked[end : match.start()]), self._ids[match[0]]]
            end = match.end()
        pieces.append(self._twins.back(marked[end:]))
        return [piece for piece in pieces if piece != ""]


class _Twins:
    """Letters and their twins from the private use, which stand in none of texts."""

    def __init__(self, letters: Iterable[str], texts: Iterable[str]) -> None:
        used = {twin for text in texts for twin in PRIVATE.findall(text)}
        free = (chr(code) for code in range(0x100000, 0x10FF00) if chr(code) not in used)
        self._twins = dict(zip(sorted(letters), free, strict=False))
        self._letters = {twin: letter for letter, twin in self._twins.items()}
        self._is_letter, self._is_twin = _any_of(self._twins), _any_of(self._letters)

    def there(self, text: str) -> str:
        return self._is_letter.sub(lambda match: self._twins[match[0]], text)

    def back(self, text: str) -> str:
        return self._is_twin.sub(lambda match: self._letters[match[0]], text)


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Finds the names as the tokenizer does: leftmost, then longest."""
    return _pattern(frozenset(names))


@lru_cache(maxsize=32)  # many conversations for one model have the same names, nearly always with the same twins
def _pattern(names: frozenset[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(names, key=lambda name: (-len(name), name)))) or r"(?!)")


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
