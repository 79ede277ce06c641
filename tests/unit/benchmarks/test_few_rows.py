"""The cases of ``benchmarks.few_rows`` and what it times besides the draft; nothing is built."""

from __future__ import annotations

import argparse

from benchmarks import few_rows
from torch_pruner.families import sketches_for
from torch_pruner.graph.contraction import contraction_of
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task


def test_every_shape_comes_with_every_dtype_and_number_of_rows() -> None:
    options = argparse.Namespace(
        shapes="llama,96x64", dtypes="float32,int8", rows="1,4", along=False
    )
    cases = few_rows.cases(options)
    assert len(cases) == 5 * 2 * 2
    assert few_rows.Case(4, 96, 64, "int8", along=False) in cases
    for case in cases:
        con = contraction_of(case.graph())
        assert (con.rows, con.n, con.depth) == (case.rows, case.columns, case.depth)


def test_other_schedules_are_of_every_family_and_valid() -> None:
    spec, target = few_rows.Case(2, 96, 64, "bfloat16").graph(), TargetSpec.detect(2)
    task = Task("few rows", spec, target, 2)
    found = few_rows.others(task, 6)
    sketches = {s.name: s for s in sketches_for(task)}
    assert {c.sketch for c in found} == set(sketches)
    assert len(set(found)) == len(found)
    for candidate in found:
        assert set(dict(candidate.decisions)) == set(sketches[candidate.sketch].names)


def test_a_line_shows_shares_and_schedules() -> None:
    schedule = {"sketch": "in_place", "decisions": {"nv": 8, "nc": 1}}
    of = {"share": 0.934, "of_limit": 0.98, "candidate": schedule}
    result = {"case": [1, 96, 64, "int8", True], "read_bytes_per_s": 62.3e9, "draft": of}
    assert few_rows.line(result) == [
        "1",
        "96x64",
        "int8",
        "62.3",
        "93 (98) %",
        "in_place nc=1 nv=8",
    ]
