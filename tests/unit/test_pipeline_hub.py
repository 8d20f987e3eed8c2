"""A verifier of the Hub: a file that it does not have, and one that cannot be asked for.

The Hub is a server on this machine, and huggingface_hub is the installed one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from spec_compat.pipeline.inputs.weights import INDEX

COMMIT = "0123456789" * 4
CONFIG = {"model_type": "llama", "num_hidden_layers": 8, "hidden_size": 64, "vocab_size": 512}
SHARDS = {"weight_map": {"a": "model-1.safetensors"}, "metadata": {"total_size": 594_000}}
# What a process of its own says of org/m: it reads its environment when it imports huggingface_hub.
ASK = """
import json
from spec_compat.errors import UserError
from spec_compat.pipeline.inputs.verifier import Verifier
try:
    model = Verifier("org/m")
    print(json.dumps([model.geometry.num_layers, model.commit, model.weight_bytes]))
except UserError as error:
    print(json.dumps(str(error)))
"""


class Hub:
    """The repository org/m: `files` by name, and the `failures` of others, as (status, code)."""

    def __init__(self) -> None:
        self.files = {"config.json": CONFIG, INDEX: SHARDS}
        self.failures: dict[str, tuple[int, str]] = {}
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                name = self.path.rpartition("/")[2]
                hub.asked.append(name)
                content = json.dumps(hub.files.get(name)).encode()
                status, code = 200, ""
                if name in hub.failures:
                    status, code = hub.failures[name]
                elif name not in hub.files:
                    status, code = 404, "EntryNotFound"
                self.send_response(status)
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("ETag", f'"{name}"')
                self.send_header("Content-Length", str(len(content) if status == 200 else 0))
                if code:
                    self.send_header("X-Error-Code", code)
                self.end_headers()
                if self.command == "GET" and status == 200:
                    self.wfile.write(content)

            do_GET = do_HEAD  # noqa: N815

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("localhost", 0), Handler)
        Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://localhost:{self.server.server_port}"

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    yield made
    made.stop()


def ask(hub: Hub, home: Path, **environment: str) -> Any:
    """Layers, commit and bytes of weights, or the line of the error."""
    online = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.address, "HF_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env={**os.environ, **online, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_weights_of_the_hub_are_weighed_before_they_are_here(hub: Hub, tmp_path: Path) -> None:
    assert ask(hub, tmp_path) == [8, COMMIT, 594_000]


def test_a_file_that_the_repository_does_not_have_is_none(hub: Hub, tmp_path: Path) -> None:
    del hub.files[INDEX]
    assert ask(hub, tmp_path) == [8, COMMIT, 0]
    assert INDEX in hub.asked
    # A commit never changes: once known, it is not asked again.
    hub.asked.clear()
    assert ask(hub, tmp_path) == [8, COMMIT, 0]
    assert INDEX not in hub.asked


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        ((500, ""), "500 Server Error"),
        ((403, "GatedRepo"), "GatedRepoError: 403 Client Error"),
        ((401, ""), "401 Client Error"),
        ((404, "RepoNotFound"), "RepositoryNotFoundError: 404 Client Error"),
    ],
)
def test_a_file_that_the_hub_does_not_give_is_an_error(
    failure: tuple[int, str], says: str, hub: Hub, tmp_path: Path
) -> None:
    hub.failures[INDEX] = failure
    line = ask(hub, tmp_path)
    assert line.startswith(f"--model org/m: whether it has a {INDEX} is not known (")
    assert says in line
    assert line.endswith("go on with what has been downloaded by HF_HUB_OFFLINE=1")
    assert "\n" not in line


def test_a_hub_that_is_gone_is_an_error_until_offline_is_asked_for(
    hub: Hub, tmp_path: Path
) -> None:
    del hub.files[INDEX]
    hub.failures[INDEX] = (500, "")
    ask(hub, tmp_path)
    hub.stop()
    assert "ConnectionError" in ask(hub, tmp_path) or "ConnectError" in ask(hub, tmp_path)
    assert ask(hub, tmp_path, HF_HUB_OFFLINE="1") == [8, COMMIT, 0]


def test_offline_a_download_is_what_it_was(hub: Hub, tmp_path: Path) -> None:
    assert ask(hub, tmp_path) == ask(hub, tmp_path, HF_HUB_OFFLINE="1")
    line = ask(hub, tmp_path / "empty", HF_HUB_OFFLINE="1")
    assert line.startswith("--model org/m: no such directory, and not available as a Hugging Face")


def test_a_cache_that_cannot_be_written_is_an_error(hub: Hub, tmp_path: Path) -> None:
    ask(hub, tmp_path, HF_HUB_OFFLINE="1")
    (tmp_path / "file").touch()
    line = ask(hub, tmp_path / "file" / "home")
    assert "NotADirectoryError: [Errno 20] Not a directory" in line
    assert "\n" not in line
