"""What every device promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.families.kernels import inputs_for
from tests.unit.graph.attention_graphs import Case, attention
from torch_pruner.compiler.drafting import draft
from torch_pruner.config import Config
from torch_pruner.devices.dtypes import DTYPES
from torch_pruner.dynamo.lower.program import RegionStep
from torch_pruner.dynamo.lower.tensors import spec_of
from torch_pruner.dynamo.run.build import built_region, region_calls
from torch_pruner.families import families, sketches_for
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.layout import identity
from torch_pruner.graph.precision import is_fast
from torch_pruner.graph.reference import evaluate
from torch_pruner.task import MeasureInput, MeasureStatus, Task

if TYPE_CHECKING:
    from pathlib import Path

    from torch_pruner.compiler.driver import Compiler
    from torch_pruner.devices.base import Device

ROWS, DEPTH, COLUMNS = 5, 24, 9
WORKLOAD = "0" * 64


def linear() -> Graph:
    """relu(x w), then a softmax of it: two kernels, and a workspace between."""
    b = GraphBuilder()
    x = b.input(0, (ROWS, DEPTH), "float32")
    w = b.input(1, (DEPTH, COLUMNS), "float32", static=True)
    y = b.pointwise("relu", b.matmul(x, w))
    powers = b.pointwise("exp", b.pointwise("sub", y, b.reduce("max", y, [1], keepdim=True)))
    return b.finish([b.pointwise("div", powers, b.reduce("sum", powers, [1], keepdim=True))])


def int8_weights() -> Graph:
    b = GraphBuilder()
    x, w = b.input(0, (8, 32), "float32"), b.input(1, (32, 16), "int8", static=True)
    scale = b.input(2, (1, 16), "float32", static=True)
    return b.finish([b.matmul(x, b.pointwise("mul", b.cast(w, "float32"), scale))])


GRAPHS = {
    "linear": linear(),
    "int8": int8_weights(),
    "attention": attention(Case()),
    "half": attention(Case(dtype="float16", queries=64, keys=64)),
    "wide": attention(Case(dtype="bfloat16", depth=320, width=320, queries=64, keys=64)),
}


class DeviceContract:
    """Subclasses give fixtures ``device`` and ``options``, and say what the device is like.

    ``options`` are those of ``Config`` with which the device claims a graph that lives at
    ``lives_at``; ``own_name``: what bundles call it, "" for nothing; ``times``: whether its
    candidates can be timed here.
    """

    lives_at = torch.device("cpu")
    own_name = ""
    times = True

    @pytest.fixture
    def device(self) -> Device:
        raise NotImplementedError

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {}

    @pytest.fixture
    def config(self, tmp_path: Path, options: dict[str, Any]) -> Config:
        defaults = {"cache_dir": str(tmp_path), "effort": "none", "threads": 1}
        return Config.from_options(options=defaults | options)

    @pytest.fixture
    def compiler(self, device: Device, config: Config) -> Compiler:
        return device.compiler(config)

    def test_it_claims_its_own_graphs_alone(self, device, config) -> None:
        found = type(device).claim(self.lives_at, config)
        assert type(found) is type(device)
        assert found.device == device.device
        assert type(device).claim(torch.device("xpu"), Config.from_options()) is None

    def test_what_it_says_is_known_to_torch(self, device) -> None:
        assert device.dtypes
        assert device.dtypes <= set(DTYPES)

    def test_there_are_families_for_its_target(self, device, config) -> None:
        kind = device.context(config).target.kind
        assert kind in {family.target_kind for family in families()}

    def test_keys_are_the_same_every_time(self, device, config) -> None:
        first, second = (device.context(config).kernel_key(WORKLOAD) for _ in range(2))
        assert first == second

    def test_another_option_of_numerics_is_another_key(self, device, config) -> None:
        other = config.replace(fast_math=not config.fast_math)
        keys = [device.context(c).kernel_key(WORKLOAD) for c in (config, other)]
        assert keys[0] != keys[1]

    def test_bundles_of_its_name_have_its_keys(self, device, config) -> None:
        context = device.context(config)
        found = type(device).named(self.own_name or "nobody")
        assert type(device).named("nobody") is None
        if self.own_name:
            mine = found.context(context.threads, context.numerics)
            assert mine.kernel_key(WORKLOAD) == context.kernel_key(WORKLOAD)
        else:
            assert found is None

    def test_its_names_are_examples(self, device) -> None:
        assert not self.own_name or self.own_name in type(device).names

    def test_settings_do_not_change_by_themselves(self, device) -> None:
        assert type(device).settings() == type(device).settings()

    @pytest.mark.parametrize("name", GRAPHS)
    def test_graphs_are_cut_into_kernels_that_a_family_has(self, compiler, name) -> None:
        """What ``capabilities`` say is what the families of the target can do."""
        graph = GRAPHS[name]
        orders = [
            [identity(len(graph.nodes[i].shape)) for i in ends]
            for ends in (graph.inputs, graph.outputs)
        ]
        tasks = compiler.lower(graph, orders[0], orders[1]).tasks
        assert tasks
        for task in tasks:
            assert sketches_for(task), task.name
            draft(task)

    def test_fast_math_is_in_the_tasks_of_devices_that_approximate(self, device, config) -> None:
        """A task of the default is the same whether or not there is such an option."""
        orders = [[(0, 1), (0, 1)], [(0, 1)]]
        exact, fast = (
            device.compiler(config.replace(fast_math=f)).lower(linear(), *orders).tasks
            for f in (False, True)
        )
        assert not any(is_fast(n) for t in exact for n in t.spec.nodes)
        marked = [n.op for t in fast for n in t.spec.nodes if is_fast(n)]
        both = device.compiler(config).capabilities.approximations
        assert marked == (["matmul", "exp"] if both else [])

    @pytest.mark.parametrize("name", ["linear", "int8"])
    def test_a_compiled_graph_computes_what_it_says(self, device, compiler, name) -> None:
        graph = GRAPHS[name]
        arrays = inputs_for(graph)
        want = torch.from_numpy(evaluate(graph, arrays)[0].copy())
        given = [torch.from_numpy(a.copy()).to(device.device) for a in arrays]
        step = RegionStep(graph, tuple(map(spec_of, given)), (spec_of(want),))
        call = built_region(step, compiler, device, "contract")
        run, _ = region_calls(call, step, device)
        assert len(call.compiled.steps) >= 1
        if device.builds_only:
            with pytest.raises(RuntimeError):
                run(given)
            return
        for _ in range(2):  # a second call finds the table filled
            (mine,) = run(given)
            assert mine.device == device.device
            torch.testing.assert_close(mine.cpu(), want, rtol=1e-4, atol=1e-4)

    def test_a_process_after_this_one_builds_nothing(self, device, config, compiler) -> None:
        orders = [[(0, 1), (0, 1)], [(0, 1)]]
        compiler.compile(linear(), *orders)
        again = type(device).claim(self.lives_at, config) or device
        again.compiler(config.replace(on_miss="error")).compile(linear(), *orders)

    def test_a_guarded_call_is_the_call(self, device) -> None:
        seen: list[Any] = []
        run = device.guard(lambda given: seen.append(given) or "result")
        given = [torch.ones(2)]
        assert run(given) == "result"
        assert seen[0] is given

        def fails(given: list[Any]) -> Any:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            device.guard(fails)(given)

    def test_random_numbers_are_drawn_again_from_a_state(self, device) -> None:
        state = device.generator_state()
        if state is None:  # the device draws the CPU's, which whoever asks keeps as well
            state = torch.get_rng_state()
            device.restore_generator(state)
            assert torch.equal(state, torch.get_rng_state())
            return
        first = torch.rand(4, device=device.device)
        device.restore_generator(state)
        assert torch.equal(first, torch.rand(4, device=device.device))

    def test_what_is_timed_is_what_is_built(self, device, config, compiler) -> None:
        """Candidates run where the kernels will: the fingerprint in the keys is the executor's."""
        if not self.times:
            assert compiler.config.effort == "none"
            return
        b = GraphBuilder()
        spec = b.finish([b.pointwise("exp", b.input(0, (64,), "float32"))])
        context = compiler.context
        task = Task("exp", spec, context.target, context.threads)
        executor = compiler.executor()
        assert executor is compiler.executor(), "shared: workers are slow to start"
        (found,) = executor.measure([MeasureInput(task, draft(task))])
        assert found.status is MeasureStatus.OK, found.error
        assert executor.device == context.device
