"""The CUDA driver as far as running a program needs it: load an image, find a kernel, launch it."""

from __future__ import annotations

import ctypes
import uuid
from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


class Grid(NamedTuple):
    """How a kernel is launched."""

    blocks: int  # of a call
    threads: int  # of a block
    shared_bytes: int = 0  # of a block
    copies: int = 1  # calls at once
    waits: bool = False  # the kernel itself waits for those in front of it


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: its kind, and a value in 64 bytes."""

    _fields_ = (
        ("kind", ctypes.c_uint),
        ("_padding", ctypes.c_uint),
        ("value", ctypes.c_int),
        ("_unused", ctypes.c_char * 60),
    )


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: this thread has made nothing on a device yet
WITHOUT_ASKING = 48 << 10  # bytes of shared memory that every kernel may have
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
MAX_KEPT = 4096  # descriptions of launches, of 72 bytes and more


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
    def launch(self, function: Any, grid: Grid, stream: int, parameters: int) -> None:
        """Queue a kernel; ``parameters`` is the address of an array of addresses of values.

        Raises ``RuntimeError`` with the driver's message.
        """


class CudaDriver(Driver):
    """NVIDIA's driver library, on the current context (torch's)."""

    def __init__(
        self,
        current_stream: Callable[[], int],
        entered: Callable[[], AbstractContextManager[object]] = nullcontext,
        ordinal: int = 0,
    ) -> None:
        """``current_stream`` is asked at every call; images are loaded inside ``entered()``, which
        makes the device's context the current one. ``ordinal``: the device whose primary context
        becomes that of a thread that has none. Raises ``OSError`` without a driver.
        """
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._stream, self._entered, self._ordinal = current_stream, entered, ordinal
        launch = self._cuda.cuLaunchKernel
        launch.argtypes = [
            ctypes.c_void_p,
            *[ctypes.c_uint] * 7,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
        self._launch = launch
        # Drivers before CUDA 11.8 lack it. There kernels find nothing to wait for.
        self._launch_early = getattr(self._cuda, "cuLaunchKernelEx", None)
        if self._launch_early is not None:
            self._launch_early.argtypes = [ctypes.c_void_p] * 4
        self._described: dict[tuple[Grid, int], tuple[int, _Launch, _Attribute]] = {}

    def version(self) -> int:
        """The newest CUDA that the driver runs: 1000 times the major version and ten the minor."""
        found = ctypes.c_int()
        self._cuda.cuDriverGetVersion(ctypes.byref(found))
        return found.value

    def visible_name(self) -> str | None:
        """What ``CUDA_VISIBLE_DEVICES`` calls the device, whichever the process sees.

        ``GPU-`` and its UUID, or ``MIG-`` and that of an instance, where the device is a part of
        one: the second of the driver's two answers is the instance's. None where it says nothing.
        """
        device = ctypes.c_int()
        if self._cuda.cuDeviceGet(ctypes.byref(device), self._ordinal):
            return None
        whole = self._uuid("cuDeviceGetUuid", device)
        own = self._uuid("cuDeviceGetUuid_v2", device) or whole
        return own and (f"GPU-{own}" if own == whole else f"MIG-{own}")

    def _uuid(self, name: str, device: ctypes.c_int) -> str | None:
        found = (ctypes.c_ubyte * 16)()
        ask = getattr(self._cuda, name, None)  # the second came with CUDA 11.4
        if ask is None or ask(ctypes.byref(found), device):
            return None
        return str(uuid.UUID(bytes=bytes(found)))

    def load(self, image: bytes) -> ctypes.c_void_p:
        module = ctypes.c_void_p()
        with self._entered():
            status = self._here(lambda: self._cuda.cuModuleLoadData(ctypes.byref(module), image))
        if status:
            raise ValueError(f"the driver refuses the image: {self._reason(status)}")
        return module

    def function(self, module: ctypes.c_void_p, symbol: str, shared_bytes: int) -> ctypes.c_void_p:
        found = ctypes.c_void_p()
        with self._entered():  # where modules are loaded lazily, this is when
            name = symbol.encode()
            status = self._here(
                lambda: self._cuda.cuModuleGetFunction(ctypes.byref(found), module, name)
            )
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

    def launch(self, function: Any, grid: Grid, stream: int, parameters: int) -> None:
        if grid.waits and self._launch_early is not None:
            described = self._description(grid, stream)
            status = self._launch_early(described[0], function, parameters, None)
        else:
            status = self._queue(function, grid, stream, parameters)
        if status == NO_CONTEXT:  # asked for afterwards: nearly every launch has one
            status = self._here(lambda: self._queue(function, grid, stream, parameters))
        if status:
            raise RuntimeError(f"a kernel cannot be launched: {self._reason(status)}")

    def _queue(self, function: Any, grid: Grid, stream: int, parameters: int) -> int:
        status = self._launch(
            function, grid.blocks, grid.copies, 1, grid.threads, 1, 1, grid.shared_bytes,
            stream or None, parameters, None,
        )  # fmt: skip
        return int(status)

    def _description(self, grid: Grid, stream: int) -> tuple[int, _Launch, _Attribute]:
        """A launch as the driver reads it, at its address.

        Made once, since Python takes longer to fill it in than the driver to launch.
        """
        if (found := self._described.get((grid, stream))) is None:
            if len(self._described) >= MAX_KEPT:
                self._described = {}
            early = _Attribute(kind=EARLY, value=1)
            launch = _Launch(
                grid=(grid.blocks, grid.copies, 1),
                block=(grid.threads, 1, 1),
                shared_bytes=grid.shared_bytes,
                stream=stream or None,
                attributes=ctypes.pointer(early),
                count=1,
            )
            found = ctypes.addressof(launch), launch, early
            self._described[grid, stream] = found
        return found

    def _here(self, call: Callable[[], int]) -> int:
        """The status of a call, made again in the primary context where the thread has none.

        torch gives a thread its context when the thread first allocates or launches something, and
        a thread whose first work on the device is ours has done neither.
        """
        status = call()
        if status != NO_CONTEXT:
            return status
        device, context = ctypes.c_int(), ctypes.c_void_p()
        status = self._cuda.cuDeviceGet(ctypes.byref(device), self._ordinal)
        # Retained for good, as torch does: it is the context of the whole process.
        status = status or self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        status = status or self._cuda.cuCtxSetCurrent(context)
        return int(status) or call()

    def _reason(self, status: int) -> str:
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorString(status, ctypes.byref(text))
        return (text.value or b"unknown error").decode(errors="replace") + f" ({status})"
