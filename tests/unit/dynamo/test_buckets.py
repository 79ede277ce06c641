"""Sizes that run in programs for larger ones: when, and what goes in and comes out."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.unit.dynamo.test_symbolic import Builds, arguments, attend, captured_one
from torch_pruner.dynamo.lower.program import RegionStep
from torch_pruner.dynamo.lower.tensors import TensorSpec
from torch_pruner.dynamo.run.row_copies import RowCopier, Rows
from torch_pruner.dynamo.sizes import padded_region, sized_call, symbolic
from torch_pruner.dynamo.sizes.padded_region import PaddedRegion, Spare
from torch_pruner.dynamo.sizes.sized_call import times_larger


class Serves:
    """Computes any size in one that is larger, in eager, and notes which in which."""

    def __init__(self, gm, *, ready=(), refuses=False):
        self.gm, self.served, self.cached, self.refuses = gm, [], set(ready), refuses

    def known(self, args):
        return None

    def shared(self, args):
        return None

    def call(self, args, large, text):
        self.served.append((sizes_of(args), text))
        return None if self.refuses else Builds(self.gm)(args, text)

    def ready(self, args):
        return sizes_of(args) in self.cached


def sizes_of(args):
    return next(a.shape[0] for a in args if hasattr(a, "shape"))


def serving(**how):
    """A function that calls a graph of varying size, what was built, and what was served."""
    gm, inputs = captured_one(attend, torch.rand(5, 8))
    builds, other = Builds(gm), Builds(gm)
    serves = Serves(gm, **how)
    call = sized_call.SizedCall(
        gm, builds, other.general, limit=how.pop("limit", 32), name="graph", larger=serves
    )

    def run(*lengths):
        for n in lengths:
            x = torch.rand(n, 8)
            out = call(arguments(gm, inputs, x))
            torch.testing.assert_close(out[0], attend(x)[0])

    return run, builds, other, serves


def test_what_comes_first_is_served_by_the_nearest_larger_size(monkeypatch):
    monkeypatch.setattr(sized_call, "OFTEN", 1)
    run, builds, _, serves = serving()
    run(64, 16, 16, 14, 50)
    assert builds.names == ["64,8", "16,8"]
    assert serves.served == [(16, "64,8"), (14, "16,8"), (50, "64,8")]


def test_a_size_that_is_not_much_smaller_gets_no_kernels_of_its_own():
    run, builds, other, serves = serving()
    run(64, 60, 60, 60)
    assert builds.names == ["64,8"]
    assert serves.served == [(60, "64,8")]
    assert other.names == []


def test_a_size_that_is_much_smaller_does_when_it_came_often():
    run, builds, _, serves = serving()
    run(64, *[30] * sized_call.OFTEN)
    assert builds.names == ["64,8", "30,8"]
    run(30, 30)
    assert builds.names == ["64,8", "30,8"]
    assert serves.served == [(30, "64,8")]


def test_the_less_it_wastes_the_longer_it_stays():
    often = [sized_call.patience(times) for times in (1.25, 1.3, 2, 8)]
    assert often == [float("inf"), 54, 16, 3]


def test_sizes_far_below_are_compiled_at_once():
    run, builds, _, serves = serving()
    run(64, 7)
    assert builds.names == ["64,8", "7,8"]
    assert serves.served == []


def test_a_size_with_kernels_in_the_cache_takes_those():
    run, builds, _, serves = serving(ready=(30,))
    run(64, 30)
    assert builds.names == ["64,8", "30,8"]
    assert serves.served == []


def test_a_power_of_two_that_was_tuned_serves_what_is_below():
    run, builds, _, serves = serving(ready=(32,))
    run(20, 27)
    assert builds.names == []
    assert serves.served == [(20, "32,8"), (27, "32,8")]


def test_what_grows_is_served_by_powers_of_two():
    run, builds, other, serves = serving()
    run(*range(5, 20))
    assert builds.names == ["5,8"]
    assert [text for _, text in serves.served] == ["8,8"] * 2 + ["16,8"] * 8 + ["32,8"] * 4
    assert other.names == []


def test_what_grows_again_and_again_is_never_compiled_size_by_size():
    """A server's every answer grows through the same sizes; each took seconds in the middle."""
    run, builds, other, _ = serving()
    for _ in range(3 * sized_call.OFTEN):
        run(*range(5, 12))
    assert builds.names == ["5,8"]
    assert other.names == []


def test_where_nothing_serves_all_is_as_before():
    run, builds, _, serves = serving(refuses=True)
    run(64, 30, 30)
    assert builds.names == ["64,8", "30,8"]
    assert serves.served == [(30, "64,8")]


@pytest.mark.parametrize(
    ("large", "small", "times"),
    [
        ((8, (8, 3)), (4, (4, 3)), 2.0),
        ((8, 6), (4, 3), 4.0),
        ((32, 31), (8, 7), 31 / 7),
        ((8,), (8,), 1.0),
        ((8, 2), (4, 3), float("inf")),
        (((8, 2),), ((8,),), float("inf")),
    ],
)
def test_how_much_more_there_is_to_do(large, small, times):
    assert times_larger(large, small) == times


def test_rounded_up():
    gm, inputs = captured_one(attend, torch.rand(5, 8))
    args = arguments(gm, inputs, torch.rand(11, 8))
    up = symbolic.rounded_up(gm, args)
    assert [a.shape for a in up if hasattr(a, "shape")] == [(16, 8)]
    assert [a for a in up if isinstance(a, int)] == [
        16 if a == 11 else a for a in args if isinstance(a, int)
    ]


def test_what_grows_together_keeps_its_distance():
    """A mask is one longer than the cache; a length that stays is left alone."""

    def fn(cache, mask, other):
        return cache * 2, mask * 2, other * 2

    def args(n):
        return arguments(gm, inputs, torch.rand(n, 8), torch.rand(n + 1, 1), torch.rand(7))

    gm, inputs = captured_one(fn, torch.rand(5, 8), torch.rand(6, 1), torch.rand(7))
    up = symbolic.rounded_up(gm, args(12), args(11))
    assert [a.shape[0] for a in up if hasattr(a, "shape")] == [15, 16, 7]


class Placed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.rand(20, 8))

    def forward(self, x):
        return (x + self.table[: x.shape[0]],)


def test_no_further_than_a_table_goes():
    gm, inputs = captured_one(Placed(), torch.rand(5, 8))
    for n, rounded in ((7, 8), (17, 20), (20, 20)):
        tensors = [v for v in inputs if isinstance(v, torch.Tensor)]
        varies = [isinstance(v.shape[0], torch.SymInt) for v in tensors]
        assert sorted(varies) == [False, True]
        given = [torch.rand(n if v else 20, 8) for v in varies]
        up = symbolic.rounded_up(gm, arguments(gm, inputs, *given))
        shapes = [a.shape[0] for a in up if hasattr(a, "shape")]
        assert shapes[varies.index(True)] == rounded


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_behind_what_is_padded_are_zeros(order):
    back = torch.tensor(order).argsort().tolist()
    like = torch.empty(4, 3, 6).permute(order).contiguous().permute(back)
    spec, spare = TensorSpec.make(like.shape, like.stride(), like.dtype), Spare()
    for shape in ((2, 3, 4), (4, 3, 2), (1, 3, 6), (3, 3, 3)):
        x = torch.rand(shape) + 1
        y = spare.take(spec, x)
        assert y.stride() == like.stride()
        assert torch.equal(y[tuple(map(slice, shape))], x)
        assert y.count_nonzero() == x.numel()
        spare.give(spec, y, shape)
    assert sum(map(len, spare._kept.values())) == 1


def region(*shapes, outputs):
    """A step that reads and makes tensors of these shapes; its graph is never looked at."""
    specs = [TensorSpec.make(s, torch.empty(s).stride(), torch.float32) for s in shapes]
    made = [TensorSpec.make(s, torch.empty(s).stride(), torch.float32) for s in outputs]
    return RegionStep(None, tuple(specs), tuple(made))


def test_a_result_that_lies_in_a_padded_input_is_nobody_elses():
    """One row is a view of what was written into; two rows are a copy, and the memory is spare."""
    spare, given = Spare(), []

    def run(inputs):
        x, count = inputs
        given.append(x)
        x[:, int(count)] = 7.0
        return [x]

    for rows in (1, 2):
        large = region((rows, 6), outputs=[(rows, 6)])
        small = region((rows, 4), outputs=[(rows, 5)])
        call = PaddedRegion(run, large, small, [torch.tensor(4)], spare)
        given.clear()
        results = []
        for k in range(3):
            (y,) = call([torch.full((rows, 4), float(k))])
            assert y.is_contiguous()
            results.append(y if rows == 1 else y.tolist())
            del y
        assert len({x.data_ptr() for x in given}) == (3 if rows == 1 else 1)
        for k, y in enumerate(results):
            assert torch.as_tensor(y).tolist() == [[k] * 4 + [7.0]] * rows


def test_what_was_written_behind_an_input_is_zeros_again():
    spare, seen = Spare(), []

    def run(inputs):
        x, count = inputs
        seen.append(x.clone())
        x[:, int(count)] = 7.0
        return [x]

    for n in (4, 2, 3):
        small = region((2, n), outputs=[(2, n + 1)])
        call = PaddedRegion(run, region((2, 6), outputs=[(2, 6)]), small, [torch.tensor(n)], spare)
        (y,) = call([torch.ones(2, n)])
        assert y.tolist() == [[1.0] * n + [7.0]] * 2
        assert seen[-1].tolist() == [[1.0] * n + [0.0] * (6 - n)] * 2


def test_calls_at_once_have_memory_of_their_own():
    spare, x = Spare(), torch.rand(2, 3)
    spec = TensorSpec.make((2, 6), (6, 1), torch.float32)
    a, b = (spare.take(spec, x) for _ in range(2))
    assert a.data_ptr() != b.data_ptr()
    spare.give(spec, a, x.shape)
    assert spare.take(spec, x) is a


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_copies_that_torch_would_divide(monkeypatch, dtype):
    monkeypatch.setattr(padded_region, "GRAIN", 8)
    spare = Spare()
    for shape in ((1, 2, 30, 4), (5, 1, 1, 7), (1, 1, 3, 1), (9, 2, 2, 2)):
        most = tuple(n + 1 for n in shape)
        spec = TensorSpec.make(most, torch.empty(most).stride(), dtype)
        x = (torch.rand(shape) * 100 - 50).to(dtype)
        assert torch.equal(spare.take(spec, x)[tuple(map(slice, shape))], x)


def growing(spare, n):
    """Two rows of ``n`` elements, and one more: the call, and the memory that it was given."""
    seen = []

    def run(inputs):
        x, count = inputs
        seen.append((x.data_ptr(), x.clone()))
        x[:, int(count)] = 7.0
        return [x]

    large, small = region((2, 20), outputs=[(2, 20)]), region((2, n), outputs=[(2, n + 1)])
    return PaddedRegion(run, large, small, [torch.tensor(n)], spare), seen


def test_a_result_that_comes_back_is_not_copied_again(monkeypatch):
    """... into what it was copied from: once, and not after somebody wrote to it."""
    spare, copies, copy = Spare(), [], padded_region._copy
    monkeypatch.setattr(
        padded_region, "_copy", lambda to, x: copies.append(x.shape[1]) or copy(to, x)
    )
    held, x = [], torch.ones(2, 3)
    for n in (3, 4, 5):
        call, seen = growing(spare, n)
        held.append(x)
        (x,) = call([x])
        assert seen[0][1].tolist() == [[1.0] * 3 + [7.0] * (n - 3) + [0.0] * (20 - n)] * 2
    assert copies == [3, 4, 5, 6]  # the input that came first, and the results
    assert [h.shape[1] for h in held] == [3, 4, 5]
    assert [h.tolist()[0][3:] for h in held] == [[], [7.0], [7.0] * 2]

    # Two that go on from one have memory of their own.
    (call, first), (again, second) = growing(spare, 6), growing(spare, 6)
    (a,), (b,) = call([x]), again([x])
    assert first[0][0] != second[0][0]
    assert a.tolist() == b.tolist() == [[1.0] * 3 + [7.0] * 4] * 2

    # What was written to is copied; so is another tensor, wherever it lies.
    a[:, 1] = 5.0
    b.resize_(2, 5)
    for y in (a, b, b.clone()):
        copies.clear()
        call, seen = growing(spare, y.shape[1])
        (z,) = call([y])
        assert torch.equal(z[:, :-1], y)
        assert copies[0] == y.shape[1]
        assert torch.equal(seen[0][1][:, : y.shape[1]], y)
        assert not seen[0][1][:, y.shape[1] :].any()


def test_few_results_are_looked_for():
    """What was kept for results that are gone, or too many, is used by others."""
    spare = Spare()
    call = growing(spare, 4)[0]
    results = [call([torch.full((2, 4), float(k))])[0] for k in range(2 * padded_region.CHAINS)]
    assert len(spare._sources) == padded_region.CHAINS
    del results
    for _ in range(3):
        call([torch.zeros(2, 4)])
    assert len(spare._sources) + sum(map(len, spare._kept.values())) <= padded_region.CHAINS + 1
    with torch.inference_mode():
        results = [call([torch.zeros(2, 4)])[0] for _ in range(2)]
    assert not any(s.result() is r for s in spare._sources.values() for r in results)


def test_rows_of_a_cache_that_grows_are_copied_by_the_program(monkeypatch):
    """... all of a call's at once, and those of others, or few, as before."""
    monkeypatch.setattr(padded_region, "GRAIN", 16)
    spare, asked = Spare(), []

    def entry(address):
        table = (ctypes.c_int64 * 14).from_address(address)
        asked.append(list(table[:2]))
        for k in range(table[1]):
            to, start, to_step, step, rows, nbytes = table[2 + 6 * k : 8 + 6 * k]
            for r in range(rows):
                ctypes.memmove(to + r * to_step, start + r * step, nbytes)

    def run(inputs):
        x, y, z, count = inputs
        for t in (x, y, z):
            t[:, :, int(count)] = 7.0
        return [x, y, z]

    given = [torch.rand(2, 3, 4, 5), torch.rand(2, 3, 4, 5), torch.rand(1, 2, 4, 1)]
    for n in (4, 5, 6):
        shapes = [(*x.shape[:2], n, x.shape[3]) for x in given]
        most, after = ([(*s[:2], m, s[3]) for s in shapes] for m in (20, n + 1))
        small, large = region(*shapes, outputs=after), region(*most, outputs=most)
        copier = RowCopier(entry, 3)
        made = PaddedRegion(run, large, small, [torch.tensor(n)], spare, copier)(given)
        for x, y in zip(given, made, strict=True):
            assert y.is_contiguous()
            assert torch.equal(y[:, :, :n], x)
            assert (y[:, :, n] == 7.0).all()
        given = made
    assert asked == [[3, 2]] * 3


def test_rows_that_are_not_one_behind_the_other():
    spec = TensorSpec.make
    target = spec((2, 3, 4), (12, 4, 1), torch.float32)
    assert Rows.of(target, spec((2, 5, 4), (20, 4, 1), torch.float32)) == (48, 80, 2, 48)
    for shape, strides in (
        ((2, 5, 4), (4, 8, 1)),
        ((2, 5, 6), (30, 6, 1)),
        ((2, 3, 4), (12, 4, 1)),
    ):
        assert Rows.of(target, spec(shape, strides, torch.float32)) is None
    assert Rows.of(target, spec((2, 5, 4), (20, 4, 1), torch.float16)) is None
    turned = spec((2, 3, 4), (12, 1, 3), torch.float32)
    assert Rows.of(turned, spec((2, 5, 4), (20, 4, 1), torch.float32)) is None
