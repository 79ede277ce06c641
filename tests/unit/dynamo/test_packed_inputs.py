"""Parameters that are renewed where they were: what a recorded program reads."""

from __future__ import annotations

import numpy as np
import torch

from torch_pruner.dynamo.run.snapshot import Snapshot, moved_into


def snapshot(values: list[float], slot: int = 3) -> Snapshot:
    tensors = [torch.full((4,), v) for v in values]
    table = tuple((slot + k, t.data_ptr()) for k, t in enumerate(tensors))
    nothing = ((), (), (), (), (), (), None, [0])
    prepared = (tensors[0], None)
    return Snapshot(*nothing, (*table, (9, 1234)), tuple(tensors), prepared)


def test_new_values_move_into_the_old_memory() -> None:
    old, new = snapshot([1.0, 2.0]), snapshot([5.0, 6.0])
    moved = moved_into(new, old)
    assert [t[0].item() for t in moved.kept] == [5.0, 6.0]
    assert all(a is b for a, b in zip(moved.kept, old.kept, strict=True))
    assert dict(moved.table) == dict(old.table)
    assert moved.prepared == (old.kept[0], None)
    assert np.array_equal(old.kept[1].numpy(), [6.0] * 4)
