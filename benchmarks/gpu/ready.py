"""Whether our backend compiles a graph here at all, before anything that takes time is run.

    python -m benchmarks.gpu.ready [--device cuda]

Without a package, a library or the entry point the backend is eager, and tables that are made then
are of eager. Exits with 1 and says why.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import Any

import torch

import torch_pruner

TOLERANCE = 2e-2  # of the largest result, in float16


def problem(device: str) -> str:
    """Why a small graph is not compiled or wrong, or an empty text."""
    half = torch.float16 if device == "cuda" else torch.float32
    layers = torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 128)
    net = torch.nn.Sequential(*layers).to(device, half)
    x = torch.randn(64, 256, device=device, dtype=half)
    with tempfile.TemporaryDirectory() as cache, torch.no_grad():
        options: dict[str, Any] = {"effort": "none", "cache_dir": cache}
        if device == "cuda":
            options["target"] = {"kind": "cuda"}
        compiled = torch.compile(net, backend="pruner", options=options)
        want, got = net(x), [compiled(x) for _ in range(3)][-1]
    report = torch_pruner.last_report()
    if report is None or not report.ops_total or report.ops_compiled < report.ops_total:
        notes = list(report.notes) if report is not None else ["no report"]
        return f"not compiled: {', '.join(notes)}"
    off = float((got - want).abs().max() / want.abs().max())
    return "" if off < TOLERANCE else f"wrong by {off}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.ready", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    found = problem(parser.parse_args(arguments).device)
    print(found or "a graph is compiled and right", file=sys.stderr if found else sys.stdout)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
