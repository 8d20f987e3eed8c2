"""zstd frames: those of this release, and those that the package zstandard wrote before."""

import numpy as np

from spec_compat.pipeline.rows import zstd

CONTENT = b"hidden states " * 100 + bytes(600)
# zstandard 0.25: ZstdCompressor(level=1).compressobj(2000), then compress and flush.
OF_ZSTANDARD = bytes.fromhex(
    "28b52ffd60d006d500007868696464656e20737461746573200002005470957056fc5309"
)


def test_frames_of_zstandard_are_read() -> None:
    assert zstd.decompress(np.frombuffer(OF_ZSTANDARD, np.uint8)) == CONTENT


def test_a_frame_says_its_size() -> None:
    frame = zstd.compress((CONTENT[:1400], CONTENT[1400:]), len(CONTENT))
    assert zstd.decompress(frame) == CONTENT
    has_size = bool(frame[4] & 0b1110_0000)  # descriptor: size flag and single segment
    assert has_size
    assert int.from_bytes(frame[5:7], "little") + 256 == len(CONTENT)
