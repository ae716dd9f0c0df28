"""Where a person types: editing, history across runs, messages of several lines, completion of commands."""

import os
import stat
import termios
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import platformdirs
from prompt_toolkit import PromptSession
from prompt_toolkit.application.current import get_app_or_none, get_app_session
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.utils import is_dumb_terminal

from tfm.cli.interrupt import Wish
from tfm.cli.output import Notes, Output, write_all

MARK, MORE = "> ", ". "  # before the first line of a message and before the others
MENU_LINES = 6
AS_BEFORE = b"\x1b[?2004l\x1b[?1l\x1b[?7h\x1b[0m"  # pastes without marks, plain cursor keys, long lines wrap, no colour


class Prompt:
    """Asks for one message or command after the other; commands and file_commands are for completion.

    A command that takes an argument comes with the space before it.
    """

    def __init__(self, commands: Sequence[str], file_commands: Sequence[str], notes: Notes) -> None:
        screen = get_app_session().output  # that of the session, which looks at it when it is made
        if isinstance(screen, Vt100_Output):
            # Where the cursor is, is nice to know, but terminals that do not answer are told so in the conversation,
            # and an answer that comes late stands in the shell.
            screen.enable_cpr = False
        self._session: PromptSession[str] = PromptSession(
            message=FormattedText([("bold", MARK)]), multiline=True, prompt_continuation=MORE,
            history=_open_history(notes), completer=_Commands(commands, file_commands), key_bindings=_keys(),
            complete_while_typing=True, reserve_space_for_menu=MENU_LINES, enable_suspend=True,
        )  # fmt: skip
        self._is_to_end = False

    def ask(self, wish: Wish, output: Output) -> str:
        """What was typed. Raises EOFError for Ctrl-D at an empty prompt, KeyboardInterrupt for Ctrl-C, Stopped."""
        self._is_to_end = False
        with output.stopping(self._give_back), wish.handed(self._end):
            return self._session.prompt(pre_run=self._leave_if_asked, handle_sigint=False)

    def _end(self) -> None:
        """Let `ask` come to its end. From a signal's handler: the event loop may be anywhere, also before its begin."""
        self._is_to_end = True
        app = get_app_or_none()
        if app is not None and app.loop is not None:
            app.loop.call_soon_threadsafe(self._leave_if_asked)

    def _leave_if_asked(self) -> None:
        app = get_app_or_none()
        if self._is_to_end and app is not None and app.future is not None and not app.future.done():
            app.exit(result="", style="class:aborting")

    def _give_back(self) -> None:
        """What the line editor has switched on, when it does not get to switch it off."""
        if isinstance(self._session.output, Vt100_Output) and not is_dumb_terminal():
            write_all(1, AS_BEFORE)

    @property
    def is_empty(self) -> bool:
        """Whether nothing stood there when `ask` ended."""
        return not self._session.default_buffer.text


@contextmanager
def keys_kept(output: Output) -> Iterator[None]:
    """What is typed during an answer is not shown in it, and stands at the next prompt as it was typed.

    Else the terminal would make a line feed of Enter, and so of a message that was sent one that goes on. The terminal
    is as it was afterwards, also when the process is ended from the side.
    """
    before = termios.tcgetattr(0)
    during = termios.tcgetattr(0)
    during[0] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR)
    during[3] &= ~(termios.ICANON | termios.ECHO | termios.IEXTEN)  # Ctrl-C stays a signal

    def give_back() -> None:
        with suppress(termios.error):  # a terminal that was closed
            termios.tcsetattr(0, termios.TCSANOW, before)

    with output.stopping(give_back):
        termios.tcsetattr(0, termios.TCSADRAIN, during)
        try:
            yield
        finally:
            give_back()


def _keys() -> KeyBindings:
    """Enter sends; Alt-Enter and Ctrl-J begin a new line. What is pasted comes with its line breaks as one text."""
    keys = KeyBindings()
    at_message = has_focus(DEFAULT_BUFFER)  # and not in a search

    @keys.add("enter", filter=at_message)
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=at_message)
    @keys.add("c-j", filter=at_message)
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("tab", filter=at_message)
    def _complete(event: KeyPressEvent) -> None:
        """The editor's own begins in the background, and not at all while the menu for the last letter is made."""
        buffer = event.current_buffer
        found = list(buffer.completer.get_completions(buffer.document, CompleteEvent(completion_requested=True)))
        if len(found) == 1:
            buffer.apply_completion(found[0])
        elif buffer.complete_state:
            buffer.complete_next()
        else:
            buffer.start_completion(insert_common_part=True)

    return keys


class _Commands(Completer):
    """The names of commands at the start of a text, and of files after those that take one."""

    def __init__(self, commands: Sequence[str], file_commands: Sequence[str]) -> None:
        self._commands, self._file_commands = commands, file_commands
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        word, space, rest = text.partition(" ")
        if not text.startswith("/") or "\n" in text:
            return
        if not space:
            yield from (Completion(name, -len(word)) for name in self._commands if name.startswith(word))
        elif word in self._file_commands:
            yield from self._paths.get_completions(Document(rest.lstrip()), complete_event)


def history_path() -> Path | None:
    """Where the history is kept; None for a user without a home."""
    try:
        folder = Path(platformdirs.user_data_dir("tfm", appauthor=False)).expanduser()
    except RuntimeError:
        return None
    return None if folder.parts[:1] == ("~",) else folder / "chat-history"


def _open_history(notes: Notes) -> History:
    """The history of all runs, for its owner's eyes only; that of this run alone where no file can be kept."""
    path = history_path()
    if path is None:
        notes.note("history: not kept, since this user has no home folder")
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o600)
        try:
            found = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(found):
                raise OSError(0, "no regular file")
            if found & 0o077:
                os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
    except OSError as error:
        notes.note(f"history: not kept, since {path} cannot be written: {error.strerror}")
        return InMemoryHistory()
    return _KeptHistory(path, notes)


class _KeptHistory(FileHistory):
    """A file to which several processes add: each text in one write, so that they do not mix.

    A disk that is full, or a text that UTF-8 cannot hold, is no reason to end a conversation.
    """

    def __init__(self, path: Path, notes: Notes) -> None:
        super().__init__(path)
        self._path, self._notes, self._is_told = path, notes, False

    def load_history_strings(self) -> Iterable[str]:
        try:
            return list(super().load_history_strings())
        except OSError as error:
            self._tell(error)
            return []

    def store_string(self, string: str) -> None:
        lines = "".join(f"+{line}\n" for line in string.split("\n"))
        data = f"\n# {datetime.now()}\n{lines}".encode(errors="replace")
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(descriptor, data)
            finally:
                os.close(descriptor)
        except OSError as error:
            self._tell(error)

    def _tell(self, error: OSError) -> None:
        if not self._is_told:
            self._is_told = True
            self._notes.note(f"history: not kept, since {self._path} cannot be used: {error.strerror}")
