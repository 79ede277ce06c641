"""The CUDA driver as far as running a program needs it: load an image, find a kernel, launch it."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


WITHOUT_ASKING = 48 << 10  # bytes of shared memory that every kernel may have
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Driver(ABC):
    """What ``program`` launches kernels through.

    Contract: ``load`` keeps no reference to the image; ``launch`` reads the parameters before it
    returns and does not wait for the kernel.
    """

    @abstractmethod
    def load(self, image: bytes) -> Any:
        """A module. Raises ``ValueError`` for an image that is damaged or for another card."""

    @abstractmethod
    def function(self, module: Any, symbol: str, shared_bytes: int) -> Any:
        """A kernel of a module, to be launched with so much shared memory.

        Raises ``ValueError`` if there is none of that name, or the card has not as much.
        """

    @abstractmethod
    def stream(self) -> int:
        """The handle of the caller's current stream."""

    @abstractmethod
    def launch(
        self, function: Any, grid: tuple[int, int, int], stream: int, parameters: int
    ) -> None:
        """Queue a kernel; ``parameters`` is the address of an array of addresses of values.

        ``grid``: blocks, threads of each, bytes of shared memory of each. Raises ``RuntimeError``
        with the driver's message.
        """


class CudaDriver(Driver):
    """NVIDIA's driver library, on the current context (torch's)."""

    def __init__(
        self,
        current_stream: Callable[[], int],
        entered: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """``current_stream`` is asked at every call; images are loaded inside ``entered()``, which
        makes the device's context the current one. Raises ``OSError`` without a driver.
        """
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._stream, self._entered = current_stream, entered
        launch = self._cuda.cuLaunchKernel
        launch.argtypes = [
            ctypes.c_void_p,
            *[ctypes.c_uint] * 7,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
        self._launch = launch

    def load(self, image: bytes) -> ctypes.c_void_p:
        module = ctypes.c_void_p()
        with self._entered():
            status = self._cuda.cuModuleLoadData(ctypes.byref(module), image)
        if status:
            raise ValueError(f"the driver refuses the image: {self._reason(status)}")
        return module

    def function(self, module: ctypes.c_void_p, symbol: str, shared_bytes: int) -> ctypes.c_void_p:
        found = ctypes.c_void_p()
        with self._entered():  # where modules are loaded lazily, this is when
            status = self._cuda.cuModuleGetFunction(ctypes.byref(found), module, symbol.encode())
            if status:
                raise ValueError(f"the image has no kernel {symbol!r}: {self._reason(status)}")
            if shared_bytes > WITHOUT_ASKING:
                status = self._cuda.cuFuncSetAttribute(found, MAX_DYNAMIC_SHARED, shared_bytes)
                if status:
                    reason = self._reason(status)
                    raise ValueError(f"{symbol!r} wants {shared_bytes} bytes to share: {reason}")
        return found

    def stream(self) -> int:
        return self._stream()

    def launch(
        self, function: Any, grid: tuple[int, int, int], stream: int, parameters: int
    ) -> None:
        blocks, threads, shared = grid
        status = self._launch(
            function, blocks, 1, 1, threads, 1, 1, shared, stream or None, parameters, None
        )
        if status:
            raise RuntimeError(f"a kernel cannot be launched: {self._reason(status)}")

    def _reason(self, status: int) -> str:
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorString(status, ctypes.byref(text))
        return (text.value or b"unknown error").decode(errors="replace") + f" ({status})"
