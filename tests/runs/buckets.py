"""A folder that plays Google Cloud Storage: its files through fsspec, its arrays through a server for TensorStore."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import urllib.parse
from pathlib import Path

PRELUDE = """
import sys
import fsspec
from fsspec.implementations.local import LocalFileSystem

class Bucket(LocalFileSystem):
    protocol = "gs"
    def __init__(self, **options):
        super().__init__(auto_mkdir=True)
    @classmethod
    def _strip_protocol(cls, path):
        path = str(path)
        name = path.removeprefix("gs:").strip("/").removeprefix(sys.argv[1].strip("/")).strip("/")
        return f"{sys.argv[1]}/{name}"
    def glob(self, path, **options):
        return [found.removeprefix(f"{sys.argv[1]}/") for found in super().glob(path, **options)]

for name in ("gs", "gcs"):
    fsspec.register_implementation(name, Bucket, clobber=True)
"""
"""Makes gs:// the folder that is the script's first word."""


class Server(http.server.BaseHTTPRequestHandler):
    """What TensorStore uses of the JSON API of Google Cloud Storage, on a folder."""

    root: Path

    def do_GET(self) -> None:
        url = urllib.parse.urlparse(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        bucket, _, name = url.path.removeprefix("/storage/v1/b/").partition("/o")
        path = self.root / bucket / urllib.parse.unquote(name.lstrip("/"))
        if not name.strip("/"):
            self._answer(self._listing(self.root / bucket, query.get("prefix", "")))
        elif not path.is_file():
            self._answer(b"", 404)
        elif query.get("alt") == "media":
            self._media(path)
        else:
            self._answer(json.dumps(self._described(path, name.lstrip("/"))).encode())

    def do_POST(self) -> None:
        url = urllib.parse.urlparse(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        bucket = url.path.removeprefix("/upload/storage/v1/b/").partition("/o")[0]
        path = self.root / bucket / query["name"]
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if query.get("ifGenerationMatch") == "0" and path.exists():
            self._answer(b"", 412)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        self._answer(json.dumps(self._described(path, query["name"])).encode())

    def do_DELETE(self) -> None:
        bucket, _, name = urllib.parse.urlparse(self.path).path.removeprefix("/storage/v1/b/").partition("/o/")
        (self.root / bucket / urllib.parse.unquote(name)).unlink(missing_ok=True)
        self._answer(b"", 204)

    def _media(self, path: Path) -> None:
        content, total, code = path.read_bytes(), path.stat().st_size, 200
        headers = {"x-goog-generation": str(path.stat().st_mtime_ns)}
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start = int(first) if first else total - int(last)
            stop = int(last) + 1 if first and last else total
            content, code = content[start:stop], 206
            headers["Content-Range"] = f"bytes {start}-{min(stop, total) - 1}/{total}"
        self._answer(content, code, headers)

    def _listing(self, folder: Path, prefix: str) -> bytes:
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        return json.dumps({"items": [self._described(folder / n, n) for n in names if n.startswith(prefix)]}).encode()

    def _described(self, path: Path, name: str) -> dict[str, str]:
        when = "2030-01-01T00:00:00.000Z"
        generation = str(path.stat().st_mtime_ns)
        size = str(path.stat().st_size)
        return {"name": name, "size": size, "generation": generation, "timeCreated": when, "updated": when}

    def _answer(self, body: bytes, code: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def run_script(script: str, root: Path) -> str:
    """Run a Python script to which gs://bucket is the folder root/bucket; returns its stdout, and fails if it fails."""
    handler = type("Handler", (Server,), {"root": root, "protocol_version": "HTTP/1.1"})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (root / "bucket").mkdir(exist_ok=True)
    environment = os.environ | {
        "TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{server.server_port}",
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "XLA_FLAGS": "",
    }
    words = [sys.executable, "-c", PRELUDE + script, str(root)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False, cwd=root)
    server.shutdown()
    server.server_close()
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
