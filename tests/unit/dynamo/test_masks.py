"""Masks of dropout from the state of torch's generator: what a program is asked to draw, and who
draws where it cannot be."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from torch_pruner.dynamo.run import masks
from torch_pruner.dynamo.run.masks import MaskDrawer, draws, with_drawer
from torch_pruner.graph.masks import WORDS, Draw

bernoulli = torch.ops.aten.bernoulli.p


def walked(count, left, following):
    """Elements of each renewal, and the state that word by word reading ends in."""
    parts = [0]
    for word in range(2 * count):
        left -= 1
        if left == 0:
            left, following = WORDS, 0
            parts.append(0)
        following += 1
        if word % 2:
            parts[-1] += 1
    return parts, (left, following)


@pytest.mark.parametrize("read", [0, 1, 2, 311, 622, 623, 624])
def test_what_is_drawn(read):
    """Elements before and after each renewal, and the state, are those of one word at a time."""
    left, following = (1, 0) if not read else (WORDS + 1 - read, read)
    for count in (0, 1, 2, 150, 151, 311, 312, 313, 624, 935, 1300):
        draw = Draw.of(count, 0.25, left, following)
        parts, state = walked(count, left, following)
        assert draw.state_after(left) == state, (count, draw)
        assert (draw.begun, draw.renewals) == (parts[0], len(parts) - 1), (count, draw)
        assert draw.begun + max(draw.renewals - 1, 0) * 312 + draw.rest == count
        assert (draw.high, draw.low) == (1 << 19, 0)


def test_eager_draws_where_a_program_would_not_be_faithful(monkeypatch):
    """One that draws something else, states of another size, other dtypes, orders and generators,
    few elements: the mask and the state afterwards are eager's."""
    calls = []
    nothing = MaskDrawer(calls.append)  # leaves masks as they were
    forbidden = MaskDrawer(lambda table: pytest.fail("asked to draw"))
    many = torch.empty(masks.WORTH, dtype=torch.bool)
    cases = [
        (nothing, many, {}),
        (nothing, many, {}),
        (forbidden, many[:-1], {}),
        (forbidden, torch.empty(masks.WORTH), {}),
        (forbidden, torch.empty(2, masks.WORTH, dtype=torch.bool).t(), {}),
        (forbidden, many, {"generator": torch.Generator().manual_seed(3)}),
    ]
    for drawer, x, options in cases:
        _assert_eagers(drawer, x, options)
    assert len(calls) == 1  # tried, and never again
    monkeypatch.setattr(masks, "_BYTES", 12)
    _assert_eagers(forbidden, many, {})
    with pytest.raises(RuntimeError, match="expects p"):
        forbidden(many, 1.5)


def _assert_eagers(drawer, x, options):
    found = []
    for draw in (drawer, bernoulli):
        torch.manual_seed(5)
        if options:
            options["generator"].manual_seed(3)
        found.append((draw(x, 0.3, **options), torch.get_rng_state()))
    (mask, state), (expected, after) = found
    assert torch.equal(mask, expected)
    assert torch.equal(state, after)
    assert mask.dtype == expected.dtype
    assert mask.stride() == expected.stride()


def test_another_thread_draws_meanwhile():
    """The generator then goes on from where that one left it, and eager draws."""
    drawer = MaskDrawer(lambda table: torch.rand(1))
    drawer._faithful = True
    x = torch.empty(masks.WORTH, dtype=torch.bool)
    torch.manual_seed(5)
    mask = drawer(x, 0.3)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    torch.rand(1)
    assert torch.equal(mask, bernoulli(x, 0.3))
    assert torch.equal(state, torch.get_rng_state())


def test_steps_that_draw_get_the_drawer():
    def step(x):
        return bernoulli(x, 0.5), x + 1

    def other(x):
        return (x + 1,)

    gm, plain = fx.symbolic_trace(step), fx.symbolic_trace(other)
    drawer = MaskDrawer(lambda table: None)
    assert with_drawer(plain, drawer) is plain
    made = with_drawer(gm, drawer)
    targets = [n.target for n in made.graph.nodes if n.op == "call_function"]
    assert targets[0] is drawer
    assert bernoulli in {n.target for n in gm.graph.nodes}
    torch.manual_seed(1)
    mine = made(torch.ones(3, 5))
    torch.manual_seed(1)
    for a, b in zip(mine, gm(torch.ones(3, 5)), strict=True):
        assert torch.equal(a, b)


def test_small_masks_are_left_to_eager():
    """A graph that draws no more than those needs no library that draws."""
    gm = fx.symbolic_trace(lambda x: bernoulli(x, 0.5))
    assert draws(gm)  # of an unknown size
    (node,) = gm.graph.find_nodes(op="call_function", target=bernoulli)
    for size in (masks.WORTH - 1, masks.WORTH):
        node.meta["val"] = torch.empty(size, dtype=torch.bool)
        assert draws(gm) == (size == masks.WORTH)
