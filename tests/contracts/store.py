"""What every writable ``KernelStore`` promises, on disk or in memory.

To test one, subclass ``StoreContract`` with a fixture ``store`` that is empty.
"""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from typing import TYPE_CHECKING, Any

import pytest

from torch_pruner.cache import (
    Artifact,
    ArtifactEntry,
    ArtifactKind,
    GraphKey,
    KernelEntry,
    KernelKey,
    KernelStore,
    TuningRecord,
)
from torch_pruner.cache.entry import artifact_digest
from torch_pruner.pareto import Finalist, Footprint
from torch_pruner.task import Candidate

if TYPE_CHECKING:
    from pathlib import Path


def kernel_key(name: str = "matmul", **fields: Any) -> KernelKey:
    """The key of an invented kernel; ``fields`` replace fields of it."""
    key = KernelKey(
        workload=f"workload of {name}",
        target='{"kind":"llvm"}',
        device="cpu-a",
        threads=2,
        numerics='{"fast_math":false}',
        codegen="tvm 1 + codegen 1",
    )
    return dataclasses.replace(key, **fields)


def graph_key(name: str = "net", **fields: Any) -> GraphKey:
    key = GraphKey(name, ("kernel a", "kernel b"), '{"kind":"llvm"}', "cpu-a", 2, "{}", "tvm 1")
    return dataclasses.replace(key, **fields)


def library_digest(name: str = "net") -> str:
    """What the row of an invented library is called."""
    return artifact_digest(ArtifactKind.LIBRARY, graph_key(name))


def put_library(
    store: KernelStore, key: GraphKey, data: bytes | Path, meta: dict[str, Any]
) -> Path | None:
    return store.put(Artifact(ArtifactKind.LIBRARY, key, data, meta))


def get_library(
    store: KernelStore, key: GraphKey, *, mine: bool = False
) -> tuple[ArtifactEntry, Path] | None:
    return store.get(ArtifactKind.LIBRARY, key, mine=mine)


def kernel_entry(key: KernelKey | None = None, **fields: Any) -> KernelEntry:
    entry = KernelEntry(
        key=key or kernel_key(),
        candidate={"sketch": "tiled", "decisions": {"i": 4}, "trace": ""},
        latency_s=1e-3,
        baseline_s=2e-3,
        source="tuned",
        trials=8,
        effort="quick",
        task="fused_matmul",
        workload_text="(graph)",
        provenance={"run_secs": [1e-3]},
    )
    return dataclasses.replace(entry, **fields)


def record(digest: str, status: str = "ok", **fields: Any) -> TuningRecord:
    run_secs = (1e-3,) if status == "ok" else ()
    found = TuningRecord(digest, {"sketch": "tiled", "decisions": {"i": 1}}, status, run_secs)
    return dataclasses.replace(found, **fields)


def best_of(store: KernelStore, *entries: KernelEntry) -> KernelEntry:
    """Put all, and get."""
    for entry in entries:
        store.put_kernel(entry)
    found = store.get_kernel(entries[0].key)
    assert found is not None
    return found


class StoreContract:
    """The promises of a store that can keep something."""

    @pytest.fixture
    def store(self) -> KernelStore:
        raise NotImplementedError

    def test_a_kernel_comes_back_as_it_was_put(self, store: KernelStore) -> None:
        assert best_of(store, kernel_entry()) == kernel_entry()

    def test_hits_misses_and_puts_are_counted(self, store: KernelStore) -> None:
        assert store.get_kernel(kernel_key()) is None
        assert get_library(store, graph_key()) is None
        store.put_kernel(kernel_entry())
        put_library(store, graph_key(), b"library", {})
        store.get_kernel(kernel_key())
        get_library(store, graph_key())
        stats = store.stats()
        assert (stats.hits, stats.misses, stats.puts) == (2, 2, 2)
        assert (stats.kernels, stats.libraries, stats.records) == (1, 1, 0)
        assert stats.bytes >= len(b"library")

    @pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(KernelKey)])
    def test_every_field_of_the_key_counts(self, store: KernelStore, field: str) -> None:
        store.put_kernel(kernel_entry())
        other = 99 if field == "threads" else "other"
        assert store.get_kernel(kernel_key(**{field: other})) is None

    def test_the_lower_latency_wins_in_any_order(self, store: KernelStore) -> None:
        fast = kernel_entry(latency_s=1e-4, candidate={"sketch": "fast"})
        slow = kernel_entry(latency_s=1e-2, candidate={"sketch": "slow"})
        assert best_of(store, slow, fast, slow).candidate == {"sketch": "fast"}

    def test_a_tie_keeps_what_is_there(self, store: KernelStore) -> None:
        one, two = (kernel_entry(candidate={"sketch": s}) for s in ("one", "two"))
        assert best_of(store, one, two).candidate == {"sketch": "one"}

    def test_an_untimed_kernel_is_replaced_by_any_other(self, store: KernelStore) -> None:
        untimed = kernel_entry(latency_s=math.inf, source="untuned", candidate={"sketch": "draft"})
        assert best_of(store, untimed).latency_s == math.inf
        newer = dataclasses.replace(untimed, candidate={"sketch": "better draft"})
        assert best_of(store, newer).candidate == {"sketch": "better draft"}
        assert best_of(store, kernel_entry()).source == "tuned"
        assert best_of(store, untimed).source == "tuned"

    def test_completed_effort_and_trials_never_decrease(self, store: KernelStore) -> None:
        full = kernel_entry(effort="full", trials=800, latency_s=1e-3)
        later = kernel_entry(effort="", trials=3, latency_s=1e-4, baseline_s=None)
        found = best_of(store, full, later)
        assert (found.effort, found.trials, found.latency_s) == ("full", 800, 1e-3)
        assert found.baseline_s == full.baseline_s
        assert best_of(store, kernel_entry(effort="quick", latency_s=1.0)).effort == "full"

    def test_what_a_search_chose_replaces_what_it_met_on_its_way(self, store: KernelStore) -> None:
        """The other was timed at one moment, and the choice in a race."""
        met = kernel_entry(effort="", latency_s=1e-4, candidate={"sketch": "lucky"})
        choice = kernel_entry(effort="quick", latency_s=2e-4, candidate={"sketch": "choice"})
        store.put_kernel(met)
        assert store.put_kernel(choice, chosen=True).candidate == {"sketch": "choice"}
        assert best_of(store, met).candidate == {"sketch": "choice"}
        longer = dataclasses.replace(choice, effort="full", candidate={"sketch": "longer"})
        longer = dataclasses.replace(longer, latency_s=3e-4)
        assert best_of(store, longer).candidate == {"sketch": "choice"}, "of another process"
        stored = store.put_kernel(longer, chosen=True)
        assert (stored.candidate, stored.effort) == ({"sketch": "longer"}, "full")

    def test_put_returns_what_is_stored(self, store: KernelStore) -> None:
        store.put_kernel(kernel_entry(latency_s=1e-5))
        assert store.put_kernel(kernel_entry(latency_s=1.0)).latency_s == 1e-5

    @pytest.mark.parametrize(
        "bad", [{"latency_s": 0.0}, {"latency_s": math.nan}, {"effort": "huge"}, {"trials": -1}]
    )
    def test_an_entry_that_could_not_be_read_back_is_refused(
        self, store: KernelStore, bad: dict[str, Any]
    ) -> None:
        with pytest.raises(ValueError, match=r"JSON|latency_s|effort|trials"):
            store.put_kernel(kernel_entry(**bad))
        assert store.get_kernel(kernel_key()) is None

    def test_a_library_comes_back_verified(self, store: KernelStore, tmp_path: Any) -> None:
        source = tmp_path / "built.so"
        source.write_bytes(b"\x7fELF of a graph")
        path = put_library(store, graph_key(), source, {"entry": "main", "outputs": [1, 2]})
        found = get_library(store, graph_key())
        assert found is not None
        assert found[0].meta == {"entry": "main", "outputs": [1, 2]}
        assert found[1] == path
        assert found[1].read_bytes() == b"\x7fELF of a graph"
        assert found[1].suffix == ".so"
        assert get_library(store, graph_key(kernels=("kernel b", "kernel a"))) is None

    def test_a_library_put_again_replaces_the_old_one(self, store: KernelStore) -> None:
        put_library(store, graph_key(), b"old", {"n": 1})
        put_library(store, graph_key(), b"new", {"n": 2})
        found = get_library(store, graph_key())
        assert found is not None
        assert (found[0].meta, found[1].read_bytes()) == ({"n": 2}, b"new")

    def test_kinds_of_one_key_are_apart(self, store: KernelStore) -> None:
        for kind in ArtifactKind:
            store.put(Artifact(kind, graph_key(), kind.encode(), {"name": str(kind)}))
        for kind in ArtifactKind:
            found = store.get(kind, graph_key())
            assert found is not None
            assert (found[0].kind, found[0].meta) == (kind, {"name": str(kind)})
            assert found[1].read_bytes() == kind.encode()
        store.drop(ArtifactKind.CAPTURED, graph_key())
        kinds = {item.entry.kind for item in store.ls() if isinstance(item.entry, ArtifactEntry)}
        assert kinds == set(ArtifactKind) - {ArtifactKind.CAPTURED}
        stats = store.stats()
        assert (stats.libraries, stats.captured, stats.verdicts) == (1, 0, 1)

    def test_an_artifact_may_have_no_bytes(self, store: KernelStore) -> None:
        store.put(Artifact(ArtifactKind.VERDICT, graph_key()))
        assert store.get(ArtifactKind.VERDICT, graph_key()) is not None
        assert store.verify().ok

    def test_a_missing_file_is_the_caller_s_error(self, store: KernelStore, tmp_path: Any) -> None:
        with pytest.raises(FileNotFoundError):
            put_library(store, graph_key(), tmp_path / "absent.so", {})
        put_library(store, graph_key(), b"library", {})

    def test_dropped_is_gone(self, store: KernelStore) -> None:
        store.put_kernel(kernel_entry())
        store.add_records(kernel_key(), [record("a")])
        put_library(store, graph_key(), b"library", {})
        store.drop_kernel(kernel_key())
        store.drop(ArtifactKind.LIBRARY, graph_key())
        assert store.get_kernel(kernel_key()) is None
        assert get_library(store, graph_key()) is None
        assert store.records(kernel_key()) == []
        assert store.ls() == []
        assert best_of(store, kernel_entry()) == kernel_entry()

    def test_nearest_prefers_the_workload_then_the_device(self, store: KernelStore) -> None:
        wanted = kernel_key()
        assert store.nearest(wanted) is None
        store.put_kernel(kernel_entry(wanted))
        assert store.nearest(wanted) is None
        stranger = kernel_key("other", target="t", device="d")
        neighbour = kernel_key("other")
        far = kernel_key(device="cpu-b", threads=8, codegen="tvm 2")
        near = kernel_key(threads=8)
        for key, expected in [
            (stranger, None),
            (neighbour, neighbour),
            (far, far),
            (near, near),
            (kernel_key("third"), near),
        ]:
            store.put_kernel(kernel_entry(key))
            assert store.nearest(wanted) == expected
        assert wanted.diff(near) == {"threads": (2, 8)}

    def test_records_keep_their_order_and_come_once(self, store: KernelStore) -> None:
        key = kernel_key()
        store.add_records(key, [record("b", "timeout"), record("a", time=1.0)])
        store.add_records(key, [record("a", time=2.0), record("b", "timeout", time=2.0)])
        store.add_records(key, [record("c", "build_error", error="no")])
        store.add_records(kernel_key("other"), [record("z")])
        found = store.records(key)
        assert [(r.digest, r.status, r.time) for r in found] == [
            ("b", "timeout", 0.0),
            ("a", "ok", 1.0),
            ("c", "build_error", 0.0),
        ]
        store.add_records(key, [record("b"), record("a", "run_error")])
        assert [r.status for r in store.records(key)] == ["ok", "ok", "build_error"]

    def test_records_are_exported_as_json_lines(self, store: KernelStore) -> None:
        store.put_kernel(kernel_entry())
        store.add_records(kernel_key(), [record("a"), record("b", "timeout")])
        kernel, *rest = [json.loads(line) for line in store.export_records()]
        assert KernelKey.from_json(kernel["key"]) == kernel_key()
        assert kernel["workload_text"] == "(graph)"
        assert [line["kernel"] for line in rest] == [kernel["digest"]] * 2
        assert [TuningRecord.from_json(line["record"]) for line in rest] == store.records(
            kernel_key()
        )

    def test_finalists_are_kept_and_exported_with_their_kernel(self, store: KernelStore) -> None:
        finalist = Finalist(Candidate("tiled"), 1e-3, Footprint(16, 16, 8), 0.25)
        store.put_kernel(kernel_entry(finalists=(finalist,)))
        store.add_records(kernel_key(), [record("a")])
        found = store.get_kernel(kernel_key())
        assert found is not None
        assert found.finalists == (finalist,)
        kernel = json.loads(next(store.export_records()))
        assert [Finalist.from_json(told) for told in kernel["finalists"]] == [finalist]

    def test_listing_verify_and_clear(self, store: KernelStore) -> None:
        store.put_kernel(kernel_entry())
        put_library(store, graph_key(), b"library", {})
        store.add_records(kernel_key(), [record("a")])
        listed = {item.digest: item.entry for item in store.ls()}
        assert set(listed) == {kernel_key().digest(), library_digest()}
        assert listed[kernel_key().digest()] == kernel_entry()
        report = store.verify()
        assert report.ok, report.problems
        assert report.sound == {"kernels": 1, "artifacts": 1, "tasks": 1, "records": 1, "blobs": 1}
        cleared = store.clear()
        assert (cleared.kernels, cleared.artifacts, cleared.blobs) == (1, 1, 1)
        assert store.ls() == []
        assert store.records(kernel_key()) == []
        assert best_of(store, kernel_entry()) == kernel_entry()

    def test_a_claim_excludes_other_threads_and_nests(self, store: KernelStore) -> None:
        digest = kernel_key().digest()
        seen: list[bool] = []

        def other() -> None:
            with store.claim(digest, timeout_s=0) as mine:
                seen.append(mine)
            with store.claim(kernel_key("other").digest(), timeout_s=0) as mine:
                seen.append(mine)

        with store.claim(digest) as mine, store.claim(digest, timeout_s=0) as again:
            assert (mine, again) == (True, True)
            run_threads(other)
        run_threads(other)
        assert seen == [False, True, True, True]
        with pytest.raises(ValueError, match="not the digest"), store.claim("../escape"):
            pass

    def test_a_claim_admits_one_thread_at_a_time(self, store: KernelStore) -> None:
        digest, tuned = kernel_key().digest(), []

        def tune() -> None:
            with store.claim(digest) as mine:
                assert mine
                if store.get_kernel(kernel_key()) is None:
                    tuned.append(threading.get_ident())
                    store.put_kernel(kernel_entry())

        run_threads(*[tune] * 6)
        assert len(tuned) == 1

    def test_many_threads_at_once(self, store: KernelStore) -> None:
        def work(n: int) -> None:
            for i in range(5):
                store.put_kernel(kernel_entry(latency_s=1e-3 / (1 + n * 5 + i)))
                put_library(store, graph_key(f"net {i}"), b"library %d" % i, {})
                store.add_records(kernel_key(), [record(f"{n}-{i}")])
                assert get_library(store, graph_key(f"net {i}")) is not None

        run_threads(*[lambda n=n: work(n) for n in range(4)])  # type: ignore[misc]
        found = store.get_kernel(kernel_key())
        assert found is not None
        assert found.latency_s == 1e-3 / 20
        assert len(store.records(kernel_key())) == 20
        assert store.verify().ok

    def test_a_closed_store_opens_again(self, store: KernelStore) -> None:
        store.put_kernel(kernel_entry())
        store.close()
        store.close()
        assert store.get_kernel(kernel_key()) == kernel_entry()


def run_threads(*works: Any) -> None:
    """Run all works at once; the first failure is raised."""
    failures: list[BaseException] = []

    def guarded(work: Any) -> None:
        try:
            work()
        except BaseException as err:
            failures.append(err)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
