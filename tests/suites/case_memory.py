"""Cases of ``tests.suites.cases`` about memory: views, mutation, indices, sizes, chance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from tests.suites.case_values import Case, rand

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "t": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(2, 0, 1),
    "movedim": lambda x: x.movedim(0, 2),
    "reshape": lambda x: x.reshape(6, 8),
    "view": lambda x: x.view(-1),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(2, (2, 2)),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "expand": lambda x: x[:, :1].expand(4, 3, 4),
    "slice": lambda x: x[1:3],
    "step": lambda x: x[:, ::2],
    "negative": lambda x: x[..., -3:-1],
    "select": lambda x: x[2],
    "select_last": lambda x: x[..., -1],
    "narrow": lambda x: x.narrow(2, 1, 2),
    "diagonal": lambda x: x.diagonal(0, 0, 2),
    "unfold": lambda x: x.unfold(2, 2, 1),
    "chunk": lambda x: x.chunk(2, 2),
    "split": lambda x: x.split((1, 3), 2),
    "unbind": lambda x: x.unbind(1),
    "flip": lambda x: x.flip(0, 2),
    "roll": lambda x: x.roll((1, -1), (0, 2)),
    "rot90": lambda x: x.rot90(1, (0, 2)),
    "repeat": lambda x: x.repeat(1, 2, 1),
    "tile": lambda x: x.tile(2),
    "interleave": lambda x: x.repeat_interleave(2, 1),
    "tril": lambda x: x.tril(),
    "triu": lambda x: x.triu(1),
    "as_strided": lambda x: x.as_strided((4, 3), (12, 4), 1),
    "swap": lambda x: x.swapaxes(1, 2),
    "stack": lambda x: torch.stack([x, x], 1),
    "cat": lambda x: torch.cat([x, x.flip(0)], 2),
    "hstack": lambda x: torch.hstack([x, x]),
    "meshgrid": lambda x: torch.meshgrid(x[0, 0], x[1, 1], indexing="ij"),
    "broadcast": lambda x: torch.broadcast_to(x, (2, 4, 3, 4)),
    "contiguous": lambda x: x.transpose(0, 2).contiguous(),
    "clone": lambda x: x.transpose(0, 1).clone(),
    "detach": lambda x: x.detach(),
    "identity": lambda x: x,
    "adjoint": lambda x: x.mT,
    "channel_shuffle": lambda x: F.pixel_unshuffle(x[None], 1),
    "diag_embed": lambda x: x.diag_embed(),
    "vander": lambda x: torch.vander(x[0, 0]),
    "block_diag": lambda x: torch.block_diag(x[0], x[1]),
}


def views() -> Iterator[Case]:
    """Each as it is (an alias where eager has one), then computed with, on two kinds of strides."""
    for name, fn in VIEWS.items():
        yield Case(f"view-{name}", lambda x, f=fn: (f(x), x + 1), lambda k: (rand(4, 3, 4),))
        yield Case(
            f"view-{name}-used", lambda x, f=fn: _twice(f(x)), lambda k: (rand(4, 3, 4, grad=True),)
        )
        if name != "view":
            yield Case(
                f"view-{name}-strided",
                lambda x, f=fn: _twice(f(x)),
                lambda k: (rand(4, 4, 3).transpose(1, 2),),
            )


def _twice(value: Any) -> Any:
    return [v * 2 + 1 for v in value] if isinstance(value, (tuple, list)) else value * 2 + 1


def _assign(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    x[index] = value
    return x


MUTATIONS: dict[str, Callable[..., Any]] = {
    "add_": lambda x, y: x.add_(y),
    "mul_": lambda x, y: (x.mul_(2), None)[1],
    "copy_": lambda x, y: x.copy_(y * 2),
    "zero_": lambda x, y: x.zero_() + y,
    "fill_": lambda x, y: x.fill_(-0.0),
    "relu_": lambda x, y: x.relu_() + 1,
    "clamp_": lambda x, y: x.clamp_(-0.1, 0.1),
    "sub_twice": lambda x, y: x.sub_(y).sub_(y),
    "row": lambda x, y: _assign(x, 1, 3.0),
    "column": lambda x, y: _assign(x, (slice(None), 0), y[:, 1]),
    "step": lambda x, y: _assign(x, slice(None, None, 2), -1.0),
    "mask": lambda x, y: _assign(x, x > 0, 0.0),
    "list": lambda x, y: _assign(x, [0, 2], y[:2]),
    "negative": lambda x, y: _assign(x, -1, y[0]),
    "view": lambda x, y: (x.view(-1).add_(1), x)[1],
    "transposed": lambda x, y: (x.t().mul_(3), y + 1),
    "row_view": lambda x, y: (x[1].add_(y[0]), x.sum()),
    "both": lambda x, y: (x.add_(1), y.mul_(2), x + y),
    "swap": lambda x, y: (x.copy_(y), y.zero_(), x * 2),
    "alias_out": lambda x, y: (x.add_(1), x[0]),
    "intermediate": lambda x, y: (x * 2).add_(y).relu_(),
    "intermediate_view": lambda x, y: _assign(x * 2, (slice(1, 3),), 5.0),
    "masked_fill_": lambda x, y: x.masked_fill_(y > 0, 7.0),
    "scatter_": lambda x, y: x.scatter_(1, y.argsort(1), y),
    "index_add_": lambda x, y: x.index_add_(0, torch.tensor([0, 0, 2]), y[:3]),
    "index_copy_": lambda x, y: x.index_copy_(0, torch.tensor([2, 1]), y[:2]),
    "put": lambda x, y: x.index_put_((torch.tensor([0, 1]),), y[:2], accumulate=True),
    "lerp_": lambda x, y: x.lerp_(y, 0.5),
    "addcmul_": lambda x, y: x.addcmul_(y, y),
    "tanh_": lambda x, y: torch.tanh_(x),
    "out": lambda x, y: torch.add(x, y, out=x),
    "bernoulli_": lambda x, y: x.bernoulli_(0.5),
    "swap_rows": lambda x, y: _assign(x, [0, 1], x[[1, 0]]),
    "same_twice": lambda x, y: (x.add_(1), x, x),
    "exponential": lambda x, y: x.uniform_() + y,
    "diag": lambda x, y: (x.diagonal().fill_(1.0), x)[1],
    "squeeze_": lambda x, y: x.unsqueeze(0).add_(1).squeeze(0) + y,
    "t_copy": lambda x, y: x.copy_(x.t() + y),
}


def mutations() -> Iterator[Case]:
    for name, fn in MUTATIONS.items():
        yield Case(f"mutation-{name}", fn, lambda k: (rand(4, 4), rand(4, 4)))
        yield Case(f"mutation-{name}-part", fn, lambda k: (rand(6, 8)[1:5, ::2], rand(4, 4).t()))


INDICES: dict[str, Callable[..., Any]] = {
    "rows": lambda x, i: x[i],
    "columns": lambda x, i: x[:, i % 5],
    "pairs": lambda x, i: x[i, i % 5],
    "negative": lambda x, i: x[-i - 1],
    "grid": lambda x, i: x[i[:, None], (i % 5)[None]],
    "new_axis": lambda x, i: x[i, None],
    "ellipsis": lambda x, i: x[..., i % 5],
    "select": lambda x, i: x.index_select(0, i),
    "gather": lambda x, i: x.gather(0, i[:, None].expand(4, 5)),
    "gather1": lambda x, i: x.gather(1, (i % 5)[None].expand(6, 4)),
    "take": lambda x, i: x.take(i),
    "along": lambda x, i: x.take_along_dim(x.argsort(1), 1),
    "embedding": lambda x, i: F.embedding(i, x),
    "bag": lambda x, i: F.embedding_bag(i[None], x, mode="sum"),
    "one_hot": lambda x, i: F.one_hot(i, 6) * 1.0,
    "scatter": lambda x, i: x.scatter(0, i[:, None].expand(4, 5), x[:4]),
    "scatter_value": lambda x, i: x.scatter(0, i[:, None], 2.0),
    "scatter_add": lambda x, i: x.scatter_add(0, i[:, None].expand(4, 5), x[:4]),
    "amax": lambda x, i: x.scatter_reduce(0, i[:, None].expand(4, 5), x[:4], "amax"),
    "mean": lambda x, i: x.scatter_reduce(0, i[:, None].expand(4, 5), x[:4], "mean"),
    "prod": lambda x, i: x.scatter_reduce(
        0, i[:, None].expand(4, 5), x[:4], "prod", include_self=False
    ),
    "index_add": lambda x, i: x.index_add(0, i, x[:4], alpha=2),
    "index_copy": lambda x, i: x.index_copy(0, i.unique()[:1], x[:1]),
    "index_fill": lambda x, i: x.index_fill(0, i, -1.0),
    "index_put": lambda x, i: x.index_put((i,), x[:4] * 0 + 1),
    "accumulate": lambda x, i: x.index_put((i, i % 5), x[0, :4], accumulate=True),
    "masked": lambda x, i: x.masked_fill(x > 0, -0.0),
    "masked_scatter": lambda x, i: x.masked_scatter(x > 0, x.flatten()),
    "where": lambda x, i: torch.where(i[:, None] > 2, x[:4], x[2:]),
    "select_scatter": lambda x, i: x.select_scatter(x[0], 0, 2),
    "slice_scatter": lambda x, i: x.slice_scatter(x[:2] * 2, 0, 1, 3),
    "diagonal_scatter": lambda x, i: x.diagonal_scatter(x[0]),
    "bucketize": lambda x, i: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])),
    "searchsorted": lambda x, i: torch.searchsorted(x.sort(1)[0], x),
    "isin": lambda x, i: torch.isin(i, torch.tensor([1, 3])),
    "nll": lambda x, i: F.nll_loss(x[:4].log_softmax(1), i % 5),
    "cross_entropy": lambda x, i: F.cross_entropy(x[:4], i % 5),
    "smoothed": lambda x, i: F.cross_entropy(x[:4], i % 5, label_smoothing=0.1),
    "ignored": lambda x, i: F.cross_entropy(x[:4], i % 5, ignore_index=2, reduction="sum"),
    "put": lambda x, i: x.put(i, x[0, :4]),
    "cross_mask": lambda x, i: x[:, torch.tensor([True, False, True, False, True])],
    "bincount": lambda x, i: torch.bincount(i, minlength=6),
    "histc": lambda x, i: torch.histc(x.detach(), 4, -2, 2),
}


def indices() -> Iterator[Case]:
    def index(k: int) -> torch.Tensor:
        return torch.tensor([(0, 3, 5, 2), (1, 1, 4, 0), (5, 4, 3, 3)][k % 3])

    for name, fn in INDICES.items():
        yield Case(f"index-{name}", fn, lambda k: (rand(6, 5), index(k)))
        yield Case(f"index-{name}-grad", fn, lambda k: (rand(6, 5, grad=True), index(k)))


CHANCE: dict[str, Callable[[torch.Tensor], Any]] = {
    "rand": lambda x: torch.rand(3, 4) + x[0, 0],
    "randn": lambda x: torch.randn(4) * x,
    "rand_like": lambda x: torch.rand_like(x) + x,
    "randint": lambda x: torch.randint(0, 9, (4,)) + x,
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout_eval": lambda x: F.dropout(x, 0.5, training=False) * 2,
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "randperm": lambda x: x[torch.randperm(4)],
    "normal": lambda x: torch.normal(x, x.abs() + 1),
    "multinomial": lambda x: torch.multinomial(x.softmax(1), 2),
    "two": lambda x: (torch.rand(2), x * torch.rand(4)),
    "feature_dropout": lambda x: F.dropout1d(x[None]),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.2),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x),
}


def chance() -> Iterator[Case]:
    for name, fn in CHANCE.items():
        yield Case(f"random-{name}", fn, lambda k: (rand(4, 4),))


SCALARS: dict[str, Callable[..., Any]] = {
    "int": lambda x, n: x * n,
    "float": lambda x, n: x + n / 2,
    "power": lambda x, n: x**n,
    "full": lambda x, n: torch.full((3,), n) + 1,
    "arange": lambda x, n: torch.arange(n) * 2,
    "size": lambda x, n: x.reshape(2, -1)[:, :n] * n,
    "slice": lambda x, n: x[:n].sum(0),
    "zeros": lambda x, n: torch.zeros(n, 2) + 1,
    "tensor": lambda x, n: torch.tensor(n) * x.sum(),
    "compare": lambda x, n: x > n,
    "repeat": lambda x, n: x.repeat(n, 1) + 1,
    "number": lambda x, n: n * 2 + 1,
    "shape": lambda x, n: x.shape[0] * n,
    "add": lambda x, n: torch.add(n, 2),
    "only": lambda x, n: torch.mul(2.0, 3),
    "eye": lambda x, n: torch.eye(n) * 2,
    "tril": lambda x, n: x.tril(n - 3),
    "roll": lambda x, n: x.roll(n, 0) + 1,
    "linspace": lambda x, n: torch.linspace(0, n, 5) * 2,
    "pad": lambda x, n: F.pad(x, (n, 0)) * 2,
}


def scalars() -> Iterator[Case]:
    for name, fn in SCALARS.items():
        for dynamic in (False, True):
            yield Case(
                f"scalar-{name}{'-dynamic' * dynamic}", fn, lambda k: (rand(6, 4), 2 + k), dynamic
            )


DYNAMIC: dict[str, Callable[[torch.Tensor], Any]] = {
    "pointwise": lambda x: x.relu() * 2 + 1,
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean(0),
    "softmax": lambda x: x.softmax(1),
    "matmul": lambda x: x @ x.t(),
    "cat": lambda x: torch.cat([x, x * 2]),
    "norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "view": lambda x: x.reshape(-1) * 2,
    "transpose": lambda x: x.t().contiguous() + 1,
    "slice": lambda x: x[1:] - x[:-1],
    "numel": lambda x: x / x.numel(),
    "cumsum": lambda x: x.cumsum(0),
    "arange": lambda x: x + torch.arange(x.shape[0])[:, None],
    "mask": lambda x: x.masked_fill(torch.ones(x.shape[0], x.shape[0]).triu(1)[:, :1] > 0, 0.0),
    "max": lambda x: x.max(0),
    "mutate": lambda x: x.detach().add_(1),
}


def sizes() -> Iterator[Case]:
    for name, fn in DYNAMIC.items():
        yield Case(f"dynamic-{name}", fn, lambda k: (rand((5, 8, 3)[k % 3], 6),), True)
        yield Case(
            f"dynamic-{name}-grad", fn, lambda k: (rand((5, 8, 3)[k % 3], 6, grad=True),), True
        )


UNBACKED: dict[str, Callable[[torch.Tensor], Any]] = {
    "nonzero": lambda x: torch.nonzero(x) + 1,
    "cat": lambda x: torch.cat([torch.nonzero(x), torch.nonzero(x) * 2]),
    "mask": lambda x: x[x > 0] * 2,
    "sum": lambda x: x[x > 0].sum() + x.sum(),
    "item": lambda x: x.sum().item() + 1,
    "both": lambda x: torch.cat([x[x > 0], x[x <= 0]]).relu(),
    "where": lambda x: torch.where(x > 0)[0] * 2,
    "unique": lambda x: torch.unique(x.round()) + 1,
    "repeat": lambda x: torch.repeat_interleave(x, (x > 0).long()) * 2,
    "select": lambda x: torch.masked_select(x, x > 0).exp(),
    "argwhere": lambda x: torch.argwhere(x > 0).sum(0),
    "outer": lambda x: torch.outer(x[x > 0], x[x > 0]),
}


def unbacked() -> Iterator[Case]:
    for name, fn in UNBACKED.items():
        yield Case(f"unbacked-{name}", fn, lambda k: (rand(7) - (0, 9, -9)[k % 3],), values=True)


LARGE: dict[str, Callable[[torch.Tensor], Any]] = {
    "amax": lambda x: x.expand(2**16, 2**15 + 8)[:, :9].amax(),
    "last": lambda x: x.expand(2**16, 2**15 + 8)[-1, -5:] * 2,
    "slice": lambda x: x.expand(2**16, 2**16)[::4096, ::8192] + 1,
    "any": lambda x: (x.expand(2**16, 2**15 + 8)[:8] > 0).any(1),
    "far": lambda x: x.expand(2**16, 2**17)[2**16 - 3 :, 2**17 - 2 :].sum(),
}


def large() -> Iterator[Case]:
    for name, fn in LARGE.items():
        yield Case(f"large-{name}", fn, lambda k: (rand(2**16, 1),))


ERRORS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "index": lambda x, i: x[i * 2],
    "index_put": lambda x, i: x.index_put((i + 2,), x[0, 0]),
    "select": lambda x, i: x.index_select(0, i + 3),
    "embedding": lambda x, i: F.embedding(i + 1, x),
    "gather": lambda x, i: x.gather(0, (i - 2)[:, None]),
    "take": lambda x, i: x.take(i * 9),
    "scatter": lambda x, i: x.scatter(0, (i * 3)[:, None], 1.0),
    "one_hot": lambda x, i: F.one_hot(i, 5) * x.sum(),
    "target": lambda x, i: F.cross_entropy(x[:4], i),
    "nll": lambda x, i: F.nll_loss(x[:4].log_softmax(1), i * 2),
    "index_add": lambda x, i: x.index_add(0, i + 2, x[:4]),
    "divide": lambda x, i: i // (i - 3),
    "remainder": lambda x, i: i % (i - 3),
    "floor": lambda x, i: torch.div(i, i - 5, rounding_mode="floor"),
    "bincount": lambda x, i: torch.bincount(i - 3),
    "multinomial": lambda x, i: torch.multinomial(x - 9, 2),
    "dtype": lambda x, i: i.add_(x.sum()),
    "shapes": lambda x, i: x + i,
    "product": lambda x, i: x @ x,
    "view": lambda x, i: x.t().view(-1),
    "reshape": lambda x, i: x.reshape(7, -1),
    "leaf": lambda x, i: x.clone().requires_grad_().detach().view(4, 9),
    "repeat": lambda x, i: torch.repeat_interleave(x, i - 3, 0),
    "cat": lambda x, i: torch.cat([x, x[:, :2]]),
    "dim": lambda x, i: x.sum(3),
    "empty": lambda x, i: x[:0].amax(),
}


def errors() -> Iterator[Case]:
    """What eager raises, at the first call or after calls that went well."""

    def index(k: int, at: int) -> torch.Tensor:
        return torch.tensor((0, 3, 5, 2) if k == at else (2, 2, 2, 2))

    for name, fn in ERRORS.items():
        yield Case(f"error-{name}", fn, lambda k: (rand(6, 5), index(k, 0)))
        yield Case(f"error-{name}-later", fn, lambda k: (rand(6, 5), index(k, 2)))


FAMILIES = (views, mutations, indices, chance, scalars, sizes, unbacked, large, errors)
