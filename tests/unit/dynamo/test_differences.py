"""Results are compared with eager's in parts that are small beside them."""

from __future__ import annotations

import math

import pytest
import torch

from torch_pruner.dynamo.run import checked, differences
from torch_pruner.dynamo.run.differences import Kept, Sampled, parts_for


def error(got, expected, parts=1):
    found = [Kept.of(expected, k, parts).difference(got) for k in range(parts)]
    return sum(found) if not expected.is_floating_point() else max(found)


@pytest.mark.parametrize("parts", [1, 3, 7])
@pytest.mark.parametrize("shape", [(600, 500), (3, 200_000), (300_001,), (2, 3, 70_000)])
def test_one_wrong_element_is_in_exactly_one_part(shape, parts):
    expected = torch.randn(shape)
    got = expected.clone()
    assert error(got, expected, parts) == 0
    got.view(-1)[got.numel() * 2 // 3] += 1
    wrong = [Kept.of(expected, k, parts).difference(got) > 0 for k in range(parts)]
    assert sum(wrong) == 1
    assert error(got, expected, parts) == pytest.approx(1 / expected.abs().max().item(), rel=1e-4)


def test_integers_count_over_all_parts_what_differs_of_the_whole():
    expected = torch.zeros(200_000, dtype=torch.int64)
    got = expected.clone()
    got[::4] = 1
    assert error(got, expected, 5) == pytest.approx(0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("shape", [(600, 500), (3, 200_000), (300_001,), (2, 8, 70, 70), (8,) * 6])
def test_an_element_that_is_far_off_is_in_a_sum(shape, dtype):
    torch.manual_seed(0)
    expected = torch.randn(shape).to(dtype)
    known = Sampled.of(expected, 11)
    assert known.difference(expected.clone()) == 0
    near = expected * (1 + 1e-7) if dtype in (torch.float64, torch.complex64) else expected
    assert known.difference(near) < 1e-5
    for place in (0, 1, expected.numel() // 2, expected.numel() - 1):
        got = expected.clone()
        got.view(-1)[place] += 40
        assert known.difference(got) > 0.1


@pytest.mark.parametrize("shape", [(600, 500), (3, 200_000), (300_001,), (2, 8, 70, 70)])
def test_a_thousandth_of_elements_that_are_little_off_is_in_the_sample(shape):
    torch.manual_seed(0)
    expected = torch.randn(shape)
    got = torch.where(torch.rand(shape) < 1e-3, expected + 0.1, expected)
    assert Sampled.of(expected, 11).difference(got) > 0.01


def test_sampled_results_keep_what_may_lie_beside_eagers():
    expected = torch.randn(4, 64, 128, 128)
    known = Sampled.of(expected, 20)
    assert isinstance(known.some.value, torch.Tensor)
    assert known.sums is not None
    assert known.some.value.nbytes + known.sums.nbytes < 0.08 * expected.nbytes
    assert Sampled.of(expected[:1, :1], 20).sums is None  # little: all of it


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_sampled_infinities_and_nans_belong_where_eager_has_them(value):
    expected = torch.randn(300_001)
    expected[7] = value
    assert Sampled.of(expected, 11).difference(expected.clone()) == 0
    got = expected.clone()
    got[7] = 3.0
    assert Sampled.of(expected, 11).difference(got) == math.inf
    assert Sampled.of(got, 11).difference(expected) == math.inf


def test_sampled_integers_booleans_and_other_forms():
    expected = torch.arange(200_000)
    known = Sampled.of(expected, 11)
    assert known.difference(expected.clone()) == 0
    assert known.difference(expected.index_fill(0, torch.tensor([7]), -1)) > 0
    assert known.difference(expected.view(2, -1)) == math.inf
    assert known.difference(expected.double()) == math.inf
    truth = expected % 3 == 0
    assert Sampled.of(truth, 11).difference(truth.clone()) == 0
    assert Sampled.of(truth, 11).difference(truth.index_fill(0, torch.tensor([7]), True)) > 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_infinities_and_nans_belong_where_eager_has_them(value):
    expected = torch.randn(1000)
    expected[7] = value
    assert error(expected.clone(), expected) == 0
    got = expected.clone()
    got[7] = 3.0
    assert error(got, expected) == math.inf
    assert error(expected, got) == math.inf
    assert error(torch.full((3,), value), torch.full((3,), value)) == 0


def test_another_shape_or_dtype_is_as_wrong_as_can_be():
    assert error(torch.zeros(3), torch.zeros(4)) == math.inf
    assert error(torch.zeros(3), torch.zeros(3, dtype=torch.float64)) == math.inf
    assert error(torch.zeros(0, 3), torch.zeros(0, 3)) == 0


def test_complex_results_are_compared_by_both_of_their_parts():
    expected = torch.randn(10, dtype=torch.complex64)
    got = expected.clone()
    got[3] += 1j
    assert max(Kept.of(expected, 0, 1).difference(got), 0) > 0.1


def test_parts_are_a_tenth_of_what_eager_needs_and_small_results_one(monkeypatch):
    monkeypatch.setattr(differences, "FREE_BYTES", 1000)
    x, y = torch.zeros(1000), torch.zeros(1000)
    assert parts_for([x, y], [x + y]) == 4  # 4000 bytes
    monkeypatch.setattr(differences, "FREE_BYTES", 100)
    assert parts_for([x, y], [x + y]) == 7  # of 12000, of which 600 may be kept
    assert parts_for([x, y], [x[:100].clone()]) == 1
    assert parts_for([x], []) == 1
    assert parts_for([torch.zeros(80_000)], [x, x, x.view(10, 100)]) == 1  # one memory


def test_what_is_wrong_in_the_last_part_is_found_and_eager_answers(monkeypatch):
    monkeypatch.setattr(differences, "FREE_BYTES", 1)
    monkeypatch.setattr(differences, "_SMALL", 1)
    graph = torch.fx.symbolic_trace(lambda x: (x * 2,))
    for node in graph.graph.nodes:
        node.meta["val"] = torch.zeros(1000)
    calls = []

    def wrong(args):
        calls.append(1)
        result = args[0] * 2
        result[-1] += 5
        return [result]

    failed = []
    call = checked.CheckedCall(graph, wrong, "graph", strict=False, failed=failed.append)
    x = torch.randn(1000)
    assert torch.equal(call([x])[0], x * 2)
    assert len(calls) == 1 + parts_for([x], [x]) > 2  # some elements and sums, then parts
    assert len(failed) == 1
    assert torch.equal(call([x])[0], x * 2)
