"""Signals, and the shared memory that a run leaves when all of it is killed at once."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spec_compat.pipeline.system import processes

SHARE = """
import time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
print(memory.name, flush=True)
time.sleep(60)
"""

Sharing = tuple["subprocess.Popen[str]", Path]


@pytest.fixture
def sharing() -> Iterator[Sharing]:
    """A process in a group of its own, and the file of what it shares."""
    process = subprocess.Popen(
        [sys.executable, "-c", SHARE], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    file = processes.SHARED / process.stdout.readline().strip()
    yield process, file
    kill(process)
    file.unlink(missing_ok=True)


def kill(process: "subprocess.Popen[str]") -> None:
    """With what would clean up after it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_what_nobody_has_any_more_is_given_back(sharing: Sharing, tmp_path: Path) -> None:
    process, file = sharing
    note = tmp_path / ".shared"
    processes.note(note, {process.pid})
    assert processes.give_back(note) == 0
    assert file.exists()
    kill(process)
    assert file.exists()
    assert processes.give_back(note) == 4096
    assert not file.exists()
    assert not note.exists()
    assert processes.give_back(note) == 0


@pytest.mark.parametrize("noted", ["", "[1]", '{"psm_', '{"x": 1}', '{"../etc/passwd": 1}'])
def test_of_a_note_that_is_none_nothing_is_removed(noted: str, tmp_path: Path) -> None:
    (tmp_path / ".shared").write_text(noted)
    assert processes.give_back(tmp_path / ".shared") == 0


def test_another_file_of_that_name_stays(sharing: Sharing, tmp_path: Path) -> None:
    process, file = sharing
    kill(process)
    number = file.stat().st_ino
    (tmp_path / ".shared").write_text(json.dumps({file.name: number + 1}))
    assert processes.give_back(tmp_path / ".shared") == 0
    assert file.exists()
    plain = processes.SHARED / f"spec-compat-test-{os.getpid()}"
    plain.touch()
    try:
        (tmp_path / ".shared").write_text(json.dumps({plain.name: plain.stat().st_ino}))
        assert processes.give_back(tmp_path / ".shared") == 0
        assert plain.exists()
    finally:
        plain.unlink()


@pytest.fixture
def handlers() -> Iterator[None]:
    """Those of before; and all are heard, of which a job in the background ignores some."""
    before = {number: signal.getsignal(number) for number in processes.STOPS}
    for number in before:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("sent", processes.STOPS)
def test_a_second_signal_does_not_interrupt_what_the_first_one_ends(
    sent: signal.Signals, handlers: None
) -> None:
    ended = []

    def work() -> None:
        try:
            signal.raise_signal(sent)
        finally:
            signal.raise_signal(sent)
            ended.append(True)

    with pytest.raises(KeyboardInterrupt), processes.stopped_once():
        work()
    assert ended


def test_a_signal_while_processes_are_given_time_takes_it_from_them(handlers: None) -> None:
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)

    def wait() -> None:
        signal.raise_signal(signal.SIGINT)
        process.wait(60)

    with pytest.raises(KeyboardInterrupt), processes.hastened({process.pid}):
        wait()
    assert process.returncode == -signal.SIGKILL
