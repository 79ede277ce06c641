"""A sample of ``tests.suites.cuda_builds``: every kernel of a network, built for GPUs."""

from __future__ import annotations

import pytest

from benchmarks.gpu.kernels import drafted
from benchmarks.gpu.tasks import tasks_of
from tests.emitting import schedule
from tests.suites.cuda_builds import build_all, fits
from torch_pruner.cards import CARDS
from torch_pruner.codegen.build.gpu import nvrtc
from torch_pruner.codegen.build.gpu.source import cuda_source
from torch_pruner.compiler.drafting import draft
from torch_pruner.families import sketches_for

pytestmark = [
    pytest.mark.tvm,
    pytest.mark.skipif(not nvrtc.available(), reason="NVRTC or CUDA's headers are not installed"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("network", "precision", "card"),
    [
        ("bert_tiny", "float32", "t4"),
        ("bert_tiny", "float16", "h200"),
        ("resnet18", "float32", "a100"),
    ],
)
def test_every_draft_of_a_network_builds(network: str, precision: str, card: str) -> None:
    tasks = tasks_of(network, precision, CARDS[card], 1 if network == "bert_tiny" else None)
    assert len(tasks) >= 8
    results = build_all([(t, draft(t)) for t in tasks], CARDS[card])
    assert [r for r in results if not fits(r, CARDS[card])] == []
    assert sum(r.spilled_bytes for r in results) == 0


@pytest.mark.parametrize(("precision", "card"), [("float16", "h200"), ("float32", "t4")])
def test_a_launch_asks_for_the_memory_that_its_kernel_shares(precision: str, card: str) -> None:
    """No assembler counts it: memory that is declared without a size is the launch's to give."""
    for task in tasks_of("bert_tiny", precision, CARDS[card], 1):
        for sketch in (s for s in sketches_for(task) if not s.name.startswith("gpu_triton")):
            point = sketch.default()
            kernel = schedule(task.spec, sketch.name, sketch.named(point))
            source, launches = cuda_source({"kernel": kernel}, CARDS[card].arch)
            shared = launches["kernel"].shared_bytes
            assert (shared > 0) == ("torch_pruner_shared" in source)
            tiles = float(sketch.symbols(point[None]).s3_cache_bytes[0])
            if sketch.name in ("gpu_product", "gpu_warpgroup"):
                assert 0.75 * tiles <= shared <= 1.25 * tiles + 128


def test_drafts_in_tensor_cores_build() -> None:
    card = CARDS["a100"]
    tasks = [t for t in tasks_of("bert_tiny", "float16", card, 1) if "matmul" in t.name]
    chosen = [(t, c) for t in tasks for _, c in drafted(t, 8) if dict(c.decisions).get("tensor")]
    assert len(chosen) >= 20
    results = build_all(chosen[:24], card)
    assert sum(fits(r, card) for r in results) >= 0.95 * len(results)
