"""A chat without a terminal: each line of stdin is a turn, each answer a block on stdout."""

import sys

from tfm.cli.chat.turns import Turns
from tfm.cli.lines import LONGEST_BYTES, Lines
from tfm.cli.output import StdoutError
from tfm.cli.text import decode
from tfm.engine.errors import TfmError


def answer_lines(turns: Turns) -> None:
    """Answer every line that is not blank. What a line holds is text: a slash at its start has no meaning.

    Raises TfmError that names the line, at the first that cannot be answered.
    """
    if sys.stdin is None:
        return
    with Lines("-", turns.notes) as lines:
        for line in lines:
            source = f"stdin, line {line.number}"
            if line.data is None:
                raise TfmError(source, f"{line.size_bytes} bytes", f"at most {LONGEST_BYTES}")
            text = decode(line.data.removesuffix(b"\r"), source)
            if not text.strip():
                continue
            try:
                answer = turns.ask(text)
                turns.output.write("\n")
                turns.remark(answer)
                turns.check_end(answer)
            except StdoutError:
                raise  # which is no fault of the line
            except TfmError as error:
                raise TfmError(f"{source}: {error}") from error
