"""A small server on this machine that speaks the hub's API: one repository, several revisions, ranges, tokens."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

REPO = "tiny/model"


def commit_of(files: dict[str, bytes]) -> str:
    """A commit hash that depends on names and contents."""
    return hashlib.sha1(repr(sorted(files.items())).encode(), usedforsecurity=False).hexdigest()


def digest_of(name: str, content: bytes) -> str:
    """By which the hub names a file: SHA-256 for weights, git's own for small files."""
    if name.endswith(".safetensors"):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


class HubServer(ThreadingHTTPServer):
    """branches: revision name -> its files. requests: what was asked, as "METHOD path", in order.

    token: demanded of every request when set. gated: the repository's files are refused. break_once: names of files
    whose first download ends half-way. held: names of files that stop half-way until go_on is set.
    """

    daemon_threads: ClassVar[bool] = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.branches = {"main": files}
        self.token: str | None = None
        self.gated = False
        self.break_once: set[str] = set()
        self.held: set[str] = set()
        self.go_on = threading.Event()
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def downloads(self) -> list[str]:
        """The files whose contents were asked for, in order."""
        return [path.split("/", 5)[-1] for path in self.requests if path.startswith("GET") and "/resolve/" in path]

    def files(self, revision: str) -> dict[str, bytes] | None:
        by_commit = {commit_of(files): files for files in self.branches.values()}
        return self.branches.get(revision) or by_commit.get(revision)


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0].strip("/")
        if self.server.token and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self._fault(401, "RepoNotFound")
        elif path in (f"api/models/{REPO}", f"{REPO}"):
            self._info("main")
        elif path.startswith(f"api/models/{REPO}/revision/"):
            self._info(path.rpartition("/")[2])
        elif path.startswith(f"api/models/{REPO}/tree/"):
            self._tree(path.rpartition("/")[2])
        elif path.startswith(f"{REPO}/resolve/"):
            revision, _, name = path.removeprefix(f"{REPO}/resolve/").partition("/")
            self._file(revision, name)
        else:
            self._fault(404, "RepoNotFound")

    def _info(self, revision: str) -> None:
        files = self.server.files(revision)
        if files is None:
            return self._fault(404, "RevisionNotFound")
        siblings = [{"rfilename": name} for name in files]
        return self._json({"id": REPO, "modelId": REPO, "sha": commit_of(files), "siblings": siblings})

    def _tree(self, revision: str) -> None:
        files = self.server.files(revision)
        if files is None:
            return self._fault(404, "RevisionNotFound")
        return self._json(
            [
                {"type": "file", "path": name, "size": len(content), "oid": digest_of(name, content)}
                for name, content in files.items()
            ]
        )

    def _file(self, revision: str, name: str) -> None:
        files = self.server.files(revision)
        if self.server.gated:
            return self._fault(403, "GatedRepo")
        if files is None:
            return self._fault(404, "RevisionNotFound")
        if name not in files:
            return self._fault(404, "EntryNotFound")
        content = files[name]
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("ETag", f'"{digest_of(name, content)}"')
        self.send_header("X-Repo-Commit", commit_of(files))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - first))
        if "Range" in self.headers:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return None
        half = (first + len(content)) // 2
        self.wfile.write(content[first:half])
        if name in self.server.break_once:
            self.server.break_once.remove(name)
            self.close_connection = True
            return None
        if name in self.server.held:
            self.server.go_on.wait(timeout=30)
        self.wfile.write(content[half:])
        return None

    def _json(self, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _fault(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", f"{code} says the server")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""
