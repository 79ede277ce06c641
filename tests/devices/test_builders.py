"""What measurement workers build with: on the CPU, in a fleet, for the pretended card."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

from tests import fakes
from tests.contracts.builder import BuilderContract, laid_out
from tests.families import kernels as K
from tests.gpu.pretend_gpu import CARD, PretendBuilder
from torch_pruner import families
from torch_pruner.codegen.build.lower import (
    compile_module,
    export_library,
    program_module,
)
from torch_pruner.compiler.drafting import draft
from torch_pruner.graph.memory import KernelCall, Place
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, Task

if TYPE_CHECKING:
    from pathlib import Path

    from torch_pruner.tuner.measure.builder import Builder

pytestmark = pytest.mark.tvm


class OfTheCpu(BuilderContract):
    @pytest.fixture
    def task(self) -> Task:
        return Task("linear", K.linear(5, 24, 40), TargetSpec.detect(1), 1)

    @pytest.fixture
    def good(self, task: Task) -> Candidate:
        return draft(task)


class TestTvmBuilder(OfTheCpu):
    @pytest.fixture
    def builder(self) -> Builder:
        from torch_pruner.tuner.measure._tvm import TvmBuilder

        return TvmBuilder()


class TestLibraryBuilder(OfTheCpu):
    @pytest.fixture
    def builder(self, task: Task, good: Candidate, tmp_path: Path) -> Builder:
        from torch_pruner.tuner.measure.rpc_server import LibraryBuilder, library_name

        kernel = families.named(good.sketch).schedule(task.spec, good, task.target)
        count = len(kernel.inputs) + len(kernel.outputs) + len(kernel.scratch)
        calls = {"main": [KernelCall("kernel", tuple(Place(k) for k in range(count)))]}
        library = compile_module(program_module({"kernel": kernel}, calls, count), task.target)
        export_library(library, tmp_path / library_name(task.spec, good))
        return LibraryBuilder(tmp_path)


class TestCudaBuilder(BuilderContract):
    @pytest.fixture
    def builder(self) -> Builder:
        return PretendBuilder()

    @pytest.fixture
    def task(self) -> Task:
        return Task("linear", K.linear(5, 24, 40), TargetSpec.cuda(CARD), 1)

    @pytest.fixture
    def good(self, task: Task) -> Candidate:
        return draft(task)

    def test_what_was_timed_leaves_nothing_on_the_device(self, builder, task, good) -> None:
        driver = builder.driver
        built = builder.build(task.spec, task.target, task.threads, good)
        arrays = laid_out(built, K.inputs_for(task.spec))
        calls = [built.bind(arrays), built.bind(arrays)]
        assert builder.seconds(calls, 4) > 0
        assert len(driver.modules) == 1
        calls.clear()
        assert len(driver.modules) == 1  # it may be bound again
        assert not driver.memory
        del built
        gc.collect()
        assert not driver.modules


class TestFakeBuilder(OfTheCpu):
    """What stands in for one where misdeeds are tested."""

    @pytest.fixture
    def builder(self) -> Builder:
        return fakes.FakeBuilder()

    @pytest.fixture
    def good(self) -> Candidate:
        return fakes.candidate()

    @pytest.fixture
    def bad(self) -> Candidate:
        return fakes.candidate(fakes.BUILD_RAISES)
