"""tfm tokenize: text to token ids, and back."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from tfm.cli.answer import piece_as_json
from tfm.cli.options import Command, TextOptions, model_option, quiet_option, text_options
from tfm.cli.output import Notes, Output
from tfm.cli.text import parse_ids

if TYPE_CHECKING:
    from tfm.engine.tokenizer import Tokenizer


@click.command("tokenize", cls=Command)
@text_options("TEXT")
@click.option("--decode", is_flag=True, help="TEXT is token ids; print their text.")
@click.option("--json", "as_json", is_flag=True, help="Each token with its text, its bytes and where they stand.")
@click.option("--count", is_flag=True, help="Print only how many tokens there are.")
@click.option("--no-special", is_flag=True, help="Control tokens in the text are only text; of ids they are left out.")
@click.option("--no-bos", is_flag=True, help="Leave out what the model wants before and after every text.")
@model_option
@quiet_option
@click.pass_obj
def command(
    output: Output,
    source: TextOptions,
    decode: bool,
    as_json: bool,
    count: bool,
    no_special: bool,
    no_bos: bool,
    ref: str,
    quiet: bool,
) -> None:
    """Print the token ids of TEXT, or the text of token ids.

    \b
    Examples:
      tfm tokenize "Once upon a time"
      tfm tokenize --count < notes.txt
      tfm tokenize "Once upon" | tfm generate --ids -n 8 | tfm tokenize --decode

    The text is TEXT, then the files of -f, then what stands on stdin when stdin is no terminal, with a blank line
    between. --json gives for each token where its bytes start and end in the text.
    """
    if as_json and count:
        raise click.UsageError("--json and --count are two shapes of the result; choose one.")
    with Notes(quiet) as notes:
        text = source.read(notes)
        if text is None and source.has_stdin:
            text = ""  # an empty file is a text of no tokens
        if text is None:
            raise click.UsageError("No text: give TEXT, -f FILE or text on stdin.")
        tokenizer = _load(ref, notes)
    ids = parse_ids(text) if decode else tokenizer.encode(text, add_special=not no_bos, parse_special=not no_special)
    _check(ids, tokenizer)
    if count:
        output.write_line(str(len(ids)))
    elif as_json:
        pieces = [tokenizer.token_bytes(id_) for id_ in ids]
        data = b"".join(pieces) if decode else text.encode()
        output.write_line(json.dumps(_with_places(ids, pieces, data), ensure_ascii=False))
    elif decode:
        output.write(tokenizer.decode(ids, show_special=not no_special))
        output.end_line()
    else:
        output.write_line(" ".join(map(str, ids)))


def _load(ref: str, notes: Notes) -> "Tokenizer":
    from tfm.engine.hub import resolve
    from tfm.engine.store import explaining_damage
    from tfm.engine.tokenizer import Tokenizer

    folder = resolve(ref, notes.progress)
    with explaining_damage(folder):
        return Tokenizer.load(folder)


def _check(ids: Sequence[int], tokenizer: "Tokenizer") -> None:
    from tfm.engine.errors import TfmError

    wrong = next((id_ for id_ in ids if id_ >= tokenizer.vocab_size), None)
    if wrong is not None:
        raise TfmError("token ids", wrong, f"0 to {tokenizer.vocab_size - 1}")


def _with_places(ids: Sequence[int], pieces: Sequence[bytes], data: bytes) -> list[dict[str, Any]]:
    """Each token with start and end of its bytes in data.

    A token that is not in the text (BOS) has no width. Where the tokenizer has changed the text (another Unicode form,
    a space put in front), tokens that are not found as they are share the place up to the next that is.
    """
    found: list[dict[str, Any]] = []
    lost: list[dict[str, Any]] = []
    place = 0
    for id_, piece in zip(ids, pieces, strict=True):
        entry = piece_as_json(id_, piece)
        found.append(entry)
        match = _match(data, piece, place, anywhere=bool(lost))
        if match is None:
            lost.append(entry)
            continue
        for before in lost:
            before |= {"start": place, "end": match[0]}
        lost = []
        entry["start"], entry["end"] = match
        place = match[1]
    for before in lost:
        before |= {"start": place, "end": len(data)}
    return found


def _match(data: bytes, piece: bytes, place: int, anywhere: bool) -> tuple[int, int] | None:
    """Where piece stands, from place on; also without the space that a tokenizer puts in front of a text."""
    for form in (piece, piece.removeprefix(b" ")):
        start = data.find(form, place) if anywhere else (place if data.startswith(form, place) else -1)
        if form and start >= 0:
            return start, start + len(form)
    return None
