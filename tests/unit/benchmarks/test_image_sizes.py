"""Sizes that are chosen, and the table of what they took."""

from __future__ import annotations

from benchmarks import image_sizes


def test_every_side_has_its_turn_and_no_size_comes_twice() -> None:
    found = image_sizes.some_sizes(12, 16)
    assert len(set(found)) == 12
    assert {side for _, side in found} == set(image_sizes.SIDES)
    assert found == image_sizes.some_sizes(12, 16)
    assert max(batch for batch, _ in image_sizes.some_sizes(12, 4)) <= 4


def test_every_size_is_every_batch_of_every_side_once() -> None:
    found = image_sizes.every_size(16)
    assert len(set(found)) == len(found) == 16 * len(image_sizes.SIDES)


def test_the_table_says_what_was_compiled_and_what_that_costs() -> None:
    rows = [
        {
            "batch": batch, "side": 160, "programs": programs, "first_calls_s": [2.0, 0.1],
            "captures": len(programs), "eager_s": 0.5, "difference": 1e-6,
            "latency": {"pruner": {"median_s": 0.2}, image_sizes.STATIC: {"median_s": 0.1 * batch}},
        }
        for batch, programs in ((1, ["graph0[..15,320]"]), (2, []))
    ]  # fmt: skip
    rows.append({key: rows[1][key] for key in rows[1] if key != "latency"})
    text = image_sizes.render({"sizes": rows})
    assert "| 1x160 |" in text
    assert "3 sizes, 1 captures, 1 programs; 0.71 of static" in text
    assert "geometric mean of 2, least 0.50" in text
    assert "1500 ms over eager" in text
