"""Kernels are built once: beside this process, kept, and linked into whatever needs them."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.compile.agreement import assert_equal
from torch_pruner.compiler import driver, host_toolchain
from torch_pruner.compiler.building import library
from torch_pruner.graph.streamed import past_caches

pytestmark = pytest.mark.tvm


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that had to be built since."""
    found: list[str] = []
    make = library.kernel_job

    def noted(name: str, *given: object, **how: object) -> object:
        found.append(name)
        return make(name, *given, **how)

    monkeypatch.setattr(library, "kernel_job", noted)
    return found


def first(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w)


def second(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Another graph with the kernel of ``first``, and one more."""
    return torch.relu(torch.relu(x @ w) @ w).softmax(-1)


def test_a_kernel_that_is_kept_is_not_built_for_a_new_graph(cold, built) -> None:
    x, w = torch.randn(24, 24), torch.randn(24, 24)
    assert_equal(cold.compile(first)(x, w), first(x, w))
    assert len(built) == 1
    known = set(built)
    built.clear()
    assert_equal(cold.compile(second)(x, w), second(x, w))
    assert built
    assert not known & set(built)


def test_kernels_that_are_damaged_are_built_again(cold, built, monkeypatch, tmp_path) -> None:
    from torch_pruner.codegen.build.kernel_object import KernelObject

    x, w = torch.randn(20, 20), torch.randn(20, 20)
    assert_equal(cold.compile(first)(x, w), first(x, w))
    before, built[:] = list(built), []

    def damaged(_data: bytes) -> KernelObject:
        raise ValueError("damage")

    monkeypatch.setattr(KernelObject, "from_bytes", staticmethod(damaged))
    assert_equal(cold.compile(second)(x, w), second(x, w))
    assert set(before) <= set(built)


def test_kernels_that_spare_the_caches_are_others(cold, built, monkeypatch) -> None:
    """Whether they do depends on what is beside them in the program: each way is built and kept."""
    model, x = torch.nn.Linear(80, 96), torch.randn(1, 80)
    sizes = {"few": 96 * 80 * 4, "much": 96 * 80 * 4 - 1}
    counts = {}
    for name in ("few", "much", "few", "much"):
        monkeypatch.setattr(
            driver, "past_caches", lambda *given, n=sizes[name]: past_caches(*given[:2], n)
        )
        torch._dynamo.reset()
        with torch.no_grad():
            assert_equal(cold.compile(model)(x), model(x))
        counts.setdefault(name, len(built))
        assert len(built) == counts["few"] + (len(counts) - 1)


def test_without_a_c_compiler_kernels_are_built_in_memory(cold, built, monkeypatch) -> None:
    monkeypatch.setattr(host_toolchain, "c_compiler", lambda: None)
    monkeypatch.setattr("torch_pruner.codegen.build.lower.c_compiler", lambda: None)
    x, w = torch.randn(12, 12), torch.randn(12, 12)
    assert_equal(cold.compile(first)(x, w), first(x, w))
    assert not built


def test_where_no_file_can_be_written_kernels_are_built_in_memory(
    cold, monkeypatch, caplog
) -> None:
    def full(*_given: object, **_named: object) -> None:
        raise OSError(28, "No space left on device")

    x, w = torch.randn(10, 10), torch.randn(10, 10)
    monkeypatch.setattr(library, "build_library", full)
    with caplog.at_level(logging.WARNING, "torch_pruner"):
        assert_equal(cold.compile(first)(x, w), first(x, w))
    # A file of it would have no entry that starts threads, and be taken for damaged.
    assert "cannot be kept for the next process" in caplog.text
