"""zstd, which Python has from 3.14 on, and before in the package zstandard."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

STANDARD, PACKAGE = "compression.zstd", "zstandard"
LEVEL = 1  # higher ones take several times as long for a hundredth of the bytes


def available() -> bool:
    return _name() is not None


def compress(parts: Iterable[Any], size: int) -> bytearray:
    """One frame of these buffers, one after the other, `size` bytes in all."""
    module = import_module(_name() or PACKAGE)
    if module.__name__ == PACKAGE:
        stream = module.ZstdCompressor(level=LEVEL).compressobj(size)
    else:
        stream = module.ZstdCompressor(level=LEVEL)
        stream.set_pledged_input_size(size)
    frame = bytearray()
    for part in parts:
        frame += stream.compress(part)
    frame += stream.flush()
    return frame


def decompress(frame: Any) -> bytes:
    module = import_module(_name() or PACKAGE)
    if module.__name__ == PACKAGE:
        return bytes(module.ZstdDecompressor().decompress(frame))
    return bytes(module.decompress(frame))


def _name() -> str | None:
    for name in (STANDARD, PACKAGE):
        try:
            if find_spec(name):
                return name
        except ModuleNotFoundError:
            continue
    return None
