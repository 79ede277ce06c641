"""Keys, entries and records as values: digests, texts, damage."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.contracts.store import graph_key, kernel_entry, kernel_key, record
from torch_pruner.cache import (
    ArtifactEntry,
    ArtifactKind,
    GraphKey,
    KernelEntry,
    KernelKey,
    TuningRecord,
)
from torch_pruner.cache.row_checksum import checksum_of, verified
from torch_pruner.pareto import MOST, Finalist, Footprint
from torch_pruner.task import Candidate

FINALISTS = (
    Finalist(Candidate("tiled", (("i", 4),)), 1e-3, Footprint(10, 10, 0), 0.5),
    Finalist(Candidate("lying"), 1.01e-3, Footprint(0, 8, 2)),
)
_PRINT_DIGESTS = """
from tests.contracts.store import graph_key, kernel_key
print(kernel_key().digest(), graph_key().digest())
"""


def test_digests_are_the_same_in_another_process() -> None:
    env = {**os.environ, "PYTHONHASHSEED": "random", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", _PRINT_DIGESTS], env=env, check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == [kernel_key().digest(), graph_key().digest()]


def test_digests_never_change() -> None:
    """A cache written by an older version has to be found: change FORMAT before these."""
    assert kernel_key().digest() == KERNEL_DIGEST
    assert graph_key().digest() == GRAPH_DIGEST


KERNEL_DIGEST = "8acdd1449526fe10105b7ff54a4032211af016882f941a3302691b98284a829b"
GRAPH_DIGEST = "07606f6b104f3b843c6834cb2137217cd56a309131a465aa088bd65fb8823505"


def test_keys_survive_json() -> None:
    for key in (kernel_key(), graph_key()):
        again = type(key).from_json(json.loads(json.dumps(key.to_json())))
        assert again == key
        assert again.digest() == key.digest()


def test_diff_names_fields_with_both_values() -> None:
    other = kernel_key(device="cpu-b", threads=4)
    assert kernel_key().diff(other) == {"device": ("cpu-a", "cpu-b"), "threads": (2, 4)}
    assert kernel_key().diff(kernel_key()) == {}


def test_the_order_of_kernels_is_part_of_a_graph_key() -> None:
    assert graph_key(kernels=("a", "b")).digest() != graph_key(kernels=("b", "a")).digest()


@pytest.mark.parametrize(
    "change",
    [
        {"threads": "2"},
        {"threads": True},
        {"threads": None},
        {"device": 1},
        {"extra": "x"},
    ],
)
def test_a_damaged_kernel_key_is_a_value_error(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="key field"):
        KernelKey.from_json(kernel_key().to_json() | change)


@pytest.mark.parametrize("data", [None, [], "x", {}, {"graph": "g"}])
def test_what_is_no_key_is_a_value_error(data: object) -> None:
    with pytest.raises(ValueError, match="key"):
        GraphKey.from_json(data)
    with pytest.raises(ValueError, match="kernels"):
        GraphKey.from_json(graph_key().to_json() | {"kernels": ["a", 1]})


@pytest.mark.parametrize(
    "entry",
    [
        kernel_entry(),
        kernel_entry(latency_s=math.inf, baseline_s=None, source="untuned", effort=""),
        kernel_entry(source="library", candidate={}, provenance={}),
        kernel_entry(task="naïve ☃", workload_text='{"a": "\\u0000"}'),
        kernel_entry(finalists=FINALISTS),
    ],
)
def test_kernel_entries_survive_their_text(entry: KernelEntry) -> None:
    assert KernelEntry.from_text(entry.to_text()) == entry


@pytest.mark.parametrize(
    "change",
    [
        {"key": {}},
        {"candidate": []},
        {"latency_s": 0},
        {"latency_s": -1.0},
        {"latency_s": "1"},
        {"latency_s": True},
        {"baseline_s": 0},
        {"source": "guess"},
        {"trials": -1},
        {"trials": 1.5},
        {"effort": "huge"},
        {"task": None},
        {"workload_text": 1},
        {"provenance": None},
        {"finalists": {}},
        {"finalists": [FINALISTS[0].to_json()] * (MOST + 1)},
    ],
)
def test_a_damaged_kernel_entry_is_a_value_error(change: dict[str, Any]) -> None:
    data = json.loads(kernel_entry().to_text()) | change
    with pytest.raises(ValueError, match=next(iter(change))):
        KernelEntry.from_text(json.dumps(data))


def test_a_damaged_finalist_is_a_value_error() -> None:
    told = FINALISTS[0].to_json()
    for damage in ({"candidate": 1}, {"joules": -1}, {"packed_bytes": "9"}, {"latency_s": 0}):
        data = json.loads(kernel_entry().to_text()) | {"finalists": [told | damage]}
        with pytest.raises(ValueError, match=next(iter(damage))):
            KernelEntry.from_text(json.dumps(data))


def test_an_entry_without_finalists_is_what_it_was() -> None:
    """As an earlier version wrote and reads it."""
    text = kernel_entry().to_text()
    assert "finalists" not in text
    assert KernelEntry.from_text(text).finalists == ()


@pytest.mark.parametrize("kind", ["", "graph", "LIBRARY", None, 1])
def test_an_unknown_kind_is_a_value_error(kind: object) -> None:
    sound = ArtifactEntry(ArtifactKind.LIBRARY, graph_key(), "0" * 64, {})
    with pytest.raises(ValueError, match="kind"):
        ArtifactEntry.from_text(json.dumps(json.loads(sound.to_text()) | {"kind": kind}))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, "NaN", '"x"'])
def test_what_is_no_entry_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (json's own message)
        KernelEntry.from_text(text)
    with pytest.raises(ValueError):  # noqa: PT011
        ArtifactEntry.from_text(text)


def test_every_prefix_of_an_entry_is_a_value_error() -> None:
    for text, parse in [
        (kernel_entry().to_text(), KernelEntry.from_text),
        (
            ArtifactEntry(ArtifactKind.LIBRARY, graph_key(), "0" * 64, {"n": 1}).to_text(),
            ArtifactEntry.from_text,
        ),
    ]:
        for end in range(len(text)):
            with pytest.raises(ValueError):  # noqa: PT011
                parse(text[:end])


@pytest.mark.parametrize("blob", ["", "0" * 63, "g" * 64, "../" + "0" * 61, None])
def test_a_blob_is_named_by_a_digest(blob: object) -> None:
    data = json.loads(ArtifactEntry(ArtifactKind.LIBRARY, graph_key(), "0" * 64, {}).to_text()) | {
        "blob": blob
    }
    with pytest.raises(ValueError, match="blob"):
        ArtifactEntry.from_text(json.dumps(data))


def test_records_survive_json() -> None:
    for one in (record("a"), record("b", "timeout", error="after 3 s", time=5.0)):
        assert TuningRecord.from_json(json.loads(json.dumps(one.to_json()))) == one


@pytest.mark.parametrize(
    "change",
    [
        {"digest": 1},
        {"candidate": None},
        {"run_secs": [0.0]},
        {"run_secs": ["1"]},
        {"run_secs": 1.0},
        {"time": None},
        {"provenance": 3},
    ],
)
def test_a_damaged_record_is_a_value_error(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        TuningRecord.from_json(record("a").to_json() | change)


def test_a_checksum_breaks_with_the_text_and_with_the_name() -> None:
    checksum = checksum_of("name", "text")
    assert verified("name", "text", checksum) == "text"
    for name, text, wrong in [("name", "texT", checksum), ("other", "text", checksum)]:
        with pytest.raises(ValueError, match="checksum"):
            verified(name, text, wrong)
    for text in (None, b"text"):
        with pytest.raises(ValueError, match="checksum"):
            verified("name", text, checksum)
