"""The sources are taken out of a wheel, and no more than is needed."""

from __future__ import annotations

import random
import re
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

from tests.contract.upstream import wheel as module

SOURCE = "def answer():\n    return 42\n"


class Server:
    """An index of one file; `sent` counts the bytes that it gave out."""

    def __init__(self, content: bytes, ranges: bool) -> None:
        self.sent = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                first, last = map(int, asked.groups()) if asked and ranges else (0, len(content))
                part = content[first : last + 1]
                self.send_response(206 if asked and ranges else 200)
                self.send_header("Content-Length", str(len(part)))
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
                self.end_headers()
                self.wfile.write(part)
                outer.sent += len(part)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/demo-1.0-py3-none-any.whl"


@contextmanager
def serving(content: bytes, ranges: bool) -> Iterator[Server]:
    server = Server(content, ranges)
    thread = threading.Thread(target=server.http.serve_forever)
    thread.start()
    yield server
    server.http.shutdown()
    thread.join()
    server.http.server_close()


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(module, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(module, "BLOCK", 1 << 12)
    return module


@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "whole files alone"])
def test_the_sources_and_the_metadata_are_taken(
    ranges: bool, sources: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "demo.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("demo/part.py", SOURCE)
        archive.writestr("demo/kernels.so", random.Random(0).randbytes(300_000))
        archive.writestr("demo/third_party/other.py", SOURCE)
        archive.writestr("demo-1.0.dist-info/METADATA", "Name: demo\nVersion: 1.0\n")
    with serving(wheel.read_bytes(), ranges) as server:
        monkeypatch.setattr(sources, "url_of", lambda distribution, version: server.url)
        target = sources.fetch("demo", "1.0")
        assert sources.fetch("demo", "1.0") == target
    found = {str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()}
    assert found == {"METADATA", "demo/part.py"}
    assert (target / "demo" / "part.py").read_text() == SOURCE
    assert (server.sent < 30_000) == ranges
