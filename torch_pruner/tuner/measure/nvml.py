"""The meter of NVIDIA's GPUs: NVML, where the package ``nvidia-ml-py`` is installed.

The driver counts millijoules since it was loaded, on cards since Volta. Source:
docs.nvidia.com/deploy/nvml-api, ``nvmlDeviceGetTotalEnergyConsumption``.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch_pruner.exc import MeterError
from torch_pruner.tuner.measure.meter import Meter

LIBRARY = "pynvml"
INSTALL = "pip install nvidia-ml-py"


class NvmlMeter(Meter):
    """Joules of one GPU with its memory: of all that runs there, other processes' work too."""

    name = "NVML"
    period_s = 0.1  # as the slowest cards renew what they tell

    def __init__(self, device: str = "0") -> None:
        """``device``: the GPU's number or its UUID (``GPU-...``)."""
        try:
            self._nvml: Any = importlib.import_module(LIBRARY)
        except ImportError as err:
            raise MeterError(self.name, f"{LIBRARY} cannot be imported: {err}", INSTALL) from err
        try:
            self._nvml.nvmlInit()
            by_uuid, by_index = (
                self._nvml.nvmlDeviceGetHandleByUUID, self._nvml.nvmlDeviceGetHandleByIndex
            )  # fmt: skip
            self._handle = by_index(int(device)) if device.isdecimal() else by_uuid(device)
        except self._nvml.NVMLError as err:
            raise MeterError(self.name, f"GPU {device}: {err}") from err
        self.joules()

    def joules(self) -> float:
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) * 1e-3
        except self._nvml.NVMLError as err:
            raise MeterError(self.name, f"the card does not tell its energy: {err}") from err
