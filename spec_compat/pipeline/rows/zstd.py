"""zstd: a module of Python from 3.14 on, before that the package backports.zstd."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any

MODULE = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
LEVEL = 1  # higher ones take several times as long for a hundredth of the bytes


def available() -> bool:
    try:
        import_module(MODULE)
    except ImportError:
        return False
    return True


def compress(parts: Iterable[Any], size: int) -> bytearray:
    """One frame of these buffers, one after the other, `size` bytes in all."""
    stream = import_module(MODULE).ZstdCompressor(level=LEVEL)
    stream.set_pledged_input_size(size)
    frame = bytearray()
    for part in parts:
        frame += stream.compress(part)
    frame += stream.flush()
    return frame


def decompress(frame: Any) -> bytes:
    return bytes(import_module(MODULE).decompress(frame))
