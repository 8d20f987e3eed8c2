"""A stand-in for nvidia-ml-py, whose library comes with the driver of a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from spec_compat.pipeline.system.gpus import Gpu


class FakeNvml:
    """The module `pynvml` on a host with these GPUs; those of `mig` are split into MIG devices.

    The memory of a GPU that is None is not known. Without a driver the library is not found.
    """

    NVML_DEVICE_MIG_ENABLE = 1

    class NVMLError(Exception):
        pass

    def __init__(
        self,
        *gpus: Gpu | None,
        uuids: tuple[str, ...] = (),
        mig: tuple[int, ...] = (),
        driver: bool = True,
    ) -> None:
        self._gpus, self._mig, self._driver = gpus, mig, driver
        self._uuids = uuids or tuple(f"GPU-{index}" for index in range(len(gpus)))
        self._users = 0

    def install(self, patch: pytest.MonkeyPatch, devices: str | None = None) -> FakeNvml:
        """In the place of the module, with CUDA_VISIBLE_DEVICES as given."""
        patch.setitem(sys.modules, "pynvml", self)  # type: ignore[arg-type]
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if devices is not None:
            patch.setenv("CUDA_VISIBLE_DEVICES", devices)
        return self

    def nvmlInit(self) -> None:  # noqa: N802
        if not self._driver:
            raise self.NVMLError("NVML Shared Library Not Found")
        self._users += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self._users -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        assert self._users == 1
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        assert self._users == 1
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        assert self._users == 1
        return self._uuids[handle]

    def nvmlDeviceGetMigMode(self, device: int) -> list[int]:  # noqa: N802
        assert self._users == 1
        if not self._mig:
            raise self.NVMLError("Not Supported")
        return [int(device in self._mig)] * 2

    def nvmlDeviceGetMemoryInfo(  # noqa: N802
        self, handle: int, version: int | None = None
    ) -> SimpleNamespace:
        assert self._users == 1
        gpu = self._gpus[handle]
        if gpu is None:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(total=gpu.total, free=gpu.free, used=gpu.total - gpu.free)
