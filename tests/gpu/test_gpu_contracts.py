"""The pretended card keeps the contracts of a device and of a toolchain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.contracts.device import DeviceContract
from tests.contracts.toolchain import ToolchainContract
from tests.gpu import pretend_gpu
from torch_pruner.compiler.executors import close_all
from torch_pruner.devices.cuda import CudaToolchain
from torch_pruner.target import TargetSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.tvm


class TestDevice(DeviceContract):
    @pytest.fixture
    def device(self) -> Iterator[pretend_gpu.PretendDevice]:
        yield pretend_gpu.PretendDevice()
        close_all()


class TestToolchain(ToolchainContract):
    @pytest.fixture
    def toolchain(self) -> CudaToolchain:
        return CudaToolchain(pretend_gpu.HostDriver(), pretend_gpu.compiled)

    @pytest.fixture
    def target(self) -> TargetSpec:
        return TargetSpec.cuda(pretend_gpu.CARD)

    @pytest.fixture
    def without_compiler(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
        made = "torch_pruner.codegen.build.gpu.program.build_gpu_program"
        return lambda: monkeypatch.setattr(made, lambda *_, **__: pytest.fail("built"))
