"""CUDA C as it is printed for NVRTC, to C++ that the emulator's headers make run.

Nothing is computed in another way: pointers become watched ones, memory that a launch sizes becomes
the emulator's, and each instruction in PTX, known by its exact text, becomes a call of the function
that does it. Lines keep their numbers.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.codegen.build.gpu.image import Launch

_MMA = "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
_ONE = "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
INSTRUCTIONS = {
    "cp.async.cg.shared.global [%0], [%1], 16, %2;": "copy_async_16",
    "cp.async.commit_group;": "copy_commit",
    "cp.async.wait_group %0;": "copy_wait",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];": "ldmatrix_x4<false>",
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];": "ldmatrix_x4<true>",
    "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];": "ldmatrix_x2<false>",
    "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];": "ldmatrix_x2<true>",
    f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {_MMA}": "mma_two<emulator::BF16, 16>",
    f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {_MMA}": "mma_two<emulator::F16, 16>",
    f"mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {_ONE}": "mma_one<emulator::F16, 8>",
    f"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {_MMA}": "mma_two<emulator::TF32, 8>",
    "cvt.rna.tf32.f32 %0, %1;": "cvt_rna_tf32",
    "cvt.rn.bf16x2.f32 %0, %1, %2;": "cvt_rn_bf16x2",
    "wgmma.fence.sync.aligned;": "wgmma_fence",
    "wgmma.commit_group.sync.aligned;": "wgmma_commit",
    "wgmma.wait_group.sync.aligned %0;": "wgmma_wait",
    "fence.proxy.async.shared::cta;": "fence",
    "fence.mbarrier_init.release.cluster;": "fence",
    "mbarrier.init.shared::cta.b64 [%0], 1;": "mbarrier_init",
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;": "mbarrier_expect",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];": (
        "bulk_copy"
    ),
    "{ .reg .pred arrived; again: mbarrier.try_wait.parity.shared::cta.b64 arrived, [%0], %1; "
    "@arrived bra there; bra again; there: }": "mbarrier_wait",
    "st.shared.v4.f32 [%0], {%1, %2, %3, %4};": "store_four",
    "barrier.cluster.arrive.release.aligned;": "cluster_arrive",
    "barrier.cluster.wait.acquire.aligned;": "cluster_wait",
    "mapa.shared::cluster.u32 %0, %1, %2;": "map_address",
    "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];": "load_remote",
    "": "nothing",  # says that registers are read and written
    "prefetch.global.L2 [%0];": "early_line",
    "cp.async.bulk.prefetch.L2.global [%0], %1;": "early_piece",
    "griddepcontrol.wait;": "dependency_wait",
    "griddepcontrol.launch_dependents;": "dependency_launch",
}
for _columns in range(8, 257, 8):
    _sums = ", ".join(f"%{i}" for i in range(_columns // 2))
    _rest = [f"%{i}" for i in range(_columns // 2, _columns // 2 + 4)]
    for _kind in ("f16", "bf16"):
        INSTRUCTIONS[
            f"wgmma.mma_async.sync.aligned.m64n{_columns}k16.f32.{_kind}.{_kind} {{{_sums}}}, "
            f"{_rest[0]}, {_rest[1]}, 1, 1, 1, {_rest[2]}, {_rest[3]};"
        ] = f"wgmma<emulator::{_kind.upper()}, {_columns}>"
_ASM = re.compile(r'\basm\s*(?:volatile)?\s*\(((?:"(?:[^"\\]|\\.)*"|[^";])*)\);')
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_OPERAND = re.compile(r'"[=+]?[rlfhn]"\s*\(')
_KERNEL = re.compile(r'(?=^extern "C" __global__)', re.MULTILINE)
_HEAD = re.compile(
    r'extern "C" __global__ (?:__cluster_dims__\((?P<cluster>\d+), 1, 1\) )?void '
    r"(?:__launch_bounds__\([^)]*\) )?(?P<name>\w+)"
    r"\((?P<parameters>[^)]*)\) \{"
)
_SHARED = re.compile(
    r"([\w ]+)\* const (\w+) = reinterpret_cast<\1\*>\(torch_pruner_shared \+ (\d+)\);"
)
_MOVED = re.compile(r"\*\(([\w ]+?)\s?\*\)\((?!&)")
_WATCHED = re.compile(r"\b(const (?:unsigned short|void|float)|void) ?\*")
_TOGETHER = re.compile(r"(\w[\w ]*)\* (?:__restrict__ )?(\w+) = static_cast<\1\*>\(given")


def translated(source: str, launches: Mapping[str, Launch], number: int) -> str:
    """C++ of a source that ``cuda_source`` has made, with ``call_NUMBER_SYMBOL`` for every launch.

    Raises ``ValueError`` for instructions that are not known.
    """
    base = alignment(source)
    source = source.replace("#include <cuda_fp16.h>", "")
    source = re.sub(r"extern __shared__ .*torch_pruner_shared\[\];", "", source)
    preamble, *kernels = _KERNEL.split(source)
    sizes = {launch.symbol: launch.shared_bytes for launch in launches.values()}
    parts = [_WATCHED.sub(r"emulator::Pointer<\1>", _instructions(preamble))]
    parts += [_kernel(_instructions(text), sizes, base) for text in kernels]
    calls = "\n".join(_call(launch, number) for launch in launches.values())
    body = "".join(parts)
    return f'namespace text_{number} {{\n#line 1 "text_{number}.cu"\n{body}\n{calls}\n}}\n'


def alignment(source: str) -> int:
    """Of the shared memory that launches size: where it begins, aligned to that and not to more."""
    found = re.search(r"__shared__ __align__\((\d+)\)", source)
    return int(found[1]) if found else 0


def clusters(source: str) -> dict[str, int]:
    """How many blocks are launched together, by kernel."""
    heads = (_HEAD.match(text) for text in _KERNEL.split(source))
    return {head["name"]: int(head["cluster"] or 1) for head in heads if head}


def _instructions(text: str) -> str:
    """Every ``asm`` statement as a call. Raises ``ValueError`` for one that is not known."""

    def call(found: re.Match[str]) -> str:
        strings = re.match(r'\s*(?:"(?:[^"\\]|\\.)*"\s*)+', found[1])
        assert strings is not None
        said = " ".join("".join(_STRING.findall(strings[0])).replace("\\n", " ").split())
        if said not in INSTRUCTIONS:
            raise ValueError(f"an instruction that the emulator does not know: {said}")
        given = ["__LINE__", *_operands(found[1][strings.end() :])]
        lines = "\n" * found[0].count("\n")
        return f"emulator::{INSTRUCTIONS[said]}({', '.join(given)});{lines}"

    return _ASM.sub(call, text)


def _operands(text: str) -> list[str]:
    found = []
    for start in _OPERAND.finditer(text):
        depth, end = 1, start.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        found.append(text[start.end() : end - 1])
    return found


def _kernel(text: str, sizes: Mapping[str, int], base: int) -> str:
    head = _HEAD.match(text)
    if head is None:  # a declaration: a blank line in its place
        return "\n" * text.count("\n")
    found = list(_SHARED.finditer(text))
    ends = sorted({int(m[3]) for m in found} | {sizes[head["name"]]})

    def shared(m: re.Match[str]) -> str:
        kind, name, first = m[1].strip(), m[2], int(m[3])
        size = ends[ends.index(first) + 1] - first
        region = f'{{emulator::window + {base + first}, {size}, "{name}", nullptr, 1}}'
        return (
            f"static emulator::Region {name}_region{region}; "
            f"const emulator::Pointer<{kind}> {name}({name}_region);"
        )

    parameters = re.sub(r"([\w ]+?)\* __restrict__ ", r"emulator::Pointer<\1> ", head["parameters"])
    body = _SHARED.sub(shared, text[head.end() :])
    body = _TOGETHER.sub(
        r"emulator::Pointer<\1> \2 = static_cast<emulator::Pointer<\1>>(given", body
    )
    body = _MOVED.sub(r"emulator::as<\1>(", body)
    return f"void {head['name']}({parameters}) {{{body}"


def _call(launch: Launch, number: int) -> str:
    """What calls a kernel on its buffers."""
    count = len(launch.parameters)
    head = f"EMULATOR_CALL void call_{number}_{launch.symbol}(emulator::Region* b) {{ "
    if launch.copies == 1:
        return f"{head}{launch.symbol}({', '.join(f'b[{k}]' for k in range(count))}); }}"
    given = f"torch_pruner_pointers<{count}> given; for (int k = 0; k < {count}; ++k) "
    return f"{head}{given}given.at[k] = b[k]; {launch.symbol}(given); }}"
