"""Keys and values in a file: the same bits as computed ones, or none at all, and nothing of the user's is lost."""

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import checkpoints
import numpy as np
import pytest
from safetensors import safe_open

from tfm.engine import Model, TfmError, load, prompt_cache
from tfm.kernels.new_file import PREFIX

CONFIG = {**checkpoints.LLAMA, "bos_token_id": None, "eos_token_id": None}  # heads of 10, padded to 16
IDS = checkpoints.random_ids(CONFIG, 200)
BLOCK = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_checkpoint(tmp_path_factory.mktemp("tiny"), CONFIG)


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    loaded = load(folder, threads=2)
    yield loaded
    loaded.close()


@pytest.fixture
def file(model: Model, tmp_path: Path) -> Path:
    """What was saved of IDS: 3 blocks."""
    path = tmp_path / "prompt.cache"
    save(path, model, IDS)
    return path


def save(path: Path, model: Model, ids: list[int]) -> int:
    with model.sequence() as sequence:
        model.step([(sequence, ids)], "none")
        return prompt_cache.save(path, model, sequence)


def check(path: Path, model: Model, ids: list[int], restored: int, note: str | None = None) -> None:
    """What is taken from the file, the warning, and that the logits after it are those of a run from nothing."""
    in_use = model.pool.blocks_in_use
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with model.sequence() as sequence:
            assert prompt_cache.restore(path, model, sequence, ids) == restored
            assert sequence.ids == ids[:restored]
            assert model.pool.blocks_in_use == in_use + restored // BLOCK
            logits = model.step([(sequence, ids[restored:])], "all")
    assert logits.tobytes() == model.logits(ids)[restored:].tobytes()
    assert model.pool.blocks_in_use == in_use
    texts = [str(warning.message) for warning in caught]
    if note is None:
        assert texts == []
    else:
        (text,) = texts
        assert text.startswith(f"prompt cache {path}: {note}")
        assert text.endswith("; the prompt is computed anew")


def other_model(folder: Path, kv_type: str = "f16") -> Model:
    return load(folder, threads=1, kv_type=kv_type)


@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8"])
def test_restored_equals_computed(folder: Path, tmp_path: Path, kv_type: str) -> None:
    """Guards a block put back in another place, cut short or of another type: not a bit of the logits may differ.

    What was saved token by token, on two threads, is restored on one.
    """
    path = tmp_path / "prompt.cache"
    model = load(folder, threads=2, kv_type=kv_type)
    with model.sequence() as sequence:
        for id_ in IDS:
            model.step([(sequence, [id_])], "none")
        assert prompt_cache.save(path, model, sequence) == 192
    model.close()
    one = other_model(folder, kv_type)
    check(path, one, IDS, 192)
    check(path, one, [*IDS[:150], *IDS[:50]], 128)
    one.close()


@pytest.mark.parametrize(("length", "restored"), [(65, 64), (128, 64), (129, 128), (193, 192), (200, 192)])
def test_one_token_is_left_to_run(model: Model, file: Path, length: int, restored: int) -> None:
    """Guards a prompt that is in the file whole: without a token to run there are no logits to go on from."""
    check(file, model, IDS[:length], restored)


def test_too_little_in_common(model: Model, file: Path) -> None:
    """Guards an option that does nothing without a word."""
    check(file, model, IDS[:64], 0, "begins with 63 tokens of the prompt, and a block has 64")
    told = "begins with 1 tokens of the prompt, and a block has 64 (what prompts have in common must come first"
    check(file, model, [IDS[0], IDS[1] ^ 1, *IDS[2:]], 0, told)


def test_no_file_is_the_first_run(model: Model, tmp_path: Path) -> None:
    check(tmp_path / "none", model, IDS, 0)


def test_blocks_for_whoever_wants_them(model: Model, file: Path) -> None:
    """Guards blocks that are lost to the pool: the caller is their one user."""
    ids, blocks = prompt_cache.load_blocks(file, model)
    assert (ids, len(blocks)) == (IDS[:192], 3)
    assert not any(map(model.pool.is_shared, blocks))
    for block in blocks:
        model.pool.give(block)
    ids, blocks = prompt_cache.load_blocks(file, model, most=1)
    assert (ids, len(blocks)) == (IDS[:64], 1)
    model.pool.give(blocks[0])


def test_memory_that_ends_is_an_error(folder: Path, file: Path) -> None:
    """Guards blocks that stay taken, and memory that is called a damaged file."""
    model = other_model(folder)
    model.pool.limit = 2
    with pytest.raises(TfmError, match="no room for more keys and values"):
        prompt_cache.load_blocks(file, model)
    assert model.pool.blocks_in_use == 0
    model.close()


# ------------------------------------------------------------------------------------------------ what differs


def test_weights_changed_by_one_byte(folder: Path, file: Path, tmp_path: Path) -> None:
    """Guards keys and values of a model that was trained on since: its name and its sizes are the same."""
    changed = tmp_path / "model"
    shutil.copytree(folder, changed)
    data = bytearray((changed / "model.safetensors").read_bytes())
    data[-1000] ^= 1
    (changed / "model.safetensors").write_bytes(data)
    model = other_model(changed)
    check(file, model, IDS, 0, "made with other weights;")
    model.close()


def test_config_changed(folder: Path, file: Path, tmp_path: Path) -> None:
    """Guards an epsilon or a rope setting, which changes every key and no weight."""
    changed = tmp_path / "model"
    shutil.copytree(folder, changed)
    text = (changed / "config.json").read_text()
    (changed / "config.json").write_text(text.replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-04'))
    model = other_model(changed)
    check(file, model, IDS, 0, "made with other weights;")
    model.close()


def test_a_copy_of_the_model_is_the_same_model(folder: Path, file: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    model = other_model(tmp_path / "copy")
    check(file, model, IDS, 192)
    model.close()


def test_other_model_and_kv_type(file: Path, tmp_path: Path) -> None:
    """Guards blocks of another size; one note tells everything that differs."""
    config = {**CONFIG, "num_hidden_layers": 2}
    model = other_model(checkpoints.write_checkpoint(tmp_path / "other", config), "q8")
    check(file, model, IDS, 0, "made with other weights, and with --kv-type f16, not q8;")
    model.close()


def test_other_kv_type_of_the_same_size(folder: Path, file: Path) -> None:
    model = other_model(folder, "f32")
    check(file, model, IDS, 0, "made with --kv-type f16, not f32;")
    model.close()


@pytest.mark.parametrize(
    ("field", "value", "note"),
    [
        ("kernels", "0" * 24, "made by another version of the kernels or on another CPU;"),
        ("version", "2", "made by another version of tfm;"),
        ("kv_type", "f32", "made with --kv-type f32, not f16;"),
        ("weights", "f" * 24, "made with other weights;"),
    ],
)
def test_metadata_that_differs(model: Model, file: Path, field: str, value: str, note: str) -> None:
    """Guards files of another CPU, whose sums may differ in the last bit, and of another layout."""
    data = file.read_bytes()
    changed = re.sub(rf'"{field}":"\w+"'.encode(), f'"{field}":"{value}"'.encode(), data)
    assert len(changed) == len(data) != 0
    assert changed != data
    file.write_bytes(changed)
    check(file, model, IDS, 0, note)


def test_metadata_is_bound_to_the_blocks(folder: Path, model: Model, file: Path, tmp_path: Path) -> None:
    """Guards a file that is exchanged between its header and its data are read: of another model, of the same sizes."""
    other = other_model(checkpoints.write_checkpoint(tmp_path / "other", CONFIG, seed=5))
    theirs = tmp_path / "theirs"
    save(theirs, other, IDS)
    other.close()
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    file.write_bytes(file.read_bytes()[:header] + theirs.read_bytes()[header:])
    check(file, model, IDS, 0, "damaged;")


# ------------------------------------------------------------------------------------------------ damage


def test_every_bit_counts(model: Model, file: Path) -> None:
    """Guards a flipped bit anywhere, in the header, ids, blocks or digests: what is taken is right, bit for bit."""
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    blocks = begin + 8 * 192
    expected = data[blocks:]
    rng = np.random.default_rng(1)
    places = [5, 9, 40, begin - 1, begin, blocks - 1, blocks, len(data) - 97, len(data) - 1]
    for place in [*places, *rng.integers(begin, len(data), 40).tolist()]:
        damaged = bytearray(data)
        damaged[place] ^= 1 << int(rng.integers(8))
        file.write_bytes(damaged)
        with warnings.catch_warnings(record=True) as caught, model.sequence() as sequence:
            warnings.simplefilter("always")
            restored = prompt_cache.restore(file, model, sequence, IDS)
            taken = b"".join(prompt_cache._memory(model, block).tobytes() for block in sequence.blocks)
        assert len(caught) == (restored == 0)
        # A token that is another one is where the texts part: what stands before it is good.
        is_id = begin <= place < blocks
        assert restored == ((place - begin) // 8 // BLOCK * BLOCK if is_id else 0)
        assert expected.startswith(taken)


@pytest.mark.parametrize("part", [0.001, 0.01, 0.5, 0.999])
def test_cut_short(model: Model, file: Path, part: float) -> None:
    """Guards a copy that broke off: a note, and the next save mends it."""
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * part)])
    check(file, model, IDS, 0, "damaged;")
    prompt_cache.check_path(file)
    save(file, model, IDS)
    assert file.read_bytes() == data


def test_longer_than_it_says(model: Model, file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")
    check(file, model, IDS, 0, "damaged;")


def test_shapes_that_make_no_sense(model: Model, file: Path) -> None:
    """Guards a header of the right size that was edited."""
    data = file.read_bytes()
    for old, new in ((b'"ids"', b'"idx"'), (b'"I64"', b'"F64"'), (b'"shape":[192]', b'"shape":[19] ')):
        assert old in data
        file.write_bytes(data.replace(old, new))
        check(file, model, IDS, 0, "damaged;")


def test_empty_file(model: Model, file: Path) -> None:
    """`mktemp` makes one, and it was called damaged: nothing is in it yet, and it is written to. It stays private."""
    file.write_bytes(b"")
    file.chmod(0o600)
    prompt_cache.check_path(file)
    check(file, model, IDS, 0)
    save(file, model, IDS)
    check(file, model, IDS, len(IDS) // BLOCK * BLOCK)
    assert file.stat().st_mode & 0o777 == 0o600


# ------------------------------------------------------------------------------------------------ saving


def test_other_programs_can_read_it(model: Model, file: Path) -> None:
    """Guards a file that only tfm takes for safetensors."""
    with safe_open(file, "numpy") as opened:
        assert opened.metadata()["format"] == "tfm prompt cache"
        assert opened.get_tensor("ids").tolist() == IDS[:192]
        assert opened.get_tensor("blocks").shape == (3, model.pool.block_bytes)


@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8"])
def test_nothing_else_of_memory_gets_into_the_file(folder: Path, tmp_path: Path, kv_type: str) -> None:
    """Guards other texts: heads are padded to 16 elements, and what no kernel writes is what was there before."""
    files = []
    for filling in (0x00, 0xA5):
        model = other_model(folder, kv_type)
        blocks = [model.pool.take() for _ in range(4)]
        for block in blocks:
            prompt_cache._memory(model, block)[:] = filling
            model.pool.give(block)
        files.append(tmp_path / f"{filling}")
        assert save(files[-1], model, IDS) == 192
        model.close()
    assert files[0].read_bytes() == files[1].read_bytes()


def test_what_is_there_already_is_not_written_again(model: Model, file: Path) -> None:
    """Guards a long text in the file that a run with its beginning replaces, and writing that gains nothing."""
    before = file.stat()
    assert save(file, model, IDS) == 192
    assert save(file, model, IDS[:130]) == 128
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    check(file, model, IDS, 192)


def test_other_text_replaces_it(model: Model, file: Path) -> None:
    other = IDS[::-1]
    assert save(file, model, other) == 192
    check(file, model, other, 192)


def test_damaged_data_are_written_again(model: Model, file: Path) -> None:
    """Guards a file that is taken for whole because its ids and digests are: it would never be mended."""
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :])
    save(file, model, IDS)
    assert file.read_bytes() == data


def test_too_short_to_save(model: Model, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="not saved, 63 tokens fill no block of 64"):
        assert save(tmp_path / "cache", model, IDS[:63]) == 0
    assert os.listdir(tmp_path) == []


def test_rights(model: Model, tmp_path: Path) -> None:
    """Guards a file that nobody else may read though the umask says so, and one whose rights a person took away."""
    path = tmp_path / "cache"
    old = os.umask(0o027)
    try:
        save(path, model, IDS)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o600)
        save(path, model, IDS[::-1])
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(old)


def test_a_link_is_followed(model: Model, tmp_path: Path) -> None:
    """Guards a link that becomes a file, while what it led to stays as it was."""
    (tmp_path / "far").mkdir()
    link = tmp_path / "link"
    link.symlink_to("far/cache")
    for ids in (IDS, IDS[::-1]):
        save(link, model, ids)
        assert link.is_symlink()
        check(link, model, ids, 192)
    assert os.listdir(tmp_path / "far") == ["cache"]


FOREIGN = {
    "text": b"Dear diary, this must not be lost.",
    "safetensors": b"\x3c\0\0\0\0\0\0\0" + b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.ljust(60) + b"\0",
    "a short file": b"abc",
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_another_file_is_never_overwritten(model: Model, tmp_path: Path, kind: str) -> None:
    """Guards a mistyped name: the file of that name was the user's work."""
    path = tmp_path / "file"
    path.write_bytes(FOREIGN[kind])
    check(path, model, IDS, 0, "something else than a prompt cache;")
    begin = re.escape(repr(FOREIGN[kind][:12]))
    words = (
        rf"prompt cache .*file: found a file of {len(FOREIGN[kind])} bytes that begins with {begin}; .*not overwritten"
    )
    for attempt in (lambda: prompt_cache.check_path(path), lambda: save(path, model, IDS)):
        with pytest.raises(TfmError, match=words):
            attempt()
    assert path.read_bytes() == FOREIGN[kind]
    assert os.listdir(tmp_path) == ["file"]


def test_places_where_nothing_can_be(model: Model, tmp_path: Path) -> None:
    """Guards an answer that took an hour and then cannot be kept: all this is known before the model is loaded."""
    (tmp_path / "text").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    places = {
        "none/cache": "its folder .*none: found nothing there; allowed: a folder; make it, with mkdir -p",
        "text/cache": "its folder .*text: found a file; allowed: a folder",
        ".": "found a folder; allowed: a regular file",
        "pipe": "found a named pipe; allowed: a regular file",
        "loop": "cannot be read",
        "x" * 300: "cannot be read",
    }
    for place, words in places.items():
        for attempt in (prompt_cache.check_path, lambda path: save(path, model, IDS)):
            with pytest.raises(TfmError, match=words):
                attempt(tmp_path / place)
    with pytest.raises(TfmError, match="found a device"):
        prompt_cache.check_path(Path("/dev/null"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become someone else")
def test_rights_that_are_missing() -> None:
    """Guards a refusal after the answer only, and a file that a person made read-only."""
    with tempfile.TemporaryDirectory() as name:  # not tmp_path: only root may enter what it lies in
        root = Path(name)
        root.chmod(0o777)
        (root / "closed").mkdir()
        (root / "file").write_bytes(b"")
        (root / "file").chmod(0o444)
        for path in (root / "closed/cache", root / "file"):
            if (child := os.fork()) == 0:
                os.setresuid(65534, 65534, 65534)
                try:
                    prompt_cache.check_path(path)
                except TfmError as error:
                    os._exit(0 if "found no right to write" in str(error) else 1)
                os._exit(2)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


SAVES = """
import resource, signal, sys
from pathlib import Path
from tfm.engine import TfmError, load, prompt_cache
folder, path, limit = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
model = load(folder, threads=1)
ids = [[(start + i * i) % 97 for i in range(900)] for start in (1, 2)]
sequences = [model.sequence() for _ in ids]
for sequence, text in zip(sequences, ids):
    model.step([(sequence, text)], "none")
if limit:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
print("ready", flush=True)
try:
    for i in range(2 if limit else 100_000):
        prompt_cache.save(path, model, sequences[i % 2])
except TfmError as error:
    sys.exit(str(error))
"""


def saving(folder: Path, path: Path, limit: int = 0) -> "subprocess.Popen[str]":
    """A process that saves two texts in turn without end, or until it may not write more than limit bytes."""
    command = [sys.executable, "-c", SAVES, str(folder), str(path), str(limit)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_no_room(folder: Path, model: Model, file: Path) -> None:
    """Guards a full disk (here: files that may not grow): one line, the old file whole, and no remains."""
    before = file.read_bytes()
    process = saving(folder, file, limit=300_000)
    error = process.communicate()[1]
    assert process.returncode == 1
    assert re.fullmatch(r"prompt cache .*: cannot be written: found File too large; make room, .*\n", error)
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


def test_killed_while_saving(folder: Path, model: Model, tmp_path: Path) -> None:
    """Guards a half-written file: there is the old one or the new one, whole, and what else is left is swept away."""
    path = tmp_path / "cache"
    rests = 0
    for i in range(6):
        process = saving(folder, path)
        end_s = time.monotonic() + 20
        while not path.exists() and time.monotonic() < end_s:
            time.sleep(0.001)
        time.sleep(0.003 * (i + 1))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        rests += len(list(tmp_path.glob(f"{PREFIX}*")))
        ids = prompt_cache.load_blocks(path, model)
        assert len(ids[0]) == 896
        for block in ids[1]:
            model.pool.give(block)
        save(path, model, IDS)
        assert os.listdir(tmp_path) == ["cache"]
        check(path, model, IDS, 192)
        path.unlink()


def test_two_processes_at_once(folder: Path, model: Model, tmp_path: Path) -> None:
    """Guards a mix of two files, and one process's sweeping away what the other one writes."""
    path = tmp_path / "cache"
    processes = [saving(folder, path) for _ in range(2)]
    while not path.exists():
        time.sleep(0.001)
    for _ in range(50):
        ids, blocks = prompt_cache.load_blocks(path, model)
        assert len(ids) == 896
        for block in blocks:
            model.pool.give(block)
    for process in processes:
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate()
