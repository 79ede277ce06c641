"""Tune on a build machine, ship one file, serve in a process that never tunes.

The second process stands for another machine of the same kind: it has an empty cache, loads the
file, and runs with ``on_miss="error"``, so that a missing kernel stops the deployment.

    python examples/prewarm_and_ship.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

SHAPES = ((1, 256), (16, 256))


def make_model() -> nn.Module:
    """What both sides have: the code and the weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", type=Path, metavar="BUNDLE", help="what the second process runs")
    bundle = parser.parse_args().serve
    if bundle is not None:
        serve(bundle)
        return
    with tempfile.TemporaryDirectory(prefix="ship-") as folder:
        bundle = Path(folder) / "kernels.bundle"
        build(Path(folder) / "cache", bundle)
        command = [sys.executable, __file__, "--serve", str(bundle)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the second process failed:\n{done.stderr}")
        print("second process:", done.stdout.strip())


def build(cache: Path, bundle: Path) -> None:
    """What the build machine runs: tune every shape that will be served, write one file."""
    import torch_pruner

    inputs = [(torch.randn(shape),) for shape in SHAPES]
    start = time.perf_counter()
    options = {"cache_dir": str(cache), "time_budget_s": 10.0}
    report = torch_pruner.tune(make_model(), inputs, options=options)
    found = torch_pruner.save_bundle(bundle, cache_dir=cache)
    print(f"tuned in {time.perf_counter() - start:.1f} s:\n{report}")
    print(f"shipped: {found.kernels} kernels in {bundle.stat().st_size / 1024:.0f} KiB")


@torch.no_grad()
def serve(bundle: Path) -> None:
    """What a serving process runs."""
    import torch_pruner

    with tempfile.TemporaryDirectory(prefix="serve-") as cache:
        torch_pruner.load_bundle(bundle, cache_dir=cache)
        options = {"cache_dir": cache, "on_miss": "error"}
        model = make_model()
        compiled = torch.compile(model, backend="pruner", options=options, dynamic=False)
        worst = 0.0
        start = time.perf_counter()
        for shape in SHAPES:
            x = torch.randn(shape)
            worst = max(worst, (compiled(x) - model(x)).abs().max().item())
        report = torch_pruner.last_report()
        assert report is not None
        sources = sorted({t.source for g in report.graphs for t in g.tasks})
        seconds = round(time.perf_counter() - start, 2)
    print(json.dumps({"kernels from": sources, "seconds": seconds, "largest difference": worst}))


if __name__ == "__main__":
    main()
