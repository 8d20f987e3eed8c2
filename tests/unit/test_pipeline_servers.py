"""Whatever answers at --server-url: vLLM, vLLM with a key, something else, nothing at all."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from spec_compat.errors import UserError
from spec_compat.pipeline.run import config as options
from spec_compat.pipeline.run import servers
from spec_compat.pipeline.run.config import ResolvedConfig
from spec_compat.pipeline.run.servers import ServingPause
from spec_compat.pipeline.stages import EXTRACT, PREPARE, STAGES, TRAIN
from spec_compat.pipeline.system.gpus import Gpu
from tests.unit.nvml import FakeNvml

GIB = 1 << 30
NOBODY = "http://localhost:1"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A server of the OpenAI kind that is up while the file `up` is there."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            there = self.path == "/v1/models" and (tmp_path / "up").exists()
            self.send_response(200 if there else 503)
            self.end_headers()
            self.wfile.write(json.dumps({"object": "list", "data": [{"id": "org/m"}]}).encode())

        def log_message(self, *args: object) -> None:
            pass

    (tmp_path / "up").touch()
    running = ThreadingHTTPServer(("localhost", 0), Handler)
    Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://localhost:{running.server_port}"
    running.shutdown()
    running.server_close()


def config(model: Path | str = ".", **options: Any) -> ResolvedConfig:
    decided = {"seq_length": 8, "layer_ids": (0, 1, 2, 3), "draft_vocab_size": 8}
    given = {"model": str(model), "data": ("d.jsonl",), "output": "run", "server_url": NOBODY}
    return ResolvedConfig.model_validate(given | decided | options)


FULL = [Gpu(10 * GIB, GIB)]
MODELS = json.dumps({"data": [{"id": "org/m"}]}).encode()
SOON = 1.0

Answer = Callable[[socket.socket], object]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server in a thread of this process is slow to answer on a busy machine."""
    monkeypatch.setattr(servers, "ANSWER_SECONDS", 15 * SOON)


@contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """A server that does this with everybody who connects to it, and then hangs up."""
    listening = socket.create_server(("localhost", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.recv(1 << 16)
                    answer(connection)
                except OSError:
                    pass

    Thread(target=serve, daemon=True).start()
    yield f"http://localhost:{listening.getsockname()[1]}"
    listening.close()


def says(status: str, body: bytes = b"{}") -> Answer:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    return lambda connection: connection.sendall(head + body)


def hangs(connection: socket.socket) -> None:
    time.sleep(60 * SOON)


def drips(connection: socket.socket) -> None:
    """Each byte in time, all of them never."""
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    for _ in range(200):
        connection.sendall(b" ")
        time.sleep(SOON / 3)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (says("200 OK", MODELS), "serves org/m and holds the GPUs"),
        (says("401 Unauthorized"), r"serves a model that it does not name \(HTTP 401\) and holds"),
        (hangs, r"serves a model that it does not name \(no answer in time\) and holds"),
        (drips, r"serves a model that it does not name \(no answer in time\) and holds"),
        (says("404 Not Found"), "the GPUs are in use"),
        (says("502 Bad Gateway"), "the GPUs are in use"),
        (says("200 OK", b"<html>"), "the GPUs are in use"),
        (says("200 OK", b'{"data": [1]}'), "the GPUs are in use"),
        (lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n"), "the GPUs are in use"),
        (lambda connection: None, "the GPUs are in use"),
    ],
)
def test_what_holds_the_gpus_is_said_in_one_line(
    answer: Answer, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if answer in (hangs, drips):
        monkeypatch.setattr(servers, "ANSWER_SECONDS", SOON)
    begun = time.monotonic()
    with answering(answer) as url, pytest.raises(UserError, match=expected) as refused:
        servers.check_fits(config(server_url=url), FULL)
    assert time.monotonic() - begun < 20 * SOON
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["localhost:8000", "file:///etc/passwd", "http://", "http://localhost:80x", ""]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    given = {"model": "m", "data": ["d.jsonl"], "output": "run"}
    with pytest.raises(UserError, match=r"--server-url: an address, as http://localhost:8000, not"):
        options.load({**given, "server_url": url})


def test_a_server_that_wants_a_key_is_stopped_too(tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    asked = {"stop_server_cmd": f"touch {stopped}; exit 1"}
    with (
        answering(says("401 Unauthorized")) as url,
        pytest.raises(UserError, match="--stop-server-cmd: it ended with exit code 1"),
        ServingPause(config(server_url=url, **asked), print) as pause,
    ):
        pause.before(EXTRACT)
    assert stopped.exists()


def test_a_server_that_does_not_stop_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "STOP_SECONDS", SOON)
    with (
        answering(says("200 OK", MODELS)) as url,
        pytest.raises(UserError, match="the server still answers or holds the GPUs"),
        ServingPause(config(server_url=url, stop_server_cmd="true"), print) as pause,
    ):
        pause.before(EXTRACT)


def test_a_command_that_does_not_end_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that asks for a password."""
    monkeypatch.setattr(servers, "STOP_SECONDS", SOON)
    back = tmp_path / "back"
    asked = {"stop_server_cmd": "exec sleep 60", "restart_server_cmd": f"touch {back}"}
    with (
        answering(says("200 OK", MODELS)) as url,
        pytest.raises(UserError, match="--stop-server-cmd: it has not ended after 1 seconds"),
        ServingPause(config(server_url=url, **asked), print) as pause,
    ):
        pause.before(EXTRACT)
    assert back.exists()


def test_what_a_command_says_may_be_anything(tmp_path: Path) -> None:
    """Bytes that are no text, and a process that keeps its output open."""
    command = r"printf 'caf\351\n' >&2; sleep 30 & exit 4"
    begun = time.monotonic()
    with (
        answering(says("200 OK", MODELS)) as url,
        pytest.raises(UserError, match=r"--stop-server-cmd: it ended with exit code 4: caf."),
        ServingPause(config(server_url=url, stop_server_cmd=command), print) as pause,
    ):
        pause.before(EXTRACT)
    assert time.monotonic() - begun < 20


def test_a_server_comes_back_when_the_run_is_stopped_while_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = tmp_path / "back"

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    asked = {"stop_server_cmd": "true", "restart_server_cmd": f"touch {back}"}
    with answering(says("200 OK", MODELS)) as url:
        pause = ServingPause(config(server_url=url, **asked), print)
        monkeypatch.setattr(servers.subprocess, "run", interrupted)
        with pytest.raises(KeyboardInterrupt), pause:
            pause.before(TRAIN)
    assert back.exists()


def test_only_the_gpus_that_vllm_would_take_are_looked_at() -> None:
    """It takes the first ones; what runs on the others is nobody's concern."""
    free, taken = Gpu(10 * GIB, 10 * GIB), Gpu(10 * GIB, GIB)
    servers.check_fits(config(), [free, taken])
    with pytest.raises(UserError, match="the GPUs are in use"):
        servers.check_fits(config(tensor_parallel_size=2), [free, taken])
    with pytest.raises(UserError, match=r"--tensor-parallel-size 4: there are 2 GPUs"):
        servers.check_fits(config(tensor_parallel_size=4), [free, taken])


def test_a_server_that_does_not_come_back_is_said(tmp_path: Path) -> None:
    up, said = tmp_path / "up", list[str]()
    asked = {"stop_server_cmd": f"touch {up}; false", "restart_server_cmd": "exit 7"}
    with (
        answering(says("200 OK", MODELS)) as url,
        pytest.raises(UserError),
        ServingPause(config(server_url=url, **asked), said.append) as pause,
    ):
        pause.before(TRAIN)
    assert up.exists()
    assert said[-1] == "--restart-server-cmd: it ended with exit code 7"


def test_memory_is_looked_at_before_the_verifier_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not before the other stages, which take what is there."""
    FakeNvml(Gpu(10 * GIB, GIB)).install(monkeypatch)
    with ServingPause(config(), print) as pause:
        for stage in STAGES[:1] + STAGES[2:]:
            pause.before(stage)
        with pytest.raises(UserError, match="the GPUs are in use"):
            pause.before(EXTRACT)


def test_a_server_tells_its_models(server: str) -> None:
    for end in ("", "/", "/v1", "/v1/"):
        assert servers.served(f"{server}{end}") == ["org/m"]
    assert servers.served(NOBODY) == []
    assert servers.served("nonsense") == []


def test_weights_that_do_not_fit_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.truncate(10 * GIB)  # a hole: no disk is used
    gpus = [Gpu(10 * GIB, 10 * GIB)]
    with pytest.raises(UserError, match=r"weights take 10.7 GB of each GPU, --gpu-.* allows 8.6"):
        servers.check_fits(config(tmp_path), gpus)
    servers.check_fits(config(tmp_path, tensor_parallel_size=2), gpus * 2)
    servers.check_fits(config(tmp_path), [Gpu(20 * GIB, 20 * GIB), *gpus])  # vLLM takes the first
    servers.check_fits(config(tmp_path), [])


def test_memory_that_somebody_holds_is_named(server: str) -> None:
    full = [Gpu(10 * GIB, 10 * GIB), Gpu(10 * GIB, GIB)]
    with pytest.raises(UserError, match=r"GPUs are in use: --gpu-.* needs 8.6 GB, 1.1 GB of 10.7"):
        servers.check_fits(config(tensor_parallel_size=2), full)
    with pytest.raises(UserError, match=r"serves org/m and holds .*; stop it, or give --stop-ser"):
        servers.check_fits(config(server_url=server, tensor_parallel_size=2), full)


def test_the_server_makes_room_and_comes_back_after_a_failure(server: str, tmp_path: Path) -> None:
    up = tmp_path / "up"
    options = {"stop_server_cmd": f"rm {up}", "restart_server_cmd": f"touch {up}"}
    said: list[str] = []
    pause = ServingPause(config(server_url=server, **options), said.append)

    def fail() -> None:
        with pause:
            pause.before(PREPARE)
            assert up.exists()
            pause.before(EXTRACT)
            assert not up.exists()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert up.exists()
    assert said == ["stopping the server", "starting the server again"]


def test_a_server_that_does_not_answer_is_not_started(tmp_path: Path) -> None:
    up = tmp_path / "up"
    with ServingPause(
        config(stop_server_cmd="false", restart_server_cmd=f"touch {up}"), print
    ) as pause:
        pause.before(EXTRACT)
    assert not up.exists()


def test_a_command_that_cannot_stop_it_is_one_line(server: str) -> None:
    with (
        pytest.raises(UserError, match="--stop-server-cmd: it ended with exit code 3: no such"),
        ServingPause(
            config(server_url=server, stop_server_cmd="echo no such >&2; exit 3"), print
        ) as pause,
    ):
        pause.before(TRAIN)
