"""The other line of speculators: the tests of this one, in an environment that has it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.conftest import linked_environment
from tests.e2e.conftest import environment

pytestmark = [pytest.mark.live, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
# One run of the pipeline, from conversations to a head, and what is planted in it.
PIPELINE = (
    "test_run.py::test_the_head_is_the_last_checkpoint_with_a_true_config",
    "test_run.py::test_the_patches_of_every_process_are_in_the_manifest",
    "test_checks.py::test_the_expected_length_is_that_of_the_held_out_rows",
    "test_checks.py::test_the_exported_head_is_sound_and_a_spoiled_one_is_not",
    "test_checks.py::test_targets_that_are_not_the_verifiers_are_refused",
)
TRAINING = (
    "test_train_patches.py",
    "test_video_reader.py",
    "test_loss_mask.py::test_c13_a_position_is_trained_on_for_the_token_that_it_learns",
)


def assert_pass(python: Path, tests: list[str], count: int) -> None:
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert f"{count} passed" in done.stdout


def test_the_pipeline_trains_a_sound_head(tmp_path: Path) -> None:
    """0.4.0 differs from it in the converter of other checkpoints alone."""
    python = linked_environment(tmp_path / "venv", "speculators==0.4.0.1", "-e", str(ROOT))
    tests = [f"tests/e2e/{name}" for name in PIPELINE]
    tests += [f"tests/live/{name}" for name in TRAINING]
    assert_pass(python, tests, len(PIPELINE) + 19)
