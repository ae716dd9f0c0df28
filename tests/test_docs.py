"""What the documents and the help show is run as it stands there, and what they point at exists."""

import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from cli_process import run, shell

from tfm.cli.app import app

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SET_UP = ("pip install", "python benchmarks/", "bash .ci/run")
BUSY_S = 400  # for an example on a machine that others keep busy
READING = re.compile(r"tfm: reading the prompt: \d+ of \d+ tokens so far\n")  # it is told where that takes long
NOTES = "The bridge is closed until May.\nThe bus stops at the mill instead.\nTickets stay the same.\n"
HAS_JQ = shutil.which("jq") is not None  # it is no part of tfm
COMMANDS = {name: app.get_command(click.Context(app), name) for name in app.list_commands(click.Context(app))}


def blocks(language: str) -> list[tuple[str, str]]:
    """(document's name, contents) of all blocks of code in a language."""
    return [
        (path.name, content)
        for path in DOCUMENTS
        for found, content in BLOCK.findall(path.read_text(encoding="utf-8"))
        if found == language
    ]


def headings(path: Path) -> set[str]:
    """A document's headings as links name them."""
    lines = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line).lower().replace(" ", "-") for line in lines}


def shell_lines() -> list[str]:
    """The shell commands of the documents that can be tried at no cost, each once."""
    lines = [line for _, content in blocks("sh") for line in content.splitlines() if line.strip()]
    return [line for line in dict.fromkeys(lines) if not line.startswith(SET_UP) and (HAS_JQ or "jq" not in line)]


def examples(command: click.Command | None) -> list[str]:
    """The lines of a command's help that show it at work."""
    assert command is not None
    found = (command.help or "").partition("Examples:\n")[2].partition("\n\n")[0].splitlines()
    return [line.strip() for line in found]


def help_lines() -> list[str]:
    """The examples that need neither the hub, a terminal, nor a program that is not there, and remove nothing."""
    found = [line for command in (app, *COMMANDS.values()) for line in examples(command)]
    return [
        line
        for line in found
        if not line.startswith(("tfm rm", "tfm chat -s"))
        and "HuggingFaceTB" not in line
        and "./" not in line
        and (HAS_JQ or "jq" not in line)
    ]


def calls(line: str) -> list[list[str]]:
    """The commands of a line of shell, each as its words, without what is read from or written to a file."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = list(lexer)
    found: list[list[str]] = [[]]
    for before, word in zip(["", *words], words, strict=False):
        if word in ("|", "&&", ";"):
            found.append([])
        elif before not in ("<", ">") and word not in ("<", ">"):
            found[-1].append(word)
    return found


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A folder with the files that the examples name."""
    (tmp_path / "notes.txt").write_text(NOTES)
    (tmp_path / "questions.jsonl").write_text('{"prompt": "Is ice cold?", "max_tokens": 4}\n')
    for name in ("README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


@pytest.mark.parametrize("line", dict.fromkeys([*shell_lines(), *help_lines()]))
def test_shell_examples(parrot: Path, default_model_folder: Path, desk: Path, line: str) -> None:
    """An example that does not work is the first thing that a newcomer meets."""
    # To check or to measure the default model takes long: a small one stands in for it.
    is_long = line.startswith(("tfm check", "tfm bench")) and "--startup" not in line
    default = {"TFM_MODEL": str(parrot)} if is_long else {}
    done = shell(f"set -o pipefail; cd {desk}; {line}", default, BUSY_S)
    assert done.returncode == 0
    assert done.stdout.strip() or (desk / "answers.jsonl").stat().st_size
    assert READING.sub("", done.stderr.decode()) == ""


@pytest.mark.parametrize("command", [app, *COMMANDS.values()], ids=["tfm", *COMMANDS])
def test_examples_teach_the_command(command: click.Command) -> None:
    """Help that only lists options does not teach, and examples that nobody can run show options that are gone."""
    lines = examples(command)
    assert len(lines) >= 3
    for line in lines:
        ours = [words[1:] for words in calls(line) if words[0] == "tfm"]
        assert ours, line
        assert calls(line)[0][0] in ("tfm", "echo", "printf", "jq"), line  # tfm, or what is piped into it
        assert command is app or command.name in [words[0] for words in ours]
        for name, *words in ours:
            found = COMMANDS[name]
            assert found is not None
            found.make_context(name, words, parent=click.Context(app, info_name="tfm"))  # or a UsageError


def test_page_of_commands_is_as_the_help_is() -> None:
    """An option was added and the page did not have it: python tools/help.py writes it anew."""
    page = runpy.run_path(str(ROOT / "tools" / "help.py"))["page"]()
    assert (ROOT / "docs" / "cli.md").read_text(encoding="utf-8") == page


def test_python_examples(parrot: Path, default_model_folder: Path) -> None:
    """The Python of the documents, in a process of its own."""
    found = blocks("python")
    assert found
    for _, content in found:
        done = subprocess.run([sys.executable, "-c", content], capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()


def test_readme_has_the_two_commands() -> None:
    """All set-up is two commands, one to use it and one to work on it; .ci/run takes the second from here."""
    commands = [content.strip() for name, content in blocks("sh") if name == "README.md"]
    assert 'pip install . && tfm generate "Once upon a time"' in commands
    assert "pip install -e '.[dev]' && pytest" in commands


@pytest.mark.parametrize("path", [*DOCUMENTS, ROOT / "benchmarks" / "README.md"], ids=lambda path: path.name)
def test_links_and_names(path: Path) -> None:
    """A file that was renamed, a heading that is gone, a path in code quotes that never was."""
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        name, _, heading = target.partition("#")
        if "://" not in target:
            there = path.parent / name if name else path
            assert there.exists(), target
            assert not heading or heading in headings(there), target
    for name in re.findall(r"`((?:cli|engine|kernels|tests|benchmarks|docs|\.ci)/[\w./-]*)`", text):
        assert (ROOT / name).exists(), name


def test_options_that_are_named_exist() -> None:
    """An option of the documents that no command has, or that was renamed."""
    parameters = [parameter for command in COMMANDS.values() if command for parameter in command.params]
    known = {"--help", "--version", *(option for parameter in parameters for option in parameter.opts)}
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if "tfm " in line and not line.startswith(SET_UP)]
        named = {option for line in lines for option in re.findall(r"(?<![\w-])(--[a-z][a-z-]*)", line)}
        assert named <= known, path.name


def test_readme_names_all_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8") + (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f"tfm {name}" in text or f"`{name}`" in text


def test_help_fits_a_terminal() -> None:
    """Help that is wider than 80 columns is broken where it should not be; three examples went on in the next line."""
    for name in COMMANDS:
        lines = run(name, "--help", env={"COLUMNS": "80"}).stdout.decode().splitlines()
        assert max(map(len, lines)) <= 80, name
