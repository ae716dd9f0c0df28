"""The MLX affine convention: codes of few bits, with a scale and a bias for each group of columns.

A quantised module NAME of N rows and K columns has three tensors, in place of one NAME.weight [N, K] in floating point:

    NAME.weight  U32 [N, K * bits / 32]    codes q, packed little-end first: column 0 in the lowest bits of word 0
    NAME.scales  F16, BF16, F32 [N, G]     G = K / group_size
    NAME.biases  the same                  w = q * scale + bias

config.json tells bits and group_size under `quantization`; a module of its name there has its own, or false.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tfm.engine.errors import TfmError
from tfm.engine.fields import Fields

if TYPE_CHECKING:
    from tfm.engine.checkpoint import Checkpoint, StoredRows

BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)
SCALE_DTYPES = ("F16", "BF16", "F32")
WORDS = ("group_size", "bits", "mode")


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

    def of(self, module: str, checkpoint: "Checkpoint") -> Affine | None:
        """How a module is stored. One that config.json does not name is quantised if it has scales, as in MLX."""
        if module in self.modules:
            return self.modules[module]
        return self.default if f"{module}.scales" in checkpoint.tensors else None


def read_quantization(fields: Fields) -> Quantization | None:
    """`quantization` of config.json; None for a model in floating point. Refuses other conventions by name."""
    other = fields.value("quantization_config")
    if other is not None and other != fields.value("quantization"):
        group = fields.group("quantization_config")
        word, within = ("quant_method", group) if "quant_method" in group else ("quantization_config", fields)
        raise within.fault(word, "nothing: of quantised weights only MLX affine ones load, told by `quantization`")
    if "quantization" not in fields:
        return None
    group = fields.group("quantization")
    modules: dict[str, Affine | None] = {}
    default = _read_affine(group)
    for word in group.words():
        value = group.value(word)
        if isinstance(value, dict):
            modules[word] = _read_affine(group.group(word), default)
        elif isinstance(value, bool):
            modules[word] = default if value else None
        elif word not in WORDS:
            raise group.fault(word, f"{', '.join(WORDS)}, or a module with an object or false")
    return Quantization(default, modules)


def _read_affine(fields: Fields, default: Affine | None = None) -> Affine:
    fields.choice("mode", {"affine": None}, "affine")
    found: dict[str, int] = {}
    for word, allowed in (("bits", BITS), ("group_size", GROUP_SIZES)):
        found[word] = fields.integer(word, getattr(default, word, None), least=0)
        if found[word] not in allowed:
            raise fields.fault(word, ", ".join(map(str, allowed)))
    return Affine(**found)


def load_affine(
    checkpoint: "Checkpoint", module: str, rows: int, columns: int, affine: Affine
) -> "tuple[StoredRows, StoredRows, StoredRows, str]":
    """weight, scales and biases of a module as they lie, and the dtype of scales and biases; shapes are checked."""
    if columns % affine.group_size:
        multiple = f"a multiple of group_size, {affine.group_size}"
        raise TfmError(f"{checkpoint.where(f'{module}.weight')}: columns", columns, multiple)
    shape = (rows, columns // affine.group_size)
    weight = checkpoint.checked(f"{module}.weight", ("U32",), (rows, columns * affine.bits // 32))
    scales = checkpoint.checked(f"{module}.scales", SCALE_DTYPES, shape)
    dtype = checkpoint.tensors[f"{module}.scales"].dtype
    return weight, scales, checkpoint.checked(f"{module}.biases", (dtype,), shape), dtype
