"""The GPUs that CUDA would see, without starting CUDA in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """Memory of a GPU in bytes."""

    total: int
    free: int


def count() -> int:
    """The number of visible GPUs; a MIG device counts as one."""
    with _handles() as (_, handles):
        return len(handles)


def visible() -> list[Gpu]:
    """The visible GPUs in CUDA's order (by PCI bus where CUDA_VISIBLE_DEVICES is not set).

    Empty where the memory of one of them is unknown: a MIG device has a part of its GPU's memory,
    and some GPUs share the memory of the host.
    """
    with _handles() as (nvml, handles):
        gpus = [_gpu(nvml, handle) for handle in handles]
    known = [gpu for gpu in gpus if gpu is not None]
    return known if len(known) == len(gpus) else []


@contextmanager
def _handles() -> Iterator[tuple[ModuleType, list[Any]]]:
    """NVML and its handles of the visible GPUs, None for a MIG device; none without a driver."""
    import pynvml

    with ExitStack() as stack:
        handles: list[Any] = []
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            stack.callback(pynvml.nvmlShutdown)
            handles = _selected(pynvml)
        yield pynvml, handles


def _selected(nvml: ModuleType) -> list[Any]:
    """The handles that CUDA_VISIBLE_DEVICES selects; all where it is not set.

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
        prefix = name if name.startswith("GPU-") else None
        uuids = [
            uuid
            for index, uuid in enumerate(by_uuid)
            if name == str(index) or (prefix and uuid.startswith(prefix))
        ]
        if name.startswith("MIG-"):
            uuids = [name]
        if len(uuids) != 1:
            break
        selected += uuids
    if len(set(selected)) < len(selected):
        return []
    return [by_uuid.get(uuid) for uuid in selected]


def _gpu(nvml: ModuleType, handle: Any) -> Gpu | None:
    """None where the memory that CUDA would see is unknown."""
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
