"""Which memory the system is asked to back with huge pages."""

from __future__ import annotations

import pytest
import torch

from torch_pruner.dynamo.run import huge_pages
from torch_pruner.dynamo.run.huge_pages import LEAST_BYTES, ask_for

PAGE = 2 << 20


@pytest.fixture
def asked(monkeypatch):
    calls = []
    monkeypatch.setattr(huge_pages, "_madvise", lambda *given: calls.append(given))
    return calls


def test_whole_pages_inside_of_large_memory_are_asked_for(asked):
    memory = torch.empty(3 * PAGE + 64, dtype=torch.uint8)
    assert ask_for(memory) is memory
    ((first, length, _advice),) = asked
    assert first % PAGE == 0
    assert length % PAGE == 0
    assert memory.data_ptr() <= first
    assert first + length <= memory.data_ptr() + memory.nbytes
    assert length >= 2 * PAGE


def test_little_memory_and_other_devices_are_left_alone(asked):
    ask_for(torch.empty(LEAST_BYTES - 1, dtype=torch.uint8))
    ask_for(torch.empty(LEAST_BYTES, dtype=torch.uint8, device="meta"))
    assert not asked


def test_a_system_that_knows_none_is_not_asked(monkeypatch):
    monkeypatch.setattr(huge_pages, "_madvise", None)
    memory = torch.empty(2 * PAGE, dtype=torch.uint8)
    assert ask_for(memory) is memory


def test_pages_that_were_asked_for_hold_what_is_written():
    memory = ask_for(torch.empty(4 * PAGE, dtype=torch.uint8))
    memory.fill_(7)
    assert int(memory.sum(dtype=torch.int64)) == 7 * memory.numel()
