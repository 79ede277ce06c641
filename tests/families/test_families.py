"""Every family keeps the contract; families of users are searched, built, timed and run."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import torch_pruner
from tests.contracts.family import FamilyContract
from tests.families import kernels as K
from tests.families.toy import Toy
from tests.unit.graph.attention_gradient_graphs import GradientCase, attention_gradient
from tests.unit.graph.attention_graphs import Case, attention
from tests.unit.tuner import graphs_by_kind as G
from torch_pruner import families
from torch_pruner.cards import CARDS
from torch_pruner.compiler import kernels
from torch_pruner.config import Config
from torch_pruner.families import bf16_tiles, sources
from torch_pruner.families.bf16_tiles import space as tiles_space
from torch_pruner.graph.precision import allow_fast
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, MeasureInput, MeasureStatus, Task
from torch_pruner.tuner.measure.base import EvaluatorSpec
from torch_pruner.tuner.measure.local import LocalExecutor

pytestmark = pytest.mark.tvm

CPU = replace(TargetSpec.from_dict({"kind": "llvm", "mcpu": "sapphirerapids"}, 2), bf16_tiles=True)
CARD = TargetSpec.cuda(CARDS["h200"])
SPECS = {
    "attention": attention(Case()),
    "decode_attention": attention(Case(queries=1, heads=8, kv=2, mask="bool", guard=True)),
    "attention_gradient": attention_gradient(GradientCase()),
    "depthwise": G.convolution(16),
    "depthwise_gradient": G.depthwise_gradient(20, (9, 8), 3),
    "planar": G.convolution(),
    "in_place": G.few_rows(1, 96, 256),
    "coded_rows": G.coded_rows(),
    "axpy": G.matmul(1, 96, 256),
    "int4_rows": G.int4(2),
    "int4_panels": G.int4(64),
    "int8_products": G.byte_product(),
    "filtered_gradient": G.weight_gradient(),
    "gradient": G.weight_gradient(),
    "outer_products": K.turned(64, 96, 128),
    "bf16_tiles": K.linear(64, 64, 64, dtype="bfloat16"),
    "bf16_pairs": K.linear(64, 64, 64, dtype="bfloat16"),
    "winograd": G.convolution(),
    "winograd4": allow_fast(G.convolution()),
    "contraction": G.matmul(64, 96, 128),
    "columns": G.reduction(),
    "transposed": G.crossed((20, 33), (1, 0)),
    "elementwise": G.pointwise(),
    "update": G.update(),
    "recurrence": G.recurrence(),
    "grouped_product": G.grouped(),
    "lane_per_row": G.reduction(),
    "rows": G.softmax(),
    "gpu_attention": attention(Case()),
    "gpu_dots": K.linear(4, 96, 128, dtype="float16"),
    "gpu_product": G.matmul(64, 96, 128),
    "gpu_triton_attention": attention(Case(dtype="float16")),
    "gpu_triton_product": K.linear(64, 96, 128, dtype="float16"),
    "gpu_warpgroup": K.linear(64, 96, 128, dtype="float16"),
    "gpu_direct": G.convolution(16),
    "gpu_elementwise": G.pointwise(),
    "gpu_rows": G.softmax(),
    "gpu_columns": G.reduction(),
    "gpu_update": G.update(),
}
SEARCHED = [n for n in families.NAMES if n not in ("metaschedule", "library")]


def test_every_family_that_is_searched_is_here() -> None:
    assert sorted(SPECS) == sorted(SEARCHED)


class TestFamilies(FamilyContract):
    @pytest.fixture(params=SEARCHED)
    def family(self, request, monkeypatch):
        for module in (bf16_tiles, tiles_space):  # whose system may refuse tile registers
            monkeypatch.setattr(module, "tiles_allowed", lambda: True)
        return families.named(request.param)

    @pytest.fixture
    def task(self, family):
        target = CPU if family.target_kind == CPU.kind else CARD
        return Task("kernel", SPECS[family.name], target, 2)


@pytest.fixture
def toy():
    family = Toy()
    families.use_family(family)
    yield family
    families.drop_family(family)


class TestFamilyOfAUser(FamilyContract):
    @pytest.fixture
    def family(self, toy):
        return toy

    @pytest.fixture
    def task(self):
        return Task("kernel", G.pointwise((6, 50)), TargetSpec.detect(2), 2)


def test_names_are_taken_once(toy) -> None:
    families.use_family(toy)
    assert families.own() == [toy]
    with pytest.raises(ValueError, match="named 'toy'"):
        families.use_family(Toy())


def test_other_processes_have_to_find_the_class() -> None:
    class Hidden(Toy):
        name = "hidden"

    with pytest.raises(ValueError, match="Hidden"):
        families.use_family(Hidden())
    assert not families.knows("hidden")


def test_a_kernel_of_a_family_that_is_not_used_here_is_a_miss(toy) -> None:
    config = Config.from_options()
    assert kernels.usable(Candidate("toy", (("par", 0),)), config)
    families.drop_family(toy)
    assert not kernels.usable(Candidate("toy", (("par", 0),)), config)


def test_workers_build_what_the_parent_uses_and_no_longer_what_it_dropped(toy) -> None:
    tasks = [Task("kernel", G.pointwise((6, n)), TargetSpec.detect(1), 1) for n in (50, 51)]
    candidate = Candidate("toy", (("par", 0),))
    with LocalExecutor(1, EvaluatorSpec(repeat=2, min_repeat_s=2e-4)) as executor:
        (first,) = executor.measure([MeasureInput(tasks[0], candidate)])
        families.drop_family(toy)
        (second,) = executor.measure([MeasureInput(tasks[1], candidate)])
    assert (first.status, first.error) == (MeasureStatus.OK, "")
    assert second.status is MeasureStatus.BUILD_ERROR
    assert "toy" in second.error


def test_a_network_tunes_and_runs_with_it(toy, cold) -> None:
    def function(x):
        return torch.tanh(x) * 2

    x = torch.randn(6, 50)
    compiled = cold.compile(function, effort="quick", trials=4, library=False, threads=1)
    torch.testing.assert_close(compiled(x), function(x))


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from tests.families.toy import Toy
from torch_pruner.families import own_sources, use_family

class Own(Toy):
    name = "own"

if __name__ == "__main__":
    use_family(Own())
    print(own_sources()[0]["file"] == __file__, own_sources()[0]["module"])
"""


def test_a_class_of_a_script_is_found_by_its_file(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    file = tmp_path / "script.py"
    file.write_text(SCRIPT.format(root=str(root)))
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", sources.SCRIPT]
    given = [{"module": sources.SCRIPT, "file": str(file), "name": "Own"}]
    try:
        families.use_sources(given)
        families.use_sources(given)  # the second time there is nothing to do
        assert [f.name for f in families.own()] == ["own"]
        assert families.own_sources() == given
    finally:
        families.use_sources([])
        sys.modules.pop(sources.SCRIPT, None)
    assert families.own() == []


def test_operations_are_those_of_the_family_that_needs_fewest() -> None:
    task = Task("kernel", SPECS["winograd"], CPU, 2)
    direct = 2 * np.prod((14, 14, 16, 16, 9))
    assert families.operations(task) < direct / 2
    assert families.operations(Task("kernel", SPECS["contraction"], CPU, 2)) is None


def test_another_version_of_a_family_is_other_code(toy, cold, monkeypatch) -> None:
    """The library of a graph is built anew, with the schedule that is known already."""

    def function(x):
        return torch.tanh(x) * 2

    x = torch.randn(6, 50)
    options = {"effort": "none", "library": False, "threads": 1}  # drafts are the toy's
    cold.compile(function, **options)(x)
    assert torch_pruner.last_report().tasks[0].sketch == "toy"
    monkeypatch.setattr(Toy, "version", 2)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="library of graph"):
        cold.compile(function, on_miss="error", **options)(x)
