"""tokenizer.json given to the tokenizers library, whose own checks leave gaps: it panics on what it should refuse.

A panic comes to Python as pyo3's PanicException, after the library has written about it on stderr. So what is known to
make it panic is looked for first; a panic of another kind becomes a TfmError all the same.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfm.engine.errors import TfmError
from tfm.engine.fields import shown
from tfm.engine.files import is_there, read_text_bytes
from tfm.kernels.heap import large_pages

if TYPE_CHECKING:
    import tokenizers

AGAIN = "download the file again"
HEAP_SHARE = 24  # bytes that the library takes to read one of the file
STEPS = {"post_processor": "processors", "normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}
"""The parts of a tokenizer that may be a Sequence, and what that calls its steps."""
PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*(null|"")?')


def read_backend(path: Path) -> "tokenizers.Tokenizer":
    """The library's tokenizer. Raises TfmError for a file that it cannot read, or would panic on when it is used."""
    import tokenizers

    if not is_there(path):
        do = "tfm needs the tokenizer.json that the tokenizers library writes"
        raise TfmError(f"file {path}", "nothing there", do=do)
    data = read_text_bytes(path)
    _check_merges(path, data)
    with library_faults(f"file {path}: not a tokenizer"), large_pages(HEAP_SHARE * len(data)):
        backend = tokenizers.Tokenizer.from_buffer(data)
    for part, check in CHECKS.items():
        state = getattr(backend, part)
        for step in _steps(part, None if state is None else json.loads(state.__getstate__())):
            if (allowed := check(step)) is not None:
                raise TfmError(f"file {path}: field {part}", shown(step), allowed, AGAIN)
    return backend


@contextmanager
def library_faults(what: str) -> Iterator[None]:
    """The library's faults as one line that begins with what."""
    try:
        yield
    except ValueError as error:  # from_buffer, for all that it does not understand
        raise TfmError(what, str(error).removeprefix("Cannot instantiate Tokenizer from buffer: "), do=AGAIN) from error
    except BaseException as error:
        # A fault while encoding is a plain Exception, never a subclass; the class of a panic is in no module.
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise TfmError(what, error, do=AGAIN) from error


def _steps(part: str, state: Any) -> Iterator[dict[str, Any]]:
    """The steps of a part, those of a Sequence one by one."""
    if state is not None and state["type"] == "Sequence":
        for step in state[STEPS[part]]:
            yield from _steps(part, step)
    elif state is not None:
        yield state


def _check_template(step: dict[str, Any]) -> str | None:
    """What may stand there where it does not; pairs of texts are never encoded."""
    if step["type"] != "TemplateProcessing":
        return None
    named = [piece["SpecialToken"]["id"] for piece in step["single"] if "SpecialToken" in piece]
    missing = next((name for name in named if name not in step["special_tokens"]), None)
    if missing is not None:
        return f"tokens that are in its special_tokens, {missing!r} is not"
    texts = [piece["Sequence"]["id"] for piece in step["single"] if "Sequence" in piece]
    return None if "B" not in texts else "a template of one text, $A"


def _check_normalizer(step: dict[str, Any]) -> str | None:
    empty = step["type"] == "Prepend" and not step["prepend"]
    empty = empty or (step["type"] == "Replace" and "" in step["pattern"].values() and step["content"] != "")
    return "a text of at least one character to put there or to look for" if empty else None


def _check_pre_tokenizer(step: dict[str, Any]) -> str | None:
    return "a length of 1 or more" if step["type"] == "FixedLength" and step["length"] == 0 else None


CHECKS: dict[str, Callable[[dict[str, Any]], str | None]] = {
    "post_processor": _check_template,
    "normalizer": _check_normalizer,
    "pre_tokenizer": _check_pre_tokenizer,
}


def _check_merges(path: Path, data: bytes) -> None:
    """The library cuts the prefix of continued pieces off the second part of each merge, whether it is there or not."""
    if all(PREFIX.findall(data)):
        return  # there is none: the usual case, in which the file is not read twice
    try:
        file = json.loads(data)
        prefix, merges = file["model"]["continuing_subword_prefix"], file["model"]["merges"]
        seconds = [merge.split(" ")[1] if isinstance(merge, str) else merge[1] for merge in merges] if prefix else []
        wrong = next((second for second in seconds if not second.startswith(prefix)), None)
    except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError):
        return  # the library says better what is wrong with it
    if wrong is not None:
        allowed = f"parts that begin with continuing_subword_prefix, {prefix!r}"
        raise TfmError(f"file {path}: field model.merges", shown(wrong), allowed, AGAIN)
