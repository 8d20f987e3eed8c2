import os
from pathlib import Path

import pytest

from tests.unit.world import World

# A unit test reaches no network: a hub that does not answer would cost it half a minute.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)
