"""A checkpoint folder opens as it lies, read when it is used; a damaged or hostile one is refused before that."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from raw_safetensors import entry, to_bf16, write_raw, write_tensors
from safetensors.numpy import save_file

from tfm.engine.checkpoint import Checkpoint
from tfm.engine.errors import TfmError

A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.arange(4, dtype=np.float16) / 4


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_shards(folder: Path) -> None:
    """Tensor a in the first shard, b in the second."""
    write_tensors(folder / "model-1.safetensors", {"a": A})
    write_tensors(folder / "model-2.safetensors", {"b": B})
    write_index(folder, {"a": "model-1.safetensors", "b": "model-2.safetensors"})


def test_single_file(tmp_path: Path) -> None:
    """What the format's own library writes is read, with its shapes and dtypes."""
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("F16", (4,)),
    }
    np.testing.assert_array_equal(checkpoint.array("a"), A)
    np.testing.assert_array_equal(checkpoint.array("b"), B)
    assert checkpoint.nbytes == A.nbytes + B.nbytes


def test_rows(tmp_path: Path) -> None:
    """Any rows of any part, of a matrix as it lies and of one that lies transposed, are those that NumPy finds."""
    values = np.arange(35, dtype=np.float32).reshape(7, 5)
    write_tensors(tmp_path / "model.safetensors", {"b": B, "values": values})
    stored = Checkpoint(tmp_path).checked("values", ("F32",), (7, 5))
    for rows, expected in (
        (stored, values), (stored.part(2, 4), values[2:6]),
        (stored.transposed, values.T), (stored.transposed.part(1, 3), values.T[1:4]),
    ):  # fmt: skip
        assert rows.nbytes == expected.nbytes
        for wanted in (slice(None), slice(1, 3), slice(0, 0), slice(2, 99), [2, 0, 2]):
            np.testing.assert_array_equal(rows[wanted], expected[wanted])


def test_bfloat16_and_odd_offsets(tmp_path: Path) -> None:
    """BF16 comes as its bits, and a tensor may lie at any byte (old files are not padded)."""
    bits = to_bf16(A)
    header = {"odd": entry("U8", [1], 0, 1), "a": entry("F32", [2, 3], 1, 25), "bf": entry("BF16", [2, 3], 25, 37)}
    write_raw(tmp_path / "model.safetensors", header, b"\x07" + A.tobytes() + bits.tobytes())
    checkpoint = Checkpoint(tmp_path)
    np.testing.assert_array_equal(checkpoint.array("a"), A)
    np.testing.assert_array_equal(checkpoint.array("bf"), bits)


def test_empty_tensor(tmp_path: Path) -> None:
    """A tensor without elements takes no bytes and overlaps nothing."""
    write_tensors(tmp_path / "model.safetensors", {"none": np.empty((0, 3), np.float32), "a": A})
    assert Checkpoint(tmp_path).array("none").shape == (0, 3)


def test_shards(tmp_path: Path) -> None:
    """Tensors are found in the shard that the index names."""
    write_shards(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    np.testing.assert_array_equal(checkpoint.array("b"), B)
    assert checkpoint.tensors["b"].file == tmp_path / "model-2.safetensors"


def test_shard_in_subfolder(tmp_path: Path) -> None:
    """A path that stays in the folder is no attack."""
    (tmp_path / "shards").mkdir()
    write_tensors(tmp_path / "shards" / "one.safetensors", {"a": A})
    write_index(tmp_path, {"a": "shards/one.safetensors"})
    np.testing.assert_array_equal(Checkpoint(tmp_path).array("a"), A)


def test_one_file_of_any_name(tmp_path: Path) -> None:
    """A folder with a single safetensors file of another name needs no index."""
    write_tensors(tmp_path / "weights.safetensors", {"a": A})
    np.testing.assert_array_equal(Checkpoint(tmp_path).array("a"), A)


def test_hub_cache_links(tmp_path: Path) -> None:
    """The hub's cache keeps files elsewhere and links to them: those links lead out of the folder and are right."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    write_shards(blobs)
    for number, name in enumerate(sorted(os.listdir(blobs))):
        (blobs / name).rename(blobs / str(number))
        (snapshot / name).symlink_to(Path("../../blobs") / str(number))
    np.testing.assert_array_equal(Checkpoint(snapshot).array("b"), B)


@pytest.mark.parametrize("single", [True, False])
def test_link_to_nothing(tmp_path: Path, single: bool) -> None:
    """A download that was broken off leaves a link without its file."""
    name = "model.safetensors" if single else "model-2.safetensors"
    if not single:
        write_shards(tmp_path)
        (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("../../blobs/gone")
    with pytest.raises(TfmError, match=f"{name}: found a link to a file that is gone"):
        Checkpoint(tmp_path)


DAMAGE: dict[str, tuple[object, bytes, str]] = {
    "not JSON": (b"{a}", b"", "header: not JSON"),
    "not UTF-8": (b'{"\xff": 1}', b"", "header: not JSON"),
    "too deep": (b'{"a":' + b"[" * 100_000, b"", "header: not JSON"),
    "not an object": ([], b"", "header: found []"),
    "name twice": (b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}', b"", "header: found 'a' twice"),
    "entry not an object": ({"a": 3}, b"", "tensor a: dtype"),
    "dtype": ({"a": entry("F99", [1], 0, 4)}, bytes(4), 'tensor a: dtype: found "F99" | BF16'),
    "dtype not text": ({"a": {"dtype": ["F32"]}}, b"", 'tensor a: dtype: found ["F32"]'),
    "negative shape": ({"a": entry("F32", [-1], 0, 4)}, bytes(4), "tensor a: shape: found [-1]"),
    "shape of truth": ({"a": entry("F32", [True], 0, 4)}, bytes(4), "tensor a: shape: found [true]"),
    "offsets of another size": ({"a": entry("F32", [2], 0, 4)}, bytes(4), "a: data_offsets: found [0, 4] | 8 bytes"),
    "offsets backwards": ({"a": entry("F32", [1], 4, 0)}, bytes(4), "tensor a: data_offsets: found [4, 0]"),
    "offsets before the data": ({"a": entry("F32", [1], -4, 0)}, bytes(4), "tensor a: data_offsets: found [-4, 0]"),
    "offsets not whole": ({"a": entry("U8", [1], 0, 1.0)}, bytes(1), "tensor a: data_offsets: found [0, 1.0]"),
    "shape beyond any machine": ({"a": entry("F32", [2**62, 2**62], 0, 4)}, bytes(4), "tensor a: data_offsets"),
    "overlap": (
        {"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)},
        bytes(12),
        "overlap | b begins 4 bytes before a ends",
    ),
    "same place": ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)}, bytes(4), "overlap"),
    "gap": ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 8, 12)}, bytes(12), "tensor b | 4 bytes that belong"),
    "truncated": (
        {"a": entry("F32", [1], 0, 4), "b": entry("F32", [2], 4, 12)},
        bytes(11),
        "cut short in tensor b | download the file again",
    ),
    "longer than its tensors": ({"a": entry("F32", [1], 0, 4)}, bytes(7), "after the last tensor: found 3 more bytes"),
}
"""A header, the data after it, and what the error must say."""


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("sharded", [False, True])
def test_damaged_file(tmp_path: Path, damage: str, sharded: bool) -> None:
    """Every way in which a header can lie is found when the folder opens, naming the file and the tensor."""
    header, data, words = DAMAGE[damage]
    path = write_raw(tmp_path / ("one.safetensors" if sharded else "model.safetensors"), header, data)
    if sharded:
        write_index(tmp_path, {"a": path.name})
    with pytest.raises(TfmError) as error:
        Checkpoint(tmp_path)
    for word in (str(path), *words.split(" | ")):
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", r"cut short: found 0 bytes"),
        (b"\x10\0\0\0", r"cut short: found 4 bytes"),
        (b"\xe8\x03" + bytes(6) + b"{}", r"header: found 1000 bytes; allowed: 2, to the end of the file"),
        (b"\xff" * 8 + b"{}", r"header: found 18446744073709551615 bytes"),
        (b"<!DOCTYPE html><html></html>", r"header: found .* is it a safetensors file\?"),
    ],
)
def test_header_longer_than_file(tmp_path: Path, content: bytes, words: str) -> None:
    """The length in front of the header is not trusted: nothing of that size is read or allocated."""
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(TfmError, match=rf"model\.safetensors: {words}"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "shard",
    ["/etc/hostname", "../other.safetensors", "s/../../other", "..\\other.safetensors", "C:\\", "\0", "", 5, "s" * 999],
)
def test_shard_outside(tmp_path: Path, shard: object) -> None:
    """An index from the internet must not make tfm open files elsewhere on the machine."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_tensors(tmp_path / "other.safetensors", {"a": A})
    write_index(folder, {"a": shard})
    with pytest.raises(TfmError, match=r"index\.json: tensor a: file: found .*in the folder"):
        Checkpoint(folder)
    with pytest.raises(TfmError, match=r"^.{0,400}$"):
        Checkpoint(folder)


def test_shard_missing(tmp_path: Path) -> None:
    """The shard is named, and the remedy."""
    write_shards(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(TfmError, match=r"shard .*model-2\.safetensors: found nothing there.*download"):
        Checkpoint(tmp_path)


def test_index_and_shards_disagree(tmp_path: Path) -> None:
    """A tensor that is not where the index says, or in two places, is not guessed at."""
    write_shards(tmp_path)
    write_index(tmp_path, {"a": "model-2.safetensors", "b": "model-1.safetensors"})
    with pytest.raises(TfmError, match=r"model-2\.safetensors: tensor a: found in model-1\.safetensors"):
        Checkpoint(tmp_path)
    write_index(tmp_path, {"a": "model-1.safetensors", "c": "model-2.safetensors"})
    with pytest.raises(TfmError, match=r"model-2\.safetensors: tensor c: found in no shard"):
        Checkpoint(tmp_path)
    write_tensors(tmp_path / "model-2.safetensors", {"a": A, "b": B})
    write_index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    with pytest.raises(TfmError, match=r"model-2\.safetensors: tensor a: found in model-1\.safetensors too"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_index_damaged(tmp_path: Path, content: str) -> None:
    """An index that tells of no tensor is a fault of the index."""
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(TfmError, match=r"model\.safetensors\.index\.json"):
        Checkpoint(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    """What is there instead is said: weights of another kind, or several files and no index."""
    with pytest.raises(TfmError, match="no weights"):
        Checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(TfmError, match=r"only pytorch_model\.bin"):
        Checkpoint(tmp_path)
    for name in ("one.safetensors", "two.safetensors"):
        write_tensors(tmp_path / name, {"a": A})
    with pytest.raises(TfmError, match="and no index"):
        Checkpoint(tmp_path)
    with pytest.raises(TfmError, match=r"model folder .*: found nothing there"):
        Checkpoint(tmp_path / "nowhere")
