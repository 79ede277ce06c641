"""Tasks against the peak, memory against what is allowed, decoding against the streaming read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import decode, memory, tasks

GIGA = 1e9


def _task(name: str, calls: int, gflop: float, seconds: float | None, mb: float = 1.0) -> Any:
    return {
        "name": name,
        "calls": calls,
        "flops": gflop * GIGA,
        "bytes": mb * 1e6,
        "seconds": seconds,
        "source": "tuned",
        "sketch": "contraction",
    }


TASKS = [
    _task("matmul_a", 2, 1.0, 0.01),  # 100 GFLOP/s
    _task("matmul_b", 1, 2.0, 0.04),  # 50 GFLOP/s
    _task("matvec_c", 1, 0.1, 0.01, mb=100.0),
    _task("matmul_d", 1, 1.0, None),
]


def test_the_mean_share_is_weighted_by_flops_of_all_calls() -> None:
    assert tasks.weighted_share(TASKS[:2], 100 * GIGA) == pytest.approx(0.75)
    assert tasks.weighted_share([TASKS[3]], 100 * GIGA) is None


def test_the_limit_is_what_runs_out_first() -> None:
    assert tasks.limit(TASKS[0], 100 * GIGA, 10 * GIGA) == "arithmetic"
    assert tasks.limit(TASKS[2], 100 * GIGA, 10 * GIGA) == "memory"


def test_tasks_that_fall_short_are_named_unless_memory_is_the_limit() -> None:
    rates = {"flops_per_s": 100 * GIGA, "bytes_per_s": 10 * GIGA}
    text = tasks.render("net", {"tasks": TASKS, **rates})
    assert "below 60 %: matmul_b" in text
    assert "below 60 %: matvec_c" not in text
    assert "1 tasks run untuned or in a library" in text


def test_memory_may_be_eagers_plus_packed_weights_plus_a_tenth() -> None:
    result: Any = {
        "status": "ok",
        "error": "",
        "eager": {"peak_bytes": 100_000_000},
        "aot_eager": {"peak_bytes": 110_000_000},
        "pruner": {"packed_bytes": 100_000_000, "peak_bytes": 219_000_000},
    }
    assert memory.allowed_bytes(result) == pytest.approx(220e6)
    text = memory.render({"fits": result, "failed": {"status": "crash", "error": "boom"}})
    fits, failed = text.splitlines()[2:]
    assert fits.split()[1:-1:2] == ["100", "110", "100", "220", "219"]
    assert fits.endswith("ok")
    assert "boom" in failed


class TestDecoding:
    def test_a_decoder_goes_on_from_the_start_of_its_cache(self) -> None:
        seen, resets = [], []

        def step(token: torch.Tensor, position: torch.Tensor, _cache: object) -> torch.Tensor:
            seen.append((token.item(), position.item()))
            scores = torch.zeros(1, 1, 5)
            scores[..., 3] = 1.0
            return scores

        cache: Any = SimpleNamespace(reset=lambda: resets.append(None))
        decoder = decode.Decoder(step, cache, 2)
        for _ in range(3):
            decoder()
        assert seen == [(0, 0), (3, 1), (3, 0)]
        assert len(resets) == 1

    def test_steps_equal_those_without_a_cache(self) -> None:
        model = decode.build(1, torch.float32)
        decoder = decode.decoder(model, "eager", {}, 4)
        with torch.no_grad():
            tokens = [decoder.token]
            for _ in range(2):
                logits = decoder()
                tokens.append(decoder.token)
            whole = model(input_ids=torch.cat(tokens[:2], 1), use_cache=False).logits
        torch.testing.assert_close(logits[:, -1], whole[:, -1], rtol=1e-4, atol=1e-4)

    def test_embeddings_are_not_read_as_a_whole(self) -> None:
        model = decode.build(1, torch.float32)
        everything = sum(p.nbytes for p in model.parameters())
        assert everything - decode.weight_bytes(model) == 32000 * 768 * 4

    def test_the_table_gives_the_share_of_the_read(self) -> None:
        latency = {"name": "pruner", "n": 3} | dict.fromkeys(
            ("median_s", "q1_s", "q3_s", "min_s"), 0.05
        )
        backend = {"latency": latency, "difference": 0.0, "first_call_s": 1.0, "report": None}
        rounded = backend | {"weight_bytes": 125_000_000}
        backend["weight_bytes"] = 500_000_000
        text = decode.render(
            {
                "layers": 12,
                "length": 256,
                "precision": "float32",
                "weight_bytes": 500_000_000,
                "read_bytes_per_s": 12.5e9,
                "backends": {"pruner": backend, "pruner-int8": rounded},
            }
        )
        assert "20.0" in text
        assert "80 %" in text
        assert "20 %" in text, "of what the int8 weights are"
