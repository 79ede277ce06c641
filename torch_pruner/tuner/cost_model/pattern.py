"""What the pattern-aware model sees of points of a sketch: statement features and a token sequence.

Both follow from the kernel graph, the decisions and the symbols alone; nothing is lowered. The
statement features are one vector per point, the tokens the steps of its data flow (``sketch.flow``)
in order. A decision has a slot by its name, so that a sketch that is new needs no table here.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from torch_pruner.families.flow import LINE_BYTES, Reuse, Role, flow_of, symbol_columns
from torch_pruner.graph.describe import flops_of
from torch_pruner.graph.ops import EXPENSIVE, FLOATS, OpKind
from torch_pruner.tuner.cost_model.analytic import log_latency
from torch_pruner.tuner.cost_model.features import decision_features, signed_log2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.families.flow import FlowStep
    from torch_pruner.families.space import Sketch
    from torch_pruner.target import TargetSpec
    from torch_pruner.task import Task
    from torch_pruner.tuner.cost_model.base import Array, Decisions

VERSION = 1  # raise it whenever a feature changes its meaning: older weights are ignored
SYMBOLS = (
    "s1_registers", "s2_tile_ops", "s3_cache_bytes", "s4_tasks", "s5_traffic_bytes", "s6_rounds",
    "s7_contiguous_bytes", "s8_ops",
)  # fmt: skip
SLOTS, RATIOS, TASK = 32, 8, 19
STATEMENT = len(SYMBOLS) + 1 + RATIOS + SLOTS + TASK  # width of the statement features
TOKEN = 16 + len(Reuse)  # width of a token
MAX_TOKENS = 24
# Columns of the statement features that hold the draft model's estimate: baselines have none.
_DRAFTED = (len(SYMBOLS), len(SYMBOLS) + RATIOS - 1, len(SYMBOLS) + RATIOS)
_SMALL = 2.0**-20


@dataclass(frozen=True, slots=True)
class Patterns:
    """``n`` points: statement (n, STATEMENT), tokens (n, t, TOKEN), the t roles, prior (n,).

    The prior is the draft model's score, minus the logarithm of its seconds.
    """

    statement: Array
    tokens: Array
    roles: npt.NDArray[np.int64]
    prior: Array

    def __len__(self) -> int:
        return len(self.prior)


def patterns(task: Task, sketch: Sketch, decisions: Decisions) -> Patterns:
    """The features of the points ``decisions`` (n, d), row by row."""
    steps = list(flow_of(task, sketch, decisions))[:MAX_TOKENS]
    prior = -log_latency(sketch, decisions)
    return Patterns(
        statement_features(task, sketch, decisions, prior),
        token_features(task.target, steps, len(decisions)),
        np.array([int(s.role) for s in steps], dtype=np.int64),
        prior,
    )


def statement_features(task: Task, sketch: Sketch, decisions: Decisions, prior: Array) -> Array:
    """(n, STATEMENT): symbols, their ratios to the device, decisions by slot, the task."""
    n, target = len(decisions), task.target
    symbols = symbol_columns(sketch, decisions)
    s1, _, s3, s4, s5, s6, _, s8 = (symbols.get(k, np.ones(n)) for k in SYMBOLS)
    out = np.zeros((n, STATEMENT))
    at = len(SYMBOLS)
    for j, name in enumerate(SYMBOLS):
        if name in symbols:
            out[:, j] = signed_log2(symbols[name])
    seconds = np.exp(-prior)
    out[:, at] = np.log2(seconds)
    peak = target.peak_flops("float32", task.threads)
    ratios = (
        s1 / max(target.vector_registers, 1),
        s3 / max(target.l1_bytes, 1),
        s3 / max(target.l2_bytes, 1),
        s4 / (np.ceil(s4 / task.threads) * task.threads + _SMALL),  # how full the last wave is
        s6 * task.threads / np.maximum(s4, 1.0),
        s8 / np.maximum(s5, 1.0),
        s8 / peak / seconds,
        s5 / target.dram_bytes_per_s / seconds,
    )
    at += 1
    for j, ratio in enumerate(ratios):
        out[:, at + j] = _log2(ratio)
    at += RATIOS
    values = decision_features(decisions)
    for j, name in enumerate(sketch.names):
        out[:, at + zlib.crc32(name.encode()) % SLOTS] += values[:, j]
    out[:, at + SLOTS :] = task_features(task)
    return out


def undrafted_features(task: Task, sketch: Sketch, decisions: Decisions) -> Array:
    """(n, fewer than STATEMENT): the statement features but for what the draft model says."""
    whole = statement_features(task, sketch, decisions, np.zeros(len(decisions)))
    return np.delete(whole, _DRAFTED, axis=1)


def token_features(target: TargetSpec, steps: Sequence[FlowStep], n: int) -> Array:
    """(n, len(steps), TOKEN), every magnitude on a logarithmic scale."""
    names = ("moved", "unique", "span", "alloc", "stride", "run", "ops", "itemsize")
    raw = np.empty((len(names), len(steps), n))
    for t, step in enumerate(steps):
        for j, name in enumerate(names):
            raw[j, t] = getattr(step, name)
    moved, unique, span, alloc, stride, run, ops, item = raw
    line = np.clip(run, 1.0, LINE_BYTES)
    registers = float(target.vector_registers * target.vector_bytes)
    magnitudes = (moved, unique, moved / line, unique / line, span, alloc, stride, run, ops, item)
    ratios = (
        moved / np.maximum(unique, 1.0),  # how often a byte is touched
        span / target.l1_bytes,
        span / target.l2_bytes,
        span / target.l3_bytes,
        alloc / registers,
        ops / np.maximum(moved, 1.0),
    )
    out = np.zeros((TOKEN, len(steps), n))
    width = len(magnitudes)
    out[:width] = np.log2(1.0 + np.maximum(np.stack(magnitudes), 0.0))
    out[width : width + len(ratios)] = _log2(np.stack(ratios))
    for t, step in enumerate(steps):
        out[width + len(ratios) + int(step.reuse), t] = 1.0
    return np.ascontiguousarray(out.transpose(2, 1, 0))


def _log2(ratio: Array) -> Array:
    return np.log2(np.clip(ratio, _SMALL, 1.0 / _SMALL))


def task_features(task: Task) -> Array:
    """(TASK,): what all points of a task share; it tells the model where which trade-off holds."""
    spec, target = task.spec, task.target
    kinds = (OpKind.CONTRACT, OpKind.REDUCE, OpKind.WINDOW, OpKind.POINTWISE, OpKind.INJECTIVE)
    counts = [sum(n.kind is k for n in spec.nodes) for k in kinds]
    counts.append(sum(n.op in EXPENSIVE for n in spec.nodes))
    sizes = [
        flops_of(spec),
        sum(spec.nodes[i].nbytes for i in spec.inputs if spec.nodes[i].attr("static")),
        sum(spec.nodes[i].nbytes for i in spec.inputs if not spec.nodes[i].attr("static")),
        sum(spec.nodes[o].nbytes for o in spec.outputs),
        target.l1_bytes,
        target.l2_bytes,
        target.l3_bytes,
        target.dram_bytes_per_s,
        target.peak_flops("float32", 1),
    ]
    halves = any(n.dtype in FLOATS and n.dtype.endswith("16") for n in spec.nodes)
    flags = [
        task.threads, target.vector_bytes / 16, target.vector_registers / 16, float(halves)
    ]  # fmt: skip
    numbers = np.array([*counts, *sizes, *flags], dtype=np.float64)
    assert len(numbers) == TASK
    return signed_log2(numbers)


N_ROLES = len(Role)
