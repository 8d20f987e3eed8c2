"""Where a model that wraps a language model keeps the language model's config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

# In the order in which they are tried; a config of the first kind has one of the second in it.
NESTED = ("thinker_config", "text_config", "llm_config", "language_config")

Config = TypeVar("Config")


def text_config(config: Config) -> Config:
    """The config of the language model inside `config`; `config` itself where nothing wraps it.

    `config` is a config.json as a mapping, or an object of transformers; the result is of the same
    kind.
    """
    for name in NESTED:
        if isinstance(config, Mapping):
            inner = config.get(name)
            found = isinstance(inner, Mapping)
        else:
            inner = getattr(config, name, None)
            found = inner is not None and inner is not config
        if found:
            return text_config(inner)  # type: ignore[return-value]
    return config
