"""The text that goes to NVRTC, run by an emulated block of threads: ``tests.gpu.emulator``.

What the host's loops cannot show: barriers, lanes and registers of tensor cores, copies that are on
their way, addresses in shared memory. Mistakes that are made on purpose have to be found.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.emitting import schedule
from tests.families import kernels as K
from tests.gpu.emulator import machine
from tests.gpu.emulator.machine import ORDERS, Fault, Kernels, Order, Text
from tests.gpu.test_gpu_kernels import CASES, built_for, tolerance
from torch_pruner.cards import CARDS
from torch_pruner.codegen.build.gpu.image import launches_of
from torch_pruner.codegen.build.gpu.source import cuda_source
from torch_pruner.compiler.drafting import draft
from torch_pruner.graph.reference import evaluate
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.codegen.build.gpu.image import Launch
    from torch_pruner.task import Candidate

pytestmark = [
    pytest.mark.tvm,
    pytest.mark.skipif(bool(machine.problem()), reason=machine.problem()),
]
PARTS = 3  # of all kernels, each a source, as a network's kernels are
DRAFTS = 24  # as many sources of their drafts
BARRIER, COPY, PRODUCTS = "__syncthreads();", "torch_pruner_copy(", "torch_pruner_wgmma<"


@dataclass
class Run:
    """A kernel of ``CASES``, or another schedule of its graph, and its numbers."""

    name: str
    key: str
    candidate: Candidate | None = None

    def __post_init__(self) -> None:
        self.spec = CASES[self.name][0]
        _, family, decisions = CASES[self.name]
        if self.candidate is not None:
            family, decisions = self.candidate.sketch, dict(self.candidate.decisions)
        self.kernel = schedule(self.spec, family, decisions)
        self.arrays = K.inputs_for(self.spec)
        self.expected = evaluate(self.spec, self.arrays)

    def launches(self, text: Text) -> list[Launch]:
        return [text.launches[k] for k in launches_of(self.key, text.launches)]

    def wrong(self, kernels: Kernels, text: Text, order: Order, number: int = 0) -> str:
        """What goes wrong; empty if nothing does."""
        own = self.launches(text)
        try:
            outputs = K.prepared_outputs(self.spec, self.kernel, self.arrays)
            machine.ran(kernels, own, self.kernel, self.arrays, order, number, outputs=outputs)
            error = K.error(outputs, self.expected)
        except (Fault, AssertionError) as err:  # AssertionError: NaN where there is none
            return f"{self.name}, {order}: {err}"
        return f"{self.name}, {order}: off by {error}" if error >= tolerance(self.spec) else ""


def emulated(names: Sequence[str], arch: str) -> tuple[list[Run], Text, Kernels]:
    return compiled([Run(name, f"k{n}") for n, name in enumerate(names)], arch)


def compiled(runs: list[Run], arch: str) -> tuple[list[Run], Text, Kernels]:
    text = Text(*cuda_source({r.key: r.kernel for r in runs}, arch))
    return runs, text, Kernels([text], arch)


def cases(arch: str) -> list[str]:
    return [name for name in CASES if built_for(CASES[name], arch)]


def mistakes(text: Text, symbol: str) -> list[Order]:
    """One barrier left out after the other, and waits for a group of copies less."""
    lines = text.lines(symbol)
    found = [Order(left_out=n) for n, line in lines.items() if BARRIER in line]
    waits = any(word in line for word in (COPY, PRODUCTS) for line in lines.values())
    return found + [Order(more=1)] * waits


@pytest.mark.sampled(PARTS)
@pytest.mark.parametrize("part", range(PARTS))
def test_an_emulated_block(part: int) -> None:
    """Numbers are right in one order of the threads, and no barrier can be left out."""
    runs, text, kernels = emulated(cases("sm_90a")[part::PARTS], "sm_90a")
    orders = [ORDERS[n % len(ORDERS)] for n in range(len(runs))]
    wrong = [r.wrong(kernels, text, order) for r, order in zip(runs, orders, strict=True)]
    assert not any(wrong), wrong
    unseen = [
        f"{run.name}, {order}"
        for run in runs
        for launch in run.launches(text)
        for order in mistakes(text, launch.symbol)
        if not run.wrong(kernels, text, order)
    ]
    assert unseen == []


@pytest.mark.rotated(6)
def test_older_tensor_cores() -> None:
    names = [n for n in cases("sm_75") if CASES[n][2].get("tensor") or "attention" in n]
    assert len(names) >= 8
    runs, text, kernels = emulated(names[::3], "sm_75")
    wrong = [r.wrong(kernels, text, Order("one warp behind")) for r in runs]
    assert not any(wrong), wrong


@pytest.mark.sampled(3 * DRAFTS)
@pytest.mark.parametrize("part", range(DRAFTS))
@pytest.mark.parametrize("card", ["h200", "a100", "t4"])
def test_drafts_are_valid_and_right(card: str, part: int) -> None:
    """The draft model's choice for a card gives the same numbers, where it is CUDA C."""
    found, target = [], TargetSpec.cuda(CARDS[card])
    for n, name in enumerate(list(CASES)[part::DRAFTS]):
        spec = CASES[name][0]
        if CARDS[card].has_bfloat16 or spec.nodes[spec.inputs[0]].dtype != "bfloat16":
            chosen = draft(Task(name, spec, target, 1))
            if not chosen.sketch.startswith("gpu_triton"):  # no CUDA C: ``test_gpu_triton``
                found.append(Run(name, f"k{n}", chosen))
    runs, text, kernels = compiled(found, CARDS[card].arch)
    wrong = [r.wrong(kernels, text, Order("one warp ahead")) for r in runs]
    assert not any(wrong), wrong


@pytest.mark.rotated(12)
@pytest.mark.sampled(8)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80", "sm_75"])
@pytest.mark.parametrize("turns", machine.SCHEDULES)
def test_every_order(turns: str, arch: str) -> None:
    runs, text, kernels = emulated(cases(arch), arch)
    orders = [order for order in ORDERS if order.schedule == turns]
    wrong = [r.wrong(kernels, text, order) for r in runs for order in orders]
    assert not any(wrong), wrong


FIRST = "griddepcontrol.wait"
WAIT = f'asm volatile("{FIRST};\\n" ::: "memory");'
WEIGHTS, SCORES, CLUSTER = "warpgroups", "warpgroups, scores", "warpgroups, a cluster"
DOTS, TILES = "few rows, asked for early", "warpgroups, asked for early"
HALF, TF32, ROWS = "weighted values", "tf32, scores", "softmax in a warp"
MEET = "  torch_pruner_cluster_meet();\n"
SHOWN = 'asm volatile("fence.proxy.async.shared::cta;\\n" ::: "memory");'
MADE = SHOWN.replace("proxy.async.shared::cta", "mbarrier_init.release.cluster")
# Name of a mistake: a case, what its text has, what it has then, and what is said about it; nothing
# where numbers are wrong.
MUTANTS: dict[str, tuple[str, str, str, str]] = {
    "other rows of A": (HALF, "(i * 16 + (lane & 15)) * lda", "(i * 16 + (lane & 14)) * lda", ""),
    "halves of A": (HALF, "lda + k + (lane >> 4) * 8", "lda + k", ""),
    "registers of A": (
        HALF, '"r"(a[0]), "r"(a[1]), "r"(a[2])', '"r"(a[0]), "r"(a[2]), "r"(a[1])', "",
    ),
    "registers of B": (HALF, '"r"(b[0]), "r"(b[1])', '"r"(b[1]), "r"(b[0])', ""),
    "rows for columns": (HALF, "aligned.m8n8.x4.trans", "aligned.m8n8.x4", ""),
    "another type": ("gradient of an aligned part", "f32.bf16.bf16.f32", "f32.f16.f16.f32", ""),
    "lines of tf32": (TF32, "lda + k + (lane >> 4) * 4", "lda + k", ""),
    "registers of tf32": (
        TF32, "left[i][1], left[i][2], left[i][3],\n", "left[i][2], left[i][1], left[i][3],\n", "",
    ),
    "columns of tf32": (TF32, "(k / 4 + ((lane >> 3) & 1))", "(k / 4)", ""),
    "fours of tf32": ("tf32", "four = B == 1 ? 4 : ldb", "four = B == 1 ? 4 : 4", ""),
    "not rounded": (
        TF32, 'asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value))',
        "rounded = __float_as_uint(value)", "in its lower bits",
    ),
    "copies without a group": (HALF, "  torch_pruner_copy_commit();\n", "", "on (its|their) way"),
    "no zeros": (HALF, "exists ? 16 : 0", "16", "which has"),
    "lines that are not aligned": (HALF, "))])), 40,", "))])), 41,", "not aligned"),
    "the stage that is read": (
        "gradient in float16", "((turn + 1) & 1)", "(turn & 1)", "on its way|no barrier",
    ),
    "a barrier for some": (
        "pointwise with a rest", " < 1001) {", " < 1001) { __syncthreads();",
        "ended|nothing goes on",
    ),
    "beyond an output": (ROWS, "out0_ptr[(", "out0_ptr[9 + (", "which has"),
    "an input is written": (ROWS, "out0_ptr[", "in0_ptr[", "is an input"),
    "one place of two threads": (
        "pointwise with a rest", "out0_ptr[(", "out0_ptr[1 & (", "of the grid wrote",
    ),
    "some read before they wait": (
        ROWS, f'  asm volatile("{FIRST}', f'  if (threadIdx.x) asm volatile("{FIRST}',
        "before the kernel has waited",
    ),
    "others go at once": (ROWS, FIRST, "griddepcontrol.launch_dependents", "not waited"),
    "a result is asked for early": (
        DOTS, "torch_pruner_early((&(in1_ptr", "torch_pruner_early((&(out0_ptr",
        "asks (early )?for",
    ),
    "asked for when it waits no more": (
        DOTS, "  torch_pruner_early((&(in1_ptr", f'  {WAIT}\n  torch_pruner_early((&(in1_ptr',
        "has waited before",
    ),
    "read early": (
        DOTS, f"  {WAIT}\n", f"  words_ptr[0] = in1_ptr[0];\n  {WAIT}\n",
        "before the kernel has waited",
    ),
    "more than there is, early": (
        TILES, '"l"(from), "n"(BYTES));', '"l"(from), "n"(BYTES << 6));', "asks for",
    ),
    "not by sixteen, early": (
        TILES, '"l"(from), "n"(BYTES));', '"l"(from), "n"(BYTES + 8));', "not by sixteen",
    ),
    "not shown to tensor cores": (
        SCORES, f"  {SHOWN}\n}}\n// Begins", "}\n// Begins", "has not shown",
    ),
    "sums that are still written": (
        SCORES, "torch_pruner_wgmma_wait<0>();", "torch_pruner_wgmma_wait<9>();", "on their way",
    ),
    "sums without a fence": (
        SCORES, '  asm volatile("wgmma.fence.sync.aligned;\\n" ::: "memory");\n', "",
        "without wgmma.fence",
    ),
    "no swizzle": (SCORES, "1ull << 62", "0ull << 62", ""),
    "another eight lines": (SCORES, "KEPT == 2 ? 128 : 1024", "KEPT == 2 ? 128 : 512", ""),
    "another eight positions": (
        WEIGHTS, "KEPT == 2 ? 128 : 1024", "KEPT == 2 ? 256 : 1024", "off by|on its way",
    ),
    "lines for positions": (WEIGHTS, "A == 1, B == 1>", "A != 1, B == 1>", ""),
    "weights that are not there": (
        WEIGHTS, '"r"(parity)', '"r"(parity ^ 1)', "has not waited|on its way|nothing goes on",
    ),
    "bytes that never come": (
        WEIGHTS, '"n"(BYTES) : "memory"', '"n"(BYTES + 16) : "memory"', "nothing goes on",
    ),
    "sums that others have not left": (
        CLUSTER, f"{MEET}  torch_pruner_cluster_add", "  torch_pruner_cluster_add",
        "written since blocks met|which has",
    ),
    "a block that does not stay": (
        CLUSTER, f"{MEET}  asm", "  asm", "has ended",
    ),
    "sums of another thread": (CLUSTER, "four * THREADS + threadIdx.x", "four * THREADS", ""),
    "a block too many": (CLUSTER, "block < BLOCKS", "block <= BLOCKS", "reads from block 4 of 4"),
    "barriers that tensor cores do not see": (
        WEIGHTS, f"  {SHOWN}\n  {MADE}\n", "", "without a fence",
    ),
}  # fmt: skip


def mutated(source: str, old: str, new: str) -> str:
    found = source.replace(old, new)
    assert found != source, f"the text has no {old!r}"
    return found


@pytest.mark.rotated(6)
def test_mistakes_are_found() -> None:
    """Lanes, registers, groups of copies, barriers that not all reach, places in memory."""
    names = sorted({case for case, *_ in MUTANTS.values()})
    runs = {name: Run(name, "k") for name in names}
    whole = {name: Text(*cuda_source({"k": runs[name].kernel}, "sm_90a")) for name in names}
    texts = [
        Text(mutated(whole[case].source, old, new), whole[case].launches)
        for case, old, new, _ in MUTANTS.values()
    ]
    kernels = Kernels(texts, "sm_90a")
    said = {
        name: runs[case].wrong(kernels, text, Order(), n)
        for n, (text, (name, (case, *_))) in enumerate(zip(texts, MUTANTS.items(), strict=True))
    }
    wanted = {name: said_ or "off by|NaN|nan" for name, (*_, said_) in MUTANTS.items()}
    assert [n for n in MUTANTS if not re.search(wanted[n], said[n])] == [], said


def test_unknown_instructions_are_refused() -> None:
    run = Run("copies ahead", "k")
    source, launches = cuda_source({"k": run.kernel}, "sm_80")
    other = mutated(source, "cp.async.cg.shared", "cp.async.ca.shared")
    with pytest.raises(ValueError, match="does not know"):
        Kernels([Text(other, launches)], "sm_80")
