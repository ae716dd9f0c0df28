"""The MLX affine convention: codes of few bits, with a scale and a bias for each group of columns."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Affine:
    """How one matrix is stored: bits a weight, and how many neighbours in a row share a scale and a bias."""

    bits: int
    group_size: int


@dataclass(frozen=True)
class Quantization:
    """config.json's `quantization`: how matrices are stored, and the modules that differ (None: in floating point)."""

    default: Affine
    modules: Mapping[str, Affine | None]
