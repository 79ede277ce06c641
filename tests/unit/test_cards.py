"""The table of GPUs: sizes and rates that agree with each other."""

from __future__ import annotations

import pytest

from torch_pruner.cards import CARDS, Card, card_like
from torch_pruner.target import TargetSpec

KiB = 1 << 10
CASES = [pytest.param(card, id=name) for name, card in CARDS.items()]


@pytest.mark.parametrize("card", CASES)
def test_rates_agree_with_clock_and_cores(card: Card) -> None:
    """64 or 128 float32 units a multiprocessor, each a multiply-add per cycle."""
    units = card.float32_flops / 2 / card.frequency_hz / card.multiprocessors
    assert min(abs(units / n - 1) for n in (64, 128)) < 0.05
    assert card.float16_flops >= 2 * card.float32_flops or card.name == "rtx4090"
    assert card.tf32_flops <= card.float16_flops / 1.9


@pytest.mark.parametrize("card", CASES)
def test_sizes(card: Card) -> None:
    assert 48 * KiB <= card.shared_bytes_per_block <= card.shared_bytes
    assert card.shared_bytes - card.shared_bytes_per_block in (0, KiB)  # one is the system's
    assert card.threads % 32 == 0
    assert card.l2_bytes > card.shared_bytes


def test_capabilities() -> None:
    assert CARDS["h200"].capability == (9, 0)
    assert CARDS["t4"].capability == (7, 5)
    assert not CARDS["t4"].has_bfloat16
    assert CARDS["h200"].has_early_launches
    assert not CARDS["a100"].has_early_launches
    assert CARDS["t4"].peak_flops("bfloat16") == CARDS["t4"].float32_flops
    assert CARDS["a100"].peak_flops("bfloat16") == CARDS["a100"].float16_flops
    assert CARDS["a100"].peak_flops("float16", tensor_cores=False) == 19.5e12


@pytest.mark.parametrize("card", CASES)
def test_a_target_of_a_card(card: Card) -> None:
    target = TargetSpec.cuda(card)
    assert target.kind == "cuda"
    assert target.card is card
    assert TargetSpec.from_json(target.to_json()) == target
    assert card.arch in target.key()
    assert TargetSpec.detect().card is None


@pytest.mark.parametrize(
    ("name", "capability", "want"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), "h100"),
        ("NVIDIA GeForce RTX 3090", (8, 6), "rtx3090"),
        ("NVIDIA RTX A2000", (8, 6), "a10"),
        ("NVIDIA B300", (10, 3), "b200"),  # runs what is for 10.0
        ("something", (12, 1), "rtx5090"),
        ("something", (9, 1), None),  # what is for 9.0 is for that one alone
        ("something", (7, 0), None),
        ("something", (13, 0), None),
    ],
)
def test_a_card_like_a_device(name: str, capability: tuple[int, int], want: str | None) -> None:
    found = card_like(name, capability)
    assert (found and found.name) == want
