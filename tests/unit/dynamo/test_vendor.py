"""The library is timed on real data, wherever compilation happens to be."""

from __future__ import annotations

from torch._subclasses.fake_tensor import FakeTensorMode

from torch_pruner.devices import aten
from torch_pruner.graph.ir import GraphBuilder


def test_under_a_fake_mode_the_work_is_done(monkeypatch) -> None:
    """AOTAutograd's fake mode is on while a backend compiles: nothing would be computed in it."""
    b = GraphBuilder()
    x = b.input(0, (4, 8), "float32")
    spec = b.finish([b.matmul(x, b.input(1, (8, 4), "float32", static=True))])
    seen = []
    run = aten.run_spec
    monkeypatch.setattr(aten, "run_spec", lambda s, rows: seen.append(run(s, rows)) or seen[-1])
    with FakeTensorMode():
        assert aten.AtenVendor(rounds=1).latency_s(spec) > 0
    assert all(type(values[0]).__name__ == "Tensor" for values in seen)
    assert float(seen[0][0].abs().sum()) > 0
