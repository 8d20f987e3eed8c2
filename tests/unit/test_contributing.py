"""CONTRIBUTING names files that exist, and quotes a patch and its tests as they are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def test_every_path_exists() -> None:
    paths = re.findall(r"`((?:spec_compat|patches|tests|scripts|examples)/[\w./]*)`", TEXT)
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_example_is_a_patch_of_this_repository() -> None:
    patch, claim, symptom = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert patch == (ROOT / "patches/extract/cache_config.py").read_text()
    assert claim in (ROOT / "tests/contract/test_snapshots.py").read_text()
    assert symptom in (ROOT / "tests/live/test_symptoms.py").read_text()
