"""Help, the version and wrong usage: quick, on the right stream, and with a word that helps."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from cli_process import run

from tfm.cli.app import app
from tfm.cli.commands.bench import CountsType
from tfm.cli.output import Output
from tfm.cli.values import NUMBER, SizeType, WholeType

COMMANDS = app.list_commands(click.Context(app))
HEAVY = {
    "numba", "numpy", "llvmlite", "tokenizers", "huggingface_hub", "gguf", "jinja2", "rich", "safetensors",
    "llguidance", "prompt_toolkit",
}  # fmt: skip


def test_commands() -> None:
    assert {"generate", "list", "pull", "rm", "show", "tokenize"} <= set(COMMANDS)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    """One import at the top of a file makes every command late. Told by modules: a busy machine's clock lies."""
    code = (
        "import sys; from tfm.cli.main import main; status = main(); import json; "
        "print(json.dumps([status, list(sys.modules)]), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=True)
    status, modules = json.loads(done.stderr)
    assert status == 0
    assert done.stdout
    assert HEAVY & {module.partition(".")[0] for module in modules} == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_opens_with_examples(name: str) -> None:
    """After what the command does and before its options; that they work, test_docs.py tells."""
    shown = run(name, "--help").stdout.decode()
    before, found, after = shown.partition("\n\n  Examples:\n")
    assert found
    assert len(before.strip().splitlines()) == 3  # usage, a blank line, and one that says what it does
    assert re.match(rf"(    .*\btfm {name}\b.*\n){{3}}\n", after)
    assert "\nOptions:\n" in after


def test_version_is_the_distribution() -> None:
    from importlib.metadata import version

    assert run("--version").stdout.decode() == f"tfm {version('tfm-cli')}\n"


def test_commands_in_80_columns() -> None:
    """What a command does was cut with dots in the list of commands."""
    lines = run("--help", env={"COLUMNS": "80"}).stdout.decode().partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in lines] == COMMANDS
    assert all(line.endswith(".") and not line.endswith("...") for line in lines)


def test_no_arguments_show_the_help() -> None:
    """On stderr, for it is no result, and with the status of wrong usage."""
    done = run()
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.strip() == run("--help").stdout.strip()


def test_help_as_a_word() -> None:
    """`tfm help` was no such command, as if there were no help."""
    for words, options in ((["help"], ["--help"]), (["help", "list"], ["list", "--help"])):
        done = run(*words)
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout == run(*options).stdout


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["generate", "--max-token", "3", "x"], "--max-tokens"),
        (["generate", "--temprature", "1", "x"], "--temperature"),
        (["generate", "--temp", "1", "x"], "--temperature"),
        (["generate", "--top_p", "1", "x"], "--top-p"),
        (["generate", "--max-new-tokens", "1", "x"], "--max-tokens"),
        (["tokenize", "--jsn", "x"], "--json"),
        (["genrate", "x"], "generate"),
        (["tokenise", "x"], "tokenize"),
        (["Tell me a joke"], 'tfm generate "Tell me a joke"'),
        (["generate", "--", "Tell", "me"], "quotes"),
        (["generate", "--", "- milk", "- eggs"], "quotes"),
        (["generate", "--", "Tell", "--json"], "Put options before --"),
        (["generate", "--", "Tell", "--max-tokens=4"], "Put options before --"),
        (["generate", "-json", "Tell"], "--json"),
        (["generate", "-o", "out", "Tell"], "Options of one letter: -f, -s, -n, -v, -m, -q, -h."),
        (["list", "-x"], "Options of one letter: -q, -h."),
        (["generate", "-n"], "tfm generate: "),
        (["generate", "-f", "-", "Tell"], "stdin is read by itself; leave -f - out"),
        (["generate", "-f", "", "Tell"], "-f is empty; a variable of the shell may not be set."),
        (["generate", "--no-special", "Tell"], "--no-special needs --raw"),
        (["generate", "- milk\n- eggs"], '-- "- a text"'),
        (["generate", "-n things to do"], '-- "- a text"'),
        (["generate", "--the end--"], '-- "- a text"'),
        (["generate", "-hello"], '-- "- a text"'),
        (["generate", "-hello"], "tfm generate: '-hello' is read as options of one letter each, and there is no '-e'."),
        (["help", "genrate"], "generate"),
        (["tokenize", "-5 + 3"], '-- "- a text"'),
        (["generate", "--no-stdin", "-s tell me a joke"], '-- "- a text"'),
        (["- milk", "x"], 'tfm generate -- "- a text"'),
        (["generate", "--slots", "4", "x"], "--slots is an option of tfm batch."),
        (["generate", "--slots=4", "x"], "--slots is an option of tfm batch."),
        (["chat", "--prefill", "x"], "--prefill is an option of tfm batch and generate."),
        (["score", "-o", "out"], "-o is an option of tfm batch and bench."),
        (["--model", "x", "generate"], "behind its name: tfm generate --model."),
        (["batch", "--slot", "4"], "--slots"),
        (["chat", "--max-token", "4"], "--max-tokens"),
        (["score", "--per-tokens"], "--per-token"),
        (["chat", "Hello"], "It takes none; a prompt is for tfm generate."),
    ],
)
def test_what_was_probably_meant(wrong_usage: Callable[..., str], arguments: list[str], word: str) -> None:
    """A misspelt option, a text without quotes, a prompt that begins with a dash: an error without a way out."""
    assert word in wrong_usage(*arguments).splitlines()[0]


@pytest.mark.parametrize(
    "arguments",
    [
        ["-o", "out", "x"], ["--foo", "3", "x"], ["--", "x", "-n", "4"], ["--kv-type", "q4", "x"], ["-n", "abc", "x"],
        ["--temperature", "-1", "x"], ["--max-ram", "2X", "x"], ["a", "b"], ["-n"], ["--json=3", "x"], ["-f", "-"],
        ["--no-stdin"],
    ],
)  # fmt: skip
def test_shape_of_wrong_usage(arguments: list[str]) -> None:
    """Some ended with a full stop and some without; an option that does not exist was told to be a text with a dash."""
    done = run("generate", "-m", "/nowhere", *arguments)
    first, second = done.stderr.decode().splitlines()
    assert (done.returncode, second) == (2, "tfm generate --help tells what there is.")
    assert first.startswith("tfm generate: ")
    assert first.endswith(".")
    assert "begins with a dash" not in first


@pytest.mark.parametrize("command", ["show", "pull", "rm"])
def test_empty_ref(command: str) -> None:
    """An empty REF was looked for on the hub, and an empty -m was wrong usage."""
    done = run(command, "")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"REF is empty" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["show", "~nobody-here/x"], ["rm", "~nobody-here/x"], ["tokenize", "--no-stdin", "-m", "~nobody-here/x", "a"]],
)
def test_tilde_of_nobody(arguments: list[str]) -> None:
    """It was called a bug in tfm."""
    done = run(*arguments)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, b"", 1)
    assert b"path ~nobody-here/x: found no such user" in done.stderr


@pytest.mark.parametrize("ref", ["x/" + "y" * 300, "y" * 5000, "x/y@" + "z" * 300, "-x/y", "x/..y"])
def test_name_that_the_hub_cannot_have(ref: str) -> None:
    """Offline, such a name was called a bug in tfm; one that is too long for a file as well."""
    done = run("pull", "--", ref, env={"HF_HUB_OFFLINE": "1"})
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, b"", 1)
    assert b"tfm: model " in done.stderr
    assert b"bug" not in done.stderr


@pytest.mark.parametrize("command", ["batch", "score"])
def test_file_that_begins_with_a_dash(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken for options, and nothing said how to name it."""
    monkeypatch.chdir(tmp_path)
    Path("-x.jsonl").write_text("{}\n")
    done = run(command, "-x.jsonl")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"./-x.jsonl" in done.stderr.splitlines()[0]


@pytest.mark.parametrize("command", ["generate", "tokenize"])
def test_file_without_its_option(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong_usage: Callable[..., str]
) -> None:
    """A file after the prompt was taken for its second word, which was to be put in quotes."""
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("A note.\n")
    assert "With -f notes.txt that file is read." in wrong_usage(command, "Summarise this:", "notes.txt")
    assert "quotes" in wrong_usage(command, "Summarise", "this:")


def test_value_that_begins_with_a_dash(parrot: Path) -> None:
    """The value of an option needs no --, and is no option of its own."""
    done = run("generate", "-m", parrot, "--raw", "-n", "2", "--stop", "-n", "--no-stdin", "--", "-\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"Hi", b"")


def test_text_after_two_dashes(parrot: Path) -> None:
    assert run("tokenize", "-m", parrot, "--", "-n 5").stdout == b"46 111 33 54\n"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--threads", "0"], "--threads"),
        (["--threads", "-1"], "--threads"),
        (["--threads", "two"], "--threads"),
        (["--ctx", "0"], "--ctx"),
        (["--kv-type", "q4"], "'f32', 'f16', 'q8'"),
        (["--max-ram", "0"], "--max-ram"),
        (["--max-ram", "-1G"], "--max-ram"),
        (["--max-ram", "1X"], "--max-ram"),
        (["--max-ram", "9" * 400], "--max-ram"),
        (["--max-ram", "9" * 5000], "--max-ram"),
        (["--max-ram", "9" * 30 + "T"], "--max-ram"),
        (["--max-ram", "inf"], "--max-ram"),
        (["--threads", "9" * 5000], "--threads"),
        (["--ctx", "9" * 5000], "--ctx"),
        (["-n", "9" * 5000], "--max-tokens"),
        (["--top-k", "9" * 5000], "--top-k"),
        (["--seed", "9" * 5000], "--seed"),
        (["--logit-bias", "9" * 5000 + "=1"], "--logit-bias"),
        (["--temperature", "9" * 400], "--temperature: found inf"),
        (["--logit-bias", "5=" + "9" * 400], "--logit-bias"),
        (["-n", "-1"], "--max-tokens"),
        (["--temperature", "-1"], "--temperature: found -1"),
        (["--temperature", "nan"], "--temperature: found nan"),
        (["--temperature", "inf"], "--temperature: found inf"),
        (["--top-k", "-1"], "--top-k: found -1"),
        (["--top-p", "1.01"], "--top-p: found 1.01"),
        (["--top-p", "-0.1"], "--top-p: found -0.1"),
        (["--min-p", "2"], "--min-p: found 2"),
        (["--repeat-penalty", "0"], "--repeat-penalty: found 0"),
        (["--presence-penalty", "nan"], "--presence-penalty: found nan"),
        (["--frequency-penalty", "inf"], "--frequency-penalty: found inf"),
        (["--logit-bias", "5"], "--logit-bias"),
        (["--logit-bias", "a=1"], "--logit-bias"),
        (["--logit-bias", "5=nan"], "--logit-bias: found 5=nan"),
        (["--logit-bias", "5=inf"], "--logit-bias: found 5=inf"),
        (["--logit-bias", "5=1", "--logit-bias", "5=2"], "--logit-bias: token 5 is given more than once"),
        (["--seed", "-1"], "--seed: found -1"),
        (["--seed", "18446744073709551616"], "--seed"),
        (["--stop", ""], "--stop"),
        (["--logprobs", "2"], "--logprobs needs --json"),
        (["--json", "--logprobs", "-1"], "--logprobs"),
        (["--raw", "--system", "a"], "--system"),
        (["--raw", "--prefill", "a"], "--prefill"),
        (["-m", ""], "-m is empty"),
        (["--ids", "--system", "a"], "--system"),
        (["--ids", "--no-special"], "--no-special"),
        (["-n", "abc"], "--max-tokens: found 'abc'; allowed: a whole number from 0"),
        (["-n", "-1"], "--max-tokens: found -1; allowed: a whole number from 0"),
        (["--threads", "1.5"], "--threads: found '1.5'; allowed: a whole number from 1"),
        (["--ctx", "4k"], "--ctx: found '4k'; allowed: a whole number from 1"),
        (["--top-k", "x"], "--top-k: found 'x'; allowed: a whole number"),
        (["--seed", "x"], "--seed: found 'x'; allowed: a whole number"),
        (["--json", "--logprobs", "x"], "--logprobs: found 'x'; allowed: a whole number from 0"),
        (["--temperature", "hot"], "--temperature: found 'hot'; allowed: a number"),
        (["--top-p", "0,5"], "--top-p: found '0,5'; allowed: a number"),
    ],
)
def test_wrong_values(wrong_usage: Callable[..., str], arguments: list[str], word: str) -> None:
    """They were clamped, ignored, or found only after the model was loaded: /nowhere would be an error of status 1."""
    assert word in wrong_usage("generate", "-m", "/nowhere", "x", *arguments)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1), ("512M", 512 << 20), ("1G", 1 << 30), ("1.5g", 3 << 29), ("2GiB", 2 << 30), ("2GB", 2 * 10**9),
        ("100kb", 100_000), ("3 T", 3 << 40), ("7B", 7), (" 64K ", 64 << 10),
    ],
)  # fmt: skip
def test_sizes(text: str, nbytes: int) -> None:
    """K, M, G and T are powers of 1024, with B after them of 1000, as GNU's tools have it."""
    assert SizeType().convert(text, None, None) == nbytes


@pytest.mark.parametrize("text", ["", "G", "1GG", "1e9", "0x10", "nan", "1,5G", "-1", "0", "0.2"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(click.UsageError, match="allowed: a size above 0"):
        SizeType().convert(text, None, None)


NUMBERS = [
    (name, max(option.opts, key=len), option.type)
    for name in COMMANDS
    for option in app.get_command(click.Context(app), name).params  # type: ignore[union-attr]
    if isinstance(option.type, WholeType | CountsType) or option.type is NUMBER
]


@pytest.mark.parametrize(("command", "option", "kind"), NUMBERS)
def test_numbers_that_no_model_has(command: str, option: str, kind: click.ParamType) -> None:
    """Every option that takes a number: nonsense is wrong usage, told before a model is looked for."""
    needed = ["x"] if command in ("generate", "tokenize") else []
    for value in ("x", "", "nan" if kind is NUMBER else "-1", "1e999" if kind is NUMBER else "1.5"):
        arguments = [command, "-m", "/nowhere", f"{option}={value}", *needed]
        with pytest.raises(click.UsageError) as caught:
            app.invoke(app.make_context("tfm", arguments, obj=Output()))
        assert option in caught.value.format_message()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["batch", "--slots", "513"], "--slots: found 513; allowed: a whole number from 1 to 512."),
        (["batch", "--slots", "9" * 30], "allowed: a whole number from 1 to 512."),
        (["generate", "--logit-bias", "-1=2", "x"], "--logit-bias: found '-1=2'; allowed: a token id and a number"),
        (["generate", "--logit-bias", "1=nan", "x"], "--logit-bias: found 1=nan"),
        (["generate", "--top-k", "2147483648", "x"], "--top-k: found 2147483648"),
        (["generate", "--seed", "18446744073709551616", "x"], "--seed: found 18446744073709551616"),
        (["score", "--perplexity", "x", "--ctx", "1"], "--ctx: found 1; allowed: a window of 2 tokens or more."),
        (["score", "--perplexity", "x", "--ctx", "9", "--stride", "9"], "found 9; allowed: less than --ctx, 9."),
        (["chat", "--stop", "a", "--stop", ""], "--stop needs at least one character."),
        (["generate", "--stop", "", "x"], "--stop needs at least one character."),
    ],
)
def test_out_of_range(wrong_usage: Callable[..., str], arguments: list[str], told: str) -> None:
    """--slots 513 was told with status 1, after the model was loaded, and so were others whose range is known."""
    assert told in wrong_usage(*arguments, "-m", "/nowhere")


def test_slots_go_as_far_as_the_engine() -> None:
    from tfm.engine.model import MAX_ROWS

    assert MAX_ROWS == 512
