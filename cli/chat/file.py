"""A conversation as a file: JSON with messages, the model's name and the settings."""

import json
import os
import stat
import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfm.engine.conversation import AnswerSettings
from tfm.engine.errors import TfmError
from tfm.engine.fields import Fields, is_integer, read_json, shown
from tfm.engine.files import expanded, is_there
from tfm.engine.sampling_params import SamplingParams
from tfm.kernels.new_file import new_file

if TYPE_CHECKING:
    from tfm.engine.conversation import Conversation

FORMAT = "tfm conversation 1"
ROLES = ("system", "user", "assistant")
SAMPLING = tuple(field.name for field in fields(SamplingParams))
SETTINGS = (*SAMPLING, "max_tokens", "stop")
REMEDY = "name a file that /save wrote"
MOST_DIGITS = 18  # of a token id


@dataclass(frozen=True)
class Loaded:
    """What a file says besides the messages: the model's name, the settings, and those that were not taken from it."""

    model: str | None
    settings: AnswerSettings
    overruled: tuple[str, ...]


def save(name: str, conversation: "Conversation", settings: AnswerSettings) -> Path:
    """Write the file, whole or not at all; gives its path.

    Raises TfmError where that cannot be done, and for a file that is there and is no conversation.
    """
    path = Path(os.path.realpath(_path(name)))  # a link stays one
    _refuse_other(path)
    content = {
        "format": FORMAT, "model": conversation.model.name, "settings": _as_json(settings),
        "messages": conversation.messages,
    }  # fmt: skip
    data = json.dumps(content, ensure_ascii=False, indent=2).encode() + b"\n"
    try:
        with new_file(path.parent) as file:
            if path.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # else, after a loss of power, the name could stand for zeros
            os.replace(file.name, path)
    except OSError as error:
        raise TfmError(f"file {path}: cannot be written", error.strerror, do="choose another place") from error
    return path


def _path(file: str) -> Path:
    if "\0" in file:
        raise TfmError("file", repr(file), "a name without NUL")
    return expanded(file)


def _refuse_other(path: Path) -> None:
    found = "a file that is no conversation"
    try:
        if not is_there(path) or read_json(path).get("format") == FORMAT:
            return
    except TfmError:
        found = "a file that cannot be read as a conversation"
    raise TfmError(f"file {path}: not overwritten", found, do="choose another name")


def _as_json(settings: AnswerSettings) -> dict[str, Any]:
    biases = {str(id_): bias if bias > -float("inf") else "-inf" for id_, bias in settings.sampling.logit_bias.items()}
    sampling = asdict(settings.sampling) | {"logit_bias": biases}
    return {**sampling, "max_tokens": settings.max_tokens, "stop": list(settings.stop)}


def load(name: str, conversation: "Conversation", settings: AnswerSettings, kept: Collection[str] = ()) -> Loaded:
    """Put the file's messages into conversation. Of settings, those in kept stay, whatever the file says.

    Raises TfmError that names the field, and changes nothing, for what is no conversation that this model can go on
    with. A file of another hand needs `messages` only.
    """
    path = _path(name)
    found = Fields(f"file {path}", read_json(path, REMEDY))
    if found.value("format") not in (None, FORMAT):
        raise found.fault("format", json.dumps(FORMAT), REMEDY)
    model = found.value("model")
    if model is not None and not isinstance(model, str):
        raise found.fault("model", "a text")
    loaded = _read_settings(path, found.group("settings"), settings, conversation.model.config.vocab_size)
    messages = _read_messages(path, found)
    try:
        conversation.replace(messages)
    except TfmError as error:
        raise TfmError(f"file {path}: {error}") from error
    before, after = _values(settings), _values(loaded)
    overruled = tuple(word for word in SETTINGS if word in kept and before[word] != after[word])
    return Loaded(model, _changed(loaded, {word: before[word] for word in overruled}), overruled)


def _values(settings: AnswerSettings) -> dict[str, Any]:
    return {word: getattr(settings.sampling if word in SAMPLING else settings, word) for word in SETTINGS}


def _changed(settings: AnswerSettings, values: dict[str, Any]) -> AnswerSettings:
    sampling = {word: value for word, value in values.items() if word in SAMPLING}
    rest = {word: value for word, value in values.items() if word not in SAMPLING}
    return replace(settings, sampling=replace(settings.sampling, **sampling), **rest)


def _read_messages(path: Path, found: Fields) -> list[dict[str, str]]:
    messages = found.value("messages")
    if not isinstance(messages, list):
        raise found.fault("messages", "a list of messages", REMEDY)
    for i, message in enumerate(messages):
        where = f"file {path}: field messages[{i}]"
        if not isinstance(message, dict):
            raise TfmError(where, shown(message), "an object with role and content")
        odd = next((name for name in message if name not in ("role", "content")), None)
        if odd is not None:
            raise TfmError(f"{where}.{odd}", shown(message[odd]), "role and content only")
        if message.get("role") not in ROLES:
            raise TfmError(f"{where}.role", shown(message.get("role")), ", ".join(ROLES))
        if not isinstance(message.get("content"), str):
            raise TfmError(f"{where}.content", shown(message.get("content")), "a text")
    return messages


def _read_settings(path: Path, found: Fields, settings: AnswerSettings, vocab_size: int) -> AnswerSettings:
    """settings, with those that the file has in their places."""
    for word in found.words():
        if word not in SETTINGS:
            raise TfmError(f"file {path}: field settings.{word}", "a setting that there is not", ", ".join(SETTINGS))
    given: dict[str, Any] = {word: found.value(word) for word in SETTINGS if word in found}
    if "stop" in given:
        stop = given["stop"]
        if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
            raise found.fault("stop", "a list of texts, none of them empty")
        if any("\ud800" <= character <= "\udfff" for text in stop for character in text):
            raise found.fault("stop", "texts that UTF-8 can hold")
        given["stop"] = tuple(stop)
    if "max_tokens" in given:
        found.integer("max_tokens")
    if "logit_bias" in given:
        given["logit_bias"] = _read_biases(found)
    try:
        settings = _changed(settings, given)
        settings.sampling.check_ids(vocab_size)
    except TfmError as error:
        raise TfmError(f"file {path}: field settings.{error}") from error
    return settings


def _read_biases(found: Fields) -> dict[int, float]:
    biases = found.value("logit_bias")
    if not isinstance(biases, dict) or not all(_is_token_id(id_) and _is_bias(bias) for id_, bias in biases.items()):
        raise found.fault("logit_bias", 'an object of token ids and numbers or "-inf", such as {"42": -5}')
    return {int(id_): float(bias) for id_, bias in biases.items()}


def _is_token_id(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS


def _is_bias(value: object) -> bool:
    return value == "-inf" or isinstance(value, float) or (is_integer(value) and abs(value) <= sys.float_info.max)
