"""Pointwise operators as TIR: values against eager PyTorch, float64 numpy and Python's integers."""

from __future__ import annotations

import itertools
import math
import operator
import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from torch_pruner.codegen.build.lower import compile_module
from torch_pruner.codegen.build.spill import spill
from torch_pruner.codegen.tir import scalar
from torch_pruner.codegen.tir.builders import VECTORIZED, S, T, buffer, index_var, loop, tvm
from torch_pruner.codegen.tir.intrinsics import rarely
from torch_pruner.codegen.tir.reader import POSITION
from torch_pruner.codegen.tir.vmath import Bindings
from torch_pruner.graph.ops import BINARY, COMPARISONS, FLOATS, ITEMSIZE, UNARY
from torch_pruner.target import TargetSpec

pytestmark = pytest.mark.tvm

LANES = 16
INF, NAN = math.inf, math.nan
PREDICATES = COMPARISONS | {
    "isnan", "isinf", "logical_not", "logical_and", "logical_or", "logical_xor",
}  # fmt: skip
VECTOR_MATH = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh", "sigmoid", "erf", "erfc",
    "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "atanh", "asinh", "acosh",
)  # fmt: skip
INTEGERS = tuple(d for d in ITEMSIZE if d not in FLOATS and d != "bool")
FLOAT_ONLY = frozenset((*VECTOR_MATH, "sqrt", "rsqrt", "reciprocal", "div", "atan2"))
NOT_FLOAT = frozenset(
    ("bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor", "shift_left", "shift_right")
)
SPECIAL = (
    0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, 1e-3, -1e-3, 87.0, 88.8, -88.0, -104.0,
    1e4, -1e4, 1e9, 1e-30, -1e-30, 3e38, -3e38, INF, -INF, NAN,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One kernel: an operator on dtypes, with a constant for operands that are given as numbers."""

    op: str
    operands: tuple[str | float, ...]
    dtype: str

    @property
    def name(self) -> str:
        text = "_".join((self.op, *map(str, self.operands), self.dtype))
        return re.sub(r"\W", "m", text)


def kernel(case: Case, numel: int):
    """``out[i] = op(in[i], ...)`` in vectors of 16 lanes."""
    inputs = [T.decl_buffer((numel,), d, "x") for d in case.operands if isinstance(d, str)]
    out = T.decl_buffer((numel,), case.dtype, "out")
    constant = next((d for d in case.operands if isinstance(d, str)), case.dtype)

    def lane(o, v):
        loads = iter(inputs)
        at = o * LANES + v
        args = [
            next(loads)[at] if isinstance(d, str) else T.const(d, constant) for d in case.operands
        ]
        value = scalar.apply(case.op, args, case.dtype)
        return S.BufferStore(out, value, [o * LANES + v])

    body = loop(numel // LANES, lambda o: loop(LANES, lambda v: lane(o, v), VECTORIZED, "v"))
    func = T.PrimFunc([*inputs, out], body)
    return func.with_attr({"global_symbol": case.name, "tirx.noalias": True})


def build(functions):
    config = {"tirx.disable_storage_rewrite": True, "tirx.disable_cse_tir": True}
    with tvm.transform.PassContext(config=config):
        module = spill(tvm.IRModule(functions))
        return tvm.tirx.build(module, tvm.target.Target(dict(TargetSpec.resolve("auto").attrs)))


def aligned(values, dtype: str) -> torch.Tensor:
    """A tensor with torch's own (64-byte) alignment."""
    source = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.array(values))
    return torch.empty(source.shape, dtype=getattr(torch, dtype)).copy_(source)


def float_pairs(dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(3)
    grid = np.array(list(itertools.product(SPECIAL, SPECIAL))).T
    more = rng.normal(size=(2, 4096 - grid.shape[1])) * rng.choice([0.1, 1, 10, 300], 2)[:, None]
    both = np.concatenate([grid, more], axis=1)
    return aligned(both[0], dtype), aligned(both[1], dtype)


def integer_pairs(dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    info = torch.iinfo(getattr(torch, dtype))
    edges = {info.min, info.min + 1, -7, -2, -1, 0, 1, 2, 3, 5, 31, 63, info.max}
    edges = sorted(v for v in edges if v >= info.min)
    grid = list(itertools.product(edges, edges))
    rng = np.random.default_rng(4)
    more = rng.integers(info.min, info.max, (512 - len(grid), 2), dtype=np.int64, endpoint=True)
    x, y = zip(*grid, *more.tolist(), strict=True)
    return (
        aligned(torch.tensor(x, dtype=getattr(torch, dtype)), dtype),
        aligned(torch.tensor(y, dtype=getattr(torch, dtype)), dtype),
    )


def result_dtype(op: str, dtype: str) -> str:
    return "bool" if op in PREDICATES else dtype


def ops_for(dtype: str) -> list[str]:
    """All operators of the dtypes that are computed on as they are, some of the others."""
    skip = NOT_FLOAT if dtype in FLOATS else FLOAT_ONLY
    ops = [op for op in (*UNARY, *BINARY) if op != "cast" and op not in skip]
    return (
        ops
        if dtype in ("float32", "float64", "int64", "int32", "uint8")
        else [op for op in ops if op in SOME]
    )


SOME = frozenset(
    (
        "neg", "abs", "round", "exp", "sqrt", "isnan", "add", "mul", "div", "floordiv", "maximum",
        "eq", "shift_right", "sign", "pow",
    )
)  # fmt: skip


def all_cases() -> dict[Case, int]:
    cases: dict[Case, int] = {}
    for dtype in (*FLOATS, *INTEGERS):
        numel = 4096 if dtype in FLOATS else 512
        for op in ops_for(dtype):
            operands = (dtype,) * (1 if op in UNARY else 2)
            cases[Case(op, operands, result_dtype(op, dtype))] = numel
        cases[Case("where", ("bool", dtype, dtype), dtype)] = numel
        for other in ITEMSIZE:
            if other != dtype:
                cases[Case("cast", (dtype,), other)] = numel
    for power in POWERS:
        cases[Case("pow", ("float32", power), "float32")] = 4096
    for op, operands in CONSTANTS:
        cases[Case(op, operands, result_dtype(op, "float32"))] = 4096
    return cases


POWERS = (0.0, 0.5, -0.5, 1.0, 2.0, 3.0, 4.0, -1.0, -2.0, 1.7)
CONSTANTS = (
    ("mul", ("float32", 0.0)), ("mul", (0.0, "float32")), ("div", ("float32", 0.0)),
    ("div", (0.0, "float32")), ("add", ("float32", 0.0)), ("sub", (0.0, "float32")),
    ("mul", ("float32", 1.0)), ("maximum", ("float32", 0.0)), ("eq", ("float32", 0.0)),
    ("maximum", (0.0, "float32")), ("minimum", ("float32", 6.0)), ("minimum", (6.0, "float32")),
    ("maximum", ("float32", math.nan)), ("minimum", (math.nan, "float32")),
)  # fmt: skip


@pytest.fixture(scope="module")
def library():
    return build({case.name: kernel(case, numel) for case, numel in all_cases().items()})


def run(library, case: Case, *inputs: torch.Tensor) -> torch.Tensor:
    out = torch.empty(inputs[0].shape, dtype=getattr(torch, case.dtype))
    library[case.name](*inputs, out)
    return out


def remainder(fmod):
    return lambda x, y: torch.from_numpy(fmod(x.numpy(), y.numpy()))


EXACT = {"fmod": remainder(np.fmod), "mod": remainder(np.mod)}  # eager vectorises inexactly
EAGER = {
    "floordiv": torch.floor_divide, "mod": torch.remainder,
    "truncdiv": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "shift_left": torch.bitwise_left_shift, "shift_right": torch.bitwise_right_shift,
}  # fmt: skip
TOLERANCE = {"float32": 2e-6, "float64": 1e-14, "float16": 2e-3, "bfloat16": 1.6e-2}


def same(actual: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
    if not expected.dtype.is_floating_point:
        assert torch.equal(actual, expected)
        return
    tiny = torch.finfo(torch.float32).tiny if dtype == "float32" else 0.0  # denormals may flush
    torch.testing.assert_close(
        actual, expected, rtol=TOLERANCE[dtype], atol=max(tiny, 1e-300), equal_nan=True
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("op", "dtype"), [(o, d) for d in sorted(FLOATS) for o in ops_for(d)])
def test_floats_agree_with_eager(library, op, dtype):
    pair = float_pairs(dtype)[: 1 if op in UNARY else 2]
    eager = EAGER.get(op) or getattr(torch, op)
    actual = run(library, Case(op, (dtype,) * len(pair), result_dtype(op, dtype)), *pair)
    if op in FLOAT_ONLY or op in EXACT:  # in float64: eager overflows and underflows early
        wide = EXACT.get(op, eager)(*(x.double() for x in pair))
        expected = wide.to(getattr(torch, dtype))
    else:
        expected = eager(*pair)
    same(actual, expected, dtype)


@pytest.mark.parametrize("power", POWERS)
def test_constant_exponents(library, power):
    x, _ = float_pairs("float32")
    actual = run(library, Case("pow", ("float32", power), "float32"), x)
    same(actual, torch.pow(x, power), "float32")


@pytest.mark.parametrize(("op", "operands"), CONSTANTS)
def test_constants_keep_nan_and_infinity(library, op, operands):
    x, _ = float_pairs("float32")
    args = [x if isinstance(d, str) else torch.tensor(d) for d in operands]
    actual = run(library, Case(op, operands, result_dtype(op, "float32")), x)
    same(actual, getattr(torch, op)(*args), "float32")


def wrap(value: int, dtype: str) -> int:
    bits = 8 * ITEMSIZE[dtype]
    value %= 1 << bits
    return value - (1 << bits) if dtype != "uint8" and value >> (bits - 1) else value


def truncated(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def power(x: int, y: int, dtype: str) -> int:
    if y >= 0:
        return pow(x, y, 1 << 64)
    return {1: 1, -1: 1 - 2 * (y % 2)}.get(x, 0)


def shifted(x: int, y: int, dtype: str, *, left: bool) -> int:
    if not 0 <= y < 8 * ITEMSIZE[dtype]:
        return 0 if left or x >= 0 else -1
    return x << y if left else x >> y


def python_integer(op: str, dtype: str, x: int, y: int) -> int | bool:
    table = {
        "neg": lambda: -x, "abs": lambda: abs(x), "sign": lambda: (x > 0) - (x < 0),
        "relu": lambda: max(x, 0), "bitwise_not": lambda: ~x, "floor": lambda: x,
        "ceil": lambda: x, "trunc": lambda: x, "round": lambda: x, "isnan": lambda: False,
        "isinf": lambda: False, "logical_not": lambda: not x, "add": lambda: x + y,
        "sub": lambda: x - y, "mul": lambda: x * y, "maximum": lambda: max(x, y),
        "minimum": lambda: min(x, y), "floordiv": lambda: x // y if y else 0,
        "mod": lambda: x % y if y else 0, "truncdiv": lambda: truncated(x, y) if y else 0,
        "fmod": lambda: x - truncated(x, y) * y if y else 0,
        "pow": lambda: power(x, y, dtype), "eq": lambda: x == y, "ne": lambda: x != y,
        "lt": lambda: x < y, "le": lambda: x <= y, "gt": lambda: x > y, "ge": lambda: x >= y,
        "logical_and": lambda: bool(x and y), "logical_or": lambda: bool(x or y),
        "logical_xor": lambda: bool(x) != bool(y), "bitwise_and": lambda: x & y,
        "bitwise_or": lambda: x | y, "bitwise_xor": lambda: x ^ y,
        "shift_left": lambda: shifted(x, y, dtype, left=True),
        "shift_right": lambda: shifted(x, y, dtype, left=False),
    }  # fmt: skip
    return table[op]()


@pytest.mark.parametrize(("op", "dtype"), [(o, d) for d in INTEGERS for o in ops_for(d)])
def test_integers_wrap_and_never_trap(library, op, dtype):
    x, y = integer_pairs(dtype)
    arity = 1 if op in UNARY else 2
    case = Case(op, (dtype,) * arity, result_dtype(op, dtype))
    actual = run(library, case, *(x, y)[:arity]).tolist()
    values = [python_integer(op, dtype, a, b) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    expected = values if case.dtype == "bool" else [wrap(v, dtype) for v in values]
    assert actual == expected


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("source", "target"),
    [(s, t) for s in (*sorted(FLOATS), *INTEGERS) for t in ITEMSIZE if s != t],
)
def test_casts_agree_with_eager(library, source, target):
    x = (float_pairs if source in FLOATS else integer_pairs)(source)[0]
    actual = run(library, Case("cast", (source,), target), x)
    expected = x.to(getattr(torch, target))
    if source in FLOATS and target in INTEGERS:  # eager is undefined out of range
        inside = x.double().abs() < (2.0**31 if target != "int64" else 2.0**63)
        lowest = torch.iinfo(getattr(torch, target)).min if target in ("int32", "int64") else 0
        assert bool((actual[~inside] == lowest).all())
        if target not in ("int32", "int64"):
            expected = x.to(torch.int32).to(expected.dtype)
        actual, expected = actual[inside], expected[inside]
    assert torch.equal(
        actual.nan_to_num(7) if target in FLOATS else actual,
        expected.nan_to_num(7) if target in FLOATS else expected,
    )


REFERENCE = {
    "sigmoid": lambda v: 1 / (1 + np.exp(-v)),
    "erf": lambda v: torch.erf(torch.from_numpy(v)).numpy(),
    "erfc": lambda v: torch.erfc(torch.from_numpy(v)).numpy(),
    **{
        name: getattr(np, f"arc{name[1:]}")
        for name in ("asin", "acos", "atan", "atanh", "asinh", "acosh")
    },
}


@pytest.fixture(scope="module")
def float_sample() -> torch.Tensor:
    """Bit patterns from the whole range, and many values where the functions are not trivial."""
    rng = np.random.default_rng(0)
    everywhere = rng.integers(0, 2**32, 1 << 17, dtype=np.uint64).astype(np.uint32).view(np.float32)
    near = rng.uniform(-12, 12, 1 << 17).astype(np.float32)
    small = (rng.normal(size=1 << 17) * 0.3).astype(np.float32)
    return aligned(np.concatenate([everywhere, near, small]), "float32")


@pytest.fixture(scope="module")
def large_library(float_sample):
    names = (*VECTOR_MATH, scalar.EXP_AT_MOST_ONE, scalar.EXP_BESIDE_ONE)
    cases = [Case(op, ("float32",), "float32") for op in names]
    return build({case.name: kernel(case, float_sample.numel()) for case in cases})


def test_exp_of_what_does_not_exceed_zero(large_library, float_sample):
    """Within an ulp, and 0 for what is no normal number."""
    x = -float_sample.abs()
    x[:2] = torch.tensor([-INF, NAN])
    actual = run(large_library, Case(scalar.EXP_AT_MOST_ONE, ("float32",), "float32"), x)
    exact = torch.exp(x.double()).float()
    torch.testing.assert_close(actual, exact, rtol=1.2e-7, atol=1.2e-38, equal_nan=True)
    assert float(actual[0]) == 0.0


def test_exp_beside_one(large_library, float_sample):
    """Within an ulp up to infinity, and 0 for what is no normal number twice over."""
    x = float_sample.clone()
    x[:4] = torch.tensor([-INF, NAN, INF, 88.7])
    actual = run(large_library, Case(scalar.EXP_BESIDE_ONE, ("float32",), "float32"), x)
    exact = torch.exp(x.double()).float()
    torch.testing.assert_close(actual, exact, rtol=1.2e-7, atol=2.4e-38, equal_nan=True)


@pytest.mark.parametrize("op", VECTOR_MATH)
def test_vector_math_is_within_four_ulp(large_library, float_sample, op):
    actual = run(large_library, Case(op, ("float32",), "float32"), float_sample).numpy()
    with np.errstate(all="ignore"):
        exact = REFERENCE.get(op, getattr(np, op, None))(float_sample.numpy().astype(np.float64))
        rounded = exact.astype(np.float32)
    assert np.array_equal(np.isnan(actual), np.isnan(exact))
    assert np.array_equal(np.isinf(actual), np.isinf(rounded))
    assert np.array_equal(actual[np.isinf(actual)], rounded[np.isinf(rounded)])
    tiny = np.finfo(np.float32).tiny
    normal = np.isfinite(rounded) & (np.abs(rounded) >= tiny)
    ulp = np.abs(actual.astype(np.float64) - exact)[normal] / np.spacing(np.abs(rounded[normal]))
    assert ulp.max() <= 4
    assert np.abs(actual[np.isfinite(rounded) & ~normal]).max(initial=0) <= 2 * tiny


DOUBLE_MATH = ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh", "sigmoid")
CIRCULAR = ("sin", "cos", "tan")  # which of large numbers are the library's


@pytest.fixture(scope="module")
def double_sample() -> torch.Tensor:
    rng = np.random.default_rng(0)
    everywhere = rng.integers(0, 2**64, 1 << 16, dtype=np.uint64).view(np.float64)
    near, wide = rng.uniform(-12, 12, 1 << 16), rng.uniform(-1100, 1100, 1 << 16)
    about_one = 1 + rng.normal(size=1 << 16) * 1e-3
    edges = np.array([*SPECIAL, 5e-324, 2.3e-308, 709.8, -745.2, 1023.9999, -1074.9] * 2**10)
    return aligned(np.concatenate([everywhere, near, wide, about_one, edges]), "float64")


@pytest.fixture(scope="module")
def double_library(double_sample):
    cases = [Case(op, ("float64",), "float64") for op in DOUBLE_MATH]
    return build({case.name: kernel(case, double_sample.numel()) for case in cases})


@pytest.fixture(scope="module")
def circular_library(double_sample):
    cases = [Case(op, ("float64",), "float64") for op in CIRCULAR]
    return build({case.name: kernel(case, double_sample.numel()) for case in cases})


@pytest.mark.parametrize("op", [*DOUBLE_MATH, *CIRCULAR])
def test_double_math_is_within_three_ulp(request, double_sample, op):
    library = request.getfixturevalue("circular_library" if op in CIRCULAR else "double_library")
    actual = run(library, Case(op, ("float64",), "float64"), double_sample).numpy()
    with np.errstate(all="ignore"):
        function = {"sigmoid": lambda v: 1 / (1 + np.exp(-v))}.get(op, getattr(np, op, None))
        exact = function(double_sample.numpy().astype(np.longdouble))
        rounded = exact.astype(np.float64)
    assert np.finfo(np.longdouble).nmant > 60
    assert np.array_equal(np.isnan(actual), np.isnan(rounded))
    assert np.array_equal(np.isinf(actual), np.isinf(rounded))
    assert np.array_equal(actual[np.isinf(actual)], rounded[np.isinf(rounded)])
    tiny = np.finfo(np.float64).tiny
    normal = np.isfinite(rounded) & (np.abs(rounded) >= tiny)
    off = np.abs(actual.astype(np.longdouble) - exact)[normal]
    assert (off / np.spacing(np.abs(rounded[normal]))).max() <= (3 if op == "tan" else 2.5)
    assert np.abs(actual - rounded)[np.isfinite(rounded) & ~normal].max(initial=0) <= 2 * tiny


@pytest.mark.parametrize("library", ["large_library", "double_library"])
def test_vector_math_calls_no_library(request, library):
    assembly = request.getfixturevalue(library).inspect_source("asm")
    calls = set(re.findall(r"\bcallq?\s+\*?(\w+)", assembly))
    own = {name for name in calls if "tvm" in name.lower() or name.endswith("_compute_")}
    assert calls - own == set()
    assert {16: "xmm", 32: "ymm", 64: "zmm"}[TargetSpec.resolve("auto").vector_bytes] in assembly


@pytest.mark.parametrize("op", ["sub", "div", "eq", "ne", "le", "maximum"])
def test_the_same_operand_twice_is_not_simplified(op):
    """``x - x`` is NaN for infinities and ``x == x`` is false for NaN."""
    x, _ = float_pairs("float32")
    inputs, dtype = T.decl_buffer((x.numel(),), "float32", "x"), result_dtype(op, "float32")
    out = T.decl_buffer((x.numel(),), dtype, "out")

    def lane(i):
        return S.BufferStore(out, scalar.apply(op, [inputs[i], inputs[i]], dtype), [i])

    body = loop(x.numel() // 16, lambda o: loop(16, lambda v: lane(o * 16 + v), VECTORIZED))
    func = T.PrimFunc([inputs, out], body).with_attr({"global_symbol": "twice"})
    actual = torch.empty(x.shape, dtype=getattr(torch, dtype))
    build({"twice": func})["twice"](x, actual)
    same(actual, getattr(torch, op)(x, x), "float32")


def test_rounding_to_bfloat16_survives_a_cast_back():
    x = aligned(np.linspace(-3, 3, 4096), "float32")
    source = T.decl_buffer((4096,), "float32", "x")
    out = T.decl_buffer((4096,), "float32", "out")

    def lane(i):
        narrow = scalar.cast(source[i], "bfloat16")
        return S.BufferStore(out, scalar.cast(narrow, "float32"), [i])

    body = loop(256, lambda o: loop(16, lambda v: lane(o * 16 + v), VECTORIZED))
    func = T.PrimFunc([source, out], body).with_attr({"global_symbol": "narrow"})
    actual = torch.empty(4096)
    build({"narrow": func})["narrow"](x, actual)
    assert torch.equal(actual, x.bfloat16().float())


def chain(depth: int):
    """x * sigmoid(x), nested ``depth`` times: each value is read twice."""
    source, out = buffer(64, "float32", "x"), buffer(64, "float32", "out")

    def lane(i):
        value = source[i]
        for _ in range(depth):
            value = scalar.apply(
                "mul", [value, scalar.apply("sigmoid", [value], "float32")], "float32"
            )
        return S.BufferStore(out, value, [i])

    body = loop(4, lambda o: loop(16, lambda v: lane(o * 16 + v), VECTORIZED))
    return T.PrimFunc([source, out], body).with_attr({"global_symbol": "chain"})


def test_long_chains_compile():
    """Three activations in a row took minutes while their variables were left to TVM."""
    x, actual = aligned(np.linspace(-4, 4, 64), "float32"), torch.empty(64)
    build({"chain": chain(12)})["chain"](x, actual)
    expected = x.double()
    for _ in range(12):
        expected = expected * expected.sigmoid()
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-7)


def test_spilling_leaves_no_definitions():
    module = spill(tvm.IRModule({"chain": chain(3)}))
    text = module.script()
    assert "T.Let" not in text
    assert "torch_pruner.keep" not in text


def test_spilling_guards_loads_under_a_condition():
    """The value of a variable is computed before the ``if`` that it stood in."""
    source, out = buffer(8, "float32", "x"), buffer(16, "float32", "out")

    def lane(v):
        inside = T.all(v >= 4, v < 12)
        value = scalar.apply("exp", [scalar.apply("neg", [source[v - 4]], "float32")], "float32")
        return S.BufferStore(out, T.if_then_else(inside, value, T.const(9.0, "float32")), [v])

    body = loop(16, lane, VECTORIZED, "v")
    func = T.PrimFunc([source, out], body).with_attr({"global_symbol": "pad"})
    x, actual = aligned(np.linspace(-1, 1, 8), "float32"), torch.empty(16)
    build({"pad": func})["pad"](x, actual)
    expected = torch.nn.functional.pad(torch.exp(-x), (4, 4), value=9.0)
    torch.testing.assert_close(actual, expected)


def test_a_position_beside_a_condition_of_lanes():
    """TVM takes such a statement apart, lane by lane, and loses a variable that it reads."""
    source, other, out = (buffer(n, "float32", "x") for n in (20, 20, 32))
    where = buffer(32, "int32", "where")

    def vector(o):
        def lane(v):
            at, position, found = o * 16 + v, index_var(POSITION), index_var("found")
            wrapped = T.min(T.max(found, T.const(0, "int32")), T.const(19, "int32"))
            padded = T.if_then_else(at < 20, source[at], T.const(0.0, "float32"))
            value = T.Select(found < 0, padded, other[position])
            binds = [S.Bind(found, where[at]), S.Bind(position, wrapped)]
            return S.SeqStmt([*binds, S.BufferStore(out, value, [at])])

        return loop(16, lane, VECTORIZED, "v")

    body = loop(2, vector, name="o")
    func = T.PrimFunc([source, other, where, out], body).with_attr({"global_symbol": "both"})
    x, y = (aligned(np.linspace(start, 1, 20), "float32") for start in (-1, 3))
    actual, positions = torch.empty(32), aligned(torch.arange(32) - 20, "int32")
    module = compile_module(tvm.IRModule({"both": func}), TargetSpec.resolve("auto"))
    module["both"](x, y, positions, actual)
    torch.testing.assert_close(actual, torch.cat([x, y[:12]]))


@pytest.mark.parametrize("place", ["vectors", "numbers", "inside", "uninterrupted"])
def test_what_is_rare_is_a_branch(place):
    """Of all lanes of a vector, or of a number; within another loop over the lanes, and where loops
    are not interrupted, it is computed always."""
    source, out = buffer(64, "float32", "x"), buffer(64, "float32", "out")
    zero, nine = T.const(0, "float32"), T.const(9, "float32")

    def lane(i):
        b = Bindings()
        x, after = b(source[i]), b(source[i] + T.const(1.0, "float32"))
        root = rarely(
            b, x < zero, lambda own: T.Select(x < zero, own(T.sqrt(own(T.abs(x)))), after), after
        )
        square = rarely(b, root > nine, lambda own: T.Select(root > nine, own(root * root), x), x)
        return S.BufferStore(out, b.close(square + after * root), [i])

    if place == "inside":
        body = loop(16, lambda v: loop(4, lambda k: lane(k * 16 + v)), VECTORIZED)
    elif place == "numbers":
        body = loop(64, lane)
    else:
        body = loop(4, lambda o: loop(16, lambda v: lane(o * 16 + v), VECTORIZED))
    func = T.PrimFunc([source, out], body).with_attr({"global_symbol": "rare"})
    module = tvm.IRModule({"rare": func})
    spilled = spill(module, interrupts=place != "uninterrupted")
    text = spilled.script()
    assert "torch_pruner.rare" not in text
    assert text.count("    if ") == (2 if place in ("vectors", "numbers") else 0)
    assert text.count("llvm.vector.reduce") == 0 or place == "vectors"
    x, actual = aligned(np.linspace(-20, 20, 64), "float32"), torch.empty(64)
    x[:16] = x[48:]  # of these none is rare
    compile_module(spilled, TargetSpec.resolve("auto"))["rare"](x, actual)
    root = torch.where(x < 0, x.abs().sqrt(), x + 1)
    torch.testing.assert_close(actual, torch.where(root > 9, root * root, x) + (x + 1) * root)


def test_bool_operands():
    pairs = list(itertools.product([False, True], repeat=2)) * 4
    x, y = (aligned(torch.tensor(v), "bool") for v in zip(*pairs, strict=True))
    table = {
        "add": operator.or_, "mul": operator.and_, "maximum": operator.or_,
        "minimum": operator.and_, "logical_xor": operator.xor, "bitwise_and": operator.and_,
        "eq": operator.eq, "lt": lambda a, b: ~a & b,
    }  # fmt: skip
    cases = {op: Case(op, ("bool", "bool"), "bool") for op in table}
    module = build({case.name: kernel(case, 16) for case in cases.values()})
    for op, expected in table.items():
        assert torch.equal(run(module, cases[op], x, y), expected(x, y)), op


@pytest.mark.parametrize("op", ["isnan", "maximum", "minimum"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_nan_is_no_call(op: str, dtype: str) -> None:
    """TVM takes a vector's ``isnan`` apart, lane by lane."""
    args = [T.Var(name, dtype) for name in ("x", "y")][: 1 if op in UNARY else 2]
    assert "isnan" not in str(scalar.apply(op, args, result_dtype(op, dtype)))
