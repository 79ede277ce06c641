"""What ``explain`` leaves alone."""

from __future__ import annotations

import torch

from torch_pruner.dynamo import api


def test_a_cache_that_is_not_there_is_not_made(tmp_path, caplog) -> None:
    root = tmp_path / "none"
    found = api.explain(
        torch.nn.Linear(8, 8), (torch.randn(2, 8),), options={"cache_dir": str(root)}
    )
    (graph,) = found.graphs
    assert [task.cached for task in graph.tasks] == [False]
    assert not root.exists()
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
