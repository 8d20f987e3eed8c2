"""Files of weights: whether each is whole, and whether it is still the one that was read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from spec_compat.errors import UserError
from spec_compat.pipeline.system import atomic

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
READERS = 8

# Files read so far, and files to read.
Progress = Callable[[int, int], None]


class Weights(NamedTuple):
    """A file of weights: its SHA-256, and what the file system said of it when that was taken.

    The time of the last change of any kind, unlike that of the content, cannot be set back.
    """

    bytes: int
    mtime_ns: int
    ctime_ns: int
    sha256: str

    @classmethod
    def of(cls, file: Path, stopped: Callable[[], bool] = lambda: False) -> Weights:
        """Read it, until that is stopped. Raises UserError when it cannot be."""
        try:
            found = file.stat()
            digest = atomic.sha256(file, stopped)
        except OSError as error:
            raise _unreadable(file, error) from None
        return cls(found.st_size, found.st_mtime_ns, found.st_ctime_ns, digest)

    def is_of(self, file: Path) -> bool:
        """Whether the file is as it was."""
        found = file.stat()
        return self[:3] == (found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def read(
    files: Iterable[Path],
    known: Mapping[str, Weights],
    progress: Progress = lambda done, total: None,
) -> dict[str, Weights]:
    """The files by name; those that are not `known` as they are now are read. Raises UserError."""
    files = list(files)
    found = {f.name: known[f.name] for f in files if f.name in known and known[f.name].is_of(f)}
    unread = [file for file in files if file.name not in found]
    stopped = threading.Event()
    with ThreadPoolExecutor(READERS) as readers:
        reading = [readers.submit(Weights.of, file, stopped.is_set) for file in unread]
        try:
            for done, file in enumerate(unread):
                found[file.name] = reading[done].result()
                progress(done + 1, len(unread))
        except BaseException:  # a Ctrl-C would wait for the files that are being read
            stopped.set()
            readers.shutdown(wait=False, cancel_futures=True)
            raise
    return found


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A safetensors file whose header fits its size, without torch.

    Raises OSError and SafetensorError.
    """
    # safetensors says of a file that may not be read that there is none.
    with file.open("rb"), safe_open(file, "np") as weights:
        yield weights


def tensor_names(file: Path) -> list[str]:
    """The tensors of a safetensors file. Raises UserError for one that is cut, or is none."""
    try:
        with opened(file) as weights:
            return list(weights.keys())
    except OSError as error:
        raise _unreadable(file, error) from None
    except SafetensorError as error:
        raise UserError(
            f"{file}: cut, or no safetensors file; copy it anew ({error})", option="model"
        ) from None


def _unreadable(file: Path, error: OSError) -> UserError:
    return UserError(f"{file}: {(error.strerror or str(error)).lower()}", option="model")
