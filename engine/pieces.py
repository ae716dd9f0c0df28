"""What a token stands for, in bytes, and text from a stream of tokens.

tokenizer.json says under "decoder" how pieces become text. Three ways of writing bytes are in use: each byte as one
printable character (ByteLevel, GPT-2), bytes without a piece of their own as <0x00> to <0xFF> (ByteFallback,
SentencePiece), and a mark for the space (Metaspace or a Replace step, SentencePiece).
"""

import codecs
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from tfm.engine.errors import TfmError

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
BAD_BYTES = re.compile("[\udc80-\udcff]+")
REPLACEMENT = "\ufffd"
STEPS = "ByteLevel, ByteFallback, Fuse, Metaspace, Replace, Sequence, Strip"


@cache
def byte_of_character() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable bytes of Latin-1 stand for themselves, the others for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


@dataclass(frozen=True)
class PieceBytes:
    """How pieces become bytes.

    replacements are done in a piece, in order; joiner stands between tokens; leading is what is dropped from the start
    of a text, once (the space that SentencePiece puts before the first word).
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    joiner: bytes = b""
    leading: str = ""

    def __call__(self, piece: str) -> bytes:
        if self.byte_level:
            alphabet = byte_of_character()
            if all(character in alphabet for character in piece):
                return bytes(alphabet[character] for character in piece)
        elif self.byte_fallback and (match := BYTE_PIECE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        for old, new in self.replacements:
            piece = piece.replace(old, new)
        return piece.encode()


def read_decoder(state: bytes | None, where: str) -> PieceBytes:
    """From the JSON of "decoder" in tokenizer.json (None: there is none). Raises TfmError for an unknown step."""
    if state is None:
        return PieceBytes(joiner=b" ")
    decoder = json.loads(state)
    byte_level = byte_fallback = False
    replacements: list[tuple[str, str]] = []
    leading = ""
    for step in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(mark)}:
                replacements.append((mark, " "))
                leading = "" if step.get("prepend_scheme", "always") == "never" else " "
            case {"type": "Strip", "content": str(content), "start": int(start), "stop": 0}:
                leading = content * start
            case _:
                found = json.dumps(step, ensure_ascii=False)
                raise TfmError(f"{where}: field decoder", found, f"steps of the types {STEPS}")
    return PieceBytes(byte_level, byte_fallback, tuple(replacements), b"", leading)


class StreamDecoder:
    """Text from tokens as they come: whole characters only, and all of them.

    `push` gives what is certain after one more token ("" in mid-character), `flush` the rest at the end. Bytes that are
    not UTF-8 become U+FFFD, one for a run of any length; what follows them is read as ever.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], pieces: PieceBytes, continues: bool) -> None:
        self._bytes_of, self._joiner = bytes_of, pieces.joiner
        self._leading = "" if continues else pieces.leading
        self._begun = continues
        # surrogateescape turns each bad byte into one of U+DC80 to U+DCFF, which UTF-8 cannot spell
        self._utf8 = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._in_bad_run = False

    def push(self, id_: int) -> str:
        """The text that one more token completes."""
        data = self._bytes_of(id_)
        if data and self._joiner:
            data = self._joiner + data if self._begun else data
        self._begun = self._begun or bool(data)
        return self._clean(self._utf8.decode(data))

    def flush(self) -> str:
        """The end of the text: U+FFFD where it broke off in mid-character. The decoder is then as new, in mid-text."""
        text = self._clean(self._utf8.decode(b"", final=True))
        self._in_bad_run = False
        return text

    def _clean(self, text: str) -> str:
        if not text:
            return ""
        goes_on, bad_end = self._in_bad_run and _is_bad(text[0]), _is_bad(text[-1])
        if not text.isascii():
            text = BAD_BYTES.sub(REPLACEMENT, text)
        self._in_bad_run = bad_end
        return self._strip(text[1:] if goes_on else text)

    def _strip(self, text: str) -> str:
        while self._leading and text:
            if not text.startswith(self._leading[0]):
                self._leading = ""
                break
            text, self._leading = text[1:], self._leading[1:]
        return text


def _is_bad(character: str) -> bool:
    return "\udc80" <= character <= "\udcff"
