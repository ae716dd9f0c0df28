"""The README's numbers are those of the newest results, and the benchmark measures what it says."""

import importlib
import json
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
RESULTS = sorted((BENCHMARKS / "results").glob("*.json"))


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script("table", monkeypatch)


@pytest.fixture
def against(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script("against_llama_cpp", monkeypatch)


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script of benchmarks/, imported as its neighbours import each other."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


def results(measured_at: str = "2030-01-02T03:04:05+00:00") -> dict:
    """A results file with round numbers."""
    return {
        "measured_at": measured_at,
        "machine": {"cpu": "A CPU", "llvm_cpu": "cpu1", "cores": 4, "memory_bytes": 2**33, "system": "Linux x86_64"},
        "model": {"file": "Some-Model.Q4_1.gguf"},
        "threads": 2,
        "repetitions": 3,
        "versions": {
            "tfm": {"tfm-cli": "1.2", "python": "3.12.1", "numba": "0.68", "llvmlite": "0.48"},
            "llama_cpp": {"llama-cpp-python": "0.3"},
        },
        "tests": [
            {
                "test": "tg128",
                "tokens": 128,
                "tfm": {"median_s": 1.0, "median_tok_s": 128.0},
                "llama_cpp": {"median_s": 1.5, "median_tok_s": 85.33},
                "times_faster": 1.5,
            },
            {"test": "compile", "tokens": None, "tfm": {"median_s": 7.126}},
        ],
    }


def test_readme_shows_the_newest_results(table: ModuleType) -> None:
    """Guards against a table that was edited by hand, or not made again after a measurement."""
    newest = table.newest()
    assert newest is not None, "no results: run benchmarks/against_llama_cpp.py"
    readme = table.README.read_text(encoding="utf-8")
    made = table.with_section(readme, table.section(table.read(newest), newest.name))
    assert readme == made, "run python benchmarks/table.py"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_medians_follow_from_the_samples(path: Path) -> None:
    """Guards against results that were edited by hand: every figure follows from the samples, and none is missing."""
    found = json.loads(path.read_text(encoding="utf-8"))
    for test in found["tests"]:
        sides = {side: test[side] for side in ("tfm", "llama_cpp") if side in test}
        for side in sides.values():
            assert len(side["samples_s"]) == found["repetitions"]
            assert side["median_s"] == statistics.median(side["samples_s"])
            if test["tokens"]:
                assert side["median_tok_s"] == pytest.approx(test["tokens"] / side["median_s"], abs=0.01)
        if len(sides) == 2:
            times_faster = sides["llama_cpp"]["median_s"] / sides["tfm"]["median_s"]
            assert test["times_faster"] == pytest.approx(times_faster, abs=0.001)


def test_table_is_aligned_and_says_where_it_comes_from(table: ModuleType) -> None:
    """Guards the table's form: columns in line, a cell empty where a side does not do the test, all conditions told."""
    made = table.section(results(), "2030-01-02-a-cpu.json")
    assert made.splitlines()[:5] == [
        "| Some-Model.Q4_1, 2 threads  |       tfm | llama.cpp | tfm is faster |",
        "| --------------------------- | --------: | --------: | ------------: |",
        "| decode, 128 tokens (tg128)  | 128 tok/s |  85 tok/s |    1.50 times |",
        "| compiling the kernels, once |    7.13 s |           |               |",
        "",
    ]
    flat = " ".join(made.split())
    assert "2030-01-02 on A CPU (cpu1), 4 cores, 8 GiB" in flat
    assert "tfm 1.2 (Python 3.12.1, Numba 0.68, llvmlite 0.48) beside llama-cpp-python 0.3" in flat
    assert "medians of 3" in flat
    assert "[2030-01-02-a-cpu.json](benchmarks/results/2030-01-02-a-cpu.json)" in flat


def test_newest_goes_by_the_time_of_measurement(table: ModuleType, tmp_path: Path) -> None:
    """Guards against taking the last file name, or the file written last: a checkout writes them in any order."""
    for name, measured_at in {
        "z": "2030-01-02T03:00:00+00:00",
        "b": "2030-01-02T02:30:00-01:00",
        "a": "2030-01-02T04:00:00+02:00",
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(results(measured_at)))
    assert table.newest(tmp_path).name == "b.json"
    assert table.newest(tmp_path / "none") is None


def test_section_is_replaced_and_the_rest_left_alone(table: ModuleType) -> None:
    """Guards the README around the table, and that making it twice changes nothing."""
    text = f"# Title\n\n{table.BEGIN}\nold\n{table.END}\n\ntail\n"
    made = table.with_section(text, "new")
    assert made == f"# Title\n\n{table.BEGIN}\nnew\n{table.END}\n\ntail\n"
    assert table.with_section(made, "new") == made


@pytest.mark.parametrize("markers", ["", "{0}", "{1}\n{0}", "{0}\n{1}\n{0}\n{1}"])
def test_section_needs_its_markers(table: ModuleType, markers: str) -> None:
    """Guards against a README that loses its markers, and its table silently with them."""
    with pytest.raises(ValueError, match="README needs"):
        table.with_section(f"text\n{markers.format(table.BEGIN, table.END)}\n", "new")


def test_sides_take_turns(against: ModuleType) -> None:
    """Guards the order A B A B: all of A and then all of B would let a slow minute of the machine fall on one side."""
    order: list[str] = []
    seconds = {"tfm": iter((9.0, 1.0, 3.0, 2.0)), "llama_cpp": iter((9.0, 4.0, 4.0, 40.0))}

    def run(side: str) -> float:
        order.append(side)
        return next(seconds[side])

    test = against.Test("tg8", {"tfm": lambda: run("tfm"), "llama_cpp": lambda: run("llama_cpp")}, 8)
    test.measure(3)
    assert order == ["tfm", "llama_cpp"] * 4
    assert test.result() == {
        "test": "tg8",
        "tokens": 8,
        "tfm": {"samples_s": [1.0, 3.0, 2.0], "median_s": 2.0, "median_tok_s": 4.0},
        "llama_cpp": {"samples_s": [4.0, 4.0, 40.0], "median_s": 4.0, "median_tok_s": 2.0},
        "times_faster": 2.0,
    }


def test_worker_does_the_same_work_in_any_parts(against: ModuleType, default_model_folder: Path) -> None:
    """Guards tfm's worker against a change of the engine's interface, and against a context that is not empty."""
    worker = against.Worker([sys.executable, str(BENCHMARKS / "worker_tfm.py"), str(default_model_folder), "1", "64"])
    ids = worker.about["check_ids"]
    runs = [worker.run(ids, rows) for rows in (len(ids), 1, 3, len(ids))]
    worker.close()
    assert len({top for _, top in runs}) == 1
    assert all(seconds > 0 for seconds, _ in runs)


def test_partial_results_do_not_go_to_the_results_folder() -> None:
    """Guards against a run of some tests that becomes the README's newest results."""
    command = [sys.executable, str(BENCHMARKS / "against_llama_cpp.py"), "--tests", "pp512"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--output is needed" in done.stderr


def test_a_start_without_an_answer_is_no_sample(against: ModuleType) -> None:
    """Guards against timing a process that fails at once as if it had answered very fast."""
    assert against.first_byte_s([sys.executable, "-c", "print('answer')"]) > 0
    for program, fault in {
        "": "no answer",
        "raise SystemExit('broken')": "broken",
        "print(1); 1 / 0": "status 1",
    }.items():
        with pytest.raises(SystemExit, match=fault):
            against.first_byte_s([sys.executable, "-c", program])


def test_results_file_is_named_by_date_and_cpu(against: ModuleType) -> None:
    """Guards against a name that no file can have, or that two machines of one maker share."""
    found = results() | {"machine": {"cpu": "Intel(R) Xeon(R) CPU @ 2.20GHz", "llvm_cpu": "skylake-avx512"}}
    assert against.results_file(found).name == "2030-01-02-intel-xeon-skylake-avx512.json"
