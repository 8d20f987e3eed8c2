"""A row in torch's format can be read where torchvision has no VideoReader, as from 0.26 on."""

from contextlib import nullcontext

import datasets
import pytest
import torch
from packaging.version import Version
from torchvision import io

from spec_compat import changes, registry

pytestmark = pytest.mark.live

LOOKS_AGAIN = Version("4.8.4")  # from it on, datasets does without


def test_rows_are_read_without_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(io, "VideoReader", raising=False)
    patch = registry.get("prepare/video-reader")
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2]]}).with_format("torch")
    fails = Version(datasets.__version__) < LOOKS_AGAIN
    with pytest.raises(ImportError, match="VideoReader") if fails else nullcontext():
        rows[0]
    made = changes.prepare(patch, io)
    changes.commit(made)
    try:
        assert torch.equal(rows[0]["input_ids"], torch.tensor([1, 2]))
        assert patch.examine(io).reason == "the class is there"
    finally:
        changes.put_back(made)
