import os
from pathlib import Path

import pytest

from tests.unit.world import World

# A unit test asks no hub of the network, which would cost half a minute where none answers.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)
