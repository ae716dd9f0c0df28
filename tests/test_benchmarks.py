"""The README's numbers are those of the newest results, and the benchmark measures what it says."""

import importlib
import json
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from gguf_files import write_gguf

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
RESULTS = sorted((BENCHMARKS / "results").rglob("*.json"))


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script("table", monkeypatch)


@pytest.fixture
def against(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script("against_peers", monkeypatch)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script("turns", monkeypatch)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script("asked", monkeypatch)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script("processes", monkeypatch)


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script of benchmarks/, imported as its neighbours import each other."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


def results(measured_at: str = "2030-01-02T03:04:05+00:00") -> dict:
    """A results file with round numbers."""
    return {
        "measured_at": measured_at,
        "machine": {"cpu": "A CPU", "llvm_cpu": "cpu1", "cores": 4, "memory_bytes": 2**33, "system": "Linux x86_64"},
        "model": {"name": "Some-Model"},
        "threads": 2,
        "repetitions": 3,
        "versions": {
            "tfm": {"tfm-cli": "1.2", "python": "3.12.1", "numba": "0.68", "llvmlite": "0.48"},
            "llama_cpp": {"llama-cpp-python": "0.3"},
            "transformers": {"transformers": "5.1", "torch": "2.9"},
        },
        "tests": [
            {
                "test": "tg128 q4",
                "title": "decode, q4 (tg128)",
                "tokens": 128,
                "sides": {
                    "tfm": {"median_s": 1.0, "median_tok_s": 128.0},
                    "slow": {"median_s": 3.0, "median_tok_s": 42.67},
                    "fast": {"median_s": 1.5, "median_tok_s": 85.33},
                },
                "best_peer": "fast",
                "times_faster": {"slow": 3.0, "fast": 1.5},
                "limit": "memory",
                "limit_share": 0.876,
            },
            {"test": "cold", "title": "first start", "tokens": None, "sides": {"tfm": {"median_s": 7.126}}},
            {"test": "help", "title": "help", "tokens": None, "sides": {"tfm": {"median_s": 0.0456}}},
            {"test": "memory", "title": "peak", "tokens": None, "sides": {"tfm": {"median_bytes": 287_400_000}}},
        ],
    }


def test_documents_show_the_newest_results(table: ModuleType) -> None:
    """Guards against a table that was edited by hand, or not made again after a measurement."""
    found = table.documents()
    assert found.keys() == {table.README, table.OTHER_CPUS}, "no results: run benchmarks/against_peers.py"
    for path, content in found.items():
        text = path.read_text(encoding="utf-8")
        assert text == table.with_section(text, content), "run python benchmarks/table.py"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_figures_follow_from_the_samples(path: Path, asked: ModuleType, processes: ModuleType) -> None:
    """Guards against results that were edited by hand: every figure follows from the samples, and none is missing."""
    found = json.loads(path.read_text(encoding="utf-8"))
    for test in found["tests"]:
        # Short processes take more turns; results before 2026-12 do not have that.
        times = {1, processes.SHORT_TIMES} if test["test"] in ("start", "exit", "help") else {1}
        turns = {found["repetitions"] * n for n in times}
        medians = {}
        for name, side in test["sides"].items():
            unit = "s" if "samples_s" in side else "bytes"
            assert len(side[f"samples_{unit}"]) in turns
            medians[name] = side[f"median_{unit}"]
            assert medians[name] == statistics.median(side[f"samples_{unit}"])
            if test["tokens"]:
                assert side["median_tok_s"] == pytest.approx(test["tokens"] / side["median_s"], abs=0.01)
        peers = medians.keys() - {"tfm"}
        assert test.get("times_faster", {}).keys() == peers
        for peer in peers:
            assert test["times_faster"][peer] == pytest.approx(medians[peer] / medians["tfm"], abs=0.001)
            assert medians[test["best_peer"]] <= medians[peer]
        if "limit_share" in test:
            share = test.get("limit_s", 0) / medians["tfm"]  # results before 2026-11-30: one limit for all turns
            if "limits_s" in test:
                pairs = zip(test["limits_s"], test["sides"]["tfm"]["samples_s"], strict=True)
                share = statistics.median(limit / took for limit, took in pairs)
            assert test["limit_share"] == pytest.approx(share, abs=0.001)
        share, base = test.get("limit_share"), test.get("base_bytes", 0)
        assert test["asked"] == asked.verdicts(test["test"], medians, share, base)


def test_table_is_aligned_and_says_where_it_comes_from(table: ModuleType) -> None:
    """Guards the table's form: columns in line, the best peer named, empty cells, all conditions."""
    made = table.section(results(), "2030-01-02-a-cpu.json")
    assert made.splitlines()[:7] == [
        "| Some-Model, 2 threads |       tfm | best peer | which is | tfm is faster | of the limit |",
        "| --------------------- | --------: | --------: | -------- | ------------: | -----------: |",
        "| decode, q4 (tg128)    | 128 tok/s |  85 tok/s | fast     |    1.50 times |   88% memory |",
        "| first start           |    7.13 s |           |          |               |              |",
        "| help                  |     46 ms |           |          |               |              |",
        "| peak                  |    287 MB |           |          |               |              |",
        "",
    ]
    flat = " ".join(made.split())
    assert "2030-01-02 on A CPU (cpu1), 4 cores, 8 GiB" in flat
    peers = "llama-cpp-python 0.3, transformers 5.1, torch 2.9"
    assert f"tfm 1.2 (Python 3.12.1, Numba 0.68, llvmlite 0.48) beside {peers}" in flat
    assert "medians of 3" in flat
    assert "[2030-01-02-a-cpu.json](benchmarks/results/2030-01-02-a-cpu.json)" in flat


def test_constraints_have_a_table_of_their_own(table: ModuleType, asked: ModuleType) -> None:
    """Guards the share that is shown: it is the one that was judged, of the sides that took turns."""
    medians = {"tfm": 1.05, asked.FREE: 1.0}
    sides = {side: {"median_s": median, "median_tok_s": 128 / median} for side, median in medians.items()}
    verdicts = asked.verdicts("constraint schema", medians, None)
    test = {"test": "constraint schema", "title": "decode, schema", "tokens": 128, "sides": sides, "asked": verdicts}
    found = results() | {"tests": [test], "versions": {"tfm": {"llguidance": "1.3"}}}
    made = table.section(results(), "peers.json", None, (found, "c.json")).splitlines()
    begin = next(i for i, line in enumerate(made) if "without it" in line)
    assert made[begin : begin + 3] == [
        "| Some-Model, 2 threads |       tfm | without it | a token takes longer by |",
        "| --------------------- | --------: | ---------: | ----------------------: |",
        "| decode, schema        | 122 tok/s |  128 tok/s |                    5.0% |",
    ]
    flat = " ".join(made[begin:])
    assert "with llguidance 1.3: the same 128 tokens with the constraint and without" in flat
    assert "medians of 3" in flat
    assert "[c.json](benchmarks/results/constraint/c.json)" in flat


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
    with pytest.raises(ValueError, match="a document needs"):
        table.with_section(f"text\n{markers.format(table.BEGIN, table.END)}\n", "new")


def test_sides_take_turns(turns: ModuleType) -> None:
    """Guards the order A B A B: all of A and then all of B would let a slow minute of the machine fall on one side.

    So does the limit: what was measured in the turn that warms up does not count, and each turn has its own share.
    """
    order: list[str] = []
    seconds = {"tfm": iter((9.0, 1.0, 3.0, 2.0)), "llama.cpp": iter((9.0, 4.0, 4.0, 40.0))}
    limits_s = iter((7.0, 0.9, 1.5, 1.2))

    def run(side: str) -> float:
        order.append(side)
        if side == "tfm":
            test.limits_s.append(next(limits_s))
        return next(seconds[side])

    test = turns.Test("tg8", "decode", {side: lambda s=side: run(s) for side in seconds}, 8, limit="memory")
    test.measure(3)
    assert order == ["tfm", "llama.cpp"] * 4
    order.clear()
    more = turns.Test("start", "start", {side: lambda s=side: order.append(s) or 1.0 for side in seconds}, times=2)
    more.measure(2)
    assert order == ["tfm", "llama.cpp"] * 5
    assert test.result() == {
        "test": "tg8",
        "title": "decode",
        "tokens": 8,
        "sides": {
            "tfm": {"samples_s": [1.0, 3.0, 2.0], "median_s": 2.0, "median_tok_s": 4.0},
            "llama.cpp": {"samples_s": [4.0, 4.0, 40.0], "median_s": 4.0, "median_tok_s": 2.0},
        },
        "best_peer": "llama.cpp",
        "times_faster": {"llama.cpp": 2.0},
        "limit": "memory",
        "limits_s": [0.9, 1.5, 1.2],
        "limit_share": 0.6,
        "asked": [],
    }


def test_what_is_asked_stands_beside_what_was_measured(asked: ModuleType) -> None:
    """Guards the verdicts: of several peers the fastest counts, and what is just reached or just missed is told so."""
    flash, plain = asked.FLASH
    medians = {"tfm": 1.0, flash: 2.4, plain: 9.0}
    times, share = asked.verdicts("tg64 @ d4096 q4", medians, 0.7)
    assert (times["measured"], times["at_least"], times["met"]) == (2.4, 2.5, False)
    assert (share["measured"], share["at_least"], share["met"]) == (0.7, 0.7, True)
    (cold,) = asked.verdicts("cold", {"tfm": 10.1}, None)
    assert (cold["measured"], cold["at_most"], cold["met"]) == (10.1, 10.0, False)
    (memory,) = asked.verdicts("memory", {"tfm": 290e6}, None, base=145_000_000)
    assert (memory["measured"], memory["at_most"], memory["met"]) == (145e6, 150e6, True)
    for seconds, met in ((1.1, True), (1.1002, False), (0.99, True)):
        (cost,) = asked.verdicts("constraint regex", {"tfm": seconds, asked.FREE: 1.0}, None)
        assert (cost["measured"], cost["at_most"], cost["met"]) == (pytest.approx(seconds - 1), 0.1, met)
    assert asked.verdicts("pp512 q8", {"tfm": 1.0}, None) == []


def test_all_that_is_asked_is_measured(against: ModuleType, asked: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a name in one table and not in the other: what is asked of it would never be looked at."""
    of_rows = {f"batch {kind}" for kind in script("rows_against_loop", monkeypatch).TITLES}
    of_constraints = {f"constraint {kind}" for kind in script("constraint_cost", monkeypatch).GRAMMARS}
    of_busy = {f"busy {name}" for name in script("busy_machine", monkeypatch).COUNTS}
    assert set(asked.ASKED) <= set(against.TESTS) | of_rows | of_constraints | of_busy
    for case in against.CASES:
        names = [side.name for side in case.sides]
        assert names[0] == "tfm"
        assert len(set(names)) == len(names)
        assert not any("/" in side.key for side in case.sides), "keys go into the results: no path of one machine"
        for ask in asked.ASKED.get(case.name, ()):
            assert set(getattr(ask, "peers", ())) <= set(names)


def worker(turns: ModuleType, program: str, **settings: object) -> Any:
    return turns.Worker([sys.executable, str(BENCHMARKS / f"worker_{program}.py"), json.dumps(settings)])


def test_worker_does_the_same_work_in_any_parts(turns: ModuleType, default_model_folder: Path) -> None:
    """Guards tfm's worker against a change of the engine's interface, and against a context that is not what it was.

    What is in a context already may be kept from one request to the next, but never change what comes out.
    """
    limits = {"threads": 1, "bytes_s": 1e10, "macs_s": dict.fromkeys(("f32", "q4", "q8", "bf16", "f16"), 1e11)}
    side = worker(turns, "tfm", model=str(default_model_folder), threads=1, ctx=64)
    ids = side.about["check_ids"]
    ways = ((len(ids), 0, 1), (1, 0, 1), (1, 3, 1), (len(ids), 3, 1), (1, 5, 2), (2, 5, 2), (1, 0, 1))
    answers = [side.run(ids, rows, depth, batch, limits) for rows, depth, batch in ways]
    other = side.run([*ids[:4], *ids[:2]], 1, 4, 1, limits)
    again = side.run(ids, 1, 5)
    side.close()
    assert {answer["top"] for answer in [*answers, again]} == {answers[0]["top"]}
    assert all(answer["seconds"] > 0 and answer["limit_s"] > 0 for answer in [*answers, other])


def test_matmul_of_both_sides_is_the_same(turns: ModuleType) -> None:
    """Guards the workers of the float32 product: another product, or a part of it, would be no comparison."""
    tops = []
    for model in ("tfm", "numpy"):
        side = worker(turns, "matmul", model=model, threads=2, ctx=0)
        tops.append(side.run([0], 1)["top"])
        side.close()
    assert tops[0] == tops[1]


def test_numpy_worker_has_its_own_blas_as_it_comes(against: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a NumPy that is slow because the environment makes OpenBLAS take another CPU's kernels."""
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    cases = {case.name: case for case in against.CASES}
    tfm, numpy = (against.environment_of(side, 2) for side in cases["matmul"].sides)
    assert "OPENBLAS_CORETYPE" in tfm
    assert "OPENBLAS_CORETYPE" not in numpy
    assert numpy["OPENBLAS_NUM_THREADS"] == "2"


def test_a_model_in_another_format_is_the_same_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards the files that peers run: every tensor and field of the source, with values as near as the format has."""
    import numpy as np
    from gguf import GGUFReader, quants

    models = script("models", monkeypatch)
    file = write_gguf(tmp_path / "q4_1.gguf", kind="Q4_1", fields={"general.file_type": 3})
    source = GGUFReader(file)
    models.write_gguf(file, tmp_path / "bf16.gguf", "bf16")
    made = GGUFReader(tmp_path / "bf16.gguf")
    fields = {name: field.contents() for name, field in source.fields.items() if not name.startswith("GGUF.")}
    fields["general.file_type"] = models.FILE_TYPES["bf16"]
    assert {name: made.fields[name].contents() for name in fields} == fields
    assert [tensor.name for tensor in made.tensors] == [tensor.name for tensor in source.tensors]
    for old, new in zip(source.tensors, made.tensors, strict=True):
        values = quants.dequantize(old.data, old.tensor_type)
        assert np.allclose(quants.dequantize(new.data, new.tensor_type), values, rtol=2**-8, atol=0)


def test_partial_results_do_not_go_to_the_results_folder() -> None:
    """Guards against a run of some tests that becomes the README's newest results."""
    command = [sys.executable, str(BENCHMARKS / "against_peers.py"), "--tests", "pp512 q4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--output is needed" in done.stderr


def test_a_start_without_an_answer_is_no_sample(processes: ModuleType) -> None:
    """Guards against timing a process that fails at once as if it had answered very fast."""
    slow_end = "import sys, time; print('answer', flush=True); time.sleep(0.2)"
    first_s, exit_s = processes.process_s([sys.executable, "-c", slow_end])
    assert 0 < first_s < exit_s - 0.15
    for program, fault in {
        "": "no answer",
        "raise SystemExit('broken')": "broken",
        "print(1); 1 / 0": "status 1",
    }.items():
        with pytest.raises(SystemExit, match=fault):
            processes.process_s([sys.executable, "-c", program])


def test_peak_memory_is_the_process_own(processes: ModuleType) -> None:
    """Guards against counting the measuring process, which has far more in memory, and against a failure as a peak."""
    ballast = bytearray(300_000_000)
    small, large = (
        processes.peak_bytes([sys.executable, "-c", f"x = bytearray({size}); x[::4096] = x[::4096]"])
        for size in (1, 100_000_000)
    )
    assert small < 60e6
    assert 95e6 < large - small < 120e6
    with pytest.raises(subprocess.CalledProcessError):
        processes.peak_bytes([sys.executable, "-c", "1 / 0"])
    del ballast


def test_results_file_is_named_by_date_and_cpu(against: ModuleType) -> None:
    """Guards against a name that no file can have, or that two machines of one maker share."""
    found = results() | {"machine": {"cpu": "Intel(R) Xeon(R) CPU @ 2.20GHz", "llvm_cpu": "skylake-avx512"}}
    assert against.results_file(found).name == "2030-01-02-intel-xeon-skylake-avx512.json"
