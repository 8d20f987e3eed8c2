"""Whether the verifier fits on the GPUs, and the pause of a server that holds them.

A vLLM that finds less free memory than it may take ends minutes after it was started, with a
message that names neither the model that is being served nor how to stop it.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError

from spec_compat.errors import UserError
from spec_compat.pipeline.inputs.verifier import Verifier
from spec_compat.pipeline.run.config import ResolvedConfig, flag
from spec_compat.pipeline.run.stage import Stage
from spec_compat.pipeline.system.gpus import Gpu, visible
from spec_compat.pipeline.system.units import size

ANSWER_SECONDS = 2.0
# A server may need this long to stop, and again to give its memory back; one that does not come up
# again mostly ends at once.
STOP_SECONDS = 180.0
RESTART_SECONDS = 5.0
UNNAMED, KEY_WANTED = "a model that it does not name", (401, 403)


class ServingPause:
    """Stops a server before the stages that use GPUs, and starts it again at exit."""

    def __init__(self, config: ResolvedConfig, say: Callable[[str], None]) -> None:
        self._config = config
        self._say = say
        self._stopped = False

    def __enter__(self) -> ServingPause:
        return self

    def before(self, stage: Stage[Any]) -> None:
        """Stop the server if there is a command for it. Raises UserError if nothing fits then."""
        config = self._config
        if not stage.gpus:
            return
        if config.stop_server_cmd and not self._stopped and served(config.server_url):
            self._stop(config.stop_server_cmd)
        stage.check(config)

    def _stop(self, command: str) -> None:
        self._say("stopping the server")
        self._stopped = True  # even half stopped, or interrupted, it is to come back
        # A file, not a pipe: what the command leaves running may keep that open.
        with tempfile.TemporaryFile() as said:
            try:
                done = subprocess.run(  # noqa: S602
                    command,
                    shell=True,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                    timeout=STOP_SECONDS,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise UserError(
                    f"{flag('stop_server_cmd')}: it has not ended after {STOP_SECONDS:.0f} seconds"
                ) from None
            said.seek(0)
            lines = said.read().decode("utf-8", errors="replace").strip().splitlines()
        if done.returncode:
            because = f": {lines[-1]}" if lines else ""
            raise UserError(
                f"{flag('stop_server_cmd')}: it ended with exit code {done.returncode}{because}"
            )
        deadline = time.monotonic() + STOP_SECONDS
        while served(self._config.server_url) or held(self._config, visible()):
            if time.monotonic() > deadline:
                raise UserError(
                    f"{flag('stop_server_cmd')}: after {STOP_SECONDS:.0f} seconds the server still "
                    "answers or holds the GPUs"
                )
            time.sleep(0.5)

    def __exit__(self, *error: object) -> None:
        command = self._config.restart_server_cmd
        if not self._stopped or not command:
            return
        self._say("starting the server again")
        # It may be the server itself, and goes on when the run has ended.
        process = subprocess.Popen(  # noqa: S602
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = process.wait(RESTART_SECONDS)
        except subprocess.TimeoutExpired:
            return
        if code:
            self._say(f"{flag('restart_server_cmd')}: it ended with exit code {code}")


def check_fits(config: ResolvedConfig, gpus: list[Gpu]) -> None:
    """Raises UserError when the weights do not fit, or something else holds the memory."""
    if not gpus:
        return
    if len(gpus) < config.tensor_parallel_size:
        raise UserError(
            f"{flag('tensor_parallel_size')} {config.tensor_parallel_size}: there are {len(gpus)} "
            "GPUs"
        )
    gpus = gpus[: config.tensor_parallel_size]  # vLLM takes the first ones
    least, share = min(gpu.total for gpu in gpus), config.gpu_memory_utilization
    verifier = Verifier(config.model, config.trust_remote_code)
    weights = verifier.weight_bytes // config.tensor_parallel_size
    if weights > share * least:
        raise UserError(
            f"--model {config.model}: its weights take {size(weights)} of each GPU, "
            f"--gpu-memory-utilization {share:g} allows {size(int(share * least))} of {size(least)}"
        )
    if gpu := held(config, gpus):
        problem = (
            f"--gpu-memory-utilization {share:g} needs {size(int(share * gpu.total))}, "
            f"{size(gpu.free)} of {size(gpu.total)} are free"
        )
        if models := served(config.server_url):
            raise UserError(
                f"{config.server_url} serves {', '.join(models)} and holds the GPUs: {problem}; "
                f"stop it, or give {flag('stop_server_cmd')}"
            )
        raise UserError(f"the GPUs are in use: {problem}")


def held(config: ResolvedConfig, gpus: list[Gpu]) -> Gpu | None:
    """The first of vLLM's GPUs with less free memory than it is allowed to take."""
    share = config.gpu_memory_utilization
    taken = gpus[: config.tensor_parallel_size]
    return next((gpu for gpu in taken if gpu.free < share * gpu.total), None)


def served(url: str) -> list[str]:
    """The models that a server of the OpenAI kind has at this address; none when none answers.

    One that wants a key, or is too busy to answer, does not name its models.
    """
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    root = url.rstrip("/").removesuffix("/v1")  # as clients of OpenAI's interface are given it
    try:
        with direct.open(f"{root}/v1/models", timeout=ANSWER_SECONDS) as answer:
            content: dict[str, Any] = json.loads(_body(answer))
        return [str(model["id"]) for model in content["data"]]
    except HTTPError as error:
        return [f"{UNNAMED} (HTTP {error.code})"] if error.code in KEY_WANTED else []
    except URLError:  # nobody took the connection
        return []
    except TimeoutError:
        return [f"{UNNAMED} (no answer in time)"]
    except (OSError, HTTPException, ValueError, LookupError, TypeError):
        return []


def _body(answer: Any) -> bytes:
    """All that comes. Raises TimeoutError when that takes too long, however much comes."""
    deadline, body = time.monotonic() + ANSWER_SECONDS, b""
    while piece := answer.read1(1 << 16):
        body += piece
        if time.monotonic() > deadline:
            raise TimeoutError
    return body
