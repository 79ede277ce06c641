"""Shapes that change, copies, resets, and what lives how long."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

import torch_pruner as tp
from tests.compile.agreement import assert_equal, check, shares_storage
from tests.compile.functions import (
    by_data,
    conv_norm,
    in_place,
    leaf,
    linear_model,
    mlp,
    randn,
)
from torch_pruner.dynamo.run import copies

pytestmark = pytest.mark.tvm


@pytest.mark.parametrize("make", [randn, leaf], ids=["inference", "training"])
@pytest.mark.parametrize("dynamic", [True, None, False])
def test_several_sizes(backend, dynamic, make):
    def fn(x, w):
        return torch.softmax(x @ w, -1), x.sum(0), x.shape[0]

    compiled = backend.compile(fn, dynamic=dynamic)
    for n in (3, 5, 8, 1, 3):
        check(compiled, fn, lambda n=n: (make(n, 4), make(4, 6)), calls=1, covers=False)


def test_marked_dynamic_dimension(backend):
    model = linear_model()
    compiled = backend.compile(model)
    for n in (3, 5, 2, 9):
        x = randn(n, 8)
        torch._dynamo.mark_dynamic(x, 0)
        assert_equal(compiled(x), model(x))


def test_batch_norm_with_changing_batch(backend):
    model, twin = conv_norm().train(), conv_norm().train()
    compiled = backend.compile(model, dynamic=True)
    for n in (2, 3, 5):
        check(compiled, twin, lambda n=n: (randn(n, 3, 6, 6),), calls=1, covers=False)
    assert_equal(model.norm.running_mean, twin.norm.running_mean)


def test_deepcopy_of_a_compiled_model(backend):
    model = linear_model()
    compiled = backend.compile(model)
    x = randn(2, 8)
    first = compiled(x)
    twin = copy.deepcopy(compiled)
    in_place(model)
    assert_equal(twin(x), first)
    assert_equal(compiled(x), model(x))
    other = copy.deepcopy(model)
    by_data(other)
    assert_equal(backend.compile(other)(x), other(x))


def test_two_models_of_one_architecture_share_no_weights(backend):
    one, two = linear_model(), linear_model()
    in_place(two)
    x = randn(2, 8)
    compiled = [backend.compile(m) for m in (one, two)]
    with torch.no_grad():
        for _ in range(2):
            for c, m in zip(compiled, (one, two), strict=True):
                assert_equal(c(x), m(x))


def test_reset_and_again(cold):
    x, w = randn(3, 4), randn(4, 5)
    for source in ("untuned", "cache"):
        assert_equal(cold.compile(mlp)(x, w), mlp(x, w))
        report = tp.last_report()
        assert {t.source for g in report.graphs for t in g.tasks} == {source}
        torch._dynamo.reset()


def test_stance_eager_on_recompile(backend):
    compiled = backend.compile(mlp)
    x, w = randn(3, 4), randn(4, 5)
    compiled(x, w)
    with torch.compiler.set_stance("force_eager"):
        assert_equal(compiled(x, w), mlp(x, w))
    with torch.compiler.set_stance("eager_on_recompile"):
        assert_equal(compiled(randn(7, 4), w).shape, torch.Size([7, 5]))
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_equal(compiled(x, w), mlp(x, w))
        with pytest.raises(RuntimeError, match="recompil"):
            compiled(x.double(), w.double())


def test_output_lives_on_after_the_next_call(backend):
    compiled = backend.compile(mlp)
    x, w = randn(3, 4), randn(4, 5)
    first = compiled(x, w)
    kept = first.clone()
    compiled(x * 2, w)
    assert torch.equal(first, kept)
    assert not shares_storage(first, compiled(x, w))


def test_parameters_are_freed_with_their_model(backend):
    model = linear_model()
    compiled = backend.compile(model)
    with torch.no_grad():
        compiled(randn(2, 8))
        compiled(randn(2, 8))
    seen = [weakref.ref(p) for p in model.parameters()]
    del model, compiled
    torch._dynamo.reset()
    gc.collect()
    assert not any(ref() is not None for ref in seen)


def test_packed_copies_are_freed_with_what_was_compiled(backend):
    """The model stays, and takes no more memory than it did."""
    model = torch.nn.Linear(64, 48)
    compiled = backend.compile(model)
    with torch.no_grad():
        for _ in range(2):
            compiled(randn(32, 64))
    held = copies.held_of([model.weight], None, False)[id(model.weight)]
    made = [weakref.ref(packed) for packed in held.copies.values()]
    assert made, "nothing is tested"
    del compiled
    torch._dynamo.reset()
    gc.collect()
    assert not any(ref() is not None for ref in made)


def test_noise_where_sums_cancel_is_not_a_mismatch(backend):
    """The gradient of a bias before a normalisation is zero but for rounding, in eager as well."""
    model = conv_norm().train()
    compiled = backend.compile(model)
    compiled(randn(2, 3, 6, 6)).square().sum().backward()
    assert model.conv.bias.grad.abs().max() < 1e-4 < model.norm.weight.grad.abs().max()


def test_captured_by_export_style_fullgraph(backend):
    compiled = backend.compile(mlp, fullgraph=True)
    check(compiled, mlp, lambda: (leaf(3, 4), leaf(4, 5)))
