"""Timing, tables, accuracy and the rows of the network table, with invented clocks and results."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import accuracy, arguments, networks, reports, tables, timing
from benchmarks.job import Job, _outcome, launch, run


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def takes(self, *seconds: float):
        """A function whose calls last as given, in turn, the last one for ever."""
        left = list(seconds)

        def function() -> None:
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return function


def test_candidates_take_turns_and_medians_are_per_call() -> None:
    clock = Clock()
    calls = {"fast": clock.takes(0.01), "slow": clock.takes(0.03)}
    timings = timing.interleave(calls, warmup=1, rounds=5, clock=clock)
    assert timings["fast"].n == timings["slow"].n == 5
    assert timings["slow"].median_s == pytest.approx(0.03)
    assert timing.ratios(timings, "slow")["fast"] == pytest.approx(3)


def test_warm_up_is_not_counted() -> None:
    clock = Clock()
    timings = timing.interleave({"a": clock.takes(9.0, 9.0, 0.01)}, warmup=2, rounds=3, clock=clock)
    assert timings["a"].min_s == pytest.approx(timings["a"].q3_s)


def test_short_calls_are_timed_in_groups() -> None:
    clock, calls = Clock(), []

    def function() -> None:
        calls.append(None)
        clock.now += 1e-5

    timings = timing.interleave({"a": function}, warmup=0, rounds=2, clock=clock)
    assert timings["a"].median_s == pytest.approx(1e-5)
    assert len(calls) == pytest.approx(1 + 2 * (1 + 100), abs=2)


def test_rounds_go_on_until_every_candidate_had_its_seconds() -> None:
    clock = Clock()
    timings = timing.interleave(
        {"a": clock.takes(0.5), "b": clock.takes(2.0)}, rounds=1, min_seconds=3, clock=clock
    )
    assert timings["a"].n == 6


def test_nobody_waits_for_what_is_timed_beside() -> None:
    clock = Clock()
    calls = {"a": clock.takes(1.0), "loop": clock.takes(0.002)}
    timings = timing.interleave(calls, rounds=2, min_seconds=3, beside={"loop"}, clock=clock)
    assert timings["a"].n == timings["loop"].n == 3


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1234.0, "1234 s"), (12.34, "12.3 s"), (0.9996, "1000 ms"), (3.1e-5, "31 us"), (5e-9, "5 ns")],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert timing.duration(seconds) == text


def test_the_machine_is_json() -> None:
    machine = json.loads(json.dumps(timing.machine()))
    assert machine["versions"]["torch"] == torch.__version__
    assert timing.machine_line(machine)


def test_rows_without_a_card_stay_when_only_what_cards_run_changes(monkeypatch):
    files = {"package/families/rows.py": "1", "package/families/gpu_rows/emit.py": "1"}
    changed: list[str] = []

    def git(command, *arguments):
        listed = [f"100644 blob {content}\t{path}" for path, content in files.items()]
        return "\n".join(listed if command == "ls-tree" else changed)

    monkeypatch.setattr(timing, "_git", git)
    for card in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=card: there)
        files["package/families/gpu_rows/emit.py"], changed[:] = "1", []
        before = timing.code_identity()
        files["package/families/gpu_rows/emit.py"] = "2"
        assert (timing.code_identity() == before) is not card
        changed[:] = ["package/families/gpu_rows/emit.py"]
        assert timing.code_identity().endswith("+changes") is card
    changed[:], before = [], timing.code_identity()
    files["package/families/rows.py"] = "2"
    assert timing.code_identity() != before
    changed[:] = ["package/families/rows.py"]
    assert timing.code_identity().endswith("+changes")


def test_tables_align() -> None:
    text = tables.plain(["name", "ms"], [["eager", "1.5"], ["ours", "12.25"]])
    assert text.splitlines() == ["name      ms", "-----  -----", "eager    1.5", "ours   12.25"]
    assert tables.markdown(["a", "b"], [["x", "1"]]).splitlines()[1] == "| --- | ---: |"


def test_difference_is_relative_and_takes_the_worst_output() -> None:
    expected = (torch.tensor([1.0, -4.0]), {"mask": torch.tensor([1, 2])})
    near = (torch.tensor([1.0, -4.2]), {"mask": torch.tensor([1, 2])})
    assert accuracy.difference(near, expected) == pytest.approx(0.05)


@pytest.mark.parametrize(
    "wrong",
    [
        (torch.tensor([math.nan, -4.0]), torch.tensor([1, 2])),
        (torch.tensor([1.0, -4.0]), torch.tensor([1, 3])),
        (torch.tensor([[1.0, -4.0]]), torch.tensor([1, 2])),
        (torch.tensor([1.0, -4.0]),),
    ],
)
def test_what_cannot_be_compared_is_no_match(wrong: object) -> None:
    expected = (torch.tensor([1.0, -4.0]), torch.tensor([1, 2]))
    assert accuracy.difference(wrong, expected) == accuracy.INCOMPARABLE


def test_half_precision_is_judged_by_eagers_own_error() -> None:
    assert accuracy.bound("float32", 0.5) == 1e-3
    assert accuracy.bound("bfloat16", 0.001) == 2e-2
    assert accuracy.bound("bfloat16", 0.05) == 0.1


def test_a_job_checks_and_times() -> None:
    job = Job("dcgan", backend="eager", steady=True, rounds=1, min_seconds=0.0)
    assert Job.from_json(job.to_json()) == job
    result = run(job)
    assert (result["status"], result["difference"]) == ("ok", 0.0)
    assert result["latency"]["eager"]["median_s"] > 0


def test_half_precision_is_compared_with_float32() -> None:
    result = run(Job("bert_tiny", precision="bfloat16", layers=1, backend="eager"))
    assert 0 < result["difference"] == result["eager_difference"] < result["bound"]


def test_a_dead_child_is_a_row(tmp_path) -> None:
    row = _outcome(-11, tmp_path / "none.json", "Traceback\nboom")
    assert row == {"status": "crash", "error": "SIGSEGV: boom"}


def test_reports_are_counted() -> None:
    tasks = [SimpleNamespace(source="tuned", trials=32), SimpleNamespace(source="cache", trials=9)]
    report = SimpleNamespace(
        ops_total=10,
        ops_compiled=9,
        flops_total=200.0,
        flops_compiled=199.0,
        tasks=tasks,
        seconds={"measure": 1.25, "lower": 0.01},
    )
    summary = reports.summary(report)
    assert summary["tasks"] == {"tuned": 1, "cache": 1}
    assert summary["candidates_measured"] == 32
    kernels, operators, seconds = reports.describe(summary)
    assert "1 tuned, 1 from the cache" in kernels
    assert "9 of 10 compiled, 1 left to eager; 99.5 %" in operators
    assert seconds.endswith("measure 1.2")


class TestNetworkTable:
    @pytest.fixture
    def launched(self, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
        jobs: list[Job] = []

        def launch(job: Job, **_: object) -> dict[str, object]:
            jobs.append(job)
            if job.network == "dcgan":
                return {"status": "crash", "error": "SIGSEGV: boom", "process_s": 1.0}
            return {
                "status": "ok",
                "error": "",
                "process_s": 2.0,
                "difference": 1e-6,
                "eager_difference": 0.0,
                "bound": 1e-3,
                "first_call_s": 1.0,
                "report": None,
            }

        monkeypatch.setattr(networks, "launch", launch)
        return jobs

    def test_rows_are_kept_until_options_change(self, launched: list[Job], tmp_path) -> None:
        command = ["--only", "mobilenet_v2,dcgan", "--data", str(tmp_path / "networks.json")]
        page = tmp_path / "networks.md"
        assert networks.main([*command, "--out", str(page)]) == 1
        assert [job.network for job in launched] == ["mobilenet_v2", "dcgan"]
        assert "| MobileNet-V2 | 1 | float32 |  | ok | 1.0e-06 |" in page.read_text()
        assert "* DCGAN generator, float32, batch 1: crash: SIGSEGV: boom" in page.read_text()
        networks.main(command)
        assert len(launched) == 2
        networks.main([*command, "--effort", "none"])
        assert len(launched) == 4

    def test_a_second_process_must_find_the_cache(self, launched: list[Job], tmp_path) -> None:
        command = ["--only", "mobilenet_v2", "--warm", "--data", str(tmp_path / "networks.json")]
        assert networks.main(command) == 0
        cold, warm = launched
        assert warm == replace(cold, options={**cold.options, "on_miss": "error"})

    def test_half_precision_rows_follow_the_papers(self, launched: list[Job], tmp_path) -> None:
        networks.main(["--only", "gpt2,opt_1_3b", "--data", str(tmp_path / "networks.json")])
        assert [(job.network, job.precision) for job in launched] == [
            ("gpt2", "float32"),
            ("gpt2", "bfloat16"),
            ("opt_1_3b", "bfloat16"),
        ]


def test_an_unknown_network_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        networks.main(["--only", "resnet51"])
    assert stop.value.code == 2
    assert "resnet50" in capsys.readouterr().err


def test_results_are_written_with_their_directories(tmp_path) -> None:
    arguments.write_json(str(tmp_path / "a" / "b.json"), {"x": 1})
    assert json.loads((tmp_path / "a" / "b.json").read_text()) == {"x": 1}


def test_result_files_do_not_say_where_the_cache_was(tmp_path) -> None:
    path = tmp_path / "made" / "result.json"
    given = {"options": {"effort": "none", "cache_dir": "/home/somebody"}, "rows": []}
    arguments.write_json(str(path), given)
    assert json.loads(path.read_text()) == {"options": {"effort": "none"}, "rows": []}


def test_a_job_does_not_outlive_who_launched_it(tmp_path) -> None:
    told = tmp_path / "pid"

    def stop_once_it_runs() -> None:
        while not (told.exists() and told.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_once_it_runs, daemon=True).start()
    endless = SimpleNamespace(to_json=lambda: str(told))
    with pytest.raises(SystemExit):
        launch(endless, time_limit_s=30.0, module="tests.unit.benchmarks.endless")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)
