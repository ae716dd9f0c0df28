"""The README's table, made from the newest file in benchmarks/results: python benchmarks/table.py writes it in place.

No number is typed by hand: tests/test_benchmarks.py holds the README against what this makes.
"""

import json
import textwrap
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
RESULTS = HERE / "results"
BEGIN, END = "<!-- benchmarks -->", "<!-- /benchmarks -->"
COMMANDS = "pip install -e '.[peers]'\npython benchmarks/against_llama_cpp.py\npython benchmarks/table.py"
LABELS = {
    "tg": "decode, {} tokens",
    "pp": "prompt of {} tokens",
    "start": "start to first token, warm",
    "compile": "compiling the kernels, once",
}
WIDTH = 120


def newest(folder: Path = RESULTS) -> Path | None:
    """The results that were measured last, by their own word and not the file's name or time; None: there are none."""
    return max(folder.glob("*.json"), key=lambda path: datetime.fromisoformat(read(path)["measured_at"]), default=None)


def read(path: Path) -> dict:
    """A results file, as against_llama_cpp.py writes it."""
    return json.loads(path.read_text(encoding="utf-8"))


def section(results: Mapping[str, dict], name: str) -> str:
    """What stands between the markers: the table, what was measured where, how to do it again. name is the file's."""
    return f"{table(results)}\n\n{conditions(results, name)}\n\nTo measure again:\n\n```sh\n{COMMANDS}\n```"


def table(results: Mapping[str, dict]) -> str:
    """One row a test."""
    model = f"{Path(results['model']['file']).stem}, {results['threads']} threads"
    rows = [[label(test), figure(test, "tfm"), figure(test, "llama_cpp"), gain(test)] for test in results["tests"]]
    return aligned([[model, "tfm", "llama.cpp", "tfm is faster"], *rows])


def label(test: Mapping) -> str:
    """What a test is called here: tg128 is "decode, 128 tokens (tg128)"."""
    name = test["test"]
    if test["tokens"] is None:
        return LABELS[name]
    return f"{LABELS[name.rstrip('0123456789')].format(test['tokens'])} ({name})"


def figure(test: Mapping, side: str) -> str:
    """A side's median with its unit; nothing where the side has none."""
    if side not in test:
        return ""
    if "median_tok_s" in test[side]:
        return f"{test[side]['median_tok_s']:.0f} tok/s"
    return f"{test[side]['median_s']:.2f} s"


def gain(test: Mapping) -> str:
    """How many times faster tfm is; nothing where there is nobody to compare with."""
    return f"{test['times_faster']:.2f} times" if "times_faster" in test else ""


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that can be read as it is: the first column to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = []
    for first, *figures in [rows[0], rule, *rows[1:]]:
        cells = [first.ljust(widths[0]), *map(str.rjust, figures, widths[1:])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def conditions(results: Mapping[str, dict], name: str) -> str:
    """Machine, date, versions, and what the numbers are, as a paragraph."""
    machine, tfm, peer = results["machine"], results["versions"]["tfm"], results["versions"]["llama_cpp"]
    where = (
        f"{machine['cpu']} ({machine['llvm_cpu']}), {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB"
    )
    own = f"tfm {tfm['tfm-cli']} (Python {tfm['python']}, Numba {tfm['numba']}, llvmlite {tfm['llvmlite']})"
    text = (
        f"Measured {results['measured_at'][:10]} on {where}, {machine['system']}: {own} beside llama-cpp-python "
        f"{peer['llama-cpp-python']}, built on that machine. Both run the same file with the same threads in one run, "
        f"taking turns; medians of {results['repetitions']}. All samples: [{name}](benchmarks/results/{name})."
    )
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def with_section(text: str, content: str) -> str:
    """text with content between its two markers. Raises ValueError where they are not there, once each and in order."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the README needs one {BEGIN} and after it one {END}")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{content}\n{END}{rest.split(END)[1]}"


def main() -> None:
    path = newest()
    if path is None:
        raise SystemExit(f"{RESULTS}: no results; run benchmarks/against_llama_cpp.py")
    text = README.read_text(encoding="utf-8")
    README.write_text(with_section(text, section(read(path), path.name)), encoding="utf-8")


if __name__ == "__main__":
    main()
