"""``cache``: what is listed, what is damaged, what is removed, and why a kernel misses."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from torch_pruner.cache import Artifact, ArtifactKind, GraphKey, KernelEntry, KernelKey, KernelStore
from torch_pruner.cli import cache
from torch_pruner.compiler.context import Context
from torch_pruner.config import Config
from torch_pruner.pareto import Finalist, Footprint
from torch_pruner.task import Candidate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[..., tuple[int, str, str]]

WORKLOAD = "a" * 64


@pytest.fixture
def key() -> KernelKey:
    """The key that this machine would ask for."""
    return Context.make(Config.from_options(), torch.get_num_threads()).kernel_key(WORKLOAD)


@pytest.fixture
def store() -> KernelStore:
    return KernelStore.open(Config.from_options().cache_root)


def entry(key: KernelKey, **changes: Any) -> KernelEntry:
    fields = {"candidate": {"sketch": "rows", "decisions": {}}, "latency_s": 4.5e-6, "trials": 32}
    return KernelEntry(key, **{**fields, "effort": "quick", "task": "matmul_3x2", **changes})


def test_an_empty_cache_is_no_error(run: Run, tmp_path: Path) -> None:
    assert run("cache", "ls") == (0, "0 kernels and 0 built libraries, 0 B\n", "")
    status, out, _ = run("cache", "ls", "--json")
    assert (status, json.loads(out)) == (0, [])
    assert run("cache", "verify")[0] == 0


def test_ls(run: Run, store: KernelStore, key: KernelKey) -> None:
    other = replace(key, workload="b" * 64, device="c" * 64)
    store.put_kernel(entry(other, task="softmax", latency_s=math.inf, effort="", source="untuned"))
    store.put_kernel(entry(key))
    store.put(library(key))
    store.put(replace(library(key), kind=ArtifactKind.VERDICT, data=b"", meta={"name": "net"}))
    status, out, _ = run("cache", "ls")
    lines = out.splitlines()
    assert status == 0
    header = ["name", "device", "latency", "source", "effort", "trials", "age", "last", "use"]
    assert lines[0].split() == header
    rows = {line.split()[0]: line.split()[1:-4] for line in lines[1:3]}
    assert rows["matmul_3x2"] == ["this", "4.5", "us", "tuned", "quick", "32"]
    assert rows["softmax"] == ["cccccccc", "-", "untuned", "partial", "32"]
    assert lines[3].split() == ["name", "kind", "device", "size", "age", "last", "use"]
    kinds = {line.split()[0]: line.split()[1:3] for line in lines[4:6]}
    assert kinds["net"] == ["verdict", "this"]
    assert ["library", "this"] in kinds.values()
    assert lines[6].startswith("2 kernels and 1 built libraries, ")
    assert lines[6].endswith("; 1 graphs compared with eager")


def library(key: KernelKey) -> Artifact:
    """Of a graph of the same device and version."""
    where = (key.target, key.device, key.threads, key.numerics, key.codegen)
    return Artifact(ArtifactKind.LIBRARY, GraphKey("d" * 64, (), *where), b"library")


def test_ls_as_json_has_the_whole_key(run: Run, store: KernelStore, key: KernelKey) -> None:
    store.put_kernel(entry(key))
    store.put(library(key))
    kernel, graph = json.loads(run("cache", "ls", "--json")[1])
    assert kernel["key"] == key.to_json()
    assert (kernel["name"], kernel["latency_s"], kernel["effort"]) == (
        "matmul_3x2",
        4.5e-6,
        "quick",
    )
    assert graph["kind"] == "library"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (90, "2 min"), (7200, "2 h"), (2e5, "2 d"), (-1, "0 s")],
)
def test_ages(seconds: float, text: str) -> None:
    assert cache.age(seconds) == text


def test_stats(run: Run, store: KernelStore, key: KernelKey) -> None:
    store.put_kernel(entry(key))
    status, out, _ = run("cache", "stats", "--json")
    data = json.loads(out)
    assert status == 0
    assert (data["kernels"], data["libraries"], data["records"]) == (1, 0, 0)
    assert data["root"] == str(store.root)
    assert data["bytes"] > 0
    text = run("cache", "stats")[1]
    assert f"directory  {store.root}\n" in text
    assert "kernels    1\n" in text


def test_another_directory(run: Run, key: KernelKey, tmp_path: Path) -> None:
    KernelStore.open(tmp_path / "other").put_kernel(entry(key))
    _, out, _ = run("cache", "stats", "--cache-dir", str(tmp_path / "other"), "--json")
    assert json.loads(out)["kernels"] == 1


def test_verify_lists_damage_and_fails(run: Run, store: KernelStore, key: KernelKey) -> None:
    path = store.put(library(key))
    assert run("cache", "verify")[0] == 0
    assert path is not None
    path.chmod(0o600)
    path.write_bytes(b"something else")
    status, out, _ = run("cache", "verify")
    assert status == 1
    assert "damaged: blob" in out
    status, out, _ = run("cache", "verify", "--json")
    assert (status, json.loads(out)["ok"]) == (1, False)


def test_prune_and_clear(run: Run, store: KernelStore, key: KernelKey) -> None:
    store.put_kernel(entry(key))
    store.close()
    assert json.loads(run("cache", "prune", "--json")[1])["kernels"] == 0
    assert json.loads(run("cache", "prune", "--max-bytes", "1", "--json")[1])["kernels"] == 1
    store.put_kernel(entry(key))
    status, out, _ = run("cache", "clear")
    assert status == 0
    assert out.startswith("removed 1 kernels and 0 artifacts of graphs, ")


def why(run: Run, *argv: str) -> tuple[int, dict[str, Any]]:
    status, out, _ = run("cache", "why", "net.py:make", "--json", *argv)
    return status, json.loads(out)


def test_why_names_the_fields_that_differ(
    run: Run, fake_api: Any, store: KernelStore, key: KernelKey
) -> None:
    target = json.loads(key.target) | {"mcpu": "other-cpu"}
    text = json.dumps(target, sort_keys=True, separators=(",", ":"))
    store.put_kernel(entry(replace(key, target=text, threads=77)))
    status, data = why(run)
    (miss,) = data["misses"]
    assert (status, data["kernels"]) == (1, 1)
    mine = json.loads(key.target)["mcpu"]
    assert miss["differs"] == {"target.mcpu": [mine, "other-cpu"], "threads": [key.threads, 77]}
    lines = run("cache", "why", "net.py:make")[1].splitlines()
    assert lines[-4:] == [
        "matmul_3x2 (3x2): tuned, but the nearest entry differs",
        f"  target.mcpu: {mine} is wanted, other-cpu is stored",
        f"  threads: {key.threads} is wanted, 77 is stored",
        "kernels: 1; cached: 0; missing: 1",
    ]


@pytest.mark.parametrize(
    ("changes", "argv", "reason"),
    [
        ({}, ["--effort", "full"], "tuned with effort quick, full is asked for"),
        ({"effort": ""}, [], "its tuning was interrupted; tune it again to go on"),
        (
            {},
            ["--set", "objective=memory"],
            "what its schedules need in memory was not noted, and objective='memory' asks for it",
        ),
    ],
)
def test_why_an_entry_is_not_good_enough(
    run: Run,
    fake_api: Any,
    store: KernelStore,
    key: KernelKey,
    changes: dict[str, str],
    argv: list[str],
    reason: str,
) -> None:
    store.put_kernel(entry(key, **changes))
    status, data = why(run, *argv)
    (miss,) = data["misses"]
    assert (status, miss["reason"], miss["differs"]) == (1, reason, {})


def test_the_schedules_that_objectives_choose_among(
    run: Run, store: KernelStore, key: KernelKey
) -> None:
    fast = Finalist(Candidate("contraction"), 1e-4, Footprint(1 << 20, 1 << 20, 0), 2e-3)
    lean = Finalist(Candidate("in_place"), 1.01e-4, Footprint(0, 1 << 19, 64))
    chosen = fast.candidate.to_json()
    store.put_kernel(entry(key, candidate=chosen, finalists=(fast, lean)))
    lines = run("cache", "ls", "--finalists")[1].splitlines()
    assert lines[2].split() == [
        "name", "schedule", "for", "latency", "packed", "scratch", "energy"
    ]  # fmt: skip
    assert lines[3].split() == [
        *("matmul_3x2", "contraction", "latency", "energy", "100.0", "us"),
        *("1.0", "MiB", "0", "B", "2.00", "mJ"),
    ]
    assert lines[4].split() == [
        "matmul_3x2", "in_place", "memory", "101.0", "us", "0", "B", "64", "B", "-"
    ]  # fmt: skip
    data = json.loads(run("cache", "ls", "--json")[1])
    assert data[0]["finalists"] == [fast.to_json(), lean.to_json()]


def test_why_an_option_that_is_part_of_the_key(
    run: Run, fake_api: Any, store: KernelStore, key: KernelKey
) -> None:
    store.put_kernel(entry(key))
    status, data = why(run, "--set", "library=0")
    assert (status, data["misses"][0]["differs"]) == (1, {"numerics.library": [False, True]})


def test_why_a_kernel_that_nobody_tuned(
    run: Run, fake_api: Any, store: KernelStore, key: KernelKey
) -> None:
    store.put_kernel(entry(replace(key, workload="b" * 64)))
    status, data = why(run)
    assert (status, data["misses"][0]["reason"]) == (1, "it was never tuned")
    assert data["misses"][0]["differs"] == {}


def test_why_is_status_0_when_nothing_misses(run: Run, fake_api: Any) -> None:
    graph = fake_api.explanation.graphs[0]
    cached = replace(graph, tasks=(replace(graph.tasks[0], cached=True),))
    fake_api.explanation = replace(fake_api.explanation, graphs=(cached,))
    status, out, _ = run("cache", "why", "net.py:make")
    assert status == 0
    assert out.endswith("kernels: 1; cached: 1; missing: 0\n")


def test_long_digests_are_shortened_in_text(
    run: Run, fake_api: Any, store: KernelStore, key: KernelKey
) -> None:
    store.put_kernel(entry(replace(key, device="c" * 64)))
    text = run("cache", "why", "net.py:make")[1]
    assert f"  device: {key.device[:12]}... is wanted, cccccccccccc... is stored" in text


@pytest.mark.parametrize("command", ["ls", "stats", "verify", "prune", "clear"])
def test_a_named_directory_without_a_cache_is_said_and_not_made(
    run: Run, tmp_path: Path, command: str
) -> None:
    """It answered "0 kernels" and made one."""
    missing = tmp_path / "missing"
    status, out, err = run("cache", command, "--cache-dir", str(missing))
    assert (status, out) == (2, "")
    assert f"{missing}: there is nothing there" in err
    assert len(err.splitlines()) == 1
    assert not missing.exists()
    (tmp_path / "other").mkdir()
    assert run("cache", command, "--cache-dir", str(tmp_path / "other"))[0] == 2
    assert not list((tmp_path / "other").iterdir())


@pytest.mark.parametrize("command", ["ls", "stats", "verify", "prune", "clear"])
def test_a_directory_that_cannot_be_used_is_an_error(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("TORCH_PRUNER_CACHE_DIR", "/proc/nope")
    status, out, err = run("cache", command)
    assert (status, out) == (2, "")
    assert err.startswith("torch-pruner: cannot use the cache directory /proc/nope: ")
    assert len(err.splitlines()) == 1
