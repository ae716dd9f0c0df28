"""Texts and the files that say how they begin and end, through the command as a person runs it."""

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_process import run, shell
from parrot import BAD_TEMPLATES, END, FAMILY, PIECES, TEMPLATE, id_of, set_ends, with_pieces, write_parrot
from tokenizer_files import puts_around

ANSWER = "Hi é🙂!"


def answers(model: Path, *options: str) -> set[str]:
    """The text in every shape that it can have, the ids decoded among them. All must go well."""
    found = set()
    for shape in ([], ["--no-stream"], ["--json"]):
        done = run("generate", "--raw", "-m", model, *shape, *options, "\n")
        assert (done.returncode, done.stderr) == (0, b"")
        out = done.stdout.decode()
        found.add(json.loads(out)["text"] if shape == ["--json"] else out)
    return found


# ------------------------------------------------------------------------------------------------ characters


@pytest.mark.parametrize("tokens", [1, 3, 4, 6, 7])
def test_characters_over_the_edges_of_tokens(parrot: Path, tmp_path: Path, tokens: int) -> None:
    """Joined emoji, combining marks and conjuncts, cut in mid-character by the limit: one mark at most, everywhere."""
    model = with_pieces(tmp_path, PIECES)
    whole = b"".join(PIECES[:tokens]).decode(errors="ignore")
    cut = len(whole.encode()) < len(b"".join(PIECES[:tokens]))
    assert answers(model, "-n", str(tokens)) == {whole + "\ufffd" * cut}


def test_whole_families(parrot: Path, tmp_path: Path) -> None:
    """After an emoji of several code points the text goes on, and a stop behind it is found."""
    model = with_pieces(tmp_path, PIECES)
    assert answers(model) == {FAMILY}
    assert answers(model, "--stop", "e\u0301") == {"👩\u200d🚀"}
    assert answers(model, "--stop", "\u0301") == {"👩\u200d🚀e"}
    assert answers(model, "--stop", "é") == {FAMILY}, "the same letter, but other characters"


def test_bytes_to_fall_back_to(parrot: Path, tmp_path: Path) -> None:
    """The same from tokens <0xF0> <0x9F> <0x99> <0x82>, which other tools printed as they are called."""
    model = with_pieces(tmp_path, [ANSWER.encode()], bytes_to_fall_back_to=True)
    assert answers(model) == {ANSWER}
    assert answers(model, "-n", "7") == {"Hi é\ufffd"}
    assert answers(model, "--stop", "🙂") == {"Hi é"}


# ------------------------------------------------------------------------------------------------ ends


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "text"),
    [
        ([id_of(ord("d")), id_of(ord("c"))], None, None, "ab"),
        ([], [], None, "abcdefgh"),
        (None, id_of(ord("e")), {"eos_token": "d"}, "abc"),
        (id_of(ord("f")), [id_of(ord("e"))], {"eos_token": "d"}, "abc"),
        (id_of(ord("d")), [id_of(ord("e"))], {"eos_token": "f"}, "abc"),
        (id_of(ord("f")), [id_of(ord("d"))], {"eos_token": {"content": "e"}}, "abc"),
        ([id_of(ord("d"))], 10**12, {"eos_token": "<no such>"}, "abc"),
    ],
)
def test_ends_of_three_files(
    parrot: Path, tmp_path: Path, config: Any, generation: Any, tokenizer: Any, text: str
) -> None:
    """Each file has an end of its own; an id that the model does not have is no fault, and ends nothing."""
    model = write_parrot(tmp_path / "model", b"abcdefgh")
    set_ends(model, config, generation, tokenizer)
    ended = ["-n", "8"] if config == [] else []
    answer = json.loads(run("generate", "--raw", "--json", "-m", model, *ended, "\n").stdout)
    assert (answer["text"], answer["finish_reason"]) == (text, "length" if ended else "stop")
    done = run("generate", "--raw", "--stop", "b", "-m", model, *ended, "\n")
    assert done.stdout == b"a", "a stop adds, and takes nothing away"


# ------------------------------------------------------------------------------------------------ beginnings


@pytest.mark.parametrize(
    ("in_template", "processor", "add_bos_token"),
    [(True, True, True), (True, False, False), (False, True, False), (False, False, True), (False, False, False)],
)
def test_one_bos_in_every_way(
    parrot: Path, tmp_path: Path, in_template: bool, processor: bool, add_bos_token: bool
) -> None:
    """tokenize and generate counted another number of tokens; ids that went through a pipe began twice."""
    model = write_parrot(tmp_path / "model", b"abc", chat=True)
    (model / "chat_template.jinja").write_text("{{ bos_token }}" * in_template + TEMPLATE)
    config = {"bos_token": "<|end|>"} | ({"add_bos_token": True} if add_bos_token else {})
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    file = json.loads((model / "tokenizer.json").read_text())
    file["post_processor"] = puts_around([("<|end|>", END)]) if processor else None
    (model / "tokenizer.json").write_text(json.dumps(file))
    bos = 1 if processor or add_bos_token else 0
    ids = run("tokenize", "-m", model, "\n").stdout.split()
    assert ids == [b"0"] * bos + [b"11"]
    done = shell(f"tfm tokenize -m {model} $'\\n' | tfm generate --json --ids -m {model}")
    assert json.loads(done.stdout)["prompt_tokens"] == len(ids)
    done = run("generate", "--json", "-m", model, "x")
    assert json.loads(done.stdout)["prompt_tokens"] == 1 + len("<user>x</user>\n<assistant>\n")


# ------------------------------------------------------------------------------------------------ templates


@pytest.mark.parametrize("option", ["--system", "--prefill", "PROMPT", "stdin"])
def test_control_tokens_typed_anywhere(chatty_parrot: Path, option: str) -> None:
    """The prompt was looked at and the other texts were not: <|end|> in one of them became a token."""
    text = "a<|end|>b"
    arguments = [option, text, "x"] if option.startswith("-") else [text] if option == "PROMPT" else []
    done = run("generate", "--json", "-m", chatty_parrot, *arguments, stdin=text.encode() if option == "stdin" else b"")
    prompt = "x" if option.startswith("-") else text
    said = f"<system>{text}</system>\n" if option == "--system" else ""
    said += f"<user>{prompt}</user>\n<assistant>\n" + (text if option == "--prefill" else "")
    assert json.loads(done.stdout)["prompt_tokens"] == len(said)


@pytest.mark.parametrize("template", BAD_TEMPLATES)
def test_templates_that_fail(chatty_parrot: Path, tmp_path: Path, template: str) -> None:
    """A template that refuses, never ends or reaches for Python: one line, the file's name, nothing on stdout."""
    model = tmp_path / "model"
    shutil.copytree(chatty_parrot, model)
    (model / "chat_template.jinja").write_text(template)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = run("generate", "-m", model, "x")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, b"", 1)
    assert BAD_TEMPLATES[template] in done.stderr.decode()
    assert b"chat_template.jinja" in done.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 20
    assert run("generate", "--raw", "-m", model, "\n").stdout.decode() == ANSWER, "who does not need it may go on"


def test_template_with_all_that_is_used(chatty_parrot: Path, tmp_path: Path) -> None:
    """namespace, loop controls, tojson and strftime_now in one template, as published ones have them."""
    model = tmp_path / "model"
    shutil.copytree(chatty_parrot, model)
    (model / "chat_template.jinja").write_text(
        "{%- set ns = namespace(turns=0) -%}{%- for m in messages -%}{%- if m.role == 'system' -%}{%- continue -%}"
        "{%- endif -%}{%- set ns.turns = ns.turns + 1 -%}{{ m.content | tojson }}{%- if ns.turns == 1 -%}{%- break -%}"
        "{%- endif -%}{%- endfor -%}{{ ns.turns }}{{ strftime_now('%Y') | length }}\n\n"
    )
    done = run("generate", "--json", "-m", model, "-s", "dropped", 'a"é')
    assert json.loads(done.stdout)["prompt_tokens"] == len('"a\\"é"14\n'.encode())
    assert json.loads(done.stdout)["text"] == ANSWER
