"""A model of a given shape with random weights, for measurements: no checkpoint, and no memory but the packed panels.

Every row of a matrix is a window of one run of random numbers, each a little further on, so that a matrix of any size
takes no memory before it is packed.
"""

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from tfm.engine.config import ModelConfig, Norm
from tfm.engine.errors import TfmError
from tfm.engine.image import Plan
from tfm.engine.layers import Memory
from tfm.engine.machine import available_memory
from tfm.engine.matrix import QUANTIZED_BITS, Format, Matrix
from tfm.engine.progress import Progress
from tfm.engine.weights import Vector, Weights, gather, shapes
from tfm.kernels.packing import aligned_empty
from tfm.kernels.records import GROUP

STEP = 16  # words from a row's window to the next one's
LEAST_BITS = 12  # of a weight in floating point: bf16 where it is packed so


def random_weights(config: ModelConfig, format: Format) -> Weights:
    """Weights of config's shape in one format; q4 and q8 in groups of 32 with f16 scales.

    Raises TfmError for a bad width, and for weights that do not fit the memory.
    """
    matrices = [size for sizes in _sizes(config) for field, size in sizes.items() if field != "lm_head"]
    _check(sum(rows * columns for rows, columns in matrices) * QUANTIZED_BITS.get(format, LEAST_BITS) // 8)
    return gather(_Random(config, format), config)


def random_image(weights: Weights, config: ModelConfig, threads: int, progress: Progress | None = None) -> Memory:
    """Weights packed into memory. Raises TfmError where they do not fit."""
    plan = Plan(config, weights)
    _check(plan.least_size)
    plan = plan.narrowed(threads, progress)
    _check(plan.size)
    memory = aligned_empty(plan.size)
    plan.write(memory, threads, progress)
    return memory


def _check(size: int) -> None:
    free = available_memory()
    if free is not None and size > free:
        remedy = "use a smaller shape or fewer bits"
        raise TfmError("memory", f"{size / 1e6:.1f} MB of weights", f"{free / 1e6:.1f} MB free", remedy)


class _Random:
    """Weights of such a size that activations keep theirs; norms of ones, biases of zeros."""

    def __init__(self, config: ModelConfig, format: Format) -> None:
        self.config, self.format = config, format

    def matrix(self, field: str, index: int | None = None) -> Matrix:
        rows, columns = shapes(self.config, index)[field]
        if self.format not in QUANTIZED_BITS or field == "position_embeddings":
            format: Format = "f32" if field == "position_embeddings" else self.format
            return Matrix(field, format, rows, columns, _windows(self._values[format], rows, columns))
        if columns % GROUP:
            allowed = f"a multiple of {GROUP} columns for {self.format}, or f32, f16, bf16"
            raise TfmError(f"random weights: {field}", f"{columns} columns", allowed)
        words = _windows(self._bits, rows, columns * QUANTIZED_BITS[self.format] // 32)
        most = 2 ** QUANTIZED_BITS[self.format] - 1
        scales = _windows(self._values["f16"] / np.float16(most / 2), rows, columns // GROUP)
        scales = np.broadcast_to(np.abs(scales[:1]), scales.shape)
        biases = np.broadcast_to(scales[:1] * np.float16(-most / 2), scales.shape)
        return Matrix(field, self.format, rows, columns, words, scales, biases, "f16", GROUP)

    def bias(self, field: str, index: int | None = None) -> Vector:
        return np.zeros(shapes(self.config, index)[field][0], np.float32)

    def norm(self, field: str, kind: Norm, index: int | None = None) -> tuple[Vector | None, Vector | None]:
        size = self.config.hidden_size
        weight = None if kind == "none" else np.ones(size, np.float32)
        return weight, np.zeros(size, np.float32) if kind == "layer" else None

    @cached_property
    def _length(self) -> int:
        """Numbers of a run that has windows for every matrix."""
        matrices = [size for sizes in _sizes(self.config) for size in sizes.values()]
        return max(rows * STEP + columns for rows, columns in matrices)

    @cached_property
    def _bits(self) -> npt.NDArray[np.uint32]:
        return np.random.default_rng(0).integers(0, 2**32, self._length, np.uint32)

    @cached_property
    def _values(self) -> dict[str, npt.NDArray[Any]]:
        """Normal values of about 1 / sqrt(D), of every float format."""
        values = np.random.default_rng(1).standard_normal(self._length, np.float32)
        values *= np.float32(self.config.hidden_size**-0.5)
        bf16 = (values.view(np.uint32) >> 16).astype(np.uint16)
        return {"f32": values, "f16": values.astype(np.float16), "bf16": bf16}


def _sizes(config: ModelConfig) -> list[dict[str, tuple[int, int]]]:
    """Of the matrices outside of the layers, and of each layer's."""
    return [shapes(config, index) for index in (None, *range(config.num_hidden_layers))]


def _windows(run: npt.NDArray[Any], rows: int, columns: int) -> npt.NDArray[Any]:
    """[rows, columns] of a run: row r begins at number STEP * r."""
    size = run.itemsize
    return as_strided(run, (rows, columns), (STEP * size, size), writeable=False)
