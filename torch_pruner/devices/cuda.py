"""One NVIDIA GPU: its toolchain, its executor, and what torch knows of it."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from torch_pruner import log
from torch_pruner.cards import Card, card_like
from torch_pruner.codegen.build.gpu.driver import CudaDriver
from torch_pruner.codegen.build.gpu.timing_driver import PLUG_BYTES, PLUG_S
from torch_pruner.compiler.bundles import BundleDevice
from torch_pruner.compiler.capabilities import Capabilities
from torch_pruner.compiler.context import Context
from torch_pruner.compiler.executors import shared_executor
from torch_pruner.compiler.toolchain import NOTHING, Kept, Library, Toolchain
from torch_pruner.devices.aten import AtenVendor
from torch_pruner.devices.base import Device, parsed
from torch_pruner.devices.cpu import EagerDevice
from torch_pruner.devices.dtypes import DEFAULT_DTYPES
from torch_pruner.exc import CompileError, CorruptEntry, OptionError
from torch_pruner.families.gpu_dots import form
from torch_pruner.fingerprint import DeviceFingerprint
from torch_pruner.graph.attention import fits_tensor_cores
from torch_pruner.target import TargetSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch_pruner.codegen.build.gpu.driver import Driver
    from torch_pruner.codegen.build.gpu.program import Compiled
    from torch_pruner.codegen.build.load import Entry
    from torch_pruner.compiler.toolchain import Calls, Kernels
    from torch_pruner.compiler.vendor import Vendor
    from torch_pruner.config import Config
    from torch_pruner.graph.memory import Place
    from torch_pruner.tuner.measure.base import MeasureExecutor
    from torch_pruner.tuner.measure.meter import MeterSource

ANY_GPU: Final = '{"kind":"cuda"}'  # the option ``target``: the GPU at hand, whichever it is
NO_TRACKER: Final = "graphs on %s run in eager: the devices of a tracker are CPUs"
DTYPES: Final = DEFAULT_DTYPES | {"float16"}
CUDA_BUILDER: Final = "torch_pruner.tuner.measure._cuda:CudaBuilder"
PLUGS: Final = 4  # that many writes to a part of ``PLUG_BYTES``, which need not be free at once
MAX_STREAMS: Final = 64
MAX_WORKERS: Final = 8  # a context of each takes some hundred megabytes of the device

_log = log.logger(__name__)


@dataclass(frozen=True, slots=True)
class CudaToolchain(Toolchain):
    """Machine code by NVRTC and a list of launches, run through ``driver``.

    Without one (a card that is not at hand) code can be built and not run.
    """

    driver: Driver | None
    compiled: Compiled | None = None  # what makes machine code instead of NVRTC

    @staticmethod
    def at_hand(
        current_stream: Callable[[], int],
        entered: Callable[[], AbstractContextManager[object]],
        ordinal: int,
    ) -> CudaToolchain:
        """For a GPU of this process; see ``CudaDriver``. Raises ``OSError`` without a driver."""
        return CudaToolchain(CudaDriver(current_stream, entered, ordinal))

    def build(
        self,
        kernels: Kernels,
        calls: Calls,
        slots: int,
        target: TargetSpec,
        kept: Kept = NOTHING,
        lines: Place | None = None,
    ) -> Library:
        from torch_pruner.codegen.build.gpu.program import build_gpu_program

        card = target.card
        if card is None:
            raise CompileError(target.key(), "no card of that name is known")
        data = build_gpu_program(kernels, calls, card, compiled=self.compiled).to_bytes()
        return Library(
            lambda: tuple(self._entries(data, list(calls))), lambda path: _write(path, data)
        )

    def load(self, path: Path, names: Sequence[str]) -> list[Entry]:
        try:
            return self._entries(path.read_bytes(), list(names))
        except (ValueError, OSError) as err:
            raise CorruptEntry(path, f"cannot be loaded: {err}") from err

    def _entries(self, data: bytes, names: list[str]) -> list[Entry]:
        from torch_pruner.codegen.build.gpu.image import load_gpu_program

        if self.driver is None:
            return [_refuse] * len(names)
        return list(load_gpu_program(data, names, self.driver))


class CudaDevice(Device):
    """A GPU at hand. Eager's device-side assertions are not repeated: indices are clamped.

    Few cards have run the code for them. So unless the option ``target`` asks for it, this process
    loads only kernels that a worker has run here: a kernel that reads where it must not costs the
    process its context, and so all tensors on the device.
    """

    names = ("cuda", "cuda:0")
    checks_indices = False
    replays = True

    def __init__(
        self, device: torch.device, card: Card, fingerprint: DeviceFingerprint, selector: str
    ) -> None:
        """``selector`` is what makes it the GPU that a child process sees.

        Raises ``OSError`` where the driver's library cannot be loaded.
        """
        self.device, self.card = device, card
        self.dtypes = DTYPES if card.has_bfloat16 else DTYPES - {"bfloat16"}
        self.fingerprint, self._selector = fingerprint, selector
        self._index = device.index
        self._streams: set[int] = set()  # on which kernels were launched, by their handles
        self._toolchain = CudaToolchain.at_hand(self._stream, self._entered, device.index)

    @classmethod
    def claim(cls, where: torch.device, config: Config) -> Device | None:
        found = _at_hand(where.index or 0) if where.type == "cuda" else None
        if found is None:
            return None
        if config.target == "auto":
            if config.executor != "rpc":
                return found
            log.warn_once(_log, "tracker", NO_TRACKER, where)
            return EagerDevice(where)
        if config.target != ANY_GPU:
            card = TargetSpec.resolve(config.target).card
            if card is not None and card != found.card:
                problem = f"the tensors are on a {found.card.name}, not on a {card.name}"
                raise OptionError("target", problem)
        if config.executor == "rpc":
            raise OptionError("executor", f"the devices of a tracker are CPUs, and not {where}")
        return found

    @classmethod
    def named(cls, name: str) -> BundleDevice | None:
        where = parsed(name)
        if where is None or where.type != "cuda" or (found := _at_hand(where.index or 0)) is None:
            return None
        return BundleDevice(found.fingerprint, TargetSpec.cuda(found.card))

    @classmethod
    def settings(cls) -> list[str]:
        return sorted(tf32_allowed())

    def context(self, config: Config) -> Context:
        return Context.of(config, TargetSpec.cuda(self.card), self.fingerprint)

    def toolchain(self, threads: int) -> Toolchain:
        return self._toolchain

    def executor(self, config: Config, threads: int) -> MeasureExecutor:
        meter = self.meter() if config.objective == "energy" else None
        return cuda_executor(self.fingerprint, self._selector, config.seed, meter=meter)

    def meter(self) -> MeterSource | None:
        from torch_pruner.tuner.measure.meter import nvml

        return nvml(self._selector)

    def runs_first(self, config: Config) -> bool:
        return config.target == "auto"

    def capabilities(self) -> Capabilities:
        return capabilities()

    def vendor(self) -> Vendor | None:
        return AtenVendor(device=self.device, clock=_device_seconds)

    def guard(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        index = self._index

        def call(inputs: list[Any]) -> Any:
            with torch.cuda._DeviceGuard(index):
                return run(inputs)

        return call

    def generator_state(self) -> torch.Tensor | None:
        return torch.cuda.get_rng_state(self.device)

    def restore_generator(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, self.device)

    def retire(self, tensors: Sequence[torch.Tensor]) -> None:
        """torch hands their memory to others once the streams that may read it have come so far.

        It knows by itself only the stream on which they were made.
        """
        if len(self._streams) > MAX_STREAMS:  # of programs that make ever new ones
            torch.cuda.synchronize(self.device)
            self._streams.clear()
        known: Any = torch.cuda.ExternalStream
        for handle in tuple(self._streams):
            stream = known(handle, device=self.device)
            for tensor in (t for t in tensors if t.device == self.device):
                tensor.record_stream(stream)

    def _stream(self) -> int:
        stream = int(torch._C._cuda_getCurrentRawStream(self._index))
        self._streams.add(stream)
        return stream

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        with torch.cuda.device(self._index):
            torch.cuda.current_stream().query()  # makes torch's context this thread's
            yield


def capabilities() -> Capabilities:
    """What kernels for NVIDIA's GPUs can do, as torch is set now."""
    return Capabilities(
        attention=fits_tensor_cores,
        gradients=False,
        values_masked=False,
        mixed_operands=False,
        takes_bytes=form.takes_bytes,
        takes_words=form.takes_words,
        approximations=False,
        tf32=tf32_allowed(),
    )


def tf32_allowed() -> frozenset[str]:
    """Contractions whose float32 operands torch lets a GPU round, as it is set now.

    By default torch allows it for convolutions and not for products.
    """
    cuda: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    try:  # the names of 2.9 and later; the older ones raise once these were used
        products = cuda.fp32_precision == "tf32"
        convolutions = cudnn.conv.fp32_precision == "tf32"
    except AttributeError:
        products, convolutions = cuda.allow_tf32, cudnn.allow_tf32
    found = {"matmul"} if products else set()
    return frozenset(found | ({"conv", "conv_transpose"} if convolutions else set()))


def cuda_executor(
    fingerprint: DeviceFingerprint,
    selector: str,
    seed: int,
    builder: str = CUDA_BUILDER,
    meter: MeterSource | None = None,
) -> MeasureExecutor:
    """Times on one GPU; each worker has a context of its own there, and they time in turns."""
    from torch_pruner.tuner.measure.base import EvaluatorSpec
    from torch_pruner.tuner.measure.jobs import Limits
    from torch_pruner.tuner.measure.local import LocalExecutor

    return shared_executor(
        ("cuda", selector, seed, builder, meter),
        lambda: LocalExecutor(
            1,
            EvaluatorSpec(flush_bytes=2 * fingerprint.l2_bytes, renew=False),
            n_workers=min(MAX_WORKERS, os.cpu_count() or 1),
            limits=Limits(build_s=60.0),
            seed=seed,
            builder=builder,
            device=fingerprint,
            meter=meter,
            environment={
                "CUDA_VISIBLE_DEVICES": selector,
                # No clients of the Multi-Process Service, where a fault of one ends all others of
                # the device (docs.nvidia.com/deploy/mps): without its pipes they have contexts of
                # their own, or none where the device allows one process alone.
                "CUDA_MPS_PIPE_DIRECTORY": os.devnull,
            },
        ),
    )


@functools.cache
def _at_hand(index: int) -> CudaDevice | None:
    """None for a card of an unknown kind, or without NVIDIA's driver."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(index)
    card = card_like(properties.name, (properties.major, properties.minor))
    if card is None:
        return None
    try:
        driver = CudaDriver(lambda: 0, ordinal=index)
    except OSError:
        return None
    fingerprint = DeviceFingerprint.of_gpu(
        properties.name,
        card.arch,
        properties.multi_processor_count,
        properties.total_memory,
        shared_bytes=card.shared_bytes,
        l2_bytes=int(getattr(properties, "L2_cache_size", card.l2_bytes)),
        driver=str(driver.version() // 1000),
    )
    selector = driver.visible_name() or str(index)
    return CudaDevice(torch.device("cuda", index), card, fingerprint, selector)


def _device_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Mean of calls one after another, queued behind writes that keep the device busy until then.

    As our own kernels are timed: what launches take on the host is over before the device is free.
    """
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    started = time.perf_counter()
    calls[0]()
    launched = time.perf_counter() - started  # on the host, where nothing is waited for
    plug = torch.empty(PLUG_BYTES // PLUGS, dtype=torch.uint8, device="cuda")
    torch.cuda.current_stream().synchronize()
    for _ in range(PLUGS * (1 + int(len(calls) * launched / PLUG_S))):
        plug.zero_()
    begin.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / len(calls)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _refuse(address: int) -> None:
    raise RuntimeError("this code was built for a card that is not at hand")


DEVICE = CudaDevice
