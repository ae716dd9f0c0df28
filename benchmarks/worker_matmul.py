"""A float32 product of square matrices: model is "tfm" or "numpy". See serve.py; of a request only the time matters.

tfm multiplies by a weight that is packed beforehand, as a model's are, and its threads take block after block; NumPy
does as its BLAS sees fit. top is the place of the largest element, which must be the same.
"""

import platform
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
from serve import Request, serve, settings

SIZE = 2048
OTHERS_SPIN_S = 0.5  # OpenBLAS's threads spin for a while after a product: half a core was gone in tfm's turns


def numpy_matmul(x_MK: npt.NDArray[np.float32], w_NK: npt.NDArray[np.float32]) -> Callable[[], Any]:
    out = np.empty((len(x_MK), len(w_NK)), np.float32)
    return lambda: np.matmul(x_MK, w_NK.T, out=out)


def tfm_matmul(x_MK: npt.NDArray[np.float32], w_NK: npt.NDArray[np.float32], threads: int) -> Callable[[], Any]:
    from tfm.kernels import matmul
    from tfm.kernels.packing import aligned_empty
    from tfm.kernels.records import BLOCK_ROWS, LANES, MULTIPLY_SCRATCH_BYTES
    from tfm.kernels.weight import Weight

    weight = Weight("f32", w_NK)
    panels = int(weight.record["panels"][0])
    acts, x = matmul.activations(x_MK, quantized=False)
    out = np.empty((len(x_MK), panels * LANES), np.float32)
    records, target = (weight.record.ctypes.data, acts.ctypes.data), (out.ctypes.data, out.strides[0])
    scratch = [aligned_empty(MULTIPLY_SCRATCH_BYTES) for _ in range(threads)]
    columns = [(panels * i // threads, panels * (i + 1) // threads) for i in range(threads)]
    parts = [(row, first, last) for row in range(0, len(x_MK), BLOCK_ROWS) for first, last in columns]
    helpers = ThreadPoolExecutor(max(1, threads - 1))

    def take(index: int, left: Iterator[tuple[int, int, int]]) -> None:
        """A thread's share: what is next, again and again, so that none waits for one that is held up."""
        for row, first, last in left:
            rows = row, min(row + BLOCK_ROWS, len(x_MK))
            matmul._multiply_part(*records, *rows, first, last, *target, 0, scratch[index].ctypes.data)

    def run() -> npt.NDArray[np.float32]:
        assert acts["values"][0] == x.ctypes.data  # the kernel reads x, acts and weight: they live as long as this
        left = iter(parts)  # next() of a list's iterator is one step of the interpreter
        others = [helpers.submit(take, index, left) for index in range(1, threads)]
        take(0, left)
        for other in others:
            other.result()
        return out[:, : weight.values.shape[0]]

    return run


def main(model: str, threads: int, ctx: int) -> None:
    rng = np.random.default_rng(0)
    x_MK, w_NK = (rng.standard_normal((SIZE, SIZE)).astype(np.float32) for _ in range(2))
    multiply = tfm_matmul(x_MK, w_NK, threads) if model == "tfm" else numpy_matmul(x_MK, w_NK)
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    about = {
        "versions": {"numpy": np.__version__, "blas": f"{blas['name']} {blas['version']}"}
        | {"python": platform.python_version()},
        "vocab_size": SIZE * SIZE,
    }

    def run(_request: Request) -> dict[str, object]:
        time.sleep(OTHERS_SPIN_S)
        multiply()  # not timed: a product is short, and the other side has just had the caches
        start = time.perf_counter()
        out = multiply()
        return {"seconds": time.perf_counter() - start, "top": int(out.argmax())}

    serve(about, run)


if __name__ == "__main__":
    main(**settings())
