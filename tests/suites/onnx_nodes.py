"""ONNX's own node tests, generated in this process, through ``torch_pruner.onnx``.

    python -m tests.suites.onnx_nodes --out docs/onnx.md       all, compiled (minutes)
    python -m tests.suites.onnx_nodes --eager                  all, operator by operator (seconds)
    python -m tests.suites.onnx_nodes --sample 100             every so many-th, compiled

A test passes if all its outputs have the shape, type and (within its tolerance) the numbers that
ONNX gives. What is left out is named with the reason.
"""

from __future__ import annotations

import argparse
import collections
import re
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.suites.isolated import write_section

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LEFT_OUT = (
    (r"ai_onnx_ml|label_encoder|array_feature|binarizer|tree_ensemble", "domain ai.onnx.ml"),
    (r"_?(adagrad|adam|momentum|nesterov)", "domain of training"),
    (r"string|regex|tfidf|strnorm", "strings, of which torch has no tensors"),
    (r"int4|INT4|uint2|UINT2|int2|INT2|float4|FLOAT4|4e2m1|4E2M1", "types of less than a byte"),
    (r"e8m0|E8M0", "a type of exponents alone"),
    (r"image_decoder", "decoding of image files"),
    (r"training_dropout|bernoulli|random_(normal|uniform)|multinomial", "random numbers"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one test: "passed", "failed" or "left out"."""

    name: str
    status: str
    reason: str = ""


def cases() -> list[Any]:
    """All node tests, in the order of their names."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = collect_testcases(None)
        except TypeError:
            found = collect_testcases()
    return sorted(found, key=lambda c: c.name)


def reason_to_leave_out(case: Any) -> str:
    for pattern, reason in LEFT_OUT:
        if re.search(pattern, case.name):
            return reason
    domains = {node.domain for node in case.model.graph.node}
    if domains - {"", "ai.onnx"} and not case.model.functions:
        return f"another domain: {sorted(domains - {''})[0]}"
    for info in (*case.model.graph.input, *case.model.graph.output):
        if info.type.tensor_type.elem_type == 8:
            return "strings, of which torch has no tensors"
    return ""


def run(case: Any, options: dict[str, Any] | None) -> Outcome:
    """One test; without ``options`` operator by operator."""
    from torch_pruner.onnx.backend import PrunerRep, _array, _tensor
    from torch_pruner.onnx.function import OnnxFunction
    from torch_pruner.onnx.load import load

    if reason := reason_to_leave_out(case):
        return Outcome(case.name, "left out", reason)
    try:
        function = OnnxFunction(load(case.model), None, options)
        for inputs, outputs in (map(arrays, pair) for pair in case.data_sets):
            if options is None:
                got: Sequence[Any] = [
                    _array(v) for v in function.eager([_tensor(v) for v in inputs])
                ]
            else:
                got = PrunerRep(function).run(list(inputs))
            if len(got) < len(outputs):
                return Outcome(case.name, "failed", f"{len(got)} outputs, not {len(outputs)}")
            for mine, theirs in zip(got, outputs, strict=False):
                compare(mine, theirs, case.rtol, case.atol)
    except Exception as err:  # any failure is a line of the table
        return Outcome(case.name, "failed", f"{type(err).__name__}: {str(err).strip()[:160]}")
    return Outcome(case.name, "passed")


def arrays(values: Sequence[Any]) -> list[Any]:
    """Test data as arrays; some of it comes as tensors of ONNX."""
    from onnx import TensorProto, numpy_helper

    return [numpy_helper.to_array(v) if isinstance(v, TensorProto) else v for v in values]


def compare(mine: Any, theirs: Any, rtol: float, atol: float) -> None:
    if isinstance(theirs, (list, tuple)):
        assert len(mine) == len(theirs), f"{len(mine)} items, not {len(theirs)}"
        for a, b in zip(mine, theirs, strict=True):
            compare(a, b, rtol, atol)
        return
    if theirs is None:
        assert mine is None, "a value where there is none"
        return
    theirs = np.asarray(theirs)
    assert mine.shape == theirs.shape, f"shape {mine.shape}, not {theirs.shape}"
    assert mine.dtype == theirs.dtype, f"type {mine.dtype}, not {theirs.dtype}"
    if theirs.dtype.kind in "biu":
        assert np.array_equal(mine, theirs), "other numbers"
    else:
        a, b = mine.astype(np.complex128), theirs.astype(np.complex128)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def table(outcomes: Sequence[Outcome], how: str) -> Iterator[str]:
    """The Markdown section."""
    count = collections.Counter(o.status for o in outcomes)
    tried = count["passed"] + count["failed"]
    yield f"Written by `python -m tests.suites.onnx_nodes`; models run {how}."
    yield ""
    share = 100 * count["passed"] / max(tried, 1)
    yield f"{count['passed']} of {tried} pass ({share:.1f} %); {count['left out']} are left out."
    yield ""
    yield "| left out because of | tests |"
    yield "| --- | ---: |"
    reasons = collections.Counter(o.reason for o in outcomes if o.status == "left out")
    yield from (f"| {reason} | {n} |" for reason, n in reasons.most_common())
    yield ""
    yield "| fails | reason |"
    yield "| --- | --- |"
    for o in outcomes:
        if o.status == "failed":
            reason = " ".join(o.reason.split()).replace("|", "\\|")
            yield f"| {o.name} | {reason} |"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.suites.onnx_nodes", description=__doc__)
    parser.add_argument("--eager", action="store_true", help="operator by operator")
    parser.add_argument("--sample", type=int, help="about so many tests, evenly spread")
    parser.add_argument("--match", default="", help="only names with this in them")
    parser.add_argument("--out", help="write the section of this Markdown page")
    given = parser.parse_args(arguments)
    chosen = [c for c in cases() if given.match in c.name]
    if given.sample:
        chosen = chosen[:: max(len(chosen) // given.sample, 1)]
    with tempfile.TemporaryDirectory() as folder:
        options = None if given.eager else {"effort": "none", "cache_dir": folder}
        outcomes = []
        for k, case in enumerate(chosen):
            outcomes.append(run(case, options))
            if options and k % 50 == 49:
                import torch

                torch._dynamo.reset()
                print(f"{k + 1} of {len(chosen)}", file=sys.stderr, flush=True)
    how = "operator by operator" if given.eager else "compiled"
    text = "\n".join(table(outcomes, how)) + "\n"
    if given.out:
        write_section(Path(given.out), "ONNX's node tests", text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
