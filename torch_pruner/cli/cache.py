"""``torch-pruner cache``: look into and look after the kernel cache.

All but ``why`` and ``verify --run`` work without torch and TVM. ``ls``, ``stats`` and ``verify``
change nothing.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch_pruner.cache import (
    ArtifactEntry,
    ArtifactKind,
    KernelEntry,
    KernelStore,
    PruneReport,
    location,
)
from torch_pruner.cli import arguments, explain, model
from torch_pruner.config import EFFORT, OBJECTIVES, Config
from torch_pruner.fingerprint import DeviceFingerprint
from torch_pruner.pareto import Objective
from torch_pruner.task import Candidate
from torch_pruner.text_tables import bytes_text, joules_text, shorten, table, time_text

if TYPE_CHECKING:
    import argparse

    from torch_pruner.cache import KernelKey, Listed
    from torch_pruner.compiler.recheck import Recheck
    from torch_pruner.dynamo.api import TaskExplanation

_NOUNS = {
    ArtifactKind.VERDICT: "graphs compared with eager",
    ArtifactKind.CAPTURED: "captured graphs",
    ArtifactKind.KERNEL: "built kernels",
    ArtifactKind.CUTS: "graphs cut as measured",
}
_AGES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (0.0, "s"))


@dataclass(frozen=True, slots=True)
class Miss:
    """Why one kernel is not served from the cache.

    ``differs`` maps each key field that differs to (wanted, found); it is empty where the cache has
    no entry of this kernel, or has one that is not good enough.
    """

    name: str
    shape: str
    workload: str
    reason: str
    differs: dict[str, tuple[Any, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="subcommand", metavar="SUBCOMMAND", required=True)
    for name, command, text in (
        ("ls", ls, "list what is stored, most recently used first"),
        ("stats", stats, "how much is stored, and where"),
        ("verify", verify, "read everything and check every digest; changes nothing"),
        ("adopt", adopt, "sign what others put into a cache of this user, as if he had made it"),
        ("prune", prune, "remove left-overs, and the least recently used above the size limit"),
        ("clear", clear, "remove everything"),
    ):
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.add_argument("--cache-dir", metavar="DIR", help="the kernel cache to use")
        if name == "prune":
            sub.add_argument(
                "--max-bytes",
                metavar="N",
                type=arguments.positive,
                help="the size limit to enforce",
            )
        if name == "ls":
            help_ = "also the schedules of each kernel that objectives choose among"
            sub.add_argument("--finalists", action="store_true", help=help_)
        if name == "verify":
            help_ = "also build every kernel of this device anew and check its results"
            sub.add_argument("--run", action="store_true", dest="rerun", help=help_)
        arguments.add_json(sub)
        sub.set_defaults(run=command)
    text = "why each kernel of a model that is not in the cache misses"
    sub = commands.add_parser("why", help=text, description=text, allow_abbrev=False)
    model.add_arguments(sub)
    arguments.add_options(sub)
    arguments.add_json(sub)
    sub.set_defaults(run=why)


def ls(args: argparse.Namespace) -> int:
    found = _open(args, read_only=True).ls()
    if args.json:
        print(json.dumps([_listed_json(item) for item in found], indent=2))
        return 0
    here, now = DeviceFingerprint.detect().digest(), time.time()
    kernels = [_row(i, i.entry, here, now) for i in found if isinstance(i.entry, KernelEntry)]
    if kernels:
        headers = ("name", "device", "latency", "source", "effort", "trials", "age", "last use")
        print("\n".join(table(headers, kernels, align="<<><<>>>")))
    if args.finalists:
        told = [row for i in found if isinstance(i.entry, KernelEntry) for row in _finalists(i)]
        costs = ("name", "schedule", "for", "latency", "packed", "scratch", "energy")
        print("\n".join(table(costs, told, align="<<<>>>>")))
    artifacts = [(i, i.entry) for i in found if isinstance(i.entry, ArtifactEntry)]
    if artifacts:
        rows = [_artifact_row(item, entry, here, now) for item, entry in artifacts]
        columns = ("name", "kind", "device", "size", "age", "last use")
        print("\n".join(table(columns, rows, align="<<<>>>")))
    count = Counter(entry.kind for _, entry in artifacts)
    size = bytes_text(sum(item.bytes for item in found))
    print(
        f"{len(kernels)} kernels and {count[ArtifactKind.LIBRARY]} built libraries, {size}", end=""
    )
    for kind, text in _NOUNS.items():
        print(f"; {count[kind]} {text}" if count[kind] else "", end="")
    print()
    return 0


def stats(args: argparse.Namespace) -> int:
    found = asdict(_open(args, read_only=True).stats())
    # This process has asked for nothing yet: its own counters say nothing.
    shown = {k: v for k, v in found.items() if k not in ("hits", "misses", "puts", "read_only")}
    if args.json:
        print(json.dumps(shown, indent=2))
        return 0
    print(f"directory  {shown['root'] or 'none'}")
    print(f"size       {bytes_text(shown['bytes'])} of at most {bytes_text(shown['max_bytes'])}")
    for name in ("kernels", "libraries", "captured", "verdicts", "records"):
        print(f"{name:10} {shown[name]}")
    if shown["degraded"]:
        print(f"unusable   {shown['degraded']}")
    return 0


def verify(args: argparse.Namespace) -> int:
    """1 if anything is damaged, or with ``--run`` gives wrong results."""
    store = _open(args, read_only=True)
    report, again = store.verify(), _rerun(store) if args.rerun else None
    ok = report.ok and (again is None or again.ok)
    if args.json:
        ran = {} if again is None else {"run": asdict(again)}
        print(json.dumps({"ok": ok, **asdict(report), **ran}, indent=2))
        return int(not ok)
    sound = ", ".join(f"{n} {name}" for name, n in report.sound.items()) or "nothing stored"
    print(f"sound: {sound}")
    for problem in report.problems:
        print(f"damaged: {problem}")
    if report.problems:
        print(
            "damaged entries are misses and are tuned again; `torch-pruner cache clear` drops all"
        )
    if again is not None:
        print(
            f"ran: {again.checked} kernels, {again.skipped} of other devices or libraries left out"
        )
        for problem in again.problems:
            print(f"wrong: {problem}")
    return int(not ok)


def _rerun(store: KernelStore) -> Recheck:
    from torch_pruner.compiler.recheck import recheck

    return recheck(store, Config.from_options())


def adopt(args: argparse.Namespace) -> int:
    count = _open(args).adopt()
    print(json.dumps({"signed": count}) if args.json else f"signed {count} entries")
    return 0


def prune(args: argparse.Namespace) -> int:
    return _removed(args, _open(args, max_bytes=args.max_bytes).prune())


def clear(args: argparse.Namespace) -> int:
    return _removed(args, _open(args).clear())


def why(args: argparse.Namespace) -> int:
    """0 if every kernel of the model is in the cache, else 1."""
    options = arguments.options_of(args)
    with arguments.clean_stdout(args.json):
        tasks = explain.tasks_of(explain.explanation(args, options))
        misses = _misses([t for t in tasks if not t.cached], Config.from_options(options=options))
    if args.json:
        data = {"kernels": len(tasks), "misses": [asdict(m) for m in misses]}
        print(json.dumps(data, indent=2))
        return int(bool(misses))
    for miss in misses:
        print(shorten(f"{miss.name} ({miss.shape}): {miss.reason}"))
        for name, (wanted, found) in miss.differs.items():
            print(shorten(f"  {name}: {_short(wanted)} is wanted, {_short(found)} is stored"))
    print(f"kernels: {len(tasks)}; cached: {len(tasks) - len(misses)}; missing: {len(misses)}")
    return int(bool(misses))


def _open(
    args: argparse.Namespace, *, read_only: bool = False, max_bytes: int | None = None
) -> KernelStore:
    """The store to look into or after.

    Raises ``CacheDirectoryError`` where the directory cannot be used, or was named and is not
    there: then none is made.
    """
    options = {} if args.cache_dir is None else {"cache_dir": args.cache_dir}
    config = Config.from_options(options=options)
    if max_bytes is not None:
        config = config.replace(cache_max_bytes=max_bytes)
    root = config.cache_root
    if args.cache_dir is not None:
        location.expect(root)
    # To look at the user's own cache before it is there is no error: an empty one is made.
    looking = read_only and root.exists()
    location.usable(root, read_only=looking)
    return KernelStore.open(root, max_bytes=config.cache_max_bytes, read_only=looking)


def _listed_json(item: Listed) -> dict[str, Any]:
    entry = item.entry
    common = {"digest": item.digest, "bytes": item.bytes, "created": item.created}
    common |= {"used": item.used, "key": entry.key.to_json()}
    if not isinstance(entry, KernelEntry):
        return {"kind": str(entry.kind), **common, "blob": entry.blob}
    return {
        "kind": "kernel",
        **common,
        "name": entry.task,
        "device": entry.key.device,
        "latency_s": entry.latency_s if entry.latency_s < float("inf") else None,
        "baseline_s": entry.baseline_s,
        "source": entry.source,
        "effort": entry.effort,
        "trials": entry.trials,
        "candidate": dict(entry.candidate),
        "finalists": [f.to_json() for f in entry.finalists],
    }


def _row(item: Listed, entry: KernelEntry, here: str, now: float) -> tuple[str, ...]:
    return (
        entry.task or item.digest[:8],
        "this" if entry.key.device == here else entry.key.device[:8],
        time_text(entry.latency_s if entry.latency_s < float("inf") else None),
        entry.source,
        entry.effort or ("partial" if entry.trials else "untuned"),
        str(entry.trials),
        age(now - item.created),
        age(now - item.used),
    )


def _finalists(item: Listed) -> list[tuple[str, ...]]:
    """A row for each; the objectives that take it, where weights stay in memory."""
    entry = item.entry
    assert isinstance(entry, KernelEntry), "others have none"
    known = entry.finalists
    metered = any(f.joules is not None for f in known)
    named = [Objective(name) for name in OBJECTIVES[1:] if name != "energy" or metered]
    taken = {o.name: o.choose(known).candidate for o in named if o.decides(known)}
    taken = {OBJECTIVES[0]: Candidate.from_json(entry.candidate), **taken}
    predicted = "~" if entry.source == "untuned" else ""
    return [
        (
            entry.task or item.digest[:8],
            f.candidate.sketch,
            " ".join(name for name, chosen in taken.items() if chosen == f.candidate) or "-",
            predicted + time_text(f.latency_s if math.isfinite(f.latency_s) else None),
            bytes_text(f.footprint.packed_bytes),
            bytes_text(f.footprint.scratch_bytes),
            joules_text(f.joules),
        )
        for f in known
    ]


def _artifact_row(item: Listed, entry: ArtifactEntry, here: str, now: float) -> tuple[str, ...]:
    return (
        str(entry.meta.get("name") or item.digest[:8]),
        entry.kind,
        "this" if entry.key.device == here else entry.key.device[:8],
        bytes_text(item.bytes),
        age(now - item.created),
        age(now - item.used),
    )


def age(seconds: float) -> str:
    """The largest unit that gives at least one."""
    size, unit = next((s, u) for s, u in _AGES if seconds >= s or not s)
    return f"{max(0.0, seconds) / (size or 1.0):.0f} {unit}"


def _removed(args: argparse.Namespace, report: PruneReport) -> int:
    if args.json:
        print(json.dumps(asdict(report), indent=2))
        return 0
    print(
        f"removed {report.kernels} kernels and {report.artifacts} artifacts of graphs,"
        f" {bytes_text(report.freed_bytes)}; {bytes_text(report.bytes)} are left"
    )
    if report.in_use:
        print(f"{report.in_use} artifacts above the limit are in use and stay")
    return 0


def _misses(tasks: list[TaskExplanation], config: Config) -> list[Miss]:
    """The reason for each task that is not cached, with the nearest entry of the cache."""
    import torch

    from torch_pruner.devices import device_for

    context = device_for(torch.device("cpu"), config).context(config)
    store = KernelStore.open(config.cache_root, max_bytes=config.cache_max_bytes)
    misses = []
    for task in tasks:
        key = context.kernel_key(task.workload)
        reason, differs = _reason(key, store, config)
        misses.append(Miss(task.name, task.shape, task.workload, reason, differs))
    return misses


def _reason(
    key: KernelKey, store: KernelStore, config: Config
) -> tuple[str, dict[str, tuple[Any, Any]]]:
    from torch_pruner.compiler.objectives import lacks

    if (entry := store.get_kernel(key)) is not None:
        if not entry.effort:
            return "its tuning was interrupted; tune it again to go on", {}
        if entry.source == "untuned" and config.effort != "none":
            return "it ran untuned, as drafted", {}
        if list(EFFORT).index(entry.effort) < list(EFFORT).index(config.effort):
            return f"tuned with effort {entry.effort}, {config.effort} is asked for", {}
        if lacking := lacks(entry, config):
            return f"{lacking}, and objective={config.objective!r} asks for it", {}
        return f"its entry ({entry.source}) does not fit the options", {}
    nearest = store.nearest(key)
    if nearest is None or nearest.workload != key.workload:
        return "it was never tuned", {}
    return "tuned, but the nearest entry differs", _expand(key.diff(nearest))


def _expand(differs: dict[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    """Fields that hold a JSON object (target, numerics) reduced to the attributes that differ."""
    expanded: dict[str, tuple[Any, Any]] = {}
    for name, (wanted, found) in differs.items():
        if name not in ("target", "numerics"):
            expanded[name] = wanted, found
            continue
        ours, theirs = json.loads(wanted), json.loads(found)
        for attribute in sorted({*ours, *theirs}):
            if ours.get(attribute) != theirs.get(attribute):
                pair = ours.get(attribute), theirs.get(attribute)
                expanded[f"{name}.{attribute}"] = pair
    return expanded


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return f"{text[:12]}..." if len(text) == 64 and " " not in text else text
