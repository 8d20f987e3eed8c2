"""Python sources out of a published wheel, without downloading the rest of it.

A wheel is a zip file: its directory is at the end, and an index that answers range requests gives
out the parts that are asked for: of a CUDA wheel of 400 MB the few MB of sources. From another
index the wheel is downloaded whole, and deleted.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path
from typing import IO

CACHE = Path(__file__).resolve().parents[3] / ".cache" / "upstream"
BLOCK = 1 << 20


class NoRanges(Exception):  # noqa: N818
    """The index gives out whole files alone."""


class RemoteFile(io.RawIOBase):
    """A file behind a URL, read in blocks by HTTP range requests. Raises NoRanges without them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.place = 0
        self.blocks: dict[int, bytes] = {}
        with self._ask(0, 0) as answer:
            if answer.status != 206:
                raise NoRanges
            self.size = int(answer.headers["Content-Range"].rpartition("/")[2])

    def _ask(self, first: int, last: int) -> urllib.response.addinfourl:
        headers = {"Range": f"bytes={first}-{last}"}
        request = urllib.request.Request(self.url, headers=headers)  # noqa: S310
        answer: urllib.response.addinfourl = urllib.request.urlopen(request, timeout=180)  # noqa: S310
        return answer

    def _block(self, number: int) -> bytes:
        if number not in self.blocks:
            first = number * BLOCK
            with self._ask(first, min(first + BLOCK, self.size) - 1) as answer:
                self.blocks[number] = answer.read()
        return self.blocks[number]

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        number, offset = divmod(self.place, BLOCK)
        part = self._block(number)[offset : offset + len(buffer)] if self.place < self.size else b""
        buffer[: len(part)] = part
        self.place += len(part)
        return len(part)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: self.size}[whence]
        self.place = start + offset
        return self.place

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True


def fetch(distribution: str, version: str) -> Path:
    """A directory with the sources and the METADATA of a wheel; fetched once."""
    target = CACHE / f"{distribution}-{version}"
    if (target / "METADATA").is_file():
        return target
    package = distribution.partition("-")[0]
    with _opened(url_of(distribution, version)) as file, zipfile.ZipFile(file) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".py")]
        for name in sorted(names, key=lambda name: wheel.getinfo(name).header_offset):
            if name.startswith(f"{package}/") and "/third_party/" not in name:
                wheel.extract(name, target)
        (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        (target / "METADATA").write_bytes(wheel.read(metadata))
    return target


def _opened(url: str) -> IO[bytes]:
    try:
        return io.BufferedReader(RemoteFile(url), BLOCK)
    except NoRanges:
        file = tempfile.TemporaryFile()  # noqa: SIM115
        with urllib.request.urlopen(url, timeout=180) as answer:  # noqa: S310
            shutil.copyfileobj(answer, file)
        return file


def url_of(distribution: str, version: str) -> str:
    """Where pip would download the wheel from, by the user's own settings of pip."""
    options = ("--dry-run", "--ignore-installed", "--no-deps", "--use-feature=fast-deps", "--quiet")
    command = [sys.executable, "-m", "pip", "install", *options, "--report", "-"]
    done = subprocess.run(
        [*command, "--only-binary", ":all:", f"{distribution}=={version}"],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    (wheel,) = json.loads(done.stdout[done.stdout.index("{") :])["install"]
    url: str = wheel["download_info"]["url"]
    return url
