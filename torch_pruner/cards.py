"""Constants of GPUs that analytical models and capacity checks read, by name.

From the vendor's data sheets and the tables of the CUDA programming guide ("Compute capabilities"):
rates are peaks without sparsity, tensor-core rates with float32 sums. Users add a card by
constructing a ``Card`` and passing it on; nothing here is measured.
"""

from __future__ import annotations

from dataclasses import dataclass

KiB, MiB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Card:
    """One model. Sizes in bytes, rates in operations or bytes per second (an FMA is two)."""

    name: str
    arch: str  # what code is generated for: sm_80, sm_90a, ...
    multiprocessors: int
    frequency_hz: float  # boost
    dram_bytes_per_s: float
    l2_bytes: int
    shared_bytes: int  # of a multiprocessor, for all of its blocks
    shared_bytes_per_block: int  # at most, where a kernel opts in
    threads: int  # of a multiprocessor at once
    blocks: int
    float32_flops: float
    float16_flops: float  # tensor cores; bfloat16 is the same where there is any
    tf32_flops: float = 0.0  # none: the card has no such mode

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability: (major, minor)."""
        digits = self.arch.removeprefix("sm_").rstrip("af")
        return int(digits[:-1]), int(digits[-1])

    @property
    def registers(self) -> int:
        """32-bit registers of a multiprocessor."""
        return 64 * KiB

    @property
    def has_bfloat16(self) -> bool:
        return self.capability >= (8, 0)

    @property
    def has_warpgroup_products(self) -> bool:
        """Whether warpgroups multiply from shared memory (``wgmma``): a mode of Hopper alone."""
        return self.capability == (9, 0) and self.arch.endswith("a")

    @property
    def has_early_launches(self) -> bool:
        """Whether kernels are launched while those in front of them work, and wait themselves."""
        return self.capability >= (9, 0)

    def peak_flops(self, dtype: str, *, tensor_cores: bool = True) -> float:
        """Operations per second on ``dtype``; 16-bit types without tensor cores are float32's."""
        if tensor_cores and (dtype == "float16" or (dtype == "bfloat16" and self.has_bfloat16)):
            return self.float16_flops
        return self.float32_flops


_AMPERE_86 = (6 * MiB, 100 * KiB, 99 * KiB, 1536, 16)
_HOPPER = (50 * MiB, 228 * KiB, 227 * KiB, 2048, 32, 67e12, 989e12, 494e12)
CARDS = {
    card.name: card
    for card in (
        Card("h200", "sm_90a", 132, 1.98e9, 4.8e12, *_HOPPER),
        Card("h100", "sm_90a", 132, 1.98e9, 3.35e12, *_HOPPER),
        Card(
            "a100", "sm_80", 108, 1.41e9, 2.04e12,
            40 * MiB, 164 * KiB, 163 * KiB, 2048, 32, 19.5e12, 312e12, 156e12,
        ),
        Card("a10", "sm_86", 72, 1.695e9, 600e9, *_AMPERE_86, 31.2e12, 125e12, 62.5e12),
        Card("rtx3090", "sm_86", 82, 1.695e9, 936e9, *_AMPERE_86, 35.6e12, 71.2e12, 35.6e12),
        Card(
            "b200", "sm_100", 148, 1.965e9, 8e12,
            126 * MiB, 228 * KiB, 227 * KiB, 2048, 32, 74.4e12, 2250e12, 1125e12,
        ),
        Card(
            "rtx5090", "sm_120", 170, 2.407e9, 1792e9,
            96 * MiB, 100 * KiB, 99 * KiB, 1536, 24, 104.8e12, 209.6e12, 104.8e12,
        ),
        Card(
            "l4", "sm_89", 58, 2.04e9, 300e9,
            48 * MiB, 100 * KiB, 99 * KiB, 1536, 24, 30.3e12, 121e12, 60e12,
        ),
        Card(
            "rtx4090", "sm_89", 128, 2.52e9, 1008e9,
            72 * MiB, 100 * KiB, 99 * KiB, 1536, 24, 82.6e12, 165.2e12, 82.6e12,
        ),
        Card(
            "t4", "sm_75", 40, 1.59e9, 320e9,
            4 * MiB, 64 * KiB, 64 * KiB, 1024, 16, 8.1e12, 65e12,
        ),
        Card(
            "orin", "sm_87", 16, 1.3e9, 204.8e9,
            4 * MiB, 164 * KiB, 163 * KiB, 1536, 16, 5.3e12, 42.5e12, 21.2e12,
        ),
    )
}  # fmt: skip


def card_like(name: str, capability: tuple[int, int]) -> Card | None:
    """The card that a device of this name is, else one whose code it runs, else None.

    Ranking schedules is as good as the constants are. Code is the same for one compute capability,
    and runs on those of the same major version that came later, unless it is for that one alone
    (``sm_90a``).
    """
    plain = name.lower().replace(" ", "").replace("-", "")
    alike = [c for c in CARDS.values() if c.capability == capability]
    if not alike:
        major, minor = capability
        older = [
            c
            for c in CARDS.values()
            if c.capability[0] == major and c.capability[1] < minor and c.arch[-1].isdigit()
        ]
        newest = max((c.capability for c in older), default=None)
        alike = [c for c in older if c.capability == newest]
    return next((c for c in alike if c.name in plain), alike[0] if alike else None)
