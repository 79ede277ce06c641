"""The CPUs of a fleet (``executor="rpc"``): other machines, behind a tracker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.compiler.context import Context
from torch_pruner.compiler.executors import release_later, shared_executor
from torch_pruner.devices.cpu import CpuDevice
from torch_pruner.devices.dtypes import DEFAULT_DTYPES
from torch_pruner.fingerprint import DeviceFingerprint

if TYPE_CHECKING:
    import torch

    from torch_pruner.compiler.bundles import BundleDevice
    from torch_pruner.config import Config
    from torch_pruner.devices.base import Device
    from torch_pruner.tuner.measure.base import MeasureExecutor
    from torch_pruner.tuner.measure.meter import MeterSource
    from torch_pruner.tuner.measure.rpc import RpcExecutor


class FleetDevice(CpuDevice):
    """They time candidates. What is compiled runs here if this machine is like them, which is known
    when a context was asked for; else eager does.
    """

    def __init__(self) -> None:
        self.dtypes = DEFAULT_DTYPES  # graphs are cut before a machine of theirs was asked

    @classmethod
    def claim(cls, where: torch.device, config: Config) -> Device | None:
        return FleetDevice() if config.executor == "rpc" and where.type == "cpu" else None

    @classmethod
    def named(cls, name: str) -> BundleDevice | None:
        return None

    def context(self, config: Config) -> Context:
        """Asks the devices of ``config.tracker``. Raises ``MeasureError`` if none answers."""
        executor = _fleet(config)
        executor.wait_ready()
        release_later()
        target = executor.target
        assert target is not None, "it is ready"
        self.builds_only = executor.device != DeviceFingerprint.detect()
        threads = config.threads or target.cores
        return Context.of(config, target.with_threads(threads), executor.device, threads)

    def executor(self, config: Config, threads: int) -> MeasureExecutor:
        return _fleet(config)

    def meter(self) -> MeterSource | None:
        return None  # that of this machine tells nothing of them

    def vendor(self) -> None:
        """The library of this machine is not theirs."""
        return


def _fleet(config: Config) -> RpcExecutor:
    from torch_pruner.tuner.measure.rpc import RpcExecutor

    tracker, seed = config.tracker, config.seed
    assert tracker is not None, "options are checked where they are read"
    # One thread, of what runs here; each task says its own.
    found = shared_executor(("rpc", tracker, seed), lambda: RpcExecutor(tracker, 1, seed=seed))
    assert isinstance(found, RpcExecutor)
    return found


DEVICE = FleetDevice
