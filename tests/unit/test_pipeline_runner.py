"""What the runner decides before it starts a process: stages, environment, devices."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from spec_compat.errors import UserError
from spec_compat.pipeline import entry
from spec_compat.pipeline.rows.index import Index
from spec_compat.pipeline.run import config, display, events, manifest, plan, process, runner
from spec_compat.pipeline.run.display import Display
from spec_compat.pipeline.run.events import Failed, Note
from spec_compat.pipeline.run.layout import Layout
from spec_compat.pipeline.run.lock import locked
from spec_compat.pipeline.run.manifest import Manifest
from spec_compat.pipeline.run.runner import Run
from spec_compat.pipeline.run.stage import selected
from spec_compat.pipeline.stages import STAGES
from spec_compat.pipeline.system import atomic, processes
from spec_compat.pipeline.system.gpus import Gpu
from tests.unit.nvml import FakeNvml
from tests.unit.pipeline_inputs import MADE, make_data, make_verifier


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (None, None, "prepare extract map train export"),
        ("extract", "map", "extract map"),
        ("train", "train", "train export"),
        (None, "prepare", "prepare"),
    ],
)
def test_the_head_is_exported_whenever_it_is_trained(
    first: str | None, last: str | None, expected: str
) -> None:
    assert " ".join(map(str, selected(STAGES, first, last))) == expected


def test_stages_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(UserError, match="--from train comes after --to map"):
        selected(STAGES, "train", "map")


@pytest.mark.parametrize(
    ("plugins", "expected"),
    [(None, None), ("", "spec_compat"), ("a,b", "a,b,spec_compat"), ("spec_compat", "spec_compat")],
)
def test_vllm_always_loads_our_plugin(plugins: str | None, expected: str | None) -> None:
    own = {} if plugins is None else {"VLLM_PLUGINS": plugins}
    assert process.environment(own, Path("r")).get("VLLM_PLUGINS") == expected


def test_what_the_user_has_set_stays() -> None:
    own = {"VLLM_NO_USAGE_STATS": "0", "SPEC_COMPAT_REPORT_DIR": "elsewhere"}
    environment = process.environment(own, Path("here"))
    assert environment["VLLM_NO_USAGE_STATS"] == "0"
    assert environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert environment["SPEC_COMPAT_REPORT_DIR"] == "here"


def test_several_workers_on_a_cpu_share_its_cores() -> None:
    assert "VLLM_CPU_OMP_THREADS_BIND" not in process.environment({}, Path("r"))
    environment = process.environment({}, Path("r"), workers=2)
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


@pytest.mark.parametrize("given", ["/scratch/" + 60 * "d", "/scratch/" + 140 * "d"])
def test_a_stage_can_name_its_sockets_wherever_temporary_files_are(given: str) -> None:
    """A tokenizing pool has them, and so has a loader's worker."""
    place = process.environment({"TMPDIR": given}, Path("r"))["TMPDIR"]
    name = f"{place}/pymp-12345678/listener-12345678"
    assert len(name) <= 107
    assert place in (given, process.SHORT_TMPDIR)


WORKER = "(Worker pid=7) ERROR 11-30 10:09:28 [multiproc_executor.py:783] "


@pytest.mark.parametrize(
    ("text", "log", "returncode", "cause"),
    [
        ("ValueError: x", "", 1, "ValueError: x"),
        ("", "", 1, "ended with exit code 1"),
        ("", "", -15, "killed by SIGTERM"),
        ("", "", -7, "killed by SIGBUS, as where /dev/shm is full"),
        ("", "Signal 9 (SIGKILL) received by PID 7\n", 1, "a rank was killed by SIGKILL, by hand"),
        (
            "Exception: failed in a background process. See stack trace for root cause.",
            f"{WORKER}  File x\n{WORKER}torch.OutOfMemoryError: CUDA out of memory.\nlater\n",
            1,
            "torch.OutOfMemoryError: CUDA out of memory.",
        ),
        ("Exception: See stack trace for root cause.", "", 1, "Exception: See stack trace"),
    ],
)
def test_a_crash_is_one_line_with_its_cause(
    text: str, log: str, returncode: int, cause: str, tmp_path: Path
) -> None:
    layout = Layout(tmp_path)
    layout.logs.mkdir()
    layout.log("train").write_text(log)
    failures = [Failed(kind="crash", text=text)] if text else []
    line = str(process.failure("train", failures, returncode, layout.log("train")))
    assert line.startswith(f"train: {cause}")
    assert line.endswith(f"; the log is {tmp_path}/logs/train.log")


@pytest.mark.parametrize(
    ("error", "number", "said"),
    [
        ("died", None, "RuntimeError: died"),
        ("died", signal.SIGTERM, "a worker process was killed by SIGTERM"),
        ("see the trace for the root cause", signal.SIGTERM, "RuntimeError: see the trace for the"),
        ("see the trace for the root cause", signal.SIGKILL, "a worker process was killed by SIGK"),
    ],
)
def test_a_worker_that_vllm_ends_for_its_error_was_not_killed(
    error: str, number: int | None, said: str
) -> None:
    assert entry.one_line(RuntimeError(error), number).startswith(said)


def test_of_several_ranks_the_first_to_fail_is_the_cause(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.logs.mkdir()
    layout.log("train").touch()
    failures = [Failed(kind="crash", text=text) for text in ("ValueError: x", "lost rank 0")]
    assert "ValueError: x" in str(process.failure("train", failures, 1, layout.log("train")))


def test_no_stage_unpickles_whatever_the_user_has_set() -> None:
    own = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "0"}
    environment = process.environment(own, Path("r"))
    assert environment["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "1"
    assert "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD" not in environment


STAGE = """
import json, os, stat
links = [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")]
print(json.dumps({"lock": any(n.endswith("/.lock") for n in links)}), flush=True)
print(json.dumps({"pipe": stat.S_ISFIFO(os.fstat(0).st_mode)}), flush=True)
open(os.path.join(os.environ["VLLM_RPC_BASE_PATH"], "socket"), "x").close()
open("sockets", "w").write(os.environ["VLLM_RPC_BASE_PATH"])
os._exit(3)
"""


def test_a_stage_holds_the_lock_and_hears_when_its_runner_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no second run begins beside an orphan, and no orphan stays, nor a socket of vLLM."""
    monkeypatch.chdir(tmp_path)
    given = {
        "model": str(make_verifier(tmp_path / "model")),
        "data": [str(make_data(tmp_path / "d.jsonl"))],
        "output": tmp_path / "run",
    }
    monkeypatch.setattr(process, "command", lambda *_: [sys.executable, "-c", STAGE])
    made = plan.make(config.load(given))
    with pytest.raises(process.StageFailed, match="prepare: ended with exit code 3"):
        Run(made, STAGES, Display(Console(quiet=True)), None, "prepare").go()
    log = Layout(tmp_path / "run").log("prepare").read_text()
    assert '{"lock": true}' in log
    assert '{"pipe": true}' in log
    assert not Path(Path("sockets").read_text()).exists()


# Says what it found, keeps it, and makes one file.
MAKES = """
import hashlib, json, os, shutil, sys
from pathlib import Path
from spec_compat.pipeline.run.events import Events, Finished
stage, root, events = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
if os.environ.get("KILLED") == f"{stage} at first":
    os.kill(os.getpid(), 9)
names = {"prepare": "prepared", "extract": "gen/d", "map": "vocab_mapping", "train": "checkpoints"}
place = root / names.get(stage, "head")
place.mkdir(parents=True, exist_ok=True)
found = sorted(file.name for file in place.iterdir())
(root / f"{stage}.found").write_text(json.dumps(found))
if "made" not in found:
    (place / "made").write_text(stage)
made = (place / "made").read_bytes()
outputs = {str((place / "made").relative_to(root)): hashlib.sha256(made).hexdigest()}
result = json.loads(sys.argv[4]) | {"digest": os.environ.get("DIGEST", "same"), "outputs": outputs}
Events(events).send(Finished(result={**result, "parts": {"d": "the same tokens"}}))
if os.environ.get("KILLED") == f"{stage} at last":
    os.kill(os.getpid(), 9)
if os.environ.get("MADE_ANEW") == stage:
    shutil.rmtree(root)
    (root / "logs").mkdir(parents=True)
"""
Made = Callable[..., Manifest]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Does a run whose stages make a file each; `found` is what was there before."""
    model, data = make_verifier(tmp_path / "model"), make_data(tmp_path / "d.jsonl")
    given = {"model": str(model), "data": [str(data)], "output": tmp_path / "run"}
    monkeypatch.setattr(
        process,
        "command",
        lambda stage, config, root, events: [
            *(sys.executable, "-c", MAKES, stage.name, root, events),
            MADE[stage.name].model_dump_json(),
        ],
    )

    def run(first: str | None = None, last: str | None = None, **options: Any) -> Manifest:
        made = plan.make(config.load({**given, **options}))
        return Run(made, STAGES, Display(Console(quiet=True)), first, last).go()

    run()
    return run


def found(root: Path, stage: str) -> list[str]:
    """What the stage found in its place when it was done last."""
    names: list[str] = json.loads((root / "run" / f"{stage}.found").read_text())
    return names


def test_what_is_altered_goes_before_a_stage_goes_on(made: Made, tmp_path: Path) -> None:
    mapping = tmp_path / "run" / "vocab_mapping"
    (mapping / "made").write_text("altered")
    (mapping / "more").touch()
    made()
    assert (mapping / "made").read_text() == "map"
    assert found(tmp_path, "map") == ["more"]
    assert found(tmp_path, "extract") == []


def test_with_other_inputs_nothing_is_kept(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run" / "vocab_mapping" / "more").touch()
    monkeypatch.setenv("DIGEST", "other")
    done = made("map", "map", draft_vocab_size=64)
    assert found(tmp_path, "map") == []
    unfinished = [stage for stage, record in done.stages.items() if not record.finished]
    assert unfinished == ["train"]


def test_a_stage_is_recorded_before_it_is_done(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it leaves belongs to these inputs; its former result stands for the stages after it."""
    monkeypatch.setenv("KILLED", "map at first")
    with pytest.raises(process.StageFailed, match="map: killed by SIGKILL"):
        made("map", "map", draft_vocab_size=64)
    left = manifest.find(tmp_path / "run", STAGES)
    assert left is not None
    begun = left.stages["map"]
    assert (begun.inputs["--draft-vocab-size"], begun.finished, begun.digest) == (
        "64",
        None,
        "same",
    )


def test_a_stage_that_ends_by_a_signal_has_no_result(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILLED", "map at last")
    with pytest.raises(process.StageFailed, match="map: killed by SIGKILL"):
        made("map", "map", draft_vocab_size=64)


def test_a_directory_that_was_removed_and_made_anew_is_no_run(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MADE_ANEW", "map")
    with pytest.raises(UserError, match="the directory is gone"):
        made("map", "map", draft_vocab_size=64)


def test_what_a_stage_sends_last_is_received_after_its_end(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = events.Channel.receive

    def late(channel: events.Channel, seconds: float) -> Iterator[events.Event]:
        time.sleep(seconds)
        return iter(()) if seconds else receive(channel, 0)

    monkeypatch.setattr(events.Channel, "receive", late)
    assert made("map", "map", draft_vocab_size=64).stages["map"].finished


def test_a_verifier_that_does_not_fit_is_refused_before_it_is_loaded(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeNvml(Gpu(total=1, free=1)).install(monkeypatch, None)
    with pytest.raises(UserError, match="its weights take"):
        made("extract", "extract", batch_size=8)


def test_a_stage_is_refused_before_those_that_it_follows(made: Made, tmp_path: Path) -> None:
    (tmp_path / "run" / "prepared" / "made").write_text("altered")
    with pytest.raises(UserError, match="prepare has not been done yet, or not so: prepared/made"):
        made("map", "map")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(UserError, match=r"prepare has not been done yet$"):
        made("map", "map")


def test_what_a_run_did_while_this_one_waited_for_it_stands(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def waited(root: Path, say: Any) -> Iterator[int]:
        with locked(root, say) as lock:
            other = manifest.find(root, STAGES)
            assert other is not None
            other.stages["map"].seconds = 77.0
            other.save(Layout(root))
            yield lock

    monkeypatch.setattr(runner, "locked", waited)
    assert made().stages["map"].seconds == 77.0


def test_rows_of_the_same_tokens_are_kept_but_for_what_is_altered(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "run" / "gen" / "d"
    (rows / "made").write_text("altered")
    (rows / "more").touch()
    monkeypatch.setenv("DIGEST", "other")
    made("prepare", seed=1)
    assert found(tmp_path, "extract") == ["more"]
    assert (rows / "made").read_text() == "extract"


def test_a_copy_of_a_run_is_read_once(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Terabytes, on a disk whose times are others."""
    run = tmp_path / "run"
    row = run / "gen" / "d" / "data_0.pt"
    row.write_text("states")
    index = Index(row.parent)
    index.add(row.name, atomic.sha256(row), {0: 3})
    for file in run.rglob("*"):
        os.utime(file, (1, 1))
    made()
    read, sha256 = list[Path](), atomic.sha256
    monkeypatch.setattr(atomic, "sha256", lambda file, *more: read.append(file) or sha256(file))
    done = made()
    assert all(record.finished for record in done.stages.values())
    assert not [file for file in read if run in file.parents]


def test_what_a_killed_run_has_left_in_memory_is_given_back(made: Made, tmp_path: Path) -> None:
    left = processes.SHARED / f"psm_spec_compat_{os.getpid()}"
    left.touch()
    try:
        note = json.dumps({left.name: left.stat().st_ino})
        (tmp_path / "run" / ".shared").write_text(note)
        made()
        assert not left.exists()
    finally:
        left.unlink(missing_ok=True)


def test_a_run_goes_on_where_nothing_can_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output lies on the disk that is full, and it pauses for that; or the terminal is gone."""
    with Path("/dev/full").open("w", buffering=1) as full:
        monkeypatch.setattr(sys, "stdout", full)
        with Display(display.console()) as shown:
            for _ in range(1000):
                shown.event(Note(text="paused"))
        with pytest.raises(OSError, match="No space left"):
            print("paused", flush=True)
        with suppress(OSError):
            full.close()


def test_what_cannot_print_says_so_in_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, "-m", "spec_compat.cli", "list"]
        done = subprocess.run(
            words, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    assert done.returncode == 2
    assert done.stderr == "error: standard output: no space left on device\n"
