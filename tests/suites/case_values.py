"""Cases of ``tests.suites.cases`` about values: arithmetic, dtypes, reductions, layers, losses.

A family yields cases: a name, a function, what makes its arguments (for a number of the call, so
that inputs change), and whether sizes are dynamic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FLOATS = (torch.float32, torch.bfloat16, torch.float64)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SPECIAL = (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-42, 0.5, -2.5, 3e38)


@dataclass(frozen=True)
class Case:
    """``make(k)`` are the arguments of call ``k``. ``values``: sizes that depend on values."""

    name: str
    fn: Callable[..., Any]
    make: Callable[[int], tuple[Any, ...]]
    dynamic: bool | None = None
    values: bool = False


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def rand(*shape: int, grad: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def _special(large: bool) -> torch.Tensor:
    """Without what eager doubles on some processors (oneDNN's gelu) and not on others."""
    values = special(torch.float32)
    return values if large else values[~(values.abs() > 1e38)]


def special(dtype: torch.dtype) -> torch.Tensor:
    """Every pair of special values appears when it meets its own ``roll`` by the call's number."""
    return torch.tensor(SPECIAL).to(dtype).repeat(11)


UNARY: dict[str, Callable[[Any], Any]] = {
    **{
        n: getattr(torch, n)
        for n in (
            "neg",
            "abs",
            "sign",
            "exp",
            "expm1",
            "sin",
            "cos",
            "atan",
            "tanh",
            "erf",
            "erfc",
            "sigmoid",
            "floor",
            "ceil",
            "trunc",
            "round",
            "square",
            "sinh",
            "cosh",
            "asinh",
            "exp2",
            "frac",
            "sgn",
            "deg2rad",
            "nan_to_num",
            "signbit",
            "isnan",
            "isinf",
            "isfinite",
            "logical_not",
            "positive",
        )
    },
    **{
        n: getattr(F, n)
        for n in (
            "relu",
            "gelu",
            "silu",
            "relu6",
            "elu",
            "selu",
            "celu",
            "leaky_relu",
            "hardtanh",
            "hardswish",
            "hardsigmoid",
            "softplus",
            "mish",
            "softsign",
            "tanhshrink",
            "hardshrink",
            "logsigmoid",
        )
    },
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp_min": lambda x: x.clamp(min=0),
    "pow2": lambda x: x**2,
    "pow3": lambda x: x**3,
    "rdiv": lambda x: 1 / (x * x + 1),
    "plus_zero": lambda x: x + 0.0,
    "minus_zero": lambda x: x - 0.0,
    "times_zero": lambda x: x * 0.0,
    "zero_minus": lambda x: 0.0 - x,
    "over_zero": lambda x: x / 0.0,
    "self_minus": lambda x: x - x,
    "over_minus_zero": lambda x: x / -torch.zeros_like(x),
    "where0": lambda x: torch.where(x > 0, x, -0.0),
    "threshold": lambda x: F.threshold(x, 0.1, -0.5),
}
SMOOTH = {"sqrt", "rsqrt", "log", "log2", "log10", "log1p", "reciprocal", "lgamma", "digamma"}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    **{
        n: getattr(torch, n)
        for n in (
            "add",
            "sub",
            "mul",
            "div",
            "maximum",
            "minimum",
            "atan2",
            "eq",
            "ne",
            "lt",
            "le",
            "gt",
            "ge",
            "logical_and",
            "logical_or",
            "logical_xor",
            "copysign",
            "fmax",
            "fmin",
            "hypot",
            "logaddexp",
            "rsub",
        )
    },
    "floor_divide": lambda x, y: torch.floor_divide(x, y.abs() + 1),
    "remainder": lambda x, y: torch.remainder(x, y.abs() + 1),
    "fmod": lambda x, y: torch.fmod(x, y.abs() + 1),
    "trunc_divide": lambda x, y: torch.div(x, y.abs() + 1, rounding_mode="trunc"),
    "alpha": lambda x, y: torch.add(x, y, alpha=2),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "where": lambda x, y: torch.where(x > y, x, y),
    "pow": lambda x, y: x.abs() ** y.clamp(-2, 2),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
}
SHAPES = {
    "same": ((3, 5), (3, 5)),
    "row": ((3, 5), (5,)),
    "outer": ((3, 1), (1, 5)),
    "scalar": ((3, 5), ()),
}


def unary() -> Iterator[Case]:
    for name, fn in UNARY.items():
        for dtype in FLOATS[:2]:
            yield Case(
                f"unary-{name}-{short(dtype)}",
                lambda x, fn=fn: fn(x),
                lambda k, d=dtype: (rand(3, 7 + k * 0, grad=d is torch.float32, dtype=d),),
            )
        if name not in ("deg2rad",):
            yield Case(
                f"special-{name}",
                lambda x, fn=fn: fn(x),
                lambda k, large=name != "gelu": (_special(large).roll(k),),
            )
    for name in sorted(SMOOTH):
        fn = getattr(torch, name)
        yield Case(
            f"unary-{name}",
            lambda x, fn=fn: fn(x.abs() + 0.5),
            lambda k: (rand(4, 6, grad=True),),
        )


def binary() -> Iterator[Case]:
    for name, fn in BINARY.items():
        for kind, (a, b) in SHAPES.items():
            yield Case(
                f"binary-{name}-{kind}",
                lambda x, y, fn=fn: fn(x, y),
                lambda k, a=a, b=b, g=kind == "same": (rand(*a, grad=g), rand(*b, grad=g)),
            )


INTEGER: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "neg": lambda x, y: -x,
    "abs": lambda x, y: x.abs(),
    "sign": lambda x, y: x.sign(),
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "not": lambda x, y: ~x,
    "max": torch.maximum,
    "min": torch.minimum,
    "relu": lambda x, y: x.relu(),
    "floor_divide": lambda x, y: x // 3,
    "remainder": lambda x, y: x % 3,
    "true_divide": lambda x, y: x / 7,
    "left": lambda x, y: x << 2,
    "right": lambda x, y: x >> 1,
    "pow": lambda x, y: x**2,
    "sum": lambda x, y: x.sum(0),
    "prod": lambda x, y: x[:4].prod(),
    "amax": lambda x, y: x.amax(),
    "clamp": lambda x, y: x.clamp(2, 100),
    "where": lambda x, y: torch.where(x > y, x, y),
    "cumsum": lambda x, y: x.cumsum(0),
    "matmul": lambda x, y: x.reshape(4, 4) @ y.reshape(4, 4),
}


def integers() -> Iterator[Case]:
    def extremes(dtype: torch.dtype, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        limits = torch.iinfo(dtype)
        ends = [limits.min, limits.max, limits.min + 1, limits.max - 1, 0, 1, 2, 3]
        x = torch.tensor([*ends, *reversed(ends)], dtype=dtype)
        return x.roll(k), x.roll(2 * k + 3)

    for dtype in INTS:
        for name, fn in INTEGER.items():
            yield Case(
                f"integer-{name}-{short(dtype)}",
                lambda x, y, fn=fn: fn(x, y),
                lambda k, d=dtype: extremes(d, k),
            )


def casts() -> Iterator[Case]:
    dtypes = (*FLOATS, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
    for source in dtypes:
        for target in dtypes:
            yield Case(
                f"cast-{short(source)}-{short(target)}",
                lambda x, t=target: (x.to(t), (x.to(t) * 1).to(torch.float32) + 1),
                lambda k, s=source: ((torch.arange(24).roll(k) * 5 / 2).to(s),),
            )


REDUCTIONS: dict[str, Callable[..., Any]] = {
    **{n: getattr(torch, n) for n in ("sum", "mean", "amax", "amin", "logsumexp", "var", "std")},
    "norm": lambda x, dim, keepdim: torch.linalg.vector_norm(x, dim=dim, keepdim=keepdim),
    "any": lambda x, dim, keepdim: (x > 1).any(dim, keepdim),
    "all": lambda x, dim, keepdim: (x > -9).all(dim, keepdim),
    "nansum": lambda x, dim, keepdim: torch.nansum(x, dim, keepdim),
}
ALONG: dict[str, Callable[[Any, int], Any]] = {
    "prod": torch.prod,
    "max": torch.max,
    "min": torch.min,
    "argmax": torch.argmax,
    "argmin": torch.argmin,
    "cumsum": torch.cumsum,
    "cumprod": torch.cumprod,
    "softmax": torch.softmax,
    "log_softmax": torch.log_softmax,
    "median": torch.median,
    "sort": torch.sort,
    "logcumsumexp": torch.logcumsumexp,
    "topk": lambda x, d: torch.topk(x, 2, d),
    "normalize": lambda x, d: F.normalize(x, dim=d),
    "glu": lambda x, d: F.glu(torch.cat([x, x * 2], d), d),
    "diff": lambda x, d: torch.diff(x, dim=d),
}


def reductions() -> Iterator[Case]:
    for name, fn in REDUCTIONS.items():
        for dims in ((0,), (2,), (0, 2), (0, 1, 2)):
            for keep in (False, True):
                text = "".join(map(str, dims))
                yield Case(
                    f"reduce-{name}-{text}{'-keep' * keep}",
                    lambda x, fn=fn, d=dims, k=keep: fn(x, dim=d, keepdim=k),
                    lambda k: (rand(4, 3, 9, grad=True),),
                )
    for name, along in ALONG.items():
        for dim in (0, 1, -1):
            yield Case(
                f"along-{name}-{dim}",
                lambda x, fn=along, d=dim: fn(x, d),
                lambda k: (rand(4, 3, 10, grad=True),),
            )


def pools() -> Iterator[Case]:
    for kernel, stride, padding, ceil in (
        (2, 2, 0, False),
        (3, 1, 1, False),
        (3, 2, 1, True),
        (2, 1, 0, True),
        (5, 3, 2, False),
    ):
        for kind in ("max", "avg"):
            for dims in (1, 2, 3):
                pool = getattr(F, f"{kind}_pool{dims}d")
                text = f"{kernel}{stride}{padding}{'c' * ceil}"
                yield Case(
                    f"pool-{kind}{dims}-{text}",
                    lambda x, f=pool, a=(kernel, stride, padding), c=ceil: f(x, *a, ceil_mode=c),
                    lambda k, d=dims: (rand(2, 3, *(9,) * d, grad=True),),
                )
    for dims, size in ((1, 3), (2, (2, 3)), (2, 1), (3, 2)):
        pool = getattr(F, f"adaptive_avg_pool{dims}d")
        yield Case(
            f"pool-adaptive{dims}-{size}".replace(" ", ""),
            lambda x, f=pool, s=size: f(x, s),
            lambda k, d=dims: (rand(2, 3, *(6,) * d, grad=True),),
        )
    for mode in ("nearest", "bilinear", "bicubic", "area", "nearest-exact"):
        yield Case(
            f"resize-{mode}",
            lambda x, m=mode: F.interpolate(x, scale_factor=2, mode=m),
            lambda k: (rand(1, 3, 5, 6, grad=True),),
        )


def pads() -> Iterator[Case]:
    for mode in ("constant", "reflect", "replicate", "circular"):
        for pad in ((1, 2), (2, 0, 1, 1), (0, 1, 2, 1)):
            rank = 3 if len(pad) == 2 else 4
            yield Case(
                f"pad-{mode}-{''.join(map(str, pad))}",
                lambda x, p=pad, m=mode: F.pad(x, p, mode=m) * 2,
                lambda k, r=rank: (rand(2, 3, *(5,) * (r - 2), grad=True),),
            )
    for value in (0.0, -0.0, 1.5, math.inf, -math.inf, math.nan):
        yield Case(
            f"pad-value-{value}",
            lambda x, v=value: F.pad(x, (1, -1, 2, 0), value=v) + 1,
            lambda k: (rand(3, 4),),
        )


LAYERS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "linear": (F.linear, ((5, 7), (6, 7), (6,))),
    "bilinear": (F.bilinear, ((3, 4), (3, 5), (2, 4, 5))),
    "matmul": (torch.matmul, ((2, 3, 4), (4, 5))),
    "bmm": (torch.bmm, ((2, 3, 4), (2, 4, 5))),
    "mv": (torch.mv, ((3, 4), (4,))),
    "dot": (torch.dot, ((7,), (7,))),
    "outer": (torch.outer, ((3,), (4,))),
    "addmm": (lambda a, b, c: torch.addmm(a, b, c, beta=0.5, alpha=2), ((4,), (3, 5), (5, 4))),
    "baddbmm": (torch.baddbmm, ((2, 3, 5), (2, 3, 4), (2, 4, 5))),
    "einsum": (lambda a, b: torch.einsum("bik,bjk->bij", a, b), ((2, 3, 4), (2, 5, 4))),
    "kron": (torch.kron, ((2, 3), (3, 2))),
    "cdist": (torch.cdist, ((4, 3), (5, 3))),
    "conv1d": (F.conv1d, ((2, 3, 9), (4, 3, 3), (4,))),
    "conv2d": (F.conv2d, ((2, 3, 8, 8), (4, 3, 3, 3), (4,))),
    "conv2d_stride": (
        lambda x, w: F.conv2d(x, w, stride=2, padding=1),
        ((2, 3, 9, 8), (4, 3, 3, 3)),
    ),
    "conv2d_dilated": (
        lambda x, w: F.conv2d(x, w, dilation=2, padding=2),
        ((1, 3, 9, 9), (4, 3, 3, 3)),
    ),
    "depthwise": (lambda x, w: F.conv2d(x, w, padding=1, groups=4), ((1, 4, 7, 7), (4, 1, 3, 3))),
    "grouped": (lambda x, w: F.conv2d(x, w, groups=2), ((1, 4, 7, 7), (6, 2, 3, 3))),
    "conv3d": (F.conv3d, ((1, 2, 5, 5, 5), (3, 2, 3, 3, 3))),
    "transposed": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1),
        ((1, 3, 5, 5), (3, 4, 3, 3)),
    ),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), ((3, 6), (6,), (6,))),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), ((2, 4, 5), (4,), (4,))),
    "instance_norm": (lambda x: F.instance_norm(x), ((2, 3, 6),)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (6,), w), ((3, 6), (6,))),
    "local_response": (lambda x: F.local_response_norm(x, 3), ((2, 5, 4),)),
    "attention": (F.scaled_dot_product_attention, ((1, 2, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8))),
    "causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        ((1, 2, 16, 16),) * 3,
    ),
    "mse": (F.mse_loss, ((4, 5), (4, 5))),
    "l1": (F.l1_loss, ((4, 5), (4, 5))),
    "huber": (F.huber_loss, ((4, 5), (4, 5))),
    "smooth_l1": (F.smooth_l1_loss, ((4, 5), (4, 5))),
    "kl": (
        lambda a, b: F.kl_div(a.log_softmax(1), b.softmax(1), reduction="sum"),
        ((4, 5), (4, 5)),
    ),
    "bce": (lambda a, b: F.binary_cross_entropy(a.sigmoid(), b.sigmoid()), ((4, 5), (4, 5))),
    "bce_logits": (
        lambda a, b: F.binary_cross_entropy_with_logits(a, b.sigmoid()),
        ((4, 5), (4, 5)),
    ),
    "cosine": (lambda a, b: F.cosine_similarity(a, b), ((4, 5), (4, 5))),
    "triplet": (F.triplet_margin_loss, ((4, 5),) * 3),
    "cross_entropy_soft": (lambda a, b: F.cross_entropy(a, b.softmax(1)), ((4, 5), (4, 5))),
}


def layers() -> Iterator[Case]:
    for name, (fn, shapes) in LAYERS.items():
        yield Case(
            f"layer-{name}",
            lambda *a, fn=fn: fn(*a),
            lambda k, s=shapes: tuple(rand(*shape, grad=True) for shape in s),
        )


FAMILIES = (unary, binary, integers, casts, reductions, pools, pads, layers)
