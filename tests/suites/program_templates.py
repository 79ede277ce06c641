"""What lines of random programs may be (``tests.suites.program_lines``, which tries them)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.suites.program_lines import Writer

DEEPEST, PARTS = 512, 64  # positions that a product sums over, and parts of a value


class Line(NamedTuple):
    """What is computed, or done: ``writes`` into values that are there."""

    text: str
    writes: bool = False


UNARY = (
    "torch.relu({a})", "torch.tanh({a})", "torch.sigmoid({a})", "F.gelu({a})", "F.silu({a})",
    "F.gelu({a}, approximate='tanh')", "{a}.abs()", "-{a}", "torch.exp({a} * 0.3)", "F.mish({a})",
    "torch.erf({a})", "torch.log1p({a}.abs())", "torch.sqrt({a}.abs() + 0.1)", "{a} * 0.5 + 1",
    "1 / ({a}.abs() + 0.5)", "{a}.clamp(-0.7, 1.2)", "F.softplus({a})", "F.hardswish({a})",
    "F.leaky_relu({a}, 0.1)", "{a} ** 2", "torch.rsqrt({a} * {a} + 1)", "F.elu({a})",
    "{a}.contiguous()", "{a}.clone()", "torch.where({a} > 0, {a}, 0.1)", "torch.cos({a}) + 1",
    "torch.sin({a})", "torch.tan({a} * 0.1)", "torch.asinh({a})", "torch.expm1({a} * 0.1)",
    "F.selu({a})", "F.celu({a})", "F.hardtanh({a})", "F.hardsigmoid({a})", "F.logsigmoid({a})",
    "F.tanhshrink({a})", "F.softsign({a})", "F.relu6({a})", "{a}.square()", "torch.nan_to_num({a})",
    "torch.lgamma({a}.abs() + 1)", "torch.sinc({a})", "torch.atan({a})", "F.softmin({a}, -1)",
    "torch.special.expit({a})", "torch.sgn({a}) * {a}", "torch.log2({a}.abs() + 1)",
    "torch.where({a}.isnan(), 0.0, {a})", "torch.special.i0e({a})",
    "torch.erfinv({a}.tanh() * 0.9)",
)  # fmt: skip
BINARY = (
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "{a} / ({b}.abs() + 1)", "torch.maximum({a}, {b})",
    "torch.minimum({a}, {b})", "torch.lerp({a}, {b}, 0.3)", "torch.hypot({a}, {b} + 0.1)",
    "torch.addcmul({a}, {b}, {c})", "torch.where({a} > {b}, {b}, {c})", "{a} * torch.sigmoid({b})",
    "torch.atan2({a}, {b}.abs() + 1)", "torch.logaddexp({a}, {b})", "torch.fmax({a}, {b})",
    "torch.copysign({a}, {b})", "torch.xlogy({a}.abs(), {b}.abs() + 1)", "F.prelu({a}, {b}.mean())",
    "torch.pow({a}.abs() + 0.1, {b}.clamp(-2, 2))", "torch.addcdiv({a}, {b}, {c}.abs() + 1)",
    "F.mse_loss({a}, {b})", "F.smooth_l1_loss({a}, {b}, reduction='none')", "torch.rsub({a}, {b})",
    "F.cosine_similarity({a}, {b}, {d})", "torch.dist({a}, {b})", "torch.clamp({a}, {b} - 1, {b})",
    "F.kl_div({a}.log_softmax(-1), {b}.softmax(-1), reduction='sum')", "{a}.where({b} > 0, {c})",
)  # fmt: skip
REDUCED = (
    "{a}.sum({d})", "{a}.mean({d}, keepdim=True)", "{a}.amax({d})", "{a}.amin({d}, keepdim=True)",
    "{a}.var({d}, unbiased=False)", "{a}.std({d}, keepdim=True, unbiased=False) + {a}",
    "torch.logsumexp({a}, {d})", "{a}.softmax({d})", "{a}.log_softmax({d})", "{a}.cumsum({d})",
    "{a}.norm(dim={d})", "F.normalize({a}, dim={d})", "{a}.sum()", "{a}.mean(({d}, {e}))",
    "{a} - {a}.mean({d}, keepdim=True)", "{a} / ({a}.norm(dim={d}, keepdim=True) + 1)",
    "{a}.argmax({d}).to({a}.dtype)", "({a} > 0).sum({d})", "({a} > 0).any({d})", "{a}.prod({d})",
    "{a}.flip({d}).cumsum({d})", "{a}.softmax({d}) * {a}", "{a}.mean(({d}, {e}), keepdim=True)",
    "{a}.median({d}).values", "{a}.std()", "{a}.amax()", "{a}.argmin({d}).to({a}.dtype)",
    "torch.aminmax({a}, dim={d}).max", "{a}.cummax({d}).values", "torch.logcumsumexp({a}, {d})",
    "({a} > 0).all({d}).to({a}.dtype)", "torch.linalg.vector_norm({a}, 1, {d})", "{a}.cumprod({d})",
    "{a}.norm(p=3, dim={d})", "torch.diff({a}, dim={d})", "torch.trapezoid({a}, dim={d})",
    "{a}.sort({d}).values", "{a}.topk(1, {d}).values", "{a}.max({d}, keepdim=True).values",
    "torch.var_mean({a}, {d}, unbiased=False)[1]", "{a}.nansum({d})", "{a}.logsumexp(({d}, {e}))",
    "F.glu({a}, {d})", "{a}.min({d}).values + {a}.max({d}).values",
    "{a}.sum(({d}, {e}), dtype=torch.float32)",
)  # fmt: skip
VIEWS = (
    "{a}.transpose({d}, {e})", "{a}.unsqueeze({d})", "{a}.flip({d})", "{a}.flatten()",
    "{a}.roll({n}, {d})", "{a}.narrow({d}, 0, 1)", "{a}.select({d}, -1)", "{a}.movedim({d}, {e})",
    "{a}[..., 1:]", "{a}[..., ::2]", "{a}[:1]", "{a}[-1]", "{a}[..., None]", "{a}.mT",
    "torch.cat([{a}, {a}], {d})", "torch.stack([{a}, {a}], {d})", "{a}.repeat_interleave(2, {d})",
    "{a}.chunk(2, {d})[0]",
    "F.pad({a}, (1, 2))", "F.pad({a}, (-1, 1), value=0.5)", "{a}.tril()", "{a}.triu(1)",
    "{a}.expand(2, *{a}.shape)", "{a}.tile(2)", "{a}.squeeze()", "{a}.reshape(-1)", "{a}.view(-1)",
    "{a}.diagonal(0, -2, -1)", "{a}.unfold({d}, 2, 1)", "{a}[:, [0, -1]]",
    "{a}.index_select({d}, torch.tensor([0, 0]))", "{a}.swapaxes(0, -1).contiguous()",
    "torch.cat([{a}[..., 1:], {a}[..., :1]], -1)", "{a}.masked_fill({a} > 0.5, -1.0)",
    "{a}.triu() + {a}.tril(-1)", "{a}.unflatten(-1, (2, -1))", "{a}.flatten(-2)",
    "{a}.rot90(1, ({d}, {e}))", "{a}.gather({d}, torch.zeros_like({a}, dtype=torch.int64))",
    "torch.take_along_dim({a}, {a}.argsort({d}), {d})", "{a}.tensor_split(2, {d})[-1]",
    "F.pad({a}, (1, 1), mode='replicate')", "F.pad({a}, (1, 1), mode='circular')",
    "{a}.diag_embed()", "{a}[..., -1, None]", "{a}.repeat({n}, *[1] * {a}.dim())",
    "{a}[torch.arange({a}.shape[0]).flip(0)]", "{a}[:, ::2]", "{a}.narrow({d}, -1, 1)",
    "{a}.expand_as({a}.unsqueeze(0))", "{a}.view({a}.shape[0], -1)", "torch.block_diag({a}, {a})",
    "{a}.scatter({d}, torch.zeros_like({a}, dtype=torch.int64), 0.5)",
    "{a}.permute(*range({a}.dim())[::-1])",
    "torch.zeros_like({a}).index_add({d}, torch.tensor([0]), {a}.narrow({d}, 0, 1))",
    "torch.where(torch.arange({a}.shape[-1]) > {n}, {a}, 0.0)",
    "{a} + torch.arange({a}.shape[0])[0]",
)  # fmt: skip
INTEGERS = (
    "{a} * 2 + 1", "{a} // 2", "{a} % 3", "{a} & 1", "{a}.cumsum({d})", "{a}.sum({d})", "{a} == 1",
    "({a} > 1) | ({a} == 0)", "{a}.float().mean({d})", "F.one_hot({a}.clamp(0, 3), 4)", "{a}.abs()",
    "{a}.amax({d})", "torch.where({a} > 1, {a}, 0)", "{a}.flip({d})", "{a}[..., 1:]", "-{a}",
    "{a}.clamp(1, 2)", "{a} << 1", "{a}.to(torch.int32) + {n}", "{a} / 2", "{a}.argmax({d})",
)  # fmt: skip
CASTS = (
    "{a}.to(torch.bfloat16)", "{a}.to(torch.float32)", "{a}.double()", "{a}.float()", "({a} > 0)",
    "({a} > 0).float()", "{a}.half()",
)  # fmt: skip
WRITES = (
    "{a}.add_({b})", "{a}.mul_(0.5)", "{a}.copy_({b})", "{a}[..., 0] = 0.25", "{a}[:1] = {a}[-1:]",
    "{a}[..., 1:].mul_({b}[..., 1:].sigmoid())", "{a}.clamp_(-1, 1)", "{a}.relu_()",
    "{a}[0] += {b}[-1]", "{a}.mT.mul_(2)", "{a}.view(-1)[:2] = 1.0", "{a}.neg_()", "{a}.fill_(0.3)",
    "{a}.sub_({b}.mean())", "{a}.masked_fill_({a} > 0, 0.1)", "{a}.transpose(0, -1).add_(1)",
    "{a}.zero_()", "{a}[..., ::2] = {b}[..., ::2]", "{a}.index_fill_({d}, torch.tensor([0]), 0.7)",
)  # fmt: skip


def _of_one(patterns: Sequence[str]) -> Callable[[Writer], Line]:
    return lambda w: Line(w.filled(patterns, w.pick()))


def _of_several(w: Writer) -> Line:
    return Line(w.filled(BINARY, w.pick(), w.pick(), w.pick()))


def _joined(w: Writer) -> Line:
    patterns = [
        "torch.cat([{a}, {b}], {d})", "torch.stack([{a}, {b}], {d})", "{a} + {b}.mT",
        "torch.hstack([{a}, {b}])", "torch.cat([{a}, {b}, {a} * 2], {d})",
    ]  # fmt: skip
    return Line(w.filled(patterns, w.pick(), w.pick()))


def _parted(w: Writer) -> Line:
    patterns = ["{a}.unbind({d})[-1]", "{a}.split({n}, {d})[0] * 2"]
    return Line(w.filled(patterns, w.pick(lambda v: max(v.shape, default=0) <= PARTS)))


def _write(w: Writer) -> Line:
    """Leaves that want gradients are not written: eager refuses that."""
    leaves = {"x0"} if w.program.gradients else set()
    first = w.pick(lambda v: v.dim() > 0)
    if first in leaves:
        raise LookupError
    return Line(w.filled(WRITES, first, w.pick()), writes=True)


def _linear(w: Writer) -> Line:
    x = w.pick(lambda v: v.dim() >= 1 and v.shape[-1] <= DEEPEST)
    width = w.size()
    weight = w.parameter((width, w.values[x].shape[-1]), x)
    if w.draw.random() < 0.5:
        return Line(f"F.linear({x}, {weight}, {w.parameter((width,), x)})")
    return Line(w.draw.choice([f"{x} @ {weight}.T", f"F.linear({x}, {weight})"]))


def _product(w: Writer) -> Line:
    patterns = [
        "{a} @ {b}.mT * 0.2", "{a} @ {b} * 0.2", "torch.matmul({a}.mT, {b}) * 0.2",
        "torch.einsum('...i,...i->...', {a}, {b}) * 0.2",
        "torch.einsum('...ij,...kj->...ik', {a}, {b}) * 0.2", "torch.cdist({a}, {b})",
        "torch.einsum('i...,j...->ij...', {a}, {b})", "torch.tensordot({a}, {b}, 1) * 0.2",
    ]  # fmt: skip
    x, y = (w.pick(lambda v: v.dim() >= 2) for _ in range(2))
    return Line(w.filled(patterns, x, y))


def _norm(w: Writer) -> Line:
    x = w.pick(lambda v: v.dim() >= 2)
    width = w.values[x].shape[-1]
    scale, bias = (w.parameter((width,), x) for _ in range(2))
    choices = [
        f"F.layer_norm({x}, ({width},), {scale}, {bias})",
        f"F.layer_norm({x}, ({width},))",
        f"F.rms_norm({x}, ({width},), {scale})",
        f"{x} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + 1e-5) * {scale}",
    ]
    if w.values[x].dim() >= 3:
        mean, var = (w.parameter((w.values[x].shape[1],), x) for _ in range(2))
        choices += [
            f"F.group_norm({x}, 1)",
            f"F.instance_norm({x})",
            f"F.batch_norm({x}, {mean}, {var}.abs() + 0.5)",
            f"F.batch_norm({x}, None, None, {var}, {mean}, True)",
        ]
    return Line(w.draw.choice(choices))


def _conv(w: Writer) -> Line:
    x = w.pick(lambda v: 3 <= v.dim() <= 5)
    rank, channels = w.values[x].dim() - 2, w.values[x].shape[1]
    groups, kernel = w.draw.choice([1, 1, 1, channels]), w.draw.choice([1, 1, 2, 3, 3, 5])
    out = channels * w.draw.choice([1, 2]) if groups > 1 else w.size()
    name = f"conv{rank}d" if w.draw.random() < 0.8 else f"conv_transpose{rank}d"
    ends = (channels, out // groups) if "transpose" in name else (out, channels // groups)
    weight = w.parameter((*ends, *[kernel] * rank), x)
    bias = w.parameter((out,), x) if w.draw.random() < 0.5 else None
    how = (
        f"stride={w.draw.choice([1, 1, 2])}, padding={w.draw.choice([0, 1, 2])}, groups={groups}, "
        f"dilation={w.draw.choice([1, 1, 1, 2])}"
    )
    return Line(f"F.{name}({x}, {weight}, {bias}, {how}) * 0.3")


def _pool(w: Writer) -> Line:
    x = w.pick(lambda v: 3 <= v.dim() <= 4)
    rank = w.values[x].dim() - 2
    choices = [
        f"F.max_pool{rank}d({x}, 2)", f"F.avg_pool{rank}d({x}, 3, 1, 1)",
        f"F.max_pool{rank}d({x}, 3, 2, 1)", f"F.adaptive_avg_pool{rank}d({x}, 1)",
        f"F.avg_pool{rank}d({x}, 2, ceil_mode=True)", f"F.adaptive_avg_pool{rank}d({x}, 3)",
        f"F.interpolate({x}, scale_factor=2)",
        f"F.interpolate({x}, scale_factor=2, mode='nearest-exact')",
        f"F.adaptive_max_pool{rank}d({x}, 2)", f"F.max_pool{rank}d({x}, 3, 1, 1, 2)",
        f"F.interpolate({x}, {(5, 7)[:rank]}, mode='area')", f"F.channel_shuffle({x}, 2)",
        f"F.avg_pool{rank}d({x}, 3, 2, 1, count_include_pad=False)",
    ]  # fmt: skip
    if rank == 2:
        choices += [
            f"F.interpolate({x}, scale_factor=1.5, mode='bilinear')",
            f"{x}.contiguous(memory_format=torch.channels_last)",
            f"F.pad({x}, (1, 1, 0, 2), mode='reflect')",
            f"F.pixel_unshuffle({x}, 2)",
            f"F.pixel_shuffle({x}, 2)",
            f"F.interpolate({x}, (5, 7), mode='bilinear', align_corners=True)",
            f"F.interpolate({x}, scale_factor=2, mode='bicubic')",
            f"F.unfold({x}, 2)",
            f"F.pad({x}, (2, 1, 1, 1), mode='circular')",
            f"F.lp_pool2d({x}.abs() + 0.1, 2, 2)",
        ]
    return Line(w.draw.choice(choices))


def _attention(w: Writer) -> Line:
    x = w.pick(lambda v: v.dim() in (3, 4) and v.shape[-1] <= 128)
    given = w.values[x]
    y = w.pick(lambda v: v.shape == given.shape and v.dtype == given.dtype)
    square = f"torch.ones({x}.shape[-2], {x}.shape[-2], dtype=torch.bool).triu(1)"
    return Line(
        w.draw.choice(
            [
                f"F.scaled_dot_product_attention({x}, {y}, {x})",
                f"F.scaled_dot_product_attention({x}, {x}, {y}, is_causal=True)",
                f"({x} @ {y}.mT / {given.shape[-1]} ** 0.5).softmax(-1) @ {x}",
                f"({x} @ {y}.mT).masked_fill({square}, -1e4).softmax(-1) @ {y}",
            ]
        )
    )


def _indexed(w: Writer) -> Line:
    places = w.pick(lambda v: v.dim() <= 3, floats=False)
    if w.values[places].dtype == torch.bool:
        return Line(w.filled(["torch.where({b}, {a}, {a} * 0.1)"], w.pick(), places))
    if w.draw.random() < 0.5:
        return Line(w.filled(INTEGERS, places))
    table = w.parameter((w.size() + 4, w.size()), places)
    table = table.partition(".to(")[0]
    return Line(w.draw.choice([f"F.embedding({places}, {table})", f"{places} * 0.5 + 1"]))


TEMPLATES: tuple[Callable[[Writer], Line], ...] = (
    *[_of_one(UNARY)] * 5, *[_of_several] * 5, *[_of_one(REDUCED)] * 5, *[_of_one(VIEWS)] * 6,
    _of_one(CASTS), *[_write] * 2, *[_linear] * 3, *[_product] * 2, *[_norm] * 3, *[_conv] * 3,
    _pool, _attention, _indexed, _joined, _parted,
)  # fmt: skip
