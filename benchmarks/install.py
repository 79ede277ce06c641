"""What the lean install costs: megabytes beside torch and TVM, and the time of the import.

Sizes are those of the installed files of every distribution that ``torch-pruner`` requires without
extras and that neither torch nor TVM requires. Times are of fresh processes, torch imported before.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import tables, timing
from benchmarks.arguments import write_json

GIVEN = ("torch", "apache-tvm[popen-pool]")  # a user of torch.compile and TVM has these anyway
TIMED = (
    "import time, torch\n"
    "begin = time.perf_counter()\n"
    "import torch_pruner\n"
    "print(time.perf_counter() - begin)\n"
)
MiB = 1 << 20


def required(name: str) -> dict[str, metadata.Distribution]:
    """The distributions that one requires here, directly or not, itself left out, by name.

    ``name`` may ask for extras: ``apache-tvm[popen-pool]``. Raises ``PackageNotFoundError`` for
    what is not installed.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    first = Requirement(name)
    found: dict[str, metadata.Distribution] = {}
    seen: set[tuple[str, str]] = set()
    todo = [(first.name, extra) for extra in ("", *first.extras)]
    while todo:
        of, extra = todo.pop()
        if (of, extra) in seen:
            continue
        seen.add((of, extra))
        for text in metadata.distribution(of).requires or ():
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                key = canonicalize_name(wanted.name)
                found[key] = metadata.distribution(key)
                todo += [(key, more) for more in ("", *wanted.extras)]
    found.pop(canonicalize_name(first.name), None)
    return found


def sizes() -> dict[str, int]:
    """Bytes of what the lean install brings beside torch and TVM, and of this package."""
    others = {name for given in GIVEN for name in (given.split("[")[0], *required(given))}
    brought = {k: d for k, d in required("torch-pruner").items() if k not in others}
    package = Path(__file__).resolve().parents[1] / "torch_pruner"
    own = sum(p.stat().st_size for p in package.rglob("*") if "__pycache__" not in p.parts)
    return {"torch-pruner": own, **{name: _bytes(d) for name, d in sorted(brought.items())}}


def _bytes(distribution: metadata.Distribution) -> int:
    paths = (Path(str(file.locate())) for file in distribution.files or ())
    return sum(p.stat().st_size for p in paths if p.is_file())


def import_times(rounds: int) -> list[float]:
    """Seconds of importing the package where torch is imported, one fresh process each.

    One more before them fills the file cache.
    """
    seconds: list[float] = []
    for _ in range(rounds + 1):
        command = [sys.executable, "-c", TIMED]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        seconds.append(float(done.stdout))
    return seconds[1:]


def render(found: dict[str, int], times: list[float]) -> str:
    lines = [[name, f"{size / MiB:.1f} MiB"] for name, size in found.items()]
    lines.append(["together", f"{sum(found.values()) / MiB:.1f} MiB"])
    text = tables.markdown(["distribution", "installed"], lines)
    row = [timing.duration(of(times)) for of in (statistics.median, min, max)]
    header = ["import torch_pruner, torch imported", "median", "least", "most"]
    return text + "\n\n" + tables.markdown(header, [[f"{len(times)} processes", *row]])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.install", description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--out", help="write JSON there, e.g. docs/data/install.json")
    options = parser.parse_args(arguments)
    found, times = sizes(), import_times(options.rounds)
    print(render(found, times))
    content: dict[str, Any] = {"machine": timing.machine(), "bytes": found, "import_s": times}
    write_json(options.out, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
