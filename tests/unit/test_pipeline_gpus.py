"""Room for the verifier: what is weighed, and a server that is stopped and comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from spec_compat.errors import UserError
from spec_compat.pipeline.run import servers as gpus
from spec_compat.pipeline.run.config import ResolvedConfig
from spec_compat.pipeline.run.servers import MIB, Gpu, Room

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


def config(model: Path | str = "./m", **options: Any) -> ResolvedConfig:
    decided = {"seq_length": 8, "layer_ids": (0, 1, 2, 3), "draft_vocab_size": 8}
    given = {"model": str(model), "data": ("d.jsonl",), "output": "run", "server_url": NOBODY}
    return ResolvedConfig.model_validate(given | decided | options)


def test_a_server_tells_its_models(server: str) -> None:
    for end in ("", "/", "/v1", "/v1/"):
        assert gpus.served(f"{server}{end}") == ["org/m"]
    assert gpus.served(NOBODY) == []
    assert gpus.served("nonsense") == []


def test_weights_that_do_not_fit_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.truncate(10 * GIB)  # a hole: no disk is used
    room = [Gpu(10 * GIB, 10 * GIB)]
    with pytest.raises(UserError, match=r"weights take 10.7 GB of each GPU, --gpu-.* allows 8.6"):
        gpus.check(config(tmp_path), room)
    gpus.check(config(tmp_path, tensor_parallel_size=2), room * 2)
    gpus.check(config(tmp_path), [Gpu(20 * GIB, 20 * GIB), *room])  # vLLM takes the first
    gpus.check(config(tmp_path), [])


def test_memory_that_somebody_holds_is_named(server: str) -> None:
    full = [Gpu(10 * GIB, 10 * GIB), Gpu(10 * GIB, GIB)]
    with pytest.raises(UserError, match=r"GPUs are in use: --gpu-.* needs 8.6 GB, 1.1 GB of 10.7"):
        gpus.check(config(tensor_parallel_size=2), full)
    with pytest.raises(UserError, match=r"serves org/m and holds .*; stop it, or give --stop-ser"):
        gpus.check(config(server_url=server, tensor_parallel_size=2), full)


def test_the_gpus_are_those_that_cuda_would_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    listed = "2, GPU-a, 81559, 1024\\n5, GPU-b, 81559, 81000\\n"
    tool.write_text(f"#!/bin/sh\necho $* > $0.asked\nprintf '{listed}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,2")
    assert gpus.visible() == [Gpu(81559 * MIB, 81000 * MIB), Gpu(81559 * MIB, 1024 * MIB)]
    tool.write_text(tool.read_text().replace("81559, 1024", "[N/A], [N/A]"))
    assert gpus.visible() == []
    assert (tmp_path / "nvidia-smi.asked").read_text().endswith(" -i 5,2\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus.visible() == []


def test_the_server_makes_room_and_comes_back_after_a_failure(server: str, tmp_path: Path) -> None:
    up = tmp_path / "up"
    options = {"stop_server_cmd": f"rm {up}", "restart_server_cmd": f"touch {up}"}
    said: list[str] = []
    room = Room(config(server_url=server, **options), said.append)

    def fail() -> None:
        with room:
            room.make("prepare")
            assert up.exists()
            room.make("extract")
            assert not up.exists()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert up.exists()
    assert said == ["stopping the server", "starting the server again"]


def test_a_server_that_does_not_answer_is_not_started(tmp_path: Path) -> None:
    up = tmp_path / "up"
    with Room(config(stop_server_cmd="false", restart_server_cmd=f"touch {up}"), print) as room:
        room.make("extract")
    assert not up.exists()


def test_a_command_that_cannot_stop_it_is_one_line(server: str) -> None:
    with (
        pytest.raises(UserError, match="--stop-server-cmd: it ended with exit code 3: no such"),
        Room(config(server_url=server, stop_server_cmd="echo no such >&2; exit 3"), print) as room,
    ):
        room.make("train")
