"""What every vendor promises."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_pruner.graph.ir import Graph, GraphBuilder

if TYPE_CHECKING:
    from torch_pruner.compiler.vendor import Vendor


def product(size: int) -> Graph:
    b = GraphBuilder()
    x = b.input(0, (size, size), "float32")
    w = b.input(1, (size, size), "float32", static=True)
    return b.finish([b.pointwise("relu", b.matmul(x, w))])


def unmapped() -> Graph:
    """A sum along an axis, which libraries have no faster kernels for."""
    b = GraphBuilder()
    x = b.input(0, (8, 8), "float32")
    return b.finish([b.reduce("sum", b.pointwise("exp", x), (1,))])


class VendorContract:
    """Subclasses give a fixture ``vendor``, of a library that multiplies matrices."""

    large = 768  # rows of a product that takes longer than one of four

    @pytest.fixture
    def vendor(self) -> Vendor:
        raise NotImplementedError

    def test_seconds_are_of_work_that_was_done(self, vendor) -> None:
        """Also under AOTAutograd's fake mode, which is on while a backend compiles."""
        with FakeTensorMode():
            small, large = vendor.latency_s(product(4)), vendor.latency_s(product(self.large))
        assert 0 < small < large < math.inf

    def test_what_it_cannot_run_is_none(self, vendor) -> None:
        assert vendor.latency_s(unmapped()) is None

    def test_it_runs_what_it_has_a_time_for(self, vendor) -> None:
        assert vendor.runs(product(4))
        assert vendor.runs(unmapped()) in (True, False)

    def test_operands_of_two_dtypes_are_refused_or_run(self, vendor) -> None:
        b = GraphBuilder()
        x, w = b.input(0, (8, 8), "float32"), b.input(1, (8, 8), "int8", static=True)
        seconds = vendor.latency_s(b.finish([b.matmul(x, w)]))
        assert seconds is None or seconds > 0

    def test_nobody_s_random_numbers_change(self, vendor) -> None:
        before = torch.get_rng_state()
        vendor.latency_s(product(4))
        assert torch.equal(before, torch.get_rng_state())

    def test_gradients_are_left_as_they_are(self, vendor) -> None:
        with torch.enable_grad():
            vendor.latency_s(product(4))
            assert torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()
