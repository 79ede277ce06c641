"""For which device, threads and code generator kernels are compiled: what keys are made of."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.cache import GraphKey, KernelKey
from torch_pruner.fingerprint import DeviceFingerprint
from torch_pruner.target import TargetSpec
from torch_pruner.versions import installed_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.config import Config

# Raise it whenever the same decisions generate other code. 43 and 45 were taken by code that is
# gone.
CODEGEN_VERSION = 58
SPACE_VERSION = 39  # raise it whenever the sketches' options change
GPU_VERSION = 2  # raise it for either of them where kernels of GPUs alone change


def codegen_version(kind: str = "cpu") -> str:
    """The versions of what generates code, as keys have them. ``kind``: of device, cpu or gpu."""
    tvm = installed_version("apache-tvm")
    version = f"tvm {tvm} + codegen {CODEGEN_VERSION} + space {SPACE_VERSION}"
    return f"{version} + gpu {GPU_VERSION}" if kind == "gpu" else version


@dataclass(frozen=True, slots=True)
class Context:
    """For which device and with how many threads kernels are compiled; part of every key."""

    target: TargetSpec
    device: DeviceFingerprint
    threads: int
    numerics: str
    hint: str = "torch-pruner tune MODEL"

    @staticmethod
    def make(config: Config, threads: int) -> Context:
        """The CPU of this machine. Raises ``OptionError`` for a target that is none."""
        target = TargetSpec.resolve(config.target, threads)
        return Context.of(config, target, DeviceFingerprint.detect(), threads)

    @staticmethod
    def of(
        config: Config, target: TargetSpec, device: DeviceFingerprint, threads: int = 1
    ) -> Context:
        """Any device; kernels that have no CPU threads to ask for have one."""
        numerics = json.dumps(dict(config.key_fields()), sort_keys=True, separators=(",", ":"))
        return Context(target, device, threads, numerics)

    @property
    def codegen(self) -> str:
        return codegen_version(self.device.kind)

    def kernel_key(self, workload: str) -> KernelKey:
        return KernelKey(
            workload,
            self.target.key(),
            self.device.digest(),
            self.threads,
            self.numerics,
            self.codegen,
        )

    def graph_key(self, text: str, kernels: Sequence[str]) -> GraphKey:
        graph = hashlib.sha256(text.encode()).hexdigest()
        return GraphKey(
            graph,
            tuple(kernels),
            self.target.key(),
            self.device.digest(),
            self.threads,
            self.numerics,
            self.codegen,
        )
