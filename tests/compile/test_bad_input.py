"""Hard inputs and surroundings: right results with one clear warning, or eager's error."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_pruner as tp
from tests.compile.agreement import assert_equal, check, observe

pytestmark = [pytest.mark.tvm, pytest.mark.sampled(2)]
ROOT = Path(__file__).resolve().parents[2]


def mlp(x, w):
    return torch.relu(x @ w) + 1


def fixed(*tensors):
    """A ``make_args`` that hands out copies of these tensors, strides and all."""
    return lambda: tuple(t.clone(memory_format=torch.preserve_format) for t in tensors)


# Programs.


def prints(x):
    y = x * 2
    print("a graph break")
    return y.relu() + 1


def branches_on_data(x):
    if x.sum() > 0:
        return x * 2
    return x - 1


def loops_on_data(x):
    while x.abs().max() > 1:
        x = x / 2
    return x


def raises_midway(x):
    y = x * 2
    if y.shape[0] == 4:
        raise KeyError("from the model")
    return y


def calls_numpy(x):
    return torch.from_numpy((x * 2).numpy() + 1).relu()


def leaves_to_python(x):
    return (x * 2).tolist(), (x + 1).sum().item(), x.relu()


@pytest.mark.parametrize(
    "fn",
    [prints, branches_on_data, loops_on_data, calls_numpy, leaves_to_python],
    ids=lambda f: f.__name__,
)
def test_graph_breaks(backend, fn):
    for sign in (1, -1):
        check(backend.compile(fn), fn, fixed(torch.randn(4, 6).abs() * sign), covers=False)


def test_exceptions_of_the_model_reach_the_caller(backend):
    with pytest.raises(KeyError, match="from the model"):
        backend.compile(raises_midway)(torch.randn(4, 6))


def test_empty_graphs(backend):
    for fn in (lambda x: x, lambda x: None, lambda x: (x, 1), lambda x: x.shape, lambda x: x.t()):
        check(backend.compile(fn), fn, fixed(torch.randn(4, 6)), covers=False)


def test_a_second_backend_in_one_process(backend):
    x, w = torch.randn(4, 6), torch.randn(6, 5)
    other = torch.compile(lambda x, w: mlp(x, w) * 2, backend="aot_eager")
    assert_equal(backend.compile(mlp)(x, w), mlp(x, w))
    assert_equal(other(x, w), mlp(x, w) * 2)


def test_wrong_shapes_raise_as_in_eager(backend):
    compiled = backend.compile(mlp)
    with pytest.raises(Exception, match=r"shape|size"):
        compiled(torch.randn(4, 6), torch.randn(5, 5))
    assert_equal(
        compiled(torch.ones(4, 6), torch.ones(6, 5)), mlp(torch.ones(4, 6), torch.ones(6, 5))
    )


# Tensors.


def test_meta_tensors(backend):
    compiled = backend.compile(mlp)
    out = compiled(torch.empty(4, 6, device="meta"), torch.empty(6, 5, device="meta"))
    assert out.is_meta
    assert out.shape == (4, 5)


def test_meta_tensor_beside_a_real_one(backend):
    def fn(m, x):
        return m * 2, x * 2

    check(
        backend.compile(fn),
        fn,
        lambda: (torch.empty(4, device="meta"), torch.randn(4)),
        covers=False,
    )


def test_more_elements_than_32_bits_count_are_captured(backend):
    def fn(x):
        return (x + 1).sum(0)

    out = backend.compile(fn)(torch.empty(3, 2**31, device="meta", dtype=torch.int8))
    assert out.shape == (2**31,)


@pytest.mark.parametrize("shape", [(0,), (0, 6), (4, 0), (3, 0, 2)], ids=str)
def test_no_elements(backend, shape):
    def fn(x):
        return x * 2, x.sum(), x.relu().reshape(-1), torch.cat([x, x]), torch.ones(3) * 2

    check(backend.compile(fn), fn, fixed(torch.randn(shape)), covers=False)


def test_no_elements_in_contractions(backend):
    def fn(x, w):
        return mlp(x, w), x.sum(0), F.linear(x, w.t()).softmax(-1)

    for n, k in ((0, 6), (3, 0)):
        check(
            backend.compile(fn, dynamic=False),
            fn,
            fixed(torch.randn(n, k), torch.randn(k, 5)),
            covers=False,
        )


@pytest.mark.parametrize(
    "fn", [mlp, lambda x, w: (x + w.t()[:4], x.softmax(-1) @ w)], ids=["mlp", "mixed"]
)
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1)], ids=str)
def test_one_element(backend, fn, shape):
    x = torch.randn(shape)
    check(backend.compile(mlp, dynamic=False), mlp, fixed(x, torch.randn(shape[1], 1)))


# Made anew for every call: a copy would lose what is special about them.
STRANGE = {
    "strided": lambda: torch.randn(8, 12)[::2, ::2],
    "reversed order": lambda: torch.randn(6, 4).t(),
    "expanded": lambda: torch.randn(1, 6).expand(4, 6),
    "expanded from one": lambda: torch.randn(()).expand(4, 6),
    "odd offset": lambda: torch.randn(100)[1:25].view(4, 6),
    "odd offset, strided": lambda: torch.randn(5, 31)[1:, 3:9],
    "overlapping windows": lambda: torch.randn(9).unfold(0, 6, 1),
    "flipped": lambda: torch.randn(4, 6).flip(1),
    "imaginary part": lambda: torch.randn(4, 6, dtype=torch.complex64).imag,
    "negative bit": lambda: torch.randn(4, 6, dtype=torch.complex64).conj().imag,
    "real part of conjugate": lambda: torch.randn(4, 6, dtype=torch.complex64).conj().real,
    "diagonal": lambda: torch.randn(4, 6, 6).diagonal(dim1=1, dim2=2),
    "from numpy": lambda: torch.from_numpy(torch.randn(4, 6).numpy().copy()),
    "unaligned bytes": lambda: torch.frombuffer(
        bytearray(4 * 24 + 4), dtype=torch.float32, offset=4
    ).view(4, 6),
    "shared memory": lambda: torch.randn(4, 6).share_memory_(),
}


@pytest.mark.parametrize("make", STRANGE.values(), ids=STRANGE.keys())
def test_strange_strides(backend, make):
    def fn(x, w):
        return x * 2, mlp(x, w), x.sum(0), x.softmax(1)

    check(backend.compile(fn), fn, lambda: (make(), torch.randn(6, 5)))


@pytest.mark.parametrize("make", STRANGE.values(), ids=STRANGE.keys())
def test_strange_strides_of_a_parameter(backend, make):
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.register_buffer("w", make())

        def forward(self, x):
            return x @ self.w, x.t()[:4, :4] * self.w.sum()

    model = Holder()
    with torch.no_grad():
        check(backend.compile(model), model, lambda: (torch.randn(5, 4),))


def test_one_compiled_function_for_aligned_and_misaligned_data(backend):
    compiled = backend.compile(mlp)
    for offset in (0, 1, 3, 16, 7):
        x = torch.randn(200)[offset : offset + 24].view(4, 6)
        w = torch.randn(200)[offset : offset + 30].view(6, 5)
        assert_equal(compiled(x, w), mlp(x, w))


def test_lazy_conjugates(backend):
    def fn(z, x):
        return z * 2, z.real + x, (z @ z.t()).abs() * x.sum()

    check(
        backend.compile(fn),
        fn,
        lambda: (torch.randn(4, 6, dtype=torch.complex64).conj(), torch.randn(4, 6)),
    )


def test_sparse_tensors(backend):
    def fn(s, x):
        return torch.sparse.mm(s, x) + 1, x * 2

    for to in (torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr):
        check(
            backend.compile(fn),
            fn,
            lambda to=to: (to(torch.eye(4)), torch.randn(4, 6)),
            covers=False,
        )


@pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
def test_quantized_tensors(backend):
    def fn(q, x):
        return q.dequantize() * 2 + x, x * 2

    def make():
        return (
            torch.quantize_per_tensor(torch.randn(4, 6), 0.1, 0, torch.qint8),
            torch.randn(4, 6),
        )

    check(backend.compile(fn), fn, make, covers=False)


# Numbers.

SPECIAL = torch.tensor([
    [float("nan"), 1.0, 2.0, -1.0], [float("inf"), 1.0, -float("inf"), 0.0],
    [-0.0, 0.0, 1e-45, -1e-45],
    [float("-inf")] * 4, [3e38, -3e38, 1e-38, 1.0], [1.0, float("nan"), float("inf"), -2.0],
])  # fmt: skip

ON_SPECIAL = {
    "relu": lambda x: (torch.relu(x), F.relu6(x), F.leaky_relu(x), F.hardswish(x)),
    "clamp": lambda x: (
        x.clamp(-1, 1),
        x.clamp_min(0),
        torch.maximum(x, x.flip(1)),
        torch.minimum(x, x.flip(0)),
    ),
    "softmax": lambda x: (x.softmax(1), x.log_softmax(1), x.logsumexp(1)),
    # Where a sum overflows, and for the GELU of infinity, eager's NaN comes from its own order.
    "layer_norm": lambda x: (F.layer_norm(x[:4], (4,)), F.normalize(x, dim=1)),
    "max": lambda x: (x.max(1), x.min(1), x.amax(0), x.amin(0), x.max()),
    "argmax": lambda x: (x.argmax(1), x.argmin(1), x.argmax(0), x.argmax()),
    # 3e38 - 3e38 + 1 is 1 or 0, as the order is: eager's depends on the processor.
    "sum": lambda x: (x[:4].sum(1), x.mean(0), x.prod(1), x.cumsum(1), x.var(1)),
    "pool": lambda x: (
        F.max_pool1d(x[None], 2),
        F.avg_pool1d(x[None], 2),
        F.adaptive_avg_pool1d(x[None], 2),
    ),
    "compare": lambda x: (
        x == x,
        x != x,
        x > 0,
        x <= x.flip(0),
        x.isnan(),
        x.isinf(),
        x.isfinite(),
        torch.sign(x),
    ),
    "where": lambda x: (
        torch.where(x > 0, x, 0.0),
        torch.nan_to_num(x),
        x.masked_fill(x != x, 1.0),
        x.any(1),
        x.all(),
    ),
    "exp": lambda x: (
        x.exp(),
        x.tanh(),
        x.sigmoid(),
        F.gelu(x[2:4, :3]),
        F.silu(x),
        F.softplus(x),
        F.elu(x),
        x.erf(),
    ),
    "log": lambda x: (
        x.log(),
        x.abs().sqrt(),
        x.abs().rsqrt(),
        x.log1p(),
        1 / x,
        x.abs().pow(0.5),
        x**2,
        x**-1,
    ),
    "round": lambda x: (x.floor(), x.ceil(), x.round(), x.trunc(), x % 3, torch.fmod(x, 3), x // 2),
    "trigonometric": lambda x: (x.sin(), x.cos(), torch.atan2(x, x.flip(1)), x.expm1()),
    "matmul": lambda x: (
        x @ x.t(),
        x[:4] @ torch.zeros_like(x[:4]),
        x[:4] @ torch.zeros(4, 16, dtype=x.dtype),  # whole vectors of a constant, read in place
        torch.addmm(x[:4], x[:4], x[:4], beta=0),
    ),
    "attention": lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3),
    "to integer": lambda x: x.nan_to_num(0, 9, -9).clamp(-9, 9).to(torch.int32),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fn", ON_SPECIAL.values(), ids=ON_SPECIAL.keys())
def test_nan_and_infinity(backend, fn, dtype):
    """The backend's own check allows no NaN elsewhere; here every element is compared once more."""
    check(backend.compile(fn), fn, fixed(SPECIAL.to(dtype)))


def test_attention_with_rows_masked_out(backend):
    def fn(q, k, v, mask):
        scores = q @ k.transpose(-1, -2) / 2 + mask
        return scores.softmax(-1) @ v, F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def make():
        mask = torch.zeros(4, 4)
        mask[1] = -float("inf")
        mask[2, 1:] = -float("inf")
        return (*(torch.randn(1, 2, 4, 8) for _ in range(3)), mask)

    backend.check(fn, make)


def test_huge_ranges(backend):
    def fn(x):
        return (
            x.softmax(1),
            F.layer_norm(x, (6,)),
            x.sum(1),
            x.logsumexp(1),
            x.exp().log1p(),
            x.var(1),
        )

    def make():
        return (torch.randn(4, 6) * torch.tensor([1e-30, 1e-3, 1e3, 1e15])[:, None],)

    backend.check(fn, make)


def test_integer_extremes(backend):
    def fn(x):
        return x + 1, x * 2, -x, x.abs(), x.sum(1), x.amax(1), x.argmin(1), x >> 1, x // 3

    for dtype in (torch.int8, torch.int32, torch.int64):
        info = torch.iinfo(dtype)
        row = [info.min, info.max, 0, -1, 1, info.min + 1]
        check(backend.compile(fn), fn, fixed(torch.tensor([row, row[::-1]], dtype=dtype)))


# Indices out of bounds: eager's error, on the first call and later ones.

LOOKUPS = {
    "embedding": (lambda w, i: F.embedding(i, w) * 2, IndexError),
    "select": (lambda w, i: torch.index_select(w, 0, i.flatten()) * 2, (IndexError, RuntimeError)),
    "index": (lambda w, i: w[i] * 2, IndexError),
    "two indices": (lambda w, i: w[i, i % 3] * 2, IndexError),
    "gather": (lambda w, i: torch.gather(w, 0, i.flatten()[:, None]) * 2, RuntimeError),
    "cross entropy": (
        lambda w, i: F.cross_entropy(w.t()[:1].expand(4, 7), i.flatten()),
        (IndexError, RuntimeError),
    ),
}


@pytest.mark.parametrize("calls_before", [0, 2])
@pytest.mark.parametrize("bad", [7, 2**40, -8])
@pytest.mark.parametrize(("fn", "error"), LOOKUPS.values(), ids=LOOKUPS.keys())
def test_index_out_of_range(backend, fn, error, bad, calls_before):
    compiled = backend.compile(fn)
    w, good = torch.randn(7, 3), torch.tensor([[0, 6], [3, 1]])
    with torch.no_grad():
        for _ in range(calls_before):
            assert_equal(compiled(w, good), fn(w, good))
        wrong = torch.tensor([[0, 6], [bad, 1]])
        with pytest.raises(error):
            fn(w, wrong)
        with pytest.raises(error):
            compiled(w, wrong)
        assert_equal(compiled(w, good), fn(w, good))


def test_negative_indices_wrap_where_eager_wraps_them(backend):
    backend.check(
        lambda w, i: w[i] * 2, lambda: (torch.randn(7, 3), torch.tensor([[-1, 6], [-7, 0]]))
    )


def test_ignored_classes(backend):
    def fn(logits, target, shifted):
        ignoring = F.cross_entropy(logits, shifted, ignore_index=2, reduction="sum")
        return F.cross_entropy(logits, target), ignoring

    def make():
        target = torch.tensor([0, -100, 4, 2])
        return (torch.randn(4, 5).requires_grad_(), target, target.clamp(min=1))

    backend.check(fn, make, calls=3)


# Surroundings. In subprocesses: what they need cannot be undone.

SCRIPT = """
import logging, os, sys
logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="LOG %(name)s %(message)s")
import torch
{setup}
def mlp(x, w):
    return torch.relu(x @ w) + 1
x, w = torch.randn(5, 7), torch.randn(7, 9)
compiled = torch.compile(mlp, backend="pruner", options={options!r})
for _ in range(2):
    torch.testing.assert_close(compiled(x, w), mlp(x, w))
import torch_pruner as tp
report = tp.last_report()
print("compiled", report.ops_compiled, "RIGHT", flush=True)
"""


def run_script(
    options: dict, setup: str = "", env: dict | None = None, prefix: tuple[str, ...] = ()
):
    """The script in a process of its own: what it printed, and its lines of warnings."""
    script = SCRIPT.format(options=options, setup=textwrap.dedent(setup))
    done = subprocess.run(
        [*prefix, sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2", **(env or {})},
    )
    warnings = [line for line in done.stderr.splitlines() if line.startswith("LOG torch_pruner")]
    assert done.returncode == 0, done.stderr[-3000:]
    assert "RIGHT" in done.stdout
    return done, warnings


def test_no_c_compiler(tmp_path):
    options = {"effort": "none", "cache_dir": str(tmp_path / "cache")}
    done, warnings = run_script(options, env={"PATH": str(tmp_path), "CC": ""})
    assert len(warnings) == 1, warnings
    assert "no C compiler found" in warnings[0]
    assert "gcc" in warnings[0]
    assert (
        "compiled 0" not in done.stdout
    )  # the code was made in memory; only keeping it needs a linker


@pytest.mark.rotated(6)
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity here")
def test_one_core(tmp_path):
    options = {"effort": "none", "strict": True, "cache_dir": str(tmp_path / "cache"), "threads": 2}
    _, warnings = run_script(
        options, setup="os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    )
    assert not warnings


FULL_DISK = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
"""


@pytest.mark.rotated(6)
@pytest.mark.parametrize("limit", [6000, 200_000])  # torch itself needs a few bytes
def test_full_disk(tmp_path, limit):
    """A cache that cannot be written is no reason to fail, not even under strict."""
    pytest.importorskip("resource")
    options = {"effort": "none", "strict": True, "cache_dir": str(tmp_path / "cache")}
    done, warnings = run_script(options, setup=FULL_DISK.format(limit=limit))
    assert "compiled 0" not in done.stdout
    assert 1 <= len(warnings) <= 2, warnings


@pytest.mark.rotated(6)
def test_cache_path_that_is_a_file(tmp_path):
    (tmp_path / "cache").write_text("not a directory")
    options = {"effort": "none", "strict": True, "cache_dir": str(tmp_path / "cache")}
    done, warnings = run_script(options)
    assert "compiled 0" not in done.stdout
    assert len(warnings) == 1, warnings
    assert str(tmp_path / "cache") in warnings[0]


@pytest.mark.rotated(6)
@pytest.mark.skipif(
    os.geteuid() == 0 and not Path("/proc/self/status").exists(), reason="root may write anywhere"
)
def test_unwritable_cache_directory(tmp_path):
    """Below /proc nobody can make a directory, not even root."""
    options = {"effort": "none", "cache_dir": "/proc/nobody/cache"}
    done, warnings = run_script(options)
    assert "compiled 0" not in done.stdout
    assert len(warnings) == 1, warnings
    assert "/proc/nobody/cache" in warnings[0]


@pytest.mark.rotated(6)
def test_no_home_and_no_environment(tmp_path):
    env = {"HOME": "", "XDG_CACHE_HOME": str(tmp_path), "TORCH_PRUNER_CACHE_DIR": ""}
    _, warnings = run_script({"effort": "none", "strict": True}, env=env)
    assert not warnings
    assert (tmp_path / "torch_pruner").is_dir()


def test_a_failure_inside_falls_back_with_one_warning(cold, monkeypatch, caplog):
    def fails(*args, **kwargs):
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr("torch_pruner.compiler.building.library.build_library", fails)
    x, w = torch.randn(4, 6), torch.randn(6, 5)
    compiled = torch.compile(mlp, backend="pruner", options=cold.options(strict=False))
    with caplog.at_level(logging.WARNING, logger="torch_pruner"):
        for _ in range(2):
            assert_equal(compiled(x, w), mlp(x, w))
    said = [r.getMessage() for r in caplog.records if r.name.startswith("torch_pruner")]
    assert len(said) == 1
    assert "a bug of ours" in said[0]
    assert "eager" in said[0]
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="a bug of ours"):
        cold.compile(mlp)(x, w)


def test_a_wrong_kernel_is_found_on_the_first_call(cold, monkeypatch, caplog):
    """Eager's result, one warning, kernels dropped; gradients and random numbers stay right."""
    from torch_pruner.dynamo.run.runtime import RegionCall

    right = RegionCall.__call__
    monkeypatch.setattr(
        RegionCall, "__call__", lambda self, inputs: [t + 1 for t in right(self, inputs)]
    )

    def fn(x, w):
        return F.dropout(mlp(x, w), 0.5, training=True)

    def make():
        return (torch.randn(4, 6).requires_grad_(), torch.randn(6, 5))

    compiled = torch.compile(fn, backend="pruner", options=cold.options(strict=False))
    with caplog.at_level(logging.WARNING, logger="torch_pruner"):
        for seed in range(3):
            got, expected = observe(compiled, make, seed), observe(fn, make, seed)
            assert_equal(got.outputs[0], expected.outputs[0])
            assert_equal(got.inputs[1], expected.inputs[1])
            assert torch.equal(got.random, expected.random)
    said = [r.getMessage() for r in caplog.records if r.name.startswith("torch_pruner")]
    assert len(said) == 2, said  # forward and backward
    assert all("differs from eager" in m for m in said)
    torch._dynamo.reset()
    with pytest.raises(tp.exc.ResultMismatch):
        cold.compile(fn)(*make())
