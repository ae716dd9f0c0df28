"""tfm generate: what is put to the model, how its answer is cut and shaped, and what is told about it."""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import LLAMA, write_checkpoint
from cli_process import run, shell
from parrot import CONFIG, id_of, write_parrot

ANSWER = "Hi é🙂!"
ANSWER_IDS = [id_of(byte) for byte in ANSWER.encode()]
KEYS = ["text", "finish_reason", "prompt_tokens", "completion_tokens", "model", "seed", "timings"]
TIMINGS = ["load_s", "first_token_s", "prompt_tok_s", "decode_tok_s", "total_s"]


@pytest.fixture(scope="module")
def tiny(parrot: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights that never ends by itself: its end-of-text token is not named."""
    config = {**LLAMA, "eos_token_id": None, "bos_token_id": None}
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), config)


def text_of(*arguments: str | bytes | Path, **more: Any) -> str:
    """What a run that goes well prints."""
    done = run("generate", *arguments, **more)
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.decode()


def object_of(*arguments: str | Path, **more: Any) -> dict[str, Any]:
    """What a run with --json prints."""
    return json.loads(text_of("--json", *arguments, **more))


# ------------------------------------------------------------------------------------------------ the prompt


def test_chat_model_gets_a_message(chatty_parrot: Path) -> None:
    """The prompt reached a chat model without its template, or with a line feed more or less."""
    said = "<user>héllo\n\nmore</user>\n<assistant>\n".encode()
    assert object_of("-m", chatty_parrot, "héllo", stdin=b"more")["prompt_tokens"] == len(said)


def test_system_and_prefill(chatty_parrot: Path) -> None:
    """They were ignored, or stood in another place; the answer goes on where the prefill ends."""
    said = b"<system>be brief</system>\n<user>a</user>\n<assistant>\nH"
    answer = object_of("-m", chatty_parrot, "-s", "be brief", "--prefill", "H", "a")
    assert (answer["text"], answer["prompt_tokens"]) == (ANSWER[1:], len(said))


def test_system_needs_a_chat_template(parrot: Path) -> None:
    """Without a template a system prompt was dropped in silence."""
    done = run("generate", "-m", parrot, "-s", "be brief", "a")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"--system: this model has no chat template" in done.stderr


def test_control_tokens_of_the_prompt(chatty_parrot: Path) -> None:
    """In a chat a person's text became a control token; with --raw it could not, or could not be kept from it."""
    text, around = "<|end|>", len("<user></user>\n<assistant>\n")
    for options, tokens in (([], around + 7), (["--raw"], 1), (["--raw", "--no-special"], 7)):
        assert object_of("-m", chatty_parrot, *options, text)["prompt_tokens"] == tokens


def test_prompt_of_no_tokens(parrot: Path) -> None:
    done = run("generate", "--raw", "-m", parrot, "")
    assert done.returncode == 1
    assert b"prompt: found no tokens" in done.stderr


def test_text_that_becomes_no_token(parrot: Path, tmp_path: Path) -> None:
    """It was said that there is no prompt, though a text was given."""
    shutil.copytree(parrot, tmp_path / "model")
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": model}
    (tmp_path / "model/tokenizer.json").write_text(json.dumps(tokenizer))
    done = run("generate", "--raw", "-m", tmp_path / "model", "é")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"prompt: found a text of which this tokenizer makes no token" in done.stderr


def test_folder_with_a_name_that_is_not_utf8(parrot: Path, tmp_path: Path) -> None:
    """The tokenizer was blamed for it."""
    folder = os.fsencode(tmp_path) + b"/m\xff"
    shutil.copytree(parrot, os.fsdecode(folder))
    assert text_of("--raw", "-m", folder, "\n") == ANSWER


def test_numbers_of_max_ram_differ(parrot: Path) -> None:
    """A byte too few was told as: found 1 MB needed; allowed: 1 MB."""
    done = run("generate", "--raw", "-m", parrot, "--max-ram", "100K", "\n")
    needed = int(done.stderr.decode().partition("found ")[2].partition(" bytes")[0].replace(",", ""))
    assert run("generate", "--raw", "-m", parrot, "--max-ram", str(needed), "\n").returncode == 0
    done = run("generate", "--raw", "-m", parrot, "--max-ram", str(needed - 1), "\n")
    assert done.returncode == 1
    assert f"found {needed:,} bytes needed" in done.stderr.decode()
    assert f"allowed: {needed - 1:,} bytes" in done.stderr.decode()


@pytest.mark.parametrize(("length", "status"), [(31, 0), (32, 0), (33, 1)])
def test_prompt_beside_the_context(tmp_path: Path, parrot: Path, length: int, status: int) -> None:
    """A prompt too long was cut in silence; one that just fits was refused."""
    model = write_parrot(tmp_path, b"abc", loop=True, context=32)
    done = run("generate", "--raw", "--json", "-m", model, stdin=b"\n" * length)
    assert done.returncode == status
    if status:
        assert b"33 tokens" in done.stderr
        assert b"32" in done.stderr
    else:
        assert json.loads(done.stdout)["finish_reason"] == "length"


def test_an_end_that_nobody_asked_for_is_told(endless_parrot: Path) -> None:
    """The default of -n, or the end of the context, cut an answer off without a word. An -n that was given is known."""
    limit = b"tfm: the answer ends here: it has 1024 tokens, and -n allows no more\n"
    context = b"tfm: the answer ends here: the context of 16 tokens is full\n"
    base = ("generate", "--raw", "-m", endless_parrot, "\n")
    for options, told in (
        ((), limit), (("-n", "1024"), b""), (("-q",), b""), (("--ctx", "16"), context),
        (("--ctx", "16", "-n", "500"), context), (("--ctx", "16", "-n", "9"), b""), (("--stop", "j"), b""),
    ):  # fmt: skip
        done = run(*base, *options)
        assert (done.returncode, done.stderr) == (0, told), options


def test_ctx_is_the_end(endless_parrot: Path) -> None:
    answer = object_of("-q", "--raw", "-m", endless_parrot, "--ctx", "16", "\n")
    assert (answer["finish_reason"], answer["text"][:6]) == ("length", "abcdef")
    assert 15 <= answer["completion_tokens"] <= 16
    done = run("generate", "--ctx", "2000000", "-m", endless_parrot, "x")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"1000000" in done.stderr


def test_ids_in_and_out(parrot: Path) -> None:
    """Ids as tokenize prints them, or as a JSON list; the end-of-text token is not printed, as it is not in text."""
    expected = " ".join(map(str, ANSWER_IDS)) + "\n"
    assert text_of("--ids", "-m", parrot, "5 11") == expected
    assert text_of("--ids", "-m", parrot, "--no-stream", stdin=b"[5, 11]\n") == expected
    assert text_of("--ids", "-m", parrot, "-n", "2", "11") == " ".join(map(str, ANSWER_IDS[:2])) + "\n"
    assert text_of("--ids", "-m", parrot, "-n", "0", "11") == "\n"
    answer = object_of("--ids", "-m", parrot, "5 11")
    assert (answer["prompt_tokens"], answer["text"]) == (2, ANSWER)
    assert list(answer) == [*KEYS, "ids"], "with --json the ids were nowhere"
    assert answer["ids"] == ANSWER_IDS
    assert object_of("--ids", "-m", parrot, "--stop", "é", "11")["ids"] == ANSWER_IDS[:3]


@pytest.mark.parametrize(
    ("stop", "shown"), [("é", 3), ("🙂", 5), ("🙂!", 5), ("i é🙂", 1), ("H", 0), ("!", 9), ("!?", 10)]
)
def test_ids_end_before_the_stop(parrot: Path, stop: str, shown: int) -> None:
    """Ids of a stop text were printed before it was complete, or those of a character that belongs to it."""
    assert text_of("--ids", "-m", parrot, "--stop", stop, "11").split() == list(map(str, ANSWER_IDS[:shown]))


@pytest.mark.parametrize("ids", ["1 x", "1.5", "-1", "1 257", "1 99999999999999999999", "9" * 5000])
def test_wrong_ids(parrot: Path, ids: str) -> None:
    done = run("generate", "--ids", "-m", parrot, "--", ids)
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"token ids: found" in done.stderr


def test_a_pipe_of_ids_is_the_text(parrot: Path) -> None:
    script = "tfm tokenize $'\\n' | tfm generate --ids | tfm tokenize --decode | tr -d '\\n'"
    assert shell(script, {"TFM_MODEL": str(parrot)}).stdout.decode() == ANSWER


# ------------------------------------------------------------------------------------------------ the answer


@pytest.mark.parametrize("shape", [[], ["--no-stream"], ["--json"]])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], ANSWER),
        (["-n", "0"], ""),
        (["-n", "2"], "Hi"),
        (["-n", "4"], "Hi \ufffd"),
        (["-n", "7"], "Hi é\ufffd"),
        (["-n", "10"], ANSWER),
        (["--stop", "é"], "Hi "),
        (["--stop", "🙂!"], "Hi é"),
        (["--stop", "!!"], ANSWER),
        (["--stop", "é🙂", "--stop", "i"], "H"),
        (["--stop", "é", "--stop", " é"], "Hi"),
    ],
)
def test_answer_is_the_same_in_every_shape(parrot: Path, shape: list[str], options: list[str], text: str) -> None:
    """Streamed, held back and in JSON the text differed where a limit or a stop cuts into a character or a token."""
    printed = text_of("--raw", "-m", parrot, *shape, *options, "\n")
    assert (json.loads(printed)["text"] if shape == ["--json"] else printed) == text


@pytest.mark.parametrize(
    ("options", "reason", "tokens"),
    [([], "stop", 11), (["-n", "10"], "length", 10), (["-n", "0"], "length", 0), (["--stop", "i"], "stop", 2)],
)
def test_why_it_ended(parrot: Path, options: list[str], reason: str, tokens: int) -> None:
    """The token that ends the text counts: it took as long as any other."""
    answer = object_of("--raw", "-m", parrot, *options, "\n")
    assert (answer["finish_reason"], answer["completion_tokens"]) == (reason, tokens)


def test_json_object(parrot: Path) -> None:
    """Exactly the object of the contract, one line, plain JSON types."""
    answer = object_of("--raw", "-m", parrot, "\n")
    assert list(answer) == KEYS
    assert list(answer["timings"]) == TIMINGS
    assert all(isinstance(value, float) and value > 0 for value in answer["timings"].values())
    assert answer["timings"]["total_s"] >= answer["timings"]["load_s"] + answer["timings"]["first_token_s"] - 1e-3
    assert answer["model"] == str(parrot)
    nothing = object_of("--raw", "-m", parrot, "-n", "0", "\n")
    assert list(nothing) == KEYS
    assert nothing["timings"]["first_token_s"] is None


@pytest.mark.parametrize("count", [0, 1, 3, 9999])
def test_logprobs(tiny: Path, count: int) -> None:
    """Each token as it is by itself: its bytes put together are the text, and more alternatives than tokens are all."""
    answer = object_of("--raw", "-m", tiny, "-n", "5", "--logprobs", str(count), "Once")
    assert list(answer) == [*KEYS, "tokens"]
    assert len(answer["tokens"]) == 5
    assert b"".join(bytes(token["bytes"]) for token in answer["tokens"]).decode() == answer["text"]
    for token in answer["tokens"]:
        assert list(token) == ["id", "text", "bytes", "logprob", "top"]
        assert token["logprob"] <= 0
        assert len(token["top"]) == min(count, LLAMA["vocab_size"])
        if count:
            assert token["top"][0] == {key: token[key] for key in ("id", "text", "bytes", "logprob")}
        if count > LLAMA["vocab_size"]:
            assert math.isclose(sum(math.exp(other["logprob"]) for other in token["top"]), 1, rel_tol=1e-5)


def test_parts_of_characters_in_json(parrot: Path) -> None:
    """A token that is a part of a character broke the JSON, or its bytes were lost."""
    tokens = object_of("--raw", "-m", parrot, "--logprobs", "0", "\n")["tokens"]
    assert [token["bytes"] for token in tokens] == [*([byte] for byte in ANSWER.encode()), list(b"<|end|>")]
    assert tokens[3]["text"] == "\ufffd"


# ------------------------------------------------------------------------------------------------ sampling


def test_seed(tiny: Path) -> None:
    """The same seed gave another text, or the seed that was drawn was not the one reported."""
    options = "--raw", "-m", tiny, "-n", "40", "--temperature", "1", "Once"
    drawn = object_of(*options)
    again = object_of(*options, "--seed", str(drawn["seed"]))
    assert again["text"] == drawn["text"]
    assert again["seed"] == drawn["seed"]
    assert object_of(*options)["text"] != drawn["text"]
    assert object_of(*options, "--seed", "18446744073709551615")["seed"] == 2**64 - 1


def test_greedy_without_generation_config(tiny: Path) -> None:
    """A model that says nothing about sampling is deterministic; temperature 0, top-k 1 and top-p 0 are the same."""
    plain = text_of("--raw", "-m", tiny, "-n", "20", "Once")
    for options in ("", "--temperature 0", "--temperature 2 --top-k 1", "--temperature 2 --top-p 0"):
        assert text_of("--raw", "-m", tiny, "-n", "20", *options.split(), "Once") == plain


def test_defaults_of_generation_config(tiny: Path, tmp_path: Path) -> None:
    """The model's own settings were not used, or an option could not override them."""
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    (model / "generation_config.json").write_text('{"do_sample": true, "temperature": 5.0, "eos_token_id": 0}')
    greedy = text_of("--raw", "-m", tiny, "-n", "30", "Once")
    assert text_of("--raw", "-m", model, "-n", "30", "--seed", "1", "Once") != greedy
    assert text_of("--raw", "-m", model, "-n", "30", "--temperature", "0", "--logit-bias", "0=-inf", "Once") == greedy


def test_logit_bias(parrot: Path) -> None:
    """An id that the model does not have was ignored."""
    assert text_of("--raw", "-m", parrot, "--logit-bias", f"{ANSWER_IDS[1]}=-inf", "-n", "1", "H") != "i"
    assert text_of("--raw", "-m", parrot, "--logit-bias", f"{id_of(ord('x'))}=99", "-n", "3", "\n") == "xxx"
    done = run("generate", "--raw", "-m", parrot, "--logit-bias", "257=1", "x")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"logit_bias: found token id 257; allowed: 0 to 256" in done.stderr


def test_penalty(endless_parrot: Path) -> None:
    """Something else must be said when repeating costs enough."""
    text = text_of("--raw", "-m", endless_parrot, "-n", "30", "--presence-penalty", "50", "\n")
    assert text.startswith("abcdefghij")
    assert "a" not in text[10:]


# ------------------------------------------------------------------------------------------------ the model


def test_model_of_the_environment(parrot: Path) -> None:
    """TFM_MODEL is the default, -m wins, an empty TFM_MODEL is none."""
    assert text_of("--raw", "\n", env={"TFM_MODEL": str(parrot)}) == ANSWER
    assert text_of("--raw", "-m", parrot, "\n", env={"TFM_MODEL": "/nowhere"}) == ANSWER
    assert b"[default: smollm2-135m]" in b" ".join(run("generate", "--help", env={"TFM_MODEL": ""}).stdout.split())


def test_path_wins_over_hub_name(parrot: Path, tmp_path: Path) -> None:
    (tmp_path / "some").mkdir()
    shutil.copytree(parrot, tmp_path / "some" / "model")
    assert shell(f"cd {tmp_path} && tfm generate --raw -m some/model $'\\n'").stdout.decode() == ANSWER


@pytest.mark.parametrize("ref", ["/nowhere", "./nowhere", "nowhere", "a/b/c", "no where"])
def test_no_such_model(ref: str) -> None:
    done = run("generate", "-m", ref, "x")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, b"", 1)
    assert b"allowed: a folder, a .gguf file, org/name[@revision] on the hub, smollm2-135m" in done.stderr


def test_threads_beyond_the_machine(parrot: Path) -> None:
    """More threads than processors were taken, or fewer without a word."""
    most = len(os.sched_getaffinity(0))
    done = run("generate", "--raw", "--threads", "1000", "-m", parrot, "\n")
    assert (done.returncode, done.stdout.decode()) == (0, ANSWER)
    assert done.stderr.startswith(f"tfm: 1000 threads asked for, {most} used".encode())
    assert run("generate", "-q", "--raw", "--threads", "1000", "-m", parrot, "\n").stderr == b""
    one = run("generate", "-v", "--raw", "--threads", "1", "-m", parrot, "\n").stderr
    assert b"1 threads" in one or b"1 thread" in one


def test_affinity_is_respected(parrot: Path) -> None:
    """All processors were used where the process was told to keep to one."""
    first = min(os.sched_getaffinity(0))
    script = f"taskset -c {first} tfm generate -v --raw -m {parrot} $'\\n'"
    assert b", 1 thread" in shell(script).stderr


@pytest.mark.parametrize("options", [["--threads", "1"], ["--kv-type", "f32"], ["--kv-type", "q8"], ["--ctx", "64"]])
def test_ways_to_run(parrot: Path, options: list[str]) -> None:
    assert text_of("--raw", "-m", parrot, *options, "\n") == ANSWER


def test_max_ram(parrot: Path) -> None:
    """Memory was taken first and counted afterwards."""
    assert text_of("--raw", "-m", parrot, "--max-ram", "1G", "\n") == ANSWER
    done = run("generate", "--raw", "-m", parrot, "--max-ram", "100K", "\n")
    assert (done.returncode, done.stdout) == (1, b"")
    for word in (b"--max-ram", b"weights", b"keys and values", b"scratch"):
        assert word in done.stderr
    assert b"give it a unit, such as 2G" in run("generate", "--raw", "-m", parrot, "--max-ram", "2", "\n").stderr


def test_broken_model(tmp_path: Path) -> None:
    """A fault of the model is one line that names the file and the field."""
    model = write_parrot(tmp_path, b"abc")
    (model / "config.json").write_text(json.dumps({**CONFIG, "hidden_act": "mish"}))
    done = run("generate", "--raw", "-m", model, "x")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, b"", 1)
    for word in ("config.json", "hidden_act", "mish", "silu"):
        assert word in done.stderr.decode()


def test_verbose(parrot: Path) -> None:
    """Load, prompt, decode and memory, with units; also when there is hardly anything to time."""
    for tokens in ("0", "1", "5"):
        done = run("generate", "-v", "-q", "--raw", "-m", parrot, "-n", tokens, "x\n")
        lines = done.stderr.decode().splitlines()
        assert [line.split()[1] for line in lines] == ["load", "prompt", "decode", "memory"]
        assert f" {tokens} token" in lines[2]
    assert " tok/s, " in lines[2]
    assert lines[2].endswith(" GB/s")
    assert " MB" in lines[3]


def test_default_model(parrot: Path, default_model_folder: Path) -> None:
    """The real thing: what the first run on a new machine gives."""
    assert text_of("--raw", "-n", "1", "The capital of France is") == " Paris"
    answer = object_of("-n", "12", "Explain in one sentence why the sky is blue.")
    assert answer["text"].startswith("The sky is blue because")
    assert (answer["model"], answer["finish_reason"], answer["completion_tokens"]) == ("smollm2-135m", "length", 12)


@pytest.mark.parametrize("options", [(), ("--temperature", "0.15", "--seed", "3")])
def test_speculation_prints_the_same(endless_parrot: Path, options: tuple[str, ...]) -> None:
    """Guards against proposed tokens that reach the text without being what would have been chosen."""
    base = ("-m", endless_parrot, "--raw", "-n", "50", *options)
    plain = run("generate", *base, "\n")
    assert plain.returncode == 0
    assert len(plain.stdout) > 15
    for count in ("1", "7", "600"):
        assert run("generate", *base, "--speculate", count, "\n").stdout == plain.stdout
