"""The matmul micro-kernels compiled for CPUs that are not at hand: is the right instruction in the inner loop?

LLVM's back ends for x86 and aarch64 are both in llvmlite, so that this runs anywhere. What the code computes is tested
where it can run: tests/test_kernels.py for x86, tools/aarch64.sh for aarch64.
"""

import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tfm.kernels.targets import Target

ROOT = Path(__file__).parents[1]
LINUX_X86, LINUX_ARM, MAC_ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", "arm64-apple-macosx14.0"
AVX2 = "+avx,+avx2,+f16c,+fma"
AVX512 = f"{AVX2},+avx512bw,+avx512cd,+avx512dq,+avx512f,+avx512vl"

# Every way to multiply integers that a kernel may take; of these an inner loop has one alone.
DOTS = {"vpdpbusd", "vpmaddubsw", "pmaddwd", "sdot", "udot", "usdot", "smull", "smull2"}
CALLS = {"call", "callq", "bl", "blr"}
SCALAR = {"imul", "imull", "imulq", "mulss", "vmulss", "vfmadd231ss", "fmadd", "smaddl", "mul", "madd"}


@dataclass(frozen=True)
class Cpu:
    """What is to be found for a CPU with these features.

    rows: of a tile. nibbles and bytes: the instruction of q4 and q8; `dots` of them are 4 columns of a row. fma: that
    of the formats in floating point; `fmas` of them are one column of a panel, `floats` one of a tile. lookup: what
    bf12 finds the upper halves of weights with. register: how the widest are called. streams: panels or bands that a
    kernel of one row reads side by side.
    """

    triple: str
    features: str
    rows: int
    nibbles: str
    bytes: str
    dots: int
    fma: str
    fmas: int
    floats: int
    lookup: str
    register: str
    streams: int = 1


def x86(features: str, rows: int, dot: str, parts: int, register: str, streams: int = 1) -> Cpu:
    floats = 24 if register == "zmm" else 12
    return Cpu(LINUX_X86, features, rows, dot, dot, parts, "vfmadd", parts, floats, "vpshufb", register, streams)


def arm(nibbles: str, bytes_: str, dots: int = 4, triple: str = LINUX_ARM) -> Cpu:
    return Cpu(triple, "", 5, nibbles, bytes_, dots, "fmla", 4, 20, "tbl", "v")


CPUS = {
    "haswell": x86(AVX2, 6, "vpmaddubsw", 2, "ymm"),
    "znver3": x86(AVX2, 6, "vpmaddubsw", 2, "ymm", streams=2),
    "alderlake": x86(f"{AVX2},+avxvnni", 6, "vpdpbusd", 2, "ymm"),
    "skylake-avx512": x86(AVX512, 8, "vpmaddubsw", 1, "zmm"),
    "cascadelake": x86(f"{AVX512},+avx512vnni", 8, "vpdpbusd", 1, "zmm"),
    "icelake-server": x86(f"{AVX512},+avx512vnni", 8, "vpdpbusd", 1, "zmm"),
    "znver4": x86(f"{AVX512},+avx512vnni", 8, "vpdpbusd", 1, "zmm"),
    "znver5": x86(f"{AVX512},+avx512vnni,+avxvnni", 8, "vpdpbusd", 1, "zmm"),
    "cortex-a72": arm("smull", "smull", 8),
    "neoverse-n1": arm("sdot", "sdot"),
    "neoverse-v1": arm("sdot", "usdot"),
    "neoverse-n2": arm("sdot", "usdot"),
    "apple-m1": arm("sdot", "sdot", triple=MAC_ARM),
    "apple-m2": arm("sdot", "usdot", triple=MAC_ARM),
}


@dataclass(frozen=True)
class Line:
    name: str
    operands: str


def machine_code(name: str, cpu: Cpu) -> dict[str, list[Line | str]]:
    """Of each kernel the instructions, and the labels between them as strings."""
    command = [sys.executable, str(ROOT / "tools" / "assembly.py"), cpu.triple, name, cpu.features]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "LLVM knows the CPU and its features"
    kernels = {}
    for part in done.stdout.split("# kernel ")[1:]:
        title, text = part.split("\n", 1)
        code: list[Line | str] = []
        for line in text.splitlines():
            line = re.split(r"\s*(?://|;|##|\s#)", line.replace("{vex}\t", ""))[0]
            if label := re.match(r'"?([.\w]+)"?:', line):
                code.append(label[1])
            elif found := re.match(r"\t(\w[\w.]*)\s*(.*)", line):
                code.append(Line(found[1].split(".")[0], found[2]))  # Apple writes sdot.4s; b.ne is a b
        kernels[title] = code
    return kernels


def inner_loops(code: list[Line | str]) -> list[list[Line]]:
    """The loops that have no loop within, as far as jumps back to a label tell."""
    places = {label: i for i, label in enumerate(code) if isinstance(label, str)}
    loops = set()
    for i, line in enumerate(code):
        if isinstance(line, Line) and line.name.startswith(("j", "b", "cb", "tb")) and line.name not in CALLS:
            begin = places.get(line.operands.split()[-1] if line.operands else "", i)
            if begin < i:
                loops.add((begin, i))
    inner = [(a, b) for a, b in loops if not any((c, d) != (a, b) and a <= c and d <= b for c, d in loops)]
    return [[line for line in code[a : b + 1] if isinstance(line, Line)] for a, b in sorted(inner)]


def hot_loop(code: list[Line | str], instruction: str) -> list[Line]:
    """The inner loop with the instruction; the one with most where a remainder has its own."""
    loops = [loop for loop in inner_loops(code) if any(line.name.startswith(instruction) for line in loop)]
    assert loops, f"no loop with {instruction}"
    return max(loops, key=lambda loop: sum(line.name.startswith(instruction) for line in loop))


def check_no_calls(code: list[Line | str]) -> None:
    """A kernel calls only what is defined beside it: no libm, no helper of the compiler's."""
    labels = {label for label in code if isinstance(label, str)}
    for line in code:
        if isinstance(line, Line) and line.name in CALLS:
            assert line.operands.split("@")[0] in labels, line


@pytest.mark.parametrize("name", CPUS)
def test_inner_loops(name: str) -> None:
    """Guards a CPU from getting the code of a lesser one, or of one that has more; a call or scalar code in a loop; a
    tile that no longer shares the weights' load; registers of half the width."""
    cpu = CPUS[name]
    kernels = machine_code(name, cpu)
    rows = {f"{format}_row" for format in ("q4", "q8", "f32", "bf16", "bf12", "f16")}
    assert set(kernels) == {"q4", "q8", "float", *rows}
    for title, code in kernels.items():
        format, _, row = title.partition("_")
        check_no_calls(code)
        quantized = format in ("q4", "q8")
        wanted = {"q4": cpu.nibbles, "q8": cpu.bytes}.get(format, cpu.fma)
        loop = hot_loop(code, wanted)
        found = [line for line in loop if line.name.startswith(wanted)]
        assert all(re.search(rf"\b{cpu.register}\d", line.operands) for line in found), found
        names = Counter(line.name for line in loop)
        if quantized:
            too = {"smull2"} if wanted == "smull" else set()
            assert not names.keys() & (DOTS - {wanted} - too), title
            step = cpu.dots * (1 if row else cpu.rows)
        elif format == "bf12":
            step = 8 * cpu.fmas  # four columns of a band of two panels
            assert names[cpu.lookup] == 2 * cpu.fmas * cpu.streams, names
        else:
            step = 2 * cpu.fmas if row else cpu.floats
        step *= cpu.streams if row else 1
        assert len(found) % step == 0, f"{title}: {len(found)} in the loop, {step} for all rows or panels"
        assert not names.keys() & (CALLS | SCALAR), title
        stack = sum(bool(re.search(r"%rsp|\bsp\b", line.operands)) for line in loop)
        assert 4 * stack <= len(loop), f"{title}: {stack} of {len(loop)} instructions in the loop use the stack"


@pytest.mark.parametrize("name", [name for name in CPUS if CPUS[name].triple != LINUX_X86])
def test_a_name_says_what_an_arm_has(name: str) -> None:
    """Guards aarch64 where the system lists no features (macOS) or not all of them (Linux): LLVM knows them by name."""
    target = Target(CPUS[name].triple, name, "")
    assert target.has_dotprod == (CPUS[name].nibbles == "sdot")
    assert target.has_i8mm == (CPUS[name].bytes == "usdot")


@pytest.mark.parametrize("features", ["", "+dotprod", "+dotprod,+i8mm", "+i8mm,-i8mm"])
def test_features_add_to_the_name(features: str) -> None:
    """Guards an aarch64 CPU that LLVM does not know yet: what its features say is taken."""
    target = Target(LINUX_ARM, "generic", features)
    assert target.has_dotprod == ("+dotprod" in features)
    assert target.has_i8mm == (features.endswith("+i8mm"))
