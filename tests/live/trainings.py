"""Runs resume.py many times, in forks of a process that has imported all of it.

    python trainings.py VERIFIER JOBS

JOBS is a JSON list: {"run": directory, "killed_at": see resume.py, "off": patches to undo,
"ranks": processes}, or {"flip": file}, which alters a byte. Prints the exit codes of each job's
ranks, a line `codes [...]` a job; what they said is in the run's `rank_<n>.err`.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import resume
import spec_compat


def main(verifier: str, jobs: list[dict[str, Any]]) -> None:
    for job in jobs:
        if "flip" in job:
            file = Path(job["flip"])
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
            continue
        ranks, port = job.get("ranks", 1), free_port()
        Path(job["run"]).mkdir(parents=True, exist_ok=True)
        started = [start(verifier, job, rank, ranks, port) for rank in range(ranks)]
        print("codes", json.dumps(ended(started)), flush=True)


def start(verifier: str, job: dict[str, Any], rank: int, ranks: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with Path(job["run"], f"rank_{rank}.err").open("w") as stream:
            os.dup2(stream.fileno(), 2)
        if "off" in job:
            spec_compat.undo(*job["off"])
        if ranks > 1:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
        resume.main(verifier, Path(job["run"]), job.get("killed_at", ""))
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def ended(pids: list[int]) -> list[int]:
    """Exit codes of the ranks; when one fails the others are ended, as torchrun does."""
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid]:
            time.sleep(0.2)
            for other in set(pids) - codes.keys():
                os.kill(other, signal.SIGKILL)
    return [codes[pid] for pid in pids]


def free_port() -> int:
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        return int(there.getsockname()[1])


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
