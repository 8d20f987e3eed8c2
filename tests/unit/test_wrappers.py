"""The language model's config inside a wrapper's: as a mapping, and as an object."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from spec_compat import wrappers

TEXT = {"num_hidden_layers": 5}


def as_object(config: dict[str, Any]) -> Any:
    return json.loads(json.dumps(config), object_hook=lambda fields: SimpleNamespace(**fields))


@pytest.mark.parametrize(
    "config",
    [
        TEXT,
        {"text_config": TEXT, "num_hidden_layers": 2},
        {"llm_config": TEXT, "text_config": None},
        {"language_config": TEXT, "vision_config": {"num_hidden_layers": 2}},
        {"thinker_config": {"text_config": TEXT}, "talker_config": {"text_config": {}}},
    ],
)
def test_the_innermost_config_is_found(config: dict[str, Any]) -> None:
    assert wrappers.text_config(config) == TEXT
    assert wrappers.text_config(as_object(config)) == as_object(TEXT)


def test_a_mapping_whose_value_is_no_mapping_wraps_nothing() -> None:
    config = {"text_config": "en", "num_hidden_layers": 3}
    assert wrappers.text_config(config) is config


def test_a_config_that_calls_itself_its_text_config_ends() -> None:
    config = SimpleNamespace()
    config.text_config = config
    assert wrappers.text_config(config) is config
