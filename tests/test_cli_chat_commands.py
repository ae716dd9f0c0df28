"""The /commands of tfm chat at a terminal."""

import json
import os
from pathlib import Path

from chat_terminal import ANSWER, ENTER, Terminal, chat


def test_words_behind_a_slash(chatty_parrot: Path, home: Path, tmp_path: Path) -> None:
    """A mistyped command was sent to the model as a message."""
    file = tmp_path / "saved.json"
    with chat(chatty_parrot, home=home) as terminal:
        terminal.say("/rest")
        terminal.see("command /rest: found no such command; did you mean /reset? //rest makes it a message")
        terminal.say("/sys")
        terminal.see("did you mean /system?")
        terminal.say("/etc/passwd is a file")
        terminal.see(
            "command /etc/passwd: found no such command; /help tells what there is; //etc/passwd makes it a message"
        )
        terminal.say("/reset all")
        terminal.see("command /reset: found 'all'; allowed: nothing behind it")
        terminal.say("/save")
        terminal.see("command /save: found nothing behind it; allowed: /save FILE")
        terminal.say("/drop x")
        terminal.see("command /drop: found 'x'; allowed: a number of turns")
        terminal.say("/regenerate")
        terminal.see("no answer yet")
        terminal.say("//etc is a folder")
        terminal.see(f"{ANSWER}\r\n")
        terminal.say("/help")
        terminal.see('tell the model TEXT before all, quotes included ("": nothing)')
        terminal.see("/regenerate     another answer to the last message")
        terminal.say(f"/save {file}")
        terminal.see("saved: ")
        terminal.say("/bye")
        assert terminal.end() == 0
    assert [message["content"] for message in json.loads(file.read_text())["messages"]] == ["/etc is a folder", ANSWER]


def test_completion_of_commands(chatty_parrot: Path, home: Path, tmp_path: Path) -> None:
    """Tab completes the names of commands, with the space before an argument, and of files where one is taken."""
    (tmp_path / "a conversation.json").write_text('{"messages": []}')
    with chat(chatty_parrot, home=home) as terminal:
        terminal.see_prompt()
        terminal.type("/sys\tBe kind." + ENTER)
        terminal.say("/system")
        terminal.see("Be kind.\r\n")
        terminal.see_prompt()
        terminal.type(f"/lo\t{tmp_path}/a c\t" + ENTER)
        terminal.see("loaded: 0 turns")
        terminal.say("/bye")
        assert terminal.end() == 0


def test_system_drop_and_reset(chatty_parrot: Path, home: Path, tmp_path: Path) -> None:
    """A system text of two quotes, where somebody wanted none; turns that stayed or went with others."""
    file = tmp_path / "saved.json"

    def saved(terminal: Terminal) -> list[tuple[str, str]]:
        terminal.say(f"/save {file}")
        terminal.see("saved: ")
        return [(message["role"], message["content"]) for message in json.loads(file.read_text())["messages"]]

    with chat(chatty_parrot, "-s", "First.", home=home) as terminal:
        for text in ("one", "two", "three"):
            terminal.say(text)
            terminal.see(ANSWER)
        terminal.say("/system Second.")
        terminal.say("/drop 2")
        terminal.see("forgotten: 2; turns that are left: 1")
        assert saved(terminal) == [("system", "Second."), ("user", "three"), ("assistant", ANSWER)]
        terminal.say("/drop 2")
        terminal.see("turns to forget: found 2; allowed: 1 to 1")
        terminal.say("/reset")
        assert saved(terminal) == [("system", "Second.")]
        for nothing in ('""', "''"):
            terminal.say(f"/system {nothing}")
            terminal.see("the model is told nothing before the messages")
            assert saved(terminal) == []
            terminal.say('/system "Quotes" are text')
            assert saved(terminal) == [("system", '"Quotes" are text')]
        terminal.say('/system ""')
        terminal.say("/system")
        terminal.see("(nothing)")
        terminal.say("/bye")
        assert terminal.end() == 0


def test_regenerate(chatty_parrot: Path, home: Path, tmp_path: Path) -> None:
    """The seed was the same again, and so was the answer; or the new answer became a turn of its own."""
    file = tmp_path / "saved.json"
    with chat(chatty_parrot, "--temperature", "0.5", "--seed", "7", home=home) as terminal:
        terminal.say("one")
        terminal.see(ANSWER)
        terminal.say("/regenerate")
        terminal.see(ANSWER)
        terminal.say(f"/save {file}")
        terminal.see("saved: ")
        terminal.say("/bye")
        assert terminal.end() == 0
        assert "the same again" not in terminal.shown
    saved = json.loads(file.read_text())
    assert (len(saved["messages"]), saved["settings"]["seed"], saved["settings"]["temperature"]) == (2, 8, 0.5)
    with chat(chatty_parrot, home=home) as terminal:
        terminal.say("one")
        terminal.see(ANSWER)
        terminal.say("/regenerate")
        terminal.see("at temperature 0 the answer is the same again")
        terminal.see(ANSWER)
        terminal.say("/bye")
        assert terminal.end() == 0


def test_save_and_load(chatty_parrot: Path, endless_chat: Path, home: Path, tmp_path: Path) -> None:
    """A conversation goes on in another process, with its settings, and with a note where the model is another one."""
    file = tmp_path / "my chat.json"
    with chat(chatty_parrot, "-n", "3", "--stop", "x", "-s", "Be kind.", home=home) as terminal:
        terminal.say("hello")
        terminal.see("the answer ends here: it has 3 tokens, and -n allows no more")
        for _ in range(2):  # the second time over the first
            terminal.say(f"/save {file}")
            terminal.see("saved: ")
        terminal.say("/bye")
        assert terminal.end() == 0
    saved = json.loads(file.read_text())
    assert list(saved) == ["format", "model", "settings", "messages"]
    assert saved["model"] == str(chatty_parrot)
    assert os.listdir(tmp_path / "data") == ["tfm"]
    assert sorted(os.listdir(tmp_path)) == ["data", "my chat.json"]  # and no temporary file
    with chat(endless_chat, home=home) as terminal:
        terminal.say(f"/load {file}")
        terminal.see("loaded: 1 turns")
        terminal.see(f"it was made with the model {chatty_parrot}, and goes on with {endless_chat}")
        terminal.see("settings of the file: max_tokens 3, stop ('x',)")
        terminal.say("go on")
        terminal.see("abc\r\n")
        terminal.say(f"/save {file}")
        terminal.see("saved: ")
        terminal.say("/bye")
        assert terminal.end() == 0
    contents = [message["content"] for message in json.loads(file.read_text())["messages"]]
    assert contents == ["Be kind.", "hello", "Hi ", "go on", "abc"]


def test_quotes_around_a_name(chatty_parrot: Path, home: Path, tmp_path: Path) -> None:
    """The quotes became a part of the file's name."""
    with chat(chatty_parrot, home=home) as terminal:
        terminal.say(f"/save {tmp_path}/Ada's talk.json")
        terminal.see("saved: ")
        for quote in "'", '"':
            terminal.say(f"/save {quote}{tmp_path}/my talk.json{quote}")
            terminal.see("saved: ")
            terminal.say(f"/load {quote}{tmp_path}/my talk.json{quote}")
            terminal.see("loaded: 0 turns")
        terminal.say('/save "my talk.json')
        terminal.see("close the quote")
        terminal.say("/bye")
        assert terminal.end() == 0
    assert sorted(os.listdir(tmp_path)) == ["Ada's talk.json", "data", "my talk.json"]


def test_the_command_line_wins_over_a_file(chatty_parrot: Path, home: Path, tmp_path: Path) -> None:
    """/load changed what the person had asked for on the command line."""
    file = tmp_path / "saved.json"
    settings = {"max_tokens": 3, "stop": ["x"], "temperature": 0.5, "top_p": 0.5, "seed": 9}
    file.write_text(json.dumps({"messages": [], "settings": settings}))
    with chat(chatty_parrot, "-n", "1024", "--temperature", "0", home=home) as terminal:
        terminal.say(f"/load {file}")
        terminal.see("settings of the file: top_p 0.5, stop ('x',)")
        terminal.see("not taken from the file, since the command line says otherwise: temperature, max_tokens")
        terminal.say(f"/save {tmp_path}/new.json")
        terminal.see("saved: ")
        terminal.say("/bye")
        assert terminal.end() == 0
    saved = json.loads((tmp_path / "new.json").read_text())["settings"]
    assert settings | {"max_tokens": 1024, "temperature": 0} == {name: saved[name] for name in settings}


def test_save_keeps_what_is_there(chatty_parrot: Path, home: Path, tmp_path: Path) -> None:
    """A file that is no conversation was overwritten, a link replaced, or an error left a piece of a file."""
    notes, target, link = tmp_path / "notes.txt", tmp_path / "target.json", tmp_path / "link.json"
    notes.write_text("precious")
    (tmp_path / "other.json").write_text('{"messages": []}')
    link.symlink_to(target)
    with chat(chatty_parrot, home=home) as terminal:
        for name, found in (
            ("notes.txt", "not overwritten"), ("other.json", "not overwritten"), (".", "not overwritten"),
            ("missing/x.json", "No such file or directory"), ("/dev/null", "not overwritten"),
            ("notes.txt", "notes.txt: not overwritten: found a file that cannot be read as a conversation; "
             "choose another name\r\n"),
        ):  # fmt: skip
            terminal.say(f"/save {tmp_path / name}")
            terminal.see(found)
        terminal.say(f"/save {link}")
        terminal.see("saved: ")
        terminal.say("/bye")
        assert terminal.end() == 0
    assert notes.read_text() == "precious"
    assert (tmp_path / "other.json").read_text() == '{"messages": []}'
    assert link.is_symlink()
    assert json.loads(target.read_text())["messages"] == []
    assert sorted(os.listdir(tmp_path)) == ["data", "link.json", "notes.txt", "other.json", "target.json"]


BAD_FILES = {
    "nothing": (None, "nothing there; name a file that /save wrote"),
    "not JSON": ("{", "column 2; name a file that /save wrote"),
    "a list": ("[]", "a JSON object"),
    "no messages": ("{}", "field messages: found nothing"),
    "format": ('{"format": "x", "messages": []}', 'field format: found "x"'),
    "message": ('{"messages": ["x"]}', 'field messages[0]: found "x"'),
    "role": ('{"messages": [{"role": "user", "content": "a"}, {"role": "bot", "content": "b"}]}', "messages[1].role"),
    "content": ('{"messages": [{"role": "user", "content": 5}]}', "field messages[0].content: found 5"),
    "more": ('{"messages": [{"role": "user", "content": "a", "name": "b"}]}', "field messages[0].name"),
    "order": ('{"messages": [{"role": "assistant", "content": "a"}]}', 'messages[0].role: found "assistant"'),
    "setting": ('{"messages": [], "settings": {"temperature": -1}}', "field settings.temperature: found -1"),
    "type": ('{"messages": [], "settings": {"top_p": "x"}}', "field settings.top_p: found x"),
    "unknown": ('{"messages": [], "settings": {"warmth": 1}}', "allowed: temperature, top_k, "),
    "names": ('{"messages": [], "settings": {"warmth": 1}}', "logit_bias, seed, max_tokens, stop"),
    "bias": ('{"messages": [], "settings": {"logit_bias": {"9999": 1}}}', "settings.logit_bias: found token id 9999"),
    "underscore": (
        '{"messages": [], "settings": {"logit_bias": {"1_0": 1}}}',
        'field settings.logit_bias: found {"1_0"',
    ),
    "flag": (
        '{"messages": [], "settings": {"logit_bias": {"1": true}}}',
        'field settings.logit_bias: found {"1": true',
    ),
    "tokens": ('{"messages": [], "settings": {"max_tokens": 0}}', "field settings.max_tokens: found 0"),
    "stop": ('{"messages": [], "settings": {"stop": [""]}}', "field settings.stop"),
    "half a character": ('{"messages": [], "settings": {"stop": ["\\ud800"]}}', "texts that UTF-8 can hold"),
    "too large": ('{"messages": [], "settings": {"temperature": 1' + "0" * 400 + "}}", "field settings.temperature"),
    "steers": ('{"messages": [], "settings": {"\\u001b[31m": 1}}', "field settings.\\x1b[31m"),
}


def test_load_of_bad_files(chatty_parrot: Path, home: Path, tmp_path: Path) -> None:
    """A damaged file ended the chat, or left half of it in the conversation; the error did not name the field."""
    bad, good = tmp_path / "bad.json", tmp_path / "good.json"
    with chat(chatty_parrot, home=home, COLUMNS="500") as terminal:
        terminal.say("hello")
        terminal.see(ANSWER)
        for content, found in BAD_FILES.values():
            if content is not None:
                bad.write_text(content)
            terminal.say(f"/load {bad}")
            terminal.see(found)
        terminal.say(f"/save {good}")
        terminal.see("saved: ")
        terminal.say("/bye")
        assert terminal.end() == 0
    saved = json.loads(good.read_text())
    assert [message["content"] for message in saved["messages"]] == ["hello", ANSWER]
    assert (saved["settings"]["temperature"], saved["settings"]["max_tokens"]) == (0, 1024)
