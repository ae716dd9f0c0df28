"""Every op of every kernel module at its declared cases, on this CPU and on others that it can imitate."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest

from tfm.kernels import activation, jit, object_files, ops, rope, softmax

OPS = ops.find_ops()
HASWELL = "avx avx2 bmi bmi2 cmov cx16 cx8 f16c fma fxsr lzcnt mmx movbe popcnt sse sse2 sse3 sse4.1 sse4.2 ssse3 xsave"
SKYLAKE = f"{HASWELL} adx aes avx512bw avx512cd avx512dq avx512f avx512vl clflushopt clwb pclmul"
ALDERLAKE = f"{HASWELL} adx aes avxvnni clflushopt clwb pclmul"


def cpu(name: str, features: str) -> dict[str, str]:
    return {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": ",".join(f"+{feature}" for feature in features.split())}


FORCED = {
    "generic": {"NUMBA_CPU_NAME": "generic"},
    "avx2": cpu("znver3", HASWELL),  # the one that reads two panels side by side
    "avx512": cpu("skylake-avx512", SKYLAKE),
    "avxvnni": cpu("alderlake", ALDERLAKE),
}


@pytest.fixture
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that NumPy does not clear holds NaN (bytes of ones), so that what a kernel leaves unwritten shows."""
    empty = np.empty

    def poisoned(shape: Any, dtype: Any = float, *args: Any, **kwargs: Any) -> Any:
        array = empty(shape, dtype, *args, **kwargs)
        if not array.dtype.hasobject:
            array.view(np.uint8)[...] = 0xFF
        return array

    monkeypatch.setattr(np, "empty", poisoned)


@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.parametrize("op", OPS, ids=[op.name for op in OPS])
def test_op_is_as_exact_as_numpy(op: ops.Op) -> None:
    """Guards a wrong result at any declared case: its error may be twice that of plain float32 NumPy, not more."""
    verdicts = {label: ops.verify(op, inputs) for label, inputs in op.cases(np.random.default_rng(0))}
    assert verdicts, "an op without cases is not tested"
    assert not {label: verdict for label, verdict in verdicts.items() if not verdict.passed}


@pytest.mark.parametrize("op", OPS, ids=[op.name for op in OPS])
def test_op_gives_the_same_bytes_twice(op: ops.Op) -> None:
    """Guards what depends on the memory around or on what ran before: padding that is read, or a buffer not cleared."""
    label, inputs = op.cases(np.random.default_rng(1))[-1]
    assert np.asarray(op.run(**inputs)).tobytes() == np.asarray(op.run(**inputs)).tobytes(), label


def test_verify_sees_a_wrong_result() -> None:
    """Guards the judge itself: a NaN, a wrong shape, a wrong type and an error of three units must not pass."""
    x = np.float32([1, 2, 3])

    def passes(result: Any) -> bool:
        op = ops.Op("fake", lambda x: result, lambda x: x * x, lambda rng: [])
        return ops.verify(op, {"x": x}).passed

    right = x * x
    assert passes(right)
    assert passes(np.nextafter(right, np.float32(np.inf)))
    assert not passes(right + 3 * np.spacing(np.float32(9)))
    assert not passes(right[:2])
    assert not passes(right.astype(np.float64))
    for wrong in (np.nan, np.inf):
        spoiled = right.copy()
        spoiled[1] = wrong
        assert not passes(spoiled)


# ---------------------------------------------------------------------------------------------- what a case cannot say


@pytest.mark.parametrize("kind", range(4), ids=activation.NAMES)
def test_activation_far_out(kind: int) -> None:
    """Guards overflow in e^-x or x^3 (NaN for a large input), and that a NaN is not hidden."""
    x = np.float32([[100, -100, 1e4, -1e4, 1e30, -1e30, 3e38, -3e38, np.inf, np.nan]])
    found = activation.activation(kind, x)[0]
    assert np.array_equal(found[:9:2], x[0, :9:2])
    assert np.all(np.abs(found[1:9:2]) < 1e-36)
    assert np.isnan(found[9])


def test_gelu_keeps_digits_in_its_negative_tail() -> None:
    """Guards the cancellation of 1 + erf(x), which loses every digit at -6: the relative error stays below 2e-5."""
    x = -np.linspace(0.01, 12, 4001, dtype=np.float32)[None]
    exact = activation.reference(activation.GELU, x.astype(np.float64))
    tail = np.vectorize(activation.math.erfc)(-x.astype(np.float64) / np.sqrt(2)) * x / 2
    np.testing.assert_allclose(activation.activation(activation.GELU, x), tail, rtol=2e-5)
    np.testing.assert_allclose(exact, tail, atol=1e-14)


def test_activation_in_place() -> None:
    """Guards the aliasing the forward pass relies on: out may be gate."""
    gate, up = np.random.default_rng(2).standard_normal((2, 1, 48)).astype(np.float32)
    expected = activation.activation(activation.SILU, up, gate)
    activation._activate_rows(0, 1, gate.ctypes.data, up.ctypes.data, 1, 48, 192, gate.ctypes.data)
    assert np.array_equal(gate, expected)


def test_rope_element_has_one_value_on_any_path() -> None:
    """Guards that vectors and single elements agree to the last bit: else head sizes or layouts would change logits."""
    half = 37
    q = np.random.default_rng(3).standard_normal((5, 2, 2 * half)).astype(np.float32)
    positions, inv_freq = np.array([0, 1, 17, 4095, 100_003]), 10000.0 ** (-np.arange(half) / half)
    paired = q.reshape(5, 2, 2, half).swapaxes(2, 3).reshape(q.shape)
    split = rope.rope(q, positions, inv_freq, False)
    turned = rope.rope(paired, positions, inv_freq, True)
    assert np.array_equal(turned.reshape(5, 2, half, 2).swapaxes(2, 3).reshape(q.shape), split)
    assert np.array_equal(split[0], q[0]), "position 0 turns nothing"


def test_softmax_of_a_row_that_sees_nothing_is_zero() -> None:
    """Guards 0 / 0 where everything is masked; and that a NaN among the scores is not hidden."""
    x = np.full((3, 19), -np.inf, np.float32)
    x[1, 4], x[2, 4] = np.nan, 0.5
    found = softmax.softmax(x)
    assert not found[0].any()
    assert np.isnan(found[1]).all()
    assert np.array_equal(found[2], np.eye(19, dtype=np.float32)[4])


def test_softmax_of_a_row_does_not_depend_on_its_neighbours_or_place() -> None:
    """Guards one order of summation: a row among others, and a row in place, have the bytes of the row alone."""
    x = np.random.default_rng(4).normal(0, 5, (7, 1056)).astype(np.float32)
    together = softmax.softmax(x)
    assert all(np.array_equal(softmax.softmax(x[t : t + 1])[0], together[t]) for t in range(7))
    softmax._softmax_rows(x.ctypes.data, 7, 1056, 4 * 1056, x.ctypes.data)
    assert np.array_equal(x, together)


def test_softmax_clears_its_padding() -> None:
    """Guards that attention may read whole vectors of weights: what lies behind the row becomes 0, whatever it was."""
    x, out = np.full((2, 48), np.nan, np.float32)
    x[:33] = np.linspace(-1, 1, 33)
    softmax._softmax_rows(x.ctypes.data, 1, 33, 192, out.ctypes.data)
    assert out[:33].sum() == pytest.approx(1)
    assert not out[33:].any()


# ---------------------------------------------------------------------------------------------- machine code


def entries() -> list[jit.Entry]:
    modules = [sys.modules[name] for name in sorted(sys.modules) if name.startswith("tfm.kernels.")]
    return [value for module in modules for value in vars(module).values() if isinstance(value, jit.Entry)]


def test_machine_code_calls_no_library() -> None:
    """Guards vector code that LLVM turned into scalar calls, into libm or a compiler's library that may be missing.

    A missing symbol ends the process when the object is loaded; one that is found is ten times slower than the vector.
    """
    routines = "fmaf fma expf exp tanhf tanh logf powf roundf rintf floorf sqrtf"
    routines += " __extendhfsf2 __truncsfhf2 __gnu_h2f_ieee __gnu_f2h_ieee"
    for entry in entries():
        entry.prepare()
        kept = object_files.read_object(entry._path())
        assert kept is not None
        names = set(kept.split(b"\0"))
        assert not names & {name.encode() for name in routines.split()}, entry.function


@pytest.mark.parametrize("target", FORCED)
def test_other_cpus(target: str, request: pytest.FixtureRequest) -> None:
    """Guards the paths that this CPU would not take: plain vector code, AVX2, AVX-512 without VNNI, and AVX-VNNI.

    The kernel tests run in a process that compiles for the other CPU. Its machine code is kept with pytest's cache,
    so that only the first run compiles.
    """
    host = {name for name, present in llvm.get_host_cpu_features().items() if present}
    if os.environ.get("NUMBA_CPU_NAME"):
        pytest.skip("this run is forced already")
    wanted = {name[1:] for name in FORCED[target].get("NUMBA_CPU_FEATURES", "").split(",") if name}
    beyond = {"avx2": {"avx512f", "avxvnni"}, "avx512": {"avx512vnni"}, "avxvnni": {"avx512vnni"}}
    if wanted - host or (target in beyond and not host & beyond[target]):
        pytest.skip("the usual run takes this path, or the host cannot")
    folder = request.config.cache.mkdir(f"kernels-{target}")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    files = [str(Path(__file__).with_name(name)) for name in ("test_simd.py", "test_kernels.py", "test_matmul.py")]
    if target in ("avx512", "avxvnni"):  # without VNNI, and AVX-VNNI: their own are the integer dots alone
        command += ["-k", "test_simd or matmul"]
    environment = {**os.environ, **FORCED[target], "TFM_CACHE": str(folder)}
    done = subprocess.run([*command, *files], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
