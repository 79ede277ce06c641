"""Positions that wrap around within a loop, of which LLVM's loop vectorizer makes wrong code."""

from __future__ import annotations

import pytest

from torch_pruner.codegen.build.wrapping import wraps_around
from torch_pruner.codegen.tir.builders import (
    VECTORIZED,
    Expr,
    GlobalVar,
    IRModule,
    S,
    Stmt,
    T,
    buffer,
    loop,
    when,
)

pytestmark = pytest.mark.tvm
X, Y = buffer(64, "float32", "x"), buffer(64, "float32", "y")


def module(body: Stmt) -> IRModule:
    return IRModule({GlobalVar("main"): T.PrimFunc([], body)})


def copied(period: int) -> Stmt:
    def one(i: Expr) -> Stmt:
        return when(i < 8, S.BufferStore(Y, X[T.floormod(i, period)], [i]))

    return loop(64, one)


@pytest.mark.parametrize("period", [2, 4, 32])
def test_a_remainder_by_a_power_of_two_wraps_around(period: int) -> None:
    assert wraps_around(module(copied(period)))
    assert wraps_around(module(loop(3, lambda _: copied(period))))


@pytest.mark.parametrize("period", [1, 12, 64])
def test_other_remainders_and_whole_periods_do_not(period: int) -> None:
    assert not wraps_around(module(copied(period)))


def test_loops_around_vectors_are_left_alone_by_llvm() -> None:
    def vectors(i: Expr) -> Stmt:
        begin = T.floormod(i, 4) * 16
        return loop(16, lambda v: S.BufferStore(Y, X[begin + v], [begin + v]), VECTORIZED)

    assert not wraps_around(module(loop(64, vectors)))
