"""A thousand small functions, strictly compiled, against eager: as inductor tests itself.

    python -m tests.suites.cases --out docs/cases.md --jobs 2     all
    python -m tests.suites.cases --sample 40                      about so many

Each is called three times with other arguments (and sizes, where they are dynamic), backward where
something wants a gradient. Compared are values with the signs of zeros and the places of infinities
and NaN, dtypes, strides, who shares memory with whom, arguments as they are left, gradients and how
many random numbers were drawn; what eager raises, the compiled function has to raise.
"""

from __future__ import annotations

import collections
import functools
import sys
from typing import TYPE_CHECKING, Any

from tests.suites.isolated import Outcome, cell, command

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.suites.case_values import Case

OPTIONS = {"effort": "none", "strict": True}
CALLS = 3


@functools.cache
def by_name() -> dict[str, Case]:
    from tests.suites import case_memory, case_values

    families = (*case_values.FAMILIES, *case_memory.FAMILIES)
    found = [case for family in families for case in family()]
    assert len({case.name for case in found}) == len(found)
    return {case.name: case for case in found}


def check(name: str) -> Outcome:
    """One case. Raises nothing."""
    import torch

    import torch_pruner
    from torch_pruner.dynamo.run import reports

    case = by_name()[name]
    torch._dynamo.reset()
    reports.begin()
    settings = ("capture_scalar_outputs", "capture_dynamic_output_shape_ops")
    try:
        with torch._dynamo.config.patch(dict.fromkeys(settings, case.values)):
            _compare(case)
    except AssertionError as err:
        return Outcome(name, "failed", f"wrong: {str(err).strip()}"[:240])
    except Exception as err:  # any failure is a line of the table
        return Outcome(name, "failed", f"{type(err).__name__}: {str(err).strip()}"[:240])
    report = torch_pruner.last_report()
    if report is None or not report.ops_compiled:
        return Outcome(name, "eager")
    return Outcome(name, "partly" if report.ops_fallback else "compiled")


def _compare(case: Case) -> None:
    import torch

    from tests.compile.agreement import assert_same, observe

    compiled = torch.compile(case.fn, backend="pruner", dynamic=case.dynamic, options=OPTIONS)
    for k in range(CALLS):
        make = functools.partial(case.make, k)
        try:
            expected = observe(case.fn, make, k)
        except (RuntimeError, IndexError, ValueError, TypeError) as err:
            _raises(type(err), functools.partial(observe, compiled, make, k))
            continue
        got = observe(compiled, make, k)
        assert_same(got, expected)
        pairs = [*zip(got.outputs, expected.outputs, strict=True)]
        for mine, theirs in (*pairs, *zip(got.inputs, expected.inputs, strict=True)):
            _same_zeros(mine, theirs)


def _raises(kind: type[Exception], call: Any) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}, which eager raises")


def _same_zeros(mine: Any, theirs: Any) -> None:
    import torch

    if not isinstance(theirs, torch.Tensor) or not theirs.is_floating_point():
        return
    zero = (mine == 0) & (theirs == 0)
    signs = [torch.signbit(t.detach())[zero] for t in (mine, theirs)]
    assert torch.equal(*signs), "a zero of the other sign"


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The page in Markdown."""
    count = collections.Counter(o.status for o in outcomes)
    wrong = sum(o.reason.startswith("wrong") for o in outcomes)
    compiled = count["compiled"] + count["partly"]
    yield "# Cases"
    yield ""
    yield "Written by `python -m tests.suites.cases`, which says what is compared."
    yield ""
    yield (
        f"{len(outcomes)} cases: {count['compiled']} compiled, {count['partly']} partly,"
        f" {count['eager']} run in eager, {wrong} wrong, {count['failed'] - wrong} raise what eager"
        f" does not. {100 * compiled / max(len(outcomes), 1):.0f} % ran compiled."
    )
    yield ""
    yield "| family | compiled | partly | eager | fail |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    families: dict[str, collections.Counter[str]] = {}
    for o in outcomes:
        families.setdefault(o.name.split("-")[0], collections.Counter())[o.status] += 1
    for family, found in families.items():
        numbers = (found[s] for s in ("compiled", "partly", "eager", "failed"))
        yield f"| {family} | " + " | ".join(map(str, numbers)) + " |"
    if count["failed"]:
        yield ""
        yield "| fails | reason |"
        yield "| --- | --- |"
        yield from (f"| {o.name} | {cell(o.reason)} |" for o in outcomes if o.status == "failed")
    yield ""
    yield "In eager: " + ", ".join(o.name for o in outcomes if o.status == "eager")


def main(arguments: list[str] | None = None) -> int:
    return command("tests.suites.cases", __doc__, lambda: list(by_name()), check, table, arguments)


if __name__ == "__main__":
    sys.exit(main())
