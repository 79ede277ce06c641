"""Kernels that read narrow copies of float32 weights give the bits that float32 weights give."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emitting import schedule
from tests.families import kernels as K
from torch_pruner.codegen.build.lower import aligned, compile_kernel
from torch_pruner.families import sketches_for
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.reference import numpy_dtype
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task

pytestmark = pytest.mark.tvm


def product(rows: int, columns: int, depth: int, dtype: str, *, along: bool) -> Graph:
    b = GraphBuilder()
    x = b.input(0, (rows, depth), "float32")
    w = b.input(1, (columns, depth) if along else (depth, columns), dtype, static=True)
    right = b.permute(w, (1, 0)) if along else w
    total = b.append("matmul", (x, right), (rows, columns), "float32")
    return b.finish([b.pointwise("relu", total)])


def weights(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Numbers of ``dtype``, tiny ones, zeros of both signs and infinity among them."""
    found = np.random.default_rng(1).standard_normal(shape).astype(numpy_dtype(dtype))
    flat = found.reshape(-1)
    flat[::7] = np.array([2.0**-24, -(2.0**-24), 0.0, -0.0], numpy_dtype(dtype)).repeat(
        -(-len(flat[::7]) // 4)
    )[: len(flat[::7])]
    flat[len(flat) // 2] = np.inf
    return found


def run(spec: Graph, family: str, decisions: dict[str, int], weight: np.ndarray) -> np.ndarray:
    kernel = schedule(spec, family, decisions)
    built = compile_kernel(kernel, TargetSpec.detect(2))
    x, _ = K.inputs_for(spec)
    pack = kernel.packs[1]
    laid = weight if pack is None else pack.pack(weight)
    given = aligned(laid.shape, spec.nodes[spec.inputs[1]].dtype)
    given[...] = laid
    out = aligned(kernel.outputs[0].shape, "float32")
    built.bind([x, given, out])()
    result: np.ndarray = out.view(np.uint32)
    return result


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "along"), [(1, True), (3, True), (1, False), (24, True)])
def test_equal_decisions_give_equal_bits(rows: int, along: bool, dtype: str) -> None:
    """Each family that takes the narrow product, at its draft and another point."""
    shape = rows, 80, 144
    spec = product(*shape, dtype, along=along)
    wide = product(*shape, "float32", along=along)
    weight = weights(spec.nodes[spec.inputs[1]].shape, dtype)
    wide_ones = {s.name for s in sketches_for(Task("wide", wide, TargetSpec.detect(2), 2))}
    compared = 0
    for sketch in sketches_for(Task("narrow", spec, TargetSpec.detect(2), 2)):
        if sketch.name not in wide_ones or sketch.name == "metaschedule":
            continue
        for decisions in K.points(sketch, 1):
            got = run(spec, sketch.name, decisions, weight)
            expected = run(wide, sketch.name, decisions, weight.astype(np.float32))
            assert np.array_equal(got, expected), (sketch.name, decisions)
            compared += 1
    assert compared >= 2
