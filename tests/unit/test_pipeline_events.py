"""The socket between a stage and the runner, with stages in processes of their own."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from spec_compat.pipeline.run.events import (
    Doing,
    Event,
    Events,
    Finished,
    Note,
    RunnerGone,
    channel,
)

SENDER = """
import subprocess, sys
from pathlib import Path
from spec_compat.pipeline.run.events import Events, Finished

events = Events(Path(sys.argv[1]))
events.doing("working", 2)
for done in range(1, 3):
    events.progress(done, done * 10)
events.note("n" * 200_000)
events.send(Finished(result={"rows": 2}))
print(subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True).stdout)
"""
RANK = """
import sys
from pathlib import Path
from spec_compat.pipeline.run.events import Events

events = Events(Path(sys.argv[1]))
for number in range(400):
    events.note(sys.argv[2] * 20_000 + str(number))
"""


def test_events_arrive_whole_and_in_order_and_are_inherited_by_nobody(tmp_path: Path) -> None:
    received: list[Event] = []
    output = tmp_path / "output"
    with channel() as events, output.open("w") as stream:
        command = [sys.executable, "-c", SENDER, str(events.path)]
        with subprocess.Popen(command, stdout=stream) as process:
            while process.poll() is None:
                received += events.receive(0.1)
            received += events.receive(0)
        assert process.returncode == 0
        path = events.path
    assert [event.event for event in received] == [
        "doing", "progress", "progress", "note", "finished",
    ]  # fmt: skip
    assert received[0] == Doing(text="working", total=2)
    assert received[3] == Note(text="n" * 200_000)
    assert received[4] == Finished(result={"rows": 2})
    assert output.read_text().count("socket:") == 0
    assert not path.exists()


def test_long_events_of_ranks_that_send_at_once_are_not_mixed_up() -> None:
    """As when several ranks report many checkpoints: each record is longer than a pipe's atom."""
    received: list[Event] = []
    with channel() as events:
        ranks = [
            subprocess.Popen([sys.executable, "-c", RANK, str(events.path), name]) for name in "ab"
        ]
        while any(rank.poll() is None for rank in ranks):
            received += events.receive(0.05)
        received += events.receive(0)
    assert [rank.returncode for rank in ranks] == [0, 0]
    for name in "ab":
        texts = [e.text for e in received if isinstance(e, Note) and e.text.startswith(name)]
        assert texts == [name * 20_000 + str(number) for number in range(400)]


def test_a_sender_that_is_killed_in_the_middle_of_an_event_spoils_no_other() -> None:
    with channel() as events:
        whole, cut = Events(events.path), Events(events.path)
        list(events.receive(0))
        half = "import os, socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
        half += "s.sendall((1000).to_bytes(4, 'big') + b'half'); os._exit(9)"
        subprocess.run([sys.executable, "-c", half, str(events.path)], check=False)
        whole.note("whole")
        cut.note("too")
        assert {e.text for e in events.receive(0.1) if isinstance(e, Note)} == {"whole", "too"}


def test_nobody_waits_for_a_runner_that_is_gone() -> None:
    with channel() as events:
        path, sender = events.path, Events(events.path)
        list(events.receive(0))
    with pytest.raises(RunnerGone):
        sender.note("n" * 1_000_000)
    with pytest.raises(RunnerGone):
        Events(path)


@pytest.mark.parametrize("name", ["d" * 120, "\N{CJK UNIFIED IDEOGRAPH-76EE}" * 30])
def test_a_long_name_of_the_temporary_directory_is_no_hindrance(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket's name has 107 bytes at most, and a letter up to four of them."""
    with tempfile.TemporaryDirectory() as short:
        long = Path(short, name)
        long.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(long))
        with channel() as events:
            Events(events.path).note("arrives")
            assert list(events.receive(1)) == [Note(text="arrives")]


def test_without_a_path_nothing_is_sent() -> None:
    events = Events()
    events.doing("working")
    events.note("no one hears it")
