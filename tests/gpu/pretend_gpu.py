"""A card made of loops: programs, memory and ``torch.compile`` as for a GPU, on any machine.

The image of a program is the text of its kernels; its driver schedules them once more for the host
and runs them at the addresses it is given. So everything is as on a card but machine code, warps
and time. An emulated card (``emulated``) runs the CUDA C itself, with warps, and takes longer.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tests import emitting as gpu_kernel
from tests.gpu.emulator import machine
from torch_pruner import devices, families
from torch_pruner.cards import CARDS, Card
from torch_pruner.codegen.build.gpu import together, triton
from torch_pruner.codegen.build.gpu.image import Launch
from torch_pruner.codegen.build.gpu.program import build_gpu_program, triton_texts
from torch_pruner.codegen.build.gpu.source import cuda_source
from torch_pruner.codegen.build.gpu.timing_driver import TimingDriver
from torch_pruner.codegen.build.lower import compile_module, program_module
from torch_pruner.codegen.parts.triton import kernel as language
from torch_pruner.compiler.context import Context
from torch_pruner.devices.aten import AtenVendor
from torch_pruner.devices.base import Device
from torch_pruner.devices.cuda import CudaToolchain, capabilities, cuda_executor
from torch_pruner.dynamo.lower import importer
from torch_pruner.fingerprint import DeviceFingerprint
from torch_pruner.graph.ir import Graph
from torch_pruner.graph.memory import KernelCall, Place
from torch_pruner.graph.ops import OpKind
from torch_pruner.target import TargetSpec
from torch_pruner.task import Scheduled
from torch_pruner.tuner.measure._cuda import LOST, CudaBuilder
from torch_pruner.tuner.measure.worker_executor import UNUSABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from torch_pruner.codegen.build.gpu.driver import Grid
    from torch_pruner.codegen.build.gpu.image import GpuProgram
    from torch_pruner.compiler.capabilities import Capabilities
    from torch_pruner.compiler.toolchain import Toolchain
    from torch_pruner.compiler.vendor import Vendor
    from torch_pruner.config import Config
    from torch_pruner.task import Candidate
    from torch_pruner.tuner.measure.base import MeasureExecutor
    from torch_pruner.tuner.measure.builder import Array, BuiltKernel

CARD = CARDS["a100"]
STREAM = 7
BUILDER = "tests.gpu.pretend_gpu:PretendBuilder"


def compiled(
    kernels: Mapping[str, Scheduled], card: Card, copies: Mapping[str, Collection[int]]
) -> tuple[tuple[bytes, ...], dict[str, Launch]]:
    """As ``program.compile_kernels``: code for the card is generated, and what runs is the text."""
    in_triton = triton_texts(kernels)
    scheduled = {
        name: gpu_kernel.schedule(k.spec, k.candidate.sketch, dict(k.candidate.decisions))
        for name, k in kernels.items()
    }
    in_tir = {name: kernel for name, kernel in scheduled.items() if name not in in_triton}
    launches = cuda_source(in_tir, card.arch, copies)[1] if in_tir else {}
    for name, kernel in triton.separate(in_triton).items():
        symbol = name.replace("/", "_")
        launches[name] = Launch(symbol, kernel.blocks, 32 * kernel.warps, kernel.parameters)
    text = {
        launches[together.key(name, n)].symbol: [
            k.spec.to_json(),
            k.candidate.sketch,
            dict(k.candidate.decisions),
        ]
        for name, k in kernels.items()
        for n in (1, *copies.get(name, ()))
    }
    # The loops of a kernel's first launch do what all of its launches do, with all it takes: what
    # its text does not read, too.
    for key, launch in list(launches.items()):
        name, several, _ = key.partition("/")
        if several:
            text[launch.symbol] = []
            continue
        kernel = scheduled[name.partition("*")[0]]
        count = len(kernel.inputs) + len(kernel.outputs) + len(kernel.scratch)
        launches[name] = replace(launch, parameters=tuple(range(count * launch.copies)))
    return (json.dumps(text).encode(),), launches


class HostDriver(TimingDriver):
    """Runs images of ``compiled`` as loops."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, int, int, int]] = []
        self.loaded: set[str] = set()  # sketches of kernels
        self.memory: dict[int, np.ndarray[Any, Any]] = {}
        self.modules: list[dict[str, Any]] = []

    def load(self, image: bytes) -> dict[str, Any]:
        try:
            kernels: dict[str, Any] = json.loads(image)
        except ValueError as err:
            raise ValueError("the driver refuses the image") from err
        self.modules.append(kernels)
        return kernels

    def unload(self, module: dict[str, Any]) -> None:
        self.modules = [m for m in self.modules if m is not module]

    def function(self, module: dict[str, Any], symbol: str, shared_bytes: int) -> Any:
        if symbol not in module:
            raise ValueError(symbol)
        if not module[symbol]:
            return symbol, None, 0
        graph, sketch, decisions = module[symbol]
        self.loaded.add(sketch)
        kernel = gpu_kernel.schedule(Graph.from_json(graph), sketch, decisions, host=True)
        count = len(kernel.inputs) + len(kernel.outputs) + len(kernel.scratch)
        call = KernelCall("k", tuple(Place(i) for i in range(count)))
        code = compile_module(
            program_module({"k": kernel}, {"main": [call]}, count), TargetSpec.detect(1)
        )
        return symbol, code, count

    def stream(self) -> int:
        return STREAM

    def launch(self, function: Any, grid: Grid, stream: int, parameters: int) -> None:
        symbol, code, count = function
        self.launched.append((symbol, *grid[:2], stream))
        if code is None:
            return
        pointers = (ctypes.c_int64 * count * grid[3]).from_address(parameters)
        for own in reversed(pointers):  # in no order that a caller may rely on
            table = (ctypes.c_int64 * count)(*(ctypes.c_int64.from_address(p).value for p in own))
            code["main"](ctypes.addressof(table))

    def allocate(self, nbytes: int) -> int:
        raw = np.full(nbytes + 256, 0xA5, np.uint8)
        address = int(raw.ctypes.data) + -raw.ctypes.data % 256
        self.memory[address] = raw
        return address

    def free(self, address: int) -> None:
        del self.memory[address]

    def copy_in(self, address: int, source: int, nbytes: int) -> None:
        ctypes.memmove(address, source, nbytes)

    def copy_out(self, address: int, target: int, nbytes: int) -> None:
        ctypes.memmove(target, address, nbytes)

    def seconds(self, calls: Sequence[Callable[[], object]], number: int) -> float:
        begin = time.perf_counter()
        for k in range(number):
            calls[k % len(calls)]()
        return time.perf_counter() - begin


def compiled_text(
    kernels: Mapping[str, Scheduled], card: Card, copies: Mapping[str, Collection[int]]
) -> tuple[tuple[bytes, ...], dict[str, Launch]]:
    """As ``program.compile_kernels``, but the image is the source that NVRTC would have got."""
    target = TargetSpec.cuda(card)
    scheduled = {name: families.scheduled(k, target) for name, k in kernels.items()}
    source, launches = cuda_source(scheduled, card.arch, copies)
    buffers = {}
    for key, launch in launches.items():
        kernel = scheduled[key.partition("/")[0].partition("*")[0]]
        takes = [(b.nbytes, False) for b in kernel.inputs]
        takes += [(b.nbytes, True) for b in (*kernel.outputs, *kernel.scratch)]
        buffers[launch.symbol] = [takes[p % len(takes)] for p in launch.parameters]
    image = {
        "arch": card.arch,
        "source": source,
        "launches": {key: asdict(launch) for key, launch in launches.items()},
        "buffers": buffers,
    }
    return (json.dumps(image).encode(),), launches


class EmulatingDriver(HostDriver):
    """Runs images of ``compiled_text`` by the emulator, every launch in another order."""

    def load(self, image: bytes) -> dict[str, Any]:
        module = super().load(image)
        launches = {key: Launch(**launch) for key, launch in module["launches"].items()}
        text = machine.Text(module["source"], launches)
        return module["buffers"] | {"": machine.Kernels([text], module["arch"])}

    def function(self, module: dict[str, Any], symbol: str, shared_bytes: int) -> Any:
        if symbol not in module:
            raise ValueError(symbol)
        return symbol, module[""], module[symbol]

    def launch(self, function: Any, grid: Grid, stream: int, parameters: int) -> None:
        symbol, kernels, buffers = function
        order = machine.ORDERS[len(self.launched) % len(machine.ORDERS)]
        self.launched.append((symbol, *grid[:2], stream))
        pointers = (ctypes.c_int64 * len(buffers)).from_address(parameters)
        given = [
            machine.Memory(ctypes.c_int64.from_address(p).value, nbytes, f"parameter {k}", writable)
            for k, (p, (nbytes, writable)) in enumerate(zip(pointers, buffers, strict=True))
        ]
        kernels.launch(symbol, given, order)


class PretendBuilder(CudaBuilder):
    """What a worker of the pretend card builds with."""

    def __init__(self) -> None:
        super().__init__(HostDriver())

    def compile(self, spec: Graph, target: TargetSpec, candidate: Candidate) -> GpuProgram:
        takes = gpu_kernel.signature(spec, candidate.sketch, dict(candidate.decisions))
        count = len(takes.inputs) + len(takes.outputs) + len(takes.scratch)
        calls = {"main": [KernelCall(spec.digest(), tuple(Place(k) for k in range(count)))]}
        kernels = {spec.digest(): Scheduled(spec, candidate)}
        return build_gpu_program(kernels, calls, CARD, compiled=compiled)


def _multiplies(spec: Graph) -> bool:
    return any(node.kind is OpKind.CONTRACT for node in spec.nodes)


class WrongProducts(PretendBuilder):
    """What a worker builds with where products give wrong numbers."""

    def build(
        self, spec: Graph, target: TargetSpec, threads: int, candidate: Candidate
    ) -> BuiltKernel:
        built = super().build(spec, target, threads, candidate)
        if not _multiplies(spec):
            return built

        def fetch(outputs: Sequence[Array]) -> None:
            built.fetch(outputs)
            for array in outputs:
                array += 1

        return replace(built, fetch=fetch)


class DeadlyProducts(PretendBuilder):
    """What a worker builds with where products read where they must not."""

    def build(
        self, spec: Graph, target: TargetSpec, threads: int, candidate: Candidate
    ) -> BuiltKernel:
        built = super().build(spec, target, threads, candidate)
        if not _multiplies(spec):
            return built
        return replace(built, bind=lambda _: lambda: os._exit(LOST))


class NoDevice(PretendBuilder):
    """What a worker builds with that gets no context on the device."""

    @property
    def driver(self) -> TimingDriver:
        os._exit(UNUSABLE)


def fingerprint(card: Card = CARD) -> DeviceFingerprint:
    return DeviceFingerprint.of_gpu(
        f"pretend {card.name}",
        card.arch,
        card.multiprocessors,
        80 << 30,
        shared_bytes=card.shared_bytes,
        l2_bytes=1 << 20,
        driver="0",
    )


class PretendDevice(Device):
    """The CPU's tensors, compiled for the card. With a ``builder``, workers of that run kernels
    before this process does, and ATen stands in for them."""

    device = torch.device("cpu")
    dtypes = frozenset(("float32", "float16", "bfloat16", "int64", "int32", "bool"))
    checks_indices = False

    def __init__(self, emulated: Card | None = None, builder: str = "") -> None:
        self.card = emulated or CARD
        self.driver = EmulatingDriver() if emulated else HostDriver()
        self.compiled = compiled_text if emulated else compiled
        self.builder = builder

    @classmethod
    def claim(cls, where: torch.device, config: Config) -> Device | None:
        return cls() if where.type == "cpu" else None

    def context(self, config: Config) -> Context:
        return Context.of(config, TargetSpec.cuda(self.card), fingerprint(self.card))

    def toolchain(self, threads: int) -> Toolchain:
        return CudaToolchain(self.driver, self.compiled)

    def executor(self, config: Config, threads: int) -> MeasureExecutor:
        return cuda_executor(fingerprint(), "", config.seed, self.builder or BUILDER)

    def runs_first(self, config: Config) -> bool:
        return bool(self.builder)

    def vendor(self) -> Vendor | None:
        return AtenVendor() if self.builder else None

    def capabilities(self) -> Capabilities:
        return capabilities()


@contextlib.contextmanager
def instead_of_cpu(
    monkeypatch: Any, emulated: Card | None = None, builder: str = ""
) -> Iterator[PretendDevice]:
    """Inside, graphs of the CPU are compiled for the pretend card, or for an emulated one."""
    device = PretendDevice(emulated, builder)

    class Kept(PretendDevice):
        @classmethod
        def claim(cls, where: torch.device, config: Config) -> Device | None:
            return device

    monkeypatch.setattr(devices, "DEVICES", (Kept,))
    if emulated:  # which runs CUDA C alone
        monkeypatch.setattr(language, "available", lambda: False)
    # Its tensors are the CPU's. What is eager's on other devices is eager's here, too.
    monkeypatch.setattr(importer, "CPU", torch.device("meta"))
    yield device
