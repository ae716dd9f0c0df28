"""Checkpoint names -> fields: the weights of a model in the places where the forward pass looks for them.

Shapes: D hidden, F feed-forward, P positions, V vocabulary. Every Matrix is [outputs, inputs].
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tfm.engine.architectures import ARCHITECTURES
from tfm.engine.checkpoint import Checkpoint, StoredRows
from tfm.engine.config import LayerConfig, ModelConfig, Norm
from tfm.engine.errors import TfmError
from tfm.engine.matrix import Format, Matrix, ScaleType, to_float32
from tfm.engine.quantized.mlx import load_affine

__all__ = ["LayerWeights", "Matrix", "Source", "Vector", "Weights", "gather", "load_weights", "shapes"]

FLOAT_FORMATS: dict[str, Format] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
QUANTIZED_FORMATS: dict[int, Format] = {4: "q4", 8: "q8"}
SCALE_TYPES: dict[str, ScaleType] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LayerWeights:
    """One block. A part that the model does not have is None; norms and biases are float32 copies."""

    q_proj: Matrix
    k_proj: Matrix
    v_proj: Matrix
    o_proj: Matrix
    gate_proj: Matrix | None = None
    up_proj: Matrix | None = None
    down_proj: Matrix | None = None
    q_bias: Vector | None = None
    k_bias: Vector | None = None
    v_bias: Vector | None = None
    o_bias: Vector | None = None
    gate_bias: Vector | None = None
    up_bias: Vector | None = None
    down_bias: Vector | None = None
    attn_norm: Vector | None = None
    attn_norm_bias: Vector | None = None
    mlp_norm: Vector | None = None
    mlp_norm_bias: Vector | None = None


@dataclass(frozen=True)
class Weights:
    """A whole model. position_embeddings is [P, D]; lm_head None means that embed_tokens unembeds as well."""

    embed_tokens: Matrix
    layers: tuple[LayerWeights, ...]
    position_embeddings: npt.NDArray[np.float32] | None = None
    norm: Vector | None = None
    norm_bias: Vector | None = None
    lm_head: Matrix | None = None
    lm_head_bias: Vector | None = None

    def parameters(self) -> int:
        """How many numbers the model is made of."""
        return sum(part.rows * part.columns if isinstance(part, Matrix) else part.size for part in _parts(self))


def _parts(weights: Weights) -> Iterator[Matrix | npt.NDArray[np.float32]]:
    """All matrices, norms and biases."""
    groups: tuple[Weights | LayerWeights, ...] = (weights, *weights.layers)
    for group in groups:
        values = (getattr(group, field.name) for field in fields(group))
        yield from (value for value in values if isinstance(value, Matrix | np.ndarray))


class Source(Protocol):
    """Where the weights of a model come from, by the fields of Weights and LayerWeights.

    index is the layer's number, None outside of the layers.
    """

    def matrix(self, field: str, index: int | None = None) -> Matrix: ...

    def bias(self, field: str, index: int | None = None) -> Vector: ...

    def norm(self, field: str, kind: Norm, index: int | None = None) -> tuple[Vector | None, Vector | None]: ...


def load_weights(checkpoint: Checkpoint, config: ModelConfig) -> Weights:
    """All weights of a model; matrices are still in their files.

    Raises TfmError for a tensor that is missing, of another shape or dtype than config tells, or one too many.
    """
    loader = _Loader(checkpoint, config)
    weights = gather(loader, config)
    loader.refuse_extra()
    return weights


def gather(source: Source, config: ModelConfig) -> Weights:
    """All weights that a model of this config has, from source."""
    norm, norm_bias = source.norm("norm", config.final_norm)
    return Weights(
        embed_tokens=source.matrix("embed_tokens"),
        layers=tuple(_gather_layer(source, config.layers[index], index) for index in range(config.num_hidden_layers)),
        position_embeddings=source.matrix("position_embeddings").dequantize() if config.position == "learned" else None,
        norm=norm,
        norm_bias=norm_bias,
        lm_head=None if config.tie_word_embeddings else source.matrix("lm_head"),
        lm_head_bias=source.bias("lm_head") if config.unembed_bias else None,
    )


def _gather_layer(source: Source, layer: LayerConfig, index: int) -> LayerWeights:
    matrices = ["q_proj", "k_proj", "v_proj", "o_proj"]
    biases = ["q_proj", "k_proj", "v_proj", "o_proj"] if layer.attention_bias else []
    norms = ["attn_norm"]
    if layer.intermediate_size:
        mlp = ["gate_proj", "up_proj", "down_proj"] if layer.gated else ["up_proj", "down_proj"]
        matrices += mlp
        biases += mlp if layer.mlp_bias else []
        norms += ["mlp_norm"]
    found: dict[str, Any] = {field: source.matrix(field, index) for field in matrices}
    found |= {field.replace("_proj", "_bias"): source.bias(field, index) for field in biases}
    for field in norms:
        found[field], found[f"{field}_bias"] = source.norm(field, layer.norm, index)
    return LayerWeights(**found)


def shapes(config: ModelConfig, index: int | None) -> dict[str, tuple[int, int]]:
    """[outputs, inputs] of every matrix in a layer, or of those outside of the layers."""
    hidden = config.hidden_size
    if index is None:
        vocabulary, positions = (config.vocab_size, hidden), (config.max_position_embeddings, hidden)
        found = {"embed_tokens": vocabulary, "lm_head": vocabulary}
        return found | ({"position_embeddings": positions} if config.position == "learned" else {})
    layer = config.layers[index]
    inner = layer.intermediate_size
    query, key_value = layer.num_attention_heads * layer.head_dim, layer.num_key_value_heads * layer.head_dim
    found = {"q_proj": (query, hidden), "k_proj": (key_value, hidden), "v_proj": (key_value, hidden)}
    found |= {"o_proj": (hidden, query), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return found | ({"gate_proj": (inner, hidden)} if layer.gated else {})


class _Loader:
    """Takes tensors out of a checkpoint by the fields of Weights and LayerWeights, and notes which were taken."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.architecture = ARCHITECTURES[config.model_type]
        self.taken: set[str] = set()
        prefixes = list(self.architecture.prefixes)
        embedding = self.architecture.modules["embed_tokens"] + ".weight"
        there = [prefix for prefix in prefixes if embedding.format(p=prefix) in checkpoint.tensors]
        self.prefix = there[0] if there else prefixes[0]

    def matrix(self, field: str, index: int | None = None) -> Matrix:
        """The matrix of a field, in the layer index or outside of the layers."""
        module, columns = self.module(field, index), shapes(self.config, index)[field][1]
        first, rows, total = self.rows(field, index)
        name = f"{module}.weight"
        transposed = index is not None and self.architecture.prefixes[self.prefix]
        shown = name if rows == total else f"{name}[{first}:{first + rows}]"
        affine = self.config.quantization.of(module, self.checkpoint) if self.config.quantization else None
        if affine is not None:
            if transposed:
                found = f"{affine.bits}-bit groups along the outputs of a matrix stored [in, out]"
                raise TfmError(self.checkpoint.where(name), found, "groups along the inputs, as mlx-lm writes them")
            weight, scales, biases, dtype = load_affine(self.checkpoint, module, total, columns, affine)
            self.taken |= {name, f"{module}.scales", f"{module}.biases"}
            format_ = QUANTIZED_FORMATS[affine.bits]
            weight, scales, biases = (table.part(first, rows) for table in (weight, scales, biases))
            kind = SCALE_TYPES[dtype]
            return Matrix(shown, format_, rows, columns, weight, scales, biases, kind, affine.group_size)
        weight = self.take(name, (columns, total) if transposed else (total, columns))
        weight = (weight.transposed if transposed else weight).part(first, rows)
        format_ = FLOAT_FORMATS[self.checkpoint.tensors[name].dtype]
        return Matrix(shown, format_, rows, columns, weight, is_stored_transposed=transposed)

    def bias(self, field: str, index: int | None = None) -> Vector:
        """The bias of a field's matrix."""
        first, rows, total = self.rows(field, index)
        return to_float32(self.take(f"{self.module(field, index)}.bias", (total,)).part(first, rows)[:])

    def norm(self, field: str, kind: Norm, index: int | None = None) -> tuple[Vector | None, Vector | None]:
        """Weight and bias of a norm, as far as this kind has them."""
        module, shape = self.module(field, index), (self.config.hidden_size,)
        weight = None if kind == "none" else to_float32(self.take(f"{module}.weight", shape)[:])
        return weight, to_float32(self.take(f"{module}.bias", shape)[:]) if kind == "layer" else None

    def take(self, name: str, shape: tuple[int, ...]) -> StoredRows:
        self.taken.add(name)
        return self.checkpoint.checked(name, tuple(FLOAT_FORMATS), shape)

    def module(self, field: str, index: int | None) -> str:
        return self.architecture.modules[field].format(p=self.prefix, i=index)

    def rows(self, field: str, index: int | None) -> tuple[int, int, int]:
        """First row and number of rows of a field in its module, and the rows that the module has in all."""
        sizes_of, modules = shapes(self.config, index), self.architecture.modules
        together = [other for other in modules if modules[other] == modules[field] and other in sizes_of]
        sizes = [sizes_of[other][0] for other in together]
        place = together.index(field)
        return sum(sizes[:place]), sizes[place], sum(sizes)

    def refuse_extra(self) -> None:
        """Refuse tensors that no field took: the model has parts that would be left out."""
        layers = range(self.config.num_hidden_layers)
        ignored = {name.format(p=self.prefix, i=index) for name in self.architecture.ignored for index in layers}
        extra = sorted(self.checkpoint.tensors.keys() - self.taken - ignored)
        if self.config.tie_word_embeddings:
            extra = [name for name in extra if not self.repeats_embedding(name)]
        if extra:
            others = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
            found = f"a tensor that a {self.config.model_type} with this config.json does not have{others}"
            remedy = "config.json and the weights must belong together"
            raise TfmError(self.checkpoint.where(extra[0]), found, do=remedy)

    def repeats_embedding(self, name: str) -> bool:
        """Whether a tensor of the unembedding is the embedding's once more, as some tied checkpoints have it."""
        module, _, kind = name.rpartition(".")
        original = f"{self.module('embed_tokens', None)}.{kind}"
        if module != self.module("lm_head", None) or original not in self.checkpoint.tensors:
            return False
        if not self.checkpoint.are_same(name, original):
            found = f"other values than {original}, while tie_word_embeddings is true"
            raise TfmError(self.checkpoint.where(name), found, do="set tie_word_embeddings to false in config.json")
        return True
