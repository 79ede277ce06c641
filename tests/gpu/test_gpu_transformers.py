"""Models of transformers on a pretended card: ``tests.suites.decoders`` and ``architectures``."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from tests.gpu import pretend_gpu
from tests.suites import architectures, decoders

pytestmark = pytest.mark.tvm
SLOW = ["whisper"]  # 3000 frames: minutes as loops on one thread
NAMES = ["llama", "mistral", "gemma2", "gpt2", "opt", "phi3", "qwen3", "gemma3"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", NAMES)
def test_a_decoder(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """Every graph is one program: caches are written by kernels, and nothing is left to eager."""
    monkeypatch.setenv("TORCH_PRUNER_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCH_PRUNER_EFFORT", "none")  # which the suite sets for good
    torch._dynamo.reset()
    with pretend_gpu.instead_of_cpu(monkeypatch):
        found = decoders.check(name)
    assert found.status == "compiled", found.reason


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", [n for n in architectures.ARCHITECTURES if n not in SLOW])
def test_an_architecture(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """What eager adds up alone is left to it; convolutions are as exact as eager's."""
    monkeypatch.setenv("TORCH_PRUNER_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    # A context, since torch's own test helpers freeze the flags for all that follow in a process.
    exact = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
    with exact, pretend_gpu.instead_of_cpu(monkeypatch):
        found = architectures.check(name)
    assert found.status == "compiled", found.reason
