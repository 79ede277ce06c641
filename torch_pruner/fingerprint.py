"""Which physical device runs kernels: a value for cache keys, bundles and records.

In: what the system or a GPU's driver tells. Out: fields that compare and hash. Knows neither torch
nor TVM.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch_pruner.target import ISA_FLAGS, CpuProbe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.cards import Card

GiB = 1 << 30


@dataclass(frozen=True, slots=True)
class DeviceFingerprint:
    """The physical device that ran a kernel. Equal fingerprints promise comparable timings."""

    kind: str
    name: str
    model: str
    isa: tuple[str, ...]
    physical_cores: int
    logical_cores: int
    l1_bytes: int
    l2_bytes: int
    l3_bytes: int

    @staticmethod
    def detect(probe: CpuProbe | None = None) -> DeviceFingerprint:
        """The CPU of this machine."""
        cpu = probe or CpuProbe.read()
        return DeviceFingerprint(
            kind="cpu",
            name=cpu.name,
            model=f"{cpu.vendor or cpu.machine}-{cpu.family}-{cpu.model}",
            isa=tuple(sorted(ISA_FLAGS & cpu.flags)),
            physical_cores=cpu.physical_cores,
            logical_cores=cpu.logical_cores,
            l1_bytes=cpu.l1_bytes,
            l2_bytes=cpu.l2_bytes,
            l3_bytes=cpu.l3_bytes,
        )

    @staticmethod
    def of_gpu(
        name: str,
        arch: str,
        multiprocessors: int,
        memory_bytes: int,
        *,
        shared_bytes: int,
        l2_bytes: int,
        driver: str,
    ) -> DeviceFingerprint:
        """A GPU. ``driver``: its major version; "" for a card that is not at hand.

        A GiB is the unit of ``memory_bytes`` here: what firmware and error correction keep for
        themselves differs between equal cards.
        """
        return DeviceFingerprint(
            kind="gpu",
            name=name,
            model=f"{arch}-driver{driver}" if driver else arch,
            isa=(arch,),
            physical_cores=multiprocessors,
            logical_cores=multiprocessors,
            l1_bytes=shared_bytes,
            l2_bytes=l2_bytes,
            l3_bytes=round(memory_bytes / GiB) * GiB,
        )

    @staticmethod
    def of_card(card: Card) -> DeviceFingerprint:
        """A GPU that is not at hand, by its data sheet. Equal to that of no device."""
        return DeviceFingerprint.of_gpu(
            card.name,
            card.arch,
            card.multiprocessors,
            0,
            shared_bytes=card.shared_bytes,
            l2_bytes=card.l2_bytes,
            driver="",
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "isa": list(self.isa)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> DeviceFingerprint:
        """Inverse of ``to_json``. Raises ``ValueError`` on anything that is not a fingerprint."""
        try:
            return DeviceFingerprint(**{**data, "isa": tuple(str(f) for f in data["isa"])})
        except (TypeError, KeyError) as err:
            raise ValueError(f"not a device fingerprint: {err}") from err

    def digest(self) -> str:
        """sha256 of the canonical JSON: equal in any process on equal devices."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()
