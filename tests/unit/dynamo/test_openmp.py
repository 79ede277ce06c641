"""Light eager steps run on one thread while their values are small, and others as ever."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from torch_pruner.dynamo.run import openmp
from torch_pruner.dynamo.run.openmp import SMALL_BYTES, SmallOnOneThread, is_light, on_one_thread

aten = torch.ops.aten
known = pytest.mark.skipif(
    openmp.loaded() is None or torch.get_num_threads() < 2, reason="no OpenMP with threads"
)


@known
def test_a_loop_has_one_thread_and_the_next_as_many_as_before() -> None:
    before = torch.get_num_threads()
    assert on_one_thread(torch.get_num_threads) == 1
    assert torch.get_num_threads() == before
    with pytest.raises(ZeroDivisionError):
        on_one_thread(lambda: 1 // 0)
    assert torch.get_num_threads() == before
    assert on_one_thread(on_one_thread, torch.get_num_threads) == 1


def test_an_unknown_openmp_is_let_alone(monkeypatch) -> None:
    monkeypatch.setattr(openmp, "loaded", lambda: None)
    assert on_one_thread(torch.get_num_threads) == torch.get_num_threads()


@known
def test_large_values_have_all_threads() -> None:
    seen = []

    def run(values):
        seen.append(torch.get_num_threads())
        return values

    step, many = SmallOnOneThread(run), torch.get_num_threads()
    small, large = torch.zeros(8), torch.empty(SMALL_BYTES)
    for value in (small, small, large, large, small):
        step((value, 3))
    assert seen == [many, 1, 1, many, many]


@pytest.mark.parametrize(
    ("op", "light"),
    [
        (aten.add.Tensor, True), (aten.permute.default, False), (aten.zeros.default, True),
        (aten.embedding_dense_backward.default, True), (aten.mm.default, False),
        (aten.sort.default, False), (aten.convolution.default, False), (len, False),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_light(op, light) -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(op, (graph.placeholder("x"),)),))
    assert is_light(fx.GraphModule(torch.nn.Module(), graph)) == light
