"""tfm chat at a terminal, ended from outside: the terminal is as it was, and the status says by which signal."""

import signal
import sys
from pathlib import Path

import pytest
from chat_terminal import ENTER, chat, history_of

STATUS = {signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGQUIT: 131}


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
        assert not terminal.marks_pastes
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


def test_quit_is_typed_in_an_answer(endless_chat: Path, home: Path) -> None:
    """Ctrl-\\ left a terminal that did not show what was typed."""
    with chat(endless_chat, "-n", "900000", home=home) as terminal:
        terminal.say("hello")
        terminal.see("abcdefghijabcdefghij")
        terminal.type("\x1c")
        assert terminal.end() == 131
        assert terminal.settings_after == terminal.settings_before


@pytest.mark.parametrize("numbers", [(2, 15), (15, 2), (1, 15), (2, 3)])
@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_two_signals_at_the_prompt(endless_chat: Path, home: Path, numbers: tuple[int, int], term: str) -> None:
    """The line editor was told to end twice, and said so in forty lines of traceback."""
    with chat(endless_chat, home=home, term=term) as terminal:
        terminal.see_prompt()
        terminal.type("half a line")
        terminal.see("half a line")
        terminal.interrupt_at_once(*numbers)
        statuses = {STATUS[number] for number in numbers if number in STATUS}
        assert terminal.end() in statuses
        assert terminal.settings_after == terminal.settings_before
        assert not terminal.marks_pastes
        assert terminal.shown.split("half a line")[-1].strip() == ""


def test_ctrl_c_from_outside_at_the_prompt(endless_chat: Path, home: Path) -> None:
    """`kill -INT` there is what the key is: it clears the line, however often it comes, and ends nothing."""
    with chat(endless_chat, home=home) as terminal:
        for _ in range(2):
            terminal.see_prompt()
            terminal.type("half a line")
            terminal.see("half a line")
            terminal.interrupt_at_once(signal.SIGINT)
        terminal.see_prompt()
        terminal.interrupt()
        terminal.see("Ctrl-D or /bye leaves")
        terminal.see_prompt()
        terminal.type("\x04")
        assert terminal.end() == 0
        assert "Traceback" not in terminal.shown


STUCK = """
import sys, time
import tfm.cli.chat.prompt as prompt
from tfm.cli.main import main
def never(self, document, event):
    print("stuck", flush=True)
    time.sleep(600)
prompt.PathCompleter.get_completions = never
sys.exit(main())
"""


def test_a_line_editor_that_hangs(endless_chat: Path, home: Path) -> None:
    """Where the line editor does not come to its end, another thread ends the process: pastes kept their marks, which
    the line editor had asked the terminal for."""
    with chat(endless_chat, home=home, tfm=(sys.executable, "-c", STUCK)) as terminal:
        terminal.see_prompt()
        terminal.type("/save x\t")
        terminal.see("stuck")
        terminal.interrupt(signal.SIGTERM)
        assert terminal.end() == 143
        assert terminal.settings_after == terminal.settings_before
        assert not terminal.marks_pastes


def test_a_terminal_that_does_not_tell_where_its_cursor_is(chatty_parrot: Path, home: Path) -> None:
    """It was asked, and after two seconds a warning that it does not answer stood in the conversation."""
    with chat(chatty_parrot, home=home, PROMPT_TOOLKIT_NO_CPR=None) as terminal:
        terminal.say("hello")
        terminal.see_prompt()
        assert b"\x1b[6n" not in terminal.data
