"""A card that is not at hand: kernels are drafted, built and kept for machines that have it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torch_pruner.cards import CARDS, Card
from torch_pruner.compiler.bundles import BundleDevice
from torch_pruner.compiler.context import Context
from torch_pruner.devices.base import Device
from torch_pruner.devices.cuda import ANY_GPU, DTYPES, CudaToolchain, capabilities
from torch_pruner.exc import MeasureError
from torch_pruner.fingerprint import DeviceFingerprint
from torch_pruner.target import TargetSpec

if TYPE_CHECKING:
    from torch_pruner.compiler.capabilities import Capabilities
    from torch_pruner.compiler.driver import Compiler
    from torch_pruner.compiler.toolchain import Toolchain
    from torch_pruner.config import Config
    from torch_pruner.log import PhaseTimer
    from torch_pruner.tuner.measure.base import MeasureExecutor


class AbsentCard(Device):
    """A card that the option ``target`` names.

    Graphs are captured on the CPU, and eager runs them there.
    """

    names = tuple(CARDS)
    device = torch.device("cpu")
    dtypes = DTYPES
    checks_indices = True
    builds_only = True

    def __init__(self, card: Card) -> None:
        self.card = card

    @classmethod
    def claim(cls, where: torch.device, config: Config) -> Device | None:
        if config.target == "auto" or (config.target == ANY_GPU and torch.cuda.is_available()):
            return None
        card = TargetSpec.resolve(config.target).card
        return None if card is None else AbsentCard(card)

    @classmethod
    def named(cls, name: str) -> BundleDevice | None:
        card = CARDS.get(name.lower())
        if card is None:
            return None
        return BundleDevice(DeviceFingerprint.of_card(card), TargetSpec.cuda(card))

    def context(self, config: Config) -> Context:
        device = DeviceFingerprint.of_card(self.card)
        return Context.of(config, TargetSpec.cuda(self.card), device)

    def toolchain(self, threads: int) -> Toolchain:
        return CudaToolchain(None)

    def executor(self, config: Config, threads: int) -> MeasureExecutor:
        raise MeasureError(f"no {self.card.name} is at hand: there is nothing to time on")

    def capabilities(self) -> Capabilities:
        return capabilities()

    def compiler(self, config: Config, timer: PhaseTimer | None = None) -> Compiler:
        return super().compiler(config.replace(effort="none"), timer)  # nothing to time on


DEVICE = AbsentCard
