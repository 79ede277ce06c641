"""Graphs of symbolic sizes, compiled for the sizes that come."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import torch_pruner
from tests.compile.agreement import assert_equal, check
from torch_pruner.dynamo.run import reports

pytestmark = pytest.mark.tvm
randn = torch.randn


class Block(nn.Module):
    """Attention and a small network over a sequence."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.mlp = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, n, width = x.shape
        q, k, v = (t.view(batch, n, 4, width // 4).transpose(1, 2) for t in self.qkv(x).chunk(3, 2))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.norm(x + self.out(mixed.transpose(1, 2).reshape(batch, n, width)))
        return x + nn.functional.gelu(self.mlp(x))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def test_one_program_serves_every_size(backend):
    model = Block().eval()
    compiled = backend.compile(model, dynamic=True)
    with reports.collect() as graphs, torch.no_grad():
        for batch, n in ((2, 5), (2, 17), (3, 3), (2, 17), (8, 20), (5, 2)):
            x = randn(batch, n, 32)
            assert_equal(compiled(x), model(x))
            assert compiled(x).is_contiguous()
    assert [g.name.partition("[")[2] for g in graphs] == ["..8,32]"]
    assert all(g.ops_compiled == g.ops_total > 0 for g in graphs)


def test_a_size_beyond_makes_a_program_that_is_larger(backend):
    model = Block().eval()
    compiled = backend.compile(model, dynamic=True)
    with reports.collect() as graphs, torch.no_grad():
        for batch, n in ((2, 5), (9, 3), (2, 33), (9, 33)):
            x = randn(batch, n, 32)
            assert_equal(compiled(x), model(x))
    assert [g.name.partition("[")[2] for g in graphs] == ["..8,32]", "..64,32]", "..64,256]"]


@pytest.fixture
def by_size(monkeypatch):
    """As if graphs had extents that are no polynomials."""
    from torch_pruner.dynamo.sizes import buckets

    monkeypatch.setattr(buckets, "expressions_of", lambda _: None)


@pytest.mark.usefixtures("by_size")
def test_every_size_is_compiled_as_a_whole(backend):
    model = Block().eval()
    compiled = backend.compile(model, dynamic=True)
    with reports.collect() as graphs, torch.no_grad():
        for n in (5, 17, 3, 17):
            x = randn(2, n, 32)
            assert_equal(compiled(x), model(x))
    assert len(graphs) == 3
    assert all(g.ops_compiled == g.ops_total > 0 for g in graphs)


def test_a_restart_of_dynamo_is_no_failure(backend, caplog):
    """Numbers of modules are symbols at first; where one is used, Dynamo captures once more."""
    model = Block().eval()
    with reports.collect() as graphs, torch.no_grad(), caplog.at_level(logging.WARNING):
        compiled = backend.compile(model, dynamic=True, strict=False)
        assert_equal(compiled(x := randn(2, 9, 32)), model(x))
    assert not any("eager" in r.message for r in caplog.records)
    assert [g.ops_compiled == g.ops_total > 0 for g in graphs] == [True]


@pytest.mark.usefixtures("by_size")
def test_smaller_sizes_run_in_the_program_of_a_larger_one(backend):
    model = Block().eval()
    compiled = backend.compile(model, dynamic=True)
    with reports.collect() as graphs, torch.no_grad():
        for n in (40, 39, 36, 33, 37, 35):
            x = randn(2, n, 32)
            assert_equal(compiled(x), model(x))
            assert compiled(x).is_contiguous()
    assert [g.name.partition("[")[2] for g in graphs] == ["2,40]", "..2,40]"]
    assert all(g.ops_compiled == g.ops_total > 0 for g in graphs)


def test_padding_stays_out_of_results(backend):
    """Softmax, sums, means and the last element over what varies, and a mask of the caller's."""

    def fn(x, mask):
        seen = x.masked_fill(~mask.unsqueeze(-1), -torch.inf).softmax(1) @ x[:, :6].mT
        return seen.sum(1), x.mean(1), x[:, -1], x.amax((0, 1)), x.flatten(0, 1).logsumexp(0)

    compiled = backend.compile(fn, dynamic=True)
    with reports.collect() as graphs, torch.no_grad():
        for n in (40, 38, 33, 36):
            x = randn(3, n, 8)
            x[..., 0] = -1e30  # zeros in the padding would be the largest
            mask = torch.rand(3, n) > 0.2
            for got, wanted in zip(compiled(x, mask), fn(x, mask), strict=True):
                assert_equal(got, wanted)
    assert len(graphs) <= 2


def test_batches_of_any_size_need_no_other_kernels(backend):
    layer = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4))
    layer.eval()
    compiled = backend.compile(layer, dynamic=True)
    with reports.collect() as graphs, torch.no_grad():
        for n in (20, 19, 17, 18):
            x = randn(n, 3, 8, 8)
            assert_equal(compiled(x), layer(x))
    assert len(graphs) == 1


@pytest.mark.usefixtures("by_size")
def test_a_sequence_that_grows(backend):
    model = Block().eval()
    compiled = backend.compile(model, dynamic=True)
    with reports.collect() as graphs, torch.no_grad():
        for n in range(17, 40):
            x = randn(1, n, 32)
            assert_equal(compiled(x), model(x))
    names = [g.name.partition("[")[2] for g in graphs if "[.." in g.name]
    assert names == ["..32]", "..64]"]


def test_indices_out_of_bounds_raise_in_a_larger_program_too(backend):
    table = nn.Embedding(10, 4)
    compiled = backend.compile(table, dynamic=True)
    with torch.no_grad():
        for n in (16, 14):
            ids = torch.randint(10, (n,))
            assert_equal(compiled(ids), table(ids))
        with pytest.raises(IndexError):
            compiled(torch.full((14,), 10))


def test_one_capture_by_dynamo(backend):
    """A recompilation is paid once, however many sizes come."""
    model = Block().eval()
    compiled = backend.compile(model)
    strictly = {"recompile_limit": 2, "fail_on_recompile_limit_hit": True}
    with torch.no_grad(), torch._dynamo.config.patch(**strictly):
        for n in (4, 7, 9, 12, 4, 20):
            x = randn(1, n, 32)
            assert_equal(compiled(x), model(x))


def test_training_with_changing_sizes(backend):
    model, twin = Block(), Block()
    twin.load_state_dict(model.state_dict())
    compiled = backend.compile(model, dynamic=True)
    with reports.collect() as graphs:
        for n in (6, 9, 6):
            x = randn(2, n, 32)
            for net in (compiled, twin):
                net(x).square().mean().backward()
            for (name, mine), theirs in zip(
                model.named_parameters(), twin.parameters(), strict=True
            ):
                assert_equal(mine.grad, theirs.grad, name)
    assert len(graphs) == 4  # forward and backward, of two sizes
    assert all(g.ops_compiled for g in graphs)


def test_several_symbols_and_sizes_among_the_results(backend):
    def fn(x, y):
        return torch.cat([x, y]).softmax(0), x.shape[0] * y.shape[0], x.new_zeros(y.shape[0])

    compiled = backend.compile(fn, dynamic=True)
    for a, b in ((3, 4), (4, 3), (7, 2), (3, 4)):
        check(compiled, fn, lambda a=a, b=b: (randn(a, 6), randn(b, 6)), calls=1, covers=False)


def test_only_the_first_capture_is_tuned(cold, monkeypatch):
    """What Dynamo captures again, and sizes that come later, run as drafted."""
    from torch_pruner.compiler import kernels

    tuned, tune = [], kernels._tune

    def noted(tasks, *args, **kwargs):
        tuned.append(len(tasks))
        return tune(tasks, *args, **kwargs)

    monkeypatch.setattr(kernels, "_tune", noted)
    layer = nn.Linear(8, 4)
    options = {"effort": "quick", "trials": 2}
    with torch.no_grad():
        compiled = cold.compile(layer, dynamic=True, **options)
        for n in (3, 5):
            x = randn(n, 8)
            assert_equal(compiled(x), layer(x))
        assert len(tuned) == 1
        torch._dynamo.reset()
        compiled = cold.compile(layer, **options)  # static first, then with symbols
        for n in (3, 5, 7):
            x = randn(n, 8)
            assert_equal(compiled(x), layer(x))
    assert len(tuned) == 2


def test_what_was_tuned_before_is_taken(cold):
    """Pre-warming for the sizes that matter is what makes them fast."""
    layer = nn.Linear(8, 4).eval()
    options = cold.options(effort="quick", trials=2)
    torch_pruner.tune(layer, [(randn(3, 8),), (randn(5, 8),)], options)
    with reports.collect() as graphs, torch.no_grad():
        compiled = cold.compile(layer, dynamic=True, effort="quick", on_miss="error")
        for n in (3, 5):
            x = randn(n, 8)
            assert_equal(compiled(x), layer(x))
    assert [[t.source for t in g.tasks] for g in graphs] == [["cache"], ["cache"]]


def test_a_size_that_is_not_in_the_cache_fails_no_request(cold, caplog):
    layer = nn.Linear(8, 4).eval()
    torch_pruner.tune(layer, (randn(3, 8),), cold.options(effort="quick", trials=2))
    with torch.no_grad(), caplog.at_level(logging.WARNING, "torch_pruner"):
        compiled = cold.compile(layer, dynamic=True, effort="quick", on_miss="error")
        assert_equal(compiled(x := randn(3, 8)), layer(x))
        assert not any("run in eager" in r.message for r in caplog.records)
        assert_equal(compiled(x := randn(6, 8)), layer(x))
    assert any("run in eager" in r.message for r in caplog.records)


def test_no_sizes_wanted(backend):
    model = Block().eval()
    compiled = backend.compile(model, dynamic=True, max_sizes=0)
    with reports.collect() as graphs, torch.no_grad():
        for n in (5, 17):
            x = randn(2, n, 32)
            assert_equal(compiled(x), model(x))
    (graph,) = graphs
    assert graph.ops_compiled < graph.ops_total


def test_parameters_that_change_reach_every_size(backend):
    layer = nn.Linear(8, 4).eval()
    compiled = backend.compile(layer, dynamic=True)
    with torch.no_grad():
        for n in (3, 5):
            compiled(randn(n, 8))
        layer.weight.mul_(2)
        for n in (3, 5):
            x = randn(n, 8)
            assert_equal(compiled(x), layer(x))


@pytest.mark.usefixtures("by_size")
def test_sizes_that_came_later_are_noted_and_tuned(cold):
    layer = nn.Linear(8, 4).eval()
    asked = {"effort": "quick", "trials": 8}
    with torch.no_grad():
        compiled = cold.compile(layer, dynamic=True, **asked)
        for n in (3, 5, 7):
            compiled(randn(n, 8))
    report = torch_pruner.tune_seen(cold.options(**asked))
    assert [t.source for t in report.tasks] == ["tuned", "tuned"]
    assert report.complete
    assert not torch_pruner.tune_seen(cold.options(**asked)).graphs  # nothing is left
    torch._dynamo.reset()
    with reports.collect() as graphs, torch.no_grad():
        compiled = cold.compile(layer, dynamic=True, effort="quick", on_miss="fallback")
        for n in (3, 5, 7):
            x = randn(n, 8)
            assert_equal(compiled(x), layer(x))
    assert [t.source for g in graphs for t in g.tasks] == ["cache"] * 3


def test_what_the_fallback_ran_is_noted(cold):
    layer = nn.Linear(8, 4).eval()
    with torch.no_grad():
        cold.compile(layer, effort="quick", on_miss="fallback")(randn(3, 8))
    report = torch_pruner.tune_seen(cold.options(effort="quick", trials=2))
    assert [t.source for t in report.tasks] == ["tuned"]


def test_effort_none_drafts_every_size_without_a_word(cold, caplog):
    layer = nn.Linear(8, 4).eval()
    with torch.no_grad(), caplog.at_level(logging.WARNING, "torch_pruner"):
        compiled = cold.compile(layer, dynamic=True)
        for n in (3, 5):
            x = randn(n, 8)
            assert_equal(compiled(x), layer(x))
    assert not any("untuned" in r.message for r in caplog.records)


def test_the_program_of_every_size_is_noted_and_tuned(cold):
    layer = nn.Linear(8, 4).eval()
    asked = {"effort": "quick", "trials": 8}
    with torch.no_grad():
        compiled = cold.compile(layer, **asked)  # static first: what is tuned at once
        for n in (3, 5, 7):
            compiled(randn(n, 8))
    report = torch_pruner.tune_seen(cold.options(**asked))
    assert [t.source for t in report.tasks] == ["tuned"]
    torch._dynamo.reset()
    with reports.collect() as graphs, torch.no_grad():
        compiled = cold.compile(layer, effort="quick", on_miss="fallback")
        for n in (3, 5, 7, 9):
            x = randn(n, 8)
            assert_equal(compiled(x), layer(x))
    assert [t.source for g in graphs for t in g.tasks] == ["cache"] * 2


def test_sizes_that_guards_tie(backend):
    """An image of one size only, flattened; a mask that is one longer than what it is added to."""
    layer = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(256, 4)).eval()

    def fn(x, longer):
        return (torch.cat([x, x[:1]]) + longer).softmax(0), x.shape[0] * 2

    with reports.collect() as graphs, torch.no_grad():
        compiled = backend.compile(layer, dynamic=True)
        for n in (2, 9, 5):
            x = randn(n, 3, 8, 8)
            assert_equal(compiled(x), layer(x))
        tied = backend.compile(fn, dynamic=True)
        for n in (6, 4, 11):
            x, longer = randn(n, 3), randn(n + 1, 3)
            for got, wanted in zip(tied(x, longer), fn(x, longer), strict=True):
                assert_equal(got, wanted)
    assert ["[.." in g.name for g in graphs] == [True, True]


def test_images_of_any_size(backend):
    """Strides, pools, a residual: one program for several images, and one for one, though Dynamo
    captures up to 15 and more by themselves, and those of few elements."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.down = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, 2, 1)
            self.same, self.skip = nn.Conv2d(16, 16, 3, 1, 1), nn.Conv2d(16, 16, 1, 2)
            self.deep = nn.Conv2d(16, 16, 3, 1, 1, groups=16)

        def forward(self, x):
            x = nn.functional.max_pool2d(self.stem(x).relu(), 3, 2, 1)
            x = self.same(self.down(x).relu()) + self.skip(x)
            return self.deep(x).mean((2, 3))

    model = Net().eval()
    compiled = backend.compile(model, dynamic=True)
    with reports.collect() as graphs, torch.no_grad():
        sizes = (
            (2, 64, 72), (3, 127, 97), (7, 49, 40), (5, 33, 144), (1, 64, 72), (17, 40, 56),
            (1, 19, 20),
        )  # fmt: skip
        for batch, height, width in sizes:
            x = randn(batch, 3, height, width)
            assert_equal(compiled(x), model(x))
            model.same.weight.mul_(1.1)  # the kernels' one copy is renewed for all captures
    assert [g.name.partition("[")[2] for g in graphs] == ["..17,128,144]", "..128,144]"]


def test_a_program_that_differs_from_eager_serves_nobody(backend, monkeypatch, caplog):
    """What is shared is compared once; then every size is compiled for itself or runs in eager."""
    from torch_pruner.dynamo.sizes import padded_region

    take = padded_region.Spare.take
    monkeypatch.setattr(padded_region.Spare, "take", lambda *args: take(*args).add_(1))
    model = Block().eval()
    compiled = backend.compile(model, dynamic=True, strict=False)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "torch_pruner"):
        for n in (5, 6, 5, 6, 9):
            x = randn(2, n, 32)
            assert_equal(compiled(x), model(x))
    assert any("eager" in r.message for r in caplog.records)


@pytest.mark.usefixtures("by_size")
def test_a_size_that_cannot_be_written_down_runs_in_eager(backend, monkeypatch, caplog):
    """What goes wrong for one size is reported and costs no other size anything."""
    from torch_pruner.dynamo.sizes import symbolic

    layer, with_sizes = nn.Linear(8, 4).eval(), symbolic.with_sizes

    def fails(gm, args):
        if 7 in [a for a in args if isinstance(a, int)]:
            raise NotImplementedError("not this one")
        return with_sizes(gm, args)

    monkeypatch.setattr(symbolic, "with_sizes", fails)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "torch_pruner"):
        compiled = backend.compile(layer, dynamic=True, strict=False)
        for n in (3, 7, 5):
            x = randn(n, 8)
            assert_equal(compiled(x), layer(x))
    assert sum("not this one" in r.message for r in caplog.records) == 1


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_cache_of_transformers_that_grows(backend, kind):
    """``generate`` as it is: the prompt, and a token at a time with one position more each."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1}
    if kind == "llama":
        config = transformers.LlamaConfig(
            **sizes, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2
        )
        model = transformers.LlamaForCausalLM(config).eval()
    else:
        config = transformers.GPT2Config(**sizes, num_attention_heads=4)
        model = transformers.GPT2LMHeadModel(config).eval()
    prompt = torch.randint(64, (1, 5))
    settings = {"max_new_tokens": 14, "min_new_tokens": 14, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, **settings)
    model.forward = backend.compile(model.forward, dynamic=None)
    with reports.collect() as graphs:
        assert torch.equal(model.generate(prompt, **settings), expected)
        assert torch.equal(model.generate(prompt, **settings), expected)
    # The prompt, the first token, and one program for all that follow.
    assert any("[.." in g.name for g in graphs)
    assert len(graphs) <= 7
    assert all(g.ops_compiled == g.ops_total for g in graphs[1:])


@pytest.mark.parametrize("padding", ["zeros", "reflection"])
def test_maps_are_read_between_elements_at_any_size(backend, padding):
    def read(image: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        rows = image.movedim(-1, 1)  # channels of a position lie beside each other
        how = {"padding_mode": padding, "align_corners": False}
        return nn.functional.grid_sample(rows, at, **how).tanh()

    compiled = backend.compile(read, dynamic=True)
    with reports.collect() as graphs, torch.no_grad():
        for batch, height, width, places in (
            (2, 5, 7, 4),
            (3, 9, 4, 6),
            (2, 5, 7, 4),
            (4, 3, 17, 9),
        ):
            image, at = randn(batch, height, width, 8), 1.3 * randn(batch, 3, places, 2)
            assert_equal(compiled(image, at), read(image, at))
    assert all(g.ops_compiled == g.ops_total > 0 for g in graphs)


def test_blocks_and_windows_whose_number_changes(backend) -> None:
    def attended(x: torch.Tensor) -> torch.Tensor:  # as in VOLO, and a pool beside it
        size = x.shape[-2:]
        blocks = nn.functional.unfold(x, 3, padding=1, stride=2).tanh()
        folded = nn.functional.fold(blocks, size, 3, padding=1, stride=2)
        return folded + nn.functional.adaptive_max_pool2d(x, 3).sum((2, 3), keepdim=True)

    compiled = backend.compile(attended, dynamic=True)
    with torch.no_grad():
        for batch, height, width in ((2, 6, 8), (3, 9, 6), (2, 6, 8), (1, 12, 15), (2, 7, 7)):
            x = randn(batch, 4, height, width)
            assert_equal(compiled(x), attended(x))


def test_a_value_that_is_returned_and_read_behind_its_size(backend) -> None:
    """Random program sizes-321: the kernel that squares has two outputs, of which one was never
    written, since both were taken for the same."""

    def fn(x):
        centred = x - x.mean(-1, keepdim=True)
        twice = centred.expand(2, *centred.shape)
        alike = nn.functional.cosine_similarity(twice, centred, 0)
        return centred**2, alike.min(-1).values + alike.max(-1).values

    compiled = backend.compile(fn, dynamic=True)
    for n in (31, 5, 40):
        x = randn(n)
        for _ in range(2):
            for ours, theirs in zip(compiled(x), fn(x), strict=True):
                assert_equal(ours, theirs)
