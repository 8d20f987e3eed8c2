"""A class that datasets looks for has left torchvision, and every row in torch's format with it.

Symptom  ImportError: cannot import name 'VideoReader' from 'torchvision.io', at the first row that
         is read from the dataset that preprocessing returns.
Cause    speculators 0.4 asks for a datasets before 4.8.4. Its formatters look whether a value is a
         `torchvision.io.VideoReader` wherever torchvision is imported, as transformers 5 and vLLM
         do. torchvision has no such class since 0.26, which goes with torch 2.11.
Fix      The class is provided; nothing is one of its instances.
Remove when speculators 0.3 and 0.4 are no longer supported.
"""

from types import ModuleType

from spec_compat.patching import NEEDED, Patch, Probe, already_fixed

patch = Patch(
    module="torchvision.io",
    when={"speculators": ">=0.3,<0.5", "torch": ">=2.11"},
    severity="optional",
)


class VideoReader:
    """What no value is."""


@patch.probe
def needed(module: ModuleType) -> Probe:
    return already_fixed("the class is there") if hasattr(module, "VideoReader") else NEEDED


@patch.provide("VideoReader")
def video_reader(absent: None, module: ModuleType) -> type:
    return VideoReader
