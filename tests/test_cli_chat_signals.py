"""tfm chat at a terminal, ended from outside: the terminal is as it was, and the status says by which signal."""

import signal
from pathlib import Path

import pytest
from chat_terminal import ENTER, chat, history_of

STATUS = {signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.mark.parametrize("number", STATUS)
@pytest.mark.parametrize("when", ["typing", "reading", "answering"])
@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_the_terminal_is_given_back(endless_chat: Path, home: Path, number: int, when: str, term: str) -> None:
    """`kill` in mid-answer left a terminal that did not show what was typed. What was sent is in the history."""
    with chat(endless_chat, "-n", "900000", home=home, term=term) as terminal:
        terminal.say("hello")
        terminal.see("abcdefghijabcdefghij")
        if when != "answering":
            terminal.interrupt()
            terminal.see("stopped")
            terminal.see_prompt()
            is_long = when == "reading" and term == "xterm"  # without bracketed paste so much cannot be sent at once
            terminal.type("\x1b[200~" + "x" * 200_000 + "\x1b[201~" if is_long else "xxxxx")
            terminal.type(ENTER if when == "reading" else "")
            terminal.see("reading the prompt" if is_long else "xxxxx")
        assert terminal.settings != terminal.settings_before
        for _ in range(2):  # a second one must not interrupt the tidying up after the first
            terminal.interrupt(number)
        assert terminal.end() == STATUS[number]
        assert terminal.settings_after == terminal.settings_before
        assert "Traceback" not in terminal.shown
        assert "a bug in tfm" not in terminal.shown
    assert "+hello\n" in history_of(home).read_text()


def test_in_one_long_step(default_model_folder: Path, home: Path) -> None:
    """While the main thread reads a long prompt, another one ends the process: it gives the terminal back as well."""
    with chat(default_model_folder, "--threads", "1", home=home) as terminal:
        terminal.see_prompt()
        terminal.type("\x1b[200~" + "hello " * 6000 + "\x1b[201~" + ENTER)
        terminal.see("reading the prompt")
        terminal.interrupt(signal.SIGTERM)
        assert terminal.end() == 143
        assert terminal.settings_after == terminal.settings_before


@pytest.mark.parametrize("is_answering", [True, False])
def test_window_that_is_closed(endless_chat: Path, home: Path, is_answering: bool) -> None:
    """An answer nobody can see went on, or its end was called a bug in tfm."""
    with chat(endless_chat, "-n", "900000", home=home) as terminal:
        terminal.see_prompt()
        if is_answering:
            terminal.type("hello" + ENTER)
            terminal.see("abcdefghijabcdefghij")
        assert terminal.hang_up() == 129


def test_ctrl_c_still_stops_only_the_answer(endless_chat: Path, home: Path) -> None:
    """Ctrl-C and then `kill`: the answer is stopped by the one, the chat by the other, and not by the first alone."""
    with chat(endless_chat, "-n", "900000", home=home) as terminal:
        for _ in range(2):
            terminal.say("hello")
            terminal.see("abcdefghijabcdefghij")
            terminal.interrupt()
            terminal.see("stopped")
        terminal.say("hello")
        terminal.see("abcdefghij")
        terminal.interrupt()
        terminal.interrupt(signal.SIGTERM)
        assert terminal.end() == 143
        assert terminal.settings_after == terminal.settings_before
