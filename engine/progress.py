"""How long work tells how far it is. The engine prints nothing: whoever calls it may show this."""

from collections.abc import Callable

Progress = Callable[[str, int, int | None], None]
"""Called as progress(label, done, total) now and then; total is None while it is not known."""


def silent(label: str, done: int, total: int | None) -> None:
    """The Progress of a caller who does not want to know."""
