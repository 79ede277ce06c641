"""The table of operators alone: the best peer's time over ours."""

from __future__ import annotations

from benchmarks.layers import render


def row(**seconds):
    found = {n: {"latency": {"median_s": s, "min_s": s / 2}} for n, s in seconds.items()}
    return found | {"openvino": {"reason": "RuntimeError: no such operator"}}


def test_cells_are_the_best_peer_over_ours_and_means_are_geometric():
    rows = {
        "c1d_1/1": row(eager=4.0, inductor=8.0, pruner=2.0),
        "c1d_2/1": row(eager=1.0, inductor=2.0, pruner=2.0),
        "c1d_1/16": row(eager=3.0, pruner=1.0),
    }
    lines = [[c.strip() for c in line.split("|")[1:-1]] for line in render(rows).splitlines()]
    assert lines[2] == ["c1d", "1", "2.00 (2.00)", "0.50 (0.50)", "", "", "1.00 (1.00)"]
    assert lines[3] == ["c1d", "16", "3.00 (3.00)", "", "", "", "3.00 (3.00)"]
    assert lines[4] == ["all", "", "", "", "", "", "1.44 (1.44)"]


def test_a_row_that_ours_has_no_time_for_is_not_in_the_mean():
    rows = {"nrm_1/1": row(eager=1.0), "nrm_2/1": row(eager=2.0, pruner=1.0)}
    assert "| nrm | 1 | - | 2.00 (2.00) |" in render(rows)
    assert render(rows).splitlines()[-1].endswith("| 2.00 (2.00) |")


def test_a_shape_that_was_not_measured_leaves_its_own_column_empty():
    rows = {"c3d_3/1": row(eager=2.0, pruner=1.0), "c3d_2/1": row(eager=1.0, pruner=1.0)}
    assert "| c3d | 1 |  | 1.00 (1.00) | 2.00 (2.00) |  |" in render(rows)
