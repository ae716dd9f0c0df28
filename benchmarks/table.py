"""The tables of results, made from the newest files in benchmarks/results: benchmarks/table.py writes them in place.

No number is typed by hand: tests/test_benchmarks.py holds the documents against what this makes.
"""

import json
import textwrap
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from asked import FREE

HERE = Path(__file__).parent
README, OTHER_CPUS = HERE.parent / "README.md", HERE.parent / "docs" / "other-cpus.md"
RESULTS = HERE / "results"
BEGIN, END = "<!-- benchmarks -->", "<!-- /benchmarks -->"
COMMANDS = """pip install -e '.[peers]'
python benchmarks/against_peers.py
python benchmarks/rows_against_loop.py
python benchmarks/constraint_cost.py --repetitions 61
python benchmarks/table.py"""
PACKAGES = {
    "llama_cpp": ("llama-cpp-python",),
    "ctranslate2": ("ctranslate2",),
    "transformers": ("transformers", "torch"),
    "matmul": ("numpy", "blas"),
}
"""What is told of a peer's versions, by the name of its worker."""
WIDTH = 120


def newest(folder: Path = RESULTS) -> Path | None:
    """The results that were measured last, by their own word and not the file's name or time; None: there are none."""
    return max(folder.glob("*.json"), key=lambda path: datetime.fromisoformat(read(path)["measured_at"]), default=None)


def read(path: Path) -> dict:
    """A results file, as against_peers.py writes it."""
    return json.loads(path.read_text(encoding="utf-8"))


Named = tuple[Mapping[str, dict], str]
"""Results, and the name of their file."""


def section(results: Mapping[str, dict], name: str, rows: Named | None = None, constraints: Named | None = None) -> str:
    """What stands between the markers: the tables, what was measured where, how to do it again.

    name is the file's; rows are of rows_against_loop.py, constraints of constraint_cost.py.
    """
    parts = [table(results), conditions(results, name)]
    if rows is not None:
        parts += [table(rows[0]), conditions_of_rows(*rows)]
    if constraints is not None:
        parts += [table_of_constraints(constraints[0]), conditions_of_constraints(*constraints)]
    return "\n\n".join([*parts, "To measure again:", f"```sh\n{COMMANDS}\n```"])


def current(folder: Path = RESULTS) -> str | None:
    """The section of the newest results; None when there are none."""
    main, rows, constraints = (newest_named(folder / part) for part in ("", "rows", "constraint"))
    return None if main is None else section(*main, rows, constraints)


def documents() -> dict[Path, str]:
    """What stands between the markers of each document that has results."""
    found = {README: current()}
    if avx2 := newest_named(RESULTS / "avx2"):
        found[OTHER_CPUS] = f"{table(avx2[0])}\n\n{conditions(*avx2, '../benchmarks/results/avx2')}"
    return {path: content for path, content in found.items() if content is not None}


def newest_named(folder: Path) -> Named | None:
    path = newest(folder)
    return None if path is None else (read(path), path.name)


def table(results: Mapping[str, dict]) -> str:
    """One row a test."""
    model = f"{results['model']['name']}, {results['threads']} threads"
    rows = [
        [test["title"], figure(test, "tfm"), figure(test, test.get("best_peer")), peer(test), gain(test), share(test)]
        for test in results["tests"]
    ]
    return aligned([[model, "tfm", "best peer", "which is", "tfm is faster", "of the limit"], *rows])


def figure(test: Mapping, side: str | None) -> str:
    """A side's median with its unit; nothing where there is no such side."""
    if side is None:
        return ""
    measured = test["sides"][side]
    if "median_tok_s" in measured:
        rate = measured["median_tok_s"]
        return f"{rate:.0f} tok/s" if rate >= 20 else f"{rate:.1f} tok/s"
    if "median_bytes" in measured:
        return f"{measured['median_bytes'] / 1e6:.0f} MB"
    return f"{measured['median_s']:.2f} s" if measured["median_s"] >= 0.2 else f"{measured['median_s'] * 1000:.0f} ms"


def peer(test: Mapping) -> str:
    """The fastest peer."""
    return test.get("best_peer", "")


def gain(test: Mapping) -> str:
    """How many times faster tfm is; nothing where there is nobody to compare with."""
    return f"{test['times_faster'][test['best_peer']]:.2f} times" if "best_peer" in test else ""


def share(test: Mapping) -> str:
    """tfm's share of what the machine can do at most, and what bounds that; nothing where it is not known."""
    return f"{test['limit_share']:.0%} {test['limit']}" if "limit_share" in test else ""


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that can be read as it is: words to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    to_the_left = [title in (rows[0][0], "which is") for title in rows[0]]
    rule = ["-" * w if left else "-" * (w - 1) + ":" for w, left in zip(widths, to_the_left, strict=True)]
    lines = []
    for row in [rows[0], rule, *rows[1:]]:
        cells = [
            cell.ljust(w) if left else cell.rjust(w) for cell, w, left in zip(row, widths, to_the_left, strict=True)
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def conditions(results: Mapping[str, dict], name: str, folder: str = "benchmarks/results") -> str:
    """Machine, date, versions, and what the numbers are, as a paragraph. folder is where the document finds name."""
    machine, versions = results["machine"], results["versions"]
    tfm = versions["tfm"]
    where = (
        f"{machine['cpu']} ({machine['llvm_cpu']}), {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB"
    )
    own = f"tfm {tfm['tfm-cli']} (Python {tfm['python']}, Numba {tfm['numba']}, llvmlite {tfm['llvmlite']})"
    peers = [
        f"{package} {versions[program][package]}"
        for program, packages in PACKAGES.items()
        if program in versions
        for package in packages
    ]
    text = (
        f"Measured {results['measured_at'][:10]} on {where}, {machine['system']}: {own} beside "
        f"{', '.join(peers)}. All run the same weights with the same threads in one run, taking turns; medians of "
        f"{results['repetitions']} or more. The limit is what this machine's memory or multipliers allow, measured in "
        f"the same run. All peers, all samples and what is asked of each test: [{name}]({folder}/{name})."
    )
    return paragraph(text)


def paragraph(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def conditions_of_rows(results: Mapping[str, dict], name: str) -> str:
    """The same of rows_against_loop.py."""
    text = (
        f"Whole processes, measured {results['measured_at'][:10]} on {results['machine']['cpu']} "
        f"({results['machine']['llvm_cpu']}) beside llama-cpp-python "
        f"{results['versions']['llama_cpp']['llama-cpp-python']}, which is called for one row after the other; prompts "
        f"of 16 to 512 tokens and answers of at most 8 to 128, or prompts of which 400 tokens are the same, all read "
        f"and made tokens counted: [{name}](benchmarks/results/rows/{name})."
    )
    return paragraph(text)


def table_of_constraints(results: Mapping[str, dict]) -> str:
    """One row a constraint."""
    model = f"{results['model']['name']}, {results['threads']} threads"
    rows = [
        [test["title"], figure(test, "tfm"), figure(test, FREE), f"{test['asked'][0]['measured']:.1%}"]
        for test in results["tests"]
    ]
    return aligned([[model, "tfm", "without it", "a token takes longer by"], *rows])


def conditions_of_constraints(results: Mapping[str, dict], name: str) -> str:
    """The same of constraint_cost.py."""
    text = (
        f"Measured {results['measured_at'][:10]} on {results['machine']['cpu']} ({results['machine']['llvm_cpu']}) "
        f"with llguidance {results['versions']['tfm']['llguidance']}: the same {results['tests'][0]['tokens']} tokens "
        f"with the constraint and without, taking turns; medians of {results['repetitions']}: "
        f"[{name}](benchmarks/results/constraint/{name})."
    )
    return paragraph(text)


def with_section(text: str, content: str) -> str:
    """text with content between its two markers. Raises ValueError where they are not there, once each and in order."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"a document needs one {BEGIN} and after it one {END}")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{content}\n{END}{rest.split(END)[1]}"


def main() -> None:
    found = documents()
    if README not in found:
        raise SystemExit(f"{RESULTS}: no results; run benchmarks/against_peers.py")
    for path, content in found.items():
        path.write_text(with_section(path.read_text(encoding="utf-8"), content), encoding="utf-8")


if __name__ == "__main__":
    main()
