"""What a constraint costs: the default model decodes with one, and the same tokens without, taking turns in one run.

    python benchmarks/constraint_cost.py [--repetitions 5]

writes results/constraint/DATE-CPU.json. First an answer is made under each constraint; then both sides run its tokens
one by one and choose after each, so that the constraint is all they differ in: what may follow, and choosing from that.
What it takes once, before the first token, does not count.
"""

import argparse
import json
import platform
import time
from collections.abc import Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import machine
from against_peers import commit, parsed, refuse_busy_machine, run_test, write_results
from asked import FREE
from turns import Test
from worker_tfm import PACKAGES

from tfm.engine import load
from tfm.engine.constraint import Constraint, Constraints, Grammar
from tfm.engine.generate import Continuation, Request
from tfm.engine.model import Model
from tfm.engine.store import DEFAULT_MODEL

CTX = 1024
TOKENS = 128
PROMPT = [{"role": "user", "content": "Tell about ten towns of Europe: their names and what they are known for."}]
TOWN = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "known_for": {"type": "string", "maxLength": 60},
        "kind": {"enum": ["harbour", "capital", "spa", "market town"]},
        "people": {"type": "integer", "minimum": 100, "maximum": 9999999},
    },
    "required": ["name", "known_for", "kind", "people"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar("json_schema", json.dumps({"type": "array", "items": TOWN, "minItems": 10, "maxItems": 10})),
    "regex": Grammar("regex", r"([A-Z][a-z]{2,12} is known for [a-z ]{10,60}\.\n){20}"),
    "grammar": Grammar("grammar", 'start: town{20}\ntown: NAME ": " WORD (", " WORD){1,5} ".\\n"\n'
                       "NAME: /[A-Z][a-z]{2,12}/\nWORD: /[a-z]{2,12}/\n"),
}  # fmt: skip
TITLES = {
    "schema": "decode, q4, JSON schema",
    "regex": "decode, q4, regex",
    "grammar": "decode, q4, Lark grammar",
}


def seconds(model: Model, prompt: Sequence[int], ids: Sequence[int], constraint: Constraint | None) -> float:
    """Of decoding ids after prompt, under a constraint that has just begun, or under none."""
    text = Continuation(model, Request(prompt, len(ids), constraint=constraint))
    with model.sequence() as sequence:
        logits_V = model.step([(sequence, prompt)])[0]
        begin = time.perf_counter()
        for id_ in ids:
            text.take(logits_V)
            logits_V = model.step([(sequence, [id_])])[0]
        taken = time.perf_counter() - begin
    if constraint is not None and text.answer != list(ids):
        raise SystemExit("the constraint led to another answer than before")
    return taken


def constraint_test(kind: str, model: Model, constraints: Constraints) -> Test:
    """The test of one constraint, whose answer is made here."""
    prompt, grammar = model.tokenizer.chat_ids(PROMPT), GRAMMARS[kind]
    answer = model.generate(prompt, TOKENS, constraint=constraints.start(grammar, prompt))
    ids = [token.id for token in answer]
    if len(ids) < TOKENS:
        raise SystemExit(f"{kind}: an answer of {len(ids)} tokens; {TOKENS} are wanted")
    runs = {
        "tfm": lambda: seconds(model, prompt, ids, constraints.start(grammar, prompt)),
        FREE: lambda: seconds(model, prompt, ids, None),
    }
    return Test(f"constraint {kind}", TITLES[kind], runs, tokens=len(ids))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="what a constraint costs", allow_abbrev=False)
    parser.add_argument("--threads", type=int, default=2, help="default 2")
    parser.add_argument("--repetitions", type=int, default=5, help="of each constraint and side (default 5)")
    parser.add_argument("--output", type=Path, help="file for the results (default: results/constraint/DATE-CPU.json)")
    return parsed(parser)


def main() -> None:
    arguments = options()
    refuse_busy_machine(arguments.output is None)
    busy = machine.Busy()
    with closing(load(DEFAULT_MODEL, threads=arguments.threads, ctx=CTX)) as model:
        model.take_weights()  # as a run of many steps does by itself
        constraints = Constraints(model.tokenizer, model.config.vocab_size)
        done = [run_test(constraint_test(kind, model, constraints), arguments.repetitions) for kind in GRAMMARS]
    own = {"python": platform.python_version()} | {name: version(name) for name in (*PACKAGES, "llguidance")}
    write_results(arguments, "constraint", busy, {"tfm": own | {"commit": commit()}}, done)


if __name__ == "__main__":
    main()
