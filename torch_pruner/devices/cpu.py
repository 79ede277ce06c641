"""The CPU of this machine, and what has no code generator."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING

import torch

from torch_pruner.compiler.bundles import BundleDevice
from torch_pruner.compiler.context import Context
from torch_pruner.compiler.executors import local_executor
from torch_pruner.compiler.host_toolchain import HostToolchain
from torch_pruner.devices import forked_threads, openmp
from torch_pruner.devices.aten import AtenVendor
from torch_pruner.devices.base import Device, parsed
from torch_pruner.devices.dtypes import DEFAULT_DTYPES, DTYPES
from torch_pruner.target import TargetSpec

if TYPE_CHECKING:
    from torch_pruner.compiler.toolchain import Toolchain
    from torch_pruner.compiler.vendor import Vendor
    from torch_pruner.config import Config
    from torch_pruner.tuner.measure.base import MeasureExecutor
    from torch_pruner.tuner.measure.meter import MeterSource


class CpuDevice(Device):
    """The CPU, with as many threads as the options say."""

    names = ("cpu",)
    device = torch.device("cpu")
    checks_indices = True
    host_memory = True
    in_background = True

    def __init__(self, target: str = "auto") -> None:
        self.dtypes = _dtypes(_own_target(target))

    @classmethod
    def claim(cls, where: torch.device, config: Config) -> Device | None:
        return CpuDevice(config.target) if where.type == "cpu" else None

    @classmethod
    def named(cls, name: str) -> BundleDevice | None:
        found = parsed(name)
        return BundleDevice.cpu() if found is not None and found.type == "cpu" else None

    def context(self, config: Config) -> Context:
        config = config.replace(target=_own_target(config.target))
        return Context.make(config, config.threads or forked_threads.threads())

    def toolchain(self, threads: int) -> Toolchain:
        return HostToolchain(threads, openmp=openmp.functions())

    def executor(self, config: Config, threads: int) -> MeasureExecutor:
        meter = self.meter() if config.objective == "energy" else None
        return local_executor(threads, config.seed, meter)

    def meter(self) -> MeterSource | None:
        from torch_pruner.tuner.measure.meter import RAPL

        return RAPL

    def vendor(self) -> Vendor | None:
        return AtenVendor()


class EagerDevice(CpuDevice):
    """A device without a code generator: eager runs everything."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dtypes = frozenset()

    def meter(self) -> MeterSource | None:
        return None


@cache
def _dtypes(target: str) -> frozenset[str]:
    """Names of the dtypes that are compiled for a CPU that the option ``target`` names."""
    return frozenset(DTYPES) if TargetSpec.resolve(target).float16 else DEFAULT_DTYPES


def _own_target(option: str) -> str:
    """The target of the CPU: of a model on another device, the graph that stayed behind has none
    of its own."""
    return option if option == "auto" or json.loads(option)["kind"] == "llvm" else "auto"


DEVICE = CpuDevice
