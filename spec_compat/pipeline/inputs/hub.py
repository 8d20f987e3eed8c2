"""Files of a repository on the Hugging Face Hub."""

from __future__ import annotations

import re
from pathlib import Path

ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
COMMIT = re.compile(r"[0-9a-f]{40}")
# Seconds for the Hub to say which file it has, before the cache answers.
ANSWER_SECONDS = 10


def download(repository: str, name: str) -> Path:
    """The file of the newest commit, in the Hub's cache. Raises whatever huggingface_hub raises."""
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repository, name, etag_timeout=ANSWER_SECONDS))


def find(repository: str, name: str, commit: str | None) -> Path | None:
    """The file in the Hub's cache; None where the repository has none of this name.

    With HF_HUB_OFFLINE the cache is all that there is: what it lacks, the repository lacks. Raises
    whatever huggingface_hub raises where the Hub does not say.
    """
    from huggingface_hub import _CACHED_NO_EXIST, constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    if try_to_load_from_cache(repository, name, revision=commit) is _CACHED_NO_EXIST:
        return None
    try:
        found = hf_hub_download(repository, name, revision=commit, etag_timeout=ANSWER_SECONDS)
    except LocalEntryNotFoundError:  # also where the Hub was asked and did not answer
        if not constants.HF_HUB_OFFLINE:
            raise
        return None
    except EntryNotFoundError:
        return None
    return Path(found)


def commit(directory: Path) -> str:
    """The commit that a directory of the Hub's cache holds; empty for any other directory."""
    cached = directory.parent.name == "snapshots" and directory.parents[1].name.startswith("models")
    return directory.name if cached and COMMIT.fullmatch(directory.name) else ""


def cause(error: Exception) -> str:
    """One line that says why a file could not be had.

    Where the cache was asked since the Hub did not answer, that is in the error before.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError

    before = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else None
    known = before or error
    lines = str(known).strip().splitlines()
    return f"{type(known).__name__}: {lines[0]}" if lines else type(known).__name__
