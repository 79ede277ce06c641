"""``torch-pruner tune MODEL``: fill the kernel cache before deployment.

``torch-pruner tune --seen`` needs no model: it tunes what ran untuned and was noted.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch_pruner.cache import location
from torch_pruner.cli import arguments, explain, model
from torch_pruner.config import Config
from torch_pruner.exc import CacheDirectoryError, UnsupportedModel

if TYPE_CHECKING:
    import argparse

    from torch_pruner.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model.add_arguments(parser, optional=True)
    parser.add_argument(
        "--seen",
        action="store_true",
        help="in place of MODEL: tune the kernels that the cache has noted because they ran"
        " untuned (sizes that came later, on_miss=fallback)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the table of tasks and stop: tunes nothing"
    )
    arguments.add_options(parser)
    arguments.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 if every operator is compiled and every kernel is tuned or the library's, else 1.

    A dry run returns 0 whatever is cached.
    """
    options = arguments.options_of(args)
    if args.seen == (args.model is not None):
        raise UnsupportedModel("tune", "give either MODEL or --seen")
    if args.seen and (args.dry_run or args.train):
        raise UnsupportedModel("tune", "--seen goes with neither --dry-run nor --train")
    if args.dry_run:
        return _dry_run(args, options)
    _expect_cache(options)
    with arguments.clean_stdout(args.json):
        report, interrupted = _tune(args, options)
    if report is not None:
        print(json.dumps(report.to_json(), indent=2) if args.json else report)
    if interrupted or report is None:
        raise KeyboardInterrupt("the best kernels found so far are kept; run it again to go on")
    if args.seen and not report.graphs:
        print("nothing is noted: every kernel that ran is tuned", file=sys.stderr)
        return 0
    if not args.json:
        print(f"\n{verdict(report)}")
    return int(not report.complete)


def _expect_cache(options: dict[str, Any]) -> None:
    """Raise ``CacheDirectoryError`` where nothing that is tuned would be kept."""
    config = Config.from_options(options=options)
    if not location.usable(config.cache_root):
        raise CacheDirectoryError(config.cache_root, "it is read-only")


def verdict(report: Report) -> str:
    """The sentence that goes with the exit status."""
    if report.complete:
        return "complete: every operator is compiled, every kernel is in the cache"
    untuned = [t.name for t in report.tasks if not t.tuned]
    failed = [g.name for g in report.graphs if not g.ops_total]
    problems = []
    if report.ops_fallback:
        problems.append(f"operators left to the fallback: {len(report.ops_fallback)}")
    if untuned:
        more = ", ..." if len(untuned) > 5 else ""
        names = ", ".join(untuned[:5]) + more
        problems.append(f"kernels not tuned: {len(untuned)} ({names})")
    if failed:
        problems.append(f"not compiled at all: {', '.join(failed)}")
    if not report.graphs:
        problems.append("nothing was compiled")
    return f"incomplete: {'; '.join(problems)}"


def _tune(args: argparse.Namespace, options: dict[str, Any]) -> tuple[Report | None, bool]:
    """The report, and whether tuning was interrupted (then with what was done until then)."""
    loaded = None if args.seen else model.load(args)
    from torch_pruner.dynamo import api

    explain.use_threads(options)
    try:
        if loaded is None:
            return api.tune_seen(options), False
        report = api.tune(loaded.module, loaded.inputs, options=options, backward=args.train)
    except KeyboardInterrupt:
        return api.last_report(), True
    return report, False


def _dry_run(args: argparse.Namespace, options: dict[str, Any]) -> int:
    with arguments.clean_stdout(args.json):
        tasks = explain.tasks_of(explain.explanation(args, options))
    if args.json:
        print(json.dumps({"tasks": [asdict(t) for t in tasks]}, indent=2))
        return 0
    for line in explain.task_table(tasks):
        print(line)
    missing = [t for t in tasks if not t.cached]
    print(f"\nkernels: {len(tasks)}; cached: {len(tasks) - len(missing)}; to tune: {len(missing)}")
    return 0
