"""Whatever answers at --server-url: vLLM, vLLM with a key, something else, nothing at all."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from spec_compat.errors import UserError
from spec_compat.pipeline.run import config as options
from spec_compat.pipeline.run import servers as gpus
from spec_compat.pipeline.run.layout import STAGES
from spec_compat.pipeline.run.servers import Gpu, Room
from tests.unit.test_pipeline_gpus import GIB, config

FULL = [Gpu(10 * GIB, GIB)]
MODELS = json.dumps({"data": [{"id": "org/m"}]}).encode()
SOON = 1.0

Answer = Callable[[socket.socket], object]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server in a thread of this process is slow to answer on a busy machine."""
    monkeypatch.setattr(gpus, "ANSWER_SECONDS", 15 * SOON)


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
        monkeypatch.setattr(gpus, "ANSWER_SECONDS", SOON)
    begun = time.monotonic()
    with answering(answer) as url, pytest.raises(UserError, match=expected) as refused:
        gpus.check(config(server_url=url), FULL)
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
        Room(config(server_url=url, **asked), print) as room,
    ):
        room.make("extract")
    assert stopped.exists()


def test_a_server_that_does_not_stop_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "STOP_SECONDS", SOON)
    with (
        answering(says("200 OK", MODELS)) as url,
        pytest.raises(UserError, match="the server still answers or holds the GPUs"),
        Room(config(server_url=url, stop_server_cmd="true"), print) as room,
    ):
        room.make("extract")


def test_a_command_that_does_not_end_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that asks for a password."""
    monkeypatch.setattr(gpus, "STOP_SECONDS", SOON)
    back = tmp_path / "back"
    asked = {"stop_server_cmd": "exec sleep 60", "restart_server_cmd": f"touch {back}"}
    with (
        answering(says("200 OK", MODELS)) as url,
        pytest.raises(UserError, match="--stop-server-cmd: it has not ended after 1 seconds"),
        Room(config(server_url=url, **asked), print) as room,
    ):
        room.make("extract")
    assert back.exists()


def test_what_a_command_says_may_be_anything(tmp_path: Path) -> None:
    """Bytes that are no text, and a process that keeps its output open."""
    command = r"printf 'caf\351\n' >&2; sleep 30 & exit 4"
    begun = time.monotonic()
    with (
        answering(says("200 OK", MODELS)) as url,
        pytest.raises(UserError, match=r"--stop-server-cmd: it ended with exit code 4: caf."),
        Room(config(server_url=url, stop_server_cmd=command), print) as room,
    ):
        room.make("extract")
    assert time.monotonic() - begun < 20


def test_a_server_comes_back_when_the_run_is_stopped_while_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = tmp_path / "back"

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    asked = {"stop_server_cmd": "true", "restart_server_cmd": f"touch {back}"}
    with answering(says("200 OK", MODELS)) as url:
        room = Room(config(server_url=url, **asked), print)
        monkeypatch.setattr(gpus.subprocess, "run", interrupted)
        with pytest.raises(KeyboardInterrupt), room:
            room.make("train")
    assert back.exists()


def test_only_the_gpus_that_vllm_would_take_are_looked_at() -> None:
    """It takes the first ones; what runs on the others is nobody's concern."""
    free, taken = Gpu(10 * GIB, 10 * GIB), Gpu(10 * GIB, GIB)
    gpus.check(config(), [free, taken])
    with pytest.raises(UserError, match="the GPUs are in use"):
        gpus.check(config(tensor_parallel_size=2), [free, taken])
    with pytest.raises(UserError, match=r"--tensor-parallel-size 4: there are 2 GPUs"):
        gpus.check(config(tensor_parallel_size=4), [free, taken])


def test_a_server_that_does_not_come_back_is_said(tmp_path: Path) -> None:
    up, said = tmp_path / "up", list[str]()
    asked = {"stop_server_cmd": f"touch {up}; false", "restart_server_cmd": "exit 7"}
    with (
        answering(says("200 OK", MODELS)) as url,
        pytest.raises(UserError),
        Room(config(server_url=url, **asked), said.append) as room,
    ):
        room.make("train")
    assert up.exists()
    assert said[-1] == "--restart-server-cmd: it ended with exit code 7"


def test_memory_is_looked_at_before_the_verifier_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not before the other stages, which take what is there."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 0, GPU-a, 81559, 1024\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with Room(config(), print) as room:
        for stage in STAGES[:1] + STAGES[2:]:
            room.make(stage)
        with pytest.raises(UserError, match="the GPUs are in use"):
            room.make("extract")
