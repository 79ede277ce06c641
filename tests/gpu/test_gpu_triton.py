"""Kernels in Triton's language without a GPU: numbers by its interpreter and of the loops that
stand in for them, machine code for three generations of cards by its compiler."""

from __future__ import annotations

import copy
import ctypes
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import nn

import torch_pruner as tp
from benchmarks.gpu.kernels import drafted
from tests.compile.agreement import assert_equal
from tests.families import kernels as K
from tests.gpu import pretend_gpu
from tests.gpu import triton_cases as TC
from tests.gpu.pretend_gpu import HostDriver
from tests.gpu.test_gpu_compile import Layer
from tests.gpu.test_gpu_kernels import CASES, error, tolerance
from torch_pruner import families
from torch_pruner.cards import CARDS, Card, card_like
from torch_pruner.codegen.build.gpu import cubin, nvrtc, triton
from torch_pruner.codegen.build.gpu import program as programs
from torch_pruner.codegen.build.gpu.driver import CudaDriver
from torch_pruner.codegen.build.gpu.image import GpuEntry, GpuProgram, Launch, load_gpu_program
from torch_pruner.codegen.parts.triton import kernel as language
from torch_pruner.codegen.parts.triton.kernel import TritonKernel
from torch_pruner.devices.cuda import CudaToolchain
from torch_pruner.exc import CompileError
from torch_pruner.families.gpu_triton_attention import emit as attention_emit
from torch_pruner.families.gpu_triton_attention import space as attention_space
from torch_pruner.families.gpu_triton_product import emit as product_emit
from torch_pruner.families.gpu_triton_product import space as product_space
from torch_pruner.graph import ops
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.graph.memory import KernelCall, Place
from torch_pruner.graph.reference import evaluate, numpy_dtype
from torch_pruner.task import Candidate, Scheduled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_pruner.codegen.build.gpu.driver import Grid
    from torch_pruner.graph.ir import Graph

pytestmark = [
    pytest.mark.tvm,
    pytest.mark.skipif(not language.available(), reason="Triton is not installed"),
]
PRODUCT, ATTENTION = "gpu_triton_product", "gpu_triton_attention"
TOGETHER = 8  # kernels that one process interprets
OPERATORS = [op for op in (*ops.UNARY, *ops.BINARY) if op != "cast"]


def _specs() -> Iterator[tuple[str, Graph, str]]:
    """Graphs of other families' cases that one of ours takes."""
    for name, (spec, _, _) in CASES.items():
        for family in (PRODUCT, ATTENTION):
            if families.named(family).matches(TC.task_of(spec)):
                yield name, spec, family


SPECS = list(_specs())
GROUPS = [SPECS[k : k + TOGETHER] for k in range(0, len(SPECS), TOGETHER)]


def test_there_are_kernels_of_every_kind() -> None:
    assert len([s for s in SPECS if s[2] == PRODUCT]) >= 40
    assert len([s for s in SPECS if s[2] == ATTENTION]) >= 15


@pytest.mark.sampled(5)
@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_numbers_of_the_texts(group: int) -> None:
    cases = [
        (name, spec, c)
        for k, (name, spec, family) in enumerate(GROUPS[group])
        for c in TC.candidates(spec, family, 2, seed=group * TOGETHER + k)
    ]
    found = TC.errors([(spec, c) for _, spec, c in cases])
    wrong = [
        (name, dict(c.decisions), e)
        for (name, spec, c), e in zip(cases, found, strict=True)
        if not e < tolerance(spec)
    ]
    assert wrong == []


@pytest.mark.sampled(12)
@pytest.mark.parametrize("case", range(len(SPECS)))
def test_numbers_of_the_loops(case: int) -> None:
    _, spec, family = SPECS[case]
    for candidate in TC.candidates(spec, family, 1, seed=case):
        assert error(spec, family, dict(candidate.decisions)) < tolerance(spec)


def test_indices_of_large_buffers(monkeypatch) -> None:
    """Of 64 bits: the same numbers, and nothing multiplied before it is as wide."""
    for module in (product_emit, attention_emit):
        monkeypatch.setattr(module, "index_dtype_of", lambda *_: "int64")
    some = [s for s in SPECS if s[2] == ATTENTION][:2] + [s for s in SPECS if s[2] == PRODUCT][::9]
    cases = [
        (spec, c) for k, (_, spec, of) in enumerate(some) for c in TC.candidates(spec, of, 1, k)
    ]
    cases.append((K.linear(200, 150, 64, dtype="float16"), IN_TURNS))
    for (spec, _), found in zip(cases, TC.errors(cases), strict=True):
        assert found < tolerance(spec)
    texts = {f"k{k}": families.named(c.sketch).texts(s, c) for k, (s, c) in enumerate(cases)}
    assert "number" in texts[f"k{len(cases) - 1}"][0].text
    triton.compile_kernels(triton.separate(texts), "sm_90a")


IN_TURNS = Candidate(
    PRODUCT,
    (
        ("blocks", 3), ("bk", 32), ("bm", 32), ("bn", 64), ("near", 2), ("pack", 1), ("split", 1),
        ("stages", 2), ("warps", 4),
    ),
)  # fmt: skip


def after_a_product(op: str) -> Graph:
    """An operator of sums, and of a second operand, in numbers of the kind that it takes."""
    b = GraphBuilder()
    x, w = b.input(0, (40, 32), "float16"), b.input(1, (32, 48), "float16", static=True)
    y = b.pointwise("mul", b.cast(b.matmul(x, w), "float32"), b.const(0.25, "float32"))
    operands = [y, b.input(2, (40, 48), "float32")] if op in ops.BINARY else [y]
    dtype = "bool" if op.startswith("logical") else "int32" if "bit" in op or "shift" in op else ""
    operands = [b.cast(o, dtype) for o in operands] if dtype else operands
    if "shift" in op:
        operands[1] = b.pointwise("bitwise_and", operands[1], b.const(7, "int32"))
    return b.finish([b.cast(b.pointwise(op, *operands), "float32")])


def of_whole_numbers(op: str, dtype: str) -> Graph:
    """The same of whole numbers, negative ones among them."""
    b = GraphBuilder()
    x, w = b.input(0, (40, 32), "float16"), b.input(1, (32, 48), "float16", static=True)
    operands = [b.cast(b.matmul(x, w), dtype), b.cast(b.input(2, (40, 48), "float32"), dtype)]
    if op == "where":
        operands.insert(0, b.pointwise("lt", *operands))
    return b.finish([b.cast(b.pointwise(op, *operands), "float32")])


def _epilogues() -> list[tuple[Graph, Candidate]]:
    graphs = [after_a_product(op) for op in OPERATORS]
    graphs += [
        of_whole_numbers(op, dtype)
        for op in ("floordiv", "mod", "truncdiv", "fmod", "where", "mul", "maximum")
        for dtype in ("int32", "int64")
    ]
    return [(spec, TC.candidates(spec, PRODUCT, 1, seed=k)[0]) for k, spec in enumerate(graphs)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinities and NaN are among the results
def test_every_operator_behind_a_product() -> None:
    cases = _epilogues()
    wrong = [
        [spec.nodes[i].op for i in range(len(spec.nodes) - 3, len(spec.nodes))]
        for (spec, _), e in zip(cases, TC.errors(cases), strict=True)
        if not e < 1e-6
    ]
    assert wrong == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("card", "instruction"),
    [("a100", "mma.sync"), ("h200", "wgmma.mma_async"), ("b200", "tcgen05.mma")],
)
def test_every_kernel_becomes_machine_code(card: str, instruction: str) -> None:
    arch = CARDS[card].arch
    texts = {
        f"k{k}": families.named(family).texts(spec, candidate)
        for k, (_, spec, family) in enumerate(SPECS)
        for candidate in TC.candidates(spec, family, 1, seed=k)
    }
    kernels = triton.separate(texts)
    built = triton.compile_kernels(kernels, arch, texts=True)
    assert built.keys() == kernels.keys()
    products = [built[name] for name in texts]
    tensor_cores = [b for b in products if instruction in b.ptx or "mma.sync" in b.ptx]
    assert len(tensor_cores) == len(products)  # none multiplies anywhere else
    assert sum(instruction in b.ptx for b in products) >= 0.25 * len(products)
    for name, one in built.items():
        assert one.image.startswith(b"\x7fELF")
        assert 32 * kernels[name].warps <= one.threads <= 1024
        assert one.shared_bytes <= CARDS[card].shared_bytes_per_block
        assert ("griddepcontrol.wait" in one.ptx) == CARDS[card].has_early_launches
    used = [b.uses for b in built.values()]
    assert max(u.registers for u in used) <= 255
    assert sum(u.frame_bytes > 0 for u in used) <= 0.05 * len(used)


@pytest.mark.rotated(4)
def test_operators_behind_a_product_become_machine_code() -> None:
    """Those of the device's library, too, which the interpreter does without."""
    texts = {
        f"k{k}": families.named(c.sketch).texts(spec, c) for k, (spec, c) in enumerate(_epilogues())
    }
    built = triton.compile_kernels(triton.separate(texts), "sm_90a")
    assert len(built) >= len(texts)


def test_a_kernel_waits_before_it_reads_and_lets_others_go_at_its_end() -> None:
    spec = K.linear(70, 96, 128, dtype="float16")
    for candidate in TC.candidates(spec, PRODUCT, 4):
        texts = {"k": families.named(PRODUCT).texts(spec, candidate)}
        for one in triton.compile_kernels(triton.separate(texts), "sm_90a", texts=True).values():
            body = one.ptx[one.ptx.index(".entry") :]
            touched = [body.find(word) for word in ("ld.global", "cp.async", "st.global")]
            assert 0 < body.index("griddepcontrol.wait") < min(t for t in touched if t > 0)
            assert body.rindex("st.global") < body.index("griddepcontrol.launch_dependents")


@pytest.mark.parametrize(
    ("network", "precision", "card"),
    [("bert_tiny", "float16", "h200"), ("bert_tiny", "bfloat16", "a100")],
)
@pytest.mark.rotated(3)
@pytest.mark.sampled(2)
def test_the_best_drafts_do_not_spill(network: str, precision: str, card: str) -> None:
    from benchmarks.gpu.tasks import tasks_of

    texts = {
        f"k{n}_{k}": families.named(c.sketch).texts(task.spec, c)
        for n, task in enumerate(tasks_of(network, precision, CARDS[card], 1))
        for k, (_, c) in enumerate(
            pair for pair in drafted(task, 8) if pair[1].sketch in (PRODUCT, ATTENTION)
        )
    }
    assert len(texts) >= 24
    built = triton.compile_kernels(triton.separate(texts), CARDS[card].arch)
    assert sum(b.uses.frame_bytes > 0 for b in built.values()) <= 0.05 * len(built)


def _scheduled(spec: Graph, family: str) -> Scheduled:
    return Scheduled(spec, _whole(spec, family))


def _mixed() -> tuple[dict[str, Scheduled], dict[str, list[KernelCall]]]:
    """A product by Triton, and one in CUDA C of what it gives."""
    spec = K.linear(64, 64, 64, dtype="float16")
    kernels = {name: Scheduled(spec, _whole(spec, of)) for name, of in _MIXED.items()}
    chain = [
        KernelCall("first", tuple(Place(i) for i in (0, 1, 2, 3))),
        KernelCall("second", tuple(Place(i) for i in (3, 1, 2, 4))),
    ]
    return kernels, {"main": chain}


_MIXED = {"first": PRODUCT, "second": "gpu_product"}


def _whole(spec: Graph, family: str) -> Candidate:
    """One whose reduction is not shared by blocks."""
    return next(c for c in TC.candidates(spec, family, 40) if dict(c.decisions)["split"] == 1)


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC or CUDA's headers are not installed")
def test_a_program_has_kernels_of_both_compilers() -> None:
    kernels, calls = _mixed()
    built = programs.build_gpu_program(kernels, calls, CARDS["h200"])
    assert len(built.images) == 2
    assert all(image.startswith(b"\x7fELF") for image in built.images)
    assert {built.kernels[name].image for name, _ in built.entries["main"]} == {0, 1}
    assert GpuProgram.from_bytes(built.to_bytes()) == built


class Noting(HostDriver):
    """Says what it is asked to launch, with what."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[str, list[int]]] = []

    def load(self, image: bytes) -> str:  # type: ignore[override]
        return image.decode()

    def function(self, module: str, symbol: str, shared_bytes: int) -> tuple[str, int]:  # type: ignore[override]
        return f"{module}:{symbol}", 4

    def launch(self, function: tuple[str, int], grid: Grid, stream: int, parameters: int) -> None:
        pointers = (ctypes.c_int64 * function[1]).from_address(parameters)
        values = [ctypes.c_int64.from_address(p).value for p in pointers]
        self.given.append((function[0], values))


def test_pointers_that_are_never_read_are_null_and_each_kernel_is_of_its_image() -> None:
    launches = {
        "a": Launch("one", 1, 128, (0, 1), image=1, nulls=2),
        "b": Launch("two", 1, 128, (1, 0, 1, 0)),
    }
    places = [Place(0, 16), Place(1)]
    made = GpuProgram("sm_90a", (b"x", b"y"), launches, {"main": [("a", places), ("b", places)]})
    driver = Noting()
    program = GpuProgram.from_bytes(made.to_bytes())
    entry = GpuEntry(program, "main", driver, [driver.load(i) for i in program.images])
    table = np.array([1000, 2000], np.int64)
    entry(table.ctypes.data)
    assert driver.given == [("y:one", [1016, 2000, 0, 0]), ("x:two", [2000, 1016, 2000, 1016])]


@pytest.mark.parametrize("wrong", [{"image": 1}, {"image": -1}, {"nulls": 99}, {"nulls": -1}])
def test_launches_of_no_image_are_refused(wrong: dict[str, int]) -> None:
    launch = Launch("k", 1, 128, (0,), **wrong)  # type: ignore[arg-type]
    made = GpuProgram("sm_90a", (b"x",), {"k": launch}, {"main": [("k", [Place(0)])]})
    with pytest.raises(ValueError, match=r"image that is not there|no card takes"):
        GpuProgram.from_bytes(made.to_bytes())


def test_images_have_the_length_of_the_file() -> None:
    made = GpuProgram("sm_90a", (b"xyz", b"uv"), {}, {"main": []})
    assert GpuProgram.from_bytes(made.to_bytes()).images == (b"xyz", b"uv")
    for data in (made.to_bytes()[:-1], made.to_bytes() + b"w"):
        with pytest.raises(ValueError, match="longer or shorter"):
            GpuProgram.from_bytes(data)


def test_calls_are_launches_of_their_own() -> None:
    spec = K.linear(64, 64, 64, dtype="float16", static=False)
    calls = [KernelCall("k", tuple(Place(i) for i in (0, 1, 2, 3 + n))) for n in range(3)]
    kernels = {"k": _scheduled(spec, PRODUCT)}
    seen = {}

    def compiled(named, card, copies):
        seen.update(copies)
        return (b"",), dict.fromkeys(named, Launch("k", 1, 128, (0, 1, 2, 3)))

    built = programs.build_gpu_program(kernels, {"main": calls}, CARDS["h200"], compiled=compiled)
    assert seen == {}
    assert len(built.entries["main"]) == 3


REFUSED = f"{language.HEADER}@triton.jit\ndef kernel(in0, EARLY: tl.constexpr):\n    tl.nothing()\n"
ENDED = f"import os\nos._exit(3)\n{REFUSED}"


def test_one_refused_kernel_is_told_from_the_others() -> None:
    spec = K.linear(64, 64, 64, dtype="float16")
    (fine,) = families.named(PRODUCT).texts(spec, TC.candidates(spec, PRODUCT, 1)[0])[:1]
    wrong = {
        name: TritonKernel(text, (0,), ("fp16",), 1, 4, 2)
        for name, text in (("refused", REFUSED), ("ended", ENDED))
    }
    found = triton.attempts({"fine": fine, **wrong}, "sm_90a")
    assert isinstance(found["fine"], triton.Built)
    assert isinstance(found["refused"], CompileError)
    assert "nothing" in str(found["refused"].log)
    assert isinstance(found["ended"], CompileError)
    assert "ended with 3" in str(found["ended"])
    with pytest.raises(CompileError):
        triton.compile_kernels({"fine": fine, **wrong}, "sm_90a")


def test_kernels_that_spill_are_given_more_registers(monkeypatch) -> None:
    spec = K.linear(64, 64, 64, dtype="float16")
    kernels = {
        name: families.named(PRODUCT).texts(spec, c)[0]
        for name, c in zip("ab", TC.candidates(spec, PRODUCT, 2), strict=True)
    }
    asked: list[tuple[list[str], bool]] = []

    def process(given, arch, texts, roomy):
        asked.append((sorted(given), roomy))
        frames = {"a": 0 if roomy else 8, "b": 0}
        return {
            name: triton.Built(name, b"", 0, 128, 2, cubin.Uses(200 if roomy else 80, frames[name]))
            for name in given
        }

    monkeypatch.setattr(triton, "_process", process)
    found = triton.compile_kernels(kernels, "sm_80")
    assert (["a"], True) in asked
    assert ["b"] not in [names for names, roomy in asked if roomy]
    assert {name: built.uses.registers for name, built in found.items()} == {"a": 200, "b": 80}


def test_what_is_no_cubin_says_nothing_of_registers() -> None:
    for data in (b"", b"\x7fELF\x02" + bytes(59), b"\x7fELF\x02" + b"\xff" * 99):
        with pytest.raises(ValueError, match=r"ELF|said"):
            cubin.uses(data)


def test_a_compiler_that_does_not_end_is_ended(monkeypatch) -> None:
    monkeypatch.setattr(triton, "SECONDS", 1.0)
    endless = TritonKernel(f"while True: pass\n{REFUSED}", (0,), ("fp16",), 1, 4, 2)
    found = triton.attempts({"k": endless}, "sm_90a")["k"]
    assert isinstance(found, CompileError)
    assert "not built in 1 s" in str(found)


def test_without_triton_no_task_is_for_it(monkeypatch) -> None:
    monkeypatch.setattr(language, "available", lambda: False)
    task = TC.task_of(K.linear(64, 64, 64, dtype="float16"))
    assert PRODUCT not in [s.name for s in families.sketches_for(task)]
    with pytest.raises(CompileError, match="not found"):
        triton.compile_kernels({}, "sm_90a")


def test_nothing_imports_triton_but_its_compiler() -> None:
    """Nor does what asks whether it is there."""
    code = (
        "import sys\n"
        "from torch_pruner import families\n"
        "from torch_pruner.codegen.build.gpu import program\n"
        "from torch_pruner.codegen.parts.triton import kernel\n"
        "kernel.available()\n"
        "print('triton' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_cards_without_their_instructions_have_no_such_kernels() -> None:
    spec = K.linear(64, 64, 64, dtype="float16")
    family = families.named(PRODUCT)
    assert family.matches(TC.task_of(spec, "a100"))
    assert not family.matches(TC.task_of(spec, "t4"))
    assert not family.matches(TC.task_of(K.linear(64, 64, 64)))  # torch allows no tf32 there


def test_the_reference_is_of_the_same_operators() -> None:
    """The graphs above compute what they say."""
    spec = of_whole_numbers("floordiv", "int32")
    x, w, z = K.inputs_for(spec)
    (got,) = evaluate(spec, [x, w, z])
    sums = (x.astype(np.float32) @ w.astype(np.float32)).astype(np.float16).astype(np.int32)
    whole = z.astype(np.int32)
    there = whole != 0
    assert (got[there] == np.floor_divide(sums[there], whole[there])).all()
    assert (sums < 0).any()


@pytest.fixture
def preferred(monkeypatch: pytest.MonkeyPatch) -> Iterator[pretend_gpu.PretendDevice]:
    """A card made of loops for which drafts are in Triton's language wherever there is a choice."""
    monkeypatch.setattr(product_space, "CAREFUL", 1e-3)
    monkeypatch.setattr(attention_space, "CAREFUL", 1e-3)
    torch._dynamo.reset()
    with pretend_gpu.instead_of_cpu(monkeypatch) as device:
        yield device


class Images(nn.Module):
    """Convolutions of several kinds, whose float32 torch lets a GPU round."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(16, 32, 3, padding=1, groups=2)
        self.back = nn.ConvTranspose2d(32, 8, 4, stride=2, padding=1)
        self.last = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.gelu(self.grouped(self.first(x).relu()))
        return self.last(self.back(x).mean((2, 3)))


def sketches() -> set[str]:
    report = tp.last_report()
    assert report is not None
    assert report.ops_compiled == report.ops_total
    return {t.sketch for t in report.tasks}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_layer_of_a_transformer(cold, preferred, dtype) -> None:
    net, x = Layer().eval().to(dtype), torch.randn(2, 17, 64).to(dtype)
    compiled = cold.compile(net)
    for _ in range(3):
        assert_equal(compiled(x), net(x))
    assert sketches() >= {PRODUCT, ATTENTION}
    assert preferred.driver.loaded >= {PRODUCT, ATTENTION}


@torch.no_grad()
def test_a_network_for_images(cold, preferred) -> None:
    net, x = Images().eval(), torch.randn(2, 3, 18, 22)
    compiled = cold.compile(net)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), net(x), rtol=2e-3, atol=2e-3)
    assert PRODUCT in sketches()


def test_steps_of_training(cold, preferred) -> None:
    net, x = Layer().half(), torch.randn(2, 17, 64).half()
    twin = copy.deepcopy(net)
    compiled = cold.compile(net)
    for _ in range(2):
        compiled(x).float().square().mean().backward()
        twin(x).float().square().mean().backward()
    for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert_equal(mine.grad, theirs.grad)
    assert PRODUCT in preferred.driver.loaded


@torch.no_grad()
def test_a_warm_start_needs_no_triton(cold, preferred, monkeypatch) -> None:
    net, x = Layer().eval().half(), torch.randn(2, 17, 64).half()
    cold.compile(net)(x)
    assert PRODUCT in sketches()
    torch._dynamo.reset()
    monkeypatch.setattr(language, "available", lambda: False)
    monkeypatch.setattr(CudaToolchain, "build", lambda *_: pytest.fail("built again"))
    assert_equal(cold.compile(net, on_miss="error")(x), net(x))


@torch.no_grad()
def test_kernels_for_a_card_that_is_not_at_hand(cold, monkeypatch) -> None:
    """Machine code of both compilers in one file."""
    if not nvrtc.available():
        pytest.skip("NVRTC or CUDA's headers are not installed")
    monkeypatch.setattr(product_space, "CAREFUL", 1e-3)
    net, x = Layer().eval().half(), torch.randn(2, 17, 64).half()
    tp.tune(net, (x,), options=cold.options(target={"kind": "cuda", "model": "h200"}))
    assert PRODUCT in sketches()
    files = [f.read_bytes() for f in cold.cache_dir.rglob("*.so")]  # of a host's library, too
    kept = [GpuProgram.from_bytes(f) for f in files if f.startswith(b"torch_pruner")]
    assert max(len(program.images) for program in kept) >= 3
    assert all(image.startswith(b"\x7fELF") for program in kept for image in program.images)


@pytest.mark.cuda
@pytest.mark.parametrize("case", range(len(SPECS)), ids=[s[0].replace(" ", "-") for s in SPECS])
def test_numbers_on_the_card(case: int) -> None:
    """Through the driver, on a stream of its own, in a thread whose first work on the device is
    ours."""
    _, spec, family = SPECS[case]
    properties = torch.cuda.get_device_properties(0)
    card = card_like(properties.name, (properties.major, properties.minor))
    if card is None or card.capability < (8, 0):
        pytest.skip("needs compute capability 8.0")
    for candidate in TC.candidates(spec, family, 3, seed=case, most=256):
        if room_of(spec, candidate) > card.shared_bytes_per_block:
            continue
        assert _on_the_card(spec, candidate, card) < tolerance(spec)


def room_of(spec: Graph, candidate: Candidate) -> float:
    """Bytes that a block shares."""
    sketch = families.named(candidate.sketch).space()(TC.task_of(spec))
    point = np.array([[dict(candidate.decisions)[name] for name in sketch.names]])
    return float(sketch.symbols(point).s3_cache_bytes[0])


def _on_the_card(spec: Graph, candidate: Candidate, card: Card) -> float:
    takes = families.signature_of(spec, candidate)
    given = K.inputs_for(spec)
    packed = [a if p is None else p.pack(a) for a, p in zip(given, takes.packs, strict=True)]
    buffers = [*takes.inputs, *takes.outputs, *takes.scratch]
    places = tuple(Place(k) for k in range(len(buffers)))
    program = programs.build_gpu_program(
        {"k": Scheduled(spec, candidate)}, {"main": [KernelCall("k", places)]}, card
    )
    stream = torch.cuda.Stream()
    driver = CudaDriver(lambda: int(stream.cuda_stream))
    with torch.cuda.stream(stream):
        flat = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in packed]
        held = [torch.from_numpy(a).cuda() for a in flat]
        made = [
            torch.full((max(1, b.nbytes),), 0xFF, dtype=torch.uint8, device="cuda")
            for b in (*takes.outputs, *takes.scratch)
        ]
        table = (ctypes.c_int64 * len(buffers))(*(t.data_ptr() for t in (*held, *made)))

        def run() -> None:
            (entry,) = load_gpu_program(program.to_bytes(), ["main"], driver)
            entry(ctypes.addressof(table))

        with ThreadPoolExecutor(1) as fresh:
            fresh.submit(run).result()
    stream.synchronize()
    outputs = [
        raw.cpu().numpy().view(numpy_dtype(b.dtype)).reshape(b.shape)
        for raw, b in zip(made, takes.outputs, strict=False)
    ]
    return float(K.error(outputs, evaluate(spec, given)))
