"""A graph at a large size computes smaller ones, whatever lies in the padding."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.unit.graph.random_graphs import (
    assert_close,
    from_memory,
    inputs_for,
    random_graph,
    run_kernels,
)
from torch_pruner.graph.bucket import NotAlikeError, bucketed
from torch_pruner.graph.fuse import fuse
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.graph.ops import FLOATS
from torch_pruner.graph.reference import evaluate, numpy_dtype
from torch_pruner.graph.updates import written_inputs

LARGE, SMALL = 12, 7


def graphs(build, *sizes):
    """``build(builder, n)`` at some sizes; it returns the outputs."""
    found = []
    for n in sizes:
        builder = GraphBuilder()
        outputs = build(builder, n)
        found.append(builder.finish(outputs if isinstance(outputs, list) else [outputs]))
    return found


def wide(array, node, *, zeroed=False):
    """``array`` in the first elements of a larger one, beside NaN, or beside what it ends with."""
    pads = [(0, large - small) for large, small in zip(node.shape, array.shape, strict=True)]
    if not pads:
        return array
    if zeroed:
        return np.pad(array, pads)
    if node.dtype in FLOATS:
        return np.pad(array.astype(np.float64), pads, constant_values=np.nan).astype(array.dtype)
    return np.pad(array, pads, mode="edge")


def run(bucket, small, seed=0, zeroed=()):
    """What the bucket computes of inputs of the small graph, cut; and what that graph computes."""
    given = inputs_for(small, seed)
    nodes = [bucket.graph.nodes[i] for i in bucket.graph.inputs[: len(given)]]
    pairs = enumerate(zip(given, nodes, strict=True))
    arrays = [wide(a, n, zeroed=k in zeroed) for k, (a, n) in pairs]
    arrays += [np.array(n, numpy_dtype("int32")) for _, n in bucket.counts]
    wanted = evaluate(small, given)
    made = evaluate(bucket.graph, arrays)
    # What kernels leave out is NaN for the interpreter: nobody reads it.
    fused, memory = fuse(bucket.graph), {}
    for kernel, _, results in run_kernels(fused, arrays):
        memory.update(zip(kernel.outputs, results, strict=True))
    for output, array in zip(bucket.graph.outputs, made, strict=True):
        if output in memory:
            again = from_memory(memory[output], fused.orders[output])
            counted = tuple(map(slice, wanted[bucket.graph.outputs.index(output)].shape))
            assert_close([again[counted]], [array[counted]], 1e-5)
    cut = [m[tuple(map(slice, w.shape))] for m, w in zip(made, wanted, strict=True)]
    return cut, wanted


def computed_with(bucket):
    """The sizes from which something is computed; the others only say what of a result counts."""
    nodes, given = bucket.graph.nodes, bucket.graph.inputs
    numbers = given[len(given) - len(bucket.counts) :]
    return [c for c in numbers if any(c in n.inputs and n.op != "within" for n in nodes)]


def agree(build, large=LARGE, small=SMALL, *, counts=None, zeroed=(), written=()):
    a, b = graphs(build, large, small)
    bucket = bucketed(a, b, zeroed, written)
    assert_close(*run(bucket, b, zeroed=zeroed), 1e-5)
    if counts is not None:
        assert len(computed_with(bucket)) == counts
    return bucket


def test_padding_that_is_computed_needs_fewer_counts():
    def build(b, n):
        x, y = b.input(0, (n, 6), "float32"), b.input(1, (n + 2, 6), "float32")
        return [b.pointwise("exp", x), b.reduce("sum", y, (0,))]

    large, small = graphs(build, LARGE, SMALL)
    bucket = bucketed(large, small)
    padded = bucket.padded()
    assert len(bucket.counts) == 2
    assert padded.counts == ((LARGE + 2, SMALL + 2),)
    assert_close(*run(padded, small), 1e-5)
    assert not any(n.op == "within" for n in padded.graph.nodes)


def refused(build, large=LARGE, small=SMALL):
    with pytest.raises(NotAlikeError):
        bucketed(*graphs(build, large, small))


def softmax(b, x, axis=-1):
    axis %= len(b.shape(x))
    top = b.reduce("max", x, (axis,), keepdim=True)
    powers = b.pointwise("exp", b.pointwise("sub", x, top))
    return b.pointwise("div", powers, b.reduce("sum", powers, (axis,), keepdim=True))


def attention(b, n, *, mask="", batch=2, width=4):
    q, k, v = (b.input(i, (batch, n, width), "float32") for i in range(3))
    scores = b.matmul(q, b.permute(k, (0, 2, 1)))
    if mask == "causal":
        key, query = (b.append("iota", (), (n, n), "int64", dim=d) for d in (1, 0))
        visible = b.broadcast(b.pointwise("le", key, query), (batch, n, n))
        scores = b.pointwise("where", visible, scores, b.const(-math.inf, "float32"))
    if mask == "given":
        given = b.broadcast(b.input(3, (batch, 1, n), "float32"), (batch, n, n))
        scores = b.pointwise("add", scores, given)
    return b.matmul(softmax(b, scores), v)


def test_what_sums_over_static_axes_alone_is_the_large_graph():
    def build(b, n):
        x = b.input(0, (n, 6), "float32")
        w = b.input(1, (6, 5), "float32", static=True)
        return b.pointwise("relu", b.matmul(softmax(b, x), w))

    bucket = agree(build, counts=0)
    operators = [n.op for n in bucket.graph.nodes if n.op != "input"]
    large = graphs(build, LARGE)[0]
    assert operators == [*(n.op for n in large.nodes if n.op != "input"), "within"]


@pytest.mark.parametrize("op", ["sum", "max", "min", "prod", "argmax", "argmin"])
def test_reductions_of_what_varies(op):
    def build(b, n):
        x = b.input(0, (3, n), "float32")
        dtype = "int64" if op.startswith("arg") else "float32"
        return b.reduce(op, x, (1,), dtype=dtype)

    agree(build, counts=1)


@pytest.mark.parametrize("op", ["any", "all"])
def test_reductions_of_truth(op):
    agree(lambda b, n: b.reduce(op, b.input(0, (n, 2), "bool"), (0,)), counts=1)


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bfloat16"])
def test_reductions_in_other_types(dtype):
    agree(lambda b, n: b.reduce("max", b.input(0, (n, 2), dtype), (0,)), counts=1)


def test_softmax_is_masked_once():
    bucket = agree(lambda b, n: softmax(b, b.input(0, (3, n), "float32")), counts=1)
    assert sum(n.op == "where" for n in bucket.graph.nodes) == 1


def test_attention():
    bucket = agree(lambda b, n: attention(b, n), counts=1)
    assert sum(n.op == "where" for n in bucket.graph.nodes) == 2  # scores, and values


def test_attention_with_a_mask_of_its_own():
    agree(lambda b, n: attention(b, n, mask="given"), counts=1)


def test_causal_attention_masks_its_scores_itself():
    bucket = agree(lambda b, n: attention(b, n, mask="causal"), counts=1)
    assert sum(n.op == "where" for n in bucket.graph.nodes) == 2  # its own, and values


def test_attention_of_other_lengths_than_its_queries():
    def build(b, n):
        q = b.input(0, (5, 4), "float32")
        k, v = (b.input(i, (n, 4), "float32") for i in (1, 2))
        return b.matmul(softmax(b, b.matmul(q, b.permute(k, (1, 0)))), v)

    agree(build, counts=1)


def test_flattened_batches():
    """Linear layers see (batch * n, width); a sum over it needs the mask of its factor."""

    def build(b, n):
        x = b.input(0, (3, n, 4), "float32")
        w = b.input(1, (4, 6), "float32", static=True)
        flat = b.matmul(b.reshape(x, (3 * n, 4)), w)
        back = b.reshape(flat, (3, n, 2, 3))
        return [b.permute(back, (0, 2, 1, 3)), b.reduce("sum", flat, (0,))]

    agree(build, counts=1)


def test_a_bias_along_a_flattened_batch():
    def build(b, n):
        x = b.input(0, (3, n, 4), "float32")
        bias = b.broadcast(b.input(1, (1, 4), "float32", static=True), (3 * n, 4))
        return b.reduce("max", b.pointwise("add", b.reshape(x, (3 * n, 4)), bias), (0,))

    agree(build, counts=1)


def test_other_factors_of_one_axis_are_refused():
    """Repeated along one factor of an axis is not repeated along the axis."""

    def build(b, n):
        x = b.input(0, (2 * n * 3,), "float32")
        tiled = b.broadcast(b.input(1, (2, 1, 3), "float32"), (2, n, 3))
        return b.pointwise("add", x, b.reshape(tiled, (2 * n * 3,)))

    refused(build)


def test_two_sizes_that_vary():
    def build(b, n):
        x = b.input(0, (n - 2, 2 * n + 1), "float32")
        return [b.reduce("sum", x, (0, 1)), b.reduce("max", x, (0,)), softmax(b, x)]

    agree(build, counts=2)


def test_means():
    def build(b, n):
        x = b.input(0, (3, n), "float32")
        total = b.reduce("sum", x, (1,))
        mean = b.pointwise("mul", total, b.const(1 / n, "float32"))
        return [mean, b.pointwise("div", total, b.const(n, "float32"))]

    agree(build, counts=1)


def test_numbers_that_are_no_multiple_of_a_size_are_refused():
    def build(b, n):
        x = b.input(0, (n,), "float32")
        return b.pointwise("mul", x, b.const(math.sqrt(n), "float32"))

    refused(build)


def test_first_and_last_elements():
    def build(b, n):
        x = b.input(0, (2, n, 3), "float32")
        return [
            b.slice(x, (0, 0, 0), (2, 1, 3)),
            b.slice(x, (0, n - 1, 0), (2, 1, 3)),
            b.slice(x, (0, n - 5, 1), (2, 2, 2), (1, 2, 1)),
        ]

    agree(build, counts=1)


def test_slices_of_tables():
    def build(b, n):
        table = b.input(0, (20, 3), "float32", static=True)
        return b.pointwise("add", b.slice(table, (2, 0), (n, 3)), b.input(1, (n, 3), "float32"))

    agree(build, counts=0)


def test_the_whole_of_a_table():
    """At its largest a size is as long as a table: nothing is cut off there."""

    def build(b, n):
        table = b.input(0, (LARGE, 3), "float32", static=True)
        x = b.pointwise("add", b.slice(table, (0, 0), (n, 3)), b.input(1, (n, 3), "float32"))
        return [b.reduce("sum", x, (0,)), b.pointwise("relu", table)]

    assert len(graphs(build, LARGE)[0].nodes) < len(graphs(build, SMALL)[0].nodes)
    a, b = graphs(build, LARGE, SMALL)
    with pytest.raises(NotAlikeError):
        bucketed(b, a)
    agree(build, counts=1)


def test_what_moves_with_the_size_is_refused():
    def x(b, n):
        return b.input(0, (n, 3), "float32")

    refused(lambda b, n: b.append("flip", (x(b, n),), (n, 3), "float32", dims=(0,)))
    refused(lambda b, n: b.slice(x(b, n), (n // 2, 0), (2, 3)))
    refused(lambda b, n: b.reshape(b.permute(x(b, n), (1, 0)), (3 * n,)))
    refused(lambda b, n: b.pointwise("relu" if n > 8 else "neg", x(b, n)))


def test_reversed_along_another_axis():
    def build(b, n):
        x = b.input(0, (n, 3), "float32")
        return b.append("flip", (x,), (n, 3), "float32", dims=(1,))

    agree(build, counts=0)


def test_something_put_before_a_sequence():
    def build(b, n):
        first = b.broadcast(b.input(0, (1, 1, 3), "float32", static=True), (2, 1, 3))
        x = b.input(1, (2, n, 3), "float32")
        both = b.append("cat", (first, x), (2, n + 1, 3), "float32", dim=1)
        return b.reduce("sum", both, (1,))

    agree(build, counts=1)


def test_a_cache_that_grows():
    """What comes behind a sequence lies behind what counts of it."""

    def build(b, n):
        cache = b.input(0, (2, n, 3), "float32")
        new = b.input(1, (2, 2, 3), "float32")
        query = b.input(2, (2, 1, 3), "float32")
        both = b.append("cat", (cache, new), (2, n + 2, 3), "float32", dim=1)
        mixed = b.matmul(softmax(b, b.matmul(query, b.permute(both, (0, 2, 1)))), both)
        more = b.append("cat", (new, cache, cache), (2, 2 * n + 2, 3), "float32", dim=1)
        return [both, mixed, more]

    agree(build, counts=2)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_cache_that_may_be_written_into(rows):
    """What comes behind it is written into the room that padding leaves."""

    def build(b, n):
        caches = [b.input(k, (2, n, 3), "float32") for k in range(3)]
        new = b.input(3, (2, rows, 3), "float32")
        query, mask = b.input(4, (2, 1, 3), "float32"), b.input(5, (2, n + rows), "bool")
        keys, values, other = (
            b.append("cat", (c, new), (2, n + rows, 3), "float32", dim=1) for c in caches
        )
        scores = b.matmul(query, b.permute(keys, (0, 2, 1)))
        shown = b.reshape(mask, (2, 1, n + rows))
        scores = b.pointwise("where", shown, scores, b.const(-1e9, "float32"))
        read_before = b.reduce("sum", caches[2], (1,))
        return [keys, values, b.matmul(softmax(b, scores), values), other, read_before]

    for small in (SMALL, LARGE - 1):
        bucket = agree(build, small=small, zeroed=range(6), written=(0, 1, 2))
        nodes = bucket.graph.nodes
        lengths = [nodes[i].shape[1] for i in bucket.graph.inputs[:3]]
        assert lengths == [LARGE + rows, LARGE + rows, LARGE]  # who reads it before needs it
        assert sum(n.op == "update" and n.attr("in_place") for n in nodes) == 2
        assert written_inputs(bucket.graph) == {0: 0, 1: 1}  # and not copied
        assert sum(n.op == "where" for n in nodes) == 3  # mask, scores, and other
    assert not any(n.op == "update" for n in agree(build).graph.nodes)


def test_padding_of_the_graph_itself():
    def build(b, n):
        x = b.input(0, (2, n), "float32")
        attrs = {"lo": (0, 2), "hi": (1, 3), "value": 0.5}
        return b.append("pad", (x,), (3, n + 5), "float32", **attrs)

    agree(build, counts=1)


@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions_and_pools_along_a_sequence(stride):
    def build(b, n):
        x = b.input(0, (2, 3, n), "float32")
        w = b.input(1, (4, 3, 3), "float32", static=True)
        out = (n - 1) // stride + 1
        ends = {"stride": (stride,), "lo": (1,), "hi": (1,), "dilation": (1,)}
        y = b.append("conv", (x, w), (2, 4, out), "float32", groups=1, **ends)
        pools = [
            b.append(op, (b.pointwise("tanh", x),), (2, 3, out), "float32", kernel=(3,), **ends)
            for op in ("window_max", "window_sum")
        ]
        return [b.pointwise("relu", y), *pools]

    agree(build, 12, 8)


def test_what_some_readers_need_less_of_is_not_copied_for_them():
    def build(b, n):
        x = b.input(0, (2, 4, n), "float32")
        for index, taps in ((1, 1), (2, 3), (3, 1)):
            w = b.input(index, (4, 4, taps), "float32", static=True)
            ends = {"stride": (1,), "lo": (taps // 2,), "hi": (taps // 2,), "dilation": (1,)}
            y = b.append("conv", (x, w), (2, 4, n), "float32", groups=1, **ends)
            x = b.pointwise("relu", b.pointwise("add", x, y))
        return x

    assert len(fuse(agree(build, 12, 8).graph).kernels) == 3


def test_convolutions_of_batches_need_no_mask():
    def build(b, n):
        x = b.input(0, (n, 3, 5), "float32")
        w = b.input(1, (4, 3, 3), "float32", static=True)
        ends = {"stride": (1,), "lo": (1,), "hi": (1,), "dilation": (1,)}
        return b.append("conv", (x, w), (n, 4, 5), "float32", groups=1, **ends)

    agree(build, counts=0)


def test_embeddings_and_positions():
    def build(b, n):
        ids = b.input(0, (2, n), "int64")
        words = b.input(1, (4, 3), "float32", static=True)
        places = b.input(2, (LARGE, 3), "float32", static=True)
        at = b.append("iota", (), (n,), "int64", dim=0)
        word = b.append("take", (words, ids), (2, n, 3), "float32", dim=0)
        place = b.append("take", (places, at), (n, 3), "float32", dim=0)
        return b.pointwise("add", word, place)

    agree(build, counts=0)


@pytest.mark.parametrize("negative", [False, True])
def test_an_index_into_what_varies(negative):
    """What counts is named from the front; from the end, whose place is computed, too."""

    def build(b, n):
        x = b.input(0, (2, n, 3), "float32")
        at = b.pointwise("minimum", b.input(1, (4,), "int64"), b.const(SMALL - 1, "int64"))
        at = b.pointwise("neg", at) if negative else b.pointwise("maximum", at, b.const(0, "int64"))
        return b.append("take", (x, at), (2, 4, 3), "float32", dim=1)

    agree(build, counts=int(negative))


def test_as_many_indices_as_vary():
    def build(b, n):
        x, line = b.input(0, (n, 3), "float32"), b.append("iota", (), (n,), "int64", dim=0)
        back = b.pointwise("sub", b.const(n - 1, "int64"), line)
        return b.append("take", (x, back), (n, 3), "float32", dim=0)

    # From a larger size on positions of padding are negative or beyond; they name anything.
    agree(build, counts=1)


def test_an_index_into_an_axis_with_padding_in_the_middle_is_refused():
    def build(b, n):
        x, at = b.input(0, (3, n), "float32"), b.input(1, (2,), "int64")
        return b.append("take", (b.reshape(x, (3 * n,)), at), (2,), "float32", dim=0)

    refused(build)


def test_gather_along_what_varies():
    def build(b, n):
        x, at = b.input(0, (n, 3), "float32"), b.input(1, (2, 3), "int64")
        at = b.pointwise("minimum", b.pointwise("abs", at), b.const(SMALL - 1, "int64"))
        return b.append("gather", (x, at), (2, 3), "float32", dim=0)

    agree(build)


def test_a_mask_that_is_read_by_position():
    """transformers looks a padding mask up at every key, and lets it hide what is before."""

    def build(b, n):
        scores, mask = b.input(0, (2, n), "float32"), b.input(1, (2, n), "int64")
        at = b.pointwise("add", b.append("iota", (), (n,), "int64", dim=0), b.const(0, "int64"))
        end = b.pointwise("add", at, b.const(n, "int64"))
        at = b.pointwise("where", b.pointwise("lt", at, b.const(0, "int64")), end, at)
        shown = b.append("take", (mask, at), (2, n), "int64", dim=1)
        shown = b.pointwise("gt", shown, b.const(0, "int64"))
        hidden = b.const(-math.inf, "float32")
        return softmax(b, b.pointwise("where", shown, scores, hidden))

    agree(build)


def test_an_axis_that_is_as_long_at_the_large_size():
    """A prompt as long as a cache may become: positions along both are other ones."""

    def build(b, n):
        found = []
        for k, length in enumerate((LARGE, n, LARGE)):
            x = b.input(k, (2, length), "float32")
            line = b.append("iota", (), (length,), "int64", dim=0)
            line = b.reshape(b.cast(b.pointwise("abs", line), "float32"), (1, length))
            found.append(b.reduce("sum", b.pointwise("mul", x, line), (1,)))
        return found

    agree(build, counts=1)


def test_what_is_one_node_at_one_size_only():
    """Two numbers that are equal at the small size, and another two at the large one."""

    def build(b, n):
        x = b.input(0, (n,), "int64")
        numbers = (n, SMALL, LARGE, -n)
        return [b.pointwise("mul", x, b.const(k, "int64")) for k in numbers]

    large, small = graphs(build, LARGE, SMALL)
    assert len(large.nodes) == len(small.nodes)
    agree(build, counts=1)
    agree(build, 20, 9, counts=1)


def test_gather_beside_what_varies():
    def build(b, n):
        x, at = b.input(0, (n, 3), "float32"), b.input(1, (n, 3), "int64")
        at = b.pointwise("minimum", at, b.const(2, "int64"))
        return b.append("gather", (x, at), (n, 3), "float32", dim=1)

    agree(build, counts=0)


def test_parameters_do_not_vary():
    refused(lambda b, n: b.pointwise("relu", b.input(0, (n,), "float32", static=True)))


def test_the_other_way_round_is_refused():
    refused(lambda b, n: b.pointwise("relu", b.input(0, (n,), "float32")), SMALL, LARGE)


@pytest.mark.parametrize("mask", ["", "causal", "given"])
def test_one_program_serves_all_sizes(mask):
    digests = set()
    for n in (3, 5, 7, 11):
        digests.add(agree(lambda b, n: attention(b, n, mask=mask), LARGE, n).graph.digest())
    assert len(digests) == 1


def test_zeros_behind_inputs_need_no_masks():
    def build(b, n):
        x, y = b.input(0, (2, n), "float32"), b.input(1, (n, 3), "float32")
        return [b.matmul(x, y), b.reduce("sum", x, (1,))]

    agree(build, counts=1, zeroed=(1,))
    bucket = agree(build, counts=0, zeroed=(0, 1))
    assert all(n.op != "where" for n in bucket.graph.nodes)
    agree(lambda b, n: b.reduce("max", b.input(0, (2, n), "float32"), (1,)), counts=1, zeroed=(0,))


def test_random_graphs():
    """Grown alike at two sizes: what is not refused is right."""
    done = masked = 0
    for seed in range(600):
        large = random_graph(seed, moves=6, dims=(1, 2, 3, 8))
        small = random_graph(seed, moves=6, dims=(1, 2, 3, 5))
        if large == small:
            continue
        try:
            bucket = bucketed(large, small)
        except NotAlikeError:
            continue
        assert_close(*run(bucket, small, seed), 1e-4)
        every = range(len(large.inputs))
        assert_close(*run(bucketed(large, small, every, every), small, seed, every), 1e-4)
        done += 1
        masked += bool(bucket.counts)
    assert done > 60
    assert masked > 10


def test_rows_of_something_that_varies_are_updated():
    def build(b, n):
        cache, rows = b.input(0, (n, 5, 3), "float32"), b.input(1, (n, 2, 3), "float32")
        put = cache, rows, b.pointwise("minimum", b.input(2, (2,), "int64"), b.const(4, "int64"))
        return b.append("update", put, (n, 5, 3), "float32", dim=1, in_place=False)

    agree(build, counts=0)


@pytest.mark.parametrize("what", ["cache", "rows"])
def test_an_update_along_what_varies_is_refused(what):
    def build(b, n):
        length, count = (n, 2) if what == "cache" else (20, n)
        put = (
            b.input(0, (length, 3), "float32"), b.input(1, (count, 3), "float32"),
            b.input(2, (count,), "int64"),
        )  # fmt: skip
        return b.append("update", put, (length, 3), "float32", dim=0, in_place=False)

    refused(build)
