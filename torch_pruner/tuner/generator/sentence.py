"""Schedules as sentences: the sketch, then its decisions in order, each one of its options.

TLM (OSDI 2024) writes MetaSchedule's traces, with words for numbers. Here an option is described
by numbers, its ratio to the task's extents among them, so that sizes which no training has met are
no unknown words. What the task is, and on which processor, is the prompt.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.graph.contraction import contraction_of
from torch_pruner.graph.ops import OpKind
from torch_pruner.tuner.cost_model.pattern import TASK, task_features

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.task import Task
    from torch_pruner.tuner.cost_model.layers import Numbers
    from torch_pruner.tuner.search.space import Rows

VERSION = 1  # raise it whenever a number changes its meaning: older weights are ignored
KINDS = 48  # of sketches and decisions, by the hash of their names
EXTENTS = 6
NUMBERS = 7  # of an option by itself
OPTION = KINDS + NUMBERS + 2 * EXTENTS  # width of an option
PROMPT = TASK + EXTENTS
STEP = PROMPT + 3 * KINDS + OPTION  # width of a position: see ``inputs``
MAX_STEPS = 24  # decisions of a sketch that is written
_SCALE = 8.0  # logarithms to base 2 reach this and more


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task and its sketches: numbers (PROMPT,), and of each sketch its steps' options.

    ``options[i][0]`` (sketches, OPTION) are the sketches themselves, ``options[i][1 + j]``
    (options, OPTION) those of decision j. ``names[i]`` are the kinds of the sketch and of its
    decisions.
    """

    numbers: Numbers
    options: tuple[tuple[Numbers, ...], ...]
    kinds: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(task: Task, sketches: Sequence[Sketch]) -> Prompt:
        """Raises ValueError for a sketch of more than ``MAX_STEPS`` decisions."""
        extents = extents_of(task.spec)
        first = np.zeros((len(sketches), OPTION), np.float32)
        for i, sketch in enumerate(sketches):
            if len(sketch.names) > MAX_STEPS:
                raise ValueError(f"sketch {sketch.name} has {len(sketch.names)} decisions")
            first[i, _kind(sketch.name)] = 1.0
        options = tuple(
            (first, *(_options(n, d, extents) for n, d in zip(s.names, s.domains, strict=True)))
            for s in sketches
        )
        kinds = tuple((_kind(s.name), *map(_kind, s.names)) for s in sketches)
        numbers = np.concatenate([task_features(task), _log2(extents)]) / _SCALE
        return Prompt(numbers.astype(np.float32), options, kinds)


def extents_of(spec: Graph) -> Numbers:
    """(EXTENTS,): of a contraction rows, columns, reduction, the last axes of both, groups; else
    the results, those of the last axis, and what is read for each."""
    if sum(n.kind is OpKind.CONTRACT for n in spec.nodes) == 1:
        con = contraction_of(spec)
        found = (con.rows, con.n, con.depth, con.m[-1], con.k[-1], con.groups)
    else:
        out = spec.nodes[spec.outputs[0]]
        read = max((spec.nodes[i].numel for i in spec.inputs), default=1)
        last = out.shape[-1] if out.shape else 1
        found = (out.numel, last, -(-read // max(1, out.numel)), last, 1, 1)
    return np.maximum(np.array(found, dtype=np.float64), 1.0)


def inputs(prompt: Prompt, i: int, rows: Rows) -> Numbers:
    """(n, t + 1, STEP): what is known before each of the first t + 1 steps of sketch ``i``.

    ``rows`` (n, t) are the options of the first t decisions. A position has the prompt, the kind of
    the sketch (nothing before it is chosen), that of what comes next, that of what was chosen last,
    and which option that was.
    """
    n, t = rows.shape
    kinds, options = prompt.kinds[i], prompt.options[i]
    steps = min(t + 2, len(kinds))
    out = np.zeros((n, steps, STEP), np.float32)
    out[:, :, :PROMPT] = prompt.numbers
    out[:, 1:, PROMPT + kinds[0]] = 1.0
    for j in range(1, steps):
        out[:, j, PROMPT + KINDS + kinds[j]] = 1.0
        out[:, j, PROMPT + 2 * KINDS + kinds[j - 1]] = 1.0
        if j > 1:
            out[:, j, PROMPT + 3 * KINDS :] = options[j - 1][rows[:, j - 2]]
    return out


def _options(name: str, domain: np.ndarray, extents: Numbers) -> Numbers:
    """(m, OPTION): a decision's options."""
    values = np.asarray(domain, dtype=np.float64)
    m, size, most = len(values), np.log2(1.0 + np.abs(values)), float(np.abs(values).max())
    out = np.zeros((m, OPTION), np.float32)
    out[:, _kind(name)] = 1.0
    at = KINDS
    out[:, at] = size / _SCALE
    out[:, at + 1] = math.log2(1.0 + most) / _SCALE
    out[:, at + 2] = (math.log2(1.0 + most) - size) / _SCALE
    out[:, at + 3] = np.arange(m) / max(1, m - 1)
    out[:, at + 4] = values == 0
    out[:, at + 5] = values == 1
    out[:, at + 6] = np.arange(m) == m - 1
    at += NUMBERS
    whole = np.maximum(np.abs(values), 1.0)
    for k, extent in enumerate(extents):
        out[:, at + k] = np.clip(_log2(extent / whole), -_SCALE, 2 * _SCALE) / _SCALE
        out[:, at + EXTENTS + k] = extent % whole == 0
    return out


def _log2(values: Numbers) -> Numbers:
    return np.log2(values)


def _kind(name: str) -> int:
    return zlib.crc32(name.encode()) % KINDS
