"""The history of tfm chat at a terminal: what was typed, across runs."""

import os
import stat
from pathlib import Path

import pytest
from chat_terminal import ANSWER, CTRL_C, ENTER, NEW_LINE, UP, chat, history_of

from tfm.kernels.cache_folder import cache_folder


def test_history_across_runs(chatty_parrot: Path, home: Path) -> None:
    """Arrow up found nothing in a new run, or lines of a message as texts of their own; others could read the file."""
    with chat(chatty_parrot, home=home) as terminal:
        terminal.see_prompt()
        terminal.type("first" + NEW_LINE + "é🙂" + ENTER)
        terminal.see(ANSWER)
        terminal.say("/bye")
        assert terminal.end() == 0
    assert stat.S_IMODE(history_of(home).stat().st_mode) == 0o600
    history_of(home).chmod(0o644)
    with chat(chatty_parrot, home=home) as terminal:
        terminal.see_prompt()
        terminal.type(UP + UP)
        terminal.see("first")
        terminal.see("é🙂")
        terminal.type(ENTER)
        terminal.see(ANSWER)
        terminal.say("/bye")
        assert terminal.end() == 0
    assert stat.S_IMODE(history_of(home).stat().st_mode) == 0o600
    assert history_of(home).read_text().count("+first\n+é🙂\n") == 2


@pytest.mark.parametrize("what", ["a file in the way", "a pipe", "no home"])
def test_history_that_cannot_be_kept(chatty_parrot: Path, tmp_path: Path, what: str) -> None:
    """A home that is missing or read-only ended the chat before it began, or a pipe in its place made it wait."""
    home: Path = tmp_path / "data"
    env: dict[str, str | None] = {}
    if what == "a file in the way":
        home.write_text("")
    elif what == "a pipe":
        history_of(home).parent.mkdir(parents=True)
        os.mkfifo(history_of(home))
    else:
        home, env = Path(), {"XDG_DATA_HOME": None, "HOME": "/dev/null/nowhere", "TFM_CACHE": str(cache_folder())}
    with chat(chatty_parrot, home=home, **env) as terminal:
        terminal.see("history: not kept")
        terminal.say("hello")
        terminal.see(ANSWER)
        terminal.see_prompt()
        terminal.type(UP)
        terminal.see("hello")
        terminal.type(CTRL_C)
        terminal.say("/bye")
        assert terminal.end() == 0
        assert terminal.shown.count("history: not kept") == 1


def test_two_chats_share_the_history(chatty_parrot: Path, home: Path) -> None:
    """The last one to leave wrote its own history over the other's."""
    with chat(chatty_parrot, home=home) as one, chat(chatty_parrot, home=home) as other:
        for text in ("x", "y"):
            for terminal, name in ((one, "one"), (other, "other")):
                terminal.say(f"{name} {text}")
                terminal.see(ANSWER)
        for terminal in (one, other):
            terminal.say("/bye")
            assert terminal.end() == 0
    lines = history_of(home).read_text().splitlines()
    assert [line for line in lines if line.startswith(("+one", "+other"))] == [
        "+one x",
        "+other x",
        "+one y",
        "+other y",
    ]
