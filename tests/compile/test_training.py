"""Training compiled models: parameters after several steps agree with eager's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_pruner as tp
from tests.compile.agreement import assert_equal

pytestmark = pytest.mark.tvm


class ConvNet(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv1(x)))
        x = torch.nn.functional.max_pool2d(torch.relu(self.conv2(x)), 2)
        return self.head(self.dropout(x.mean((2, 3))))


class Depthwise(nn.Module):
    """Linear bottlenecks: depthwise convolutions, activations in place, means that are zero."""

    def __init__(self, kernel: int = 3):
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24)]
        for stride in (1, 2):
            layers += [
                nn.Conv2d(24, 40, 1, bias=False),
                nn.BatchNorm2d(40),
                nn.SiLU(inplace=True),
                nn.Conv2d(40, 40, kernel, stride, kernel // 2, groups=40, bias=False),
                nn.BatchNorm2d(40),
                nn.SiLU(inplace=True),
                nn.Conv2d(40, 24, 1, bias=False),
                nn.BatchNorm2d(24),
            ]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(24, 5)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


class Block(nn.Module):
    def __init__(self, recompute: bool):
        super().__init__()
        self.recompute = recompute
        self.norm = nn.LayerNorm(8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8))

    def forward(self, x):
        y = self.norm(x)
        y = checkpoint(self.body, y, use_reentrant=False) if self.recompute else self.body(y)
        return x + y


def bert(dropout: float):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=16,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        attn_implementation="eager",
    )
    return transformers.BertForSequenceClassification(config)


def bert_batch(step: int):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 50, (2, 8), generator=generator)
    return {"input_ids": tokens, "labels": torch.randint(0, 2, (2,), generator=generator)}


def image_batch(step: int):
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(2, 3, 12, 12, generator=generator)}


def train(model, call, batch, steps=3, optimizer=None, accumulate=1) -> list[float]:
    """Losses of ``steps`` updates, each from the gradients of ``accumulate`` batches."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        for part in range(accumulate):
            torch.manual_seed(100 * step + part)
            out = call(**batch(10 * step + part))
            loss = out.loss if hasattr(out, "loss") else out.square().mean()
            (loss / accumulate).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_trained_alike(backend, model, batch, tolerance=2e-4, **how):
    twin = copy.deepcopy(model)
    losses = train(model, backend.compile(model), batch, **how)
    report = tp.last_report()
    assert report.ops_compiled > 0
    expected = train(twin, twin, batch, **how)
    assert losses == pytest.approx(expected, rel=1e-3)
    for name, value in twin.state_dict().items():
        assert_equal(model.state_dict()[name], value, name, tolerance)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_bert(backend, dropout):
    torch.manual_seed(0)
    assert_trained_alike(backend, bert(dropout).train(), bert_batch)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_convolutions_with_batch_norm(backend, dropout):
    torch.manual_seed(0)
    assert_trained_alike(backend, ConvNet(dropout).train(), image_batch)


@pytest.mark.parametrize("kernel", [3, 5])
def test_depthwise_convolutions(backend, kernel):
    """Their gradients have families of their own; running means of nothing but rounding do not
    leave the forward to eager."""
    torch.manual_seed(0)
    assert_trained_alike(backend, Depthwise(kernel).train(), image_batch, tolerance=2e-3)
    sketches = {t.sketch for t in tp.last_report().tasks}
    assert {"depthwise", "depthwise_gradient"} <= sketches


def test_gradients_accumulate(backend):
    torch.manual_seed(0)
    assert_trained_alike(backend, ConvNet().train(), image_batch, steps=2, accumulate=3)


@pytest.mark.parametrize("recompute", [False, True])
def test_activation_checkpointing(backend, recompute):
    torch.manual_seed(0)
    model = nn.Sequential(Block(recompute), Block(recompute)).train()

    def batch(step):
        return {"input": torch.randn(3, 8, generator=torch.Generator().manual_seed(step))}

    assert_trained_alike(backend, model, batch)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop"])
def test_other_optimizers(backend, name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    twin = copy.deepcopy(model)

    def batch(step):
        return {"input": torch.randn(3, 6, generator=torch.Generator().manual_seed(step))}

    for m, call in ((model, backend.compile(model)), (twin, twin)):
        train(m, call, batch, optimizer=getattr(torch.optim, name)(m.parameters(), lr=1e-2))
    for name, value in twin.state_dict().items():
        assert_equal(model.state_dict()[name], value, name, 5e-4)


def test_training_and_evaluation_take_turns(backend):
    torch.manual_seed(0)
    model = ConvNet(0.2)
    twin = copy.deepcopy(model)
    compiled = backend.compile(model)
    for _ in range(2):
        for m, call in ((model, compiled), (twin, twin)):
            m.train()
            train(m, call, image_batch, steps=1)
            m.eval()
        with torch.no_grad():
            x = image_batch(50)["x"]
            assert_equal(compiled(x), twin(x), tolerance=2e-4)


def test_gradient_clipping_and_scaling(backend):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    twin = copy.deepcopy(model)
    for m, call in ((model, backend.compile(model)), (twin, twin)):
        (call(torch.full((3, 6), 2.0)).square().sum() * 1024).backward()
        nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_equal(p.grad, q.grad)


def test_autocast_training(backend):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    twin = copy.deepcopy(model)
    compiled = backend.compile(model)
    for m, call in ((model, compiled), (twin, twin)):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.05)
        for step in range(3):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = call(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in twin.state_dict().items():
        assert_equal(model.state_dict()[name], value, name, 2e-2)


@pytest.mark.parametrize("size", [32, 33])
def test_a_strided_pool_is_compiled_with_its_indices(backend, size) -> None:
    """As at the start of every ResNet. Its indices are integers computed from each other."""

    def fn(x):
        return torch.nn.functional.max_pool2d(torch.relu(x), 3, 2, 1)

    x = torch.randn(2, 8, size, size, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    backend.compile(fn)(x).square().sum().backward()
    fn(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert all(not graph.ops_fallback for graph in tp.last_report().graphs)
