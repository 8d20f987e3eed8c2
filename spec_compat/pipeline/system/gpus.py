"""The GPUs that CUDA would see, without starting CUDA in this process."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """Memory of a GPU in bytes."""

    total: int
    free: int


def visible() -> list[Gpu | None]:
    """The visible GPUs in CUDA's order (by PCI bus where CUDA_VISIBLE_DEVICES is not set).

    None for one whose memory is unknown: a MIG device has a part of its GPU's memory, and some
    GPUs share the memory of the host. Without a driver there are no GPUs.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_gpu(pynvml, handle) for handle in _selected(pynvml)]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _selected(nvml: ModuleType) -> list[Any]:
    """Handles of the GPUs that CUDA_VISIBLE_DEVICES selects, None for a MIG device; all if not set.

    As in CUDA, a name is an index, a UUID, or a prefix of exactly one UUID. Any other name ends
    the list, and a GPU that is named twice empties it.
    """
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if devices is None:
        return handles
    by_uuid = {nvml.nvmlDeviceGetUUID(handle): handle for handle in handles}
    selected: list[str] = []
    for name in map(str.strip, devices.split(",")):
        if name.startswith("MIG-"):
            uuids = [name]
        elif name.startswith("GPU-"):
            uuids = [uuid for uuid in by_uuid if uuid.startswith(name)]
        else:
            uuids = [uuid for index, uuid in enumerate(by_uuid) if str(index) == name]
        if len(uuids) != 1:
            break
        selected += uuids
    if len(set(selected)) < len(selected):
        return []
    return [by_uuid.get(uuid) for uuid in selected]


def _gpu(nvml: ModuleType, handle: Any) -> Gpu | None:
    if handle is None:
        return None
    with suppress(nvml.NVMLError):  # of a GPU that has no MIG
        if nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE:
            return None
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError:
        return None
    return Gpu(memory.total, memory.free)
