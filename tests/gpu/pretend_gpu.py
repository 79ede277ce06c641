"""A card made of loops: programs, memory and ``torch.compile`` as for a GPU, on any machine.

The image of a program is the text of its kernels; its driver schedules them once more for the host
and runs them at the addresses it is given. So everything is as on a card but machine code, warps
and time.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tests import emitting as gpu_kernel
from torch_pruner import devices
from torch_pruner.cards import CARDS, Card
from torch_pruner.codegen.build.gpu import together
from torch_pruner.codegen.build.gpu.program import build_gpu_program
from torch_pruner.codegen.build.gpu.source import cuda_source
from torch_pruner.codegen.build.gpu.timing_driver import TimingDriver
from torch_pruner.codegen.build.lower import compile_module, program_module
from torch_pruner.compiler.context import Context
from torch_pruner.devices.base import Device
from torch_pruner.devices.cuda import CudaToolchain, capabilities, cuda_executor
from torch_pruner.fingerprint import DeviceFingerprint
from torch_pruner.graph.ir import Graph
from torch_pruner.graph.memory import KernelCall, Place
from torch_pruner.target import TargetSpec
from torch_pruner.task import Scheduled
from torch_pruner.tuner.measure._cuda import CudaBuilder

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from torch_pruner.codegen.build.gpu.driver import Grid
    from torch_pruner.codegen.build.gpu.image import GpuProgram, Launch
    from torch_pruner.compiler.capabilities import Capabilities
    from torch_pruner.compiler.toolchain import Toolchain
    from torch_pruner.config import Config
    from torch_pruner.task import Candidate
    from torch_pruner.tuner.measure.base import MeasureExecutor

CARD = CARDS["a100"]
STREAM = 7
BUILDER = "tests.gpu.pretend_gpu:PretendBuilder"


def compiled(
    kernels: Mapping[str, Scheduled], card: Card, copies: Mapping[str, Collection[int]]
) -> tuple[bytes, dict[str, Launch]]:
    """As ``program.compile_kernels``: code for the card is generated, and what runs is the text."""
    scheduled = {
        name: gpu_kernel.schedule(k.spec, k.candidate.sketch, dict(k.candidate.decisions))
        for name, k in kernels.items()
    }
    _, launches = cuda_source(scheduled, card.arch, copies)
    text = {
        launches[together.key(name, n)].symbol: [
            k.spec.to_json(),
            k.candidate.sketch,
            dict(k.candidate.decisions),
        ]
        for name, k in kernels.items()
        for n in (1, *copies.get(name, ()))
    }
    # The loops of a kernel's first launch do what all of its launches do, with all it takes.
    for key in [key for key in launches if key.endswith("/1")]:
        kernel, first = scheduled[key[:-2].partition("*")[0]], launches[key[:-2]]
        count = len(kernel.inputs) + len(kernel.outputs) + len(kernel.scratch)
        launches[key[:-2]] = replace(first, parameters=tuple(range(count * first.copies)))
        text[launches[key].symbol] = []
    return json.dumps(text).encode(), launches


class HostDriver(TimingDriver):
    """Runs images of ``compiled`` as loops."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, int, int, int]] = []
        self.memory: dict[int, np.ndarray[Any, Any]] = {}

    def load(self, image: bytes) -> dict[str, Any]:
        try:
            kernels: dict[str, Any] = json.loads(image)
        except ValueError as err:
            raise ValueError("the driver refuses the image") from err
        return kernels

    def function(self, module: dict[str, Any], symbol: str, shared_bytes: int) -> Any:
        if symbol not in module:
            raise ValueError(symbol)
        if not module[symbol]:
            return symbol, None, 0
        graph, sketch, decisions = module[symbol]
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
    """The CPU's tensors, compiled for the card."""

    device = torch.device("cpu")
    dtypes = frozenset(("float32", "float16", "bfloat16", "int64", "int32", "bool"))
    checks_indices = False

    def __init__(self) -> None:
        self.driver = HostDriver()

    @classmethod
    def claim(cls, where: torch.device, config: Config) -> Device | None:
        return cls() if where.type == "cpu" else None

    def context(self, config: Config) -> Context:
        return Context.of(config, TargetSpec.cuda(CARD), fingerprint())

    def toolchain(self, threads: int) -> Toolchain:
        return CudaToolchain(self.driver, compiled)

    def executor(self, config: Config, threads: int) -> MeasureExecutor:
        return cuda_executor(fingerprint(), "", config.seed, BUILDER)

    def capabilities(self) -> Capabilities:
        return capabilities()


@contextlib.contextmanager
def instead_of_cpu(monkeypatch: Any) -> Iterator[PretendDevice]:
    """Inside, graphs of the CPU are compiled for the pretend card."""
    device = PretendDevice()

    class Kept(PretendDevice):
        @classmethod
        def claim(cls, where: torch.device, config: Config) -> Device | None:
            return device

    monkeypatch.setattr(devices, "DEVICES", (Kept,))
    yield device
