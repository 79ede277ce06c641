"""Timing, checking and framing: the arithmetic of measurement, without a process."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests import fakes
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.graph.precision import allow_tf32
from torch_pruner.graph.reference import evaluate
from torch_pruner.tuner.measure import check
from torch_pruner.tuner.measure.base import EvaluatorSpec
from torch_pruner.tuner.measure.protocol import FrameReader, ProtocolError, encode
from torch_pruner.tuner.measure.timing import CallContext, Reading, Stopwatch, time_together


class Kernel:
    """Takes ``seconds`` of an invented clock per call."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now, self.n_calls = seconds, 0.0, 0

    def __call__(self) -> None:
        self.now += self.seconds
        self.n_calls += 1

    def clock(self) -> float:
        return self.now


def run(calls, spec, clock, best_s=float("inf"), preemptions=lambda: 0):
    watch = Stopwatch(calls, spec, best_s, clock, preemptions)
    time_together([watch])
    return watch.run_secs


def timed(seconds, best_s=float("inf"), **kwargs):
    kernel = Kernel(seconds)
    return run([kernel], EvaluatorSpec(**kwargs), kernel.clock, best_s), kernel


def test_a_repeat_lasts_as_long_as_asked() -> None:
    times, kernel = timed(1e-5, repeat=3, min_repeat_s=2e-3)
    assert times == pytest.approx((1e-5,) * 3)
    assert kernel.now >= 3 * 2e-3


def test_a_slow_first_call_does_not_end_calibration() -> None:
    kernel = Kernel(1e-6)
    kernel.seconds = 1e-2

    def call() -> None:
        kernel()
        if kernel.n_calls == 2:
            kernel.seconds = 1e-6

    times = run([call], EvaluatorSpec(repeat=2, min_repeat_s=1e-3), kernel.clock)
    assert times == pytest.approx((1e-6, 1e-6), rel=1e-3)
    assert kernel.n_calls > 1000


def test_a_slow_kernel_gets_one_repeat_and_a_hopeless_one_a_call() -> None:
    assert len(timed(3e-5, best_s=1e-5)[0]) == 1
    assert len(timed(2e-5, best_s=1e-5)[0]) == 3
    assert len(timed(3e-5, best_s=1e-5, early_out=0.0)[0]) == 3
    times, kernel = timed(1.0, best_s=1e-2)
    assert times == (1.0,)
    assert kernel.n_calls == 2


@pytest.mark.parametrize(("busy", "expected"), [(3, 3), (8, 1), (99, 3)])
def test_disturbed_repeats_are_replaced(busy, expected) -> None:
    """The first ``busy`` repeats run at half speed, beside another process."""
    kernel = Kernel(2e-3)
    count = 0

    def call() -> None:
        nonlocal count
        repeat = (kernel.n_calls - 3) // 2  # after warm-up and calibration; each warms up again
        kernel.seconds = 2e-3 if repeat < busy else 1e-3
        count += 0 <= repeat < busy
        kernel()

    spec = EvaluatorSpec(repeat=3, extra=6, min_repeat_s=1e-3)
    times = run([call], spec, kernel.clock, preemptions=lambda: count)
    assert times == pytest.approx(((2e-3 if busy > 9 else 1e-3),) * expected)
    assert kernel.n_calls <= 3 + 2 * 9


def test_calls_rotate() -> None:
    kernel, order = Kernel(1e-3), []
    calls = [lambda i=i: (kernel(), order.append(i)) for i in range(3)]
    run(calls, EvaluatorSpec(repeat=1, min_repeat_s=7e-3, warmup=0), kernel.clock)
    once, calibration, again = [0], [i % 3 for i in range(7)], [i % 3 for i in range(7)]
    assert order == [*once, *calibration, 0, *again]


def test_a_slow_moment_hits_all_that_are_timed_together() -> None:
    """One takes half as long as the other, and the machine is five times slower for a while."""
    now = 0.0

    def kernel(seconds):
        def call() -> None:
            nonlocal now
            now += seconds * (5 if 0.02 < now < 0.05 else 1)

        return call

    spec = EvaluatorSpec(repeat=9, min_repeat_s=2e-3)
    watches = [Stopwatch([kernel(s)], spec, np.inf, lambda: now) for s in (2e-5, 1e-5)]
    time_together(watches)
    slow, fast = (w.run_secs for w in watches)
    assert max(slow) > 2 * min(slow)
    assert max(fast) > 2 * min(fast)
    assert np.median(slow) == pytest.approx(2 * np.median(fast), rel=0.05)


def test_reading_the_results_is_taken_off_as_fast_as_it_ever_was() -> None:
    """The first readings fall into a slow moment: what they took must not be the kernel's gain."""
    now, reading = 0.0, Reading()

    def costs(seconds):
        def call() -> None:
            nonlocal now
            now += seconds * (10 if now < 1e-3 else 1)

        return call

    context = CallContext(lambda: None, costs(1e-5), reading)
    spec = EvaluatorSpec(repeat=3, min_repeat_s=2e-4)
    reading.take(context.after, lambda: now)
    watch = Stopwatch([costs(2e-6)], spec, np.inf, lambda: now, context=context)
    time_together([watch])
    assert reading.seconds == pytest.approx(1e-5)
    assert watch.run_secs == pytest.approx((2e-6,) * 3)


def test_inputs_are_reproducible_and_depend_on_the_seed() -> None:
    spec = fakes.linear_spec()
    first, again, other = (check.random_inputs(spec, s) for s in (0, 0, 1))
    for a, b, c in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a != c).any()


def test_indices_are_within_what_they_index() -> None:
    b = GraphBuilder()
    table = b.input(0, (3, 4), "float32")
    index = b.input(1, (50,), "int64")
    moved = b.reshape(b.cast(index, "int32"), (5, 10))
    spec = b.finish([b.append("take", (table, moved), (5, 10, 4), "float32", dim=0)])
    values = check.random_inputs(spec, 0)[1]
    assert values.dtype == np.int64
    assert set(np.unique(values)) == {0, 1, 2}
    evaluate(spec, check.random_inputs(spec, 0))


def test_operands_of_roots_are_positive_and_others_are_not() -> None:
    b = GraphBuilder()
    x, v = b.input(0, (64,), "float32"), b.input(1, (64,), "float32")
    spec = b.finish([b.pointwise("mul", x, b.pointwise("rsqrt", v))])
    x_value, v_value = check.random_inputs(spec, 0)
    assert v_value.min() > 0 > x_value.min()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int32", "bool"])
def test_rounding_passes_and_errors_do_not(dtype) -> None:
    b = GraphBuilder()
    spec = b.finish(
        [b.pointwise("relu", b.input(0, (400,), dtype))]
        if dtype != "bool"
        else [b.pointwise("logical_not", b.input(0, (400,), dtype))]
    )
    value = np.linspace(-4, 4, 400).astype(check.numpy_dtype(dtype))
    (expected,) = check.expectations(spec, [value], EvaluatorSpec())
    assert check.mismatch([expected], [value.copy()]) == ""
    wrong = value.copy()
    wrong[7] = not wrong[7] if dtype == "bool" else wrong[7] + 1
    assert "1 of 400 elements differ, first at (7,)" in check.mismatch([expected], [wrong])
    if dtype in ("float32", "float16", "bfloat16"):
        eps = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
        rounded = (value.astype(np.float32) * (1 + eps)).astype(value.dtype)
        assert check.mismatch([expected], [rounded]) == ""


def test_nan_and_infinity_must_be_met() -> None:
    spec = fakes.linear_spec()
    value = np.array([1.0, np.nan, np.inf, -np.inf], np.float32)
    (expected,) = check.expectations(spec, [value], EvaluatorSpec())
    assert check.mismatch([expected], [value.copy()]) == ""
    for i, bad in ((0, np.nan), (1, 1.0), (2, 3e38), (2, -np.inf), (3, np.inf)):
        wrong = value.copy()
        wrong[i] = bad
        assert check.mismatch([expected], [wrong])


def test_a_missing_term_of_a_long_sum_is_found() -> None:
    spec = fakes.linear_spec(4, 4096, 8)
    x, w = check.random_inputs(spec, 0)
    reference = evaluate(spec, [x, w])
    expected = check.expectations(spec, reference, EvaluatorSpec())
    assert (
        check.mismatch(expected, [np.maximum((x.astype(np.float64) @ w).astype(np.float32), 0)])
        == ""
    )
    short = np.maximum(x[:, :-1] @ w[:-1], 0)
    assert check.mismatch(expected, [short])


def test_operands_that_may_be_rounded_to_tf32_are_no_error() -> None:
    """Ten bits of mantissa, as float16 has: a convolution on a GPU by torch's default."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s, dtype=np.float32) for s in ((256, 64), (64, 256)))
    b = GraphBuilder()
    exact = b.finish([b.matmul(b.input(0, x.shape, "float32"), b.input(1, w.shape, "float32"))])
    reference = evaluate(exact, [x, w])
    rounded = [(a.view(np.int32) + 0x1000 & ~0x1FFF).view(np.float32) for a in (x, w)]
    got = evaluate(exact, rounded)
    for spec, right in ((exact, False), (allow_tf32(exact, ["matmul"]), True)):
        expected = check.expectations(spec, reference, EvaluatorSpec())
        assert (check.mismatch(expected, got) == "") is right


def test_a_step_may_flip_a_few_elements_only() -> None:
    b = GraphBuilder()
    spec = b.finish([b.pointwise("floor", b.input(0, (5000,), "float32"))])
    value = np.zeros(5000, np.float32)
    (expected,) = check.expectations(spec, [value], EvaluatorSpec())
    flipped = value.copy()
    flipped[:3] = 1
    assert check.mismatch([expected], [flipped]) == ""
    flipped[:30] = 1
    assert check.mismatch([expected], [flipped])


def test_aligned_copies() -> None:
    for dtype in ("float32", "bool", "bfloat16", "int64"):
        array = check.aligned_copy(np.ones((3, 5), check.numpy_dtype(dtype)))
        assert array.ctypes.data % 64 == 0
        assert array.flags.c_contiguous
        assert array.shape == (3, 5)
        assert (array == 1).all()
    assert check.aligned((0, 3), "float32").shape == (0, 3)
    assert check.aligned((), "float32").shape == ()


def test_copies_reuse_memory_of_the_same_size() -> None:
    fits = check.aligned((4, 6), "float32")
    spare = [fits, check.aligned((5,), "float32")]
    value = np.arange(24, dtype=np.float32).reshape(2, 12)
    copies = check.aligned_copies(value, 3, spare)
    assert [np.shares_memory(c, fits) for c in copies] == [True, False, False]
    assert [a.shape for a in spare] == [(5,)]  # nobody else is given what was taken
    for copy in copies:
        np.testing.assert_array_equal(copy, value)
        assert copy.ctypes.data % 64 == 0


def test_frames_survive_any_cut() -> None:
    messages = [{"a": 1}, {"b": "\u20ac" * 100}, {}]
    stream = b"".join(encode(m) for m in messages)
    for step in (1, 3, 7, len(stream)):
        reader, found = FrameReader(), []
        for i in range(0, len(stream), step):
            found += reader.feed(stream[i : i + step])
        assert found == messages


@pytest.mark.parametrize(
    "junk", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x02[]", b"\x00\x00\x00\x02xx"]
)
def test_what_is_not_a_frame_is_refused(junk) -> None:
    with pytest.raises(ProtocolError):
        FrameReader().feed(junk)


def test_evaluator_survives_json() -> None:
    spec = EvaluatorSpec(repeat=5, rtol=0.5)
    assert EvaluatorSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
