"""A conversation as a file: JSON with messages, the model's name and the settings."""

import json
import os
import tempfile
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfm.engine.conversation import AnswerSettings
from tfm.engine.errors import TfmError
from tfm.engine.fields import Fields, read_json, shown
from tfm.engine.files import expanded, is_there
from tfm.engine.sampling import SamplingParams

if TYPE_CHECKING:
    from tfm.engine.conversation import Conversation

FORMAT = "tfm conversation 1"
ROLES = ("system", "user", "assistant")


def save(file: str, conversation: "Conversation", settings: AnswerSettings) -> Path:
    """Write the file, whole or not at all; gives its path.

    Raises TfmError where that cannot be done, and for a file that is there and is no conversation.
    """
    path = Path(os.path.realpath(_path(file)))  # a link stays one
    _refuse_other(path)
    content = {
        "format": FORMAT, "model": conversation.model.name, "settings": _as_json(settings),
        "messages": conversation.messages,
    }  # fmt: skip
    data = json.dumps(content, ensure_ascii=False, indent=2).encode() + b"\n"
    try:
        _replace(path, data)
    except OSError as error:
        raise TfmError(f"file {path}: cannot be written", error.strerror, do="choose another place") from error
    return path


def _path(file: str) -> Path:
    if "\0" in file:
        raise TfmError("file", repr(file), "a name without NUL")
    return expanded(file)


def _refuse_other(path: Path) -> None:
    try:
        if not is_there(path) or read_json(path).get("format") == FORMAT:
            return
        found = "a file that is no conversation"
    except TfmError as error:
        found = str(error)
    raise TfmError(f"file {path}: not overwritten", found, "a conversation or a new name", "choose another name")


def _replace(path: Path, data: bytes) -> None:
    """Put data in the place of what is there, in one step."""
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask()
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _as_json(settings: AnswerSettings) -> dict[str, Any]:
    biases = {str(id_): bias if bias > -float("inf") else "-inf" for id_, bias in settings.sampling.logit_bias.items()}
    sampling = asdict(settings.sampling) | {"logit_bias": biases}
    return {**sampling, "max_tokens": settings.max_tokens, "stop": list(settings.stop)}


def load(file: str, conversation: "Conversation", settings: AnswerSettings) -> tuple[str | None, AnswerSettings]:
    """Put the file's messages into conversation; gives the name of its model, and its settings.

    Raises TfmError that names the field, and changes nothing, for what is no conversation that this model can go on
    with. A file of another hand needs `messages` only.
    """
    path = _path(file)
    found = Fields(f"file {path}", read_json(path))
    if found.value("format") not in (None, FORMAT):
        raise found.fault("format", json.dumps(FORMAT))
    model = found.value("model")
    if model is not None and not isinstance(model, str):
        raise found.fault("model", "a text")
    new = _read_settings(path, found.group("settings"), settings, conversation.model.config.vocab_size)
    messages = _read_messages(path, found)
    try:
        conversation.replace(messages)
    except TfmError as error:
        raise TfmError(f"file {path}: {error}") from error
    return model, new


def _read_messages(path: Path, found: Fields) -> list[dict[str, str]]:
    messages = found.value("messages")
    if not isinstance(messages, list):
        raise found.fault("messages", "a list of messages")
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
    names = {field.name for field in fields(SamplingParams)}
    for word in found.words():
        if word not in names | {"max_tokens", "stop"}:
            raise TfmError(f"file {path}: field settings.{word}", "a setting that there is not", ", ".join(names))
    stop = found.value("stop")
    if stop is not None:
        if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
            raise found.fault("stop", "a list of texts, none of them empty")
        settings = replace(settings, stop=tuple(stop))
    if "max_tokens" in found:
        settings = replace(settings, max_tokens=found.integer("max_tokens"))
    given: dict[str, Any] = {name: found.value(name) for name in names if name in found}
    if "logit_bias" in given:
        given["logit_bias"] = _read_biases(found)
    try:
        sampling = replace(settings.sampling, **given)
        sampling.check_ids(vocab_size)
    except TfmError as error:
        raise TfmError(f"file {path}: field settings.{error}") from error
    return replace(settings, sampling=sampling)


def _read_biases(found: Fields) -> dict[int, float]:
    biases = found.value("logit_bias")
    if not isinstance(biases, dict):
        raise found.fault("logit_bias", 'an object such as {"42": -5}')
    try:
        return {int(id_): float(bias) for id_, bias in biases.items()}
    except (TypeError, ValueError):
        raise found.fault("logit_bias", 'an object such as {"42": -5}') from None
