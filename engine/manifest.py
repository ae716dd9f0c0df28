"""What an imported model's folder consists of, noted when it is made, so that damage is seen before it is used.

tfm_source.json: {"ref": what the user calls the model, "files": {name: {"size_bytes", "sha256"}}}
"""

import hashlib
import json
from pathlib import Path
from typing import Any

SOURCE_FILE = "tfm_source.json"
SMALL_BYTES = 1 << 16
"""Files up to this size are always compared byte for byte: it costs nothing."""


def write_manifest(folder: Path, ref: str) -> None:
    """Note what the user calls the model, and its files as they are now."""
    files = {
        path.name: {"size_bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(folder.iterdir())
    }
    text = json.dumps({"ref": ref, "files": files}, indent=2, ensure_ascii=False)
    (folder / SOURCE_FILE).write_text(text + "\n", encoding="utf-8")


def source_of(folder: Path) -> str | None:
    """What the user calls the model in folder, None when it does not say."""
    ref = _read(folder).get("ref")
    return ref if isinstance(ref, str) else None


def fault_of(folder: Path, thorough: bool = False) -> str | None:
    """What is not as it was made: a file's name or size, or a small file's bytes; thorough: any file's. None if whole.

    Without a list of files (an earlier version of tfm made none) a folder counts as faulty.
    """
    files = _read(folder).get("files")
    if not isinstance(files, dict) or not files:
        return f"{SOURCE_FILE} does not list its files"
    for name, entry in files.items():
        path = folder / name
        try:
            size_bytes = path.stat().st_size
            if size_bytes != entry["size_bytes"]:
                return f"{name} has {size_bytes} bytes and not {entry['size_bytes']}"
            if (thorough or size_bytes <= SMALL_BYTES) and _sha256(path) != entry["sha256"]:
                return f"{name} has changed"
        except FileNotFoundError:
            return f"{name} is not there"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        except (TypeError, KeyError):
            return f"{SOURCE_FILE} is damaged"
    return None


def _read(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / SOURCE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
