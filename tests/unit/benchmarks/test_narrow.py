"""The targets and the table of ``benchmarks.narrow``; nothing is compiled."""

from __future__ import annotations

from typing import Any

from benchmarks import narrow
from benchmarks.outside import Stopwatch
from torch_pruner.target import TargetSpec


def test_targets_have_fewer_instructions() -> None:
    found = {n: TargetSpec.from_dict(t, 2) for n, t in narrow.targets().items() if t}
    assert list(found) == ["avx512", "avx2"]
    assert not any(t.bf16_dot or t.bf16_tiles for t in found.values())
    assert found["avx2"].vector_bytes == 32


def test_a_call_notes_what_its_programs_took() -> None:
    watch = Stopwatch()

    def program() -> None:
        watch.seconds += 2.0

    call = narrow.Watched(program, watch)
    call()
    watch.seconds += 5.0  # of somebody else
    call()
    assert call.inside == [2.0, 2.0]


def test_times_are_set_against_float32() -> None:
    def row(seconds: float) -> dict[str, Any]:
        times = {f"{name}_s": seconds for name in ("median", "q1", "q3")}
        return times | {"inside_s": seconds / 4}

    of = {"float32": row(0.4), "bfloat16": row(0.1)}
    versions = {"torch": "2"}
    machine = {"gpu": None, "cpu": "a CPU", "cores": 2, "threads": 2, "versions": versions}
    machine |= {"commit": "0", "date": "today"}
    found = {"read_bytes_per_s": 4e10, "prompt": of, "token": of}
    text = narrow.render({"machine": machine, "targets": {"avx2": found}})
    assert text.splitlines()[-1].split().count("0.25") == 4
