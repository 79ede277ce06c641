"""Operator rules against eager: values, dtypes and shapes, all of it compiled."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.unit.dynamo.running import check, check_training

_SPECIAL = [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 2.5, -3.5, 7.0, float("nan"), float("inf"), -1e30]


def x(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def ints(*shape, low=-5, high=6, dtype=torch.int64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def compiled(fn, *args, tol=1e-4):
    """Check ``fn`` and that nothing of it was left to eager."""
    capture = check(fn, *args, tol=tol)
    assert not capture.rejected
    assert capture.parts[0].regions
    return capture


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
    "silu": F.silu,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": F.hardtanh,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "celu": lambda v: F.celu(v, 0.7),
    "selu": F.selu,
    "softplus": lambda v: F.softplus(v, 2.0, 3.0),
    "mish": F.mish,
    "threshold": lambda v: F.threshold(v, 0.1, 20.0),
    "relu": torch.relu,
    "logsigmoid": F.logsigmoid,
    "softsign": F.softsign,
    "clamp": lambda v: v.clamp(-1, 2),
    "clamp_min": lambda v: v.clamp(min=0.5),
    "sign": torch.sign,
    "round": torch.round,
    "trunc": torch.trunc,
    "square": torch.square,
    "rsqrt": torch.rsqrt,
    "pow2": lambda v: v**2,
    "pow3": lambda v: v**3,
    "pow_half": lambda v: v**0.5,
    "pow_negative": lambda v: v**-2,
    "scalar_pow": lambda v: 2.0**v,
    "nan_to_num": torch.nan_to_num,
    "isnan": torch.isnan,
    "isfinite": torch.isfinite,
    "logical_not": torch.logical_not,
    "expm1": torch.expm1,
    "erf": torch.erf,
    "remainder": lambda v: v % 0.75,
    "floor_divide": lambda v: v // 0.75,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_elementwise_of_special_values(name, dtype):
    tol = 1e-5 if dtype == torch.float32 else 1e-2
    if name == "gelu":  # eager's vector code gives NaN for infinity
        compiled(F.gelu, torch.tensor(_SPECIAL[:10], dtype=dtype), tol=tol)
        return
    compiled(ACTIVATIONS[name], torch.tensor(_SPECIAL, dtype=dtype), tol=tol)


PROMOTIONS = {
    "int_plus_float_scalar": lambda: (lambda a: a + 0.5, ints(4)),
    "int_over_int": lambda: (lambda a, b: a / b, ints(4), ints(4, low=1)),
    "bfloat16_plus_float32": lambda: (torch.add, x(4, dtype=torch.bfloat16), x(4)),
    "float32_plus_scalar_tensor": lambda: (torch.mul, x(4), torch.tensor(2.0, dtype=torch.float64)),
    "bool_plus_bool": lambda: (torch.add, ints(4) > 0, ints(4, seed=1) > 0),
    "bool_times_int": lambda: (torch.mul, ints(4) > 0, ints(4)),
    "uint8_minus_int16": lambda: (
        torch.sub,
        ints(4, low=0, dtype=torch.uint8),
        ints(4, dtype=torch.int16),
    ),
    "alpha": lambda: (lambda a, b: torch.add(a, b, alpha=3), ints(4), ints(4, seed=1)),
    "compare_int_with_float": lambda: (lambda a: a < 0.5, ints(6)),
    "compare_mixed": lambda: (torch.eq, ints(6), ints(6).float()),
    "where": lambda: (torch.where, ints(4) > 0, ints(4), x(4)),
    "masked_fill": lambda: (lambda a, m: a.masked_fill(m, -1e9), x(4), ints(4) > 0),
    "exp_of_int": lambda: (torch.exp, ints(4)),
    "clamp_int_by_float": lambda: (lambda a: a.clamp(min=0.5), ints(4)),
    "sum_of_bool": lambda: (torch.sum, ints(7) > 0),
    "sum_of_int32": lambda: (torch.sum, ints(7, dtype=torch.int32)),
    "mean_to_float64": lambda: (lambda a: a.mean(0, dtype=torch.float64), x(7)),
    "trunc_division": lambda: (
        lambda a, b: torch.div(a, b, rounding_mode="trunc"),
        ints(9),
        ints(9, low=1, seed=1),
    ),
    "shift": lambda: (lambda a: (a << 2) >> 1, ints(5)),
    "bitwise": lambda: (lambda a, b: (a & b) | ~(a ^ b), ints(5), ints(5, seed=1)),
    "logical": lambda: (torch.logical_xor, ints(5), x(5)),
    "lerp": lambda: (lambda a, b: torch.lerp(a, b, 0.7), x(5), x(5, seed=1)),
    "addcmul": lambda: (lambda a, b: torch.addcmul(a, a, b, value=0.5), x(5), x(5, seed=1)),
    "maximum_nan": lambda: (torch.maximum, torch.tensor(_SPECIAL), torch.tensor(_SPECIAL).flip(0)),
}


@pytest.mark.parametrize("name", PROMOTIONS)
def test_promotion_is_torch(name):
    fn, *args = PROMOTIONS[name]()
    compiled(fn, *args)


REDUCTIONS = {
    "softmax": lambda v: v.softmax(-1),
    "log_softmax": lambda v: v.log_softmax(1),
    "layer_norm": lambda v: F.layer_norm(v, v.shape[-1:], eps=1e-3),
    "group_norm": lambda v: F.group_norm(v, 2, v[0, :, 0], v[1, :, 0]),
    "rms_norm": lambda v: F.rms_norm(v, v.shape[-1:]),
    "var_mean": lambda v: torch.var_mean(v, (0, 2)),
    "std": lambda v: v.std(1, correction=0, keepdim=True),
    "amax": lambda v: v.amax((0, 1)),
    "max_dim": lambda v: v.max(2),
    "argmin": lambda v: v.argmin(),
    "prod": lambda v: v.prod(1),
    "any": lambda v: (v > 2).any(0),
    "all": lambda v: (v > -9).all(),
    "norm": lambda v: v.norm(dim=1),
    "norm_inf": lambda v: torch.linalg.vector_norm(v, float("inf"), (0, 2)),
    "logsumexp": lambda v: v.logsumexp((1, 2)),
    "cumsum": lambda v: v.cumsum(1),
    "cosine_similarity": lambda v: F.cosine_similarity(v, v.flip(0), 2),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name):
    compiled(REDUCTIONS[name], x(3, 4, 5))


@pytest.mark.parametrize("name", ["softmax", "layer_norm", "var_mean", "logsumexp"])
def test_reductions_of_half_precision_accumulate_in_float32(name):
    compiled(REDUCTIONS[name], x(3, 4, 65, dtype=torch.bfloat16), tol=1e-2)


PICTURES = {
    "max_pool": lambda v: F.max_pool2d(v, 3, 2, 1),
    "max_pool_ceil": lambda v: F.max_pool2d(v, 3, 2, 0, ceil_mode=True),
    "max_pool_dilated_indices": lambda v: F.max_pool2d(v, 2, 2, 1, 2, return_indices=True),
    "avg_pool": lambda v: F.avg_pool2d(v, 3, 2, 1),
    "avg_pool_ceil": lambda v: F.avg_pool2d(v, (3, 2), 2, 1, True, False),
    "avg_pool_divisor": lambda v: F.avg_pool2d(v, 2, divisor_override=3),
    "adaptive_one": lambda v: F.adaptive_avg_pool2d(v, 1),
    "adaptive_even": lambda v: F.adaptive_avg_pool2d(v, (4, 3)),
    "adaptive_uneven": lambda v: F.adaptive_avg_pool2d(v, (3, 5)),
    "nearest": lambda v: F.interpolate(v, scale_factor=1.5),
    "nearest_exact": lambda v: F.interpolate(v, size=(5, 13), mode="nearest-exact"),
    "bilinear": lambda v: F.interpolate(v, size=(13, 7), mode="bilinear"),
    "bilinear_corners": lambda v: F.interpolate(
        v, scale_factor=2, mode="bilinear", align_corners=True
    ),
    "reflect": lambda v: F.pad(v, (2, 1, 0, 3), mode="reflect"),
    "replicate": lambda v: F.pad(v, (2, 1, 0, 3), mode="replicate"),
    "constant": lambda v: F.pad(v, (2, -1, 0, 3), value=1.5),
    "pixel_shuffle": lambda v: F.pixel_shuffle(v, 2),
    "pixel_unshuffle": lambda v: F.pixel_unshuffle(v[..., :8, :8], 2) + 1,
    "glu": lambda v: F.glu(v, 1),
    "unfold": lambda v: v.unfold(2, 3, 2).sin(),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(name):
    compiled(lambda v: PICTURES[name](v + 0), x(2, 4, 8, 9))


@pytest.mark.parametrize("name", ["nearest", "bilinear", "bilinear_corners", "adaptive_uneven"])
def test_pictures_in_inference_mode(name):
    """Without autograd, torch leaves resizing and pooling to our rules."""
    with torch.inference_mode():
        compiled(lambda v: PICTURES[name](v + 0), x(2, 4, 8, 9))


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize(
    ("mode", "sizes"),
    [(m, s) for m in ("bilinear", "nearest", "bicubic") for s in ((7, 6), (1, 5))]
    + [(m, (3, 4, 5)) for m in ("bilinear", "nearest")],
    ids=str,
)
def test_values_between_elements(sizes, mode, padding, align_corners):
    positions = x(2, *[4] * len(sizes), len(sizes)) * 1.5  # some far outside
    how = {"mode": mode, "padding_mode": padding, "align_corners": align_corners}
    compiled(lambda v, at: F.grid_sample(v, at, **how), rows(x(2, 3, *sizes)), positions)


def rows(image):
    """The same with the channels of a position beside each other."""
    return image.movedim(1, -1).contiguous().movedim(-1, 1)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_values_beside_infinite_ones(padding):
    """What lies outside counts for nothing, whatever is read in its place."""
    image = x(1, 2, 4, 4)
    image[..., 0, 0] = torch.inf
    at = torch.tensor([[-3.0, 0.4], [0.9, 0.9], [1.1, -0.2], [torch.nan, 0.1]]).reshape(1, 1, 4, 2)
    how = {"padding_mode": padding, "align_corners": False}
    compiled(lambda v, at: F.grid_sample(v, at, **how), rows(image), at)


def test_positions_that_are_no_numbers_along_an_axis_of_one_element():
    at = torch.tensor([[0.2, torch.nan], [0.4, torch.inf]]).reshape(1, 1, 2, 2)
    how = {"padding_mode": "reflection", "align_corners": True}
    compiled(lambda v, g: F.grid_sample(v, g, **how), rows(x(1, 2, 1, 4)), at)


def test_values_between_elements_whose_channels_lie_apart_are_eagers():
    positions = x(1, 2, 2, 2)
    capture = check(lambda v, at: F.grid_sample(v + 0, at), x(1, 3, 5, 5), positions)
    assert "grid_sampler_2d" in str(capture.rejected)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("stride", "padding", "dilation"), [(1, 1, 1), (2, 0, 1), (3, 2, 2)], ids=str
)
def test_convolution_and_its_gradients(groups, transposed, stride, padding, dilation):
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    extra = {"output_padding": 1} if transposed and stride > 1 else {}
    conv = kind(4, 8, (3, 2), stride, padding, groups=groups, dilation=dilation, **extra)
    picture = x(2, 4, 9, 8).requires_grad_()

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = conv

        def forward(self, v):
            return self.conv(v * 2).square().mean()

    assert not check_training(Loss(), picture).rejected


@pytest.mark.parametrize("rank", [1, 3])
def test_convolution_of_other_ranks(rank):
    conv = (nn.Conv1d if rank == 1 else nn.Conv3d)(3, 4, 3, padding=1)
    compiled(conv, x(2, 3, *[5] * rank))


def test_inference_batch_norm_is_a_multiply_add_of_static_vectors():
    norm = nn.BatchNorm2d(3).eval()
    norm.running_mean.copy_(x(3))
    norm.running_var.copy_(x(3).abs() + 0.5)
    capture = compiled(norm, x(2, 3, 4, 4))
    (region,) = capture.parts[0].regions
    full = [n.op for n in region.graph.nodes if n.shape == (2, 3, 4, 4)]
    assert sorted(full) == ["add", "broadcast", "broadcast", "input", "mul"]


INDEXING = {
    "embedding": lambda v, i: F.embedding(i % 4, v[:, :, 0]),
    "index_select": lambda v, i: v.index_select(1, (i % 5).flatten()),
    "one_index": lambda v, i: v[:, i % 5],
    "negative_index": lambda v, i: v[i - 4],
    "two_indices": lambda v, i: v[:, i % 5, (i + 1) % 6],
    "apart_indices": lambda v, i: v[i % 4, :, i % 6],
    "broadcast_indices": lambda v, i: v[(i % 4)[:, None], (i % 5)[None]],
    "rows and columns": lambda v, i: v[:, i[:, :1] % 5, i[:1] - 4],
    "columns before rows": lambda v, i: v[(i[:, :1] % 4)[None], i[0] % 5],
    "interleaved indices": lambda v, i: v[i[:, None, :] % 4, (i[:2, 0] % 5)[:, None], 2],
    "a line and everything": lambda v, i: v[torch.arange(4)[:, None], i[0] - 2],
    "all positions of two axes": lambda v, i: (
        v[torch.arange(4), torch.arange(5)[:, None]] + i[0, 0]
    ),
    "gather": lambda v, i: v[:, :, 0].gather(1, i % 5),
    "slice_scatter": lambda v, i: torch.slice_scatter(v, v[:2] * 2, 0, 0, 4, 2) + i.sum(),
    "select_scatter": lambda v, i: torch.select_scatter(v, v[0] * 2, 0, 1) + i.sum(),
    "index_copy": lambda v, i: v.index_copy(1, i[0] % 5, v[:, :3] * 2),
    "index_put": lambda v, i: v.index_put((i[0] % 4,), v[:3] * 2),
    "inner index_put": lambda v, i: torch.ops.aten.index_put(
        v, [None, i[:, 0] - 2, i[:, 1]], v[:, 0, :4]
    ),
    "index_add": lambda v, i: v.index_add(1, i[0] % 5, v[:, :3] * 2, alpha=3),
    "scatter_add": lambda v, i: v.scatter_add(
        1, (i[0] % 5).view(1, 3, 1).expand(4, 3, 6), v[:, :3] * 2
    ),
    "index_put that adds": lambda v, i: v.index_put((i[0] % 4,), v[:3] * 2, accumulate=True),
    "tril": lambda v, i: v.tril(-1) + v.triu(2) + i.sum(),
    "nothing beside": lambda v, i: torch.cat([v * 2, (v + 1)[:, :, 6:]], 2) + i.sum(),
    "roll": lambda v, i: v.roll((1, -2), (0, 2)) + i.sum(),
    "repeat": lambda v, i: v.repeat(2, 1, 1, 3) + i.sum(),
}


@pytest.mark.parametrize("name", INDEXING)
def test_indexing(name):
    compiled(lambda v, i: INDEXING[name](v, i) * 1, x(4, 5, 6), ints(4, 3, low=0, high=4))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_attention_and_its_gradient(causal, mask):
    if causal and mask:
        pytest.skip("torch takes one or the other")
    visible = ints(2, 1, 6, 7, low=0, high=4, seed=3) > 0
    visible[..., 0] = True
    bias = None
    if mask:
        bias = visible if mask == "bool" else torch.where(visible, 0.0, -1e4)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(8, 8)

        def forward(self, q, k):
            k = self.project(k)
            out = F.scaled_dot_product_attention(self.project(q), k, k, bias, is_causal=causal)
            return out.square().sum()

    assert not check_training(Attention(), x(2, 3, 6, 8), x(2, 3, 7, 8, seed=1)).rejected


def test_rows_that_see_nothing_attend_to_nothing():
    hidden = torch.zeros(1, 1, 4, 5, dtype=torch.bool)
    hidden[..., 1:, 0] = True
    q, k = x(1, 2, 4, 8), x(1, 2, 5, 8, seed=1)
    compiled(lambda: F.scaled_dot_product_attention(q, k, k, hidden))


class Pools(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, v, labels):
        v = F.max_pool2d(self.norm(v), 3, 2, 1)
        v = F.avg_pool2d(F.gelu(v), 3, 1, 1, count_include_pad=False)
        v = F.adaptive_avg_pool2d(F.adaptive_avg_pool2d(v, (3, 4)), 1).flatten(1)
        return F.cross_entropy(self.head(v), labels, ignore_index=2)


def test_a_training_step_is_compiled_whole():
    capture = check_training(Pools(), x(3, 4, 11, 12).requires_grad_(), torch.tensor([0, 2, 1]))
    assert not capture.rejected
    assert [len(p.regions) for p in capture.parts] == [1, 1]


@st.composite
def view_chains(draw):
    steps = []
    for _ in range(draw(st.integers(1, 5))):
        name = draw(
            st.sampled_from(
                ("permute", "flatten", "slice", "select", "unsqueeze", "expand", "flip")
            )
        )
        steps.append((name, draw(st.integers(0, 7)), draw(st.integers(0, 7))))
    return steps


def follow(v, steps):
    for name, a, b in steps:
        if not v.dim():
            return v
        dim, other = a % v.dim(), b % v.dim()
        if name == "permute":
            v = v.transpose(dim, other)
        elif name == "flatten":
            v = v.reshape(-1, *v.shape[2:]) if v.dim() > 1 else v
        elif name == "slice":
            v = v.narrow(dim, b % v.shape[dim], v.shape[dim] - b % v.shape[dim])
        elif name == "select":
            v = v.select(dim, b % v.shape[dim])
        elif name == "unsqueeze":
            v = v.unsqueeze(dim)
        elif name == "expand":
            v = v.unsqueeze(0).expand(2, *v.shape)
        else:
            v = v.flip(dim)
    return v


@settings(max_examples=25, deadline=None)
@given(steps=view_chains())
def test_chains_of_views(steps):
    """Of a computed tensor, of an input, and as results in their own right."""
    check(lambda v: (follow(v, steps) + 1, follow(v * 2, steps)), x(2, 3, 4))
