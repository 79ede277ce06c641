"""One program for every size: which sizes vary together, and its numbers at each."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from tests.unit.dynamo.test_symbolic import captured_one
from torch_pruner.dynamo.lower.program import describe
from torch_pruner.dynamo.sizes import symbolic
from torch_pruner.dynamo.sizes.every_size import EverySize, Sample, whole
from torch_pruner.dynamo.sizes.formulas import (
    Formulas,
    UnknownNumberError,
    expressions_of,
    grains_of,
)
from torch_pruner.dynamo.sizes.padded_region import bucket_of
from torch_pruner.dynamo.sizes.varying import (
    Varying,
    reached,
    samples_below,
    samples_of,
    stretched,
    varying_of,
    ways_to_vary,
)
from torch_pruner.graph.bucket import NotAlikeError

A, B, C = sympy.symbols("a b c", integer=True, positive=True)
FREE = Varying((((A, 0),), ((B, 0),)), ())


def test_symbols_vary_as_guards_allow():
    def allows(known):
        return known[A] == 8 and known[C] == known[B] + 1

    found = varying_of({A: 8, B: 5, C: 6}, allows)
    assert found == Varying((((B, 0), (C, 1)),), ((A, 8),))
    assert found.covers({A: 8, B: 9, C: 10}, {A: 8, B: 20, C: 21})
    for other in ({A: 7, B: 9, C: 10}, {A: 8, B: 9, C: 9}, {A: 8, B: 21, C: 22}):
        assert not found.covers(other, {A: 8, B: 20, C: 21})


def test_a_size_at_which_a_guard_ends_varies_as_well():
    assert varying_of({A: 15, B: 8}, lambda known: known[A] < 16 and known[B] == 8) == Varying(
        (((A, 0),),), ((B, 8),)
    )


def test_symbols_of_one_number_may_vary_together():
    free, equal, together, *few = ways_to_vary({A: 4, B: 6, C: 6}, lambda _: True)
    but_one, alone = few[:3], few[3:]
    assert [way.groups for way in alone] == [(((s, 0),),) for s in (A, B, C)]
    assert alone[0].fixed == ((B, 6), (C, 6))
    assert free.groups == (((A, 0),), ((B, 0),), ((C, 0),))
    assert equal.groups == (((A, 0),), ((B, 0), (C, 0)))
    assert together.groups == (((A, 0), (B, 2), (C, 2)),)
    assert [way.fixed for way in but_one] == [((A, 4),), ((B, 6),), ((C, 6),)]
    assert but_one[0].groups == (((B, 0),), ((C, 0),))


def test_samples_leave_room_and_tell_symbols_apart():
    large, one, two = samples_of({A: 6, B: 6}, FREE, {})
    assert large == {A: 32, B: 33}
    assert len({one[A], one[B], two[A], two[B]}) == 4
    assert max(*one.values(), *two.values()) < 32


def test_samples_go_as_far_as_a_limit_that_is_near():
    assert samples_of({A: 20, B: 20}, FREE, {A: 512, B: 5000})[0] == {A: 512, B: 128}
    assert samples_of({A: 20, B: 20}, FREE, {}, [{A: 300, B: 10}])[0] == {A: 300, B: 128}


def test_a_cache_that_goes_from_call_to_call_has_more_room():
    gm, inputs = captured_one(
        lambda cache, new, other: (torch.cat([cache, new], 1), torch.cat([other, new], 1).sum(1)),
        torch.rand(2, 5, 8), torch.rand(2, 1, 8), torch.rand(2, 7, 8),
    )  # fmt: skip
    numbers = symbolic.symbols_of(gm, symbolic.hinted(inputs))
    grows = symbolic.growing_in(gm)
    assert [numbers[s] for s in grows] == [5]
    free = varying_of(numbers, lambda _: True)
    large = samples_of(numbers, free, {}, growing=grows)[0]
    assert {numbers[s]: n >= 1024 for s, n in large.items()}.items() >= {5: True, 7: False}.items()


def test_sizes_with_little_room_are_refused():
    with pytest.raises(NotAlikeError):
        samples_of({A: 2, B: 2}, FREE, {A: 3})
    with pytest.raises(NotAlikeError):
        samples_of({A: 2}, Varying((), ((A, 2),)), {})


def test_numbers_are_found_by_their_values():
    formulas = Formulas(
        {A, B, A * B, 2 * A + 1}, [{A: 8, B: 16}, {A: 5, B: 9}, {A: 7, B: 14}], FREE
    )
    places = [formulas.number(v) for v in ((128, 45, 98), (3, 3, 3), (17, 11, 15), (128, 45, 98))]
    values = formulas.compiled()({A: 3, B: 4})
    assert [values[k] for k in places] == [12, 3, 7, 12]
    with pytest.raises(UnknownNumberError):
        formulas.number((1, 2, 3))


def test_a_number_that_two_expressions_explain_is_unknown():
    formulas = Formulas({A, B}, [{A: 8, B: 8}, {A: 5, B: 5}, {A: 7, B: 7}], FREE)
    with pytest.raises(UnknownNumberError):
        formulas.number((8, 5, 7))
    tied = Varying((((A, 0), (B, 0)),), ())
    formulas = Formulas({A, B}, [{A: 8, B: 8}, {A: 5, B: 5}, {A: 7, B: 7}], tied)
    place = formulas.number((8, 5, 7))
    assert formulas.compiled()({A: 4, B: 4})[place] == 4


def scores(x, y):
    return x[:, None] * y.softmax(0), x.sum(0), x.shape[0] * 3


def every_size(fn, *inputs):
    """A graph at every size, and it written down at one."""
    gm, examples = captured_one(fn, *inputs)
    given = symbolic.hinted(examples)
    assert given is not None
    expressions = expressions_of(gm)
    numbers = symbolic.symbols_of(gm, given)
    varying = varying_of(numbers, lambda known: symbolic.allows(gm, known))
    grains = grains_of(expressions, varying)

    def sample(known):
        at = symbolic.with_symbols(gm, given, known)
        return Sample(known, describe(symbolic.with_sizes(gm, at), static=frozenset()))

    samples = [*map(sample, samples_of(numbers, varying, symbolic.most_of(gm), grains=grains))]
    large, *small = samples
    regions = large.program.regions
    buckets = [
        [bucket_of(a, b) for a, b in zip(regions, s.program.regions, strict=True)] for s in small
    ]
    formulas = Formulas(expressions, [s.symbols for s in samples], varying)
    every = [whole(buckets[0]), *buckets]
    return EverySize(formulas, varying, large.symbols, samples, every), sample, numbers


@pytest.mark.parametrize(("n", "m"), [(2, 3), (5, 6), (19, 4), (20, 24)])
def test_a_program_at_any_size_is_the_one_that_is_written_down(n, m):
    sizes, sample, numbers = every_size(scores, torch.rand(5, 8), torch.rand(6, 8))
    at = {number: symbol for symbol, number in numbers.items()}
    known = {**numbers, at[5]: n, at[6]: m}
    assert sizes.covers(known)
    program, buckets = sizes.at(known)
    written = sample(known).program
    for mine, theirs in zip(program.regions, written.regions, strict=True):
        assert (mine.inputs, mine.outputs) == (theirs.inputs, theirs.outputs)
    assert program.outputs == written.outputs
    again = bucket_of(sample(sizes.most).program.regions[0], written.regions[0])
    assert buckets[0].counts == again.counts
    assert buckets[0].graph == again.graph


def test_a_size_without_elements_is_left_to_others():
    sizes, _, numbers = every_size(lambda x: x[2:].exp(), torch.rand(9, 8))
    first = next(s for s, n in numbers.items() if n == 9)
    assert sizes.at({**numbers, first: 3}) is not None
    assert sizes.at({**numbers, first: 2}) is None


def images(x):
    weight = torch.ones(4, 3, 3, 3)
    y = torch.nn.functional.conv2d(x, weight, stride=2, padding=1).relu()
    return torch.nn.functional.max_pool2d(y, 3, 2, 1), y.mean((2, 3))


@pytest.mark.parametrize("size", [(4, 24, 39), (7, 17, 18), (2, 35, 16)])
def test_images_whose_extents_are_quotients(size):
    sizes, sample, numbers = every_size(images, torch.rand(2, 3, 24, 21))
    at = {number: symbol for symbol, number in numbers.items()}
    known = dict(zip((at[2], at[24], at[21]), size, strict=True))
    assert sizes.covers(known)
    program, buckets = sizes.at(known)
    written = sample(known).program
    for mine, theirs in zip(program.regions, written.regions, strict=True):
        assert (mine.inputs, mine.outputs) == (theirs.inputs, theirs.outputs)
    nodes, (bucket,) = buckets[0].graph.nodes, buckets
    area = next(n for n in nodes if n.op == "mul" and n.shape == () and n.dtype == "int32")
    own = len(bucket.graph.inputs) - len(bucket.counts)
    sides = [bucket.counts[nodes[i].attr("index") - own][1] for i in area.inputs]
    assert sides == [-(-n // 2) for n in size[1:]]


def test_grains_of_quotients():
    half = FloorDiv(A - 1, 2) + 1
    assert grains_of({A, A * B, half * half, FloorDiv(half + 2, 3)}, FREE) == {A: 6, B: 1}
    for other in (FloorDiv(A, B), FloorDiv(A * B, 2), sympy.Max(A, 3), sympy.Mod(A, 2), 1 / A):
        with pytest.raises(UnknownNumberError):
            grains_of({other}, FREE)
    fixed = Varying((((B, 0),),), ((A, 9),))
    assert grains_of({half * B, sympy.Max(A, 3) + B}, fixed) == {B: 1}


def test_guards_may_end_before_a_size_does():
    found = reached({A: 10, B: 3}, FREE, {B: 20}, lambda known: known[A] * known[B] < 100)
    assert found == {A: 33, B: 9}


def test_an_image_leaves_room_for_twice_its_size():
    large, one, two = samples_of({A: 30}, Varying((((A, 0),),), ()), {}, grains={A: 8})
    assert large == {A: 64}
    assert (one[A] % 8, two[A] % 8) == (1, 1)
    assert one[A] < two[A] <= 64 - 8


def test_a_guard_on_batches_leaves_room_for_other_captures():
    def guards(known):
        return known[A] < 16 and known[A] * known[B] < 1000

    most = {A: 15, B: 166}
    far = stretched({A: 6, B: 30}, FREE, most, guards)
    assert far == {A: 17, B: 257}
    assert stretched({A: 6, B: 30}, FREE, most, lambda _: True) == most
    large, *_ = samples_of({A: 6, B: 30}, FREE, far, grains={A: 1, B: 8})
    assert large == {A: 17, B: 64}


def test_samples_for_kernels_of_another_capture_are_smaller_in_all_extents():
    samples = samples_below(FREE, {A: 17, B: 64}, {B: 8})
    assert [s[A] for s in samples] == [16, 9, 15]
    assert all((s[B] - 1) // 8 < 7 for s in samples)
    assert len({n for s in samples for n in s.values()}) == 6
    with pytest.raises(NotAlikeError):
        samples_below(FREE, {A: 3, B: 64})
