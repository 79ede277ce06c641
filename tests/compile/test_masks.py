"""Masks of dropout that a compiled program draws: eager's, and so is the generator afterwards."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from torch_pruner.dynamo.run import masks

pytestmark = pytest.mark.tvm


@pytest.mark.parametrize("linked", [True, False])
def test_masks_and_states_are_eagers(linked, monkeypatch):
    """From many states on, with few elements and many, each a call of the entry, which is linked,
    or built in memory where nothing links."""
    from torch_pruner.compiler import host_toolchain
    from torch_pruner.graph.memory import MASKS
    from torch_pruner.target import TargetSpec

    if not linked:
        monkeypatch.setattr(host_toolchain, "c_compiler", lambda: None)
    toolchain = host_toolchain.HostToolchain(1)
    toolchain.prepare()
    library = toolchain.build({}, {MASKS: ()}, 0, TargetSpec.detect(1))
    drawer = masks.MaskDrawer(library.entries()[0])
    if not drawer._agrees(0, 8, 0.5):
        pytest.skip("torch draws in another way on this machine")
    assert drawer._tried()
    for read in (0, 1, 2, 7, 300, 622, 623, 624, 625, 1300):
        for count in (0, 1, 2, 155, 311, 312, 313, 625, 2000):
            assert drawer._agrees(read, count, 0.9), (read, count)
    for p in (0.0, 1.0, 1e-9, 0.5, 1 / 3, 1 - 1e-12):
        assert drawer._agrees(5, 3000, p), p


def test_a_network_trains_with_masks_that_its_program_draws(backend, monkeypatch):
    """Three calls, dropout once and twice: results, gradients and the state are eager's."""
    drawn = []
    plain = masks.MaskDrawer._drawn

    def counted(self, x, p, generator):
        mask = plain(self, x, p, generator)
        drawn.append((generator is torch.default_generator, mask is not None))
        return mask

    monkeypatch.setattr(masks.MaskDrawer, "_drawn", counted)

    def step(x, w):
        return F.dropout(torch.relu(F.dropout(x, 0.1) @ w), 0.25).sum(1)

    compiled = backend.compile(step)
    found = []
    for call in (step, compiled):
        torch.manual_seed(11)
        results = []
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(130, 96, generator=generator).requires_grad_()
            w = torch.randn(96, 96, generator=generator).requires_grad_()
            torch.rand(seed)
            out = call(x, w)
            out.square().mean().backward()
            results += [out.detach(), x.grad, w.grad, torch.get_rng_state()]
        found.append(results)
    for mine, eagers in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, eagers, rtol=1e-4, atol=1e-4)
    states = zip(found[1][3::4], found[0][3::4], strict=True)
    assert all(torch.equal(a, b) for a, b in states)
    used = [faithful for default, faithful in drawn if default]
    assert all(used)
    assert len(used) in (0, 6, 8)


def test_few_elements_need_no_library_that_draws(backend, monkeypatch):
    """Eager draws few: sizes are known where it is decided, in graphs of AOTAutograd, too."""
    from torch_pruner.dynamo.run import build

    monkeypatch.setattr(build, "masks_entry", lambda compiler: pytest.fail("asked for"))
    x = torch.ones(8, 16, requires_grad=True)
    torch.manual_seed(3)
    found = backend.compile(lambda x: F.dropout(x, 0.5).exp())(x)
    torch.manual_seed(3)
    torch.testing.assert_close(found, F.dropout(x, 0.5).exp())
