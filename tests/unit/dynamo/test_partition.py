"""Where graphs are cut and why, and that the pieces together are the whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.unit.dynamo.running import Capture, assert_equal, check, check_training, run
from torch_pruner.dynamo.lower.partition import EagerStep, Region, RejectionKind, partition
from torch_pruner.graph.ir import Graph

SMALL = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}


def shape_of(capture, index=0):
    """The steps of one partitioned graph, as a word each."""
    names = {Region: "region", EagerStep: "eager"}
    return [names[type(s)] for s in capture.parts[index].steps]


def kinds(capture):
    return [r.kind for p in capture.parts for r in p.rejections]


def test_everything_supported_is_one_region():
    capture = check(lambda a, b: (a @ b).relu().softmax(-1), torch.ones(3, 4), torch.ones(4, 5))
    assert shape_of(capture) == ["region"]
    parts = capture.parts[0]
    assert parts.ops_compiled == parts.ops_total == 3
    assert parts.flops_compiled == parts.flops_total == 2 * 3 * 4 * 5 + 3 * 15


def test_an_unsupported_operator_cuts_once():
    def fn(a):
        order = (a * 2).cumprod(0)
        return order + (a + 1).exp(), (a - 1).exp()

    capture = check(fn, torch.rand(6))
    assert shape_of(capture) == ["region", "eager", "region"]
    assert kinds(capture) == [RejectionKind.UNSUPPORTED_OP]
    assert capture.parts[0].rejections[0].node == "aten.cumprod.default (%cumprod)"


def test_unrelated_eager_work_does_not_cut():
    def fn(a, b):
        return (a + 1).exp() * b.cumprod(0) + a

    assert shape_of(check(fn, torch.rand(4), torch.rand(4))) == ["eager", "region"]


def test_views_for_the_caller_are_views_of_the_result():
    def fn(a):
        b = a * 2
        return b, b.t(), b[0]

    torch._dynamo.reset()
    capture = Capture()
    with torch.no_grad():
        b, transposed, row = torch.compile(fn, backend=capture)(torch.rand(3, 4))
    assert shape_of(capture) == ["region", "eager"]
    assert transposed.data_ptr() == row.data_ptr() == b.data_ptr()
    assert transposed.stride() == (1, 4)


def test_a_region_reads_through_views_of_its_inputs():
    capture = check(lambda a: a.t().reshape(2, 6) + 1, torch.rand(4, 3))
    (region,) = capture.parts[0].regions
    assert [n.op for n in region.inputs] == ["placeholder"]
    assert [region.graph.nodes[i].shape for i in region.graph.inputs] == [(4, 3)]


def test_views_and_constants_alone_stay_with_eager():
    capture = check(lambda a: (a.t(), torch.zeros(3), a.clone()), torch.rand(3, 4))
    assert "region" not in shape_of(capture)
    assert capture.parts[0].ops_compiled == 0


def test_a_copy_that_turns_many_numbers_is_work():
    """Eager copies those number by number; all others as fast as memory is."""

    def regions(fn, *args):
        return [len(r.nodes) for p in check(fn, *args).parts for r in p.regions]

    wide = torch.rand(256, 300)
    assert regions(lambda a: a.t().contiguous(), wide)
    assert regions(lambda a: (a.t().contiguous(), torch.cumprod(a, 0)), wide)
    assert not regions(lambda a: a.t().contiguous(), wide[:8])
    assert not regions(lambda a: a.clone(), wide)
    assert not regions(lambda a: a.view(4, 64, 300).transpose(0, 1).contiguous(), wide)
    assert not regions(lambda a: a[:, ::2].contiguous(), wide)


def test_an_empty_cache_costs_nothing():
    def fn(a):
        return torch.cat([torch.tensor([]), a * 2], dim=-2) + 1

    capture = check(fn, torch.rand(2, 3, 4))
    assert shape_of(capture) == ["region"]
    assert not capture.rejected


def test_static_inputs_are_marked():
    capture = check(nn.Linear(4, 5), torch.rand(3, 4))
    gm = capture.graphs[0]
    names = [n for n in gm.graph.nodes if n.op == "placeholder"]
    static = frozenset(i for i, n in enumerate(names) if n.meta["val"].shape != (3, 4))
    (region,) = partition(gm, static_inputs=static).regions
    marks = {
        region.graph.nodes[i].shape: region.graph.nodes[i].attr("static")
        for i in region.graph.inputs
    }
    assert marks == {(5, 4): True, (5,): True, (3, 4): False}


def test_equal_graphs_have_equal_text():
    def digest():
        capture = check(lambda a: (a + 1).softmax(-1), torch.rand(3, 4))
        (region,) = capture.parts[0].regions
        assert Graph.from_json(region.graph.to_json()) == region.graph
        return region.graph.digest()

    assert digest() == digest()


@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (lambda a: a.sort()[0] + 1, RejectionKind.UNSUPPORTED_OP),
        (lambda a: a + torch.rand(4), RejectionKind.RANDOM),
        (lambda a: torch.view_as_real(torch.complex(a, a)) + 1, RejectionKind.UNSUPPORTED_OP),
        (lambda a: a.half().exp().float() + 1, RejectionKind.DTYPE),
        (lambda a: a[:0].exp().sum() + a, RejectionKind.EMPTY),
    ],
)
def test_refusals_have_a_kind(fn, kind):
    assert kind in kinds(check(fn, torch.rand(4)))


def traced(fn, *args):
    """``fn`` as a graph of ATen operators, writes included."""
    gm = make_fx(fn, tracing_mode="fake")(*args)
    return gm, partition(gm)


def test_a_graph_that_writes_midway_stays_with_eager():
    def fn(a):
        return a.clone().add_(1).exp()

    gm, parts = traced(fn, torch.ones(4))
    assert {r.kind for r in parts.rejections} == {RejectionKind.MUTATION}
    assert_equal(run(gm, parts, [torch.ones(4)]), fn(torch.ones(4)))


def test_writes_at_the_end_come_last():
    def fn(a):
        b, c = a.exp(), a.cumprod(0)
        a.copy_(b + c)
        return b

    gm, parts = traced(fn, torch.ones(4))
    given, expected = torch.rand(4), torch.rand(4)
    given.copy_(expected)
    assert_equal(run(gm, parts, [given]), fn(expected))
    assert_equal(given, expected)
    last = parts.steps[-1]
    assert isinstance(last, EagerStep)
    assert [str(n.target) for n in last.nodes] == ["aten.copy_.default"]


def test_symbolic_shapes_stay_with_eager():
    torch._dynamo.reset()
    capture = Capture()
    compiled = torch.compile(lambda a: (a + 1).exp(), backend=capture, dynamic=True)
    torch.testing.assert_close(compiled(torch.ones(3)), (torch.ones(3) + 1).exp())
    assert set(kinds(capture)) == {RejectionKind.DYNAMIC_SHAPE}


def test_allowed_dtypes_are_the_callers():
    torch._dynamo.reset()
    capture = Capture(dtypes=frozenset(("float32",)))
    with torch.no_grad():
        torch.compile(lambda a: a.double() + 1, backend=capture)(torch.ones(3))
    assert set(kinds(capture)) == {RejectionKind.DTYPE}


def test_random_numbers_are_drawn_in_order():
    def fn(a):
        first = torch.rand(4)
        return first.exp() + torch.randn(4), torch.rand(4) * a, F.dropout(a.exp(), 0.5)

    check(fn, torch.rand(4))


def test_inputs_are_written_after_they_were_read():
    def fn(a):
        b = a.exp()
        a.mul_(2)
        return a.clone(), b.cumprod(0) + 1

    a, b = torch.rand(4), torch.rand(4)
    b.copy_(a)
    check(fn, a)
    torch._dynamo.reset()
    with torch.no_grad():
        fn(a)
        torch.compile(fn, backend=Capture())(b)
    torch.testing.assert_close(a, b)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, v):
        for layer in self.layers:
            v = v + F.dropout(F.gelu(layer(v)), 0.3, self.training)
        return v.square().mean()


def test_dropout_does_not_cut():
    capture = check_training(Block(), torch.randn(4, 16))
    assert shape_of(capture)[:2] == ["eager", "region"]
    assert all(len(p.regions) == 1 for p in capture.parts)
    assert set(capture.rejected) == {"aten.bernoulli.p"}


def transformers_models():
    tr = pytest.importorskip("transformers")
    common = {k: v for k, v in SMALL.items() if k != "intermediate_size"}
    small_vit = {k: SMALL[k] for k in list(SMALL)[1:5]}
    return {
        "bert": lambda: tr.BertModel(tr.BertConfig(**SMALL)),
        "gpt2": lambda: tr.GPT2Model(
            tr.GPT2Config(
                vocab_size=100, n_embd=64, n_layer=2, n_head=4, n_positions=64, use_cache=False,
                bos_token_id=0, eos_token_id=0,
            )
        ),
        "llama": lambda: tr.LlamaModel(
            tr.LlamaConfig(**SMALL, num_key_value_heads=2, use_cache=False)
        ),
        "opt": lambda: tr.OPTModel(
            tr.OPTConfig(**common, ffn_dim=128, word_embed_proj_dim=64, use_cache=False)
        ),
        "mistral": lambda: tr.MistralModel(
            tr.MistralConfig(**SMALL, num_key_value_heads=2, use_cache=False)
        ),
        "vit": lambda: tr.ViTModel(tr.ViTConfig(**small_vit, image_size=32, patch_size=8)),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "opt", "mistral", "vit"])
def test_transformers_models_are_compiled_whole(name):
    torch.manual_seed(0)
    model = transformers_models()[name]().eval()
    given = torch.randn(1, 3, 32, 32) if name == "vit" else torch.randint(0, 100, (2, 16))
    capture = check(model, given)
    assert not capture.rejected
    assert [len(p.regions) for p in capture.parts] == [1]


class Network(nn.Module):
    """What convolutional networks are made of: residuals, branches, dilation, resizing."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        self.depthwise = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=2, dilation=2, groups=16),
            nn.BatchNorm2d(16),
            nn.Hardswish(),
        )
        self.branch = nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.Conv2d(16, 8, 1))
        self.up = nn.ConvTranspose2d(24, 8, 4, 2, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, v):
        v = self.stem(v)
        v = torch.cat([self.depthwise(v) + v, self.branch(v)], 1)
        v = F.interpolate(self.up(v).tanh(), scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(F.adaptive_avg_pool2d(v, 1).flatten(1))


def test_convolutional_networks_are_compiled_whole():
    torch.manual_seed(0)
    capture = check(Network().eval(), torch.randn(2, 3, 32, 32))
    assert shape_of(capture) == ["region"]
    assert capture.parts[0].ops_compiled == capture.parts[0].ops_total


def test_tensors_of_another_device_stay_with_eager():
    """A kernel for the CPU on a GPU's address would end the process."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    gm = make_fx(lambda a: (a + 1).exp())(torch.ones(2, 3))
    for node in gm.graph.nodes:
        if node.op != "output":
            meta = torch.empty(2, 3, device="meta")
            node.meta["val"] = FakeTensor(mode, meta, torch.device("cuda", 0))
    parts = partition(gm)
    assert parts.ops_compiled == 0
    assert {r.kind for r in parts.rejections} == {RejectionKind.DEVICE}
    assert all("cuda" in r.detail for r in parts.rejections)
