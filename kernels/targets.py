"""The CPU compiled for, and which instructions the kernels may take there.

It is the CPU at hand, or what NUMBA_CPU_NAME and NUMBA_CPU_FEATURES force; `compile_for` names any other, of any
architecture, so that its code can be looked at on every machine: the llvmlite wheel holds both back ends.

On x86 the features decide: the processor says them itself. On aarch64 the system may say little (macOS says nothing),
but LLVM knows what a CPU of that name has: it is asked for a dot product, and what it emits tells.
"""

import os
import re
import sys
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import llvmlite.binding as llvm

# 4 lanes of sums of 4 products each, with signed and with unsigned bytes on the left side.
PROBE = """
target triple = "{triple}"
declare <4 x i32> @llvm.vector.partial.reduce.add.v4i32.v16i32(<4 x i32>, <16 x i32>)
define <4 x i32> @probe(<4 x i32> %acc, <16 x i8> %a, <16 x i8> %b) {{
  %wide_a = {extend} <16 x i8> %a to <16 x i32>
  %wide_b = sext <16 x i8> %b to <16 x i32>
  %products = mul <16 x i32> %wide_a, %wide_b
  %sums = call <4 x i32> @llvm.vector.partial.reduce.add.v4i32.v16i32(<4 x i32> %acc, <16 x i32> %products)
  ret <4 x i32> %sums
}}
"""


class Reading(NamedTuple):
    """How the kernels of one row read a matrix from memory: at so many places side by side, and asking, so many bytes
    ahead, for one line in so many bytes."""

    streams: int
    ahead_bytes: int
    asked_bytes: int


READING = Reading(1, 2048, 128)  # measured on Zen 4 (kernels/formats/affine.py)
# Zen 3 reads 15 to 20 GB/s where every line is asked for, and 10 to 13 where every other one is, less than with none;
# 1 KB ahead is 5 to 10 % faster than 2 KB, and two places side by side are 17 to 20 % faster than one, or than four.
READINGS = {"znver3": Reading(2, 1024, 64)}


@dataclass(frozen=True)
class Target:
    """A CPU by LLVM's names; features is LLVM's list, `+avx2,+fma`, and may be empty where the CPU's name says it."""

    triple: str
    cpu: str
    features: str

    @property
    def is_x86(self) -> bool:
        return self.triple.startswith(("x86_64", "i686"))

    @property
    def is_aarch64(self) -> bool:
        return self.triple.startswith(("aarch64", "arm64"))

    def _says(self, *features: str) -> bool:
        return self.is_x86 and {f"+{name}" for name in features} <= set(self.features.split(","))

    @property
    def has_fma(self) -> bool:
        return not self.is_x86 or self._says("fma")

    @property
    def has_f16c(self) -> bool:
        return not self.is_x86 or self._says("f16c")

    @property
    def has_avx2(self) -> bool:
        return self._says("avx2")

    @property
    def has_avx512(self) -> bool:
        return self._says("avx512f", "avx512bw")

    @property
    def has_vnni_512(self) -> bool:
        return self.has_avx512 and self._says("avx512vnni")

    @property
    def has_vnni_256(self) -> bool:
        return self.has_avx2 and (self._says("avxvnni") or self._says("avx512vnni", "avx512vl"))

    @cached_property
    def has_dotprod(self) -> bool:
        """sdot: signed bytes by signed bytes."""
        return self._emits("sdot", "sext")

    @cached_property
    def has_i8mm(self) -> bool:
        """usdot: unsigned bytes by signed bytes."""
        return self._emits("usdot", "zext")

    def _emits(self, instruction: str, extend: str) -> bool:
        if not self.is_aarch64:
            return False
        probe = llvm.parse_assembly(PROBE.format(triple=self.triple, extend=extend))
        written = self.machine().emit_assembly(probe)
        return re.search(rf"^\t{instruction}[.\t]", written, re.MULTILINE) is not None  # Apple's is sdot.4s

    @property
    def reading(self) -> Reading:
        return READINGS.get(self.cpu, READING)

    def machine(self) -> llvm.TargetMachine:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        target = llvm.Target.from_triple(self.triple)
        return target.create_target_machine(cpu=self.cpu, features=self.features, opt=3, codemodel="small")


@cache
def this_target() -> Target:
    """What Numba compiles for in this process."""
    name, features = os.environ.get("NUMBA_CPU_NAME"), os.environ.get("NUMBA_CPU_FEATURES")
    if features is None:
        # As Numba has it: any other name alone leaves the host's features on.
        features = "" if (name or "").lower() == "generic" else llvm.get_host_cpu_features().flatten()
    return Target(llvm.get_default_triple(), name or llvm.get_host_cpu_name(), features)


_chosen: list[Target] = []


def compile_for(target: Target) -> None:
    """Take the kernels' paths of another CPU from now on, once in a process and before any kernel is imported."""
    assert "tfm.kernels.simd" not in sys.modules, "the kernels have been made for another target"
    _chosen.append(target)


def current_target() -> Target:
    return _chosen[-1] if _chosen else this_target()
