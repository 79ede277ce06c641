"""The comparison with peers: statistics, tables and the handling of rows, without any peer."""

from __future__ import annotations

import json
import signal
import time
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import accuracy, contest, machine_peak, peer_table, peers, timing
from benchmarks.contestants import PREPARE, Setting, TookTooLong, as_tensors, time_limit
from benchmarks.conversion import Conversion, Positional, positional

GIGA = 1e9


def _latency(name: str, seconds: float) -> dict[str, Any]:
    fields = {"median_s": seconds, "q1_s": seconds, "q3_s": seconds, "min_s": seconds}
    return {"name": name, "n": 20, **fields}


def _row(network: str, reasons: dict[str, str] | None = None, **seconds: float) -> dict[str, Any]:
    timed = {
        name: {
            "latency": _latency(name, s),
            "difference": 1e-6,
            "prepare_s": 1.5,
            "report": None,
            "notes": [],
        }
        for name, s in seconds.items()
    }
    return {
        "status": "ok",
        "error": "",
        "process_s": 1.0,
        "network": network,
        "title": network.upper(),
        "precision": "float32",
        "effort": "full",
        "batch": 1,
        "flops": 10 * GIGA,
        "peak_flops_per_s": {"before": 200 * GIGA, "between": 190 * GIGA, "after": 195 * GIGA},
        "contestants": timed | {name: {"reason": why} for name, why in (reasons or {}).items()},
    }


def test_the_best_peer_is_the_fastest_of_all_others() -> None:
    row = _row("bert_tiny", eager=0.4, inductor=0.3, openvino=0.2, pruner=0.1)
    assert peer_table.best_peer(row) == "openvino"
    assert peer_table.faster_than(row, "openvino") == pytest.approx(2)
    assert peer_table.faster_than(row, "onnxruntime") is None


def test_share_of_the_peak_takes_the_highest_peak() -> None:
    row = _row("bert_tiny", pruner=0.1)
    assert peer_table.share_of_peak(row, "pruner") == pytest.approx(10 / 0.1 / 200)
    assert peer_table.drift(row) == pytest.approx(0.05)


def test_means_are_geometric_and_count_what_is_known() -> None:
    rows = [
        _row("bert_tiny", inductor=0.4, pruner=0.1),
        _row("resnet50", inductor=0.1, pruner=0.1),
        _row("vit", {"inductor": "RuntimeError: no"}, eager=0.9, pruner=0.1),
    ]
    mean, count = peer_table.mean_ratio(rows, "inductor")
    assert (mean, count) == (pytest.approx(2), 2)
    assert peer_table.mean_ratio(rows)[1] == 3
    assert peer_table.mean_ratio([]) == (None, 0)


def test_the_page_groups_networks_and_gives_every_reason() -> None:
    rows = {
        "a": _row("resnet50", {"openvino": "ModuleNotFoundError: No"}, inductor=0.2, pruner=0.1),
        "b": _row("bert_tiny", {"openvino": "TookTooLong: 5 s"}, inductor=0.8, pruner=0.1),
        "c": _row("vit", {"openvino": "crash: SIGSEGV: boom", "pruner": "E: x"}, inductor=0.1),
    }
    rows["c"]["peak_flops_per_s"]["after"] = 100 * GIGA
    machine = {"gpu": None, "cpu": "a CPU", "cores": 2, "threads": 2, "versions": {}}
    content = {"rows": rows, "machine": machine | {"commit": "c", "date": "d"}}
    rows["b"]["commit"] = "earlier"
    text = peer_table.render(content, "peers.json")
    assert "Commit earlier." in text
    assert text.index("| RESNET50") < text.index("| BERT_TINY") < text.index("| VIT")
    assert (
        "| RESNET50 | 200 ms | not installed | 100 ms | 2.00x | 2.00x | inductor | 50 % |" in text
    )
    assert "| BERT_TINY | 800 ms | too slow | 100 ms | 8.00x" in text
    assert "| VIT | 100 ms | crash | failed |  |  | inductor |  |" in text
    assert "| language models | 8.00x (1) | 8.00x (1) |  |" in text
    assert "| all | 4.00x (2) | 4.00x (2) |  |" in text
    assert "* VIT, openvino: crash: SIGSEGV: boom" in text


def test_contestants_of_other_efforts_are_rows_of_their_own() -> None:
    row = _row("vit", eager=0.4, openvino=0.3, pruner=0.1)
    row["contestants"]["pruner-quick"] = _row("vit", pruner=0.2)["contestants"]["pruner"]
    row["contestants"]["pruner-none"] = _row("vit", pruner=0.25)["contestants"]["pruner"]
    before = _row("vit", eager=9.0, pruner=1.0) | {"effort": "quick"}
    for rows in ({"n/full": row, "n/quick": before}, {"n/quick": before, "n/full": row}):
        found = peer_table.by_effort(rows)
        assert set(found) == {"n/full", "n/quick", "n/none"}
        for effort, times in (("full", 3.0), ("quick", 1.5), ("none", 1.2)):
            alone = found[f"n/{effort}"]
            best = peer_table.best_peer(alone)
            assert peer_table.faster_than(alone, best) == pytest.approx(times)
            assert alone.get("effort", "full") == effort
            assert not {"pruner-quick", "pruner-none"} & {*alone["contestants"]}
    assert peer_table.by_effort({"n/quick": before}) == {"n/quick": before}


def test_differences_are_set_against_eagers_own() -> None:
    row = _row("bert_tiny", eager=0.2, pruner=0.1)
    row["contestants"]["pruner"]["difference"] = 3e-6
    assert peer_table._difference(row, 3e-6) == "3.0e-06 (3.0)"
    assert peer_table._difference(_row("bert_tiny", pruner=0.1), 3e-6) == "3.0e-06"


def test_a_row_without_results_is_still_a_line() -> None:
    row = _row("vit") | {"status": "timeout", "error": "no answer in 5 s"}
    del row["contestants"], row["peak_flops_per_s"]
    machine = {"gpu": None, "cpu": "", "cores": 2, "threads": 2, "versions": {}, "commit": ""}
    rows = {"a": row, "b": _row("bert_tiny", eager=0.2, pruner=0.1)}
    text = peer_table.render({"rows": rows, "machine": machine | {"date": ""}}, "x")
    assert "| VIT | timeout | timeout |" in text
    assert "* VIT: timeout: no answer in 5 s" in text


class TestRows:
    @pytest.fixture
    def launched(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        jobs: list[Any] = []

        def launch(job: Any, **_: object) -> dict[str, Any]:
            jobs.append(job)
            base = {"status": "ok", "error": "", "process_s": 1.0}
            if isinstance(job, Conversion):
                return base | {"export_s": 5.0}
            if "openvino" not in job.excluded:
                crash = {"status": "crash", "error": "SIGSEGV: boom"}
                return base | crash | {"preparing": "openvino"}
            row = _row(job.network, dict(job.excluded), eager=0.2, onnxruntime=0.1, pruner=0.1)
            return row | {"preparing": None}

        monkeypatch.setattr(peers, "launch", launch)
        rates = {"flops_per_s": {"1": 1e9}, "bytes_per_s": {"1": 1e9}, "bytes_read": 1}
        monkeypatch.setattr(machine_peak, "measure", lambda _threads: rates)
        return jobs

    def test_a_peer_that_crashes_is_a_cell(self, launched: list[Any], tmp_path: Any) -> None:
        data, page = tmp_path / "peers.json", tmp_path / "peers.md"
        command = ["--networks", "dcgan", "--peers", "eager,onnxruntime,openvino"]
        command += ["--data", str(data), "--out", str(page)]
        assert peers.main(command) == 0
        assert [type(job).__name__ for job in launched] == ["Conversion", "Contest", "Contest"]
        (row,) = json.loads(data.read_text())["rows"].values()
        assert row["contestants"]["openvino"]["reason"] == "crash: SIGSEGV: boom"
        assert row["contestants"]["onnxruntime"]["prepare_s"] == pytest.approx(6.5)
        assert "| DCGAN generator | 200 ms | 100 ms | crash | 100 ms |" in page.read_text()
        peers.main(command)
        assert len(launched) == 3, "a finished row is kept"

    def test_half_precision_has_a_file_of_each_kind(
        self, launched: list[Any], tmp_path: Any
    ) -> None:
        command = ["--networks", "gpt2", "--precision", "bfloat16", "--data", str(tmp_path / "d")]
        peers.main(command)
        conversions = [job for job in launched if isinstance(job, Conversion)]
        assert [job.widen for job in conversions] == [False, True]
        files = launched[-1].onnx
        assert files["onnxruntime"] != files["openvino"]

    def test_efforts_have_caches_of_their_own(self, launched: list[Any], tmp_path: Any) -> None:
        command = ["--networks", "dcgan", "--peers", "eager", "--effort", "full"]
        for given in ([], ["--cache-dir", str(tmp_path / "cache")]):
            peers.main([*command, *given, "--force", "--data", str(tmp_path / "d")])
            job = launched[-1]
            ours, quick = job.options, job.quick
            assert [o["effort"] for o in (ours, quick, job.drafts)] == ["full", "quick", "none"]
            assert len({o["cache_dir"] for o in (ours, quick, job.drafts)}) == 3
            assert given == [] or ours["cache_dir"] == given[-1]
        (row,) = json.loads((tmp_path / "d").read_text())["rows"].values()
        assert "cache_dir" not in {*row["settings"]["options"], *row["settings"]["quick"]}


def test_a_turn_is_a_pause_then_untimed_then_timed_calls() -> None:
    happened: list[object] = []
    now = iter(range(1000))
    timing.interleave(
        {"a": lambda: happened.append("a"), "b": lambda: happened.append("b")},
        warmup=0,
        rounds=2,
        pause_s=0.5,
        wake=2,
        per_turn=2,
        clock=lambda: float(next(now)),
        sleep=happened.append,
    )
    assert happened[2:] == [0.5, *"aaaa", 0.5, *"bbbb"]


def test_ours_is_always_among_the_peers() -> None:
    assert peers.peer_names("openvino,eager") == ("eager", "openvino", "pruner")


def test_an_unknown_peer_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.main(["--peers", "onnx"])
    assert "onnxruntime" in capsys.readouterr().err


def test_a_contest_survives_its_json() -> None:
    job = contest.Contest("dcgan", ("eager", "pruner"), excluded={"eager": "why"})
    assert contest.Contest.from_json(job.to_json()) == job


def test_what_cannot_be_prepared_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Setting) -> Any:
        raise RuntimeError("no such\nfile")

    monkeypatch.setitem(PREPARE, "openvino", fails)
    setting = Setting(nn.Identity(), (torch.ones(2),), "float32", 1)
    calls: dict[str, Any] = {}
    exact = torch.ones(2, dtype=torch.float64)
    found = contest._prepare("openvino", setting, 5.0, exact, calls)
    assert found == {"reason": "RuntimeError: no such file"}
    good = contest._prepare("eager", setting, 5.0, exact, calls)
    assert good["difference"] == 0.0
    assert list(calls) == ["eager"]


def test_a_contestant_that_hangs_is_stopped() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TookTooLong), time_limit(0.01):
        time.sleep(60)
    assert signal.getsignal(signal.SIGALRM) is before


class Normalised(nn.Module):
    """Casts to float32 by name, as language models do."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        wide = x.to(torch.float32) * torch.full((1,), 1 / 3, dtype=torch.float32)
        return {"first": wide, "second": x.float()}


def test_the_reference_is_in_float64_throughout() -> None:
    outputs: Any = accuracy.float64_outputs(Normalised(), (torch.ones(3),))
    assert {x.dtype for x in outputs.values()} == {torch.float64}
    assert outputs["first"][0].item() == pytest.approx(1 / 3, rel=1e-15)
    assert torch.get_default_dtype() is torch.float32


def test_flops_of_attention_are_counted() -> None:
    q = torch.randn(1, 2, 16, 8)

    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    assert contest.flops(Attention(), (q,)) == 2 * 2 * (2 * 16 * 16 * 8)


def test_runtimes_take_positions_and_give_tensors() -> None:
    module = Positional(Normalised(), ("x",))
    assert [x.shape for x in module(torch.ones(3))] == [(3,), (3,)]
    assert [x.shape for x in positional({"x": torch.ones(2)})] == [(2,)]
    assert torch.equal(as_tensors([torch.ones(2).numpy()])[0], torch.ones(2))


def test_rates_are_of_single_calls() -> None:
    ticks = iter([0.0, 2.0, 10.0, 14.0])
    rates = machine_peak.samples(lambda: None, 8.0, repeats=2, clock=lambda: next(ticks))
    assert rates == [4.0, 2.0]
