"""Command-line arguments that the measurements share."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.models import NETWORKS


def names(text: str) -> list[str]:
    """What commas separate."""
    return [name.strip() for name in text.split(",") if name.strip()]


def network_names(text: str) -> list[str]:
    """Names of networks, separated by commas; an unknown one is a usage error."""
    found = names(text)
    if unknown := [name for name in found if name not in NETWORKS]:
        raise argparse.ArgumentTypeError(f"no network {unknown[0]!r}; known: {', '.join(NETWORKS)}")
    return found


def add_tuning(parser: argparse.ArgumentParser, *, cache: bool = True) -> None:
    """The options that go to the backend; without ``cache``, the caller decides where it is."""
    parser.add_argument("--effort", default="quick", choices=["none", "quick", "full"])
    parser.add_argument("--time-budget", type=float, metavar="SECONDS")
    parser.add_argument("--trials", type=int, metavar="N")
    if cache:
        parser.add_argument("--cache-dir", help="default: the backend's own")
    else:
        parser.set_defaults(cache_dir=None)
    parser.add_argument("--threads", type=int, help="default: as torch decides")


def backend_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What ``add_tuning`` found, as ``torch.compile(options=...)`` wants it."""
    given = {
        "effort": arguments.effort,
        "time_budget_s": arguments.time_budget,
        "trials": arguments.trials,
        "cache_dir": arguments.cache_dir,
        "threads": arguments.threads,
    }
    return {name: value for name, value in given.items() if value is not None}


def write_json(path: str | None, content: dict[str, Any]) -> None:
    """Writes a result file and its directories, if a path was asked for.

    Where the cache was is nobody's business: such files are published.
    """
    if path is None:
        return
    if "options" in content:
        options = {k: v for k, v in content["options"].items() if k != "cache_dir"}
        content = {**content, "options": options}
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def read_json(path: str | None) -> dict[str, Any] | None:
    """What ``write_json`` left there, if anything."""
    if path is None or not Path(path).exists():
        return None
    content: dict[str, Any] = json.loads(Path(path).read_text())
    return content
