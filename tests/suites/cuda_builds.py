"""Builds the drafts of every kernel of every network for GPUs, on a machine that needs none.

    python -m tests.suites.cuda_builds --networks resnet50,bert_base --cards h200,a100,t4

Captures each network, cuts it into kernels as for a GPU, drafts a schedule for each kernel, and
compiles them to machine code by NVRTC. What the assembler reports of registers, spilled bytes and
shared memory is compared with what the card has. The exit status is 1 if anything failed.

``--disassembler PATH`` (``nvdisasm``) adds what the code is made of: how many products of tensor
cores stand beside a load from shared memory, how many bytes a thread loads and stores at once.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from benchmarks import tables, timing
from benchmarks.arguments import network_names, write_json
from benchmarks.gpu.kernels import drafted
from benchmarks.gpu.tasks import tasks_of
from tests.suites import sass
from torch_pruner import exc
from torch_pruner.cards import CARDS, Card

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.codegen.build.gpu import triton
    from torch_pruner.task import Candidate, Task

USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")  # of declarations; launches say what is asked for beside
SPILLED = re.compile(r"(\d+) bytes spill stores")
MAX_REGISTERS = 255


@dataclass(frozen=True, slots=True)
class Built:
    """One kernel: what the assembler says, or why there is none."""

    task: str
    sketch: str
    registers: int = 0
    spilled_bytes: int = 0
    shared_bytes: int = 0
    error: str = ""
    code: sass.Instructions | None = None

    def to_json(self) -> dict[str, Any]:
        """Without what was not asked for."""
        return {k: v for k, v in asdict(self).items() if k != "code" or v is not None}


def build(task: Task, candidate: Candidate, card: Card, disassembler: str = "") -> Built:
    """One kernel to machine code."""
    from tests.emitting import schedule
    from torch_pruner.codegen.build.gpu.machine_code import machine_code
    from torch_pruner.codegen.build.gpu.source import cuda_source

    try:
        kernel = schedule(task.spec, candidate.sketch, dict(candidate.decisions))
        source, launches = cuda_source({"kernel": kernel}, card.arch)
        image, log = machine_code(source, card.arch)
    except exc.CompileError as err:
        return Built(task.name, candidate.sketch, error=str(err)[:2000])
    found = [[int(n) for n in p.findall(log)] for p in (USED, SPILLED, SHARED)]
    if not found[0]:
        return Built(task.name, candidate.sketch, error="the assembler did not report registers")
    registers, spilled, shared = max(found[0]), sum(found[1]), max(found[2], default=0)
    shared += launches["kernel"].shared_bytes
    code = sass.instructions(image, disassembler) if disassembler else None
    return Built(task.name, candidate.sketch, registers, spilled, shared, code=code)


def build_all(
    chosen: Sequence[tuple[Task, Candidate]], card: Card, disassembler: str = ""
) -> list[Built]:
    """Kernels to machine code, those in Triton's language all at once."""
    from torch_pruner import families
    from torch_pruner.codegen.build.gpu import triton

    texts = {
        str(n): families.named(c.sketch).texts(t.spec, c)
        for n, (t, c) in enumerate(chosen)
        if families.named(c.sketch).language == "triton"
    }
    built = triton.attempts(triton.separate(texts), card.arch) if texts else {}
    return [
        _of_triton(
            t, c, [b for key, b in built.items() if key.partition("/")[0] == str(n)], disassembler
        )
        if str(n) in texts
        else build(t, c, card, disassembler)
        for n, (t, c) in enumerate(chosen)
    ]


def _of_triton(
    task: Task,
    candidate: Candidate,
    launches: Sequence[triton.Built | exc.CompileError],
    disassembler: str,
) -> Built:
    done = [b for b in launches if not isinstance(b, exc.CompileError)]
    if len(done) < len(launches):
        error = next(b for b in launches if isinstance(b, exc.CompileError))
        return Built(task.name, candidate.sketch, error=f"{error} {error.log}"[:2000])
    used = [b.uses for b in done]
    return Built(
        task.name,
        candidate.sketch,
        max(u.registers for u in used),
        max(u.frame_bytes for u in used),
        max(b.shared_bytes for b in done),
        code=sass.instructions(done[0].image, disassembler) if disassembler else None,
    )


def main(arguments: list[str] | None = None) -> int:
    from torch_pruner.compiler.drafting import draft

    options = _parse(arguments)
    rows: dict[str, list[dict[str, Any]]] = {}
    failed = 0
    for name in options.networks:
        for card in (CARDS[c] for c in options.cards):
            if options.precision == "bfloat16" and not card.has_bfloat16:
                continue
            tasks = tasks_of(name, options.precision, card, options.layers)
            chosen = [
                (task, candidate)
                for task in tasks
                for candidate in (
                    [draft(task)]
                    if options.count == 1
                    else [c for _, c in drafted(task, options.count)]
                )
                if candidate.sketch in options.families or not options.families
            ]
            results = build_all(chosen, card, options.disassembler)
            bad = [r for r in results if not fits(r, card)]
            failed += len(bad)
            for r in bad:
                print(f"  {r.task} {r.sketch}: {r.error or r}")
            key = f"{name}/{options.precision}/{card.name}"
            rows[key] = [r.to_json() for r in results]
            if options.disassembler:
                print(code_of(results))
            print(f"{key}: {len(results) - len(bad)} of {len(results)}", flush=True)
    print(render(rows))
    write_json(options.out, {"machine": timing.machine(), "rows": rows})
    return int(failed > 0)


def fits(r: Built, card: Card) -> bool:
    shared = r.shared_bytes <= card.shared_bytes_per_block
    return not r.error and r.registers <= MAX_REGISTERS and shared


def render(rows: dict[str, list[dict[str, Any]]]) -> str:
    header = ["network, precision, card", "kernels", "built", "registers", "spilling", "shared"]
    lines = []
    for key, results in rows.items():
        built = [r for r in results if not r["error"]]
        lines.append(
            [
                key, str(len(results)), str(len(built)),
                str(max((r["registers"] for r in built), default=0)),
                str(sum(r["spilled_bytes"] > 0 for r in built)),
                f"{max((r['shared_bytes'] for r in built), default=0) / 1024:.1f} KiB",
            ]
        )  # fmt: skip
    return tables.markdown(header, lines)


def code_of(results: Sequence[Built]) -> str:
    """A line for each kernel: what its machine code is made of."""
    header = [
        "kernel", "family", "tensor-core products", "a load from shared memory",
        "copies past registers", "bytes a load", "bytes a store", "barriers", "spills",
    ]  # fmt: skip
    lines = []
    for r in results:
        if (c := r.code) is not None:
            means = (c.products_a_load, c.bytes_a_load, c.bytes_a_store)
            a_load, load, store = ("-" if m is None else f"{m:.3g}" for m in means)
            counts = [str(n) for n in (c.products, c.copies, c.barriers, c.spills)]
            lines.append([r.task, r.sketch, counts[0], a_load, counts[1], load, store, *counts[2:]])
    return tables.markdown(header, lines)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.suites.cuda_builds", description=__doc__)
    parser.add_argument("--networks", type=network_names, default=["bert_tiny"], metavar="NAME,...")
    parser.add_argument("--cards", type=lambda t: t.split(","), default=["h200", "a100", "t4"])
    choices = ["float32", "float16", "bfloat16"]
    parser.add_argument("--precision", default="float32", choices=choices)
    parser.add_argument("--layers", type=int, help="build language models with so many layers")
    parser.add_argument("--count", type=int, default=1, help="drafts of each kernel and sketch")
    parser.add_argument(
        "--families", type=lambda t: t.split(","), default=[], help="drafts of these alone"
    )
    parser.add_argument("--disassembler", default="", metavar="PATH", help="nvdisasm")
    parser.add_argument("--out", help="write JSON there, e.g. docs/data/cuda.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
