"""Memory orders: channels last follows convolutions, and demands of callers win."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.graph.random_graphs import graphs, orders
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.graph.layout import channels_last, identity, reshaped_order, storage_orders


@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(st.data())
def test_orders_are_permutations_and_demands_are_kept(data) -> None:
    graph = data.draw(graphs())
    fixed = data.draw(orders(graph))
    found = storage_orders(graph, fixed)
    for i, node in enumerate(graph.nodes):
        assert sorted(found[i]) == list(range(len(node.shape)))
    assert {i: found[i] for i in fixed} == fixed


def test_channels_last() -> None:
    assert channels_last(4) == (0, 2, 3, 1)
    assert channels_last(3) == (0, 2, 1)
    assert identity(3) == (0, 1, 2)


def test_pooling_and_activations_keep_channels_last() -> None:
    b = GraphBuilder()
    one = (1, 1)
    x = b.input(0, (1, 4, 8, 8), "float32")
    w = b.input(1, (4, 4, 1, 1), "float32", static=True)
    y = b.append(
        "conv", (x, w), (1, 4, 8, 8), "float32", stride=one, lo=(0, 0), hi=(0, 0), dilation=one,
        groups=1,
    )  # fmt: skip
    z = b.pointwise("relu", y)
    pooled = b.append(
        "window_max", (z,), (1, 4, 4, 4), "float32", kernel=(2, 2), stride=(2, 2), lo=(0, 0),
        hi=(0, 0), dilation=one,
    )  # fmt: skip
    mean = b.reduce("sum", pooled, (2, 3))
    found = storage_orders(b.finish([mean]), {})
    assert [found[i] for i in (0, y, z, pooled)] == [identity(4), *[channels_last(4)] * 3]
    assert found[mean] == (0, 1)


def test_a_product_lies_as_its_only_reader_wants_it() -> None:
    """Attention: heads are merged by a permutation, which then costs nothing."""
    b = GraphBuilder()
    p, v = b.input(0, (2, 5, 5), "float32"), b.input(1, (2, 5, 4), "float32")
    mixed = b.matmul(p, v)
    graph = b.finish([b.permute(mixed, (1, 0, 2))])
    assert storage_orders(graph, {})[mixed] == (1, 0, 2)


def test_a_product_with_several_readers_lies_row_major() -> None:
    b = GraphBuilder()
    p, v = b.input(0, (2, 5, 5), "float32"), b.input(1, (2, 5, 4), "float32")
    mixed = b.matmul(p, v)
    graph = b.finish([b.permute(mixed, (1, 0, 2)), b.pointwise("neg", mixed)])
    assert storage_orders(graph, {})[mixed] == (0, 1, 2)


def test_axes_that_stay_together_keep_their_order() -> None:
    assert reshaped_order((1, 8, 6, 5), (0, 2, 3, 1), (1, 8, 30)) == (0, 2, 1)
    assert reshaped_order((1, 8, 30), (0, 2, 1), (1, 8, 6, 5)) == (0, 2, 3, 1)
    assert reshaped_order((4, 8, 6), (0, 2, 1), (4, 48)) is None
    assert reshaped_order((5, 1, 4), (2, 0, 1), (5, 4)) == (1, 0)


def test_images_made_of_tokens_lie_channels_last() -> None:
    b = GraphBuilder()
    tokens = b.input(0, (1, 30, 8), "float32")
    image = b.reshape(b.permute(tokens, (0, 2, 1)), (1, 8, 6, 5))
    graph = b.finish([b.pointwise("exp", b.pointwise("relu", image))])
    assert storage_orders(graph, {})[graph.nodes[graph.outputs[0]].inputs[0]] == (0, 2, 3, 1)


def _conv(b: GraphBuilder, x: int, number: int, columns: int) -> int:
    """A 1x1 convolution by the input of this number."""
    _, channels, *image = b.shape(x)
    w = b.input(number, (columns, channels, 1, 1), "float32")
    attrs = {"stride": (1, 1), "lo": (0, 0), "hi": (0, 0), "dilation": (1, 1), "groups": 1}
    return b.append("conv", (x, w), (1, columns, *image), "float32", **attrs)


def test_sums_over_paths_lie_as_the_convolution_that_made_them() -> None:
    """Radix attention: channels come apart, are weighed and summed over one of their parts."""
    b = GraphBuilder()
    x = b.input(0, (1, 8, 6, 6), "float32")
    apart = b.reshape(_conv(b, x, 1, 32), (1, 2, 16, 6, 6))
    plain = b.reduce("sum", apart, (1,))
    weight = b.broadcast(b.input(2, (1, 2, 16, 1, 1), "float32"), (1, 2, 16, 6, 6))
    weighed = b.pointwise("mul", weight, apart)
    summed = b.reduce("sum", weighed, (1,))
    means = b.reduce("sum", summed, (2, 3))
    orders = storage_orders(b.finish([plain, summed, means]), {})
    assert orders[plain] == orders[summed] == channels_last(4)
    assert orders[weighed] == (0, 3, 4, 1, 2)
    assert orders[means] == (0, 1)


def test_stacked_results_lie_as_their_parts() -> None:
    b = GraphBuilder()
    x = b.input(0, (1, 8, 6, 6), "float32")
    paths = [b.reshape(_conv(b, x, k, 16), (1, 1, 16, 6, 6)) for k in (1, 2)]
    both = b.append("cat", tuple(paths), (1, 2, 16, 6, 6), "float32", axis=1)
    summed = b.reduce("sum", both, (1,))
    orders = storage_orders(b.finish([summed]), {})
    assert orders[both] == (0, 1, 3, 4, 2)
    assert orders[summed] == channels_last(4)
