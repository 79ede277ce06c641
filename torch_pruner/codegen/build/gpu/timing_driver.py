"""A GPU's memory and clock, for timing kernels in a process that has nothing else on the device.

Not for running models: their memory and streams are torch's.
"""

from __future__ import annotations

import contextlib
import ctypes
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from torch_pruner.codegen.build.gpu.driver import CudaDriver, Driver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PLUG_BYTES = 512 << 20  # written before timed calls: while the device is busy, launches queue up
PLUG_S = 100e-6  # what that takes at least, on the fastest card there is
LAUNCH_S = 15e-6  # a launch takes at most so long, in Python


class TimingDriver(Driver):
    """A driver with memory and a clock.

    Contract: addresses are of the device; ``copy_in`` and ``copy_out`` wait for everything before.
    ``RuntimeError`` means that the device's context is lost, and every call after it fails.
    """

    @abstractmethod
    def allocate(self, nbytes: int) -> int:
        """The address of new memory, 256-byte aligned. Raises ``MemoryError``."""

    @abstractmethod
    def free(self, address: int) -> None: ...

    @abstractmethod
    def unload(self, module: Any) -> None:
        """Give back what ``load`` gave. None of its kernels is running or will be launched."""

    @abstractmethod
    def copy_in(self, address: int, source: int, nbytes: int) -> None:
        """From host memory at ``source``."""

    @abstractmethod
    def copy_out(self, address: int, target: int, nbytes: int) -> None:
        """To host memory at ``target``."""

    @abstractmethod
    def seconds(self, calls: Sequence[Callable[[], object]], number: int) -> float:
        """What ``number`` calls, in turn, take on the device, launches queued ahead of it."""


class CudaTimingDriver(CudaDriver, TimingDriver):
    """The first visible NVIDIA GPU, in its primary context, on the default stream."""

    def __init__(self) -> None:
        """Raises ``OSError`` without a driver, ``RuntimeError`` without a device."""
        super().__init__(lambda: 0)
        cuda, device, context = self._cuda, ctypes.c_int(), ctypes.c_void_p()
        self._must(cuda.cuInit(0))
        self._must(cuda.cuDeviceGet(ctypes.byref(device), 0))
        self._must(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        self._must(cuda.cuCtxSetCurrent(context))
        self._events = [self._event() for _ in range(2)]
        self._plug = 0

    def allocate(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        status = self._cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(max(nbytes, 1)))
        if status == OUT_OF_MEMORY:
            raise MemoryError(f"{nbytes} bytes on the device")
        self._must(status)
        return address.value

    def free(self, address: int) -> None:
        with contextlib.suppress(RuntimeError):  # of a lost context, too
            self._must(self._cuda.cuMemFree_v2(ctypes.c_uint64(address)))

    def unload(self, module: ctypes.c_void_p) -> None:
        with contextlib.suppress(RuntimeError):  # of a lost context, too
            self._must(self._cuda.cuModuleUnload(module))

    def copy_in(self, address: int, source: int, nbytes: int) -> None:
        arguments = ctypes.c_uint64(address), ctypes.c_void_p(source), ctypes.c_size_t(nbytes)
        self._must(self._cuda.cuMemcpyHtoD_v2(*arguments))

    def copy_out(self, address: int, target: int, nbytes: int) -> None:
        arguments = ctypes.c_void_p(target), ctypes.c_uint64(address), ctypes.c_size_t(nbytes)
        self._must(self._cuda.cuMemcpyDtoH_v2(*arguments))

    def seconds(self, calls: Sequence[Callable[[], object]], number: int) -> float:
        begin, end = self._events
        self._occupy(number * LAUNCH_S)
        self._must(self._cuda.cuEventRecord(begin, None))
        for k in range(number):
            calls[k % len(calls)]()
        self._must(self._cuda.cuEventRecord(end, None))
        self._must(self._cuda.cuEventSynchronize(end))
        elapsed = ctypes.c_float()
        self._must(self._cuda.cuEventElapsedTime(ctypes.byref(elapsed), begin, end))
        return elapsed.value / 1e3

    def _occupy(self, seconds: float) -> None:
        """Keep the device busy for at least so long, with writes that empty its caches."""
        if not self._plug:
            self._plug = self.allocate(PLUG_BYTES)
        for _ in range(1 + int(seconds / PLUG_S)):
            words = ctypes.c_size_t(PLUG_BYTES // 4)
            address = ctypes.c_uint64(self._plug)
            self._must(self._cuda.cuMemsetD32Async(address, ctypes.c_uint(0), words, None))

    def _event(self) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        self._must(self._cuda.cuEventCreate(ctypes.byref(event), 0))
        return event

    def _must(self, status: int) -> None:
        if status:
            raise RuntimeError(f"the device is lost: {self._reason(status)}")


OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
