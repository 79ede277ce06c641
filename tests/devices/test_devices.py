"""The devices of the list: each keeps the contract, and the first that claims a graph has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.contracts.device import DeviceContract
from tests.contracts.toolchain import ToolchainContract
from tests.contracts.vendor import VendorContract
from tests.gpu import pretend_gpu
from torch_pruner import devices, exc
from torch_pruner.cards import CARDS
from torch_pruner.compiler.executors import close_all
from torch_pruner.config import Config
from torch_pruner.devices import cuda, device_for, fleet
from torch_pruner.devices.absent import AbsentCard
from torch_pruner.devices.aten import AtenVendor
from torch_pruner.devices.cpu import CpuDevice, EagerDevice, HostToolchain
from torch_pruner.devices.fleet import FleetDevice
from torch_pruner.fingerprint import DeviceFingerprint
from torch_pruner.target import TargetSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch_pruner.devices.base import Device

pytestmark = pytest.mark.tvm
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
FLEET = {"executor": "rpc", "tracker": "nowhere:9190/key"}


@pytest.fixture(scope="module", autouse=True)
def workers_end() -> Iterator[None]:
    yield
    close_all()


class TestCpu(DeviceContract):
    own_name = "cpu"

    @pytest.fixture
    def device(self) -> Device:
        return CpuDevice()


class TestFleet(DeviceContract):
    """A fleet whose machines are not like this one: what is compiled for it runs there alone."""

    times = False

    @pytest.fixture
    def device(self, monkeypatch: pytest.MonkeyPatch) -> Device:
        class Unlike(FleetDevice):
            builds_only = False

            @classmethod
            def claim(cls, where: torch.device, config: Config) -> Device | None:
                return cls() if FleetDevice.claim(where, config) else None

        there = SimpleNamespace(
            wait_ready=lambda: None, target=TargetSpec.detect(), device=DeviceFingerprint.detect()
        )
        monkeypatch.setattr(fleet, "_fleet", lambda _config: there)
        return Unlike()

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return FLEET


class TestAbsentCard(DeviceContract):
    own_name = "a100"
    times = False

    @pytest.fixture
    def device(self, monkeypatch: pytest.MonkeyPatch) -> Device:
        made = "torch_pruner.codegen.build.gpu.program.compile_kernels"
        monkeypatch.setattr(made, pretend_gpu.compiled)
        return AbsentCard(CARDS["a100"])

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"target": {"kind": "cuda", "model": "a100"}}


class TestHostToolchain(ToolchainContract):
    @pytest.fixture
    def toolchain(self) -> HostToolchain:
        return HostToolchain(1)

    @pytest.fixture
    def target(self) -> TargetSpec:
        return TargetSpec.detect(1)

    @pytest.fixture
    def without_compiler(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
        return lambda: without(
            "torch_pruner.compiler.building.library", "build_library", monkeypatch
        )


class TestAten(VendorContract):
    @pytest.fixture
    def vendor(self) -> AtenVendor:
        return AtenVendor(rounds=3)


def without(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{module}.{name}", lambda *_, **__: pytest.fail("built"))


@pytest.mark.parametrize(
    ("where", "options", "kind"),
    [
        (CPU, {}, CpuDevice),
        (CPU, {"target": {"kind": "llvm", "mcpu": "haswell"}}, CpuDevice),
        (CPU, {"target": {"kind": "cuda", "model": "h200"}}, AbsentCard),
        (CPU, FLEET, FleetDevice),
        (GPU, {}, EagerDevice),
        (GPU, {"target": {"kind": "cuda", "model": "h200"}}, AbsentCard),
        (torch.device("xpu"), {}, EagerDevice),
        (torch.device("xpu"), FLEET, EagerDevice),
    ],
)
def test_who_has_a_graph_where_no_gpu_is(
    monkeypatch: pytest.MonkeyPatch, where: torch.device, options: dict[str, Any], kind: type
) -> None:
    monkeypatch.setattr(cuda, "_at_hand", lambda _index: None)
    found = device_for(where, Config.from_options(options=options))
    assert type(found) is kind
    if kind is EagerDevice:
        assert (found.device, found.dtypes) == (where, frozenset())


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> cuda.CudaDevice:
    """An a100 at ``GPU``, as far as can be asked without one."""
    made = cuda.CudaToolchain(pretend_gpu.HostDriver(), pretend_gpu.compiled)
    monkeypatch.setattr(cuda.CudaToolchain, "at_hand", lambda *_: made)
    found = cuda.CudaDevice(GPU, CARDS["a100"], pretend_gpu.fingerprint(), "GPU-1")
    monkeypatch.setattr(cuda, "_at_hand", lambda _index: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return found


def test_a_gpu_at_hand(card: cuda.CudaDevice) -> None:
    """Workers run its kernels first, unless it was asked for."""
    asked = Config.from_options(options={"target": {"kind": "cuda"}})
    assert device_for(GPU, asked) is card
    assert (
        device_for(GPU, Config.from_options(options={"target": {"kind": "cuda", "model": "a100"}}))
        is card
    )
    assert device_for(GPU, Config.from_options()) is card
    assert card.runs_first(Config.from_options())
    assert not card.runs_first(asked)
    assert type(device_for(GPU, Config.from_options(options=FLEET))) is EagerDevice
    stayed = device_for(CPU, asked)
    assert type(stayed) is CpuDevice
    assert stayed.context(asked).target.kind == "llvm"
    assert card.context(asked).target == TargetSpec.cuda(CARDS["a100"])
    assert devices.bundle_device("cuda:0").fingerprint == card.fingerprint


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"target": {"kind": "cuda", "model": "h200"}}, "target"),
        ({"target": {"kind": "cuda"}, **FLEET}, "executor"),
    ],
)
def test_what_a_gpu_at_hand_cannot_be(
    card: cuda.CudaDevice, options: dict[str, Any], option: str
) -> None:
    with pytest.raises(exc.OptionError) as caught:
        device_for(GPU, Config.from_options(options=options))
    assert caught.value.option == option


def test_a_bundle_s_device_is_named_or_refused() -> None:
    assert devices.bundle_device("cpu").fingerprint == DeviceFingerprint.detect()
    assert devices.bundle_device("H200").target.card is CARDS["h200"]
    with pytest.raises(exc.OptionError, match=r"expected one of cpu, .*h200.*cuda"):
        devices.bundle_device("abacus")
    with pytest.raises(exc.OptionError, match="nothing is compiled for 'xpu'"):
        devices.bundle_device("xpu")
