"""The builder that workers of a GPU use: candidates to machine code, run on the device.

An error of the device is sticky: everything after it fails, too. So the process ends with it, and
the executor, which sees who was running, starts another. Where there is no context or no memory to
be had, no other would fare better, and the process ends with ``UNUSABLE``.
"""

from __future__ import annotations

import os
import sys
import weakref
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from torch_pruner import families
from torch_pruner.codegen.build.gpu.image import GpuEntry, GpuProgram
from torch_pruner.codegen.build.gpu.program import build_gpu_program
from torch_pruner.codegen.build.gpu.timing_driver import CudaTimingDriver, TimingDriver
from torch_pruner.exc import CompileError
from torch_pruner.graph.memory import KernelCall, Place
from torch_pruner.task import Scheduled
from torch_pruner.tuner.measure.builder import BuiltKernel
from torch_pruner.tuner.measure.worker_executor import UNUSABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.graph.ir import Graph
    from torch_pruner.target import TargetSpec
    from torch_pruner.task import Candidate
    from torch_pruner.tuner.measure.builder import Array

LOST = 70  # exit status of a process whose device failed


class CudaBuilder:
    """Implements ``builder.Builder`` on the first visible GPU, or through ``driver``."""

    def __init__(self, driver: TimingDriver | None = None) -> None:
        self._opened = driver
        # Address and size of an array of the host -> address of its copy, and how many calls on it.
        self._copies: dict[tuple[int, int], list[int]] = {}

    @property
    def driver(self) -> TimingDriver:
        """Opened when it is first needed: building needs none."""
        if self._opened is None:
            try:
                self._opened = CudaTimingDriver()
            except (OSError, RuntimeError) as err:
                _end(UNUSABLE, f"the device cannot be opened by another process: {err}")
        return self._opened

    def build(
        self, spec: Graph, target: TargetSpec, threads: int, candidate: Candidate
    ) -> BuiltKernel:
        """Raises ``CompileError``."""
        takes = families.signature_of(spec, candidate)
        program = self.compile(spec, target, candidate)

        loaded: list[GpuEntry] = []

        def bind(arrays: Sequence[Array]) -> Callable[[], object]:
            if not loaded:
                modules = [self.driver.load(image) for image in program.images]
                loaded.append(GpuEntry(program, "main", self.driver, modules))
                # A worker times thousands; whoever has timed one has waited for its kernels.
                for module in modules:
                    weakref.finalize(loaded[0], self.driver.unload, module).atexit = False
            entry = loaded[0]
            table = np.array([self._take(a) for a in arrays], dtype=np.int64)
            address = table.ctypes.data

            def call(_keep: object = (table, list(arrays))) -> None:
                with _OrDie():
                    entry(address)

            weakref.finalize(call, self._release, [_name(a) for a in arrays])
            return call

        return BuiltKernel(
            bind=bind,
            packs=takes.packs,
            outputs=[(b.shape, b.dtype) for b in takes.outputs],
            scratch=[(b.shape, b.dtype) for b in takes.scratch],
            fetch=self._fetch,
        )

    def compile(self, spec: Graph, target: TargetSpec, candidate: Candidate) -> GpuProgram:
        """One kernel as a program of the entry ``main``, on its buffers in order."""
        card = target.card
        if card is None:
            raise CompileError(target.key(), "no card of that name is known")
        takes = families.signature_of(spec, candidate)
        count = len(takes.inputs) + len(takes.outputs) + len(takes.scratch)
        name = spec.digest()
        calls = {"main": [KernelCall(name, tuple(Place(k) for k in range(count)))]}
        return build_gpu_program({name: Scheduled(spec, candidate)}, calls, card)

    def set_threads(self, threads: int) -> None:
        """A GPU has no CPU threads."""

    def seconds(self, calls: Sequence[Callable[[], object]], number: int) -> float | None:
        with _OrDie():
            return self.driver.seconds(calls, number)

    def renewal(self, target: TargetSpec, arrays: Sequence[Array]) -> Callable[[], object] | None:
        return None

    def _take(self, array: Array) -> int:
        """The address of a copy of ``array`` as it is now; memory is shared by calls on one."""
        name = _name(array)
        with _OrDie():
            if name not in self._copies:
                self._copies[name] = [self.driver.allocate(array.nbytes), 0]
            copy = self._copies[name]
            self.driver.copy_in(copy[0], *name)
        copy[1] += 1
        return copy[0]

    def _release(self, names: Sequence[tuple[int, int]]) -> None:
        for name in names:
            copy = self._copies[name]
            copy[1] -= 1
            if not copy[1]:
                self.driver.free(self._copies.pop(name)[0])

    def _fetch(self, outputs: Sequence[Array]) -> None:
        with _OrDie():
            for array in outputs:
                self.driver.copy_out(self._copies[_name(array)][0], *_name(array))


def _name(array: Array) -> tuple[int, int]:
    return array.ctypes.data, array.nbytes


class _OrDie:
    """Ends the process when the device is lost: see the module."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None and issubclass(kind, RuntimeError):
            _end(LOST, f"the device failed: {error}")
        if kind is not None and issubclass(kind, MemoryError):
            _end(UNUSABLE, f"the device has no memory left for it: {error}")


def _end(status: int, why: str) -> NoReturn:
    sys.stderr.write(f"{why}\n")
    sys.stderr.flush()
    os._exit(status)
