"""Programs for GPUs: their bytes, their launches, and whole graphs on a card made of loops."""

from __future__ import annotations

import ctypes
import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests import emitting as gpu_kernel
from tests.families import kernels as K
from tests.gpu.pretend_gpu import CARD, STREAM, HostDriver, compiled
from torch_pruner import families
from torch_pruner.cards import CARDS
from torch_pruner.codegen.build.gpu import dependent, image, nvrtc, program
from torch_pruner.codegen.build.gpu.driver import NO_CONTEXT, CudaDriver, Grid
from torch_pruner.codegen.build.gpu.image import GpuProgram, Launch, load_gpu_program
from torch_pruner.codegen.build.gpu.machine_code import machine_code
from torch_pruner.codegen.build.gpu.source import (
    _keep_from_compiling,
    _printed_only,
    cuda_source,
)
from torch_pruner.codegen.build.lower import aligned
from torch_pruner.codegen.tir.builders import tvm
from torch_pruner.compiler.drafting import draft
from torch_pruner.exc import CompileError
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.memory import KernelCall, Place
from torch_pruner.graph.reference import evaluate
from torch_pruner.target import TargetSpec
from torch_pruner.task import Scheduled, Task

pytestmark = pytest.mark.tvm


def drafted(spec: Graph) -> Scheduled:
    return Scheduled(spec, draft(Task("t", spec, TargetSpec.cuda(CARD), 1)))


def test_a_graph_of_two_kernels_runs_from_its_bytes() -> None:
    """x w + b, then a softmax of it: one table of addresses, a workspace between."""
    first = K.linear(5, 24, 9)
    b = GraphBuilder()
    x = b.input(0, (1, 5, 24), "float32")
    top = b.reduce("max", x, [2], keepdim=True)
    powers = b.pointwise("exp", b.pointwise("sub", x, top))
    second = b.finish([b.pointwise("div", powers, b.reduce("sum", powers, [2], keepdim=True))])
    kernels = {s.digest(): drafted(s) for s in (first, second)}
    one, two = kernels
    calls = {
        "main": [
            KernelCall(one, (Place(0), Place(1), Place(2), Place(3, 64))),
            KernelCall(two, (Place(3, 64), Place(4))),
        ]
    }
    data = program.build_gpu_program(kernels, calls, CARD, compiled=compiled).to_bytes()
    driver = HostDriver()
    (entry,) = load_gpu_program(data, ["main"], driver)

    arrays = K.inputs_for(first)
    expected = evaluate(second, [evaluate(first, arrays)[0]])
    packs = gpu_kernel.schedule(
        first, kernels[one].candidate.sketch, dict(kernels[one].candidate.decisions)
    ).packs
    given = []
    for array, pack in zip(arrays, packs, strict=True):
        if pack is not None:
            packed = pack.pack(array)
            array = aligned(packed.shape, str(packed.dtype))
            array[...] = packed
        given.append(array)
    workspace, out = aligned((1024,), "float32"), aligned((1, 5, 24), "float32")
    held = [*given, workspace, out]
    table = (ctypes.c_int64 * len(held))(*(a.ctypes.data for a in held))
    for _ in range(2):
        out[...] = np.nan
        entry(ctypes.addressof(table))
        assert K.error([out], expected) < 1e-6
    assert [stream for *_, stream in driver.launched] == [STREAM] * 4


def launch_of(**changes: Any) -> GpuProgram:
    launch = Launch(
        **{"symbol": "k_kernel", "blocks": 2, "threads": 64, "parameters": (0, 1)} | changes
    )
    return GpuProgram(
        "sm_80", (b"\x7fELF",), {"k": launch}, {"main": [("k", [Place(0), Place(1)])]}
    )


def test_bytes_round_trip() -> None:
    found = GpuProgram.from_bytes(launch_of().to_bytes())
    assert found == launch_of()


@pytest.mark.parametrize(
    "changes",
    [
        {"blocks": 0},
        {"blocks": 2**31},
        {"threads": 2048},
        {"parameters": (-1,)},
        {"parameters": (5,)},
    ],
    ids=str,
)
def test_launches_that_no_card_takes_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"launch|takes more"):
        GpuProgram.from_bytes(launch_of(**changes).to_bytes())


@pytest.mark.parametrize("cut", [0, 5, 25, 40, 60])
def test_damaged_programs_are_refused(cut: int) -> None:
    with pytest.raises(ValueError, match=r"not a program|not a list of launches|too long"):
        GpuProgram.from_bytes(launch_of().to_bytes()[:cut])


def test_a_length_beyond_the_file_is_refused_before_anything_is_read() -> None:
    data = bytearray(launch_of().to_bytes())
    data[len(image._MAGIC) + 7] = 0x7F
    with pytest.raises(ValueError, match="too long"):
        GpuProgram.from_bytes(bytes(data))


def test_a_header_of_another_kind_is_refused() -> None:
    text = json.dumps([1, 2]).encode()
    data = image._MAGIC + image._LENGTH.pack(len(text)) + text
    with pytest.raises(ValueError, match="not a list of launches"):
        GpuProgram.from_bytes(data)


def test_an_entry_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="no other"):
        load_gpu_program(launch_of().to_bytes(), ["other"], HostDriver())


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC or CUDA's headers are not installed")
def test_a_program_is_built_for_a_card() -> None:
    spec = K.linear(64, 64, 64, dtype="float16")
    kernels = {spec.digest(): drafted(spec)}
    places = tuple(Place(i) for i in range(4))
    built = program.build_gpu_program(kernels, {"main": [KernelCall(spec.digest(), places)]}, CARD)
    assert built.images[0].startswith(b"\x7fELF")
    assert GpuProgram.from_bytes(built.to_bytes()) == built


LOG = """ptxas info    : Compiling entry function 'one' for 'sm_80'
ptxas info    : Function properties for one
    0 bytes stack frame, {} bytes spill stores, 8 bytes spill loads
ptxas info    : Used 40 registers
ptxas info    : Compiling entry function 'two' for 'sm_80'
ptxas info    : Function properties for two
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""
TWO = "".join(
    f'extern "C" __global__ void __launch_bounds__(64) {name}(int* p) {{\n}}\n'
    for name in ("one", "two")
)


@pytest.mark.parametrize(
    ("after", "kept"), [(0, b"again"), (4, b"again"), (16, b"first"), (None, b"first")]
)
def test_kernels_that_spill_are_given_more_registers(monkeypatch, after, kept) -> None:
    """Unless that is refused, or is no better; the others stay as they are."""
    seen: list[str] = []

    def compile_cubin(source: str, arch: str) -> tuple[bytes, str]:
        seen.append(source)
        if len(seen) == 1:
            return b"first", LOG.format(16)
        if after is None:
            raise CompileError("a CUDA kernel", "refused")
        return b"again", LOG.format(after)

    monkeypatch.setattr(nvrtc, "compile_cubin", compile_cubin)
    assert machine_code(TWO, "sm_80")[0] == kept
    assert seen[1] == TWO.replace("(64) one", "(64, 1) one")


def test_kernels_that_do_not_spill_are_built_once(monkeypatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        nvrtc, "compile_cubin", lambda source, _: seen.append(source) or (b"", LOG.format(0))
    )
    machine_code(TWO, "sm_80")
    assert seen == [TWO]


def test_kernels_are_printed_where_tvm_would_compile_them() -> None:
    """With TVM's CUDA runtime in the process TVM compiles what it prints, without our preamble."""
    name, asked = "tvm_callback_cuda_compile", []
    before = tvm.get_global_func(name)
    try:
        tvm.register_global_func(name, lambda code: asked.append(code) or b"theirs", override=True)
        _keep_from_compiling.cache_clear()
        with _printed_only():
            assert tvm.get_global_func(name)("ours") == b""
            with ThreadPoolExecutor(1) as other:
                assert other.submit(tvm.get_global_func(name), "theirs").result() == b"theirs"
        assert tvm.get_global_func(name)("theirs") == b"theirs"
        assert asked == ["theirs"] * 2
    finally:
        tvm.register_global_func(name, before, override=True)
        _keep_from_compiling.cache_clear()


class Library:
    """A driver's library on which nothing works before a thread has a context."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object) -> int:
            self.calls.append(name)
            needs = name.startswith(("cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel"))
            return NO_CONTEXT if needs and "cuCtxSetCurrent" not in self.calls else 0

        setattr(self, name, call)  # ctypes, too, hands out one object for a name
        return call


@pytest.mark.parametrize("work", ["load", "function", "launch", "early launch"])
def test_a_thread_without_a_context_gets_the_primary_one(monkeypatch, work: str) -> None:
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    driver = CudaDriver(lambda: 0, ordinal=1)
    for _ in range(2):
        if work == "load":
            driver.load(b"")
        elif work == "function":
            driver.function(ctypes.c_void_p(), "k", 0)
        else:
            driver.launch(None, Grid(1, 32, waits=work != "launch"), 0, 0)
    assert library.calls.count("cuDevicePrimaryCtxRetain") == 1
    assert library.calls[-1] == library.calls[0]


@pytest.mark.parametrize(
    ("own", "name"),
    [
        (bytes(range(16)), "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"),
        (bytes(range(1, 17)), "MIG-01020304-0506-0708-090a-0b0c0d0e0f10"),
        (None, "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"),
    ],
    ids=["a whole device", "an instance", "before CUDA 11.4"],
)
def test_the_name_that_makes_it_the_only_device_of_a_child(monkeypatch, own, name) -> None:
    class Devices:
        def cuDeviceGet(self, device: Any, ordinal: int) -> int:
            device._obj.value = ordinal
            return int(ordinal > 1)

        def cuDeviceGetUuid(self, found: Any, device: ctypes.c_int) -> int:
            found._obj[:] = bytes(range(16))
            return int(device.value != 1)

        def cuDeviceGetUuid_v2(self, found: Any, device: ctypes.c_int) -> int:
            found._obj[:] = own or bytes(16)
            return int(own is None)

        cuLaunchKernel = SimpleNamespace()

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Devices())
    assert CudaDriver(lambda: 0, ordinal=1).visible_name() == name
    assert CudaDriver(lambda: 0, ordinal=2).visible_name() is None


def test_a_thread_launches_early_as_the_driver_reads_it(monkeypatch) -> None:
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    driver, seen = CudaDriver(lambda: 0), []

    def launched(described: int, function: int, parameters: int, extra: None) -> int:
        words = (ctypes.c_uint * 7).from_address(described)
        stream, attributes = (ctypes.c_uint64 * 2).from_address(described + 32)
        count = ctypes.c_uint.from_address(described + 48).value
        kind, _, value = (ctypes.c_int * 3).from_address(attributes)
        seen.append((*words, stream, count, kind, value, function, parameters))
        return 0

    driver._launch_early = launched
    for _ in range(2):
        driver.launch(5, Grid(7, 64, 1024, 3, waits=True), 11, 13)
    assert seen == [(7, 3, 1, 64, 1, 1, 1024, 11, 1, 6, 1, 5, 13)] * 2


@pytest.mark.parametrize(("arch", "early"), [("sm_80", False), ("sm_90a", True)])
def test_kernels_wait_where_they_may_be_launched_early(arch: str, early: bool) -> None:
    spec, kernels, _ = siblings(2)
    target = TargetSpec.cuda(CARD)
    scheduled = {"k": families.scheduled(kernels[spec.digest()], target)}
    code, launches = cuda_source(scheduled, arch, {"k": {2}})
    assert {launch.waits for launch in launches.values()} == {early}
    definitions = code.split('extern "C" __global__')[1:]
    bodies = [d.partition("{\n")[2] for d in definitions if "{" in d.partition(";")[0]]
    assert len(bodies) == len(launches)
    assert {b.count(dependent.WAIT) for b in bodies} == {early}


def test_a_kernel_that_is_not_found_is_not_launched_early() -> None:
    with pytest.raises(CompileError, match="no definition of other"):
        dependent.waiting('extern "C" __global__ void mine(int* p) {\n}\n', {"mine", "other"})


KERNEL = 'extern "C" __global__ void mine(int* p) {\n%s}\n'
ASKED = "  torch_pruner_early((&(p[0])));\n  torch_pruner_early_ended();\n"


def test_cards_with_early_launches() -> None:
    assert all(dependent.allowed(c.arch) == c.has_early_launches for c in CARDS.values())


def test_a_kernel_waits_after_it_has_asked_for_weights() -> None:
    code = dependent.waiting(KERNEL % f"{ASKED}  p[0] = 1;\n", {"mine"})
    assert code.index("early((&") < code.index(dependent.WAIT) < code.index("p[0] = 1")
    assert code.count(dependent.WAIT) == 1
    assert "ended" not in code


@pytest.mark.parametrize("body", [ASKED * 2, "  if (p) {\n    torch_pruner_early_ended();\n  }\n"])
def test_a_kernel_that_waits_at_no_one_place_is_refused(body: str) -> None:
    with pytest.raises(CompileError, match="does not wait at one place"):
        dependent.waiting(KERNEL % body, {"mine"})


def siblings(count: int) -> tuple[Graph, dict[str, Scheduled], list[KernelCall]]:
    """Products of one input (at 0) by weights of their own (from 1); results follow the bias."""
    spec = K.linear(37, 45, 96, dtype="float16", static=False)
    calls = [
        KernelCall(
            spec.digest(), (Place(0), Place(1 + i), Place(1 + count), Place(2 + count, 8192 * i))
        )
        for i in range(count)
    ]
    return spec, {spec.digest(): drafted(spec)}, calls


def test_products_of_one_input_are_one_launch() -> None:
    spec, kernels, calls = siblings(3)
    built = program.build_gpu_program(kernels, {"main": calls}, CARD, compiled=compiled)
    assert len(built.entries["main"]) == len({name for name, _ in built.entries["main"]})
    assert all(built.kernels[name].copies == 3 for name, _ in built.entries["main"])
    arrays = [K.inputs_for(spec) for _ in range(3)]
    inputs = [
        aligned(a.shape, str(a.dtype))
        for a in (arrays[0][0], *(a[1] for a in arrays), arrays[0][2])
    ]
    for to, a in zip(inputs, (arrays[0][0], *(a[1] for a in arrays), arrays[0][2]), strict=True):
        to[...] = a
    work = aligned((3 * 8192,), "uint8")
    (entry,) = load_gpu_program(built.to_bytes(), ["main"], HostDriver())
    table = (ctypes.c_int64 * 6)(*(a.ctypes.data for a in (*inputs, work)))
    entry(ctypes.addressof(table))
    for i in range(3):
        (want,) = evaluate(spec, [inputs[0], inputs[1 + i], inputs[4]])
        got = work[8192 * i :][: want.nbytes].view(np.float16).reshape(want.shape)
        assert K.error([got], [want]) < 2e-3


W, BIAS = Place(1), Place(2)
PAIRS = {
    "one result on the other": ((Place(0), W, BIAS, Place(3)), (Place(0), W, BIAS, Place(3, 64))),
    "a result on an input": ((Place(3, 16), W, BIAS, Place(4)), (Place(0), W, BIAS, Place(3))),
    "a chain": ((Place(0), W, BIAS, Place(3)), (Place(3), W, BIAS, Place(4))),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_calls_that_wait_for_each_other_are_launched_apart(pair: str) -> None:
    spec = K.linear(64, 64, 64, dtype="float16", static=False)
    calls = [KernelCall(spec.digest(), args) for args in PAIRS[pair]]
    kernels = {spec.digest(): drafted(spec)}
    built = program.build_gpu_program(kernels, {"main": calls}, CARD, compiled=compiled)
    assert {built.kernels[name].copies for name, _ in built.entries["main"]} == {1}


def test_kernels_of_several_calls_become_machine_code() -> None:
    if not nvrtc.available():
        pytest.skip("NVRTC or CUDA's headers are not installed")
    _, kernels, calls = siblings(2)
    built = program.build_gpu_program(kernels, {"main": calls}, CARD)
    assert {built.kernels[name].copies for name, _ in built.entries["main"]} == {2}
