"""Checks that run in child processes: one that crashes or hangs is an outcome like any other.

A suite is a module whose ``--child FILE`` reads names from standard input and appends an outcome
for each to the file (``answer``). The parent (``run_all``) starts a child for all names and, when
it dies, another for what is left behind the name at which it did.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120.0  # for one name, unless a suite says otherwise


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one name: "compiled", "eager", "failed" or "left out"."""

    name: str
    status: str
    reason: str = ""
    gradients: str = ""  # "agree" where they were compared
    differentiable: bool = False


def command(
    module: str,
    doc: str | None,
    names: Callable[[], Sequence[str]],
    check: Callable[[str], Outcome],
    table: Callable[[Sequence[Outcome]], Iterable[str]],
    arguments: list[str] | None = None,
    *,
    limit_s: float = LIMIT_S,
) -> int:
    """``python -m MODULE``: the suite's names, or some of them, checked in children; its page.

    The exit status is 1 if a check failed.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=doc)
    parser.add_argument("--sample", type=int, help="about so many, evenly spread")
    parser.add_argument("--match", default="", help="only names with this in them")
    parser.add_argument("--out", help="write the Markdown page there")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        answer(Path(given.child), check)
        return 0
    chosen = [name for name in names() if given.match in name]
    if given.sample:
        chosen = chosen[:: max(len(chosen) // given.sample, 1)]
    outcomes = run_all(module, chosen, report_progress, limit_s=limit_s)
    text = "\n".join(table(outcomes)) + "\n"
    if given.out:
        Path(given.out).write_text(text)
    print(text)
    return int(any(o.status == "failed" for o in outcomes))


def answer(out: Path, check: Callable[[str], Outcome]) -> None:
    """The child's part: an outcome for every name on standard input."""
    with out.open("a") as file:
        for name in sys.stdin.read().split():
            # Says that it is alive, and is the line on which a parent sees time go by.
            file.write(json.dumps({"begins": name}) + "\n")
            file.flush()
            file.write(json.dumps(asdict(check(name))) + "\n")
            file.flush()


def run_all(
    module: str,
    names: Sequence[str],
    tell: Callable[[int, int], None] = lambda *_: None,
    *,
    limit_s: float = LIMIT_S,
) -> list[Outcome]:
    """Outcomes in order; each child runs until it ends, dies, or one name takes too long."""
    left, outcomes = list(names), []
    while left:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "lines"
            process = subprocess.Popen(
                [sys.executable, "-m", module, "--child", str(out)],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                cwd=ROOT, env={**os.environ, "TORCH_PRUNER_CACHE_DIR": folder}, text=True,
            )  # fmt: skip
            assert process.stdin is not None
            process.stdin.write("\n".join(left))
            process.stdin.close()
            found, died = _watch(process, out, limit_s)
        outcomes += found
        left = left[len(found) :]
        if died and left:
            outcomes.append(Outcome(left.pop(0), "failed", died))
        tell(len(outcomes), len(names))
    return outcomes


def _watch(process: subprocess.Popen[str], out: Path, limit_s: float) -> tuple[list[Outcome], str]:
    """What a child reported, and why it ended too early if it did."""
    seen, since = 0, time.monotonic()
    while process.poll() is None:
        time.sleep(0.2)
        size = out.stat().st_size if out.exists() else 0
        if size != seen:
            seen, since = size, time.monotonic()
        elif time.monotonic() - since > limit_s:
            process.kill()
            process.wait()
            return _outcomes(out), f"no answer within {limit_s:g} s"
    status = process.returncode
    return _outcomes(out), "" if status == 0 else f"the process ended with {status}"


def _outcomes(out: Path) -> list[Outcome]:
    lines = out.read_text().splitlines() if out.exists() else []
    return [Outcome(**d) for line in lines if "begins" not in (d := json.loads(line))]


def compare(got: Any, expected: Any) -> None:
    """Equal values of equal types; numbers as close as torch's own tests ask, a little less."""
    import torch
    from torch.utils import _pytree as pytree

    a, b = pytree.tree_leaves(got), pytree.tree_leaves(expected)
    assert len(a) == len(b), f"{len(a)} results, not {len(b)}"
    for x, y in zip(a, b, strict=True):
        if not isinstance(y, torch.Tensor):
            assert type(x) is type(y), f"a {type(x).__name__}, not a {type(y).__name__}"
            assert x == y or x != x, f"{x!r}, not {y!r}"
            continue
        half = y.dtype in (torch.bfloat16, torch.float16)
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if half else {"rtol": 1e-4, "atol": 1e-5}
        if not (y.is_floating_point() or y.is_complex()):
            tolerance = {"rtol": 0, "atol": 0}
        torch.testing.assert_close(x, y, equal_nan=True, **tolerance)


def compare_gradients(mine: tuple[Any, list[Any]], theirs: tuple[Any, list[Any]]) -> None:
    import torch
    from torch.utils import _pytree as pytree

    found = []
    for result, inputs in (mine, theirs):
        outs = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        outs = [t for t in outs if t.requires_grad]
        wanted = [t for t in inputs if t.requires_grad]
        if not outs or not wanted:
            return
        random = torch.Generator().manual_seed(0)  # ones would cancel behind a normalisation
        seeds = [torch.randn(t.shape, dtype=t.dtype, generator=random) for t in outs]
        found.append(torch.autograd.grad(outs, wanted, seeds, allow_unused=True))
    for x, y in zip(*found, strict=True):
        # An unused input has no gradient, or one of zeros.
        if x is not None and y is not None:
            compare(x, y)
        else:
            assert all(t is None or not t.any() for t in (x, y)), "a gradient that is not there"


def report_progress(done: int, of: int) -> None:
    print(f"{done} of {of}", file=sys.stderr, flush=True)


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
