"""tfm chat at a terminal, key by key."""

import json
import re
import signal
import time
from pathlib import Path

import pytest
from chat_terminal import ALT_ENTER, ANSWER, CTRL_C, CTRL_D, ENTER, NEW_LINE, Terminal, chat, history_of
from cli_process import TFM

LETTERS = b"abcdefghij"


def test_terminal_is_as_it_was(chatty_parrot: Path, home: Path) -> None:
    """What the shell's user typed after the chat was not shown."""
    script = f"stty -a; {TFM} chat -q -m {chatty_parrot}; stty -a"
    terminal = Terminal(["/bin/sh", "-c", script], {"TERM": "xterm", "XDG_DATA_HOME": str(home)})
    try:
        terminal.say("hello")
        terminal.see(ANSWER)
        terminal.say("/bye")
        assert terminal.end() == 0
        before, after = re.findall(r"speed .*?-?extproc", terminal.shown, re.DOTALL)
        assert before == after
    finally:
        terminal.kill()


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_conversation(chatty_parrot: Path, home: Path, term: str) -> None:
    """Ask, read, ask again, leave."""
    with chat(chatty_parrot, home=home, term=term) as terminal:
        terminal.see("/help tells what there is, Ctrl-D leaves\r\n")
        terminal.say("hello")
        terminal.see(f"{ANSWER}\r\n")
        terminal.say("")
        terminal.say("   ")
        terminal.say("again")
        terminal.see(f"{ANSWER}\r\n")
        terminal.see_prompt()
        terminal.type(CTRL_D)
        assert terminal.end() == 0
        assert "Traceback" not in terminal.shown
        assert terminal.shown.count(ANSWER) == 2  # nothing was sent for empty lines


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_ctrl_c_stops_the_answer_and_not_the_chat(endless_chat: Path, home: Path, tmp_path: Path, term: str) -> None:
    """Ctrl-C ended the process a second later, or the next message met a template that refuses two in a row."""
    with chat(endless_chat, "-n", "900000", home=home, term=term) as terminal:
        for text in ("one", "two"):
            terminal.say(text)
            terminal.see("abcdefghijabcdefghij")
            terminal.type(CTRL_C)
            terminal.see("stopped; what was said so far stays in the conversation")
        terminal.say("/regenerate")
        terminal.see("abcdefghijabcdefghij")
        terminal.type(CTRL_C)
        terminal.see("stopped")
        time.sleep(1.5)  # after GRACE_S the process was ended from the side
        terminal.say("/save " + str(tmp_path / "saved.json"))
        terminal.see("saved: ")
        terminal.say("/bye")
        assert terminal.end() == 0
    messages = json.loads((tmp_path / "saved.json").read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert [message["content"] for message in messages[::2]] == ["one", "two"]
    for message in messages[1::2]:
        content = message["content"]
        assert content == (LETTERS.decode() * (len(content) // 10 + 1))[: len(content)]


def test_what_is_typed_during_an_answer(endless_chat: Path, home: Path, tmp_path: Path) -> None:
    """It was shown in the middle of the answer; Enter became a line break, so that nothing was sent afterwards."""
    file = tmp_path / "saved.json"
    with chat(endless_chat, "-n", "1000", home=home) as terminal:
        terminal.say("one")
        terminal.see("abcdefghij")
        terminal.type("two" + NEW_LINE + "more" + ENTER + f"/save {file}" + ENTER + CTRL_D)
        assert terminal.end() == 0
    messages = json.loads(file.read_text())["messages"]
    assert [message["content"] for message in messages] == [
        text for question in ("one", "two\nmore") for text in (question, LETTERS.decode() * 100)
    ]
    assert LETTERS.decode() * 100 in terminal.shown


def test_ctrl_c_while_the_prompt_is_read(endless_chat: Path, home: Path) -> None:
    """A long message could not be stopped before the first token of its answer was there."""
    with chat(endless_chat, home=home) as terminal:
        terminal.see_prompt()
        terminal.type("\x1b[200~" + "x" * 200_000 + "\x1b[201~")
        terminal.type(ENTER)
        terminal.see("reading the prompt")
        terminal.interrupt()
        terminal.interrupt()
        terminal.see("stopped before anything was said; the conversation is as it was")
        terminal.see_prompt()
        bars = terminal.shown.count("reading the prompt")
        time.sleep(0.5)  # the bar is gone: it would be drawn over the prompt
        terminal.type("/help")
        terminal.see("/help")
        assert terminal.shown.count("reading the prompt") == bars
        terminal.type(ENTER)
        terminal.say("/drop")
        terminal.see("there are none")
        terminal.say("/bye")
        assert terminal.end() == 0


@pytest.mark.parametrize("how", ["key", "signal"])
def test_ctrl_c_at_the_prompt(chatty_parrot: Path, home: Path, how: str) -> None:
    """It ended the chat, or left the text standing; at an empty prompt nothing said how to leave."""
    with chat(chatty_parrot, home=home) as terminal:

        def interrupt() -> None:
            terminal.type(CTRL_C) if how == "key" else terminal.interrupt()

        terminal.see_prompt()
        interrupt()
        terminal.see("Ctrl-D or /bye leaves")
        terminal.see_prompt()
        terminal.type("forget this")
        terminal.see("forget this")
        interrupt()
        terminal.say("hello")
        terminal.see(f"{ANSWER}\r\n")
        assert terminal.shown.count("Ctrl-D or /bye leaves") == 1
        terminal.say("/bye")
        assert terminal.end() == 0


def test_ctrl_c_before_the_first_prompt(endless_chat: Path, home: Path) -> None:
    """While the model is loaded Ctrl-C ends the process, as everywhere."""
    with chat(endless_chat, home=home) as terminal:
        time.sleep(0.15)
        terminal.interrupt()
        assert terminal.end() in (130, -signal.SIGINT)


def test_messages_of_several_lines(chatty_parrot: Path, home: Path, tmp_path: Path) -> None:
    """A pasted text was sent line by line, each answered for itself."""
    file = tmp_path / "saved.json"
    with chat(chatty_parrot, home=home) as terminal:
        terminal.see_prompt()
        terminal.type("one" + NEW_LINE + "two" + ALT_ENTER + "three" + ENTER)
        terminal.see(ANSWER)
        terminal.see_prompt()
        terminal.type("\x1b[200~four\r\nfive\rsix\n\x1b[201~" + ENTER)
        terminal.see(ANSWER)
        terminal.say(f"/save {file}")
        terminal.see("saved: ")
        terminal.see_prompt()
        terminal.type(CTRL_D)
        assert terminal.end() == 0
    messages = json.loads(file.read_text())["messages"]
    assert [message["content"] for message in messages] == ["one\ntwo\nthree", ANSWER, "four\nfive\nsix\n", ANSWER]


# ----------------------------------------------------------------------------------------- context is full


def test_context_full_at_a_terminal(small_chat: Path, home: Path) -> None:
    """Old turns were dropped without a word, or the conversation could not go on."""
    with chat(small_chat, home=home) as terminal:
        for text in ("x" * 20, "y"):
            terminal.say(text)
            terminal.see(ANSWER)
        terminal.say("z" * 20)
        terminal.see("conversation with this message: found ")
        line = terminal.see("/reset all of them")
        assert " tokens; allowed: at most 128, the context; /drop 1 forgets the oldest 1 of 2 turns (" in line
        terminal.say("/drop 1")
        terminal.say("z" * 20)
        terminal.see(ANSWER)
        terminal.say("w" * 200)
        terminal.see(
            "message: found 226 tokens, even without the earlier turns; allowed: at most 128, the context; shorten it"
        )
        terminal.say("/bye")
        assert terminal.end() == 0


def test_answer_that_meets_the_end_of_the_context(small_chat: Path, home: Path) -> None:
    """It ended in mid-sentence, and nothing said why."""
    with chat(small_chat, home=home) as terminal:
        terminal.say("x" * (128 - len("<user></user>\n<assistant>\n") - 2))
        terminal.see("Hi \r\n")
        terminal.see("the answer ends here: the context of 128 tokens is full")
        terminal.say("/bye")
        assert terminal.end() == 0


def test_terminal_into_a_pipe(chatty_parrot: Path, home: Path) -> None:
    """With stdout in a pipe the line editor wrote its escape sequences into the result."""
    script = f"{TFM} chat -m {chatty_parrot} | cat"
    terminal = Terminal(["/bin/sh", "-c", script], {"XDG_DATA_HOME": str(home)})
    try:
        terminal.see("each line is a message")
        terminal.type("hello\n")
        terminal.see(f"{ANSWER}\r\n")
        terminal.type(CTRL_D)
        assert terminal.end() == 0
        assert not history_of(home).exists()
    finally:
        terminal.kill()


def test_constraint_at_a_terminal(chatty_parrot: Path, home: Path) -> None:
    """An answer that broke off before its constraint allows ended the chat, or went by as complete."""
    with chat(chatty_parrot, "--regex", "[A-Za-z]{4}[0-9]", "-n", "3", home=home) as terminal:
        for text in ("x", "y"):
            terminal.say(text)
            terminal.see("--regex: the answer is not complete")
        terminal.say("/bye")
        assert terminal.end() == 0
