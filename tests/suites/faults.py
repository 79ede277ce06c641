"""A storm on the cache: processes killed after they have committed, and bits flipped in every file.

``python -m tests.suites.faults --kills 300 --flips 500``: nothing that was committed is lost to a
kill, nothing wrong is ever returned, and nothing ends a process. Needs neither torch nor TVM.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.contracts.store import kernel_entry, kernel_key, record
from tests.stress.writer import check, library, write
from torch_pruner import exc, log
from torch_pruner.cache import KernelStore, bundle, index, learned, userkey
from torch_pruner.cache.location import Layout

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 40
LONGEST_S = 0.25  # from the first commit of a process to its end
HERE = bundle.Origin({"name": "a CPU"}, "a" * 64, "tvm 1 + codegen 1")
KINDS = ("index", "wal", "shm", "library", "lock", "weights", "key", "note", "bundle")
LOSSLESS = ("shm", "lock", "weights", "key", "note")


@dataclass(slots=True)
class Kills:
    """``lost`` names what a process had committed and nobody finds."""

    kills: int = 0
    committed: int = 0
    lost: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Flips:
    """What flipped bits of one kind of file did. ``worst``: the most rounds that one cost."""

    flips: int = 0
    harmless: int = 0
    worst: int = 0
    wrong: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)


def kill_many(root: Path, count: int, seed: int) -> Kills:
    """Kill ``count`` writers of one cache, two at a time now and then, each after a commit."""
    rng, outcome = random.Random(seed), Kills()
    done: set[int] = set()
    first = 0
    while outcome.kills < count:
        pids = []
        for _ in range(min(rng.choice((1, 1, 2)), count - outcome.kills)):
            first += 1000
            pids.append(_writer(root, first, often=rng.random() < 0.5))
        told: list[int] = []
        for _, heard in pids:
            told.append(int(heard.readline()))  # it has committed
        time.sleep(LONGEST_S * rng.random())
        for pid, heard in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            told += [int(line) for line in heard if line.endswith("\n")]
            heard.close()
            outcome.kills += 1
        done |= {*told}
        _look(root, told, outcome)
    outcome.committed = len(done)
    _look(root, sorted(done), outcome)
    return outcome


def _writer(root: Path, first: int, *, often: bool) -> tuple[int, Any]:
    """A process that fills a cache and says what it has committed."""
    heard, told = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(heard)
            if often:
                index.CHECKPOINT_S = 0.0  # type: ignore[misc]
            store = KernelStore.open(root)
            for n in range(first, first + 1000):
                write(store, n)
                os.write(told, b"%d\n" % n)
        finally:
            os._exit(1)
    os.close(told)
    return pid, os.fdopen(heard)


def _look(root: Path, rounds: list[int], outcome: Kills) -> None:
    store = KernelStore.open(root)
    if store.degraded is not None:
        outcome.problems.append(store.degraded)
    records = {r.digest for r in store.records(kernel_key())}
    for n in rounds:
        if not check(store, n):
            outcome.lost.append(f"library {n}")
        if f"candidate {n}" not in records:
            outcome.lost.append(f"record {n}")
    best = store.get_kernel(kernel_key())
    if best is None or best.latency_s > 1e-3 / (1 + max(rounds)):
        outcome.lost.append(f"kernel {max(rounds)}")
    outcome.problems += store.verify().problems
    store.close()


def flip_many(folder: Path, count: int, seed: int) -> dict[str, Flips]:
    """Flip ``count`` bits, each in a copy of one cache as a killed process left it."""
    rng = random.Random(seed)
    template, work = folder / "template", folder / "work"
    os.environ["XDG_DATA_HOME"] = str(template / "data")
    _prepare(template)
    outcomes = {kind: Flips() for kind in KINDS}
    os.environ["XDG_DATA_HOME"] = str(work / "data")
    for i in range(count):
        kind = KINDS[i % len(KINDS)]
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(template, work)
        if i // len(KINDS) % 2:
            userkey.note_own(Layout(work / "cache").home)  # then only signed rows count
        path = rng.choice(sorted(_files(work, kind)))
        at = rng.randrange(8 * max(1, path.stat().st_size))
        _flip(path, at)
        outcome = outcomes[kind]
        outcome.flips += 1
        where = f"bit {at} of {path.relative_to(work)}"
        lost = _in_a_child(lambda kind=kind: _survey(work, kind))  # type: ignore[misc]
        if isinstance(lost, int):
            outcome.harmless += not lost
            outcome.worst = max(outcome.worst, lost)
            if lost and kind in LOSSLESS:
                outcome.wrong.append(f"{where}: {lost} rounds are lost")
        elif lost.startswith("AssertionError"):
            outcome.wrong.append(f"{where}: {lost}")
        else:
            outcome.crashes.append(f"{where}: {lost}")
    return outcomes


def _prepare(folder: Path) -> None:
    """A cache with one of everything, whose last writer was killed; and a bundle of it."""
    root = folder / "cache"
    store = KernelStore.open(root)
    for n in range(ROUNDS // 2):
        write(store, n)
    store.put_kernel(kernel_entry(kernel_key("shipped", device=HERE.digest)))
    store.add_records(kernel_key("shipped", device=HERE.digest), [record("a")])
    learned.write(learned.path_of(root, "moa-llvm"), library(0))
    with store.claim(kernel_key().digest()):
        pass
    bundle.create(store, folder / "kernels.tpb", HERE, "a test")
    store.close()
    pid = os.fork()
    if not pid:
        store = KernelStore.open(root)
        for n in range(ROUNDS // 2, ROUNDS):
            write(store, n)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


def _files(folder: Path, kind: str) -> list[Path]:
    home = folder / "cache" / "v2"
    patterns = {
        "index": (home, "index.sqlite"), "wal": (home, "index.sqlite-wal"),
        "shm": (home, "index.sqlite-shm"), "library": (home, "blobs/*/*.so"),
        "lock": (home, "locks/*"), "weights": (home, "models/*"),
        "key": (folder, "data/*/signing.key"), "note": (folder, "data/*/caches/*"),
        "bundle": (folder, "*.tpb"),
    }  # fmt: skip
    where, pattern = patterns[kind]
    return list(where.glob(pattern))


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes() or b"\0")
    data[at // 8] ^= 1 << at % 8
    path.write_bytes(data)


def _survey(folder: Path, kind: str) -> int:
    """How many rounds are not there any more. What is there is right, and everything works."""
    root = folder / "cache"
    lost = sum(not check(store, n) for store in [KernelStore.open(root)] for n in range(ROUNDS))
    store = KernelStore.open(root)
    for found in store.records(kernel_key()):
        assert found == record(found.digest, time=float(found.digest.split()[1])), found
    learned.read(learned.path_of(root, "moa-llvm"))
    store.verify()
    store.ls()
    if kind == "bundle":
        _bundle(folder)
    with store.claim(kernel_key().digest(), timeout_s=0) as mine:
        assert mine
    for n in range(ROUNDS, ROUNDS + 3):
        write(store, n)
        assert check(store, n)
    store.prune()
    assert store.degraded is None, store.degraded
    return lost


def _bundle(folder: Path) -> None:
    try:
        contents = bundle.read(folder / "kernels.tpb")
    except exc.IncompatibleBundle:
        return
    assert contents.kernels == (kernel_entry(kernel_key("shipped", device=HERE.digest)),)
    bundle.load(KernelStore.open(folder / "loaded"), contents, HERE)


def _in_a_child(work: Callable[[], int]) -> int | str:
    """What ``work`` returns in a process of its own, or how it ended."""
    heard, told = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(heard)
            answer: int | str = work()
        except BaseException as err:
            answer = f"{type(err).__name__}: {err}"
        os.write(told, json.dumps(answer)[:4000].encode())
        os._exit(0)
    os.close(told)
    with os.fdopen(heard) as file:
        text = file.read()
    _, status = os.waitpid(pid, 0)
    found: int | str = json.loads(text) if text else f"ended with {status}"
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.suites.faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--flips", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    log.configure("error")
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_DATA_HOME"] = str(Path(name, "data"))
        killed = kill_many(Path(name, "cache"), args.kills, args.seed)
        flipped = flip_many(Path(name), args.flips, args.seed)
    report = {"kills": asdict(killed), "flips": {k: asdict(f) for k, f in flipped.items()}}
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    bad = [killed.lost, killed.problems, *(f.wrong for f in flipped.values())]
    return int(any(bad) or any(f.crashes for f in flipped.values()))


if __name__ == "__main__":
    sys.exit(main())
