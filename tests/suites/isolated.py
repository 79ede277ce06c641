"""Checks that run in child processes: one that crashes or hangs is an outcome like any other.

A suite is a module whose ``--child FILE`` reads names from standard input and appends an outcome
for each to the file (``answer``). The parent (``run_all``) starts a child for all names and, when
it dies, another for what is left behind the name at which it did.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

ROOT = Path(__file__).resolve().parents[2]
AS_CAPTURED = "as backend aot_eager, which is not as eager"
LIMIT_S = 120.0  # for one name, unless a suite says otherwise


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one name: "compiled", "eager", "failed" or "left out"."""

    name: str
    status: str
    reason: str = ""
    gradients: str = ""  # "agree" where they were compared
    differentiable: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """Of samples that agree: whether TVM compiled anything, and with what they agree."""

    compiled: bool
    captured: bool  # only with what torch's capture gives in eager, which is not what eager gives


def as_captured(outcomes: Sequence[Outcome]) -> Iterable[str]:
    """A paragraph of a page about the names that agree so."""
    if found := [o.name for o in outcomes if o.reason == AS_CAPTURED]:
        yield ""
        yield (
            "Some samples agree with what torch's own capture gives in eager (`aot_eager`) and not"
            " with what eager gives without it: " + ", ".join(found)
        )


def command(
    module: str,
    doc: str | None,
    names: Callable[[], Sequence[str]],
    check: Callable[[str], Outcome],
    table: Callable[[Sequence[Outcome]], Iterable[str]],
    arguments: list[str] | None = None,
    *,
    limit_s: float = LIMIT_S,
    section: str = "",
) -> int:
    """``python -m MODULE``: the suite's names, or some of them, checked in children; its page, or
    its section of one.

    The exit status is 1 if a check failed.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=doc)
    parser.add_argument("--sample", type=int, help="about so many, evenly spread")
    parser.add_argument("--match", default="", help="only names with this in them")
    parser.add_argument("--out", help="write the Markdown page there")
    parser.add_argument("--jobs", type=int, default=1, help="children at a time")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        answer(Path(given.child), check)
        return 0
    chosen = [name for name in names() if given.match in name]
    if given.sample:
        chosen = chosen[:: max(len(chosen) // given.sample, 1)]
    slices = [chosen[i :: given.jobs] for i in range(given.jobs)]
    with ThreadPoolExecutor(given.jobs) as pool:
        run = functools.partial(run_all, module, tell=report_progress, limit_s=limit_s)
        outcomes = [o for found in pool.map(run, slices) for o in found]
    outcomes.sort(key=lambda outcome: chosen.index(outcome.name))
    text = "\n".join(table(outcomes)) + "\n"
    if given.out and section:
        write_section(Path(given.out), section, text)
    elif given.out:
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


def compare(got: Any, expected: Any, truth: Any = None) -> None:
    """Equal values of equal types; numbers as close as torch's own tests ask, a little less.

    With ``truth``, the same in double precision, a number may differ where it is no further from
    that than the one expected: eager rounds, too.
    """
    import torch
    from torch.utils import _pytree as pytree

    a, b = pytree.tree_leaves(got), pytree.tree_leaves(expected)
    exact = [None] * len(b) if truth is None else pytree.tree_leaves(truth)
    assert len(a) == len(b) == len(exact), f"{len(a)} results, not {len(b)}"
    for x, y, t in zip(a, b, exact, strict=True):
        if not isinstance(y, torch.Tensor):
            assert type(x) is type(y), f"a {type(x).__name__}, not a {type(y).__name__}"
            assert x == y or x != x, f"{x!r}, not {y!r}"
            continue
        half = y.dtype in (torch.bfloat16, torch.float16)
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if half else {"rtol": 1e-4, "atol": 1e-5}
        if not (y.is_floating_point() or y.is_complex()):
            tolerance = {"rtol": 0, "atol": 0}
        elif t is not None and x.shape == y.shape == t.shape and x.dtype == y.dtype:
            x = torch.where((x - t).abs() <= (y - t).abs(), y, x)
        torch.testing.assert_close(x, y, equal_nan=True, **tolerance)


def gradients(result: Any, inputs: list[Any]) -> list[Any]:
    """Of a random sum of the results, by each input that wants one; none where there is no way."""
    import torch
    from torch.utils import _pytree as pytree

    outs = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    outs = [t for t in outs if t.requires_grad]
    wanted = [t for t in inputs if t.requires_grad]
    if not outs or not wanted:
        return []
    random = torch.Generator().manual_seed(0)  # ones would cancel behind a normalisation
    wide = {torch.float64: torch.float32, torch.complex128: torch.complex64}
    dtypes = [wide.get(t.dtype, t.dtype) for t in outs]  # the same numbers in double precision
    drawn = [
        torch.randn(t.shape, dtype=d, generator=random) for t, d in zip(outs, dtypes, strict=True)
    ]
    seeds = [seed.to(t.dtype) for seed, t in zip(drawn, outs, strict=True)]
    return list(torch.autograd.grad(outs, wanted, seeds, allow_unused=True))


def compare_gradients(
    mine: Sequence[Any], theirs: Sequence[Any], truth: Sequence[Any] | None = None
) -> None:
    """What ``gradients`` gave of both agrees, as ``compare`` means it."""
    if not mine or not theirs:
        return
    exact = truth or [None] * len(theirs)
    for x, y, t in zip(mine, theirs, exact, strict=True):
        # An unused input has no gradient, or one of zeros.
        if x is not None and y is not None:
            compare(x, y, t)
        else:
            assert all(g is None or not g.any() for g in (x, y)), "a gradient that is not there"


def write_section(page: Path, heading: str, text: str) -> None:
    """Puts ``text`` under a heading of the second level, in place of what is there."""
    lines = page.read_text().splitlines() if page.exists() else []
    title = f"## {heading}"
    begin = lines.index(title) if title in lines else len(lines)
    rest = [k for k in range(begin + 1, len(lines)) if lines[k].startswith("## ")]
    end = rest[0] if rest else len(lines)
    before = [*lines[:begin], *([""] if begin == len(lines) and lines and lines[-1] else [])]
    after = ["", *lines[end:]] if rest else []
    page.write_text("\n".join([*before, title, "", *text.strip().splitlines(), *after]) + "\n")


def report_progress(done: int, of: int) -> None:
    print(f"{done} of {of}", file=sys.stderr, flush=True)


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
