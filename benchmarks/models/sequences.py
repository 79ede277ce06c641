"""Networks of sequences, sets and graphs that are no attention: state spaces, filters over time,
message passing, recommendations, recurrent layers."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class StateSpaceBlock(nn.Module):
    """Mamba-2's layer (Dao and Gu, 2024): chunks of positions by products, states between them."""

    def __init__(self, width: int, head: int = 64, state: int = 64, chunk: int = 64) -> None:
        super().__init__()
        self.inner, self.state, self.chunk = 2 * width, state, chunk
        self.heads = self.inner // head
        mixed = self.inner + 2 * state
        self.norm = nn.RMSNorm(width)
        self.enter = nn.Linear(width, self.inner + mixed + self.heads, bias=False)
        self.filter = nn.Conv1d(mixed, mixed, 4, groups=mixed, padding=3)
        self.rate = nn.Parameter(torch.linspace(-1.0, 1.0, self.heads))
        self.step = nn.Parameter(torch.linspace(-4.0, -1.0, self.heads))
        self.skip = nn.Parameter(torch.ones(self.heads))
        self.gated, self.leave = nn.RMSNorm(self.inner), nn.Linear(self.inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        length, sizes = x.shape[1], (self.inner, self.inner + 2 * self.state, self.heads)
        gate, mixed, step = self.enter(self.norm(x)).split(sizes, dim=-1)
        mixed = F.silu(self.filter(mixed.transpose(1, 2))[..., :length].transpose(1, 2))
        value, key, query = mixed.split((self.inner, self.state, self.state), dim=-1)
        value = value.unflatten(-1, (self.heads, -1))
        step = F.softplus(step + self.step)
        decay = -torch.exp(self.rate) * step
        made = self._scan(value * step[..., None], decay, key, query) + value * self.skip[:, None]
        return x + self.leave(self.gated(made.flatten(2) * F.silu(gate)))

    def _scan(self, value: Tensor, decay: Tensor, key: Tensor, query: Tensor) -> Tensor:
        """A linear recurrence of decaying states: within chunks, then from chunk to chunk."""
        parts = (-1, self.chunk)
        value, key, query = (part.unflatten(1, parts) for part in (value, key, query))
        summed = decay.unflatten(1, parts).permute(0, 3, 1, 2).cumsum(-1)
        between = summed[..., :, None] - summed[..., None, :]
        hidden = torch.ones(self.chunk, self.chunk, dtype=torch.bool, device=value.device).triu(1)
        weights = between.masked_fill(hidden, -torch.inf).exp()
        scores = (query @ key.transpose(-1, -2))[:, None] * weights
        value = value.permute(0, 3, 1, 2, 4)
        inside = scores @ value
        left = (summed[..., -1:] - summed).exp()
        states = (value * left[..., None]).transpose(-1, -2) @ key[:, None]
        state, before = torch.zeros_like(states[:, :, 0]), []
        for k in range(states.shape[2]):
            before.append(state)
            state = state * summed[:, :, k, -1, None, None].exp() + states[:, :, k]
        carried = query[:, None] @ torch.stack(before, 2).transpose(-1, -2)
        made = inside + carried * summed.exp()[..., None]
        return made.permute(0, 2, 3, 1, 4).flatten(1, 2)


class StateSpaceModel(nn.Module):
    """Tokens ``(batch, length)`` to hidden states; ``length`` is a multiple of a chunk."""

    def __init__(self, width: int = 512, depth: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(32000, width)
        self.blocks = nn.Sequential(*(StateSpaceBlock(width) for _ in range(depth)))
        self.norm = nn.RMSNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.blocks(self.embed(tokens)))


class SeparationBlock(nn.Module):
    """A dilated depthwise filter between two layers of single steps (Luo and Mesgarani, 2019)."""

    def __init__(self, width: int, hidden: int, dilation: int) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv1d(width, hidden, 1), nn.PReLU(), nn.GroupNorm(1, hidden))
        self.filter = nn.Sequential(
            nn.Conv1d(hidden, hidden, 3, padding=dilation, dilation=dilation, groups=hidden),
            nn.PReLU(),
            nn.GroupNorm(1, hidden),
        )
        self.on, self.out = nn.Conv1d(hidden, width, 1), nn.Conv1d(hidden, width, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.filter(self.enter(x))
        return x + self.on(hidden), self.out(hidden)


class Separation(nn.Module):
    """Conv-TasNet: a wave ``(batch, 1, samples)`` to the waves of two speakers."""

    def __init__(self, filters: int = 256, width: int = 128, hidden: int = 256) -> None:
        super().__init__()
        self.encode = nn.Conv1d(1, filters, 16, stride=8, bias=False)
        self.norm, self.enter = nn.GroupNorm(1, filters), nn.Conv1d(filters, width, 1)
        self.blocks = nn.ModuleList(
            SeparationBlock(width, hidden, 2**k) for _ in range(2) for k in range(7)
        )
        self.masks = nn.Sequential(nn.PReLU(), nn.Conv1d(width, 2 * filters, 1), nn.Sigmoid())
        self.decode = nn.ConvTranspose1d(filters, 1, 16, stride=8, bias=False)

    def forward(self, wave: Tensor) -> Tensor:
        coded = F.relu(self.encode(wave))
        x = self.enter(self.norm(coded))
        total = torch.zeros_like(x)
        for block in self.blocks:
            x, out = block(x)
            total = total + out
        masked = self.masks(total).unflatten(1, (2, -1)) * coded[:, None]
        return self.decode(masked.flatten(0, 1)).unflatten(0, (-1, 2)).squeeze(2)


class GraphAttention(nn.Module):
    """Attention of every node to the nodes from which edges come (Velickovic et al., 2018)."""

    def __init__(self, inputs: int, outputs: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.values, self.shortcut = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs)
        self.source = nn.Parameter(torch.randn(heads, outputs // heads) * 0.1)
        self.target = nn.Parameter(torch.randn(heads, outputs // heads) * 0.1)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        values = self.values(x).unflatten(-1, (self.heads, -1))
        given, wanted = (values * self.source).sum(-1), (values * self.target).sum(-1)
        weights = F.leaky_relu(given[source] + wanted[target], 0.2).clamp(max=20.0).exp()
        totals = weights.new_zeros(len(x), self.heads).index_add(0, target, weights)
        messages = values[source] * (weights / (totals[target] + 1e-9))[..., None]
        return self.shortcut(x) + torch.zeros_like(values).index_add(0, target, messages).flatten(1)


class GraphNet(nn.Module):
    """Classes of the nodes of a graph ``(nodes, features)`` with edges as two lists of nodes."""

    def __init__(self, features: int = 256, width: int = 256, classes: int = 40) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            GraphAttention(features if k == 0 else width, width) for k in range(3)
        )
        self.leave = nn.Linear(width, classes)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.elu(layer(x, source, target))
        return self.leave(x)


class Recommender(nn.Module):
    """DLRM (Naumov et al., 2019): embeddings of categories, products of all pairs, two networks."""

    def __init__(self, tables: int = 26, rows: int = 20000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = _layers(13, 512, 256, width)
        pairs = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("first", pairs[0])
        self.register_buffer("second", pairs[1])
        self.top = _layers(width + pairs.shape[1], 512, 256)
        self.leave = nn.Linear(256, 1)

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        found = [table(categories[:, k]) for k, table in enumerate(self.tables)]
        vectors = torch.stack([bottom, *found], dim=1)
        products = (vectors @ vectors.transpose(1, 2))[:, self.first, self.second]
        return self.leave(self.top(torch.cat([bottom, products], dim=1))).sigmoid()


def _layers(*widths: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        parts += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*parts)


class Tagger(nn.Module):
    """Tags of tokens ``(batch, length)`` from two bidirectional recurrent layers."""

    def __init__(self, width: int = 256, hidden: int = 256, tags: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(20000, width)
        self.recurrent = nn.LSTM(width, hidden, 2, batch_first=True, bidirectional=True)
        self.leave = nn.Linear(2 * hidden, tags)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.leave(self.recurrent(self.embed(tokens))[0])
