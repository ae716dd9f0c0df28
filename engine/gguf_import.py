"""A GGUF file made into a checkpoint folder, without loss: the arrays, config.json, the tokenizer.

gguf_plans.py says which GGUF tensor becomes which checkpoint tensor, with which rows in which order. Matrices of block
types become MLX affine ones (see quantized/gguf_blocks.py), float ones stay as they are.
"""

import json
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tfm.engine.checkpoint_writer import PendingTensor, write_safetensors
from tfm.engine.errors import TfmError
from tfm.engine.gguf_file import GgufFile
from tfm.engine.gguf_plans import Move, Plan, plan_of, shape_of, token_ids
from tfm.engine.gguf_tokenizer import tokenizer_files
from tfm.engine.progress import Progress, silent
from tfm.engine.quantized.gguf_blocks import BLOCK_TYPES, GROUP_SIZE, Blocks

FLOAT_TYPES = ("F32", "F16", "BF16")


def import_gguf(gguf: Path, out: Path, progress: Progress = silent) -> None:
    """Write the model in gguf to the new folder out, which appears whole or not at all."""
    progress(f"reading {gguf.name}", 0, None)
    file = GgufFile(gguf)
    plan = plan_of(file)
    _check_tensors(file, plan)
    staging = out.with_name(f".{out.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        quantization, tensors = _tensors(file, plan)
        config = plan.config | ({"quantization": quantization} if quantization else {})
        texts = tokenizer_files(file, vocab_size=config["vocab_size"])
        texts["config.json"] = _json(config)
        texts["generation_config.json"] = _json(token_ids(file))
        for name, text in texts.items():
            (staging / name).write_text(text, encoding="utf-8")
        metadata = {"format": "mlx" if quantization else "pt"}
        write_safetensors(staging / "model.safetensors", tensors, metadata, progress, f"importing {gguf.name}")
        os.rename(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _check_tensors(file: GgufFile, plan: Plan) -> None:
    for move in plan.moves:
        shape = shape_of(file, move.source)
        wanted = (move.source_rows or move.shape[0], *move.shape[1:])
        if shape != wanted:
            raise TfmError(f"{file.path}: tensor {move.source}: shape", list(shape), list(wanted))
        kind = file.tensors[move.source].tensor_type.name
        if kind not in BLOCK_TYPES and kind not in FLOAT_TYPES:
            allowed = ", ".join((*FLOAT_TYPES, *BLOCK_TYPES))
            raise TfmError(f"{file.path}: tensor {move.source}: type", kind, allowed, "use a file of another type")
    used = {move.source for move in plan.moves} | {"rope_freqs.weight", "output.weight"}
    for name in file.tensors:
        if name not in used:
            raise TfmError(f"{file.path}: tensor {name}", "a tensor that this architecture does not have")


def _tensors(file: GgufFile, plan: Plan) -> tuple[dict[str, Any], list[PendingTensor]]:
    """config.json's `quantization` (empty when no matrix is quantised) and all tensors, to be made when written."""
    bits: dict[str, int] = {}
    pending: list[PendingTensor] = []
    for move in plan.moves:
        kind = file.tensors[move.source].tensor_type.name
        if kind in BLOCK_TYPES and not move.table and len(move.shape) == 2:
            module = move.target.removesuffix(".weight")
            bits[module] = BLOCK_TYPES[kind].bits
            pending.extend(_affine(file, move, module))
        else:
            if len(move.shape) == 2 and not move.table:
                bits[move.target.removesuffix(".weight")] = 0
            dtype = kind if kind in FLOAT_TYPES else "F32"
            pending.append(PendingTensor(move.target, dtype, move.shape, partial(_floats, file, move)))
    return _quantization(bits), pending


def _floats(file: GgufFile, move: Move) -> npt.NDArray[np.generic]:
    tensor, stored = file.tensors[move.source], file.data(move.source)
    kind = tensor.tensor_type.name
    if kind in BLOCK_TYPES:
        from gguf.quants import dequantize

        data: npt.NDArray[np.generic] = dequantize(stored, tensor.tensor_type)
    else:
        data = stored.view("<u2") if kind == "BF16" else stored
    return move.take(data)


def _affine(file: GgufFile, move: Move, module: str) -> Iterator[PendingTensor]:
    block_type = BLOCK_TYPES[file.tensors[move.source].tensor_type.name]
    rows, columns = move.shape
    whole = Blocks(block_type, file.data(move.source))
    if not whole.is_finite():
        raise TfmError(f"{file.path}: tensor {move.source}", "a scale that is not a number", "finite scales")
    dtype, numpy_dtype = ("F16", np.float16) if whole.fits_float16() else ("F32", np.float32)

    def blocks() -> Blocks:
        return Blocks(block_type, move.take(file.data(move.source)))

    words, groups = columns * block_type.bits // 32, columns // GROUP_SIZE
    yield PendingTensor(f"{module}.weight", "U32", (rows, words), lambda: blocks().weight())
    yield PendingTensor(f"{module}.scales", dtype, (rows, groups), lambda: blocks().scales(numpy_dtype))
    yield PendingTensor(f"{module}.biases", dtype, (rows, groups), lambda: blocks().biases(numpy_dtype))


def _quantization(bits: dict[str, int]) -> dict[str, Any]:
    """config.json's `quantization`: the commonest width, an entry for each module that differs, false for floats."""
    widths = [width for width in bits.values() if width]
    if not widths:
        return {}
    common = max(sorted(set(widths)), key=widths.count)
    quantization: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": common, "mode": "affine"}
    for module, width in bits.items():
        if width == 0:
            quantization[module] = False
        elif width != common:
            quantization[module] = {"group_size": GROUP_SIZE, "bits": width, "mode": "affine"}
    return quantization
