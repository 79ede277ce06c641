"""Random programs of a dozen operators, strictly compiled, against eager.

    python -m tests.suites.programs --out docs/programs.md --jobs 2     all
    python -m tests.suites.programs --sample 40                         about so many
    python -m tests.suites.programs --match 117                         all that have 117 in them

Every number is a program: a module with parameters, whose lines a generator seeded with that number
has chosen (``program_lines``), views and writes into values and arguments among them. It is called
three times with other numbers and parameters, backward where it can be. ``sizes-NUMBER`` is another
program, compiled once for all sizes, of which every call has others, ``autocast-NUMBER`` one in a
region of autocast. ``card-NUMBER`` is the program of the number on a pretended card, whose kernels
are loops here, and ``emulated-NUMBER`` on one that runs their CUDA C (``tests.gpu.pretend_gpu``).
Compared are dtypes, shapes, strides, who shares memory with whom, arguments as they are left and
how many random numbers were drawn, as in ``tests.suites.cases``; numbers and gradients may be no
further from the same program in double precision than some times what eager is. ``text_of(NAME)``
is the program.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

from tests.suites.isolated import AS_CAPTURED, Outcome, cell, command
from tests.suites.program_lines import HALVES, Program, Writer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

COUNT, CALLS = 1000, 3
SIZES, AUTOCAST, CARD, EMULATED = "sizes-", "autocast-", "card-", "emulated-"
TITLES = {  # of programs whose names begin so, and how many there are
    "": ("", COUNT),
    SIZES: ("Sizes that change", 400),
    AUTOCAST: ("Autocast", 200),
    CARD: ("On a pretended card", 300),
    EMULATED: ("On an emulated card", 100),
}
OPTIONS = {"effort": "none", "strict": True}
# A difference from double precision may be so many times eager's, and so much of the largest
# number, and as much as cancelled sums leave.
TIMES = 20.0
SHARE = {"float32": 3e-5, "bfloat16": 6e-2, "float16": 6e-2, "float64": 1e-9}
LEAST = 1e-5
UNSURE = (0.002, 0.02)  # of integers that floats decide; with floats of half of the bits
ANY = 1e30  # as a tolerance: numbers are compared here


def program(name: str) -> Program:
    kind = _kind(name)
    number = int(name.removeprefix(kind))
    return Writer(number, changing=kind == SIZES, autocast=kind == AUTOCAST).write()


def _kind(name: str) -> str:
    return name.rstrip("0123456789")


def text_of(name: str) -> str:
    """The program as text, its arguments and parameters as comments."""
    found = program(name)
    heads = [
        f"x{k}: {dtype} {', then '.join(map(str, [shape, *(shapes[k] for shapes in found.later)]))}"
        for k, (shape, dtype) in enumerate(found.given)
    ]
    heads += [f"self.p{k}: {shape}" for k, shape in enumerate(found.parameters)]
    heads.append(f"gradients: {found.gradients}")
    return "".join(f"# {head}\n" for head in heads) + found.text


def check(name: str) -> Outcome:
    """One program. Raises nothing."""
    import torch

    import torch_pruner
    from torch_pruner.dynamo.run import reports

    found, reason = program(name), ""
    torch._dynamo.reset()
    reports.begin()
    try:
        with _device(_kind(name)):
            compared = _compare(found, "pruner", options=OPTIONS)
    except AssertionError as err:
        reason = f"wrong: {str(err).strip()}"
    except Exception as err:  # any failure is a line of the table
        reason = f"{type(err).__name__}: {str(err).strip()}"
    report = torch_pruner.last_report()
    if reason:
        return Outcome(
            name, *(("left out", AS_CAPTURED) if _torch_fails(found) else ("failed", reason[:240]))
        )
    if not compared:
        return Outcome(name, "left out", "eager raises")
    if report is None or not report.ops_compiled:
        return Outcome(name, "eager")
    return Outcome(name, "partly" if report.ops_fallback else "compiled")


@contextlib.contextmanager
def _device(kind: str) -> Iterator[None]:
    """Where programs of a kind are compiled for."""
    if kind not in (CARD, EMULATED):
        yield
        return
    import pytest
    import torch

    from tests.gpu import pretend_gpu
    from torch_pruner.cards import CARDS

    card = CARDS["h200"] if kind == EMULATED else None
    exact = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)  # as eager is here
    with exact, pytest.MonkeyPatch.context() as patch, pretend_gpu.instead_of_cpu(patch, card):
        yield


def _torch_fails(found: Program) -> bool:
    """Whether torch's own capture is not as eager either."""
    import torch

    torch._dynamo.reset()
    try:
        _compare(found, "aot_eager")
    except Exception:  # whatever it is, it is torch's
        return True
    return False


def _compare(found: Program, backend: str, **how: Any) -> bool:
    """Whether there was something to compare: eager runs the program."""
    import torch

    from tests.compile.agreement import assert_same, observe

    mine, theirs, exact = found.module(), found.module(), found.module(double=True)
    compiled = torch.compile(mine, backend=backend, dynamic=True if found.later else None, **how)
    for call in range(CALLS):
        make = functools.partial(found.arguments, call)
        try:
            expected = observe(theirs, make, call)
        except (RuntimeError, LookupError, ValueError, TypeError):
            return False
        truth = observe(exact, functools.partial(found.arguments, call, double=True), call)
        got = observe(compiled, make, call)
        assert_same(got, expected, ANY)
        limits = functools.partial(_near, narrow=found.narrow)
        for where in ("outputs", "inputs"):
            three = (getattr(one, where) for one in (got, expected, truth))
            for k, (a, b, t) in enumerate(zip(*three, strict=True)):
                limits(a, b, t, where=f"call {call}, {where} {k}")
        named = zip(mine.named_parameters(), theirs.parameters(), exact.parameters(), strict=True)
        for (name, p), q, t in named:
            limits(p.grad, q.grad, t.grad, where=f"call {call}, gradient of {name}")
            p.grad = q.grad = t.grad = None
        for module in (mine, theirs, exact):
            _renew(module, call)
    return True


def _renew(module: Any, call: int) -> None:
    """Other parameters for the next call, in place, and as exact in single as in double precision:
    what a kernel has packed of them is to be packed again."""
    import torch

    with torch.no_grad():
        for p in module.parameters():
            p.neg_() if call % 2 == 0 else p.copy_(p.flip(0))


def _near(mine: Any, theirs: Any, truth: Any, *, narrow: bool, where: str) -> None:
    """No further from double precision than some times what eager is."""
    import torch

    if not isinstance(theirs, torch.Tensor):
        assert (mine is None) == (theirs is None), f"{where}: {mine}, eager {theirs}"
        return
    if not theirs.is_floating_point():
        other = (mine != theirs).double().mean().item()
        assert other <= UNSURE[narrow], f"{where}: {other:.1%} are other integers"
        return
    dtype = str(theirs.dtype).removeprefix("torch.")
    mine, theirs, exact = (t.detach().double() for t in (mine, theirs, truth))
    numbers = torch.isfinite(exact) & torch.isfinite(theirs)
    if not numbers.any():
        return
    own, eager = ((t - exact)[numbers].abs().max().item() for t in (mine, theirs))
    largest = exact[numbers].abs().max().item()
    limit = TIMES * eager + SHARE[HALVES[0] if narrow else dtype] * largest + LEAST
    assert own <= limit, f"{where}: off by {own:.3g}, eager {eager:.3g}, of {largest:.3g}"


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The page in Markdown."""
    yield "# Programs"
    yield ""
    yield "Written by `python -m tests.suites.programs`, which says what is compared."
    for kind, (title, there) in TITLES.items():
        if own := [o for o in outcomes if _kind(o.name) == kind]:
            yield from ["", f"## {title}"] if title else []
            yield ""
            yield from _section(own, there)


def _section(outcomes: Sequence[Outcome], there: int) -> Iterator[str]:
    count = collections.Counter(o.status for o in outcomes)
    wrong = sum(o.reason.startswith("wrong") for o in outcomes)
    yield (
        f"{len(outcomes)} of {there} programs: {count['compiled']} compiled, {count['partly']}"
        f" partly, {count['eager']} run in eager, {count['left out']} left out (eager raises, or"
        " torch's own capture is not as eager),"
        f" {wrong} wrong, {count['failed'] - wrong} raise what"
        " eager does not."
    )
    if count["failed"]:
        yield ""
        yield "| fails | reason |"
        yield "| --- | --- |"
        yield from (f"| {o.name} | {cell(o.reason)} |" for o in outcomes if o.status == "failed")


def main(arguments: list[str] | None = None) -> int:
    def names() -> list[str]:
        return [f"{kind}{n}" for kind, (_, count) in TITLES.items() for n in range(count)]

    return command("tests.suites.programs", __doc__, names, check, table, arguments)


if __name__ == "__main__":
    sys.exit(main())
