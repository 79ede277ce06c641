"""Key/value caches that a compiled step writes into: right, in place, and checked once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_pruner
from tests.compile.agreement import assert_equal

pytestmark = pytest.mark.tvm
LENGTH, WIDTH = 16, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.keys = torch.zeros(1, LENGTH, WIDTH)
        self.values = torch.zeros(1, LENGTH, WIDTH)

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        self.keys.index_copy_(1, position, k)
        self.values[:, position] = v
        hidden = torch.arange(LENGTH) > position[:, None]
        scores = (q @ self.keys.transpose(1, 2)).masked_fill(hidden, float("-inf"))
        return x + scores.softmax(-1) @ self.values


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, position)
        return x


@pytest.mark.parametrize("check", ["first-call", "off"])
@torch.no_grad()
def test_steps_equal_eagers_and_write_into_the_cache(backend, check):
    net, twin = Decoder().eval(), Decoder().eval()
    compiled = backend.compile(net, dynamic=False, check=check)
    addresses = [t.data_ptr() for layer in net.layers for t in (layer.keys, layer.values)]
    for start, count in ((0, 4), (4, 1), (5, 1), (6, 1)):
        position = torch.arange(start, start + count)
        x = torch.randn(1, count, WIDTH)
        assert_equal(compiled(x, position), twin(x, position))
        for mine, theirs in zip(net.layers, twin.layers, strict=True):
            assert_equal(mine.keys, theirs.keys)
            assert_equal(mine.values, theirs.values)
    assert addresses == [t.data_ptr() for layer in net.layers for t in (layer.keys, layer.values)]


@torch.no_grad()
def test_a_step_copies_no_cache(backend):
    net = Decoder().eval()
    compiled = backend.compile(net, dynamic=False)
    x, position = torch.randn(1, 1, WIDTH), torch.tensor([0])
    compiled(x, position)
    with torch.profiler.profile(record_shapes=True) as profile:
        compiled(x, position + 1)
    cache = [1, LENGTH, WIDTH]
    copies = [e for e in profile.events() if e.name in ("aten::clone", "aten::index_copy")]
    assert not [e for e in copies if e.input_shapes and e.input_shapes[0] == cache]
    assert not [e for e in profile.events() if e.name.startswith("aten::index_")]
    (graph,) = torch_pruner.last_report().graphs
    assert (graph.regions, graph.ops_fallback) == (1, ())


class Counting(nn.Module):
    """Counts its positions itself, as the caches of transformers do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.rows = torch.zeros(2, LENGTH, WIDTH)
        self.length = torch.tensor(0)
        self.table = torch.arange(24.0).reshape(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        position = torch.arange(x.shape[1]) + self.length
        if self.kind == "computed":  # nothing of the input: shown by a test of its own
            position = position * 2
        self.length.add_(x.shape[1])
        picked = self.table[position // 2].sum() if self.kind == "computed" else 0
        if self.kind == "put":
            self.rows[:, position] = x.tanh()
        elif self.kind == "turned":
            self.rows.transpose(0, 1).index_copy_(0, position, x.tanh().transpose(0, 1))
        else:
            self.rows.index_copy_(1, position, x.tanh())
        return self.rows.sum(-1) + picked


@pytest.mark.parametrize("kind", ["copy", "put", "computed", "turned"])
@torch.no_grad()
def test_positions_beyond_the_end_are_eagers_error_and_write_nothing(backend, kind):
    net, twin = Counting(kind), Counting(kind)
    compiled = backend.compile(net, dynamic=False)
    address, x = net.rows.data_ptr(), torch.randn(2, 1, WIDTH)
    for at in (0, 3, 4, 7 if kind == "computed" else LENGTH - 1):
        net.length.fill_(at)
        twin.length.fill_(at)
        assert_equal(compiled(x), twin(x))
    assert_equal(net.rows, twin.rows)
    assert net.rows.data_ptr() == address
    assert torch_pruner.last_report().graphs[-1].ops_fallback == ()
    for at in (LENGTH, -1 if kind != "put" else -LENGTH - 1):
        net.length.fill_(at)
        twin.length.fill_(at)
        with pytest.raises((IndexError, RuntimeError)) as mine:
            compiled(x)
        with pytest.raises((IndexError, RuntimeError)) as eager:
            twin(x)
        assert type(mine.value) is type(eager.value)
        assert_equal(net.rows, twin.rows)


@torch.no_grad()
def test_slices_and_places_are_written_where_they_lie(backend):
    def step(cache: torch.Tensor, turned: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache[:, 2:4] = x
        turned.transpose(0, 1)[5] = x[:, 0]
        return (cache.sum(), turned.sum())

    compiled = backend.compile(step, dynamic=False)
    mine = [torch.zeros(2, 8, 16), torch.zeros(2, 8, 16)]
    theirs = [t.clone() for t in mine]
    for _ in range(3):
        x = torch.randn(2, 2, 16)
        got, expected = compiled(*mine, x), step(*theirs, x)
        for a, b in zip((*got, *mine), (*expected, *theirs), strict=True):
            assert_equal(a, b)
    assert torch_pruner.last_report().graphs[-1].ops_fallback == ()


@torch.no_grad()
def test_caches_that_kernels_cannot_take_are_updated_all_the_same(backend):
    """One that begins between lines of memory, one with gaps, one of another width."""

    def step(cache: torch.Tensor, position: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(1, position, x)
        return cache * 2

    for dtype in (torch.float32, torch.bfloat16):
        compiled = backend.compile(step, dynamic=False)
        for make in (
            lambda: torch.zeros(2 * 8 * 16 + 1)[1:].reshape(2, 8, 16),
            lambda: torch.zeros(2, 8, 32)[..., ::2],
            lambda: torch.zeros(2, 16, 8).transpose(1, 2),
            lambda: torch.zeros(2, 8, 16),
        ):
            mine, theirs = make().to(dtype), make().to(dtype)
            for at in (0, 7, 3):
                x = torch.randn(2, 1, mine.shape[2], dtype=dtype)
                position = torch.tensor([at])
                # (torch captures an update of a transposed cache as one that is contiguous.)
                torch.testing.assert_close(
                    compiled(mine, position, x), step(theirs, position, x), rtol=0, atol=0
                )
                assert_equal(mine, theirs)


@torch.no_grad()
def test_prompts_of_any_length_are_one_graph(backend):
    """A size that is a symbol stays one, whatever is asked of the cache."""
    net, twin = Counting("copy"), Counting("copy")
    compiled = backend.compile(net, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for count in (3, 5, 4):
            x = torch.randn(2, count, WIDTH)
            assert_equal(compiled(x), twin(x))
            assert_equal(net.rows, twin.rows)
