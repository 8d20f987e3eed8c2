"""The named pipe between a stage and the runner, with a stage in a process of its own."""

import subprocess
import sys
from pathlib import Path

from spec_compat.pipeline.run.events import Event, Events, channel

SENDER = """
import subprocess, sys
from pathlib import Path
from spec_compat.pipeline.run.events import Events

events = Events(Path(sys.argv[1]))
events.doing("working", 2)
for done in range(1, 3):
    events.progress(done, done * 10)
events.note("n" * 200_000)
events.result(rows=2)
print(subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True).stdout)
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
    assert [event["event"] for event in received] == [
        "doing", "progress", "progress", "note", "result",
    ]  # fmt: skip
    assert received[0] == {"event": "doing", "text": "working", "total": 2, "unit": "rows"}
    assert len(received[3]["text"]) == 200_000
    assert received[4]["record"] == {"rows": 2}
    assert str(path) not in output.read_text()
    assert not path.exists()


def test_without_a_path_nothing_is_sent() -> None:
    events = Events()
    events.doing("working")
    events.failed("crash", "no one hears it")
