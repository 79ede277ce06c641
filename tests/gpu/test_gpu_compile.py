"""``torch.compile`` for a card that is made of loops: everything but machine code and time."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch._inductor import cudagraph_trees, cudagraph_utils
from torch.fx.experimental.proxy_tensor import make_fx

import torch_pruner as tp
from tests.compile.agreement import assert_equal
from tests.contracts.measure_executor import MeasureExecutorContract
from tests.families import kernels as K
from tests.gpu import pretend_gpu
from tests.gpu.emulator import machine
from torch_pruner.cards import CARDS
from torch_pruner.compiler.executors import close_all
from torch_pruner.devices.cuda import CudaToolchain, cuda_executor
from torch_pruner.dynamo.run import cuda_graphs, graphs, runtime
from torch_pruner.families import sketches_for
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, MeasureStatus, Task

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.tvm


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[pretend_gpu.PretendDevice]:
    torch._dynamo.reset()
    with pretend_gpu.instead_of_cpu(monkeypatch) as device:
        yield device


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[pretend_gpu.PretendDevice]:
    """A Hopper on which the text itself runs, or loops where nothing compiles it."""
    torch._dynamo.reset()
    found = None if machine.problem() else CARDS["h200"]
    with pretend_gpu.instead_of_cpu(monkeypatch, emulated=found) as device:
        yield device


class Mixed(nn.Module):
    """A convolution, normalisation, two linear layers, softmax and a table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.up, self.down = nn.Linear(16, 40), nn.Linear(40, 16)
        self.table = nn.Embedding(10, 16)

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.norm(self.conv(x)).relu().mean((2, 3))
        hidden = nn.functional.layer_norm(x + self.table(at), (16,))
        hidden = hidden + self.down(nn.functional.gelu(self.up(hidden)))
        return hidden, hidden.softmax(-1)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, 8, 8), torch.tensor([4, 2])


def agree(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert_equal(mine, theirs)


@torch.no_grad()
def test_a_network_with_everything(cold, card) -> None:
    net, given = Mixed().eval(), inputs()
    compiled = cold.compile(net)
    agree(compiled(*given), net(*given))
    report = tp.last_report()
    assert report is not None
    assert report.ops_compiled == report.ops_total
    assert {t.sketch for t in report.tasks} >= {"gpu_product", "gpu_rows"}
    launched = len(card.driver.launched)
    assert launched >= len(report.tasks)
    assert {stream for *_, stream in card.driver.launched} == {pretend_gpu.STREAM}
    compiled(*given)
    assert len(card.driver.launched) > launched
    net.up.weight.mul_(2)
    net.norm.running_var.add_(1)
    agree(compiled(*given), net(*given))


class Layer(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.between = nn.LayerNorm(64), nn.LayerNorm(64)
        self.three, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.three(self.before(x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


@torch.no_grad()
def test_half_precision(cold, emulated) -> None:
    net, x = Layer().eval().half(), torch.randn(2, 17, 64).half()
    assert_equal(cold.compile(net)(x), net(x))
    report = tp.last_report()
    assert report is not None
    assert report.ops_compiled == report.ops_total
    assert "gpu_attention" in {t.sketch for t in report.tasks}


@torch.no_grad()
def test_a_step_of_decoding(cold, emulated) -> None:
    """One query of each head: heads share keys, and the blocks of a card share them, too."""

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    given = [torch.randn(1, n, length, 32).half() for n, length in ((8, 1), (2, 512), (2, 512))]
    assert_equal(cold.compile(step)(*given), step(*given))
    report = tp.last_report()
    assert report is not None
    assert [t.sketch for t in report.tasks] == ["gpu_attention"]


@torch.no_grad()
@pytest.mark.parametrize("device", ["card", "emulated"])
def test_blocks_windows_and_computed_positions(cold, request, device) -> None:
    """``fold``, adaptive maxima and ``grid_sample``: all read at positions that are computed."""
    request.getfixturevalue(device)

    def read(x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
        blocks = nn.functional.unfold(x, 3, padding=1, stride=2).tanh()
        folded = nn.functional.fold(blocks, (8, 6), 3, padding=1, stride=2)
        rows = x.movedim(1, -1).contiguous().movedim(-1, 1)
        near = nn.functional.grid_sample(rows, at, align_corners=False)
        return folded, nn.functional.adaptive_max_pool2d(x + 1, (3, 4)), near

    given = torch.randn(1, 4, 8, 6), torch.rand(1, 5, 3, 2) * 2.4 - 1.2
    agree(cold.compile(read)(*given), read(*given))
    report = tp.last_report()
    assert report is not None
    assert report.ops_compiled == report.ops_total


@torch.no_grad()
@pytest.mark.parametrize("device", ["card", "emulated"])
def test_a_cache_is_written_where_it_lies(cold, request, device) -> None:
    """A step of decoding with a cache of its own size, and a prompt, are one region each."""
    request.getfixturevalue(device)

    def step(
        cache: torch.Tensor, rows: torch.Tensor, at: torch.Tensor, q: torch.Tensor
    ) -> torch.Tensor:
        cache.index_copy_(2, at, rows.cos())
        return q @ cache.transpose(-1, -2)

    compiled = cold.compile(step)
    for count in (1, 5):
        cache, rows = torch.randn(1, 2, 32, 16), torch.randn(1, 2, count, 16)
        given = rows, torch.arange(3, 3 + count), torch.randn(1, 2, 1, 16)
        twin, memory = cache.clone(), cache.data_ptr()
        assert_equal(compiled(cache, *given), step(twin, *given))
        assert_equal(cache, twin)
        assert cache.data_ptr() == memory
        report = tp.last_report()
        assert report is not None
        assert report.ops_compiled == report.ops_total
        assert "gpu_update" in {t.sketch for t in report.tasks}


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "bound", "packed"),
    [({}, 1e-2, 0.0), ({"int8_weights": True}, 3e-2, 0.0), ({"weight_bits": 4}, 0.3, 0.3)],
    ids=["halves", "bytes", "words"],
)
def test_layers_in_a_step_of_decoding(cold, emulated, options, bound, packed) -> None:
    """Weights are read where they lie: nothing is packed but words, and bytes stay bytes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(128, 192), nn.SiLU(), nn.Linear(192, 64)).eval().half()
    x = torch.randn(2, 128).half()
    got, want = cold.compile(net, **options)(x), net(x)
    assert (got - want).abs().max() <= bound * want.abs().max()
    report = tp.last_report()
    assert report is not None
    assert report.ops_compiled == report.ops_total
    assert {t.sketch for t in report.tasks} == {"gpu_dots"}
    weights = sum(p.nbytes for p in net.parameters() if p.dim() > 1)
    assert report.weight_bytes <= packed * weights


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "bound"), [({"int8_weights": True}, 3e-2), ({"weight_bits": 4}, 0.3)]
)
def test_layers_of_few_bits_in_a_prompt(cold, emulated, options, bound) -> None:
    """They stay as they are with many rows, too: there is no room for floats beside them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(128, 96), nn.SiLU(), nn.Linear(96, 64)).eval().half()
    x = torch.randn(40, 128).half()
    got, want = cold.compile(net, **options)(x), net(x)
    assert (got - want).abs().max() <= bound * want.abs().max()
    report = tp.last_report()
    assert report is not None
    assert {t.sketch for t in report.tasks} <= {"gpu_product", "gpu_warpgroup"}
    weights = sum(p.nbytes for p in net.parameters() if p.dim() > 1)
    assert report.weight_bytes <= 0.3 * weights


def test_training(cold, emulated) -> None:
    net = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 5))
    twin, x = copy.deepcopy(net), torch.randn(9, 24)
    compiled = cold.compile(net)
    for _ in range(2):
        nn.functional.cross_entropy(compiled(x), torch.arange(9) % 5).backward()
        nn.functional.cross_entropy(twin(x), torch.arange(9) % 5).backward()
    for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert_equal(mine.grad, theirs.grad)
    assert emulated.driver.launched


@torch.no_grad()
def test_a_warm_start_builds_nothing(cold, card, monkeypatch) -> None:
    net, given = Mixed().eval(), inputs()
    cold.compile(net)(*given)
    torch._dynamo.reset()
    monkeypatch.setattr(CudaToolchain, "build", lambda *_: pytest.fail("built again"))
    compiled = cold.compile(net, on_miss="error")
    agree(compiled(*given), net(*given))


@torch.no_grad()
def test_what_was_captured_before_is_recorded_like_what_is_captured_now(
    cold, card, monkeypatch
) -> None:
    recorded = []

    def record(model, inputs, static, **_):
        recorded.append((len(inputs), len(static)))
        return model

    monkeypatch.setattr(cudagraph_trees, "cudagraphify_impl", record)
    monkeypatch.setattr(cuda_graphs, "obstacle", lambda _: "")
    monkeypatch.setattr(pretend_gpu.PretendDevice, "replays", True)
    monkeypatch.setattr(pretend_gpu.PretendDevice, "device", torch.device("cpu", 0))
    net, given = Mixed().eval(), inputs()
    agree(cold.compile(net)(*given), net(*given))
    assert not recorded
    for k in range(1, 3):
        torch._dynamo.reset()
        with monkeypatch.context() as context:
            context.setattr(graphs, "build", lambda *_, **__: pytest.fail("captured again"))
            compiled = cold.compile(net, cuda_graphs=True)
            agree(compiled(*given), net(*given))
        assert len(recorded) == k
    assert recorded == [(13, 11)] * 2
    net.up.weight.mul_(2)
    agree(compiled(*given), net(*given))


class Replayed:
    """Stands in for torch's trees: arguments that do not last are copied to where they were."""

    def __init__(self) -> None:
        self.kinds: list[tuple[bool, bool]] = []
        self.lasting: list[set[int]] = []

    def __call__(self, model, inputs, static, *, is_backward, is_inference, **_):
        own = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        at = {k: inputs[k].data_ptr() for k in static}
        self.kinds.append((is_backward, is_inference))
        self.lasting.append(set(at.values()))

        def replay(args):
            given = list(args)
            args.clear()
            for k, value in enumerate(given):
                if k in at:
                    assert value.data_ptr() == at[k]
                elif isinstance(value, torch.Tensor):
                    own[k].copy_(value)
            return model([given[k] if k in at else own[k] for k in range(len(given))])

        return replay


@pytest.fixture
def replaying(monkeypatch, card) -> Replayed:
    trees = Replayed()
    monkeypatch.setattr(cudagraph_trees, "cudagraphify_impl", trees)
    monkeypatch.setattr(cuda_graphs, "obstacle", lambda _: "")
    monkeypatch.setattr(pretend_gpu.PretendDevice, "replays", True)
    monkeypatch.setattr(pretend_gpu.PretendDevice, "device", torch.device("cpu", 0))
    return trees


def step(model, net, optimizer, given) -> tuple[torch.Tensor, ...]:
    hidden, shares = model(*given)
    (hidden.square().sum() + shares[:, 0].sum()).backward()
    grads = [p.grad.clone() for p in net.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return (hidden.detach().clone(), *grads)


def test_steps_of_training_are_recorded(cold, replaying) -> None:
    """The forward and the backward; of both the parameters are read where they lie."""
    net, reference = Mixed(), Mixed()
    compiled = cold.compile(net, cuda_graphs=True)
    own, theirs = (torch.optim.SGD(n.parameters(), lr=0.1) for n in (net, reference))
    for _ in range(4):
        given = inputs()
        agree(step(compiled, net, own, given), step(reference, reference, theirs, given))
    agree(tuple(net.buffers()), tuple(reference.buffers()))
    assert replaying.kinds == [(False, False), (True, False)]
    parameters = {p.data_ptr() for p in net.parameters()}
    forward, backward = replaying.lasting
    assert parameters <= forward
    assert backward
    assert backward <= parameters


class Remembering(nn.Module):
    """A cache that stays where it is, or one of the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(1, 2, 32, 16), persistent=False)

    def forward(
        self, rows: torch.Tensor, at: torch.Tensor, cache: torch.Tensor | None = None
    ) -> torch.Tensor:
        cache = self.cache if cache is None else cache
        cache.index_copy_(2, at, rows.cos())
        return rows @ cache.transpose(-1, -2)


@torch.no_grad()
@pytest.mark.parametrize("own", [True, False], ids=["of the module", "of the caller"])
def test_caches_that_stay_are_written_by_recordings(cold, replaying, caplog, own) -> None:
    """Torch would copy another one first, and the copy would be written."""
    net, reference = Remembering(), Remembering()
    compiled = cold.compile(net, cuda_graphs=True)
    caches = [torch.zeros(1, 2, 32, 16) for _ in range(2)]
    given = [() if own else (cache,) for cache in caches]
    with caplog.at_level("INFO", "torch_pruner"):
        for position in range(4):
            rows, at = torch.randn(1, 2, 1, 16), torch.tensor([position])
            assert_equal(compiled(rows, at, *given[0]), reference(rows, at, *given[1]))
    assert_equal(net.cache, reference.cache)
    assert_equal(*caches)
    if own:
        assert replaying.kinds == [(False, True)]
        assert replaying.lasting == [{net.cache.data_ptr()}]
    else:
        assert replaying.kinds == []
        assert "writes into arguments that may lie elsewhere" in caplog.text


def test_a_backward_of_eagers_ends_the_step(cold, card, replaying, monkeypatch) -> None:
    """Torch's trees would wait for it for ever, and let nothing go."""
    manager = Mock()
    monkeypatch.setattr(cudagraph_trees, "get_manager", lambda *_, **__: manager)
    net, reference = Mixed(), Mixed()
    compiled = cold.compile(net, cuda_graphs=True)
    own, theirs = (torch.optim.SGD(n.parameters(), lr=0.1) for n in (net, reference))
    monkeypatch.setattr(cuda_graphs, "replayed", not_backward(cuda_graphs.replayed))
    for k in range(1, 4):
        given = inputs()
        agree(step(compiled, net, own, given), step(reference, reference, theirs, given))
        assert manager.set_to_running_backward.call_count == k
    assert replaying.kinds == [(False, False)]
    with torch.no_grad():
        compiled(*given)
    assert manager.set_to_running_backward.call_count == 3


def not_backward(replayed):
    def call(built, kind, device):
        if kind == "backward":
            raise cuda_graphs.NotRecordableError("a backward")
        return replayed(built, kind, device)

    return call


def test_what_keeps_a_graph_from_being_recorded() -> None:
    def writes(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)

    gm = make_fx(writes)(torch.zeros(2))
    assert "writes into its inputs" in cuda_graphs.obstacle(gm)
    assert "cpu" in cuda_graphs.obstacle(make_fx(torch.neg)(torch.zeros(2)))


def test_another_version_of_torch_runs_without_graphs(monkeypatch) -> None:
    monkeypatch.setattr(cudagraph_utils, "PlaceholderInfo", lambda: None)  # takes nothing of ours
    with pytest.raises(cuda_graphs.NotRecordableError, match="version of torch"):
        cuda_graphs._recorder(None, "inference", None)


@torch.no_grad()
def test_what_kernels_read_is_not_let_go_unsaid(cold, card, monkeypatch) -> None:
    """Renewed parameters: kernels on other streams may still be reading the ones before."""
    retired: list[list[torch.Tensor]] = []
    monkeypatch.setattr(card, "retire", lambda tensors: retired.append(list(tensors)))
    net = nn.Linear(24, 40)
    compiled, x = cold.compile(net), torch.randn(9, 24)
    for _ in range(2):
        compiled(x)
    assert not retired
    net.weight.mul_(2)
    assert_equal(compiled(x), net(x))
    assert [len(tensors) > 0 for tensors in retired] == [True]


@torch.no_grad()
def test_a_kernel_of_the_cpu_is_none_of_the_cards(cold, monkeypatch) -> None:
    net, given = Mixed().eval(), inputs()
    cold.compile(net)(*given)
    torch._dynamo.reset()
    failed = torch._dynamo.exc.BackendCompilerFailed
    with pretend_gpu.instead_of_cpu(monkeypatch), pytest.raises(failed, match="CacheMiss"):
        cold.compile(net, on_miss="error")(*given)


@torch.no_grad()
def test_a_damaged_program_is_built_again(cold, card) -> None:
    net, given = Mixed().eval(), inputs()
    cold.compile(net)(*given)
    for path in cold.cache_dir.rglob("*.so"):
        path.write_bytes(path.read_bytes()[:100])
    torch._dynamo.reset()
    agree(cold.compile(net)(*given), net(*given))


@torch.no_grad()
def test_memory_is_taken_for_each_call_and_given_back(cold, card, monkeypatch) -> None:
    """torch's allocator has to see every use: streams, pools of graphs, what is left."""
    calls: list[runtime.RegionCall] = []
    started = runtime.RegionCall._take_workspace

    def take(self: Any, local: Any) -> None:
        calls.append(self)
        started(self, local)

    monkeypatch.setattr(runtime.RegionCall, "_take_workspace", take)
    net, given = Mixed().eval(), inputs()
    compiled = cold.compile(net)
    for _ in range(3):
        agree(compiled(*given), net(*given))
    assert len(calls) == 3
    assert calls[0]._local.own.workspace is None


@torch.no_grad()
def test_explain_speaks_of_the_card(cold, card) -> None:
    found = tp.explain(Mixed().eval(), inputs(), options=cold.options())
    assert all(not t.cached for g in found.graphs for t in g.tasks)
    assert sum(g.ops_compiled for g in found.graphs) > 5


class TestExecutor(MeasureExecutorContract):
    """Candidates of a card, built and timed in workers."""

    @pytest.fixture
    def executor(self) -> Any:
        yield cuda_executor(pretend_gpu.fingerprint(), "", 0, pretend_gpu.BUILDER)
        close_all()

    @pytest.fixture
    def task(self) -> Task:
        spec = K.linear(40, 48, 64)
        return Task("linear", spec, TargetSpec.cuda(pretend_gpu.CARD), 1)

    @pytest.fixture
    def good(self, task: Task) -> list[Candidate]:
        sketch = sketches_for(task)[0]
        return [
            Candidate(sketch.name, tuple(sorted(point.items()))) for point in K.points(sketch, 3)
        ]

    @pytest.fixture
    def bad(self, good: list[Candidate]) -> list[tuple[Candidate, MeasureStatus]]:
        unknown = Candidate("gpu_nothing", good[0].decisions)
        return [(unknown, MeasureStatus.BUILD_ERROR)]


@torch.no_grad()
def test_tuning_for_the_card(cold, card) -> None:
    net = nn.Sequential(nn.Linear(64, 48), nn.ReLU()).eval()
    x = torch.randn(16, 64)
    compiled = cold.compile(net, effort="quick", trials=6, time_budget_s=60)
    assert_equal(compiled(x), net(x))
    report = tp.last_report()
    assert report is not None
    assert {t.source for t in report.tasks} == {"tuned"}
    assert report.tasks[0].trials >= 2


@torch.no_grad()
def test_kernels_for_a_card_that_is_not_at_hand(cold, monkeypatch) -> None:
    """They are drafted, built and kept; eager runs the network."""
    monkeypatch.setattr(
        "torch_pruner.codegen.build.gpu.program.compile_kernels", pretend_gpu.compiled
    )
    net, given = Mixed().eval(), inputs()
    report = tp.tune(net, given, options=cold.options(target={"kind": "cuda", "model": "h200"}))
    assert report.ops_compiled == report.ops_total
    assert {t.source for t in report.tasks} == {"untuned"}
    assert {t.sketch for t in report.tasks} >= {"gpu_product", "gpu_rows"}
    assert list(cold.cache_dir.rglob("*.so"))
    compiled = cold.compile(net, target={"kind": "cuda", "model": "h200"})
    agree(compiled(*given), net(*given))


def test_a_card_that_nobody_knows(cold) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="h200"):
        cold.compile(nn.Linear(4, 4), target={"kind": "cuda", "model": "voodoo"})(torch.ones(1, 4))


class Siblings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x) for layer in self.layers]


@torch.no_grad()
def test_products_of_one_input_are_launched_together(cold, card) -> None:
    net, x = Siblings(), torch.randn(5, 24)
    compiled = cold.compile(net)
    for _ in range(2):
        agree(compiled(x), net(x))
    assert all("_x3" in symbol for symbol, *_ in card.driver.launched)
